"""Whether pruning cuts in the right places: small models of many builds, each cut at three ratios.

    python -m benchmarks.pruning [--only maxout] [--ratio 0.5]

Half of a model is dead: a cut by chance says what goes together, and all of it is set to zero, which the model then
does without. So a cut by norms must take just that, and the cut model must compute what it computed, in train and in
eval mode, to rounding. What normalises over channels counts those that are not zero throughout. Random weights
replace those that layers begin with. Bars: none wrong, none that fails later, none refused in words that name no layer.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_pruning  # noqa: F401 - cuts are found in forks, which find it loaded
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotune.errors import PlanError
from autotune.measure.timing.disturbance import one_thread
from autotune.nested import tensors_in
from autotune.pruning import How, Record, cut_each, rebuild
from autotune.randomness import seed_everything

from ..rows import save_rows
from .images import IMAGES
from .sequences import LENGTH, PATCHES, ROWS, TOKENS, VOCABULARY, RmsNorm

RATIOS = (0.25, 0.5, 0.75)
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{name: (build, "images") for name, build in {**IMAGES, **PATCHES}.items()},
    **{name: (build, "tokens") for name, build in TOKENS.items()},
    **{name: (build, "rows") for name, build in ROWS.items()},
}
"""How each is built, and what it takes."""
POOR = re.compile(r"[A-Z]\w*Error|Traceback|already exists|NoneType|object has no")
"""Words of Python's, not of a person's."""
BARS = ("WRONG", "fails later", "poor words")


def main() -> None:
    """Cut all, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="models whose names have this")
    parser.add_argument("--ratio", type=float, choices=RATIOS, action="append", help="default: all three")
    arguments = parser.parse_args()
    chosen = [name for name in MODELS if arguments.only is None or arguments.only in name]
    with one_thread():
        rows = [row for name in chosen for row in tried(name, arguments.ratio or RATIOS)]
    save_rows("pruning-models", "cpu", rows)
    counts = Counter(row["outcome"] for row in rows)
    print(f"{len(chosen)} models, {len(rows)} cuts: {', '.join(f'{what} {n}' for what, n in counts.most_common())}")
    sys.exit(any(counts[bar] for bar in BARS))


def tried(name: str, ratios: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """A row for each ratio."""
    build, takes = MODELS[name]
    for ratio in ratios:
        began = time.perf_counter()
        outcome, said, kept = checked(built(build), inputs_of(takes, 2), ratio)
        row = {"model": name, "ratio": ratio, "outcome": outcome, "said": said, "kept": round(kept, 3)}
        print(
            f"{name:28} {ratio:4.2f} {outcome:12} {kept:5.2f} {time.perf_counter() - began:4.1f} s  {said}", flush=True
        )
        yield row


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """With weights that are random where layers begin with ones or zeros."""
    seed_everything(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the old weight norm
        model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.5 * torch.rand_like(parameter) + 0.1)
    return model


def inputs_of(takes: str, batch: int) -> Tensor:
    """Samples of a model."""
    generator = torch.Generator().manual_seed(1)
    if takes == "tokens":
        return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator)
    return torch.randn((batch, 3, 8, 8) if takes == "images" else (batch, 12), generator=generator)


def checked(model: nn.Module, x: Tensor, ratio: float) -> tuple[str, str, float]:
    """What came of a cut, in a word and in what was said, and the share of parameters that is left."""

    def run(one: nn.Module) -> Tensor:
        return sum((each.float().square().mean() for each in outputs(one, x)), torch.zeros(()))

    def cut(one: nn.Module, criterion: Any) -> Record | str:
        try:
            (found,) = cut_each(one, run, [How(ratio, criterion)])
        except PlanError as error:
            return str(error)
        return str(found) if isinstance(found, PlanError) else found

    by_chance = cut(model, "random")
    if isinstance(by_chance, str):
        return ("refused" if named(model, by_chance) else "poor words"), by_chance, 1.0
    deaden(model, by_chance)
    by_norm = cut(model, "l2")
    if isinstance(by_norm, str):
        return "poor words", by_norm, 1.0
    smaller = copy.deepcopy(model)
    rebuild(smaller, by_norm)
    said = "; ".join(by_norm.left)
    kept = sum(p.numel() for p in smaller.parameters()) / sum(p.numel() for p in model.parameters())
    if not all(named(model, one) for one in by_norm.left):
        return "poor words", said, kept
    if share := another_share(by_norm, ratio):
        return "WRONG", share, kept
    try:
        with Alive():
            off = max(distance(model, smaller, x, trains) for trains in (True, False))
        outputs(smaller, x[:1].repeat(3, *[1] * (x.dim() - 1)))
        run(smaller.train()).backward()
    except Exception as error:  # noqa: BLE001 - whatever a model may raise
        return "fails later", f"{type(error).__name__}: {error}", kept
    if not off < (0.05 if next(model.parameters()).dtype == torch.bfloat16 else 1e-4):
        return "WRONG", f"off by {off:.1%}; {said}", kept
    return ("left whole" if by_norm.left else "right"), said, kept


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """All that it returns."""
    seed_everything(2)
    dtype = next(model.parameters()).dtype
    found = model(x.to(dtype) if x.is_floating_point() else x)
    return [one for one in tensors_in(found) if one.is_floating_point()]


