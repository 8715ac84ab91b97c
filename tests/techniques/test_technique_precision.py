"""``precision``: its contract, what autocast computes in, and a loss scaler that steps and skips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from line_task import floats, line, step_gradients, training_of

from autotune.errors import PlanError
from autotune.task import Task
from autotune.techniques import Settings, Technique
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import Checkpointing
from autotune.techniques.precision import Precision
from autotune.testing.facts import BARE
from autotune.testing.runs import run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import ZOO


class TestPrecision(TechniqueContract):
    technique = Precision
    lacking = (Precision(kind="bf16"), Precision(kind="tf32"), Precision(kind="fp16"))

    def _choices(self, task: Task) -> tuple[Technique, ...]:
        """On a CPU without bfloat16 arithmetic oneDNN has no LSTM in it; a search does not offer bf16 there."""
        found = super()._choices(task)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported() or task is not ZOO["lstm"]:
            return found
        return tuple(choice for choice in found if choice != Precision(kind="bf16"))


@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has LSTMs in bfloat16")
def test_an_lstm_in_a_type_that_onednn_lacks_here_is_refused_before_it_runs():
    """The plan is refused in words; oneDNN would say "could not create a primitive descriptor" in the first step."""
    with pytest.raises(PlanError, match="lstm is an LSTM on the CPU, and oneDNN has none in bfloat16"):
        training_of(ZOO["lstm"], precision=Precision(kind="bf16"))


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_computes_in_the_type_and_keeps_parameters(kind, dtype):
    """Linear layers return the low-precision type within forward_context; parameters and gradients stay fp32."""
    training = training_of(ZOO["mlp"], precision=Precision(kind=kind))
    batch = next(iter(training.loader))
    with training.forward_context():
        assert training.model(batch[0]).dtype == dtype
        loss = ZOO["mlp"].compute_loss(training.model, batch)
    training.backward(loss)
    assert {p.dtype for p in training.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in training.model.parameters()} == {torch.float32}


def test_recomputation_happens_in_the_forward_type():
    """bf16 with every block checkpointed is bitwise bf16 without."""
    plain, recomputed = (
        run_applied(ZOO["resnet"], Settings(precision=Precision(kind="bf16"), checkpointing=checkpointing))
        for checkpointing in (Checkpointing(), Checkpointing(kind="blocks"))
    )
    assert recomputed.equals(plain)


def test_fp16_scales_the_loss_and_steps_on_true_gradients():
    """Mean of 0 … 3 is 1.5: at a learning rate of 1 the weight goes from 1 to -0.5, whatever the scale."""
    training = training_of(line(floats(4)), batch=Batch(micro=2, accumulate=2), precision=Precision(kind="fp16"))
    scale = training.scaler.get_scale()
    assert scale > 1
    results = [training.step(batch) for batch in training.loader]
    assert [result.stepped for result in results] == [False, True]
    assert training.model.weight.item() == -0.5


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_sees_true_gradients(fused: bool):
    """The gradient is 4: a step pre-hook that clips to 1 moves the weight by 1, under fp16's loss scale too."""
    clipped: list[float] = []

    def build_optimizer(parameters):
        parameters = list(parameters)
        optimizer = torch.optim.SGD(parameters, lr=1.0, fused=fused)
        clip = torch.nn.utils.clip_grad_norm_
        optimizer.register_step_pre_hook(lambda *_: clipped.append(clip(parameters, 1.0).item()))
        return optimizer

    task = line([torch.tensor(4.0)] * 2, build_optimizer=build_optimizer)
    training = training_of(task, batch=Batch(micro=1, accumulate=2), precision=Precision(kind="fp16"))
    for batch in training.loader:
        training.step(batch)
    assert clipped == [4.0]
    assert training.model.weight.item() == pytest.approx(0.0, abs=1e-5)


