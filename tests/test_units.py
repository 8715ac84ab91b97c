"""Bytes, durations and ratios as people write them."""

from __future__ import annotations

import random

import pytest
from pydantic import TypeAdapter, ValidationError

from autotune.units import MIB, Bytes, Ratio, ceil_mib, format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 2**33),
        ("8 GB", 8 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        (" 512kib ", 2**19),
        ("7", 7),
        ("7B", 7),
        ("1TB", 10**12),
        (".5 kB", 500),
        (4096, 4096),
        (12.0, 12),
        ("0", 0),
        ("8G", 2**33),
        ("512m", 2**29),
        ("1.5K", 1536),
        ("2 t", 2**41),
    ],
)
def test_sizes(text, num_bytes):
    """Binary units are powers of two, decimal ones powers of ten, whatever their case; a letter alone is binary."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 gigs", "-1GiB", "1e9", "8GiB 3", "0x10", "inf", "8P", True, float("nan"), 10**400]
)
def test_what_is_no_size_says_how_to_write_one(text):
    with pytest.raises(ValueError, match=r"not a size: .*Write for example 8GiB"):
        parse_bytes(text)


def test_every_size_is_written_so_that_it_reads_back():
    """Exactly, over sizes from bytes to terabytes, round and crooked."""
    numbers = random.Random(0)
    sizes = [round(10 ** numbers.uniform(0, 14)) for _ in range(500)]
    sizes += [size + off for size in (2**10, 2**20, 2**33, 10**9, 1.5 * 2**30) for off in (-1, 0, 1)]
    assert [size for size in map(int, sizes) if parse_bytes(format_bytes(size)) != size] == []


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(2**33, "8 GiB"), (8 * 10**9, "8 GB"), (3 * 2**19, "1.5 MiB"), (1001, "1001 B"), (0, "0 B"), (500, "500 B")],
)
def test_sizes_are_written_short(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_a_stated_peak_is_never_less_than_the_measured_one():
    assert [ceil_mib(size) for size in (0, 1, MIB, MIB + 1)] == [0, MIB, MIB, 2 * MIB]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("45", 45), ("2 min", 120)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-3m", "3 days", "m", "1h30m"])
def test_what_is_no_duration_says_how_to_write_one(text):
    with pytest.raises(ValueError, match=r"not a duration: .*Write for example 90s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
        (3600, "1 h 00 min"),
    ],
)
def test_durations_are_written_in_words(seconds, text):
    assert format_duration(seconds) == text


def test_numbers_in_python_are_texts_in_yaml():
    """Both read either form."""
    size, ratio = TypeAdapter(Bytes), TypeAdapter(Ratio)
    assert size.dump_python(2**33, mode="json") == "8 GiB"
    assert size.validate_python("8 GiB") == size.validate_python(2**33) == 2**33
    assert ratio.dump_python(2.31, mode="json") == "2.31x"
    assert ratio.validate_python("2.31x") == ratio.validate_python(2.31) == 2.31
    for adapter, wrong in ((size, "much"), (ratio, "twice"), (ratio, 10**400), (ratio, 10**5000), (size, 10**5000)):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
