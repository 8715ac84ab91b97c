"""What convolutions take for themselves: by hand arithmetic, and what torch's memory events told of large images."""

from __future__ import annotations

import pytest
import torch

from autotune.estimates.workspace import possible_bytes, workspace_bytes

aten = torch.ops.aten
FULL, HALF = torch.float32, torch.bfloat16
ALL, INPUT = [True, True, True], [True, False, False]


def tensor(*size, dtype=FULL, last=False):
    made = torch.empty(*size, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


def forward(x, weight, stride=1, padding=1, transposed=False, groups=1, target="cpu"):
    options = ([stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], groups)
    y = aten.convolution(x, weight, None, *options)
    return workspace_bytes(target, aten.convolution.default, (x, weight, None, *options), {}, y)


def backward(x, weight, stride=1, padding=1, transposed=False, groups=1, wanted=ALL):
    options = ([stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], groups)
    y = aten.convolution(x, weight, None, *options)
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        y = y.to(memory_format=torch.channels_last)
    args = (y, x, weight, [weight.size(0)], *options, wanted)
    return workspace_bytes("cpu", aten.convolution_backward.default, args, {}, (x, weight, None))


def test_other_operations_are_not_reckoned_with():
    x = tensor(4, 4)
    assert workspace_bytes("cpu", aten.mm.default, (x, x), {}, x) is None


def test_a_convolution_holds_its_input_reordered_beside_its_result():
    assert forward(tensor(16, 32, 32, 32), tensor(32, 32, 3, 3)) == 4 * 16 * 32 * 32**2


def test_channels_are_rounded_up_to_sixteen():
    """40 to 48: when the result is copied from its blocks, those of the input are gone."""
    assert forward(tensor(16, 24, 16, 16), tensor(40, 24, 3, 3)) == 4 * 16 * 16**2 * 48


def test_an_image_is_read_as_it_lies_and_the_result_copied():
    assert forward(tensor(16, 3, 64, 64), tensor(64, 3, 7, 7), 2, 3) == 4 * 16 * 64 * 32**2


def test_channels_last_is_computed_in_place():
    x, weight = tensor(16, 64, 16, 16, last=True), tensor(64, 64, 3, 3, last=True)
    assert (forward(x, weight), backward(x, weight)) == (0, 0)


def test_both_images_are_reordered_for_the_gradient_of_the_weight():
    assert backward(tensor(16, 32, 32, 32), tensor(64, 32, 3, 3)) == 4 * 16 * (32 + 64) * 32**2


def test_the_input_of_a_frozen_weight_is_not_reordered_but_its_gradient_copied():
    assert backward(tensor(16, 32, 32, 32), tensor(64, 32, 3, 3), wanted=INPUT) == 4 * 16 * 64 * 32**2


@pytest.mark.parametrize(("dtype", "groups", "copies"), [(FULL, 1, 2), (HALF, 96, 2), (FULL, 96, 1.25)])
def test_the_gradient_of_a_strided_input_is_copied_once_more(dtype, groups, copies):
    """In blocks, beside the result; of depthwise kernels in half precision alone. 1.25 are the input and what comes of
    it, reordered for the weight's gradient."""
    x, weight = tensor(20, 96, 48, 48, dtype=dtype), tensor(96, 96 // groups, 3, 3, dtype=dtype)
    assert backward(x, weight, 2, groups=groups) == copies * x.nbytes


@pytest.mark.parametrize(
    ("width", "wanted", "expected"), [(5, ALL, 4 * 64 * 16 * 16 * 5 * 5), (3, ALL, 0), (5, INPUT, 0)]
)
def test_wide_depthwise_kernels_in_channels_last_have_a_block_of_gradients_for_each_channel(width, wanted, expected):
    """16 by 16 of 5 by 5."""
    x, weight = tensor(6, 64, 8, 8, last=True), tensor(64, 1, width, width, last=True)
    assert backward(x, weight, padding=width // 2, groups=64, wanted=wanted) == expected


def test_in_half_precision_an_image_has_sixteen_channels_for_each_of_theirs_too():
    """Of input and gradient 64 by 8 by 8, sixteenfold; blocks in both precisions."""
    x, weight = tensor(6, 64, 8, 8, dtype=HALF, last=True), tensor(64, 1, 5, 5, dtype=HALF, last=True)
    blocks, images = (2 + 4) * 64 * 16 * 16 * 5 * 5, 16 * 2 * (64 * 8 * 8) * 2
    assert backward(x, weight, padding=2, groups=64) == blocks + images


def test_an_input_that_is_part_of_another_is_copied_too():
    whole, weight = tensor(20, 96, 24, 24), tensor(48, 48, 1, 1)
    for of in (forward, backward):
        assert (
            of(whole[:, 48:], weight, padding=0) - of(tensor(20, 48, 24, 24), weight, padding=0) == 4 * 20 * 48 * 24**2
        )


MEASURED = [
    # batch, channels, side, channels, kernel, stride, padding, precision, and MiB forward and backward
    (20, 3, 96, 32, 4, 2, 1, FULL, 5.62, 5.98),
    (20, 48, 48, 96, 1, 1, 0, HALF, 8.44, 12.67),
    (20, 256, 32, 64, 1, 1, 0, HALF, 10.28, 12.56),
]


@pytest.mark.parametrize(
    ("batch", "first", "side", "second", "kernel", "stride", "padding", "dtype", "taken", "taken_back"), MEASURED
)
def test_what_convolutions_of_large_images_took(
    batch, first, side, second, kernel, stride, padding, dtype, taken, taken_back
):
    """Measured on one thread of an AMD EPYC (AVX-512 with bfloat16, no AMX), torch 2.13; all gradients wanted."""
    x, weight = tensor(batch, first, side, side, dtype=dtype), tensor(second, first, kernel, kernel, dtype=dtype)
    assert forward(x, weight, stride, padding) == pytest.approx(taken * 2**20, rel=0.06)
    assert backward(x, weight, stride, padding) == pytest.approx(taken_back * 2**20, rel=0.06)


@pytest.mark.parametrize(
    ("channels", "groups", "dtype", "taken", "taken_back"),
    [(24, 8, FULL, 1.88, 1.87), (128, 32, FULL, 10.02, 10.00), (24, 8, HALF, 0.94, 0.94)],
)
def test_groups_of_other_than_whole_blocks_are_not_rounded_up(channels, groups, dtype, taken, taken_back):
    """Measured, of 20 images of 32 by 32, 3 by 3."""
    x, weight = tensor(20, channels, 32, 32, dtype=dtype), tensor(channels, channels // groups, 3, 3, dtype=dtype)
    assert forward(x, weight, groups=groups) == pytest.approx(taken * 2**20, rel=0.03)
    assert backward(x, weight, groups=groups) == pytest.approx(taken_back * 2**20, rel=0.03)


SIXTEEN = tensor(16, 32, 8, 8), tensor(64, 32, 3, 3)


@pytest.mark.parametrize(
    ("x", "weight", "groups", "expected"),
    [
        (*SIXTEEN, 1, 4 * (16 * 32 * 64 + 64 * 32 * 9 + 16 * 64 * 64)),
        (
            tensor(16, 32, 8, 8, dtype=HALF),
            tensor(64, 32, 3, 3, dtype=HALF),
            1,
            2 * (16 * 32 * 64 + 64 * 32 * 9 + 2**16),
        ),
        (tensor(16, 32, 8, 8), tensor(64, 16, 3, 3), 2, 4 * (16 * 32 * 64 + 64 * 16 * 9 + 16 * 64 * 64)),
        (tensor(16, 32, 8, 8, last=True), tensor(64, 32, 3, 3, last=True), 1, 0),
        (tensor(16, 1, 8, 8), tensor(64, 1, 3, 3), 1, 4 * 16 * 64 * 64),
        (tensor(16, 32, 8, 8), tensor(32, 1, 3, 3), 32, 0),
        (tensor(16, 32, 8, 8, dtype=torch.float64), tensor(64, 32, 3, 3, dtype=torch.float64), 1, 0),
    ],
    ids=["planes", "bf16", "groups", "channels_last", "one channel lies as both", "depthwise is torch's", "float64"],
)
def test_a_convolution_on_a_gpu_works_on_channels_last_copies(x, weight, groups, expected):
    assert forward(x, weight, groups=groups, target="cuda") == expected


@pytest.mark.parametrize(("side", "expected"), [(1, 0), (3, 98.14)])
def test_a_matrix_product_takes_no_workspace_on_a_card(side: int, expected: float):
    """MiB that an H200 took in forward of ResNet-50's convolutions, at 64 images."""
    found = forward(tensor(64, 64, 56, 56), tensor(64, 64, side, side), 1, side // 2, target="cuda")
    assert found / 2**20 == pytest.approx(expected, abs=0.01)


def test_a_transposed_one_is_no_such_product():
    """No card's allocations told of one: copies are planned for. A 1x1 weight lies in both layouts."""
    x, weight = tensor(64, 64, 56, 56), tensor(64, 64, 1, 1)
    assert forward(x, weight, 1, 0, transposed=True, target="cuda") == 2 * x.nbytes


@pytest.mark.parametrize(
    ("groups", "width", "expected"),
    [(1, 3, 0), (2, 3, 9), (2, 1, 0), (64, 3, 0), (2, 5, 25)],
    ids=["of one group", "3 by 3", "1 by 1", "depthwise, which is torch's own", "5 by 5"],
)
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_a_grouped_convolution_may_take_a_copy_of_its_input_for_each_place(target, groups, width, expected):
    """On a card, in its upper end."""
    x, weight = tensor(8, 64, 20, 20, dtype=torch.float16), tensor(64, 64 // groups, width, width, dtype=torch.float16)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    found = possible_bytes(target, aten.convolution.default, args, {}, None)
    assert found == (expected * x.nbytes if target == "cuda" else 0)
