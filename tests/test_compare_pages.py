"""`search --html` and `diff --html`: one file each, every point of the front a plan, every bar as long as its seconds."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from steptime import Job, estimate
from steptime.commands import cli
from steptime.report.diff_tables import diff
from steptime.report.page import diff_page, search_page
from steptime.report.page.diff_page import ComparedPlan, memories, steps
from steptime.search.changes import words
from steptime.search.run import search

PLAN = """model: gpt3-1.3b
parallelism: {tp: 4, pp: 2, dp: 2}
performance: {activation_checkpointing_type: full}
data: {gbs: 64, seqlen: 2048, microbatch_sz: 1}
hardware: dgx-a100-80
"""


class Reader(HTMLParser):
    """Tags with their attributes, and the text of each element with an id."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.texts = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br", "input", "link"}:
            self.open.append((tag, dict(attrs).get("id", "")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, name in self.open:
            self.texts[name] = self.texts.get(name, "") + data


def sound(text):
    """Well formed, nothing fetched, no handler, every link leads to a part of the page."""
    read = Reader(text)
    assert not read.open
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in read.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not attrs.keys() & {"src", "srcset", "style", "action"}
        assert not any(name.startswith("on") for name in attrs)
        if attrs.get("href", "#answer").startswith("#"):
            assert attrs.get("href", "#answer")[1:] in ids
    assert "default-src 'none'" in unescape(text)
    return read


@pytest.fixture(scope="module")
def found():
    return search(Job.load(PLAN))


def test_each_point_of_the_front_is_a_plan(found):
    read = sound(search_page.page(found, 3))
    front = found.pareto()
    points = [attrs for tag, attrs in read.tags if tag == "a" and attrs.get("href", "").startswith("#plan-")]
    points = points[: len(found.pareto())]
    assert [point["href"] for point in points] == [f"#plan-{i + 1}" for i in range(len(front))]
    assert len(front) > 3
    if found.front_size > len(front):
        assert f"Numbered: {len(front)} of the {found.front_size:,} layouts of the front" in read.texts["front"]
    assert found.best.step_s == front[0].step_s
    for i, layout in enumerate(front, 1):
        assert estimate(Job.load(read.texts[f"yaml-plan-{i}"])).step_s == layout.step_s
        assert (words(layout.changes) or "nothing changes") in read.texts[f"plan-{i}"]


def test_points_lie_where_their_figures_are(found):
    """Right is slower, on a scale of ratios, and up is fuller: the front falls from left to right."""
    text = search_page.page(found, 3)
    spots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text)
    x, y = [float(a) for a, _ in spots], [float(b) for _, b in spots]
    assert x == sorted(x)
    assert y == sorted(y)
    front, ratios = found.pareto(), []
    for i in range(2, len(front)):
        lengths = (front[i].step_s / front[0].step_s, front[1].step_s / front[0].step_s)
        ratios.append((x[i] - x[0]) / (x[1] - x[0]) if lengths[1] > 1 else 0.0)
    assert ratios == sorted(ratios)
    held = [layout.held_bytes for layout in front]
    assert (y[1] - y[0]) / (y[-1] - y[0]) == pytest.approx((held[0] - held[1]) / (held[0] - held[-1]), abs=0.01)


def test_each_row_of_a_choice_begins_with_its_value(found):
    """Also that of a recomputation, whose column is the last: a phone shows the first."""
    texts = search_page.page(found, 3).split("best layout for each value of one choice")[1]
    rows = re.findall(r"<tr>(.*?)</tr>", texts.split("</table>")[0].split("</thead>")[1])
    at = next(i for i, row in enumerate(rows) if row.endswith(">recompute</td>"))
    named = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows[at + 1 : at + 4]]
    assert len(named) == 3
    assert all(cells[0] == cells[-1] != "" for cells in named)
    drawn = found._repr_html_().split("best layout for each value of one choice")[1]
    assert len(re.findall(rf">\s*{named[0][0]}\s*<", drawn)) >= 2


def test_a_search_that_fits_nothing_has_a_page_too():
    job = Job.load("model: llama3-405b\nparallelism: {tp: 8, pp: 1, dp: 1}\ndata: {gbs: 8, seqlen: 8192, microbatch_sz: 1}\nhardware: dgx-h100\n")  # fmt: skip # noqa: E501
    text = search_page.page(search(job), 3)
    sound(text)
    assert "nothing fits" in text


def bars(html):
    """Widths of the pieces of each bar."""
    return [
        [float(w) for w in re.findall(r'width="([\d.]+)" height="16"', bar)]
        for bar in re.findall(r'<td class="bar">(.*?)</td>', html)
    ]


def test_bars_are_as_long_as_what_they_show():
    """The longest step is the whole width and the others their share of it; memory ends where the need does."""
    some = [estimate(Job.load(PLAN, [f"parallelism.tp={tp}", f"parallelism.dp={8 // tp}"])) for tp in (1, 2, 4)]
    plans = [ComparedPlan(str(i), one) for i, one in enumerate(some)]
    longest = max(one.step_s for one in some)
    for one, pieces in zip(some, bars(steps(plans)), strict=True):
        assert sum(pieces) == pytest.approx(1000.0 * one.step_s / longest, abs=0.2)
    needs = [one.memory.peak_reserved_bytes + sum(one.memory.overhead_bytes) for one in some]
    room = 1.02 * max([*needs, *(one.memory.capacity_bytes for one in some)])
    for need, pieces in zip(needs, bars(memories(plans)), strict=True):
        assert sum(pieces) == pytest.approx(1000.0 * need / room, abs=0.2)


def test_unlike_batches_are_compared_by_the_token():
    """Twice the sequences in less than twice the time: the bar of the larger batch is the shorter one."""
    some = [estimate(Job.load(PLAN, [f"data.gbs={gbs}"])) for gbs in (32, 64)]
    html = steps([ComparedPlan(str(i), one) for i, one in enumerate(some)])
    assert "device-seconds of a token" in html
    small, large = (sum(pieces) for pieces in bars(html))
    shares = [1.0 / one.throughput.tokens_per_s_per_device for one in some]
    assert large / small == pytest.approx(shares[1] / shares[0], abs=1e-3)
    assert large < small


def test_names_are_escaped():
    a, b = (estimate(Job.load(PLAN, [f"parallelism.tp={tp}", f"parallelism.dp={8 // tp}"])) for tp in (1, 2))
    labels = ("<script>alert(1)</script>", "B")
    text = diff_page.page([a, b], labels, diff((a, b), labels))
    sound(text)
    assert "<script>alert" not in text
    assert labels[0] in unescape(text)


def test_the_command_line(tmp_path, capsys):
    file, page = tmp_path / "plan.yaml", tmp_path / "page.html"
    file.write_text(PLAN)
    assert cli.main(["search", str(file), "--fix", "tp=2", "--html", str(page)]) == 0
    sound(page.read_text())
    again = tmp_path / "more.html"
    assert cli.main(["diff", str(file), str(file), str(file), "--html", str(again)]) == 0
    read = sound(again.read_text())
    assert {"plan-0", "plan-1", "plan-2"} <= read.texts.keys()
    capsys.readouterr()
    assert cli.main(["search", str(file), "--html", str(tmp_path / "page.txt")]) == 2
    assert cli.main(["diff", str(file), str(file), "--html", str(tmp_path / "no" / "page.html")]) == 2
    problems = capsys.readouterr().err.splitlines()
    assert len(problems) == 2
    assert all(line.startswith("--html ") for line in problems)
