"""The scripts, by their style."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Style:
    """A script, three epochs of training on a CPU in a second."""

    script: str
    """Of its file, without the suffix."""
    flags: str = ""
    batch: int | None = None
    """Samples of an optimizer step, where its flags take a batch and an accumulation."""
    longer: str = ""
    """Words that have it train for as long as a trial of a search takes; empty where none is made."""
    has_task: bool = False
    """Whether its plans say for which model they are, as a search's do: where others are trained beside it."""
    has_images: bool = False
    model_draws: bool = False
    """Whether its model, or its loop, draws random numbers between passes (dropout, noise)."""
    dataset_draws: bool = False
    """Whether its dataset draws from generators that each loader worker has of its own (augmentation)."""
    has_workers: bool = False

    @property
    def name(self) -> str:
        """Of the script, with what tells it from others of the same."""
        return " ".join([self.script, *(word for word in self.flags.split() if self.flags.startswith("--name"))])

    @property
    def words(self) -> list[str]:
        """What Python is started with."""
        return [str(SCRIPTS / f"{self.script}.py"), *shlex.split(self.flags)]


_BY_FLAGS = "--batch-size 8 --grad-accum 1"
_LONGER = "--epochs 1000000"
_OF_TRAINER = (
    "--output_dir out --use_cpu --num_train_epochs 3 --per_device_train_batch_size 8 --learning_rate 5e-4 "
    "--report_to none --save_strategy no --eval_strategy epoch --disable_tqdm true --logging_strategy no"
)

STYLES = (
    Style("plain_loop"),
    Style("accumulation", _BY_FLAGS, batch=8),
    Style("accumulation_undivided", _BY_FLAGS, batch=8, longer=_LONGER, model_draws=True),
    Style("lr_by_batch", _BY_FLAGS, batch=8, longer=_LONGER),
    Style("words_of_hydra", "data.batch_size=8 +trainer.accumulate_grad_batches=1", batch=8),
    Style("by_click", "--bs 8 --accum-steps 1", batch=8),
    Style("iterable_dataset"),
    Style("infinite_sampler"),
    Style("infinite_loader", has_images=True, dataset_draws=True),
    Style("zipped_loaders", dataset_draws=True),
    Style("fixmatch", dataset_draws=True),
    Style("resampled_negatives"),
    Style("own_reference", has_workers=True),
    Style("dataset_set_epoch"),
    Style("transform_replaced", has_images=True),
    Style("progressive_size", has_images=True),
    Style("linear_probe", has_task=True, model_draws=True),
    Style("head_first", has_task=True),
    Style("traced_first", has_images=True),
    Style("exported_first"),
    Style("gan", model_draws=True),
    Style("gan", "--name-it", has_task=True, model_draws=True),
    Style("sam"),
    Style("sam", "--name base"),
    Style("sam", "--name sam"),
    Style("ema"),
    Style("teacher", has_task=True),
    Style("step_schedule"),
    Style("epoch_schedule", has_images=True),
    Style("closure", longer="1000000"),
    Style("own_autocast"),
    Style("own_checkpointing", model_draws=True),
    Style("own_compile"),
    Style("bptt", model_draws=True),
    Style("dropout", model_draws=True),
    Style("noise_in_loop", has_images=True, model_draws=True),
    Style("no_loader", model_draws=True),
    Style("augmented", has_images=True, dataset_draws=True, has_workers=True),
    Style("weighted_sampler", has_images=True, dataset_draws=True),
    Style("lists_of_images", has_images=True),
    Style("distributed_sampler", has_workers=True),
    Style("trainer", _OF_TRAINER, batch=8),
    Style("accelerated"),
    Style("lightning_module", "--batch-size 8 --accumulate 1", batch=8),
)
