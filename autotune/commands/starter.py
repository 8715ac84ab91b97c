"""Task files that are written: by ``autotune init`` a tiny one that runs as it stands, every optional piece commented
out; by ``autotune estimate --hf`` one that trains the model of a configuration."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import TaskError, UserError
from ..files import FOLDER, hash_of, replacing
from ..report.printing import tell
from ..units import slug

TEMPLATE = '''\
"""What autotune should tune. Replace the bodies by your own; the names are what matters.

    autotune search {name} --budget 2GiB      finds the fastest settings within 2 GiB, writes plan.yaml
    autotune show plan.yaml                   explains it

Nothing here imports autotune. Random numbers are seeded before build_model.
"""

import torch
from torch import nn


def build_model():
    """The model as you train it, on the CPU; autotune moves it."""
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def build_dataset():
    """What torch.utils.data.DataLoader reads: map-style (as here) or iterable. Take real data: loading is tuned too."""
    inputs = torch.randn(2048, 64)
    targets = (inputs @ torch.randn(64, 10)).argmax(dim=1)
    return torch.utils.data.TensorDataset(inputs, targets)


def compute_loss(model, batch):
    """Forward pass and loss of one batch, already on the device.

    Return the mean over the batch; or (loss_sum, count), which keeps splitting a batch exact for losses that are
    averaged over tokens or valid pixels.
    """
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


# The samples that one optimizer step sees today. It is held fixed; without it the batch is free, which also changes
# the learning rate that suits it.
batch_size = 128


# Everything below is optional.

# micro_batch_size = 32  # The samples of a forward pass today, where you accumulate: gains are against that job.


# precision = "bf16"  # What you train in today, by autocast: "bf16" or "fp16"; or "tf32". As it stands otherwise.


# max_grad_norm = 1.0  # Gradients are clipped to this global norm before each optimizer step.


# def build_optimizer(parameters):  # AdamW otherwise. Name the argument `model` to get the model instead.
#     return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# def build_scheduler(optimizer, num_steps):  # Your learning rates over so many steps: quality is judged after those.
#     return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, num_steps)


# def collate(samples):  # torch's default_collate otherwise.
#     return torch.utils.data.default_collate(samples)


# def length(sample):  # In tokens, where lengths vary: batches are cut by it. The shapes of samples tell otherwise.
#     return len(sample[0])


# def build_sampler(dataset):  # A seeded shuffle otherwise.
#     return torch.utils.data.RandomSampler(dataset)


# def after_backward(model):  # Once the gradients of an optimizer step are whole, before they are clipped.
#     nn.utils.clip_grad_value_(model.parameters(), 1.0)


# def after_step(model):  # Once the optimizer has stepped: a weight average, or weights held in bounds.
#     for parameter in model.parameters():
#         parameter.data.clamp_(-8.0, 8.0)


# def evaluate(model):  # Scores of data held out, higher is better; or their mean. It judges lossy techniques.
#     inputs, targets = build_dataset().tensors
#     return (model(inputs).argmax(dim=1) == targets).float()


# def infer(model, batch):  # Outputs, for `autotune search --inference`.
#     return model(batch[0])


# loader_options = {{"num_workers": 2}}  # What your DataLoader is given today; torch's defaults otherwise.


# blocks = ["2", "3"]  # Module paths that checkpointing chooses from; it finds repeated blocks by itself.


# shards_by_worker = True  # For an iterable dataset that splits itself between loader workers.
'''

_OF_CONFIG = '''\
"""{words}. Written by `autotune estimate --hf`."""
# the configuration: {digest}

from autotune.integrations.from_config import task_of_config

task = task_of_config({path!r}, sequence={sequence}, lora={lora})
'''


def write_starter(path: Path) -> None:
    """Write a commented task file that runs.

    Raises:
        TaskError: the name does not end in .py, something stands at ``path`` already, or it cannot be written.
    """
    if path.suffix != ".py":
        raise TaskError(
            f"{path}: a task file's name ends in .py. Use {path.with_suffix('.py') if path.name else 'model.py'}."
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(name=path.name))
    except FileExistsError:
        raise TaskError(f"{path}: exists already and is left as it is. Choose another name, or remove it.") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be written: {error.strerror or error}. Choose another path.") from None


def write_task(config: Path, sequence: int, lora: int | None) -> str:
    """Write a task file below ``.autotune``, whose traces are kept as any task's are.

    Args:
        config: a ``config.json``, or the folder that holds one.
        sequence: tokens in a sample.
        lora: the adapters' rank; None trains the whole model.

    Returns:
        Its path.

    Raises:
        UserError: no such file, or the task file cannot be written.
    """
    path = Path(os.path.abspath(config / "config.json" if config.is_dir() else config))
    try:
        digest = hash_of(path)
    except OSError as error:
        raise UserError(
            f"--hf {config}: a model's config.json was expected, or the folder that holds it: {error.strerror}."
        ) from None
    name = slug(path.parent.name if path.name == "config.json" else path.stem) or "model"
    how = "AdamW over all parameters" if lora is None else f"LoRA of rank {lora} and AdamW, all else frozen"
    words = f"{name}: sequences of {sequence} tokens (or images, of a model of those), {how}"
    made = FOLDER / "hf" / f"{name}-{sequence}{f'-lora-{lora}' if lora else ''}.py"
    with replacing(made, UserError) as temporary:
        temporary.write_text(
            _OF_CONFIG.format(words=words, digest=digest, path=str(path), sequence=sequence, lora=lora),
            encoding="utf-8",
        )
    tell(f"{words}; weights in the type that the configuration states. As a task file: {made}")
    return str(made)
