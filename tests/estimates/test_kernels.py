"""What kernels take for themselves: the table's entries by hand arithmetic, and against torch's own memory events."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autotune.estimates.workspace.cpu_kernels import kernel_of
from autotune.estimates.workspace.kernel import Kernel, Like, like
from autotune.estimates.workspace.recurrent import workspace_bytes
from autotune.estimates.workspace.slow_convolution import Convolution

aten = torch.ops.aten


def scratch(func, *args, target="cpu"):
    """Of an operation on fake tensors."""
    with torch.device("meta"):
        return kernel_of(target, func, args, {}, func(*args)).num_bytes()


def tensor(*size, dtype=torch.float32, last=False):
    made = torch.empty(*size, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


def convolution(x, weight, stride=1, padding=1):
    return scratch(aten.convolution.default, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)


def test_a_convolution_holds_its_input_and_weight_reordered_beside_its_result():
    assert convolution(tensor(16, 32, 32, 32), tensor(32, 32, 3, 3)) == 4 * (16 * 32 * 32**2 + 32 * 32 * 9)


def test_channels_are_rounded_up_to_sixteen():
    """40 to 48: when the result is copied from its blocks, those of the input and the weight are gone."""
    assert convolution(tensor(16, 24, 16, 16), tensor(40, 24, 3, 3)) == 4 * 16 * 16**2 * 48


def test_an_image_is_read_as_it_lies_and_the_result_copied():
    assert convolution(tensor(16, 3, 64, 64), tensor(64, 3, 7, 7), 2, 3) == 4 * 16 * 64 * 32**2


def test_channels_last_is_computed_in_place_but_for_the_weight():
    assert convolution(tensor(16, 64, 16, 16, last=True), tensor(64, 64, 3, 3, last=True)) == 4 * 64 * 64 * 9


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_one_thread_multiplies_the_pixels_of_less_than_sixteen_images_as_they_lie():
    weight = tensor(2, 32, 1, 1)
    assert convolution(tensor(15, 32, 8, 8), weight, padding=0) == 0
    assert convolution(tensor(16, 32, 8, 8), weight, padding=0) == 4 * (16 * 32 * 8**2 + 16 * 32 + 16 * (16 - 2) * 8**2)


@pytest.mark.usefixtures("one_thread")
def test_the_gradients_of_such_pixels_take_nothing_either():
    x, weight, y = tensor(6, 32, 8, 8), tensor(2, 32, 1, 1), tensor(6, 2, 8, 8)
    more = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    assert scratch(aten.convolution_backward.default, y, x, weight, [2], *more) == 0


def depthwise_backward(x, width, stride, wanted, channels=64):
    """Of one 3 by ``width`` kernel for each channel."""
    padding, last = [1, width // 2], x.is_contiguous(memory_format=torch.channels_last)
    weight = tensor(channels, 1, 3, width, dtype=x.dtype, last=last)
    with torch.device("meta"):
        y = aten.convolution(x, weight, None, [stride] * 2, padding, [1, 1], False, [0, 0], channels)
    y = y.to(memory_format=torch.channels_last) if last else y
    more = ([stride] * 2, padding, [1, 1], False, [0, 0], channels, wanted)
    return scratch(aten.convolution_backward.default, y, x, weight, [0], *more)


WEIGHT, INPUT = [False, True, False], [True, False, False]


@pytest.mark.usefixtures("one_thread")
def test_narrow_depthwise_kernels_read_images_in_channels_last_as_they_lie():
    """The weight's gradient is there in blocks, and twice more when it is put in order."""
    assert depthwise_backward(tensor(6, 64, 8, 8, last=True), 3, 1, WEIGHT) == 4 * 64 * 3 * 3 * 2


@pytest.mark.usefixtures("one_thread")
def test_wide_depthwise_kernels_in_channels_last_have_a_block_of_gradients_for_each_channel():
    """16 by 16 of 3 by 5. The kernel in blocks beside is as large as its gradient, which is a result."""
    blocks = 4 * 64 * 16 * 16 * 3 * 5
    assert depthwise_backward(tensor(6, 64, 8, 8, last=True), 5, 1, WEIGHT) == blocks


def test_in_half_precision_an_image_has_sixteen_channels_for_each_of_theirs_too():
    """Of input and gradient 64 by 8 by 8, sixteenfold; blocks in both precisions."""
    x = tensor(6, 64, 8, 8, dtype=torch.bfloat16, last=True)
    blocks, images = (2 + 4) * 64 * 16 * 16 * 3 * 5, 16 * 2 * (64 * 8 * 8) * 2
    assert blocks + images <= depthwise_backward(x, 5, 1, WEIGHT) <= 1.05 * (blocks + images)


