"""``batch``: its contract, and gradients of split batches by hand arithmetic."""

from __future__ import annotations

import itertools

import pytest
import torch
from line_task import Stream, floats, line, step_gradients, training_of
from pydantic import ValidationError

from autotune.errors import PlanError
from autotune.techniques import Device, Settings, Technique
from autotune.techniques.batch import Batch, refused_split
from autotune.techniques.support.facts import Lengths
from autotune.testing.facts import BARE, facts_of
from autotune.testing.runs import relative_difference, run_applied
from autotune.testing.techniques import TechniqueContract
from autotune.testing.zoo import BATCH_SIZE, ZOO


class TestBatch(TechniqueContract):
    technique = Batch
    keeps_random_numbers = False
    lacking = (Batch(micro=4, accumulate=2), Batch(micro=3, accumulate=3, effective=8))

    def default(self) -> Technique:
        return Batch(micro=BATCH_SIZE)


def masked_sum(model, batch):
    """(loss_sum, count) over the samples that are not negative."""
    valid = batch >= 0
    return model(batch * valid).sum(), valid.sum()


def test_uneven_micro_batches_give_the_mean_of_the_whole_batch():
    """10 samples 0 … 9 as 4 + 4 + 2: the gradient is their mean, 4.5, and not the mean of means, 4.83."""
    training = training_of(line(floats(10)), batch=Batch.of(10, 4))
    assert step_gradients(training) == [4.5]


def test_a_short_tail_is_a_step_of_its_own_total():
    """14 samples at 10 a step: 0 … 9, then 10 … 13 as 4 of an expected 10."""
    assert step_gradients(training_of(line(floats(14)), batch=Batch.of(10, 4))) == pytest.approx([4.5, 11.5])


def test_a_tail_that_is_split_itself_is_weighted_by_its_total():
    """15 samples at 10 a step: the tail 10 … 14 is cut into 4 + 1."""
    assert step_gradients(training_of(line(floats(15)), batch=Batch.of(10, 4))) == pytest.approx([4.5, 12.0])


def test_sums_with_varying_counts_are_divided_by_the_total_count():
    """Valid samples 1, 2, 3 | 10: the gradient is 16 / 4, and not the mean of 6 / 3 and 10 / 1."""
    samples = [torch.tensor(value) for value in (1.0, 2.0, 3.0, 10.0, -1.0, -1.0)]
    training = training_of(line(samples, compute_loss=masked_sum), batch=Batch(micro=3, accumulate=2))
    assert step_gradients(training) == [4.0]


def test_a_micro_batch_without_valid_samples_adds_nothing():
    """The first micro-batch counts none, the second 2 and 4: gradient 3, finite losses."""
    samples = [torch.tensor(value) for value in (-1.0, -1.0, 2.0, 4.0)]
    training = training_of(line(samples, compute_loss=masked_sum), batch=Batch(micro=2, accumulate=2))
    results = [training.step(batch) for batch in training.loader]
    assert [result.loss.item() for result in results] == [0.0, 3.0]
    assert training.model.weight.item() == 1.0 - 3.0


def test_counts_may_be_weights_below_one():
    """A loss_sum of 3 over a count of 0.5 is a mean of 6."""
    training = training_of(line([torch.tensor(3.0)], compute_loss=lambda model, x: (model(x).sum(), 0.5)))
    assert step_gradients(training) == [6.0]


def test_streams_step_after_their_micro_batches_and_at_their_end():
    """7 streamed samples at 2 × 2: 0 … 3, then 4 … 6 cut as 2 + 1."""
    training = training_of(line(Stream(floats(7))), batch=Batch(micro=2, accumulate=2))
    assert step_gradients(training) == pytest.approx([1.5, 5.0])


def test_a_stream_is_not_cut_unevenly():
    with pytest.raises(PlanError, match=r"equal micro-batches of 4, but got 10 samples in 3.*Use a micro that divides"):
        training_of(line(Stream(floats(20))), batch=Batch.of(10, 4))


def test_the_optimizer_steps_at_the_end_of_each_effective_batch():
    training = training_of(line(floats(14)), batch=Batch.of(10, 4))
    assert [training.step(batch).stepped for batch in training.loader] == [False, False, True, True]


