"""Whether a plan's peak holds for every batch that its samples can make, and what batches of tokens gain.

    python -m benchmarks.lengths --keep          # 20 laws of lengths, 100 plans each
    python -m benchmarks.lengths --jobs --keep   # three jobs, in processes of their own

Laws: 5,000 samples are drawn by each, and a step's memory is a law of its number of samples, of tokens, and of tokens
times length, with shares drawn for each plan. The budget lies between one of the longest samples and 64. The plan has
the largest batch that is within it, as far as the one tells that is measured: of all lengths read, of 2,000 read, with
the bound on the others that is stated, or of the first 64 batches. Then a year of epochs is drawn, each with its own
place of the longest sample, and a plan is over its budget where any batch is. Of plans of tokens, twelve epochs are cut
by ``TokenCut``. Bars: 0 over where all lengths are read; where some are, no more than the risks that are stated add up
to, and with a single outlier no more than the chances add up to that it was not read, which are stated too.
A job that is over halves its batch: that is ``benchmarks.growing_back``, with lengths that double.

Jobs: padded batches of fixed size, and as many tokens as these have where they are largest: peaks of both by their own
largest batches, and tokens that count (no padding) a second of processor time, which other work on the machine does not
change much, by turns. Bar: 1.5 times, within the peak of the other. The fourth job, a Llama of transformers, is also
packed: in rows of as many tokens, and of as many as the longest sample has.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import autotune
from autotune.data.token_batches import TokenCut, extremes
from autotune.measure.lengths import find_lengths, longest_batches
from autotune.measure.processes import own_peak_bytes
from autotune.measure.tail import bound
from autotune.plan import Plan
from autotune.randomness import seed_everything
from autotune.techniques import Settings
from autotune.techniques.batch import Batch

from .rows import save_rows

SAMPLES, PLANS, EPOCHS, READ, SEEN = 5000, 100, 365, 2000, 64
STEP, TOKEN_PLANS, TOKEN_EPOCHS = 64, 5, 12
Law = Callable[[torch.Generator], Tensor]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", action="store_true", help="the four jobs in place of the laws")
    parser.add_argument("--plans", type=int, default=PLANS)
    parser.add_argument("--only", help="the laws, or jobs, with this in their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs=2, metavar=("JOB", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help="add the rows to benchmarks/results/lengths-cpu.jsonl")
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run_job(*arguments.run)))
        return
    if arguments.jobs:
        rows = [compare(job, arguments.rounds) for job in JOBS if (arguments.only or "") in job]
    else:
        names = [name for name in LAWS if (arguments.only or "") in name]
        rows = [of_law(name, arguments.plans) for name in names]
        tell_all(rows)
    if arguments.keep:
        print(save_rows("lengths", "cpu", rows))


def _normal(g: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, generator=g, dtype=torch.float64)


def _uniform(g: torch.Generator) -> Tensor:
    return torch.rand(SAMPLES, generator=g, dtype=torch.float64)


def _exponential(g: torch.Generator) -> Tensor:
    return -torch.log1p(-_uniform(g))


def _log_normal(sigma: float, most: float = math.inf) -> Law:
    return lambda g: (sigma * _normal(g) + 4).exp().clamp(max=most)


def _with_outliers(num: int, times: float) -> Law:
    def law(g: torch.Generator) -> Tensor:
        lengths = _log_normal(0.5)(g)
        lengths[torch.randperm(SAMPLES, generator=g)[:num]] = times * 4 * lengths.median()
        return lengths

    return law


LAWS: dict[str, Law] = {
    "log-normal 0.3": _log_normal(0.3),
    "log-normal 0.5": _log_normal(0.5),
    "log-normal 0.8": _log_normal(0.8),
    "log-normal 1.2": _log_normal(1.2),
    "log-normal 0.8, cut at 512": _log_normal(0.8, 512),
    "log-normal 1.2, cut at 1024": _log_normal(1.2, 1024),
    "exponential": lambda g: 80 * _exponential(g),
    "gamma 2": lambda g: 40 * (_exponential(g) + _exponential(g)),
    "gamma 4": lambda g: 20 * sum((_exponential(g) for _ in range(4)), torch.zeros(())),
    "Weibull 0.5": lambda g: 20 * _exponential(g) ** 2,
    "Weibull 0.7": lambda g: 50 * _exponential(g) ** (1 / 0.7),
    "normal": lambda g: 200 + 40 * _normal(g),
    "uniform": lambda g: 500 * _uniform(g),
    "geometric": lambda g: (20 * _exponential(g)).ceil(),
    "Pareto 4": lambda g: 60 * (1 - _uniform(g)) ** (-1 / 4),
    "Pareto 2": lambda g: 40 * (1 - _uniform(g)) ** (-1 / 2),
    "two kinds": lambda g: torch.where(_uniform(g) < 0.05, _log_normal(0.3)(g) * 6, _log_normal(0.4)(g)),
    "one of 100, ten times": _with_outliers(SAMPLES // 100, 10),
    "one of 1,000, ten times": _with_outliers(SAMPLES // 1000, 10),
    "one of all, ten times": _with_outliers(1, 10),
}


class Lengths(torch.utils.data.Dataset[int]):
    """Samples that are their lengths."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths.tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> int:
        return int(self.lengths[place])