def test_wide_depthwise_kernels_in_planes_unfold_one_channel_of_one_image():
    assert depthwise_backward(tensor(6, 64, 8, 8), 5, 1, WEIGHT) == 4 * 3 * 5 * 8 * 8


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_the_input_of_a_strided_depthwise_kernel_is_copied_once_more_in_half_precision(dtype, copies):
    """Its gradient in blocks, beside the result; measured on 20 images of 96 channels of 49 by 49: 17.59 MiB both."""
    x = tensor(20, 96, 49, 49, dtype=dtype)
    assert depthwise_backward(x, 3, 2, INPUT, channels=96) == copies * x.nbytes


@pytest.mark.parametrize(("channels", "copies"), [(16, 1), (32, 2)])
def test_the_input_of_a_strided_grouped_kernel_is_copied_once_more_where_groups_are_wide(channels, copies):
    """Measured on 20 images of 48 by 48, four groups of so many channels: 11.25 MiB; 45 MiB of 22.5."""
    x, weight = tensor(20, 4 * channels, 48, 48), tensor(4 * channels, channels, 3, 3)
    y, more = tensor(20, 4 * channels, 24, 24), ([2, 2], [1, 1], [1, 1], False, [0, 0], 4, INPUT)
    assert scratch(aten.convolution_backward.default, y, x, weight, [0], *more) == copies * x.nbytes


