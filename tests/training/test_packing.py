"""Samples of a micro-batch in one row without padding: only where a model keeps them apart."""

from __future__ import annotations

import dataclasses
import pickle
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from line_task import line, training_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import SequentialSampler

import autotune
from autotune.data.packing import Packing, few, in_one_row
from autotune.data.token_batches import TokenCut, even_groups, extremes, packed
from autotune.errors import PlanError
from autotune.measure import InspectOptions
from autotune.measure.inspect import inspect_task
from autotune.plan import Plan
from autotune.ranks import Ranks
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.precision import Precision

LENGTHS = [9, 3, 5, 2, 8, 4, 6, 7]
PACKED = Batch(tokens=20, effective=8, packed=True)
CPU = torch.device("cpu")


def samples_of(lengths=LENGTHS):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 32, (length,), generator=g) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def pad(samples):
    ids = pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    labels = pad_sequence([one["labels"] for one in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels}


def sum_over_labels(model, batch):
    logits = model(**{name: value for name, value in batch.items() if name != "labels"})
    logits, labels = getattr(logits, "logits", logits)[:, :-1], batch["labels"][:, 1:]
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def mean_over_labels(model, batch):
    loss, count = sum_over_labels(model, batch)
    return loss / count


class Causal(nn.Module):
    """Attention of each token to those before it in its sample, which it knows by positions, if it looks at them."""

    def __init__(self, looks=True, has_zeros=False):
        super().__init__()
        self.looks = looks
        self.embed, self.places = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.head = nn.Linear(8, 32)
        if has_zeros:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, input_ids, position_ids=None):
        length = input_ids.shape[1]
        order = torch.arange(length)
        places = order[None] if position_ids is None else position_ids
        mask = order[None] <= order[:, None]
        if self.looks:
            sample = (places == 0).cumsum(1)
            mask = mask & (sample[:, :, None] == sample[:, None, :])
        x = self.embed(input_ids) + self.places(places)
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x, mask.expand(len(x), -1, -1)))


def job(model=Causal, **pieces):
    pieces = {"compute_loss": sum_over_labels, "collate": pad, "batch_size": 8, **pieces}
    return autotune.Task(
        build_model=model,
        build_dataset=samples_of,
        build_sampler=SequentialSampler,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **pieces,
    )


def test_a_row_by_hand():
    """Lists and tensors; each sample's first label, which only another's tokens could tell, is left out."""
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": torch.tensor([8, 9]), "labels": [-100, 9]}]
    found = {name: value.tolist() for name, value in in_one_row(rows).items()}
    assert found == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
    }
    assert rows[0]["labels"] == [5, 6, 7]


def test_a_row_is_what_transformers_makes_of_the_same_samples():
    collator = pytest.importorskip("transformers").DataCollatorWithFlattening()
    ours, theirs = in_one_row(samples_of()), collator(samples_of())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype for name, value in ours.items())


def test_rows_are_filled_by_hand():
    """Into 10: 9; 7 + 3; 6 + 4; 5 + 2. What is longer than a row is one by itself."""
    lengths = [2, 9, 3, 7, 4, 5, 6, 30]
    assert packed(range(8), lengths, 10) == [[7], [1], [3, 2], [6, 4], [5, 0]]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_rows_in_equal_numbers(size):
    cuts = [TokenCut(range(8), PACKED, False, LENGTHS, Ranks(rank, size, ())) for rank in range(size)]
    found = [list(iter(cut)) for cut in cuts]
    assert sorted(n for rows in found for row in rows for n in row) == list(range(8))
    assert len({len(rows) for rows in found}) == 1
    assert all(sum(LENGTHS[n] for n in row) <= 20 for rows in found for row in rows)


def test_rows_of_too_few_samples_are_joined_where_they_fit():
    assert even_groups([[0], [1], [2]], [9, 5, 2], 16, 2, is_packed=True) == [[0], [1, 2]]
    assert even_groups([[0], [1], [2]], [9, 5, 2], 6, 2, is_packed=True) == [[0], [1]]


