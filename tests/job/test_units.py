"""Durations and sizes."""

from __future__ import annotations

import pytest

from cloudtrain.job.units import duration_s, format_number, natural_key, size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("90s", 90),
        ("15m", 900),
        ("24h", 86400),
        ("7d", 604800),
        ("2w", 1209600),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("1.5h", 5400),
        ("90 s", 90),
        (" 5 min ", 300),
        ("2 hours", 7200),
        ("1 day", 86400),
        ("1500ms", 2),
        ("0h5m", 300),
    ],
)
def test_durations(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "24", "h", "-1h", "1x", "1h30", "1:30", "0s", "0.4s", "99999d", "1e3s", "1 h and 2 m", "P1D"]
)
def test_no_durations(text):
    with pytest.raises(ValueError, match="write|must"):
        duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GB", 64 * 10**9),
        ("64GiB", 64 * 2**30),
        ("64Gi", 64 * 2**30),
        ("64G", 64 * 10**9),
        ("500 MB", 5 * 10**8),
        ("1TB", 10**12),
        ("1.5 kib", 1536),
        ("512mb", 512 * 10**6),
    ],
)
def test_sizes(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "64", "GB", "-1GB", "0GB", "1PB", "1 2GB", "64 gigs", "1e3MB"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="write|must"):
        size_bytes(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.05, "0.05"),
        (5.2e-4, "5.2e-4"),
        (1e-5, "1e-5"),
        (-3.14159e-9, "-3.142e-9"),
        (12_000, "12000"),
        (12_345.6, "12346"),
        (1_234_567.8, "1234568"),
        (1.2e9, "1.2e9"),
        (0.0, "0"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_a_number_is_written_as_people_write_it(value: float, text: str):
    assert format_number(value) == text


def test_more_digits():
    assert format_number(2.7182818, 6) == "2.71828" and format_number(1.23456789e-5, 6) == "1.23457e-5"


def test_names_with_numbers_are_sorted_as_people_count():
    names = ["layer.10.norm", "layer.2.norm", "layer.norm", "2", "10"]
    assert sorted(names, key=natural_key) == ["2", "10", "layer.2.norm", "layer.10.norm", "layer.norm"]
    long = ["layer." + "9" * 5000, "layer.010", "layer.9"]
    assert sorted(long, key=natural_key) == ["layer.9", "layer.010", "layer." + "9" * 5000]