FULL, HALF = torch.float32, torch.bfloat16
MEASURED = [
    # batch, channels, side, channels, kernel, stride, padding, transposed, channels_last, precision, and MiB both ways
    (20, 32, 48, 3, 4, 2, 1, True, False, FULL, 5.99, 5.62),
    (20, 64, 24, 32, 4, 2, 1, True, False, FULL, 11.25, 8.44),
    (20, 32, 24, 5, 4, 2, 1, True, False, FULL, 1.76, 2.82),
    (20, 32, 24, 12, 4, 2, 1, True, False, FULL, 4.22, 4.23),
    (20, 32, 24, 24, 4, 2, 1, True, False, FULL, 8.44, 7.05),
    (20, 3, 96, 32, 4, 2, 1, False, False, FULL, 5.62, 5.98),
    (20, 12, 48, 32, 3, 2, 1, False, False, FULL, 1.41, 4.22),
    (20, 24, 48, 32, 3, 2, 1, False, False, FULL, 5.66, 8.41),
    (20, 3, 96, 32, 3, 1, 1, False, False, FULL, 22.50, 31.65),
    (20, 8, 48, 32, 3, 1, 1, False, False, FULL, 5.62, 7.04),
    (20, 12, 48, 32, 3, 1, 1, False, False, FULL, 5.62, 8.44),
    (20, 64, 32, 64, 3, 1, 1, False, True, FULL, 0.15, 0.28),
    (20, 32, 48, 3, 4, 2, 1, True, False, HALF, 3.01, 2.97),
    (20, 32, 24, 12, 4, 2, 1, True, False, HALF, 2.11, 0.77),
    (20, 12, 48, 32, 3, 2, 1, False, False, HALF, 0.70, 2.10),
    (20, 12, 48, 32, 3, 1, 1, False, False, HALF, 2.81, 3.17),
    (20, 24, 48, 24, 1, 1, 0, False, False, HALF, 3.80, 5.63),
    (20, 48, 48, 96, 1, 1, 0, False, False, HALF, 8.44, 12.67),
    (20, 256, 32, 64, 1, 1, 0, False, False, HALF, 10.28, 12.56),
    (20, 64, 32, 64, 3, 1, 1, False, True, HALF, 0.08, 0.41),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    (
        "batch",
        "first",
        "side",
        "second",
        "kernel",
        "stride",
        "padding",
        "transposed",
        "last",
        "dtype",
        "forward",
        "backward",
    ),
    MEASURED,
)
def test_what_convolutions_took(
    batch, first, side, second, kernel, stride, padding, transposed, last, dtype, forward, backward
):
    """On one thread (AVX-512 with bfloat16, no AMX), but for buffers of a few hundred KiB; all gradients wanted."""
    x = tensor(batch, first, side, side, dtype=dtype, last=last)
    weight = tensor(*((first, second) if transposed else (second, first)), kernel, kernel, dtype=dtype, last=last)
    options = ([stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], 1)
    with torch.device("meta"):
        y = aten.convolution(x, weight, None, *options)
    y = y.to(memory_format=torch.channels_last) if last else y
    found = kernel_of("cpu", aten.convolution.default, (x, weight, None, *options), {}, y).num_bytes()
    assert found == pytest.approx(forward * 2**20, rel=0.03, abs=0.4 * 2**20)
    found = scratch(aten.convolution_backward.default, y, x, weight, [second], *options, [True, True, True])
    assert found == pytest.approx(backward * 2**20, rel=0.03, abs=0.4 * 2**20)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("channels", "groups", "dtype", "forward", "backward"),
    [
        (24, 8, FULL, 1.88, 1.87),
        (40, 5, FULL, 3.14, 6.25),
        (64, 2, FULL, 5.07, 10.00),
        (96, 4, FULL, 7.58, 15.00),
        (128, 32, FULL, 10.02, 10.00),
        (24, 8, HALF, 0.94, 0.94),
        (96, 4, HALF, 3.79, 3.75),
    ],
)
def test_groups_of_other_than_whole_blocks_are_not_rounded_up(channels, groups, dtype, forward, backward):
    """Measured, of 20 images of 32 by 32, 3 by 3."""
    x, weight = tensor(20, channels, 32, 32, dtype=dtype), tensor(channels, channels // groups, 3, 3, dtype=dtype)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    assert scratch(aten.convolution.default, x, weight, None, *options) == pytest.approx(forward * 2**20, rel=0.03)
    more = ([channels], *options, [True, True, True])
    found = scratch(aten.convolution_backward.default, x, x, weight, *more)
    assert found == pytest.approx(backward * 2**20, rel=0.03)


@pytest.mark.parametrize(("num_threads", "expected"), [(1, 2.30), (2, 4.59)])
def test_kernels_of_more_than_fourteen_have_parts_of_the_weights_gradient_in_each_thread(
    num_threads, expected, monkeypatch
):
    """Measured, of a patch of 16 by 16 and 192 channels, whose weight is 0.56 MiB."""
    monkeypatch.setattr("autotune.estimates.workspace.kernel._num_threads", num_threads)
    x, weight, y = tensor(20, 3, 64, 64), tensor(192, 3, 16, 16), tensor(20, 192, 4, 4)
    options = ([16, 16], [0, 0], [1, 1], False, [0, 0], 1, WEIGHT)
    found = scratch(aten.convolution_backward.default, y, x, weight, [0], *options)
    assert found == pytest.approx(expected * 2**20, rel=0.06)


def test_an_input_that_is_part_of_another_is_copied_in_backward_too():
    whole = tensor(20, 96, 24, 24)
    weight, y = tensor(48, 48, 1, 1), tensor(20, 48, 24, 24)
    options = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    part, own = (
        scratch(aten.convolution_backward.default, y, x, weight, [48], *options)
        for x in (whole[:, 48:], whole[:, :48] + 0)
    )
    assert part - own == 4 * 20 * 48 * 24 * 24


def taken(call, *args):
    """What torch takes for itself in an operation, by its own memory events."""
    real = [torch.ones_like(one) if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in args]
    call(*real)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        results = call(*real)
    sizes = [one.nbytes() for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    assert results is not None
    return max(itertools.accumulate(sizes)) - sum(sizes)


def real(*size, dtype=torch.float32, last=False):
    made = torch.zeros(*size, dtype=dtype)
    return made.to(memory_format=torch.channels_last) if last else made


IMAGE, HALF_IMAGE = real(4, 8, 64, 64), real(4, 8, 64, 64, dtype=HALF)
POOLED, INDICES = torch.ops.aten.max_pool2d_with_indices(IMAGE, [2, 2], [2, 2])
LAST_POOLED = POOLED.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mse_loss.default, (IMAGE, IMAGE, 1)),
        (aten.mse_loss.default, (HALF_IMAGE, HALF_IMAGE, 1)),
        (aten.smooth_l1_loss.default, (IMAGE, IMAGE, 1)),
        (aten.huber_loss.default, (IMAGE, IMAGE, 1)),
        (aten.binary_cross_entropy_with_logits.default, (IMAGE, IMAGE, None, None, 1)),
        (aten._log_softmax.default, (IMAGE.contiguous(memory_format=torch.channels_last), 1, False)),
        (aten._log_softmax.default, (IMAGE, 1, False)),
        (aten.upsample_nearest2d.default, (POOLED, [64, 64])),
        (aten.upsample_bilinear2d.default, (POOLED, [64, 64], False)),
        (aten.upsample_bilinear2d.default, (LAST_POOLED, [64, 64], False)),
        (aten.upsample_bilinear2d.default, (IMAGE, [128, 128], False)),
        (aten.upsample_bilinear2d_backward.default, (IMAGE, [64, 64], [4, 8, 32, 32], False)),
        (aten.upsample_nearest2d_backward.default, (IMAGE.transpose(2, 3), [64, 64], [4, 8, 32, 32])),
        (
            aten.max_pool2d_with_indices_backward.default,
            (POOLED, IMAGE, [2, 2], [2, 2], [0, 0], [1, 1], False, INDICES),
        ),
        (
            aten.max_pool2d_with_indices_backward.default,
            (LAST_POOLED, IMAGE, [2, 2], [2, 2], [0, 0], [1, 1], False, INDICES),
        ),
        (aten.avg_pool2d_backward.default, (POOLED, IMAGE, [2, 2], [2, 2], [0, 0], False, True, None)),
        (aten.avg_pool2d_backward.default, (LAST_POOLED, IMAGE, [2, 2], [2, 2], [0, 0], False, True, None)),
    ],
)
def test_torchs_own_kernels_take_what_the_table_says(func, args):
    found = kernel_of("cpu", func, args, {}, func(*args)).num_bytes()
    assert found == pytest.approx(taken(func, *args), abs=8192)


