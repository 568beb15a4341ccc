"""`--html`: one file that needs nothing else, tells what the estimate tells, and runs nothing that an input says."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode, b64encode
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import drawn
import jobs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptime import estimate
from steptime.commands import cli
from steptime.report import palette
from steptime.report.page.markup import el, join, linked
from steptime.report.page.memory_charts import PARTS, parts_of, pieces
from steptime.report.page.memory_charts import drawn as drawn_pieces
from steptime.report.page.schedule_data import TICKS, schedule_data
from steptime.report.page.whole_page import page, script_json
from steptime.timing.timeline import Timeline

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(scope="module")
def found():
    return estimate(jobs.job("llama3-8b", gbs=64, seqlen=4096, tp=4, pp=4, dp=2, vpp=2))


def test_sizes_that_cannot_hold_the_job_have_no_efficiency():
    """70.6 B parameters on 16 devices of 80 GB: the table says so, and the line starts at the first size that holds them."""
    large = estimate(jobs.job("llama3-70b", gbs=512, seqlen=8192, tp=4, pp=4, dp=32))
    section = page(large).partition("Weak scaling")[2].partition("</section>")[0]
    short = [row for row in large.weak_scaling if row.verdict == "does_not_fit"]
    assert short
    assert section.count("does not fit") == len(short)
    assert section.count('<td class="n"></td>') == len(short)
    assert section.count(">tight<") == sum(row.verdict == "tight" for row in large.weak_scaling)
    assert ">efficiency</text>" in section
    assert "16 devices: " not in section
    assert "512 devices: " in section


@pytest.fixture(scope="module")
def text(found):
    return page(found)


class Reader(HTMLParser):
    """Tags with their attributes, text by section, and whether every element is closed."""

    VOID = frozenset({"meta", "br", "input", "link"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.said = [], [], {}
        self.feed(text)
        self.close()
        self.texts = {name: " ".join([*said, ""]) for name, said in self.said.items()}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("id", "")))

    def handle_endtag(self, tag):
        assert self.open[-1][0] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data):
        for _, name in self.open:
            self.said.setdefault(name, []).append(data)


# --- one file --------------------------------------------------------------------------------------------------------------


def sound(text):
    """Well formed, no request, no handler, no style that the policy would refuse; ids are unique."""
    read = Reader(text)
    assert not read.open
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in read.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not attrs.keys() & {"src", "srcset", "style", "action"}
        assert not any(name.startswith("on") for name in attrs)
        if "href" in attrs:
            assert tag == "a"
            assert re.match(r"https?://", attrs["href"])
    return read


def test_it_asks_for_nothing(text):
    read = sound(text)
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    scripts = [attrs for tag, attrs in read.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]


def test_the_policy_allows_the_pages_own_script_and_style_alone(text):
    policy = next(a["content"] for t, a in Reader(text).tags if a.get("http-equiv") == "Content-Security-Policy")
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        own = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = b64encode(sha256(own.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")


def test_it_is_the_same_every_time(found, text):
    assert page(found) == text


# --- what it tells ---------------------------------------------------------------------------------------------------------


def test_every_section_is_there(found, text):
    read = Reader(text)
    sections = [attrs["id"] for tag, attrs in read.tags if tag == "section"]
    assert sections == [
        *(
            "memory",
            "step",
            "settings",
            "schedule",
            "gemms",
            "collectives",
            "pipeline",
            "scaling",
            "evidence",
            "assumed",
            "plan",
        )
    ]
    assert "FITS" in text
    assert "node_type: dgx-h100" in read.texts["plan-yaml"]
    assert all(str(run["id"]) in read.texts["evidence"] for run in found.time.basis.nearest)


def test_bars_are_as_long_as_their_bytes(found, text):
    """The widths of a stage's bar are in proportion to the table's bytes, and sum to what is held against the line."""
    held = found.memory
    overhead = sum(held.overhead_bytes)
    bars = re.findall(r"<svg [^>]*aria-label=\"parameters.*?</svg>", text)
    assert len(bars) == len(held.stages)
    for bar, row in zip(bars, held.stages, strict=True):
        widths = {key: float(width) for width, key in re.findall(r'width="([\d.]+)" height="16" class="m-(\w+)', bar)}
        line = float(re.search(r'x1="([\d.]+)"', bar)[1])
        for key, nbytes in parts_of(row, overhead).items():
            assert widths.get(key, 0.0) / line == pytest.approx(nbytes / held.capacity_bytes, abs=2e-4)
        assert sum(widths.values()) / line == pytest.approx(
            (row.reserved_bytes + overhead) / held.capacity_bytes, abs=1e-3
        )
        start, end = map(float, re.search(r"M([\d.]+) 8H([\d.]+)M", bar).groups())
        assert start == pytest.approx(sum(widths.values()), abs=0.03)  # six widths, rounded to 0.01
        assert end / line == pytest.approx(held.most_of(row.reserved_bytes) / held.capacity_bytes, abs=1e-3)


def inflated(data, key):
    """Numbers of every stage, as the script reads them."""
    return json.loads(zlib.decompress(b64decode(data[key])))


def test_the_schedule_unpacks_to_the_walk(found):
    data = schedule_data(found, Timeline(found.timing))
    gaps, order = inflated(data, "gaps"), inflated(data, "order")
    stages = zip(gaps, order, data["lengths"], Timeline(found.timing).actions, strict=True)
    for row, passes, lengths, spans in stages:
        at, last = 0, {}
        for i, (gap, span) in enumerate(zip(row, spans, strict=True)):
            code, more = passes[2 * i : 2 * i + 2]
            batch = last[code] = last.get(code, -1) + 1 + more
            start, at = at + gap, at + gap + lengths[code]
            assert ("FBIW"[code // 2], batch, code % 2) == tuple(span.action)
            assert start == pytest.approx(TICKS * span.start_s / found.step_s, abs=1.0)
            assert at == pytest.approx(TICKS * span.end_s / found.step_s, abs=2.0)


def test_a_large_schedule_stays_small():
    """64 stages and 512 micro-batches, 65,536 actions: under 150 kB of the page."""
    model = {"preset": "llama3-70b", "n_layers": 128}
    found = estimate(jobs.job(model, gbs=512, seqlen=4096, tp=8, pp=64, dp=1))
    data = schedule_data(found, Timeline(found.timing))
    assert sum(map(len, inflated(data, "gaps"))) == 65536
    assert sum(map(len, inflated(data, "order"))) == 2 * 65536
    assert len(script_json(data)) < 150_000


@pytest.mark.parametrize(("schedule", "vpp"), [("zero_bubble", 1), ("zbv", 2), ("dualpipev", 2)])
def test_split_schedules_are_drawn_with_all_their_passes(schedule, vpp):
    split = estimate(
        jobs.job("llama3-8b", gbs=32, software="torch", pp=4, dp=1, vpp=vpp, schedule=schedule, hardware="dgx-b300")
    )
    data = schedule_data(split, Timeline(split.timing))
    spans = Timeline(split.timing).actions
    assert [len(row) for row in inflated(data, "gaps")] == [len(stage) for stage in spans]
    assert {"FBIW"[code // vpp] for row in inflated(data, "order") for code in row[::2]} == {
        span.action.kind for stage in spans for span in stage
    }
    text = page(split)
    sound(text)
    assert "gradients of the weights" in text
    for row in split.memory.stages:
        made = pieces(split, Timeline(split.timing), row.stage)
        fixed = row.params_bytes + row.optimizer_bytes
        assert fixed + max(piece.moving for piece in made) == pytest.approx(row.allocated_bytes)


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_over_the_step_reaches_the_tables_peak(found, stage):
    row = found.memory.stages[stage]
    made = pieces(found, Timeline(found.timing), stage)
    assert made[0].start_s == 0.0
    assert made[-1].end_s == found.step_s
    fixed = row.params_bytes + row.optimizer_bytes
    for some in (made, drawn_pieces(made, found.step_s)):
        assert fixed + max(piece.moving for piece in some) == pytest.approx(row.allocated_bytes)


def test_parts_of_time_and_memory_have_a_colour(found):
    assert found.time.parts_s.keys() <= palette.TIME.keys()
    assert palette.MEMORY.keys() == PARTS.keys()


# --- colors ---------------------------------------------------------------------------------------------------------------


def luminance(color):
    """Relative luminance, WCAG 2.2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def themes():
    css = (Path(palette.__file__).parent / "page" / "assets" / "page.css").read_text()
    light, dark = (re.search(rf"{start}(.*?)}}", css)[1] for start in (r":root {", r':root\[data-theme="dark"\] {'))
    return [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in (light, dark)]


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(theme):
    """4.5 for text (1.4.3), 3 for the edges that draw a bar (1.4.11)."""
    for ground in ("bg", "panel"):
        assert min(contrast(theme[name], theme[ground]) for name in ("fg", "soft", "link")) >= 4.5
    assert contrast(theme["edge"], theme["bg"]) >= 3.0