def _collate(lengths: list[int]) -> Tensor:
    return torch.empty(len(lengths), max(lengths), device="meta")


def of_law(name: str, num_plans: int) -> dict[str, Any]:
    """One row, which is printed."""
    row: dict[str, Any] = {"law": name, "plans": num_plans, "all": 0, "some": 0, "risk": 0.0, "first": 0}
    row |= {"tokens": 0, "token_plans": 0, "token_batches": 0, "micros": {"all": [], "some": [], "first": []}}
    for number in range(num_plans):
        generator = torch.Generator().manual_seed(number)
        lengths = LAWS[name](generator).round().clamp(min=1, max=1e6).long()
        for key, found in of_plan(lengths, generator, number < TOKEN_PLANS).items():
            if key == "micros":
                for how, micro in found.items():
                    row["micros"][how].append(micro)
            else:
                row[key] += found
    row["micros"] = {how: statistics.fmean(found) for how, found in row["micros"].items()}
    row["unseen"] = num_plans * (1 - READ / SAMPLES)
    print(
        f"{name:28} over: all read {row['all']}/{num_plans}, {READ:,} read {row['some']} (stated {row['risk']:.1f}, of "
        f"one outlier {row['unseen']:.0f}), "
        f"first {SEEN} batches {row['first']}; tokens {row['tokens']}/"
        f"{row['token_plans']} plans, {row['token_batches']:,} batches; mean batch "
        f"{' '.join(f'{how} {micro:.1f}' for how, micro in row['micros'].items())}",
        flush=True,
    )
    return row


