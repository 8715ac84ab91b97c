"""Which devices a search's trials run on: those of one type, by name and memory."""

from __future__ import annotations

import os

import pytest

from autotune.errors import TrialsLost, UnlikeDevices, UserError
from autotune.workers.devices import split_device, type_text
from autotune.workers.local import LocalExecutor
from autotune.workers.placement import check_nodes, choose_type, types_here

A40, A80 = "NVIDIA A100-SXM4-40GB, 40 GiB", "NVIDIA A100-SXM4-80GB, 80 GiB"
CLUSTER = {"one": [A40, A40], "two": [A80], "three": [A80]}


@pytest.mark.parametrize(
    ("wanted", "type_", "number"),
    [("80gb", A80, {"two": 1, "three": 1}), ("40 GiB", A40, {"one": 2}), (A40, A40, {"one": 2})],
)
def test_devices_of_one_name_and_memory_are_one_type(wanted, type_, number):
    """Ray calls both "A100"."""
    assert choose_type(CLUSTER, "cuda", wanted) == (type_, number)


def test_where_all_are_alike_none_needs_a_name():
    assert choose_type({"one": [A40], "two": [A40]}, "cuda", None) == (A40, {"one": 1, "two": 1})


@pytest.mark.parametrize("wanted", [None, "A100"])
def test_unlike_devices_are_not_mixed(wanted):
    """And it is said what to name."""
    said = rf"unlike devices.* 2 x {A40}; 2 x {A80}\. Name one type, such as cuda:{A40}"
    with pytest.raises(UnlikeDevices, match=said) as raised:
        choose_type(CLUSTER, "cuda", wanted)
    assert raised.value.types == (A40, A80)


@pytest.mark.parametrize(("found", "there"), [(CLUSTER, f"2 x {A40}; 2 x {A80}"), ({}, "none"), ({"one": []}, "none")])
def test_what_no_device_can_satisfy_is_said_with_what_there_is(found, there):
    with pytest.raises(UserError, match=rf"device cuda:H100: there is no such device\. There are: {there}\."):
        choose_type(found, "cuda", "H100")


def test_a_machine_with_unlike_devices_counts_for_none():
    """Ray gives a trial any of them."""
    mixed = {"mixed": [A40, A80], "two": [A80]}
    assert choose_type(mixed, "cuda", None) == (A80, {"two": 1})
    with pytest.raises(UserError, match=r"not counting unlike ones in one machine \(mixed\), of which Ray"):
        choose_type(mixed, "cuda", "40GB")


def test_a_name_is_asked_for_behind_the_type():
    assert split_device("cuda:A100 80GB") == ("cuda", "A100 80GB")
    assert split_device("cpu") == ("cpu", None)
    assert type_text("H100", 85_899_345_920) == "H100, 80 GiB"


@pytest.mark.parametrize("text", ["tpu", "cuda:", "cuda:1", "CUDA", ""])
def test_numbers_and_other_types_are_refused(text):
    with pytest.raises(ValueError, match="cpu or cuda was expected"):
        split_device(text)


def test_this_machine_has_no_such_cpu():
    with pytest.raises(UserError, match="device cpu:abacus: there is no such device"):
        LocalExecutor("cpu", "abacus")


def test_cpus_are_told_apart_by_their_processors_too():
    """Two machines of one name and memory may give a process unlike numbers of them."""
    whole = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(whole)})
    try:
        assert types_here("cpu")[0].endswith(" GiB, 1 processor")
    finally:
        os.sched_setaffinity(0, whole)


def test_a_cluster_whose_nodes_are_still_to_come_lacks_no_device():
    """It is lost for the moment, which a service waits for; one that has other nodes lacks the device."""
    with pytest.raises(TrialsLost, match="head:6379: it has no node yet that runs trials"):
        check_nodes("head:6379", [], [], [])
    with pytest.raises(TrialsLost, match="head:6379: none of its 2 nodes for trials answers"):
        check_nodes("head:6379", ["a", "b"], [], ["a", "b"])
    check_nodes("head:6379", [], [], ["a"])
    check_nodes("head:6379", ["a", "b"], ["b"], ["a", "b"])