def deaden(model: nn.Module, record: Record) -> None:
    """Set to zero what the record cuts."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, kept in record.tensors.items():
        for dim, number in enumerate(kept.sets):
            if number is not None and name in tensors:
                gone = sorted({*range(kept.shape[dim])} - {*record.sets[number]})
                tensors[name].data.index_fill_(dim, torch.tensor(gone), 0)


def another_share(record: Record, ratio: float) -> str | None:
    """A layer that keeps less or more than was asked for by a tenth and by a whole channel. Grouped heads go by whole
    groups, as many as the ratio takes, so that more may stay."""
    for name, kept in record.tensors.items():
        for size, number in zip(kept.shape, kept.sets, strict=True):
            off = 0 if number is None else abs(len(record.sets[number]) - size * (1 - ratio))
            if (
                number is not None
                and not name.endswith(("k_proj.weight", "v_proj.weight"))
                and off > max(1, 0.13 * size)
            ):
                return f"{name} keeps {len(record.sets[number])} of {size}"
    return None


def distance(model: nn.Module, smaller: nn.Module, x: Tensor, trains: bool) -> float:
    """Largest difference of what both return, over the largest number; random layers do nothing."""
    both = [copy.deepcopy(one).train(trains) for one in (model, smaller)]
    for one in both:
        for module in one.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
            if isinstance(module, RmsNorm):
                module.register_forward_hook(_of_the_alive)
    first, second = (outputs(one, x) for one in both)
    if [one.shape for one in first] != [one.shape for one in second]:
        return float("inf")
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(first, second, strict=True))


class Alive(TorchFunctionMode):
    """What normalises over channels takes those that are not zero in all samples."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "layer_norm":
            return _layer_norm(*args, **kwargs)
        if name == "group_norm":
            return _group_norm(*args, **kwargs)
        if name == "randn_like":
            return torch.full_like(args[0], 0.5)
        return func(*args, **kwargs)


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    alive = (x != 0).flatten(0, -2).any(0)
    mean = x.sum(-1, keepdim=True) / alive.sum()
    centred = torch.where(alive, x - mean, 0.0)
    found = centred * (centred.square().sum(-1, keepdim=True) / alive.sum() + eps).rsqrt()
    return found * (1 if weight is None else weight) + (0 if bias is None else bias)


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    alive = (x != 0).transpose(0, 1).flatten(1).any(1).view(groups, -1)
    parts = x.view(len(x), groups, alive.shape[1], -1)
    number = (alive.sum(1) * parts.shape[3]).view(1, groups, 1, 1)
    mean = parts.sum((2, 3), keepdim=True) / number
    centred = torch.where(alive[None, :, :, None], parts - mean, 0.0)
    found = centred * (centred.square().sum((2, 3), keepdim=True) / number + eps).rsqrt()
    width = (1, -1, *[1] * (x.dim() - 2))
    return found.view_as(x) * weight.view(width) + bias.view(width)


def _of_the_alive(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Of a root mean square over all."""
    return output * (args[0] != 0).flatten(0, -2).any(0).float().mean().sqrt()


def named(model: nn.Module, said: str) -> bool:
    """Whether it names a module or a kind of layer of the model, in a person's words."""
    names = [re.escape(name) for name, _ in model.named_modules() if name]
    kinds = [rf"\({type(module).__name__}\)" for module in model.modules()]
    return not POOR.search(said) and bool(
        re.search(rf"(?<!\S)({'|'.join(names)}) (keeps|would)|{'|'.join(kinds)}", said)
    )


if __name__ == "__main__":
    main()
