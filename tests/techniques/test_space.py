"""Search spaces: what they offer, and what they say of what they cannot."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from search_tables import facts

from autotune.errors import SpaceError
from autotune.search_spaces import SearchSpace, load_space, presets
from autotune.techniques import TECHNIQUES
from autotune.techniques.batch import Batch
from autotune.techniques.checkpointing import BlocksToChoose, Checkpointing
from autotune.techniques.compile import Compile
from autotune.techniques.precision import Precision

HEAD = "schema: autotune/space@1\n"


def test_the_default_preset_has_a_row_for_every_technique_that_keeps_the_function():
    keep = {name for name, technique in TECHNIQUES.items() if "function" not in technique.affects}
    assert set(load_space("default").choices(facts())) == keep
    assert set(load_space("lossy").choices(facts())) == set(TECHNIQUES)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_loads_and_offers_something(preset):
    choices = load_space(preset).choices(facts())
    assert any(len(row) > 1 for row in choices.values())


def test_the_exact_preset_offers_nothing_that_rounds():
    known = facts()
    offered = [choice for row in load_space("exact").choices(known).values() for choice in row]
    assert {choice.exactness(known) for choice in offered} == {"exact"}


@pytest.mark.parametrize("preset", ["default", "exact"])
def test_on_a_card_models_are_compiled_in_each_mode_and_on_a_cpu_not(preset):
    """Where there is a compiler."""
    cpu = facts()
    cuda = facts(device=cpu.device.model_copy(update={"type": "cuda"}))
    modes = {(one.kind, one.mode) for one in load_space(preset).choices(cuda)["compile"]}
    both = itertools.product(("blocks", "model"), ("default", "reduce-overhead", "max-autotune"))
    assert modes == {("none", "default"), *both}
    assert load_space(preset).choices(cpu)["compile"] == (Compile(),)


def test_a_technique_without_a_row_is_not_offered():
    assert list(SearchSpace.from_yaml(HEAD + "precision: auto").choices(facts())) == ["precision"]


def test_explicit_choices_keep_their_order_and_lose_repetitions():
    space = SearchSpace.from_yaml(HEAD + "batch: [{micro: 8}, {micro: 4, accumulate: 2}, {micro: 8, accumulate: 1}]")
    assert space.choices(facts(effective_batch=8))["batch"] == (Batch(micro=8), Batch(micro=4, accumulate=2))


def test_a_batch_that_the_task_does_not_train_with_is_refused():
    space = SearchSpace.from_yaml(HEAD + "batch: [{micro: 64}, {micro: 100}]")
    (missing,) = space.unavailable(facts())
    assert missing.reason.startswith("an optimizer step would see 100 samples, but the task's batch of 64 is held")
    assert space.unavailable(facts(effective_batch_held=False)) == ()


def test_what_the_device_cannot_do_is_left_out_with_its_reason():
    space = SearchSpace.from_yaml(HEAD + "precision: [{kind: fp32}, {kind: fp16}]")
    assert space.choices(facts())["precision"] == (Precision(),)
    (missing,) = space.unavailable(facts())
    assert (missing.technique, missing.setting) == ("precision", Precision(kind="fp16"))
    assert "CUDA" in missing.reason


def test_a_technique_left_without_any_choice_is_an_error_with_the_reasons():
    space = SearchSpace.from_yaml(HEAD + "precision: [{kind: fp16}]")
    with pytest.raises(SpaceError, match=r"precision: .*fp16.*CUDA"):
        space.choices(facts())


def test_a_lossy_split_is_refused_by_name_until_it_is_allowed():
    space = SearchSpace.from_yaml(HEAD + "batch: [{micro: 64}, {micro: 32, accumulate: 2}]")
    (missing,) = space.unavailable(facts(split_error=0.09))
    assert "--allow-split" in missing.reason
    assert space.unavailable(facts(split_error=0.09, allow_split=True)) == ()


def test_an_unknown_technique_is_answered_with_the_known_ones():
    with pytest.raises(SpaceError, match=r"here: prcision: unknown key. Use one of: .*precision"):
        SearchSpace.from_yaml(HEAD + "prcision: auto", "here")


def test_an_unknown_value_is_answered_with_the_known_ones():
    with pytest.raises(SpaceError, match=r"precision.*'bf16'.*but got 'fp8'"):
        SearchSpace.from_yaml(HEAD + "precision: [{kind: fp8}]")


def test_a_word_other_than_auto_is_refused():
    with pytest.raises(SpaceError, match=r"space: precision: write `auto`, or a list .*but got 'all'"):
        SearchSpace.from_yaml(HEAD + "precision: all")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("layers: [none]", "layers.0: write a mapping: {kind: none}, but got 'none'"),
        ("precision: [fp8]", "precision.0: write a mapping: {kind: default}, {kind: fp32}, {kind: tf32}, {kind: bf16}"),
        ("batch: [8]", "batch.0: write a mapping: {micro: …}, but got 8"),
        ("layers: none", "layers: write `auto`, or a list of choices such as [{kind: none}], but got 'none'"),
        ("memory_format: {kind: contiguous}", "a list of choices such as [{kind: contiguous}, {kind: channels_last}]"),
    ],
)
def test_what_is_no_mapping_is_answered_with_what_to_write(row, words):
    with pytest.raises(SpaceError) as caught:
        SearchSpace.from_yaml(HEAD + row)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_space_may_leave_the_blocks_to_the_search():
    """``{kind: chosen}`` is no setting: those are always concrete."""
    row = "checkpointing: [{kind: none}, {kind: chosen}, {kind: chosen, blocks: [1]}]"
    space = SearchSpace.from_yaml(HEAD + row)
    named = Checkpointing(kind="chosen", blocks=(1,))
    assert space.choices(facts())["checkpointing"] == (Checkpointing(), BlocksToChoose(kind="chosen"), named)
    (missing, _) = space.unavailable(facts(num_blocks=0))
    assert missing.reason == "the model has 0 blocks"


def test_a_list_of_no_blocks_is_no_choice():
    with pytest.raises(SpaceError, match=r"checkpointing.0: blocks: kind chosen needs .* at least one block"):
        SearchSpace.from_yaml(HEAD + "checkpointing: [{kind: chosen, blocks: []}]")


def test_an_empty_list_is_refused():
    with pytest.raises(SpaceError, match=r"precision.*must not be empty"):
        SearchSpace.from_yaml(HEAD + "precision: []")


def test_a_name_that_is_neither_preset_nor_file_is_answered_with_the_presets():
    with pytest.raises(SpaceError, match=r"quick: neither a file nor a preset.*default, exact, lossy"):
        load_space("quick")


def test_a_file_of_ones_own_is_read(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + "precision: auto\n")
    assert list(load_space(str(path)).choices(facts())) == ["precision"]


def test_another_format_version_is_refused():
    with pytest.raises(SpaceError, match=r"schema.*autotune/space@1.*but got 'autotune/space@2'"):
        SearchSpace.from_yaml("schema: autotune/space@2\nprecision: auto")