@pytest.mark.parametrize("seed", range(20))
def test_no_row_is_longer_than_the_longest_that_is_measured(seed):
    """Of random orders: tokens; and where a step may have more samples than a row, samples of the shortest."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 30) for _ in range(40)]
    batch = Batch(tokens=rng.choice([20, 60, 400]), effective=rng.choice([3, 16]), packed=True)
    measured = [[lengths[n] for n in row] for row in extremes(lengths, batch)]
    assert all(len(row) <= batch.num_samples for row in measured)
    seen = []
    for _ in range(30):
        cut = TokenCut(rng.sample(range(40), 40), batch, False, lengths)
        seen += [[lengths[n] for n in row] for row in iter(cut)]
    assert max(map(sum, measured)) >= max(map(sum, seen))
    assert max(map(len, measured)) >= max(map(len, seen))
    assert max(map(sum, measured)) < max(batch.tokens, *lengths) + 30


def test_the_longest_row_by_hand():
    """20 tokens: 9 + 8 leave 3; the shortest that fills it is 3. Of many samples 2 + 3 + 4 + 5, and 6 in place of 6."""
    assert [[LENGTHS[n] for n in row] for row in extremes(LENGTHS, PACKED)] == [[9, 8, 3], [2, 3, 4, 5, 6]]
    outlier = [50, *LENGTHS]
    assert extremes(outlier, PACKED)[0] == [0]


def test_samples_that_are_compared_fit_in_one_row():
    assert few([30, 4, 2, 5, 6], 18) == [4, 3, 2]
    assert few([10, 4, 7], 11) == [1, 2]
    assert few([10, 4, 7], 10) == []


def test_gradients_and_losses_are_those_of_the_whole_padded_step():
    """Three rows of unlike numbers of labels; the loss is their mean over the step."""
    found = []
    for batch in (Batch(micro=8), PACKED):
        training = training_of(job(), batch=batch)
        total = weight = 0.0
        hook = training.optimizer.register_step_pre_hook(
            lambda optimizer, *_: found.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])
        )
        for micro in training.loader:
            result = training.step(micro)
            total += float(result.loss) * result.weight
            weight += result.weight
        hook.remove()
        found.append((total / weight, weight))
    (whole, (loss, count)), (parts, (packed_loss, packed_count)) = found[:2], found[2:]
    assert count == packed_count == sum(LENGTHS) - len(LENGTHS)
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_row_has_no_padding_and_stands_for_its_samples():
    training = training_of(job(), batch=PACKED)
    for batch in training.loader:
        position = training.loader.positions.take(batch)
        assert batch["input_ids"].shape[0] == 1
        assert batch["input_ids"].shape[1] <= 20
        assert int((batch["position_ids"] == 0).sum()) == position.num_samples


def test_a_model_that_does_not_look_at_positions_is_refused():
    with pytest.raises(
        PlanError,
        match=r"settings\.batch\.packed: packing changes this model's gradient by \d+\.\d%: samples see each other",
    ):
        training_of(job(lambda: Causal(looks=False)), batch=PACKED)


def test_zeros_that_hide_other_samples_are_seen_through_and_stay():
    """All logits are 0 before training, whatever comes to the head."""
    with pytest.raises(PlanError, match="see each other"):
        training_of(job(lambda: Causal(looks=False, has_zeros=True)), batch=PACKED)
    model = training_of(job(lambda: Causal(has_zeros=True)), batch=PACKED).model
    assert not model.head.weight.any()
    assert not model.head.bias.any()


def test_a_leak_is_seen_in_half_precision_too():
    settings = {"batch": PACKED, "precision": Precision(kind="bf16")}
    with pytest.raises(PlanError, match="see each other"):
        training_of(job(lambda: Causal(looks=False)), **settings)
    assert training_of(job(), **settings).batch == PACKED
    assert not torch.is_autocast_enabled("cpu")


class Leaking(Causal):
    """Of each token, a little comes to the next, also where that is another sample's: beside attention, or of it."""

    def __init__(self, by="attention", little=1e-6):
        super().__init__(looks=by == "shift")
        self.by, self.scale = by, nn.Parameter(torch.full((8,), little))

    def forward(self, input_ids, position_ids=None):
        logits = super().forward(input_ids, position_ids)
        x = self.embed(input_ids)
        came = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] if self.by == "shift" else logits[..., :8]
        return self.head(x + self.scale * came)


ROUNDINGS = {
    "fp32": (lambda model: model, nullcontext),
    "autocast": (lambda model: model, partial(torch.autocast, "cpu", torch.bfloat16)),
    "bf16": (lambda model: model.bfloat16(), nullcontext),
}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("by", ["attention", "shift"])
def test_what_comes_of_another_sample_is_seen_however_little(rounding, by):
    """By its part of the gradient of what scales it."""
    changed, context = ROUNDINGS[rounding]
    torch.manual_seed(0)
    found = obstacle(changed(Leaking(by)), samples=samples_of([15, 12, 9]), context=context)
    assert "samples see each other" in str(found)


