"""`--plot` of a report and of scaling, and `--watch`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import jobs
import pytest

from steptime import Job, estimate
from steptime.commands import cli
from steptime.commands.console import Printer
from steptime.commands.watch import _once
from steptime.report import palette, plot_estimate, search_plot, sensitivity_tables
from steptime.report.table import Style
from steptime.search.run import search
from steptime.search.sensitivity import sensitivity
from steptime.timing.timeline import Timeline

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found():
    return estimate(jobs.job("llama3-8b", gbs=64, seqlen=4096, tp=4, pp=4, dp=2, vpp=2))


@pytest.fixture(scope="module")
def text(found, tmp_path_factory):
    """The picture of an estimate, as SVG."""
    path = tmp_path_factory.mktemp("plot") / "a.svg"
    plot_estimate.draw(found, str(path))
    return path.read_text(encoding="utf-8")


def test_words_of_the_picture(text):
    for words in ("where the step goes", "memory at the peak", "the schedule", "matrix multiplies", "usable", "FITS: "):
        assert words in text
    for color in (palette.MEMORY["activations_bytes"], palette.TIME["gemm"]):
        assert color in text


def test_stages_are_counted_and_a_single_device_is_not():
    """No stage 0.5, or 16 of 0 to 15: the axis of the stages has their numbers, or none."""
    from matplotlib.figure import Figure

    for stages, ticks in ((16, range(16)), (20, range(0, 20, 2)), (1, ())):
        axes = Figure().subplots()
        plot_estimate._stages(axes, stages)
        assert list(axes.get_yticks()) == list(ticks)
        assert axes.get_ylim() == (stages - 0.5, -0.5)


def test_a_search_tells_the_front_the_plan_and_what_is_usable(tmp_path):
    job = Job.load({"model": "gpt3-1.3b", "parallelism": {"tp": 4, "pp": 2, "dp": 2}, "hardware": "dgx-a100-80",
                    "data": {"gbs": 64, "seqlen": 2048, "microbatch_sz": 1}})  # fmt: skip
    search_plot.draw(search(job), str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for words in (
        "gpt3-1.3b on 16 devices",
        "the plan",
        "GiB usable",
        "Pareto front, up to 2 x the best",
        "seconds a step",
    ):
        assert words in text
    assert "10^" not in text
    for color in (palette.TIME["gemm"], palette.TIME["tp_comm"]):
        assert color in text


def test_bars_of_a_sensitivity_have_their_shares(tmp_path):
    found = sensitivity(jobs.job("gpt3-1.3b", gbs=64, seqlen=2048, tp=2, pp=1, dp=2))
    sensitivity_tables.draw(found, str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for gain in found.gains:
        assert f"{abs(round(100.0 * gain.change, 1)):.1f} %" in text
    assert "gpt3-1.3b on 4 devices" in text
    assert "devices (twice)" in text  # which is not 10 % more
    assert "% of the step saved by 10 % more, or by what a name says" in text


def test_the_same_estimate_makes_the_same_file(found, text, tmp_path):
    """As SVG; what the formats add of their own is the same in every picture (test_plot.py)."""
    plot_estimate.draw(found, str(tmp_path / "b.svg"))
    assert (tmp_path / "b.svg").read_text(encoding="utf-8") == text


def test_the_schedules_columns_are_as_busy_as_the_walk(found):
    """The share of columns in a pass's color is its share of the step, to a column per change of color."""
    timeline = Timeline(found.timing)
    for stage, spans in enumerate(timeline.actions):
        colors = plot_estimate._colors(spans, timeline, stage)
        for kind in "FB":
            seconds = sum(end - start for action, start, end in spans if action.kind == kind)
            share = colors.count(palette.PASSES[kind]) / len(colors)
            assert share == pytest.approx(seconds / found.step_s, abs=0.5 * len(spans) / len(colors))