def test_neighbours_differ_in_grayscale():
    """The parts of a memory bar, each beside the next, forward beside backward."""
    pairs = list(zip(list(palette.MEMORY.values())[:-1], list(palette.MEMORY.values())[1:], strict=True))
    pairs.append((palette.PASSES["F"], palette.PASSES["B"]))
    assert min(contrast(a, b) for a, b in pairs) > 1.3


# --- hostile input ---------------------------------------------------------------------------------------------------------

NASTY = st.text("<>&\"'/`=\\{}();:#!-scriptonlaSR \u2028\u0085", max_size=60)


@cache
def tags(note, **named):
    """The tags of a small model's page."""
    job = jobs.job({"preset": "llama3-8b", "n_layers": 2} | named)
    return [tag for tag, _ in sound(page(estimate(job.replace(notes=[note])))).tags]


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(NASTY, NASTY)
def test_no_text_of_a_plan_becomes_markup(name, note):
    assert tags(note, name=name) == tags("a note")


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn.plans())
def test_any_plan_has_a_sound_page(plan):
    text = page(estimate(drawn.drawn_job(plan)))
    sound(text)
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL).partition('<section id="assumed"')[0]
    assert not re.search(r"\b(nan|inf|None)\b", shown)
    numbers = [float(x) for x in re.findall(r'(?:width|height|x|y|x1|x2|cx|cy)="(-?[\d.e+-]+)"', shown)]
    assert all(-3.0 <= x < 1e5 for x in numbers)