class WithKeys(Causal):
    """The gradient of a bias of keys is 0, and is computed as rounding alone."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input_ids, position_ids=None):
        length = input_ids.shape[1]
        places = torch.arange(length)[None] if position_ids is None else position_ids
        sample = (places == 0).cumsum(1)
        mask = torch.ones(length, length, dtype=torch.bool).tril() & (sample[:, :, None] == sample[:, None, :])
        x = self.embed(input_ids) + self.places(places)
        return self.head(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), x, mask))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("made", [Causal, WithKeys])
def test_rounding_is_no_other_gradient(rounding, made):
    changed, context = ROUNDINGS[rounding]
    torch.manual_seed(0)
    assert obstacle(changed(made()), context=context) is None
    assert obstacle(changed(made()), context=context, loss=mean_over_labels, accumulates=False) is None


def test_a_mean_over_what_varies_is_for_steps_of_one_row():
    """Rows of 14 and of 3 tokens would weigh as 2 samples and 1."""
    assert "to be returned as (loss_sum, count)" in obstacle(Causal(), loss=mean_over_labels)
    assert obstacle(Causal(), loss=mean_over_labels, accumulates=False) is None
    one_row = Batch(micro=8, tokens=8 * 9, packed=True)
    assert training_of(job(compute_loss=mean_over_labels), batch=one_row).batch == one_row
    with pytest.raises(PlanError, match="what packing changes cannot be told: one by one"):
        training_of(job(compute_loss=mean_over_labels), batch=PACKED)


def test_samples_of_any_form_that_see_each_other_are_refused():
    """Pairs, packed by the task, to a layer whose state goes on from one to the next."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer = nn.Embedding(32, 8), nn.GRU(8, 32, batch_first=True)

        def forward(self, tokens):
            return self.layer(self.embed(tokens))[0]

    def pad_pairs(some):
        tokens, labels = zip(*some, strict=True)
        return pad_sequence(tokens, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)

    def compute_loss(model, batch):
        tokens, labels = batch
        return cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()

    pairs = [(one["input_ids"], one["labels"].roll(-1)) for one in samples_of([300, 200, 100])]
    pieces = {"collate": pad_pairs, "loss": compute_loss, "samples": pairs}
    pieces["pack"] = lambda some: tuple(torch.cat(part)[None] for part in zip(*some, strict=True))
    torch.manual_seed(0)
    assert "samples see each other" in str(obstacle(Recurrent(), **pieces))


def test_layers_left_out_at_random_are_the_same_in_each_pass():
    class LayerDrop(Causal):
        def forward(self, input_ids, position_ids=None):
            left_out = torch.rand(()) < 0.5
            return super().forward(input_ids, position_ids) * (0.5 if left_out else 1.0)

    assert obstacle(LayerDrop()) is None


def test_what_is_random_by_sample_is_told():
    class DropPath(Causal):
        def forward(self, input_ids, position_ids=None):
            logits = super().forward(input_ids, position_ids)
            return logits * (torch.rand(len(logits), 1, 1) + 0.5)

    assert "Something is random in each pass" in obstacle(DropPath())


def test_buffers_that_are_replaced_and_numbers_stay_as_they_were():
    class Averaging(Causal):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(()))
            self.calls = 0

        def forward(self, input_ids, position_ids=None):
            self.average = self.average * 0.9 + 1
            self.calls += 1
            return super().forward(input_ids, position_ids)

    model = Averaging()
    before = model.average
    assert obstacle(model) is None
    assert model.average is before
    assert (before.item(), model.calls) == (0.0, 0)
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"token_type_ids": [0, 1]}, "these have token_type_ids too"),
        ({"position_ids": [0, 1], "weights": [1, 1]}, "these have position_ids, weights too"),
        ({"attention_mask": [1, 0]}, "one has zeros in it"),
        ({"attention_mask": [1, 1], "length": 2}, None),
    ],
)
def test_inputs_that_a_row_would_drop_are_named(more, reason):
    rows = [{"input_ids": [5, 6], "labels": [5, 6], **more} for _ in range(2)]

    def collate(some):
        return {name: torch.tensor([one[name] for one in some]) for name in ("input_ids", "labels")}

    found = obstacle(Causal(), samples=rows, collate=collate)
    assert found is None if reason is None else reason in found and "the task's own pack" in found


