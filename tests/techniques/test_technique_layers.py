"""``layers``: its contract on the zoo. What each layer keeps is :mod:`test_layers`' business."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

import autotune
from autotune.errors import PlanError
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing, find_blocks
from autotune.techniques.layers import Layers
from autotune.techniques.precision import Precision
from autotune.testing.facts import BARE
from autotune.testing.runs import relative_difference, run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO


class TestLayers(TechniqueContract):
    technique = Layers
    lacking = (Layers(kind="recompute"),)


def test_with_checkpointing_and_autocast_it_is_what_they_are_without():
    """Recomputed blocks of converted layers give the very gradients of recomputed stock blocks."""
    for name in ("resnet", "gpt"):
        for precision in ("fp32", "bf16"):
            stock, ours = (
                run_applied(
                    ZOO[name],
                    Settings(
                        layers=Layers(kind=kind),
                        precision=Precision(kind=precision),
                        checkpointing=Checkpointing(kind="blocks", every=2),
                    ),
                )
                for kind in ("none", "recompute")
            )
            assert relative_difference(ours.gradients, stock.gradients) < 1e-2 * (precision == "bf16") + 1e-6


def test_an_earlier_plans_layers_are_taken_off():
    """A notebook applies one plan after another to one model."""
    model = ZOO["resnet"].build_model()
    pieces = {"dataset": ZOO["resnet"].build_dataset(), "loss": ZOO["resnet"].compute_loss}
    before = [type(module) for module in model.modules()]
    plans = [
        Settings(layers=Layers(kind="exact"), checkpointing=Checkpointing(kind="blocks")),
        Settings(checkpointing=Checkpointing(kind="blocks")),
        Settings(layers=Layers(kind="exact")),
        Settings(),
    ]
    for settings in plans:
        autotune.apply(autotune.Plan(settings=settings), model=model, **pieces)
        assert [type(module) for module in model.modules()] == before or settings.layers.kind == "exact"
    assert not any("forward" in vars(module) for module in model.modules())


def kept_bytes_of(settings, name="gpt"):
    """By what a forward of the model keeps for backward."""
    training = autotune.apply(autotune.Plan(settings=settings, budget={"device": "cpu"}), ZOO[name])
    batch = next(iter(training.loader))
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), training.forward_context():
        ZOO[name].compute_loss(training.model, batch)
    return sum(kept.values())


def test_spared_blocks_keep_what_stock_blocks_keep_and_results_are_the_same():
    """What a block saves is saved where it is not spared: the savings of two halves add up to that of all."""
    number = len(find_blocks(ZOO["gpt"].build_model()))
    none, first = (Layers(kind="exact").in_blocks(blocks, number) for blocks in ((), (0,)))
    rest, every = (Layers(kind="exact").in_blocks(tuple(range(least, number)), number) for least in (1, 0))
    assert (none.spared, first.spared, every) == (
        tuple(range(number)), tuple(range(1, number)), Layers(kind="exact"),
    )  # fmt: skip
    spared, one, others, all_of_them = (kept_bytes_of(Settings(layers=layers)) for layers in (none, first, rest, every))
    assert all_of_them < one < spared
    assert spared - all_of_them == (spared - one) + (spared - others)
    stock, ours = (run_applied(ZOO["gpt"], Settings(layers=layers)) for layers in (Layers(), first))
    assert relative_difference(ours.gradients, stock.gradients) < 1e-6


def test_blocks_that_are_spared_must_be_there():
    beyond = Settings(layers=Layers(kind="exact", spared=(99,)))
    with pytest.raises(PlanError, match=r"spared: must be numbers of the model's \d+ blocks, but got 99"):
        autotune.apply(autotune.Plan(settings=beyond), ZOO["resnet"])
    with pytest.raises(ValidationError, match=r"must ascend, each once, but got \[2, 1\]. Use \[1, 2\]"):
        Layers(kind="exact", spared=(2, 1))
    with pytest.raises(ValidationError, match="kind none changes no layers"):
        Layers(spared=(1,))


def test_spared_blocks_are_said():
    assert Layers(kind="exact", spared=(0, 2)).describe() == "memory-saving layers except in blocks 0, 2"
    assert Layers(kind="exact", spared=(1,)).describe() == "memory-saving layers except in block 1"
    known = BARE.model_copy(update={"num_blocks": 4})
    assert Layers(kind="exact", spared=(1, 2)).describe(known) == "memory-saving layers except in blocks 1, 2"
    assert Layers(kind="exact", spared=(0, 1, 2)).describe(known) == (
        "memory-saving layers outside the blocks and in block 3"
    )
    assert Layers(kind="exact", spared=(0, 1, 2, 3)).describe(known) == "memory-saving layers outside the blocks"