def recurrent(dtype, steps=64, batch=20, features=256, hidden=512):
    """Input, weights and states of an LSTM's layer."""
    weights = [tensor(4 * hidden, size, dtype=dtype) for size in (features, hidden)]
    weights += [tensor(4 * hidden, dtype=dtype) for _ in range(2)]
    return tensor(steps, batch, features, dtype=dtype), weights, [tensor(batch, hidden, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"), [(torch.float32, 16.22, 22.55), (torch.bfloat16, 3.24, 11.85)]
)
def test_a_recurrent_layer_has_its_weights_in_blocks_and_what_goes_into_its_gates(dtype, forward, backward):
    """Measured, in MiB: weights of 6 MiB in single precision, gates of 10."""
    x, weights, states = recurrent(dtype)
    options = [False, [], 2, 512, 1, True, False, False, True]
    found = scratch(aten.mkldnn_rnn_layer.default, x, *weights, *states, *options)
    y = tensor(64, 20, 512, dtype=dtype)
    more = [y, *states, y, None, None, False, 2, 512, 1, True, True, False, [], False, tensor(0, dtype=torch.uint8)]
    found_backward = scratch(aten.mkldnn_rnn_layer_backward.default, x, *weights, *states, *more)
    assert found == pytest.approx(forward * 2**20, rel=0.08)
    assert found_backward == pytest.approx(backward * 2**20, rel=0.08)


NO_BF16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 on this CPU")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NO_BF16)])
def test_a_recurrent_layers_workspace_is_reckoned_from_a_few_sequences(dtype):
    """Against torch's own, of another number of them."""
    x, weights, states = recurrent(dtype, steps=32, batch=37, features=24, hidden=64)
    call = (x, *weights, *states, False, [], 2, 64, 1, True, False, False, True)
    real = [torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, torch.Tensor) else one for one in call]
    assert workspace_bytes(call) == pytest.approx(aten.mkldnn_rnn_layer(*real)[3].nbytes, rel=0.02)


