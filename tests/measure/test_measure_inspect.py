"""What is known of a task before any trial."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from autotune.errors import TaskError
from autotune.measure import InspectOptions
from autotune.measure.dataset import inspect_dataset
from autotune.measure.errors import NonFiniteLoss
from autotune.measure.inspect import inspect_task
from autotune.measure.timing import loading
from autotune.task import Task
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.models.low_rank import LowRank
from autotune.techniques.models.pruning import Pruning
from autotune.techniques.precision import Precision
from autotune.testing.zoo import ZOO
from autotune.training.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def short_loader_runs(monkeypatch):
    monkeypatch.setattr(loading, "_SHARE_S", 0.02)


def _inspect(task, **options):
    return inspect_task(task, InspectOptions(**options), "cpu")


def _with(name, **changes):
    return dataclasses.replace(ZOO[name], **changes)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_facts_of_the_zoo(name):
    facts = _inspect(ZOO[name])
    model = ZOO[name].build_model()
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert facts.num_trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert facts.fingerprint == fingerprint(model, ZOO[name].build_dataset(), ZOO[name].collate)
    assert facts.device.memory_bytes >= facts.host_memory_bytes > 0
    assert facts.loader_samples_per_s[0] > 0
    assert (facts.effective_batch, facts.effective_batch_held, facts.effective_batch_assumed) == (8, True, False)
    assert facts.conv_dims == ((2,) if name in ("cnn", "resnet", "partly_eval", "input") else ())
    assert facts.shapes_vary == (name == "token_loss")
    assert (facts.dataset_kind, facts.dataset_length) == (("iterable", None) if name == "stream" else ("map", 22))


def test_blocks_and_their_class():
    facts = _inspect(ZOO["gpt"])
    assert (facts.num_blocks, facts.block_name) == (3, "GptBlock")


def test_a_dataset_is_as_large_as_its_tensors():
    """22 samples of 6 fp32 and one int64: 32 bytes each."""
    assert _inspect(ZOO["mlp"]).dataset_bytes == 22 * 32


def test_the_users_batch_size_is_held_and_the_command_lines_comes_first():
    facts = _inspect(ZOO["mlp"], effective_batch=4)
    assert (facts.effective_batch, facts.effective_batch_held) == (4, True)


def test_a_batch_size_given_nowhere_is_assumed_and_capped_by_the_dataset():
    facts = _inspect(_with("mlp", batch_size=None))
    assert (facts.effective_batch, facts.effective_batch_held, facts.effective_batch_assumed) == (22, False, True)
    assert facts.warnings == ()


def test_the_job_as_it_stands_is_what_the_task_says():
    facts = _inspect(_with("mlp", micro_batch_size=2, precision="bf16"))
    assert (facts.effective_batch, facts.micro_batch, facts.precision) == (8, 2, "bf16")
    assert facts.split_error < 1e-5  # in fp32: what the job rounds is not what a split changes
    silent = _inspect(ZOO["mlp"])
    assert (silent.micro_batch, silent.precision, silent.own_autocast) == (None, None, False)


def test_a_model_with_an_autocast_of_its_own_keeps_the_batch_axis_and_its_precision():
    """Said once, in words; every half of the batch is offered, and no precision on top."""

    def compute_loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return ZOO["gpt"].compute_loss(model, batch)

    facts = _inspect(_with("gpt", compute_loss=compute_loss))
    assert facts.own_autocast
    assert [batch.micro for batch in Batch.choices(facts)] == [1, 2, 4, 8]
    assert Precision.choices(facts) == (Precision(),)
    assert "autocast of its own" in Precision(kind="bf16").unavailable(facts)
    assert [warning for warning in facts.warnings if "autocast" in warning] == list(facts.warnings)


def test_a_model_in_half_precision_keeps_the_batch_axis():
    def compute_loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    task = _with("mlp", build_model=lambda: ZOO["mlp"].build_model().bfloat16(), compute_loss=compute_loss)
    assert [batch.micro for batch in Batch.choices(_inspect(task))] == [1, 2, 4, 8]


def test_a_precision_that_the_device_cannot_have_is_the_tasks_error():
    with pytest.raises(TaskError, match=r'precision is "tf32", which needs a CUDA device of compute capability 8\.0'):
        _inspect(_with("mlp", precision="tf32"))


def test_a_precision_is_not_refused_where_the_model_is_not_run():
    """It is planned for another device."""
    options = InspectOptions(runs_model=False)
    assert inspect_task(_with("mlp", precision="tf32"), options, "cpu").precision == "tf32"


def test_a_job_that_has_cudnn_try_every_kernel_is_known_for_it(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert _inspect(ZOO["cnn"], runs_model=False).tries_kernels


def test_a_stream_is_not_cut_unevenly_by_the_job_either():
    with pytest.raises(TaskError, match=r"8 samples a step are no multiple of micro_batch_size = 3"):
        _inspect(_with("stream", micro_batch_size=3))


def test_a_dataset_smaller_than_the_batch_is_said():
    facts = _inspect(_with("mlp", batch_size=100))
    assert facts.effective_batch == 22
    assert any("fewer than the batch size of 100" in warning for warning in facts.warnings)


def test_a_model_wholly_in_eval_mode_is_said():
    facts = _inspect(_with("mlp", build_model=lambda: ZOO["mlp"].build_model().eval()))
    assert any("eval mode" in warning for warning in facts.warnings)


def test_a_model_partly_in_eval_mode_is_the_users_choice():
    assert _inspect(ZOO["partly_eval"]).warnings == ()


def test_workers_on_a_stream_that_does_not_split_itself_are_said():
    facts = _inspect(_with("stream", loader_options={"num_workers": 2}))
    assert any("1 is used" in warning for warning in facts.warnings)
    assert set(facts.loader_samples_per_s) <= {0, 1}


def test_the_optimizer_and_what_it_offers():
    facts = _inspect(ZOO["mlp"])
    assert facts.optimizer == "AdamW"
    assert facts.optimizer_implementations == ("for_loop", "foreach", "fused")
    assert facts.optimizer_implementation == "for_loop"


def test_loading_that_costs_next_to_nothing_is_not_given_workers():
    """A loader that is 50 times faster than the step on a CPU can win 2 % at most."""
    assert _rates(lambda task, spec, batch, count: (1000.0, 0), step_samples_per_s=19.0) == {0: 1000.0}


@pytest.mark.parametrize(
    ("by_count", "tried"),
    [
        ({0: 100.0, 1: 90.0, 2: 180.0, 4: 190.0, 8: 400.0}, [0, 1, 2, 4]),
        ({0: 100.0, 1: 90.0, 2: 95.0}, [0, 1, 2]),
        ({0: 100.0, 1: 120.0, 2: 240.0, 4: 480.0, 8: 960.0}, [0, 1, 2, 4, 8]),
    ],
)
def test_worker_counts_are_doubled_until_one_adds_less_than_a_tenth(by_count, tried):
    assert list(_rates(lambda task, spec, batch, count: (by_count[count], 0), step_samples_per_s=1e6)) == tried


def _rates(rate, step_samples_per_s):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_rate", rate)
        spec = loading.LoaderSpec([], None, {}, torch.device("cpu"), user_dataset=[])
        return loading.loader_rates(ZOO["mlp"], spec, loading.Batch(micro=8), 8, step_samples_per_s).by_workers


def test_an_empty_dataset_is_named():
    with pytest.raises(TaskError, match="empty dataset"):
        _inspect(_with("mlp", build_dataset=lambda: TensorDataset(torch.empty(0, 6), torch.empty(0))))


def test_an_empty_stream_is_named():
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TaskError, match="empty dataset"):
        _inspect(_with("stream", build_dataset=Nothing))


def test_a_dataset_that_is_none_is_named():
    with pytest.raises(TaskError, match=r"__len__ and __getitem__.*got NoneType"):
        _inspect(_with("mlp", build_dataset=lambda: None))


def test_a_loss_that_is_not_a_number_ends_the_inspection():
    def compute_loss(model, batch):
        return ZOO["mlp"].compute_loss(model, batch) * float("nan")

    with pytest.raises(NonFiniteLoss, match="at optimizer step 1"):
        _inspect(_with("mlp", compute_loss=compute_loss))


class Flipping(Dataset):
    """Flips a coin for each sample read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        row = torch.arange(4.0)
        return row.flip(0) if torch.rand(()) < 0.5 else row