def test_an_empty_list_in_a_row_says_no_type():
    row = in_one_row([{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [], "labels": []}])
    assert row["input_ids"].tolist() == [[5, 6]]
    assert {value.dtype for value in row.values()} == {torch.int64}


def test_positions_that_go_on_change_the_gradient():
    """No sample sees another, but the second's positions do not begin at 0."""

    def pack(samples):
        row = in_one_row(samples)
        return {**row, "position_ids": torch.arange(row["input_ids"].shape[1])[None] % 16}

    class Alone(Causal):
        def forward(self, input_ids, position_ids=None):
            x = self.embed(input_ids)
            return self.head(x + self.places(torch.arange(x.shape[1]) if position_ids is None else position_ids))

    with pytest.raises(PlanError, match="packing changes this model's gradient"):
        training_of(job(Alone, pack=pack), batch=PACKED)


def test_a_mean_over_samples_is_none_over_tokens():
    def mean_over_samples(model, batch):
        losses = []
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            one = {"input_ids": ids[None], "labels": labels[None]}
            one |= {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
            losses.append(mean_over_labels(model, one))
        return torch.stack(losses).mean()

    with pytest.raises(PlanError, match="packing changes this model's gradient"):
        training_of(job(compute_loss=mean_over_samples), batch=PACKED)


def test_labels_that_are_shifted_already_would_be_lost():
    """The first of each sample counts when padded."""

    def compute_loss(model, batch):
        logits = model(batch["input_ids"], batch.get("position_ids"))
        labels = batch["labels"]
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()

    with pytest.raises(PlanError, match=r"packing changes the loss: .* over \d+ packed, and .* over \d+ padded"):
        training_of(job(compute_loss=compute_loss), batch=PACKED)


def test_a_loss_that_takes_no_row_is_told():
    def compute_loss(model, batch):
        return model(batch["input_ids"] * batch["attention_mask"]).sum()

    with pytest.raises(PlanError, match="raises KeyError: 'attention_mask'"):
        training_of(job(compute_loss=compute_loss), batch=PACKED)


def test_samples_of_another_form_are_packed_by_the_task_alone():
    """Floats one after the other; the loss of a model of one weight is its sum over them."""
    rows = [torch.full((length,), 1.0 + number) for number, length in enumerate([3, 1, 2])]

    def compute_loss(model, batch):
        return model(batch).sum(), (batch > 0).sum()

    pieces = {"collate": lambda some: pad_sequence(some, batch_first=True), "compute_loss": compute_loss}
    batch = Batch(tokens=4, effective=3, packed=True)
    with pytest.raises(PlanError, match=r"dicts with input_ids and labels of one length, or by the task's own pack"):
        training_of(line(rows, **pieces), batch=batch)
    training = training_of(line(rows, pack=lambda some: torch.cat(some)[None], **pieces), batch=batch)
    assert [micro.tolist() for micro in training.loader] == [[[1.0, 1.0, 1.0, 2.0]], [[3.0, 3.0]]]


@pytest.mark.parametrize("looks", [True, False])
def test_a_collator_of_transformers_packs_too(looks):
    """It takes samples of lists; with sequence ids, as models without attention ask for."""
    collator = pytest.importorskip("transformers").DataCollatorWithFlattening(return_seq_idx=True)
    rows = [{name: value.tolist() for name, value in one.items()} for one in samples_of()]

    def collate(some):
        return pad([{name: torch.tensor(value) for name, value in one.items()} for one in some])

    def compute_loss(model, batch):
        assert "seq_idx" not in batch or batch["seq_idx"].shape == batch["input_ids"].shape
        return sum_over_labels(model, {name: value for name, value in batch.items() if name != "seq_idx"})

    pieces = {"build_dataset": lambda: rows, "collate": collate, "pack": collator, "compute_loss": compute_loss}
    task = dataclasses.replace(job(lambda: Causal(looks)), **pieces)
    if not looks:
        with pytest.raises(PlanError, match="see each other"):
            training_of(task, batch=PACKED)
        return
    batches = [*training_of(task, batch=PACKED).loader]
    assert sum(batch["input_ids"].numel() for batch in batches) == sum(LENGTHS)
    assert all("seq_idx" in batch for batch in batches)


def test_what_is_random_and_what_is_counted_stay_as_they_were():
    class Counting(Causal):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.drop = nn.Dropout(0.5)

        def forward(self, input_ids, position_ids=None):
            self.calls += 1
            return self.drop(super().forward(input_ids, position_ids))

    task = job(Counting)
    states = []
    for batch in (PACKED.model_copy(update={"packed": False}), PACKED):
        training = training_of(task, batch=batch)
        states.append((torch.get_rng_state(), training.model.calls.item(), training.model.drop.p))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1:] == states[1][1:] == (0.0, 0.5)