def test_pieces_of_a_loop_do_what_step_does():
    """forward_context, backward and optimizer_step, called by hand, train the same weight bit for bit."""
    whole, pieces = (training_of(ZOO["mlp"], batch=Batch.of(8, 3)) for _ in range(2))
    for batch in whole.loader:
        whole.step(batch)
    for batch in pieces.loader:
        with pieces.forward_context():
            loss = ZOO["mlp"].compute_loss(pieces.model, batch)
        pieces.backward(loss)
        pieces.optimizer_step()
    pairs = zip(whole.model.parameters(), pieces.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_batches_of_another_loader_count_as_full_micro_batches():
    """Three batches that our loader never saw, 2 to a step: means 1 and 3 step as 2, the last is still waiting."""
    training = training_of(line(floats(4)), batch=Batch(micro=2, accumulate=2))
    with pytest.warns(UserWarning, match="taken for 2 samples, and 2 of them for one optimizer step"):
        stepped = [training.step(torch.tensor(pair)).stepped for pair in ([0.0, 2.0], [2.0, 4.0], [9.0, 9.0])]
    assert stepped == [False, True, False]
    assert training.model.weight.item() == 1.0 - 2.0


def test_a_step_that_was_left_half_done_is_dropped():
    """The loop takes 0 and 1 of a step of four and begins anew: the mean of 0 to 3 is 1.5, without what it had left."""
    training = training_of(line(floats(4)), batch=Batch(micro=1, accumulate=4))
    for batch in itertools.islice(training.loader, 2):
        training.step(batch)
    for batch in training.loader:
        training.step(batch)
    assert training.model.weight.item() == 1.0 - 1.5


def test_splitting_changes_the_gradient_under_batch_norm_and_only_there():
    """8 as 3 + 3 + 2: BatchNorm in training sees other statistics; in eval mode, and without it, nothing changes."""
    for name, changes in {"cnn": True, "resnet": True, "partly_eval": False, "mlp": False, "token_loss": False}.items():
        facts = facts_of(ZOO[name])
        assert Batch.of(8, 3).exactness(facts) == ("lossy" if changes else "exact"), (name, facts.split_error)
        assert Batch(micro=8).exactness(facts) == "exact"


def test_batch_norm_split_gradients_really_differ():
    """What is called lossy is: the first gradient of the CNN differs by more than 1 %."""
    whole, split = (run_applied(ZOO["cnn"], Settings(batch=Batch.of(8, micro))) for micro in (8, 3))
    assert relative_difference(split.gradients, whole.gradients) > 0.01


def test_a_held_effective_batch_is_halved():
    """10 held: 1, 2, 3, 5 and 10 at a time, all of them 10 a step."""
    facts = BARE.model_copy(update={"effective_batch": 10, "allow_split": True, "dataset_kind": "map"})
    choices = Batch.choices(facts)
    assert [choice.micro for choice in choices] == [1, 2, 3, 5, 10]
    assert {choice.num_samples for choice in choices} == {10}


def test_on_a_card_a_held_batch_is_cut_in_three_too():
    """12 held: its halves 6, 3, 2 and 1, its third 4, and that one's halves 2 and 1."""
    card = Device(type="cuda", name="a card", memory_bytes=2**34, bf16=True)
    facts = BARE.model_copy(update={"device": card, "effective_batch": 12, "allow_split": True, "dataset_kind": "map"})
    assert [choice.micro for choice in Batch.choices(facts)] == [1, 2, 3, 4, 6, 12]


JOB = BARE.model_copy(update={"effective_batch": 30, "micro_batch": 12, "dataset_kind": "map", "allow_split": True})


def test_the_jobs_own_micro_batch_is_among_the_choices():
    """30 a step as 12 + 12 + 6, beside the halves."""
    choices = Batch.choices(JOB)
    assert [choice.micro for choice in choices] == [1, 2, 4, 8, 12, 15, 30]
    assert Batch.reference(JOB) == Batch(micro=12, accumulate=3, effective=30)
    assert Batch.reference(JOB) in choices


def test_where_a_split_changes_the_gradient_only_the_jobs_own_is_the_jobs():
    """BatchNorm sees 12 samples today: any other number is another gradient, larger ones too."""
    held = JOB.model_copy(update={"allow_split": False})
    assert Batch.choices(held) == (Batch.reference(held),)
    assert Batch.reference(held).exactness(held) == "exact"
    for other in (Batch.of(30, 6), Batch.of(30, 30)):
        assert "--allow-split" in other.unavailable(held)
        assert other.exactness(held) == "lossy"
        assert other.unavailable(JOB) is None
    assert refused_split(held).startswith("micro-batches other than the job's 12 are not tried: splitting a batch")


def test_a_free_batch_grows_to_the_dataset():
    """32 assumed, 100 samples: 1 … 64, without accumulation; 128 would exceed the dataset."""
    free = {"effective_batch": 32, "effective_batch_held": False, "dataset_length": 100, "dataset_kind": "map"}
    choices = Batch.choices(BARE.model_copy(update=free))
    assert [choice.micro for choice in choices] == [1, 2, 4, 8, 16, 32, 64]
    assert {choice.accumulate for choice in choices} == {1}


def test_splits_that_change_the_gradient_need_permission():
    """Refused with the measured difference and the option that permits it; offered once it is given."""
    split = Batch(micro=4, accumulate=2)
    assert "10.0%" in str(split.unavailable(BARE))
    assert "--allow-split" in str(split.unavailable(BARE))
    assert "could not be measured" in str(split.unavailable(BARE.model_copy(update={"split_error": None})))
    assert split.unavailable(BARE.model_copy(update={"allow_split": True})) is None


def test_an_effective_batch_that_the_micro_batches_cannot_hold_is_refused():
    """3 micro-batches of 4 hold 9 to 11 samples when the last is smaller."""
    with pytest.raises(ValidationError, match="hold 9 to 11 samples when the last is smaller, but got 12"):
        Batch(micro=4, accumulate=3, effective=12)


LENGTHS = Lengths(read=9, samples=9, longest=50, places=((3, 1, 2),), in_tokens=True)
HELD = BARE.model_copy(
    update={"effective_batch": 8, "effective_batch_held": True, "split_error": 0.0, "lengths": LENGTHS}
)


def test_where_lengths_are_known_a_held_batch_is_cut_by_them():
    """As many tokens as 1, 2 and 4 of the longest have, and the job's own 8 samples."""
    assert Batch.choices(HELD) == (
        Batch(micro=1, accumulate=8, tokens=50),
        Batch(micro=2, accumulate=4, tokens=100),
        Batch(micro=4, accumulate=2, tokens=200),
        Batch(micro=8),
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"lengths": None}, "samples have no one length"),
        ({"lengths": LENGTHS.model_copy(update={"in_tokens": False})}, "samples have no one length"),
        ({"lengths": LENGTHS.model_copy(update={"samples": 10})}, "only 9 of 10 samples' lengths"),
        ({"lengths": LENGTHS.model_copy(update={"risk": 0.05})}, "another length when it is read again"),
        ({"even_batches": True}, "cannot be said where the plan goes"),
        ({"split_error": 0.1}, "changes this model's gradient by 10.0%"),
    ],
)
def test_tokens_are_refused_in_words(changed, reason):
    facts = HELD.model_copy(update=changed)
    assert reason in str(Batch(micro=2, accumulate=4, tokens=100).unavailable(facts))
    assert all(batch.tokens is None for batch in Batch.choices(facts))