def _dataset_facts(dataset, **entries):
    return inspect_dataset(Task(nn.Identity, lambda: dataset, lambda model, batch: None, **entries), dataset)


def test_augmentation_is_seen_even_if_it_flips_a_coin():
    assert not _dataset_facts(Flipping()).deterministic


def test_randomness_in_collate_is_seen():
    def collate(samples):
        return torch.stack(samples) + torch.rand(())

    assert not _dataset_facts(list(torch.ones(20, 3)), collate=collate).deterministic


def test_samples_that_hold_not_a_number_still_read_the_same():
    assert _dataset_facts(list(torch.full((20, 3), float("nan")))).deterministic


def test_samples_of_one_shape_stack_and_others_do_not():
    assert _dataset_facts([torch.zeros(3)] * 5).stackable
    ragged = _dataset_facts([torch.zeros(3 + index) for index in range(5)])
    assert (ragged.stackable, ragged.shapes_vary) == (False, True)


def test_a_collate_that_pads_to_one_length_does_not_vary():
    def collate(samples):
        return torch.stack([nn.functional.pad(sample, (0, 9 - len(sample))) for sample in samples])

    found = _dataset_facts([torch.zeros(3 + index) for index in range(5)], collate=collate)
    assert (found.stackable, found.shapes_vary) == (False, False)


