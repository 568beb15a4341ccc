"""Numbers with their units, and tables and facts that keep to the page."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_estimate import GIB

from steptime.report.format import BINARY, COUNT, SI, TIME, column, number, quantity, seconds, unit_for, whole
from steptime.report.table import Fact, FactList, Style, Table, layout

WIDTH = 80


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (quantity(0.99996, TIME), "1.00 s"),  # rounds up into the next unit rather than to 1,000 ms
        (quantity(999.4e12, SI, "FLOP/s"), "999 TFLOP/s"),
        (quantity(70.6e9, COUNT), "70.6 B"),
        (quantity(0.0, BINARY), "0 B"),
        (quantity(-3 * GIB, BINARY), "-3.00 GiB"),
        (quantity(1e-12, TIME), "<0.01 ns"),
        (number(4.2e9), "4.20e9"),
        (number(99.96), "100"),
        (number(9.996), "10.0"),
        (number(1_234_567.0), "1,234,567"),
        (seconds(999.4), "999.4 s"),
        (seconds(1500.0), "25.00 min"),
        (seconds(86400.0 * 30), "30.00 days"),
        (whole(2.5), "2.5"),
    ],
)
def test_numbers_read_as_people_write_them(text, expected):
    assert text == expected


@given(st.floats(1e-9, 1e12), st.sampled_from([TIME, BINARY, SI, COUNT]))
def test_a_quantity_says_its_value_to_half_a_percent(value, units):
    unit = unit_for(value, units)
    text = quantity(value, units)
    shown = float(text.split()[0].replace(",", "").lstrip("<")) * unit.size
    smallest = 0.01 * units[0].size  # two decimals of the smallest unit are the floor
    assert shown == pytest.approx(value, rel=0.0051, abs=smallest)
    # never "1,000 MiB" where "1.00 GiB" is meant (1,023 MiB is right)
    assert unit is units[-1] or shown / unit.size < 1024


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=8))
def test_a_column_has_equal_decimals(values):
    decimals = {len(cell.partition(".")[2]) for cell in column(values) if cell != "0"}
    assert len(decimals) <= 1


# --- layout ----------------------------------------------------------------------------------------------------------------

TEXT = st.text("abcdefg -_.", max_size=40)


@given(
    st.lists(st.tuples(TEXT, st.lists(st.text("0123456789,.", max_size=9), min_size=3, max_size=3)), max_size=6), TEXT
)
def test_tables_keep_to_the_page(rows, note):
    table = Table(
        "a title", ["", "one", "two", "three"], [[name, *cells] for name, cells in rows], [" ".join([note] * 5)]
    )
    assert max(map(len, layout(table, Style()))) <= WIDTH


@given(
    st.lists(
        st.tuples(st.text("abc ", max_size=30), st.lists(st.text("xyz -", max_size=200), min_size=1, max_size=3)),
        max_size=4,
    )
)
def test_facts_keep_to_the_page(pairs):
    section = FactList(
        "title", [Fact(label, [re.sub(r"[xyz]{30,}", "x y", text) for text in texts]) for label, texts in pairs]
    )
    wide = [line for line in layout(section, Style()) if len(line) > WIDTH]
    assert all(len(max(line.split(), key=len)) > 25 for line in wide)  # only a word without a place to break


def test_long_first_cells_are_cut_and_marked():
    rows = layout(Table("", ["", *"abcdefgh"], [["name" * 20, *["1,234,567"] * 6, "1", "2"]]), Style())
    assert len(rows[-1]) <= WIDTH
    assert "…" in rows[-1]


def test_a_long_label_of_words_is_continued_on_the_next_line_before_its_figures():
    """Seven figures of 7 characters, each after a gap of 1, leave 80 - 2 - 7 * 8 = 22 for a label of 26."""
    label = "pipeline, then interleaved"
    rows = layout(Table("", ["", *"abcdefg"], [[label, *["123,456"] * 7], ["short", *["1"] * 7]]), Style())
    assert all(len(row) <= WIDTH for row in rows)
    assert rows[1] == "  pipeline, then"
    assert rows[2].split() == ["interleaved", *["123,456"] * 7]
    assert not any("…" in row for row in rows)


def test_a_word_longer_than_its_column_is_cut_on_every_line():
    """The column of 22 characters holds 21 of the word and the mark of a cut."""
    rows = layout(Table("", ["", *"abcdefg"], [["x" * 100 + " and more", *["123,456"] * 7]]), Style())
    assert rows[1] == "  " + "x" * 21 + "…"
    assert rows[2].split()[:2] == ["and", "more"]
