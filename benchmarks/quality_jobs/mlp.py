"""A wide perceptron that learns a table: 64 columns that eight hidden causes make, and six classes.

Columns are random mixtures of the causes, bent by tanh, with noise. The class of a row is what a fixed random network
says of its causes; rows that it is undecided about are left out, and one in a hundred gets a class by chance. So the
best that can be read right is about 99 %.
"""

import functools
import itertools
import os

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH = 1024
CAUSES, COLUMNS, CLASSES = 8, 64, 6
NOISE = 0.12
"""Of a column, whose values are within -1 and 1."""
UNDECIDED = 0.4
"""Share of the rows that are left out."""
BY_CHANCE = 0.01
TRAINED, JUDGED, HELD_OUT = slice(0, 16_000), slice(16_000, 20_000), slice(20_000, 24_000)

batch_size = 256
weights = os.environ.get("QUALITY_WEIGHTS")
train_steps = 600
recovery_steps = 100


@functools.cache
def read_table() -> tuple[Tensor, Tensor]:
    """Columns (24000, 64) and classes; the same each time."""
    chance = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    number = HELD_OUT.stop
    causes = normal(round(number / (1 - UNDECIDED)) + 1, CAUSES)
    said = torch.tanh(causes @ normal(CAUSES, 32) / CAUSES**0.5 * 2) @ normal(32, CLASSES)
    first, second = (said - said.mean(0)).div(said.std(0)).topk(2).values.T
    clearest = (first - second).argsort(descending=True)[:number].sort().values
    classes = (said - said.mean(0)).div(said.std(0)).argmax(1)[clearest]
    drawn = torch.rand(number, generator=chance) < BY_CHANCE
    classes = torch.where(drawn, torch.randint(CLASSES, (number,), generator=chance), classes)
    columns = torch.tanh(causes[clearest] @ normal(CAUSES, COLUMNS) / CAUSES**0.5)
    return columns + NOISE * normal(number, COLUMNS), classes


def build_model() -> nn.Module:
    widths = [COLUMNS, WIDTH, WIDTH, WIDTH]
    hidden = [layer for sides in itertools.pairwise(widths) for layer in (nn.Linear(*sides), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def build_dataset() -> TensorDataset:
    columns, classes = read_table()
    return TensorDataset(columns[TRAINED], classes[TRAINED])


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    columns, classes = batch
    return nn.functional.cross_entropy(model(columns), classes)


def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def scores(model: nn.Module, part: slice) -> Tensor:
    """Of each row, whether its class is read right."""
    columns, classes = read_table()
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(batch).argmax(1) for batch in columns[part].split(1000)])
    return (found == classes[part]).float()


def evaluate(model: nn.Module) -> Tensor:
    return scores(model, JUDGED)