def test_halving_of_rows_is_refused():
    with pytest.raises(PlanError, match="a packed row"):
        autotune.apply(Plan(settings=Settings(batch=PACKED)), job(), halve_when_out_of_memory=True)


def inspected(monkeypatch, task):
    monkeypatch.setattr("autotune.measure.timing.loading._SHARE_S", 0.01)
    return inspect_task(task, InspectOptions(), "cpu")


def test_a_search_knows_before_any_trial(monkeypatch):
    """On a CPU, packed batches are tried where a space lists them."""
    facts = inspected(monkeypatch, job())
    assert facts.no_packed_batches() is None, facts.split_error
    assert Batch(micro=2, accumulate=4, tokens=18, packed=True).unavailable(facts) is None
    assert not any(batch.packed for batch in Batch.choices(facts))


def test_a_search_is_told_of_samples_that_see_each_other(monkeypatch):
    assert "see each other" in inspected(monkeypatch, job(lambda: Causal(looks=False))).no_packing


class Rows:
    """Counts the passes of a row."""

    def __init__(self, error=None):
        self.passed, self.error = 0, error

    def __call__(self, samples):
        self.passed += 1
        if self.error is not None:
            raise self.error
        return in_one_row(samples)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_lack_of_memory_ends_no_search(monkeypatch, error):
    assert "does not hold a few samples" in inspected(monkeypatch, job(pack=Rows(error))).no_packing


@pytest.mark.parametrize(
    "made", [partial(line, [torch.ones(2)] * 8, batch_size=8), partial(job, compute_loss=mean_over_labels)]
)
def test_nothing_is_packed_where_that_is_no_choice_anyway(monkeypatch, made):
    """Samples of one length, and a mean that a split changes."""
    rows = Rows()
    facts = inspected(monkeypatch, made(pack=rows))
    assert Batch(micro=2, accumulate=4, tokens=18, packed=True).unavailable(facts) is not None
    assert rows.passed == 0


def test_workers_are_given_what_they_can_unpickle():
    assert pickle.loads(pickle.dumps(Packing(None, None, sum_over_labels).row_of)) is in_one_row


TINY = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def causal(name, attention="sdpa", **config):
    import transformers

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2} if name == "GPT2" else SMALL
    made = transformers.AutoConfig.for_model(name.lower(), **sizes, **TINY, attn_implementation=attention, **config)
    return transformers.AutoModelForCausalLM.from_config(made)


def obstacle(model, **pieces):
    """Of samples of 9, 5 and 3 tokens."""
    packing = Packing(pieces.pop("collate", pad), pieces.pop("pack", None), pieces.pop("loss", sum_over_labels))
    return packing.obstacle(model, pieces.pop("samples", samples_of([9, 5, 3])), CPU, **pieces)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_models_of_transformers_keep_samples_apart_without_a_cache(name, attention):
    """By position_ids, as of transformers 5; a cache, which is on where nobody says otherwise, ends that."""
    pytest.importorskip("transformers", minversion="5.0")
    model = causal(name, attention, use_cache=False)
    assert obstacle(model) is None
    assert "use_cache = False" in obstacle(causal(name, attention))


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_gradients_of_models_of_transformers_are_those_of_padded_samples(name):
    pytest.importorskip("transformers", minversion="5.0")
    model, rows = causal(name, use_cache=False).eval().double(), samples_of()  # parts of Llama stay in fp32
    found = []
    for batch in (pad(rows), in_one_row(rows)):
        model.zero_grad()
        loss = mean_over_labels(model, batch)
        loss.backward()
        found.append((loss.detach(), [one.grad.clone() for one in model.parameters() if one.grad is not None]))
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_bert_is_refused():
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **SMALL))
    assert "see each other" in obstacle(model)
