"""Scripts that make their batches by tokens: what is taken for one, by which flag, and how a plan is found and run."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command_line import ONE_ROUND, autotune, start
from script_lines import look_here, run_here
from search_tables import facts, options, run_search, table
from torch.utils.data import BatchSampler, DataLoader, Dataset

from autotune.errors import PlanError, TaskError
from autotune.measure import MeasureOptions
from autotune.plan import Plan, load_plan
from autotune.script.command import filled, own_batch
from autotune.script.flags import fill, flags_of, is_split_otherwise, states_tokens, with_placeholders, with_tokens
from autotune.script.refusal import Refused
from autotune.script.trial.extents import Passes, extents_of
from autotune.script.trial.longest import longest_batch
from autotune.searches.events import Warned
from autotune.searches.own_flags import by_own_flags, may_be_in_tokens
from autotune.searches.requests import check_plan, reference_settings
from autotune.techniques import Settings
from autotune.techniques.batch import Batch
from autotune.techniques.support.facts import Extent, Lengths, TokenBatches, TokenFlag
from autotune.testing.zoo import ZOO
from autotune.training.apply_plan import apply
from autotune.words import facts_words
from autotune.workers import MeasureRequest
from autotune.workers.table import TableExecutor

SCRIPT = Path(__file__).parent.parent / "scripts" / "translation.py"
START = [sys.executable, "train.py"]
HELD = Extent(usual=3900.0, most=4090.0)
LENGTHS = Lengths(read=9, samples=9, longest=200, places=((1, 2),), in_tokens=True)
OWN = Batch(micro=64, tokens=4096, flag="--max-tokens")


class Sentences(Dataset):
    """Of 3 to 60 tokens."""

    def __init__(self, number=1000):
        self.lengths = (3 + torch.randperm(number, generator=torch.Generator().manual_seed(0)) % 58).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, place):
        return torch.ones(self.lengths[place], dtype=torch.int64)


def pad(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def by_cap(lengths, cap, padded=True):
    """Batches of samples in their order, each as large as the cap allows."""
    found = [[]]
    for place in range(len(lengths)):
        batch = [*found[-1], place]
        taken = len(batch) * max(lengths[one] for one in batch) if padded else sum(lengths[one] for one in batch)
        if taken > cap and found[-1]:
            found.append([place])
        else:
            found[-1] = batch
    return found


def buckets(lengths, count):
    """Batches of a fixed number, each of one bucket of lengths, whose last one is smaller."""
    found = []
    for least in range(0, 60, 4):
        members = [place for place, length in enumerate(lengths) if least <= length < least + 4]
        found += [members[start : start + count] for start in range(0, len(members), count)]
    return found


def held_to(batches, tokens, **changes):
    loader = DataLoader(Sentences(), batch_sampler=batches, collate_fn=pad, **changes)
    return any(one.is_held_to(tokens) for one in extents_of(loader))


@pytest.mark.parametrize("padded", [True, False], ids=["padding counted", "lengths summed"])
def test_a_sampler_that_stays_below_a_number_of_tokens_is_seen_to(padded):
    batches = by_cap(Sentences().lengths, 600, padded)
    assert held_to(batches, 600)
    assert not held_to(batches, 1200)
    assert not held_to(batches, 300)


FIXED = {
    "the same number": lambda lengths: [list(range(start, start + 16)) for start in range(0, 160, 16)],
    "a last one that is smaller": lambda lengths: [
        list(range(start, min(start + 16, 150))) for start in range(0, 150, 16)
    ],
    "buckets by length": lambda lengths: buckets(lengths, 8),
    "torch's own": lambda lengths: BatchSampler(range(len(lengths)), 16, drop_last=False),
    "none": lambda lengths: [],
    "one": lambda lengths: [[0, 1, 2]],
    "few": lambda lengths: [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]],
    "empty ones": lambda lengths: [[]] * 20,
    "no numbers": lambda lengths: [["a"] * size for size in range(1, 20)],
    "beyond the end": lambda lengths: [[5000] * size for size in range(1, 20)],
}


@pytest.mark.parametrize("kind", FIXED)
def test_batches_of_a_fixed_number_of_samples_and_those_that_tell_nothing_are_none(kind):
    """Dynamic padding is in all of them: whatever number they happen to come to, it is no cap."""
    loader = DataLoader(Sentences(), batch_sampler=FIXED[kind](Sentences().lengths), collate_fn=pad)
    assert list(extents_of(loader)) == []


class OneAtATime:
    """A sampler that goes on where it was left."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        while self.batches:
            yield self.batches.pop(0)