def test_scaling_draws_both_lines(found, tmp_path):
    plot_estimate.draw_scaling(found, str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for words in ("weak: the same work per device", "strong: the same batch", "this plan", "efficiency"):
        assert words in text


@pytest.mark.parametrize("command", [["configs/gpt2_1gpu.yaml", "--brief"], ["scale", "configs/gpt2_1gpu.yaml"]])
def test_the_commands_write_it_beside_their_text(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main([*command, "--plot", str(tmp_path / "a.png")]) == 0
    assert capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*command, "--plot", "a.gif"]) == 2
    assert capsys.readouterr().err.startswith("--plot a.gif: unknown format")


# --- terminal --------------------------------------------------------------------------------------------------------------


def test_bars_have_their_colors_where_somebody_looks(capsys, monkeypatch):
    """gemm's #0b5fa5 = (11, 95, 165) is nearest to the levels (0, 95, 175), so (0, 1, 3): 16 + 36 * 0 + 6 * 1 + 3 = 25.

    The levels of xterm's cube (256colres.pl) are 0, 95, 135, 175, 215, 255: not evenly spaced.
    """
    monkeypatch.chdir(ROOT)
    plan = ["configs/gpt2_1gpu.yaml"]
    assert cli.main([*plan, "--color", "always"]) == 0
    colored = capsys.readouterr().out
    bars = [line for line in colored.splitlines() if line.startswith("  matrix multiplies")]
    assert [line.count("\x1b[38;5;25m") for line in bars] == [1]
    assert cli.main(plan) == 0  # no terminal
    bare = re.sub(r"\x1b\[[\d;]*m", "", colored).splitlines()
    assert [line.rstrip() for line in bare] == capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("color", "number"),
    [
        ("#e08a3c", 173),  # (224, 138, 60) -> (215, 135, 95): 16 + 36 * 4 + 6 * 2 + 1
        ("#b15928", 130),  # (177, 89, 40) -> (175, 95, 0): 16 + 36 * 3 + 6 * 1
        (
            "#b9c0c9",
            250,
        ),  # (185, 192, 201) -> gray 8 + 10 * 18 = 188, 194 away in squares; the cube's (175, 175, 215) 585
    ],
)
def test_a_color_of_the_page_is_its_nearest_color_on_a_terminal(color, number):
    assert Style(color=True).tint("#", color) == f"\x1b[38;5;{number}m#\x1b[0m"


# --- watch -----------------------------------------------------------------------------------------------------------------


def test_a_watched_plan_is_reported_at_every_change(tmp_path):
    plan = tmp_path / "plan.yaml"
    text = (ROOT / "configs" / "gpt2_1gpu.yaml").read_text()
    plan.write_text(text)
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a job in the background ignores it
    code += "from steptime.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        command = [sys.executable, "-uc", code, str(plan), "--brief", "--watch"]
        process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | {"NO_COLOR": "1"}, cwd=ROOT)

    def until(name, count, words):
        end = time.monotonic() + 20
        while (tmp_path / name).read_text().count(words) < count:
            assert time.monotonic() < end
            time.sleep(0.05)

    until("out", 1, "MFU")
    plan.write_text(text.replace("model:", "modle:", 1))
    until("err", 1, "modle")
    plan.write_text(text)
    until("out", 2, "MFU")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    assert "\x1b" not in (tmp_path / "out").read_text()
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_a_terminal_is_cleared_before_each_report(capsys, monkeypatch):
    """The codes reach it as they are, unlike those of an input."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _once(Namespace(), Printer("never", ascii_only=False), lambda _, out: out.text("report\x1b[2J\n") or 0) == 0
    assert capsys.readouterr().out == "\x1b[2J\x1b[Hreport?[2J\n"


def test_standard_input_cannot_be_watched(capsys):
    assert cli.main(["-", "--watch"]) == 2
    assert capsys.readouterr().err == "--watch: needs the file of a plan; standard input and options do not change\n"