def test_samples_read_include_the_first_and_the_last_and_are_not_in_order():
    read = [int(sample) for sample in _dataset_facts(torch.arange(1000).unbind()).samples]
    assert {0, 999} <= set(read)
    assert len(read) == 16
    assert read != sorted(read)


class Square(nn.Module):
    """A weight that is multiplied by hand: no cut of it is found, and it is no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).view(-1, 8, 8).reshape(-1, 64))


def _square():
    def loss(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y % 2)

    return dataclasses.replace(ZOO["mlp"], build_model=Square, compute_loss=loss, variants={})


def test_a_change_that_cannot_be_made_is_found_at_inspection_and_left_out():
    """A view of 64 features holds no fewer: no ratio can be had. Low rank can, unless the only layer is untouchable."""

    def low_rank(*untouchable):
        return LowRank(kind="svd", least_features=2, untouchable=untouchable)

    tries = {
        "pruning": tuple(Settings(pruning=Pruning(kind="structured", ratio=ratio)) for ratio in (0.25, 0.5)),
        "low_rank": (Settings(low_rank=low_rank()), Settings(low_rank=low_rank("first"))),
    }
    facts = _inspect(_square(), tries=tries)
    assert list(facts.left_out) == ["pruning"]
    assert "settings.pruning" not in facts.left_out["pruning"]
    assert low_rank().unavailable(facts) is None
    assert "no linear layers that are not tied, untouchable" in low_rank("first").unavailable(facts)


def test_what_auto_offers_is_tried_too_and_a_change_that_can_be_made_is_left_alone():
    facts = _inspect(ZOO["mlp"], tries={"pruning": (), "low_rank": ()})
    assert facts.left_out == {}
    assert len(Pruning.choices(facts)) == 3


def test_without_a_drop_nothing_is_tried():
    assert _inspect(_square()).left_out == {}


def test_what_raises_with_a_change_is_left_out_with_the_error():
    """The layers that make the output are found on a copy, and this model has none."""

    class Single(nn.Sequential):
        def __deepcopy__(self, memo):
            raise TypeError("there is one of me")

    def build():
        return Single(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    facts = _inspect(dataclasses.replace(_square(), build_model=build), tries={"low_rank": ()})
    assert facts.left_out["low_rank"] == "the model raises TypeError with it: there is one of me"
