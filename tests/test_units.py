"""Quantities: text with units as SI floats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.base.config import Config, ConfigError
from steptime.base.units import BYTE_UNITS, RATE_UNITS, Bytes, BytesPerS, FlopPerS, Seconds, read_quantity


class Card(Config):
    memory: Bytes = 0.0
    latency: Seconds = 0.0
    bandwidth: BytesPerS = 0.0
    peak: FlopPerS = 0.0


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("memory", "80 GB", 80e9),
        ("memory", "80 GiB", 85899345920.0),
        ("memory", "80GiB", 85899345920.0),
        ("memory", "16 kbit", 2000.0),
        ("memory", "1e12", 1e12),
        ("memory", 5, 5.0),
        ("latency", "3 us", 3e-6),
        ("latency", "3 \u00b5s", 3e-6),
        ("latency", "1.5 min", 90.0),
        ("latency", "2 h", 7200.0),
        ("bandwidth", "450 GB/s", 450e9),
        ("bandwidth", "400 Gbit/s", 50e9),
        ("bandwidth", "3.35 TB/s", 3.35e12),
        ("peak", "989 TFLOP/s", 989e12),
        ("peak", "1.979 PFLOPS", 1.979e15),
        ("peak", "989e12", 989e12),
    ],
)
def test_reads(field, text, value):
    assert getattr(Card(**{field: text}), field) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("field", "text", "line"),
    [
        (
            "bandwidth",
            "400 Gb/s",
            "bandwidth: ambiguous unit 'Gb/s' (bits or bytes?): use for example Gbit/s or GB/s (got '400 Gb/s')",
        ),
        (
            "bandwidth",
            "400Gbps",
            "bandwidth: ambiguous unit 'Gbps' (bits or bytes?): use for example Gbit/s or GB/s (got '400Gbps')",
        ),
        ("bandwidth", "3 GB", "bandwidth: unknown unit 'GB': expected a quantity like '450 GB/s' (got '3 GB')"),
        ("memory", "80 GBytes", "memory: unknown unit 'GBytes': expected a quantity like '80 GiB' (got '80 GBytes')"),
        ("memory", "much", "memory: expected a number or a quantity like '80 GiB' (got 'much')"),
        ("memory", True, "memory: expected a number or a quantity like '80 GiB' (got true)"),
        ("memory", "-1 GB", "memory: must be at least 0 (got '-1 GB')"),
        ("memory", float("inf"), "memory: expected a finite number (got inf)"),
        ("memory", "1e999", "memory: expected a finite number (got inf)"),
        ("latency", [1], "latency: expected a number (got a list of 1)"),
    ],
)
def test_refuses(field, text, line):
    with pytest.raises(ConfigError) as error:
        Card(**{field: text})
    assert error.value.problems == [line]


@given(st.floats(0, 1e15), st.sampled_from(sorted(BYTE_UNITS)))
def test_scales(number, unit):
    assert read_quantity(f"{number!r} {unit}", BYTE_UNITS, "80 GiB") == number * BYTE_UNITS[unit]


def test_a_bit_is_an_eighth_of_a_byte():
    assert {
        f"{p}B/s": 8 * RATE_UNITS[f"{p}bit/s"] for p in ("", "k", "M", "G", "T", "Ki", "Gi")
    }.items() <= RATE_UNITS.items()