def test_one_small_image_is_unfolded_into_columns():
    assert convolution(tensor(1, 64, 12, 12), tensor(96, 64, 3, 3)) == 4 * 12**2 * 64 * 9


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("x", "weight", "stride", "dilation", "groups", "dtype"),
    [
        ((15, 8, 4, 4), (8, 8, 1, 1), 1, 1, 1, torch.float32),
        ((16, 8, 4, 4), (8, 8, 1, 1), 1, 1, 1, torch.float32),
        ((6, 8, 4, 4), (8, 8, 1, 1), 2, 1, 1, torch.float32),
        ((6, 8, 4, 4), (8, 8, 1, 1), 1, 2, 1, torch.float32),
        ((6, 8, 4, 4), (8, 8, 1, 3), 1, 1, 1, torch.float32),
        ((6, 8, 4), (8, 8, 1), 1, 1, 1, torch.float32),
        ((6, 8, 4, 4, 4), (8, 8, 1, 1, 1), 1, 1, 1, torch.float32),
        ((6, 8, 4, 4), (8, 4, 1, 1), 1, 1, 2, torch.float32),
        ((1, 8, 64, 40), (8, 8, 3, 3), 1, 1, 1, torch.float32),
        ((1, 8, 64, 41), (8, 8, 3, 3), 1, 1, 1, torch.float32),
        ((1, 8, 8, 8), (8, 8, 3, 3), 2, 1, 1, torch.float32),
        ((1, 8, 8, 8), (8, 4, 3, 3), 1, 1, 2, torch.float32),
        ((1, 8, 8, 8), (8, 8, 4, 4), 1, 1, 1, torch.float32),
        ((1, 8, 8), (8, 8, 4), 1, 1, 1, torch.float32),
        ((6, 8, 8, 8), (8, 8, 3, 3), 1, 1, 1, torch.float64),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_who_computes_a_convolution_is_as_torch_says(
    x, weight, stride, dilation, groups, dtype, transposed, num_threads, one_thread
):
    torch.set_num_threads(num_threads)
    x, weight, dims = torch.empty(x, dtype=dtype), torch.empty(weight, dtype=dtype), len(x) - 2
    options = ([stride] * dims, [0] * dims, [dilation] * dims, transposed, [0] * dims, groups)
    chosen = torch._C._select_conv_backend(x, weight, None, *options, None)
    assert Convolution(like(x), like(weight), *options).is_slow(num_threads) == (".Slow" in str(chosen))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((tensor(3, 4), tensor(3, 4)), 0),
        ((tensor(3, 4), tensor(3, 4, dtype=torch.bfloat16)), 3 * 4 * 4),
        ((tensor(3, 4, dtype=torch.bfloat16), 2.0), 0),
    ],
)
def test_an_operand_of_another_type_is_cast_whole(args, expected):
    assert scratch(aten.add.Tensor, *args) == expected


@pytest.mark.parametrize(("last", "expected"), [(False, 0), (True, 4 * 2 * 3 * 8 * 8)])
def test_a_softmax_reads_its_input_in_order(last, expected):
    x = tensor(2, 3, 8, 8, last=last)
    assert scratch(aten._log_softmax.default, x, 1, False) == expected
    assert scratch(aten._softmax_backward_data.default, tensor(2, 3, 8, 8), x, 1, torch.float32) == expected


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
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    assert scratch(aten.convolution.default, *args, target="cuda") == expected


@pytest.mark.parametrize(("wanted", "share"), [((True, True), 1), ((False, True), 1), ((False, False), 0)])
def test_so_does_its_backward(wanted, share):
    """One gradient after the other, each from copies of two of the three, with one of the third's shape."""
    x, weight = SIXTEEN
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [*wanted, False])
    found = scratch(aten.convolution_backward.default, tensor(16, 64, 8, 8), x, weight, *rest, target="cuda")
    assert found == share * 4 * (16 * 32 * 64 + 64 * 32 * 9 + 16 * 64 * 64)


def test_a_cpus_kernels_are_no_gpus():
    args = (tensor(16, 32, 32, 32), torch.rand(1), True)
    assert kernel_of("cuda", aten.native_dropout.default, args, {}, args[:2]) is None


def test_what_is_not_in_the_table_is_not_reckoned():
    x = tensor(3)
    assert kernel_of("cpu", aten.tanh.default, (x,), {}, x) is None


def test_a_kernel_is_extended_by_its_shapes():
    """Rows of 2 and 3 to 7; what is no batch stays."""
    first, second = (Kernel.of(lambda result, x: x.num_bytes, None, (tensor(rows, 5),), {}) for rows in (2, 3))
    assert first.extended(second, 5).args == (Like((7, 5), (5, 1), torch.float32),)
    assert first.extended(second, 5).num_bytes() == 7 * 5 * 4


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 4, 4)])
@pytest.mark.parametrize("last", [False, True])
def test_the_order_in_memory_is_torchs(size, last):
    x = tensor(*size, last=last)
    found = like(x)
    assert found.is_dense() == x.is_contiguous()
    assert found.is_dense(channels_last=True) == x.is_contiguous(memory_format=torch.channels_last)
    assert found.is_channels_last() == (torch._prims_common.suggest_memory_format(x) == torch.channels_last)
