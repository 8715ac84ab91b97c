"""``layers``: its contract on the zoo. What each layer keeps is :mod:`test_layers`' business."""

from __future__ import annotations

import autotune
from autotune.techniques import Settings
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.precision import Precision
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
