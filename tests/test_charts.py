"""What the charts of a page say besides their bars: round figures on the axes, which line is which, which stages a row is of."""

from __future__ import annotations

import re

import jobs
import pytest

from steptime import estimate
from steptime.report.format import GIB
from steptime.report.page import memory_charts, page_tables, time_charts
from steptime.report.page.axis_ticks import round_ticks, time_ticks
from steptime.report.table import Table
from steptime.timing.timeline import Timeline


@pytest.fixture(scope="module")
def found():
    return estimate(jobs.job("llama3-8b", gbs=64, seqlen=4096, tp=2, pp=4, dp=2))


@pytest.mark.parametrize(
    ("low", "high", "most", "ticks"),
    [
        (0.0, 83.1, 5, [0.0, 20.0, 40.0, 60.0, 80.0]),
        (0.5, 1.021, 4, [0.6, 0.8, 1.0]),
        (14.96, 31.16, 6, [15.0, 20.0, 25.0, 30.0]),
        (0.0, 0.3, 3, [0.0, 0.1, 0.2, 0.3]),
        (7.0, 7.0, 5, [7.0]),
    ],
)
def test_labels_of_an_axis_are_round(low, high, most, ticks):
    """0.3 / 0.1 is 2.9999999999999996 in floating point: the end of an axis still has its label."""
    assert round_ticks(low, high, most) == ticks


def test_seconds_of_an_axis_have_one_unit():
    assert time_ticks(0.0, 1.242, 6) == [(0.0, "0"), (0.5, "0.5 s"), (1.0, "1 s")]
    assert [text for _, text in time_ticks(0.0, 0.0042, 3)] == ["0", "2 ms", "4 ms"]


def test_memory_over_the_step_names_the_line_of_the_device(found):
    """The device's line is labeled with what is usable, and stands at its height between the labels of the axis."""
    text = memory_charts.over_time(found, Timeline(found.timing))
    held = found.memory.capacity_bytes / GIB
    assert f"{held:.1f} GiB usable</text>" in text
    line = float(re.search(r'y1="([\d.]+)" y2="[\d.]+" class="cap"', text)[1])
    grid = dict.fromkeys(map(float, re.findall(r'<line y1="([\d.]+)" y2="\1"', text)))
    spots = list(grid)
    step = 20.0
    assert (240.0 - line) / (240.0 - spots[1]) == pytest.approx(held / step, rel=1e-3)
    assert re.findall(r">([\d.]+ GiB|0)</text>", text.partition('class="area"')[0]) == [
        "0", "20 GiB", "40 GiB", "60 GiB", "80 GiB",
    ]  # fmt: skip


def test_legends_name_every_line(found):
    assert "usable memory</li>" in memory_charts.stage_bars(found)


def test_scaling_has_its_shares_at_grid_lines(found):
    text = time_charts.weak_scaling(found)
    assert [share for share in ("60 %", "80 %", "100 %") if f">{share}</text>" in text] == ["60 %", "80 %", "100 %"]


def test_rows_of_matrix_multiplies_name_all_stages_that_are_alike(found):
    """Four stages of eight layers: the two in the middle are alike; the first has the embedding, the last the head."""
    body = page_tables.gemms(found).partition("<tbody>")[2]
    cells = re.findall(r'<th scope="row">mlp\.down</th><td class="n" data-v="(\d)">([^<]+)</td>', body)
    assert sorted(set(cells)) == [("0", "0"), ("1", "1-2"), ("3", "3")]


def test_a_sorted_table_says_by_what(found):
    for table in (page_tables.gemms(found), page_tables.collectives(found)):
        column = re.search(r'aria-sort="descending"><button type="button" data-sort="(\d+)"', table)[1]
        rows = re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2])
        values = [
            float(re.findall(r"<t[hd][^>]*>", row)[int(column)].partition('data-v="')[2].rstrip('">')) for row in rows
        ]
        assert len(values) > 3
        assert values == sorted(values, reverse=True)


def test_lines_without_columns_have_no_empty_heading_and_keep_their_notes():
    made = page_tables.plain_table(Table("", [], [["--set a=b"], ["    saves much"]], ["a note"]))
    assert made == '<p><code>--set a=b</code></p><p>saves much</p><p class="note">a note</p>'