def of_plan(lengths: Tensor, generator: torch.Generator, has_tokens: bool) -> dict[str, Any]:
    """Whether plans of one budget are over it."""
    shares = torch.rand(3, generator=generator, dtype=torch.float64)
    scale = 1 / float(lengths.double().mean())

    def takes(num: Any, long: Any) -> Any:
        tokens = num * long * scale
        return shares[0] * num + shares[1] * tokens + shares[2] * tokens * long * scale / 4

    dataset = Lengths(lengths)
    task = autotune.Task(
        nn.Identity, lambda: dataset, lambda model, batch: batch, collate=_collate, length=lambda one: one
    )
    known = find_lengths(task, dataset, deterministic=True, most_s=math.inf)
    assert known is not None
    longest = known.longest
    spread = float(torch.rand((), generator=generator, dtype=torch.float64))
    budget = float(takes(1, longest)) ** (1 - spread) * float(takes(STEP, longest)) ** spread
    micros = [2**power for power in range(int(math.log2(STEP)) + 1)]
    order = torch.randperm(SAMPLES, generator=generator)
    most, risk = bound(lengths[order[:READ]], SAMPLES - READ)

    def chosen(tells: Callable[[int], float]) -> int:
        return max((micro for micro in micros if tells(micro) <= budget), default=0)

    plans = {
        "all": chosen(lambda micro: float(takes(micro, int(lengths[known.batches(micro)[0]].max())))),
        "some": chosen(lambda micro: float(takes(micro, most))),
        "first": chosen(lambda micro: float(takes(micro, _padded(lengths, order, micro)[:SEEN]).max())),
    }
    # Memory grows with the samples of a batch and the longest of them. So the batch that has the longest of all takes
    # most in its epoch, but where that is the last one, which may be smaller.
    at = torch.randint(SAMPLES, (EPOCHS,), generator=generator)
    over = {}
    for how, micro in plans.items():
        sizes = torch.where(at < SAMPLES // micro * micro, micro, SAMPLES % micro) if micro else torch.zeros(0)
        over[how] = int(bool((takes(sizes, longest) > budget).any()))
    row: dict[str, Any] = {**over, "risk": risk if plans["some"] else 0.0, "micros": plans}
    if has_tokens and plans["all"]:
        batch = Batch.of(STEP, plans["all"]).model_copy(update={"tokens": plans["all"] * longest})
        row |= _of_tokens(lengths.tolist(), batch, takes, generator)
    return row


def _padded(lengths: Tensor, order: Tensor, micro: int) -> Tensor:
    """The longest of each batch of an epoch."""
    num = len(order) // micro
    return lengths[order[: num * micro]].view(num, micro).amax(1).double()


def _of_tokens(
    lengths: list[int], batch: Batch, takes: Callable[[Any, Any], Any], generator: torch.Generator
) -> dict[str, int]:
    """Over the largest of what is measured."""
    measured = max(float(takes(len(one), max(lengths[n] for n in one))) for one in extremes(lengths, batch))
    over, num = False, 0
    for _ in range(TOKEN_EPOCHS):
        cut = TokenCut(torch.randperm(len(lengths), generator=generator).tolist(), batch, False, lengths)
        shapes = torch.tensor([(len(one), lengths[one[0]]) for one in iter(cut)], dtype=torch.float64)
        over = over or bool((takes(*shapes.T) > measured * (1 + 1e-9)).any())
        num += len(shapes)
    return {"tokens": int(over), "token_plans": 1, "token_batches": num}


def tell_all(rows: list[dict[str, Any]]) -> None:
    """The sums."""
    total = {key: sum(row[key] for row in rows) for key in ("plans", "all", "some", "first", "tokens")}
    stated = sum(row["unseen" if row["law"].startswith("one of all") else "risk"] for row in rows)
    print(
        f"{total['plans']:,} plans over their budget: {total['all']} where all lengths are read (bar 0), "
        f"{total['some']} where {READ:,} of {SAMPLES:,} are (stated {stated:.0f}), {total['first']} by the "
        f"largest of {SEEN} batches; {total['tokens']} of tokens (bar 0)"
    )


class Words(torch.utils.data.Dataset[Tensor]):
    """Sentences of log-normal length, at most 400 words."""

    def __init__(self, sigma: float) -> None:
        g = torch.Generator().manual_seed(0)
        lengths = (sigma * torch.randn(4000, generator=g) + 3.4).exp().clamp(4, 400).long().tolist()
        self.rows = [torch.randint(1, 256, (length,), generator=g) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Tensor:
        return self.rows[place]


class Model(nn.Module):
    """Predicts each next word, or of a tagger the word itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(256, 128), nn.Linear(128, 256)
        self.body: nn.Module
        if kind == "transformer":
            layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        elif kind == "GRU":
            self.body = nn.GRU(128, 128, 2, batch_first=True)
        else:
            layers = ((nn.Conv1d(128, 128, 5, padding=2), nn.GELU()) for _ in range(4))
            self.body = nn.Sequential(*(one for pair in layers for one in pair))

    def forward(self, words: Tensor) -> Tensor:
        """Words of shape (samples, length); logits of shape (samples, length, 256)."""
        x = self.embed(words)
        if self.kind == "transformer":
            mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
            x = self.body(x, mask=mask, is_causal=True)
        else:
            x = self.body(x)[0] if self.kind == "GRU" else self.body(x.mT).mT
        return self.head(x)  # type: ignore[no-any-return]


MICRO, WARM_UP, TIMED_S = 4, 1, 3.0
JOBS = {"transformer": 0.8, "GRU": 0.8, "convolutions": 1.1, "Llama": 0.8}
"""Each with the spread of its lengths."""
PACKED = {"packed": MICRO, "packed short": 1}
"""How many of the longest samples a packed row has the tokens of."""


def _loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    targets = batch[:, 1:]
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return loss, (targets != 0).sum()


def _own(job: str) -> autotune.Task:
    return autotune.Task(
        build_model=lambda: Model(job),
        build_dataset=lambda: Words(JOBS[job]),
        compute_loss=_loss,
        collate=lambda rows: pad_sequence(rows, batch_first=True),
        length=len,
        batch_size=STEP,
    )


def _llama() -> autotune.Task:
    """Two layers of transformers' Llama, by samples as its datasets have them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes)

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids, labels = ([one[name] for one in samples] for name in ("input_ids", "labels"))
        return {
            "input_ids": pad_sequence(ids, batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        count = (batch["labels"][:, 1:] != -100).sum()
        return model(**batch).loss * count, count

    return autotune.Task(
        build_model=lambda: LlamaForCausalLM(config),
        build_dataset=lambda: [{"input_ids": row, "labels": row} for row in Words(JOBS["Llama"]).rows],
        compute_loss=compute_loss,
        collate=collate,
        batch_size=STEP,
    )


def run_job(job: str, kind: str) -> dict[str, float]:
    """Tokens that count a second, and the peak of this process, with its largest batches first."""
    task = _llama() if job == "Llama" else _own(job)
    seed_everything(0)
    known = find_lengths(task, task.build_dataset(), deterministic=True)
    assert known is not None
    batch = Batch.of(STEP, MICRO)
    if kind != "padded":
        tokens = PACKED.get(kind, MICRO) * known.longest
        batch = batch.model_copy(update={"tokens": tokens, "packed": kind in PACKED})
    training = autotune.apply(Plan(settings=Settings(batch=batch)), task)
    for largest, _ in longest_batches(training.loader, known):
        for _ in range(2):
            loss, count = task.compute_loss(training.model, largest)
            (loss / count).backward()
    training.optimizer.zero_grad()
    num_tokens, num_steps, began_s = 0.0, 0, 0.0
    for micro_batch in _batches(training):
        result = training.step(micro_batch)
        num_tokens += result.weight
        if result.stepped:
            num_steps += 1
            if num_steps == WARM_UP:
                num_tokens, began_s = 0.0, time.process_time()
            elif num_steps > WARM_UP and time.process_time() - began_s > TIMED_S:
                break
    seconds = time.process_time() - began_s
    return {"tokens_per_s": num_tokens / seconds, "peak_bytes": own_peak_bytes(), "steps": num_steps - WARM_UP}


def _batches(training: Any) -> Iterator[Tensor]:
    while True:
        yield from training.loader


def compare(job: str, num_rounds: int) -> dict[str, Any]:
    """One row, which is printed."""
    kinds = ("padded", "tokens", *(PACKED if job == "Llama" else ()))
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for kind, runs in found.items():
            command = [sys.executable, "-m", "benchmarks.lengths", "--run", job, kind]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    peaks = {kind: max(run["peak_bytes"] for run in runs) for kind, runs in found.items()}
    row: dict[str, Any] = {"job": job, "micro": MICRO, "step": STEP, "runs": found}
    for kind in kinds[1:]:
        ratios = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(found["padded"], found[kind], strict=True)]
        row["speed" if kind == "tokens" else f"speed {kind}"] = [round(one, 3) for one in ratios]
        print(
            f"{job}, {kind}: {statistics.median(ratios):.2f} times the tokens that count a second ({min(ratios):.2f} "
            f"to {max(ratios):.2f}; bar 1.5), at {peaks[kind] / peaks['padded']:.3f} times the peak",
            flush=True,
        )
    return row


if __name__ == "__main__":
    main()
