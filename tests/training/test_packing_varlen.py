"""Packed rows for models that keep samples apart by ``cu_seqlens``, as kernels of attention for varying lengths do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from line_task import training_of
from torch import nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.utils.data import SequentialSampler

import autotune
from autotune.errors import PlanError
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.precision import Precision

LENGTHS = [9, 3, 5, 2, 8, 4, 6, 7]
WIDTH = 8
PACKED = Batch(tokens=20, effective=8, packed=True)


def texts():
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(1, 32, (length,), generator=drawn) for length in LENGTHS]


def in_a_row(samples):
    """As flash-attention's models take them: tokens, and where each sample begins and ends among them."""
    lengths = torch.tensor([len(one) for one in samples])
    ends = pad(lengths.cumsum(0), (1, 0)).int()
    return {"tokens": torch.cat(samples), "cu_seqlens": ends, "max_seqlen": int(lengths.max())}


def one_by_one(samples):
    """A loss over samples of unlike lengths needs no padding: it takes a list."""
    return list(samples)


def by_mask(q, k, v, cu_seqlens, max_seqlen):
    """Blocks on the diagonal."""
    place = torch.arange(len(q))
    sample = torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True)
    mask = (sample[:, None] == sample) & (place <= place[:, None])
    return scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask)[0].transpose(0, 1)


def by_pieces(q, k, v, cu_seqlens, max_seqlen):
    """One sample after the other."""
    found = []
    for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        assert stop - start <= max_seqlen
        part = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        found.append(scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1))
    return torch.cat(found)


def by_kernel(q, k, v, cu_seqlens, max_seqlen):
    """Torch's own, for cards."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(-1, 0))


def blind(q, k, v, cu_seqlens, max_seqlen):
    """Takes them, and does not look."""
    part = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1)


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.qkv, self.out = attend, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cu_seqlens, max_seqlen):
        parts = self.qkv(x).view(-1, 3, 2, WIDTH // 2).unbind(1)
        return x + self.out(self.attend(*parts, cu_seqlens, max_seqlen).flatten(1))


class Varlen(nn.Module):
    """Of (tokens,) of samples one after the other; places begin anew in each."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(32, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens, cu_seqlens, max_seqlen):
        number = torch.arange(len(tokens))
        starts = cu_seqlens[torch.searchsorted(cu_seqlens[1:].contiguous(), number, right=True)]
        x = self.embed(tokens) + self.places(number - starts)
        for block in self.blocks:
            x = block(x, cu_seqlens, max_seqlen)
        return self.head(x)


def summed(model, batch):
    """Over all tokens but each sample's first, of a row or of a list of samples."""
    rows = [batch] if isinstance(batch, dict) else [in_a_row([one]) for one in batch]
    losses, count = [], 0
    for row in rows:
        wanted = row["tokens"].roll(-1)
        wanted[row["cu_seqlens"][1:].long() - 1] = -100
        losses.append(cross_entropy(model(**row), wanted, reduction="sum"))
        count += int((wanted != -100).sum())
    return torch.stack(losses).sum(), torch.tensor(count)


def job(attend, **pieces):
    return autotune.Task(
        **{
            "build_model": lambda: Varlen(attend),
            "build_dataset": texts,
            "build_sampler": SequentialSampler,
            "build_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "compute_loss": summed,
            "collate": one_by_one,
            "length": len,
            "pack": in_a_row,
            "batch_size": 8,
            "blocks": ("blocks",),
            **pieces,
        }
    )


@pytest.mark.parametrize("attend", [by_mask, by_pieces])
def test_outputs_of_a_row_are_those_of_its_samples_alone(attend):
    training = training_of(job(attend), batch=PACKED)
    seen = 0
    for row in training.loader:
        assert row["cu_seqlens"].dtype == torch.int32
        assert row["tokens"].shape == (row["cu_seqlens"][-1],)
        assert len(row["tokens"]) <= 20
        with torch.no_grad():
            together = training.model(**row).tensor_split(row["cu_seqlens"][1:-1].long())
            for one, tokens in zip(together, row["tokens"].tensor_split(row["cu_seqlens"][1:-1].long()), strict=True):
                torch.testing.assert_close(one, training.model(**in_a_row([tokens])))
                seen += len(tokens)
    assert seen == sum(LENGTHS)


@pytest.mark.parametrize("rows", [{}, {"checkpointing": Checkpointing(kind="blocks")}])
@pytest.mark.parametrize("attend", [by_mask, by_pieces])
def test_gradients_of_a_step_of_rows_are_those_of_its_samples(attend, rows):
    found = []
    for settings in ({"batch": Batch(micro=8)}, {"batch": PACKED, **rows}):
        training = training_of(job(attend), **settings)
        hook = training.optimizer.register_step_pre_hook(
            lambda optimizer, *_: found.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])
        )
        total = sum(float(one.loss) * one.weight for one in map(training.step, training.loader))
        hook.remove()
        found.append(total)
    (whole, loss), (parts, packed_loss) = found[:2], found[2:]
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_in_bf16_samples_are_kept_apart_too():
    assert training_of(job(by_mask), batch=PACKED, precision=Precision(kind="bf16")).batch == PACKED


def test_a_model_that_takes_cu_seqlens_and_does_not_look_is_refused():
    with pytest.raises(PlanError, match="samples see each other"):
        training_of(job(blind), batch=PACKED)


def wrong(samples, change):
    row = in_a_row(samples)
    return {**row, "cu_seqlens": change(row["cu_seqlens"])}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ends: ends[[0, -1]], "packing changes the loss: .* over 11 packed, and .* over 9 padded"),
        (lambda ends: ends + (ends > 0) * (ends < ends[-1]), "packing changes this model's gradient"),
        (lambda ends: None, "a row of samples, or the same padded, raises TypeError"),
    ],
)
def test_cu_seqlens_that_are_wrong_are_refused(change, words):
    """One sample, ends that are one too far, none."""
    with pytest.raises(PlanError, match=words):
        training_of(job(by_mask, pack=partial(wrong, change=change)), batch=PACKED)


def test_a_kernel_that_the_device_does_not_have_is_named():
    with pytest.raises(PlanError, match=r"raises NotImplementedError: .*_flash_attention_forward"):
        training_of(job(by_kernel), batch=PACKED)


@pytest.mark.parametrize("has_positions", [True, False])
def test_what_transformers_collates_for_flash_attention(has_positions):
    """Its models on a CPU keep samples apart by position_ids; cu_seq_lens_q, which is beside them, is for a kernel."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=32, bos_token_id=0, eos_token_id=0, use_cache=False)
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=has_positions)

    def padded(samples):
        ids = nn.utils.rnn.pad_sequence([torch.tensor(one["input_ids"]) for one in samples], True)
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(one["input_ids"])) for one in samples], True)
        return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}

    def compute_loss(model, batch):
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        found = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        return found, (batch["labels"][:, 1:] != -100).sum()

    task = job(
        by_mask,
        build_model=lambda: transformers.LlamaForCausalLM(config),
        build_dataset=lambda: [{"input_ids": one.tolist(), "labels": one.tolist()} for one in texts()],
        length=lambda sample: len(sample["input_ids"]),
        collate=padded,
        pack=collator,
        compute_loss=compute_loss,
        blocks=(),
    )
    if not has_positions:
        with pytest.raises(PlanError, match="samples see each other"):
            training_of(task, batch=PACKED)
        return
    rows = [*training_of(task, batch=PACKED).loader]
    assert all(row["cu_seq_lens_q"][-1] == row["input_ids"].numel() <= 20 for row in rows)
    assert all(isinstance(row["max_length_q"], int) for row in rows)