def test_tokens_are_written_with_the_samples_of_a_step():
    assert Batch(tokens=4096, effective=64) == Batch(micro=1, accumulate=64, tokens=4096)
    with pytest.raises(ValidationError, match="effective: 64"):
        Batch(tokens=4096)
    assert Batch(tokens=4096, effective=64).describe() == "batch 64 in passes of 4,096 tokens"


ON_CARD = {"device": HELD.device.model_copy(update={"type": "cuda"})}


def test_where_samples_can_be_packed_each_is_offered_so_too_on_a_card():
    """In as many tokens as are padded; all 8 samples in a row as well. On a CPU where a space lists it."""
    known = HELD.model_copy(update={"no_packing": None})
    assert [batch for batch in Batch.choices(known.model_copy(update=ON_CARD)) if batch.packed] == [
        Batch(micro=micro, accumulate=8 // micro, tokens=50 * micro, packed=True) for micro in (1, 2, 4, 8)
    ]
    assert not any(batch.packed for batch in Batch.choices(known))
    assert Batch(micro=2, accumulate=4, tokens=100, packed=True).unavailable(known) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"no_packing": "samples see each other"}, "batch.packed: samples see each other"),
        ({"no_packing": None, "lengths": None}, "samples have no one length"),
        ({"no_packing": None, "split_error": 0.1}, "changes this model's gradient by 10.0%"),
    ],
)
def test_packing_is_refused_in_words(changed, reason):
    facts = HELD.model_copy(update={**ON_CARD, **changed})
    assert reason in str(Batch(micro=2, accumulate=4, tokens=100, packed=True).unavailable(facts))
    assert not any(batch.packed for batch in Batch.choices(facts))


def test_packing_is_written_with_tokens_and_told_apart():
    packed = Batch(tokens=4096, effective=64, packed=True)
    assert packed.describe() == "batch 64 in packed passes of 4,096 tokens"
    assert "without padding" in packed.purpose()
    with pytest.raises(ValidationError, match=r"packed: true, tokens: 4096, effective: 64"):
        Batch(micro=4, packed=True)


def test_what_is_predicted_of_a_row_may_miss_a_mask_of_all_its_tokens():
    assert Batch(tokens=100, effective=8, packed=True).may_hold(0, HELD) == 4 * 100 * 100
    assert Batch(tokens=100, effective=8).may_hold(0, HELD) == 0


def test_a_smaller_step_of_tokens_is_cut_alike():
    assert Batch(micro=3, accumulate=3, effective=8, tokens=90).with_samples(4) == Batch(
        micro=3, accumulate=2, effective=4, tokens=90
    )
    assert Batch(micro=3, accumulate=4, tokens=90).share(2) == Batch(micro=3, accumulate=2, tokens=90)
    packed = Batch(micro=3, accumulate=3, effective=8, tokens=90, packed=True)
    assert packed.with_samples(4) == Batch(micro=3, accumulate=2, effective=4, tokens=90, packed=True)
    assert packed.share(2) == Batch(micro=3, accumulate=2, tokens=90, packed=True)
