"""What fits a script is chosen from its own steps, whatever they read; what it has is still there afterwards."""

from __future__ import annotations

import pytest
import torch
from script_lines import TWICE, choose_here

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def data(rows=512):
    while True:
        yield torch.randn(rows, 32), torch.randint(0, 8, (rows,))

def build(*blocks):
    blocks = blocks or [Block() for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(32, 8))

def train(loss_of, model, steps=9):
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (x, y) in zip(range(steps), data()):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def choose(write, monkeypatch):
    def choose(body):
        answer = choose_here(write(body), monkeypatch)
        return answer if isinstance(answer, str) else answer.found

    return choose


ROUTED = """
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 2), nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            out[rows] = expert(x[rows])
        return out
"""

READ = {
    "what is logged": (
        """
def loss_of(model, x, y):
    out = model(x)
    loss = F.cross_entropy(out, y)
    print(loss.item(), (out.argmax(1) == y).sum().item(), len(torch.where(out > 0)[0]), len(y.nonzero()))
    return loss * 0.1 if loss.item() > 10 else loss
train(loss_of, build())
""",
        None,
    ),
    "norms of gradients": (
        """
model = build()
optimizer = torch.optim.AdamW(model.parameters())
for step, (x, y) in zip(range(9), data()):
    F.cross_entropy(model(x), y).backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    if torch.isfinite(total):
        optimizer.step()
    optimizer.zero_grad()
""",
        None,
    ),
    "rows by numbers": (
        """
def loss_of(model, x, y):
    losses = F.cross_entropy(model(x), y, reduction="none")
    rows = (y > 2).nonzero().flatten()
    return losses[rows].mean() + losses[torch.where(losses > losses.median())[0]].mean()
train(loss_of, build())
""",
        None,
    ),
    "rows by a mask": (
        """
def loss_of(model, x, y):
    mask = y > 2
    return F.cross_entropy(model(x)[mask], y[mask])
train(loss_of, build())
""",
        "DynamicOutputShapeException: aten.nonzero",
    ),
    "experts": (
        ROUTED
        + """
def loss_of(model, x, y):
    return F.cross_entropy(model(x).view(16, 32, 8).transpose(1, 2), y.view(16, 32))
train(loss_of, build(Block(), Routed(), Block()))
""",
        "DynamicOutputShapeException: aten.nonzero",
    ),
    "a penalty on gradients": (
        """
def loss_of(model, x, y):
    out = model(x.requires_grad_())
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + slope.square().sum(1).mean()
train(loss_of, build())
""",
        None,
    ),
    "a model that looks at its loss": (
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = build()
    def forward(self, x, y):
        loss = F.cross_entropy(self.body(x), y)
        return loss if loss.item() < 10 else loss.clamp(max=10)
train(lambda model, x, y: model(x, y), Model())
""",
        "DataDependentOutputException",
    ),
}
"""Scripts, and why real steps are taken; None where none are."""


@pytest.mark.medium
@pytest.mark.parametrize("name", READ)
def test_a_step_that_reads_values_is_traced_or_made_again_with_its_whole_batch(name, choose):
    body, reason = READ[name]
    found = choose(body)
    assert not isinstance(found, str), found
    assert found.how == ("traced" if reason is None else "probed")
    assert reason is None or reason in found.reason


TEACHER = """
class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 8)
    def forward(self, x):
        return self.head(x)
student, teacher = Student(), build(Block())

def before(model, x, y):
    with torch.no_grad():
        wanted = teacher(x)
    return F.mse_loss(model(x), wanted)

def after(model, x, y):
    out = model(x)
    with torch.no_grad():
        wanted = teacher(x)
    return F.mse_loss(out, wanted)

def frozen(model, x, y):
    out = model(x)
    return F.mse_loss(out, teacher.requires_grad_(False)(x))

def alone(model, x, y):
    return F.cross_entropy(model(x), y)
"""
ROWS = 2**14
HIDDEN = ROWS * 128 * 4


@pytest.mark.medium
@pytest.mark.parametrize("loss", ["before", "after", "frozen"])
def test_a_teacher_in_train_mode_counts(loss, choose):
    """It takes a hidden layer and its tanh, beside a student that has 8 outputs of a row."""
    found = choose(TEACHER + train_of(loss))
    assert 2 * HIDDEN <= temporary_bytes(found) <= 2.1 * HIDDEN
    assert temporary_bytes(choose(TEACHER + train_of("alone"))) < HIDDEN / 4


def temporary_bytes(found):
    """At the peak."""
    return sum(one.num_bytes for one in found.fills if one.kind == "temporary")


def train_of(loss):
    return f"""
optimizer = torch.optim.AdamW(student.parameters())
for step, (x, y) in zip(range(9), data({ROWS})):
    {loss}(student, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.medium
def test_an_evaluation_before_the_first_pass_does_not_count(choose):
    """There are no states of an optimizer then."""
    evaluates = f"""
with torch.no_grad():
    teacher(torch.randn({ROWS}, 32))
"""
    assert temporary_bytes(choose(TEACHER + evaluates + train_of("alone"))) < HIDDEN / 4


@pytest.mark.medium
def test_a_teacher_of_the_first_batch_counts_and_an_evaluation_before_does_not(choose):
    """The first batch that is drawn to train on is the largest."""
    body = f"""
rows = {ROWS}, 256, 256
batches = torch.utils.data.DataLoader([next(data(each)) for each in rows], batch_size=None)
for x, y in batches:
    with torch.no_grad():
        teacher(x.repeat(4, 1))
optimizer = torch.optim.AdamW(student.parameters())
for x, y in batches:
    before(student, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert 2 * HIDDEN <= temporary_bytes(choose(TEACHER + body)) <= 2.1 * HIDDEN


@pytest.mark.medium
def test_what_a_smaller_pass_has_beside_it_counts_in_the_largest(choose):
    """The first step has the largest batch, the second an evaluation."""
    body = f"""
optimizer = torch.optim.AdamW(student.parameters())
for step, rows in enumerate((512, 256, 256)):
    x, y = next(data(rows))
    if step == 1:
        with torch.no_grad():
            teacher(torch.randn({ROWS}, 32))
    alone(student, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert 2 * HIDDEN <= temporary_bytes(choose(TEACHER + body)) <= 2.1 * HIDDEN


@pytest.mark.medium
@pytest.mark.parametrize("asks_first", [True, False])
def test_a_teacher_in_another_thread_is_left_alone(asks_first, choose):
    """What records a pass is of the script's own thread."""
    body = f"""
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
@torch.no_grad()
def ask(x):
    return teacher(x)
def threaded(model, x, y):
    wanted = pool.submit(ask, x) if {asks_first} else None
    out = model(x)
    return F.mse_loss(out, (wanted or pool.submit(ask, x)).result())
"""
    assert choose(TEACHER + body + train_of("threaded")).how == "traced"


@pytest.mark.medium
def test_calls_without_gradients_are_looked_into_once_for_each_shape(choose, tmp_path):
    """None before the first pass; a mode that sees each operation makes small ones many times slower."""
    body = f"""
from torch.utils._python_dispatch import _get_current_dispatch_mode
seen = []
class Teacher(Block):
    def forward(self, x):
        seen.append((len(x), _get_current_dispatch_mode() is not None))
        return super().forward(x)
teacher = Teacher()
@torch.no_grad()
def ask(rows):
    teacher(torch.randn(rows, 32))
ask(4)
def loss_of(model, x, y):
    out = model(x)
    for rows in (4, 4, 8, 4, 8):
        ask(rows)
    return F.cross_entropy(out, y)
try:
    train(loss_of, build())
finally:
    torch.save(seen, {str(tmp_path / "seen.pt")!r})
"""
    choose(body)
    seen = torch.load(tmp_path / "seen.pt")
    assert seen[:6] == [(4, False), (4, True), (4, False), (8, True), (4, False), (8, False)]
    assert not any(is_seen for _, is_seen in seen[6:])


ODD = (
    TWICE
    + """
seen = []
def loss_of(model, x, y):
    seen.append(x)
    rows = ROWS if len(seen) == 2 else 512
    loss = F.cross_entropy(model(x[:rows]), y[:rows])
    return Twice.apply(loss) if len(seen) == 2 else loss
train(loss_of, build())
"""
)


@pytest.mark.medium
def test_a_pass_that_was_not_seen_whole_is_not_left_out(choose):
    """It may take more than the others."""
    assert "its loss goes by what is not seen (TwiceBackward)" in choose(ODD.replace("ROWS", "512"))


@pytest.mark.medium
def test_a_smaller_one_is_left_out_and_noted(write, monkeypatch):
    """It has half the others' batch."""
    answer = choose_here(write(ODD.replace("ROWS", "256")), monkeypatch)
    assert answer.found.how == "traced"
    assert answer.notes == (
        "a pass of a smaller batch was not seen whole: its loss goes by what is not seen (TwiceBackward)",
    )


@pytest.mark.medium
def test_what_the_script_has_is_there_when_it_ends(choose, tmp_path):
    """Its ``finally`` saves outputs and gradients: they are those of its own last step. Calls are torch's own again."""
    call = torch.nn.Module.__call__
    found = choose(
        f"""
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs, losses = [], []
try:
    for x, y in data():
        outputs.append(model(x))
        losses.append(F.cross_entropy(outputs[-1], y))
        optimizer.zero_grad()
        losses[-1].backward()
        own = [p.grad.clone() for p in model.parameters()]
        kept = [each.detach().clone() for each in outputs]
        optimizer.step()
finally:
    end = {{"outputs": outputs, "kept": kept, "losses": losses, "own": own}}
    torch.save({{**end, "grads": [p.grad for p in model.parameters()]}}, {str(tmp_path / "end.pt")!r})
"""
    )
    assert found.how == "traced"
    assert torch.nn.Module.__call__ is call
    end = torch.load(tmp_path / "end.pt")
    assert [one.numel() for one in end["losses"]] == [1, 1, 1]
    assert all(map(torch.equal, end["outputs"], end["kept"]))
    assert all(map(torch.equal, end["grads"], end["own"]))
