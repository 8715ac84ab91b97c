"""``pruning``: its contract, the record beside a plan, what is refused, and what the memory model makes of it."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest
import torch
import torch_pruning  # noqa: F401 - cuts are found in forks, which find it loaded
from search_tables import facts
from torch import nn

import autotune
from autotune.errors import PlanError
from autotune.estimates.memory_model import fit_memory_model
from autotune.estimates.tracing.real_step import fit_probed_model
from autotune.measure.timing.disturbance import one_thread
from autotune.plan import Plan
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.layers import Layers
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.optimizers.optimizer_step import OptimizerStep
from autotune.techniques.precision import Precision
from autotune.testing.runs import run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO

QUARTER = Pruning(kind="structured", ratio=0.25)


pytestmark = pytest.mark.filterwarnings("ignore:pruning. ")


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


class TestPruning(TechniqueContract):
    technique = Pruning
    keeps_shapes = False
    refuses = {"applied again": "cannot be taken back. Build it anew"}
    lacking = (QUARTER,)


def plan_of(pruning: Pruning = QUARTER, **others) -> Plan:
    return Plan(settings=Settings(batch=Batch(micro=8), pruning=pruning, **others))


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameters_are_those_of_three_quarters_of_each_width():
    """3 → 6 → 6 channels with biases and BatchNorms, and a head of 3 from 6: 168 + 12 + 330 + 12 + 21."""
    assert num_parameters(autotune.apply(plan_of(), ZOO["cnn"]).model) == 168 + 12 + 330 + 12 + 21


def test_groups_of_layers_may_have_ratios_of_their_own(tmp_path):
    """A half of the first layer's channels goes and none of the second's: the plan says so, and how much that is."""
    pruning = Pruning(kind="structured", ratio=0.9, ratios=(("0", 0.5), ("3", 0.0)))
    training, model = autotune.apply(plan_of(pruning), ZOO["cnn"]), ZOO["cnn"].build_model()
    assert [training.model[at].out_channels for at in (0, 3)] == [4, 8]
    found = training.settings.pruning
    plan_of(found).save(tmp_path / "plan.yaml")
    assert autotune.load_plan(tmp_path / "plan.yaml").settings.pruning == found
    gone = 1 - num_parameters(training.model) / num_parameters(model)
    known = facts(num_parameters=num_parameters(model))
    assert found.describe(known) == f"prune 0% to 50% of widths, {gone:.0%} of parameters"


def test_a_plan_keeps_its_record_beside_itself(tmp_path):
    """The file has the hash alone; what is loaded makes the same model without Torch-Pruning."""
    training = autotune.apply(plan_of(), ZOO["resnet"])
    plan = Plan(settings=training.settings)
    plan.save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert training.settings.pruning.record in text
    assert "kept:" not in text
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["plan.yaml", f"pruning-{training.settings.pruning.record[7:23]}.json.gz"]
    assert autotune.load_plan(tmp_path / "plan.yaml") == plan


def saved(tmp_path):
    Plan(settings=autotune.apply(plan_of(), ZOO["cnn"]).settings).save(tmp_path / "plan.yaml")
    (beside,) = tmp_path.glob("pruning-*")
    return tmp_path / "plan.yaml", beside


def test_a_record_that_is_not_there_is_named(tmp_path):
    path, beside = saved(tmp_path)
    beside.unlink()
    with pytest.raises(PlanError, match=rf"{beside.name}: the plan's record .* Copy it next to the plan"):
        autotune.load_plan(path)
    unread = Plan.from_yaml(path.read_text())
    with pytest.raises(PlanError, match=r"pruning-.*, that is not here\. Read the plan with autotune\.load_plan"):
        autotune.apply(unread, ZOO["cnn"])


def edited(content: bytes) -> bytes:
    data = json.loads(gzip.decompress(content))
    data["sets"][0][0] += 1
    return gzip.compress(json.dumps(data).encode())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (edited, "its hash is .* it was edited"),
        (lambda content: content[:20], "cannot be read"),
        (lambda content: b"", "cannot be read"),
        (lambda content: gzip.compress(b"[]"), "cannot be read"),
        (lambda content: gzip.compress(b'{"schema": "another"}'), "schema: autotune/pruning@1 was expected"),
    ],
)
def test_a_record_that_was_edited_or_cut_off_is_refused(tmp_path, spoil, said):
    path, beside = saved(tmp_path)
    beside.write_bytes(spoil(beside.read_bytes()))
    with pytest.raises(PlanError, match=f"{beside.name}: a record of kept indices was expected, but .*{said}"):
        autotune.load_plan(path)


def test_a_record_of_another_model_is_refused_and_nothing_is_touched(tmp_path):
    path, _ = saved(tmp_path)
    model = ZOO["resnet"].build_model()
    before = {name: value.shape for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=r"record: it was made of another model: this one has no "):
        autotune.apply_to_model(autotune.load_plan(path), model)
    assert {name: value.shape for name, value in model.state_dict().items()} == before


def test_weights_of_another_width_do_not_fit(tmp_path):
    path, _ = saved(tmp_path)
    model = ZOO["cnn"].build_model()
    model[0] = nn.Conv2d(3, 16, 3, padding=1)
    with pytest.raises(PlanError, match=r"0\.bias: shape \[8\] was expected, but got \[16\]"):
        autotune.apply_to_model(autotune.load_plan(path), model)


def test_a_pruned_model_is_not_pruned_again():
    model = ZOO["cnn"].build_model()
    task = dataclasses.replace(ZOO["cnn"], build_model=lambda: model)
    autotune.apply(plan_of(), task)
    for plan in (plan_of(), Plan(settings=Settings())):
        with pytest.raises(PlanError, match=r"pruned already, which cannot be taken back\. Build it anew"):
            autotune.apply(plan, task)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"kind": "structured", "ratio": 0}, "greater than 0"),
        ({"kind": "structured", "ratio": 1.0}, "less than 1"),
        ({"kind": "none", "ratio": 0.5}, "kind: none does nothing, but got ratio"),
        (
            {"kind": "structured", "ratios": [["0", 1.0]]},
            "a share of at least 0 and below 1 was expected, but got 0: 1",
        ),
        ({"kind": "structured", "ratios": [["0", 0.5]], "scope": "global"}, "ranks layers against each other"),
        ({"kind": "structured", "record": "abc"}, "record"),
        ({"kind": "structured", "kept": "abc"}, "whose hash is absent"),
        ({"kind": "unstructured"}, "kind"),
    ],
)
def test_what_cannot_be_meant_is_refused_as_a_plan_is_read(row, said):
    with pytest.raises(PlanError, match=said):
        Plan.from_yaml(f"schema: autotune/plan@1\nsettings: {json.dumps({'pruning': row})}\n")


@pytest.mark.parametrize(
    ("name", "pruning", "said"),
    [
        ("lstm", QUARTER, r"recurrent layers \(LSTM\)"),
        ("stream", QUARTER, "an iterable dataset is read only once"),
        ("cnn", Pruning(kind="structured", untouchable=("0", "3")), "ratio 0.25 cuts nothing of this model"),
        (
            "cnn",
            Pruning(kind="structured", ratio=0.95),
            "3 keeps its channels, since ratio 0.95 leaves nothing of them",
        ),
        ("cnn", Pruning(kind="structured", round_to=16), "leaves nothing of them, rounded to multiples of 16"),
        ("cnn", Pruning(kind="structured", untouchable=("stem",)), "the model has no module stem"),
    ],
)
def test_what_cannot_be_cut_is_refused(name, pruning, said):
    with pytest.raises(PlanError, match=rf"^settings\.pruning.*{said}"):
        autotune.apply(plan_of(pruning), ZOO[name])


def test_it_is_offered_where_it_can_be_had():
    ratios = {choice.ratio for choice in Pruning.choices(facts()) if choice.kind == "structured"}
    assert ratios == {0.25, 0.5}
    for changed in ({"pruning_obstacle": "the model has recurrent layers"}, {"dataset_kind": "iterable"}):
        assert Pruning.choices(facts(**changed)) == (Pruning(),)


def test_the_lossy_preset_has_it_and_others_do_not():
    from autotune.search_spaces import load_space

    assert load_space("lossy").pruning == "auto"
    assert load_space("default").pruning is None
    assert load_space("exact").pruning is None


@pytest.mark.parametrize("name", ["resnet", "gpt", "tied"])
def test_it_composes_with_what_comes_after(name):
    """Trains with smaller layers recomputed, checkpointed, in bf16, and stepped in backward."""
    run = run_applied(
        ZOO[name],
        Settings(
            batch=Batch(micro=8),
            pruning=QUARTER,
            precision=Precision(kind="bf16"),
            layers=Layers(kind="recompute"),
            checkpointing=Checkpointing(kind="blocks"),
            optimizer_step=OptimizerStep(kind="in_backward"),
        ),
    )
    assert all(loss.isfinite() for loss in run.losses)


def test_an_optimizer_that_was_built_before_trains_the_pruned_model():
    """Parameters stay the objects that they were."""
    model = ZOO["cnn"].build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = ZOO["cnn"]
    training = autotune.apply(
        plan_of(), model=model, dataset=task.build_dataset(), loss=task.compute_loss, optimizer=optimizer, batch_size=8
    )
    before = training.model[0].weight.detach().clone()
    training.step(next(iter(training.loader)))
    assert training.model[0].weight.shape == (6, 3, 3, 3)
    assert not torch.equal(before, training.model[0].weight)


def test_an_optimizer_that_has_stepped_is_refused():
    """Adam's averages have the whole model's shapes; without any state it goes on."""
    task, model = ZOO["cnn"], ZOO["cnn"].build_model()
    optimizer = torch.optim.Adam(model.parameters())
    task.compute_loss(model, next(iter(torch.utils.data.DataLoader(task.build_dataset(), 2)))).backward()
    optimizer.step()
    said = r"stepped already: its exp_avg has shape \[8, 3, 3, 3\], of a parameter of shape \[6, 3, 3, 3\] now\. Apply"
    with pytest.raises(PlanError, match=rf"settings\.pruning: the optimizer has {said} the plan before the first step"):
        autotune.apply(
            plan_of(), model=model, dataset=task.build_dataset(), loss=task.compute_loss, optimizer=optimizer
        )


def test_a_state_of_another_pruning_is_refused_without_its_record():
    """The packed record is kilobytes; its hash tells it."""
    state = autotune.apply(plan_of(), ZOO["cnn"]).state_dict()
    training = autotune.apply(Plan(settings=Settings(batch=Batch(micro=8))), ZOO["cnn"])
    with pytest.raises(PlanError, match=r'was saved under other settings: pruning .*"record": "sha256:') as raised:
        training.load_state_dict(state)
    assert len(str(raised.value)) < 600


@pytest.mark.medium
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_memory_model_traces_the_pruned_model(scope):
    """As real steps of it take it; less than of the whole one."""
    task = dataclasses.replace(
        ZOO["resnet"], build_optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False)
    )
    pruned = Plan(settings=Settings(pruning=Pruning(kind="structured", ratio=0.5, scope=scope)))
    whole, ours = (fit_memory_model(plan, task).peak_bytes(8) for plan in (Plan(settings=Settings()), pruned))
    assert ours < 0.8 * whole
    assert fit_probed_model(pruned, task).peak_bytes(8) == pytest.approx(ours, rel=0.02)