def test_the_documented_clipping_runs_and_clips():
    """The very block of docs/use/your-job.md: a gradient of 4 is 1 by the time that the optimizer reads it, and the
    average is there after the step."""
    text = (Path(__file__).parents[2] / "docs" / "use" / "your-job.md").read_text()
    block = text.partition("## After the backward pass")[2].partition("```python\n")[2].partition("```")[0]
    names = {"torch": torch, "nn": torch.nn}
    exec(block, names)
    task = line([torch.tensor(4.0)], after_backward=names["after_backward"], after_step=names["after_step"])
    training = training_of(task, batch=Batch(micro=1))
    assert step_gradients(training) == [1.0]
    assert list(names["averages"]) == ["weight"]


def test_an_infinite_gradient_is_skipped_and_the_scale_halved():
    """1e38 times the scale overflows: no step, the weight stays, and the next batch steps at half the scale."""
    samples = [torch.tensor(1e38), torch.tensor(2.0)]
    training = training_of(line(samples), batch=Batch(micro=1), precision=Precision(kind="fp16"))
    scale = training.scaler.get_scale()
    batches = iter(training.loader)
    assert not training.step(next(batches)).stepped
    assert training.model.weight.item() == 1.0
    assert training.scaler.get_scale() == scale / 2
    assert training.step(next(batches)).stepped
    assert training.model.weight.item() == -1.0


IN_BF16 = BARE.model_copy(
    update={
        "precision": "bf16",
        "device": BARE.device.model_copy(update={"type": "cuda", "capability": (8, 0), "bf16": True}),
    }
)


def test_what_the_job_runs_in_is_the_default_and_fp32_is_offered_beside_it():
    kinds = [choice.kind for choice in Precision.choices(IN_BF16)]
    assert kinds == ["default", "tf32", "fp16", "fp32"]
    assert Precision(kind="bf16").or_default(IN_BF16) == Precision()
    assert Precision(kind="fp32").or_default(BARE) == Precision()
    assert Precision(kind="fp32").or_default(IN_BF16) == Precision(kind="fp32")


def test_the_jobs_own_precision_is_exact_and_any_other_rounds():
    exact = {kind for kind in ("default", "fp32", "bf16", "tf32") if Precision(kind=kind).exactness(IN_BF16) == "exact"}
    assert exact == {"default", "bf16"}


def test_a_device_without_bf16_still_has_what_the_job_runs_in():
    lacks = BARE.model_copy(update={"precision": "bf16"})
    assert Precision(kind="bf16").unavailable(lacks) is None
    assert [choice.kind for choice in Precision.choices(lacks)] == ["default", "fp32"]


def test_the_default_is_in_force_as_the_task_says():
    """A plan's own row comes first; without one, the task's; without that, the model as it stands."""
    batch = [torch.tensor(1.0)] * 2
    in_force = {
        (stated, kind): training_of(
            line(batch, precision=stated), precision=Precision(kind=kind)
        ).settings.precision.kind
        for stated, kind in ((None, "default"), ("bf16", "default"), ("bf16", "fp32"), ("fp16", "bf16"))
    }
    assert list(in_force.values()) == ["default", "bf16", "fp32", "bf16"]


def test_a_job_in_fp16_has_its_loss_scaler():
    training = training_of(line(floats(4), precision="fp16"), batch=Batch(micro=4))
    assert training.scaler.is_enabled()
    training.step(next(iter(training.loader)))
    assert training.model.weight.item() == 1.0 - 1.5


def test_tf32_is_for_ampere_and_later():
    """Refused on a CPU and on compute capability 7.5, offered on 8.0."""
    reasons = {}
    for capability in ((7, 5), (8, 0)):
        device = BARE.device.model_copy(update={"type": "cuda", "capability": capability})
        reasons[capability] = Precision(kind="tf32").unavailable(BARE.model_copy(update={"device": device}))
    assert "compute capability 8.0" in reasons[7, 5]
    assert reasons[8, 0] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_tf32_without_its_device_is_an_error():
    with pytest.raises(PlanError, match=r"tf32 needs a CUDA device of compute capability 8\.0\. Use fp32"):
        training_of(ZOO["mlp"], precision=Precision(kind="tf32"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tf32_leaves_both_names_of_the_setting_readable():
    """torch refuses to read the older name once the newer one alone was set."""
    Precision(kind="tf32").on_model(torch.nn.Linear(1, 1), ())
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