def test_a_look_takes_nothing_from_the_scripts_sampler():
    batches = by_cap(Sentences().lengths, 600)
    sampler = OneAtATime(list(batches))
    assert held_to(sampler, 600)
    assert sampler.batches == batches
    assert not held_to((batch for batch in batches), 600)  # it cannot be copied


def test_a_loader_without_a_sampler_of_its_own_tells_nothing():
    assert list(extents_of(DataLoader(Sentences(), batch_size=16, collate_fn=pad))) == []
    assert list(extents_of(DataLoader(Sentences(), batch_size=None))) == []


def passes(shapes):
    seen = Passes()
    for shape in shapes:
        seen.add(torch.empty(shape))
    return seen


@pytest.mark.parametrize("is_time_first", [False, True])
def test_what_the_model_is_called_with_tells_it_too(is_time_first):
    lengths = [20 + 7 * number % 16 for number in range(16)]
    shapes = [(1000 // length, length) for length in lengths]
    found = list(passes([shape[::-1] for shape in shapes] if is_time_first else shapes).extents())
    assert [(one.is_held_to(1000), one.in_order) for one in found] == [(True, False)]
    (found,) = passes(sorted(shapes)).extents()
    assert found.in_order


def test_packed_samples_are_as_many_tokens_as_they_have():
    (found,) = passes([(size,) for size in range(980, 1000)]).extents()
    assert (found.most, found.is_held_to(1000)) == (995.0, True)  # the first sixteen of them


@pytest.mark.parametrize(
    "shapes",
    [
        [(16, length) for length in range(20, 36)],
        [*[(16, length) for length in range(20, 35)], (5, 40)],
        [(1000 // length, length) for length in (20, 25)],
        [(size, 12) for size in (3, 5, 9, 2, 7, 3, 5, 9, 2, 7)],
        [(1000 // length, length) for length in range(20, 27)],
    ],
    ids=["dynamic padding", "a smaller last batch", "two batches", "numbers that vary at one length", "seven batches"],
)
def test_calls_that_tell_nothing(shapes):
    """One batch, or two, may come to any number."""
    assert list(passes(shapes).extents()) == []


KNOWN = {
    "--max-tokens 4096 --update-freq 2": "--max-tokens {batch.tokens=4096} --update-freq {batch.accumulate=2}",
    "dataset.max_tokens=4096 optimization.update_freq=1": (
        "dataset.max_tokens={batch.tokens=4096} optimization.update_freq={batch.accumulate=1}"
    ),
    "-batch_size 4096 -batch_type tokens -accum_count 4": (
        "-batch_size {batch.tokens=4096} -batch_type tokens -accum_count {batch.accumulate=4}"
    ),
}


@pytest.mark.parametrize("words", KNOWN)
def test_flags_of_tokens_become_placeholders(words):
    command = [*START, *words.split()]
    found = with_tokens(command)
    assert found == [*START, *KNOWN[words].split()]
    assert filled(found, own_batch(found)) == command


@pytest.mark.parametrize(
    "words",
    [
        "--max-tokens 4096",
        "--max-tokens auto --update-freq 1",
        "--max-tokens 4096 --batch-tokens 4096 --update-freq 1",
        "--batch-size 4096 --batch-type sents --update-freq 1",
    ],
)
def test_a_command_that_does_not_say_both_tokens_and_accumulation_stays(words):
    assert with_tokens([*START, *words.split()]) is None


def test_a_plans_tokens_go_into_the_flag_that_it_names():
    plan = Batch(micro=32, accumulate=2, tokens=2048, flag="--mt")
    command = [*START, "--mt", "4096", "--update-freq", "1", "--batch-size", "4"]
    assert fill(command, plan) == (
        [*START, "--mt", "2048", "--update-freq", "2", "--batch-size", "4"],
        "the plan's batch is in the script's own flags: --mt 2048 --update-freq 2.",
    )
    assert is_split_otherwise(command, plan)
    assert not is_split_otherwise(fill(command, plan)[0], plan)
    assert states_tokens(fill(command, plan)[0], plan)
    assert not states_tokens(command, plan)
    placed = [*START, "--mt", "{batch.tokens}", "--update-freq={batch.accumulate}"]
    assert fill(placed, plan) == ([*START, "--mt", "2048", "--update-freq=2"], None)
    assert not is_split_otherwise(placed, plan)


def varying(**changes):
    """Of a script whose batches were seen to vary, the first to have 70 samples, and to have 64 at the mean."""
    seen = {name: changes.pop(name) for name in ("extents", "lengths") if name in changes}
    found = TokenBatches(**{"micro": 64, "extents": (HELD,), "lengths": LENGTHS, **seen})
    known = {"effective_batch": 70, "batch_varies": True, "left_out": {"batch": "varies"}, "allow_split": True}
    return facts(**{**known, "token_batches": found, **changes})


COMMAND = (*START, "--max-tokens", "4096", "--update-freq", "1")


def proven(known, again, command=COMMAND):
    """Options and facts, and the command of the second look."""
    looks, said = [], []

    def look(other):
        looks.append(" ".join(other.command[2:]))
        if isinstance(again, Exception):
            raise again
        return again

    found = by_own_flags(options(task="train.py", command=command), known, look, said.append)
    assert [one.message.partition(",")[0] for one in said] == ["the script is run again"] * len(looks)
    return *found, looks


def test_a_flag_is_the_cause_if_half_of_it_halves_the_batches():
    found, known, looks = proven(varying(), varying(extents=(Extent(usual=1900.0, most=2040.0),)))
    assert looks == ["--max-tokens 2048 --update-freq 1"]
    assert (known.effective_batch, known.batch_varies) == (64, True)
    assert flags_of(found.command) == "--max-tokens {batch.tokens=4096} --update-freq {batch.accumulate=1}"
    assert known.token_flag == TokenFlag(flag="--max-tokens", tokens=4096)
    assert "batch" not in known.left_out
    assert "With 2,048 in place of 4,096 its batches were seen to have at most that." in known.warnings[-1]
    assert "batches of at most 4,096 tokens, by --max-tokens; on" in facts_words(known)
    assert reference_settings(known).batch == OWN


NOT_PROVEN = {
    "a number that is not the cause": ({}, varying(), "were not seen to have at most that"),
    "another number": ({"extents": (Extent(usual=900.0, most=1000.0),)}, varying(), "at most (1,000 tokens)"),
    "batches that only vary": ({"extents": ()}, varying(), "are not made by tokens"),
    "no room for less": ({"lengths": LENGTHS.model_copy(update={"longest": 600})}, varying(), "no room for a few"),
    "nobody allowed": ({"allow_split": False}, varying(), "put other samples into an optimizer step; --allow-split"),
    "batches by length": ({"extents": (HELD.model_copy(update={"in_order": True}),)}, varying(), "come by length"),
    "a script that fails with half": ({}, TaskError("train.py: too long"), "train.py: too long"),
    "accumulation that is not seen": ({"micro_batch": 35}, varying(), "stated as 1, but 2 passes"),
}


@pytest.mark.parametrize("kind", NOT_PROVEN)
def test_what_is_not_proven_leaves_the_batch_as_it_is_and_says_why(kind):
    changes, again, said = NOT_PROVEN[kind]
    own = varying(**changes)
    found, known, _ = proven(own, again)
    assert found.command == COMMAND
    assert said in known.left_out["batch"]
    assert known == own.model_copy(update={"left_out": known.left_out})
    assert reference_settings(known).batch is None


def test_a_script_of_a_fixed_batch_is_not_looked_at_again():
    found, known, looks = proven(facts(), None)
    assert (found.command, known.token_flag, looks) == (COMMAND, None, [])
    words = (*START, "--max-tokens", "512", "--batch-size", "64", "--grad-accum", "1")
    assert with_placeholders(words)[2:] == [
        *("--max-tokens", "512", "--batch-size", "{batch.micro=64}", "--grad-accum", "{batch.accumulate=1}")
    ]


def test_a_fixed_batch_is_searched_by_its_own_flags_whatever_its_tokens_come_to():
    """An answer's longest length, and texts that are laid end to end: nothing but words could come of a look."""
    words = (*START, "--max-tokens", "512", "--batch-size", "70", "--grad-accum", "1")
    own = varying(batch_varies=False, left_out={})
    found, known, looks = proven(own, None, words)
    plain, same, _ = proven(own.model_copy(update={"token_batches": None}), None, words)
    assert looks == []
    assert found.command == plain.command == tuple(with_placeholders(words))
    assert known == same.model_copy(update={"token_batches": own.token_batches})


def test_more_is_looked_at_only_if_the_command_states_tokens_and_other_ones_are_allowed():
    assert [
        may_be_in_tokens(options(task="train.py", command=(*START, *words.split()), allow_split=is_allowed))
        for words, is_allowed in (
            ("--max-tokens 4096 --update-freq 1", True),
            ("--mt {batch.tokens=4096}", True),
            ("--max-tokens 4096 --update-freq 1", False),
            ("--batch-size 8 --grad-accum 1", True),
        )
    ] == [True, True, False, False]
    assert not may_be_in_tokens(options(task="task.py", allow_split=True))


def test_placeholders_say_another_flag_and_are_taken_back_where_it_is_not_proven():
    words = (*START, "--mt={batch.tokens=4096}", "--every={batch.accumulate=1}")
    found, known, looks = proven(varying(), varying(extents=(Extent(usual=1900.0, most=2040.0),)), words)
    assert (found.command, known.token_flag.flag, looks) == (words, "--mt", ["--mt=2048 --every=1"])
    found, known, _ = proven(varying(), varying(), words)
    assert (found.command[2:], known.token_flag) == (("--mt=4096", "--every=1"), None)


def test_choices_keep_the_tokens_of_a_step_and_hold_the_longest_sample():
    known = varying().by_flag("--max-tokens", 4096)
    assert [(one.tokens, one.accumulate, one.micro) for one in Batch.choices(known)] == [
        (1024, 4, 16),  # 4 × 200 tokens are at most that
        (2048, 2, 32),
        (4096, 1, 64),
    ]
    longer = known.model_copy(update={"lengths": LENGTHS.model_copy(update={"stretch": 1.5})})
    assert [one.tokens for one in Batch.choices(longer)] == [2048, 4096]
    twice = varying(lengths=None, micro_batch=35).by_flag("--max-tokens", 4096)
    assert [(one.tokens, one.accumulate) for one in Batch.choices(twice)] == [(4096, 2), (8192, 1)]
    assert Batch.choices(known.model_copy(update={"allow_split": False})) == (OWN,)
    assert [one.exactness(known) for one in Batch.choices(known)] == ["lossy", "lossy", "exact"]
    assert "an optimizer step would see 2,048 tokens" in OWN.model_copy(update={"tokens": 2048}).unavailable(known)
    assert "not of so many samples" in Batch(micro=64).unavailable(known)


def test_a_plan_with_a_flag_is_a_scripts_whose_batches_follow_it():
    plan = Plan(settings=Settings(batch=OWN))
    assert check_plan(plan, "train.py", varying(even_batches=True)).token_flag.tokens == 4096
    small = (Extent(usual=900.0, most=1000.0),)  # a number of samples that leaves much empty, or none was seen
    for seen in (small, ()):
        assert check_plan(plan, "train.py", varying(extents=seen, even_batches=True)).token_flag.tokens == 4096
    with pytest.raises(PlanError, match="--max-tokens was not seen to make the job's batches"):
        check_plan(plan, "train.py", varying(extents=(Extent(usual=5000.0, most=6000.0),), even_batches=True))
    with pytest.raises(ValueError, match="--max-tokens states tokens, and no samples"):
        Batch(micro=2, flag="--max-tokens")


def test_a_task_has_no_flag():
    with pytest.raises(PlanError, match="a task has no flag --max-tokens: the plan is a script's"):
        apply(Plan(settings=Settings(batch=OWN)), ZOO["mlp"])


def test_each_trial_is_the_script_with_so_many_tokens_and_is_held_to_sums_of_losses_in_other_ones(in_memory, elsewhere):
    known = varying()
    rows = table(known.by_flag("--max-tokens", 4096))

    class Looks(TableExecutor):
        def _answer(self, request):
            outcome = super()._answer(request)
            if request.kind == "inspect" and "2048" in request.command:
                half = varying(extents=(Extent(usual=1900.0, most=2040.0),))
                return outcome.model_copy(update={"facts": half})
            return outcome

    run = run_search(
        options(task="train.py", command=COMMAND, trials=20, allow_split=True, sampler="random"),
        known,
        executor=Looks(known, rows),
    )
    measured = [request for request in run.executor.requests if isinstance(request, MeasureRequest)]
    for request in measured:
        batch = request.plan.settings.batch
        assert request.command[-4:] == ("--max-tokens", str(batch.tokens), "--update-freq", str(batch.accumulate))
        assert batch.tokens * batch.accumulate == 4096
        if request.options.parity_batch is not None:
            assert request.options.sums_only == (batch.tokens != 4096)
    assert len({request.plan.settings.batch.tokens for request in measured}) > 1
    assert not [event for event in run.events if isinstance(event, Warned) and "batch stays" in event.message]


def test_the_longest_batch_comes_after_what_workers_have_begun():
    lengths = Lengths(read=60, samples=60, longest=60, places=((7, 9, 11),), in_tokens=True)
    request = MeasureRequest(
        id="x",
        task="x",
        device="cpu",
        plan=Plan(settings=Settings(batch=OWN.model_copy(update={"tokens": 130}))),
        options=MeasureOptions(parity_batch=None, lengths=lengths),
        deadline_s=1.0,
    )
    longest = longest_batch(request)
    loader = DataLoader(range(60), batch_sampler=[[1, 2], [3], [4, 5, 6]], collate_fn=list)
    iterator = iter(loader)
    assert next(iterator) == [1, 2]
    longest.put_into(iterator, loader)
    drawn = []
    for batch in iterator:
        drawn.append(batch)
        longest.drawn(iterator)
        assert longest.is_over == (len(drawn) >= 2)  # some read a batch ahead
    assert drawn == [[7, 9], [4, 5, 6]]  # 2 × 60 tokens are at most 130; an epoch has as many batches as before
    assert longest.how.read == 60


@pytest.mark.medium
def test_the_sampler_of_the_script_is_seen_in_its_first_steps(monkeypatch, capsys):
    """Its validation loader has a fixed batch, and is none of what is looked at."""
    monkeypatch.setattr(sys, "argv", [])
    script = SCRIPT.read_text().replace("default=1024", "default=256").replace("default=2000", "default=200")
    path = Path.cwd() / "translation.py"
    path.write_text(script)
    found, plain = look_here(path, monkeypatch, in_tokens=True), look_here(path, monkeypatch)
    assert plain.token_batches is None
    assert [found.batch_varies, found.effective_batch, found.left_out] == [
        plain.batch_varies,
        plain.effective_batch,
        plain.left_out,
    ]
    seen = found.token_batches
    assert all(one.is_held_to(256) for one in seen.extents)
    assert (seen.lengths.read, seen.lengths.samples) == (200, 200)


def test_a_script_that_was_not_told_the_plans_tokens_ends_before_its_first_step(monkeypatch, capsys):
    monkeypatch.setattr(sys, "orig_argv", [*START, "--max-tokens", "512", "--update-freq", "1"])
    path = Path.cwd() / "translation.py"
    path.write_text(SCRIPT.read_text().replace("default=2000", "default=200"))
    told = Batch(micro=30, tokens=512, flag="--max-tokens")
    run_here(path, monkeypatch, "--max-tokens", "512", "--max-updates", "1", batch=told)
    assert "applied: batches of at most 512 tokens, by --max-tokens" in capsys.readouterr().err
    with pytest.raises(Refused):
        run_here(path, monkeypatch, "--max-updates", "1", batch=told.model_copy(update={"tokens": 256}))
    assert "the script was not told so" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A folder with the script, and what a search of it said; the plan is there."""
    folder = tmp_path_factory.mktemp("tokens")
    shutil.copy(SCRIPT, folder)
    (folder / "space.yaml").write_text("schema: autotune/space@1\nbatch: auto\n")
    asked = ("--budget", "2GiB", "--executor", "local", "--space", "space.yaml", "--trials", "3", "--trial-time", "0.2")
    script = ("translation.py", "--max-tokens", "1024", "--update-freq", "1", "--sentences", "400", "--width", "16")
    words = ("search", *asked, "--no-life", "--allow-split", "--", sys.executable, *script)
    return folder, start(*words, program=ONE_ROUND, cwd=folder).finish()


@pytest.mark.slow
def test_a_search_finds_a_plan_of_tokens(searched):
    folder, done = searched
    assert done.returncode == 0, done.stderr
    assert "batches of at most 1,024 tokens, by --max-tokens" in done.stderr
    assert "With 512 in place of 1,024 its batches were seen to have at most that." in re.sub(r"\s+", " ", done.stderr)
    plan = load_plan(folder / "plan.yaml")
    batch = plan.settings.batch
    assert (batch.tokens * batch.accumulate, batch.flag) == (1024, "--max-tokens")
    assert plan.search.trials == 2  # a quarter has no room for four samples of 96 tokens
    assert plan.measured.peak.longest.read == 400


@pytest.mark.slow
def test_its_plan_is_shown_run_and_verified(searched):
    folder, _ = searched
    plan = load_plan(folder / "plan.yaml")
    half = Batch(micro=8, accumulate=2, tokens=512, flag="--max-tokens")
    path = folder / "half.yaml"
    plan.model_copy(update={"settings": Settings(batch=half), "measured": None, "reference": None}).save(path)
    script = (sys.executable, "translation.py", "--max-tokens", "1024", "--update-freq", "1", "--sentences", "400")
    script = (*script, "--width", "16")
    shown = autotune("show", "half.yaml", cwd=folder)
    assert "batches of at most 512 tokens × 2, by --max-tokens" in re.sub(r"\s+", " ", shown.stdout)
    ran = autotune("run", "half.yaml", "--", *script, "--max-updates", "2", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert "the plan's batch is in the script's own flags: --max-tokens 512 --update-freq 2." in ran.stderr
    assert "applied: batches of at most 512 tokens × 2, by --max-tokens" in ran.stderr
    verified = autotune("verify", "half.yaml", "--executor", "local", "--trial-time", "0.2", "--", *script, cwd=folder)
    assert verified.returncode == 0, verified.stderr
    assert "settings: batches of at most 512 tokens × 2, by --max-tokens" in verified.stderr