def test_json_in_a_script_ends_with_it():
    text = script_json({"a": "</script><!--&"})
    assert json.loads(text) == {"a": "</script><!--&"}
    assert not set("<>&") & set(text)


def test_elements_escape_and_links_are_only_to_the_web():
    assert el("p", "a < b & c", title='"q"') == '<p title="&quot;q&quot;">a &lt; b &amp; c</p>'
    assert join("<b>", el("i")) == "&lt;b&gt;<i></i>"
    assert linked("see javascript:alert(1)") == "see javascript:alert(1)"
    made = linked('at https://a.org/x?"onclick=1, arXiv 2205.05198 and NVIDIA/nccl@0123abc docs/env.md.')
    assert re.findall(r'href="([^"]*)"', made) == [
        "https://a.org/x?",
        "https://arxiv.org/abs/2205.05198",
        "https://github.com/NVIDIA/nccl/blob/0123abc/docs/env.md",
    ]


# --- the command -----------------------------------------------------------------------------------------------------------


def test_the_command_writes_it_beside_the_report(tmp_path, capsys):
    file = tmp_path / "report.html"
    assert cli.main([str(CONFIGS / "llama3_8b_fsdp.yaml"), "--brief", "--html", str(file)]) == 0
    assert "MFU" in capsys.readouterr().out
    sound(file.read_text(encoding="utf-8"))


def test_another_suffix_is_told_first(capsys):
    assert cli.main(["nowhere.yaml", "--html", "report.pdf"]) == 2
    line = "--html report.pdf: unknown format; use a file name that ends in one of .html, .htm\n"
    assert capsys.readouterr().err == line


def test_a_plan_that_does_not_fit_shows_its_fixes():
    found = estimate(jobs.job("llama3-70b", gbs=64, seqlen=8192, tp=8, dp=2))
    read = sound(page(found))
    assert found.memory.verdict == "does_not_fit"
    assert "DOES NOT FIT" in read.texts[""]
    for fix in found.fixes:
        assert f"<li><code>{fix.set}</code><p>" in page(found)
