"""`3dtrn validate --plot FILE`: pictures that are there, in three formats, and the errors that are one line."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from steptime.base.config import ConfigError
from steptime.report import plot
from steptime.validation.judgement import judge_shipped
from steptime.validation.slices import headline

ROOT = Path(__file__).parents[1]
START = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.fixture(scope="module")
def judged():
    """Some of the shipped rows of every source and accelerator."""
    return judge_shipped()[::27]


def test_the_suffix_says_the_format(run_validate, tmp_path):
    """In capitals, too; small letters are the other tests'."""
    path = tmp_path / "errors.PNG"
    assert run_validate("--source", "KOR22", "--plot", path) == (0, run_validate("--source", "KOR22")[1], "")
    assert path.read_bytes().startswith(START["png"])


def test_pixels_hold_both_panels(judged, tmp_path):
    """Color in the left half (points) and the right (bars); neither is blank nor black."""
    import matplotlib.image

    plot.draw(judged, str(tmp_path / "a.png"))
    pixels = matplotlib.image.imread(tmp_path / "a.png")[:, :, :3]
    height, width = pixels.shape[:2]
    assert width > 1500
    assert height > 800
    for half in (pixels[:, : width // 2], pixels[:, width // 2 :]):
        colored = (half.max(axis=2) - half.min(axis=2) > 0.15).mean()
        assert 0.003 < colored < 0.4
        assert (half.min(axis=2) > 0.95).mean() > 0.4


@pytest.fixture(scope="module")
def text(judged, tmp_path_factory):
    """The picture of those rows, as SVG."""
    path = tmp_path_factory.mktemp("plot") / "a.svg"
    plot.draw(judged, str(path))
    return path.read_text(encoding="utf-8")


def test_words_of_the_picture(judged, text):
    """Axes with units, both splits with their counts, every accelerator, errors at the edge counted."""
    rows = [j for j in judged if j.skipped is None and j.excluded is None and j.step_error is not None]
    for split in ("fit", "test"):
        assert f">{split}: " in text
        assert f"({sum(j.row.text('split') == split for j in rows):,})" in text
        assert f">{split}, cumulative; median size " in text
    for accelerator, count in Counter(j.accelerator for j in rows).most_common(8):
        assert f">{accelerator} ({count:,})<" in text
    assert "measured step time [s]" in text
    assert "predicted step time [s]" in text
    assert f">{len(rows):,} measured steps<" in text
    beyond = sum(abs(j.step_error) > plot.REACH for j in rows)
    assert (f">{beyond:,} beyond " in text) == (beyond > 0)


def test_accelerators_differ_without_color(judged, tmp_path):
    """Each entry of the legend has its own marker: in grayscale the colors of two may be the same gray."""
    import matplotlib.pyplot as plt

    axes = plt.figure().subplots()
    plot._scatter(axes, [j for j in headline(judged) if j.step_error is not None])
    handles, labels = axes.get_legend_handles_labels()
    accelerators = {j.accelerator for j in judged}
    named = [
        h
        for h, label in zip(handles, labels, strict=True)
        if label.partition(" (")[0] in accelerators or " more (" in label
    ]
    outlines = {tuple(map(tuple, handle.get_paths()[0].vertices.round(6))) for handle in named}
    assert len(named) == len(outlines) > 5


def test_a_single_row_has_plain_numbers_at_its_axes(judged, tmp_path):
    """Within one power of ten an axis has numbers such as 2.5, none such as 3 x 10^0."""
    row = next(j for j in headline(judged) if 2.0 < (j.measured_step_s or 0.0) < 3.0)
    plot.draw([row], str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert ">1 measured step<" in text
    assert ">2.5</text>" in text
    assert "\\times" not in text
    assert "10^" not in text


def test_the_same_rows_make_the_same_file(judged, text, tmp_path):
    """All rows as SVG; one in the formats that have dates of their own."""
    plot.draw(judged, str(tmp_path / "b.svg"))
    assert (tmp_path / "b.svg").read_text(encoding="utf-8") == text
    assert text.startswith(START["svg"].decode())
    one = next(j for j in headline(judged) if j.step_error is not None)
    for suffix in ("png", "pdf"):
        for name in ("a", "b"):
            plot.draw([one], str(tmp_path / f"{name}.{suffix}"))
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
        assert (tmp_path / f"a.{suffix}").read_bytes().startswith(START[suffix])


def test_more_accelerators_than_colours_share_grey(judged, tmp_path):
    rows = [j for j in judged if j.skipped is None and j.excluded is None and j.step_error is not None][:12]
    plot.draw([j._replace(accelerator=f"x{i}") for i, j in enumerate(rows)], str(tmp_path / "a.svg"))
    assert ">4 more (4)<" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_own_rows_without_a_split(run_validate, tmp_path):
    code, _, err = run_validate("--measurements", "tests/data/validate/own.csv", "--plot", tmp_path / "own.svg")
    assert (code, err) == (0, "")
    assert ">measured runs (2)<" in (tmp_path / "own.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("errors.jpeg", "--plot {}: unknown format; use a file name that ends in one of .png, .svg, .pdf"),
        ("errors", "--plot {}: unknown format"),
        ("no/such/errors.png", "--plot {}: folder "),
        ("", "--plot {}: unknown format"),
    ],
)
def test_a_bad_path_is_one_line_before_anything_is_judged(name, line, run_validate, tmp_path):
    path = str(tmp_path / name)
    code, out, err = run_validate("--plot", path)
    assert (code, out) == (2, "")
    assert err.startswith(line.format(path))
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_one_line(run_validate, tmp_path):
    (tmp_path / "a.png").mkdir()
    code, out, err = run_validate("--source", "KOR22", "--plot", tmp_path / "a.png")
    assert (code, out) == (2, "")
    assert err == f"--plot {tmp_path / 'a.png'}: cannot be written (Is a directory)\n"


def test_without_matplotlib_one_line_says_what_to_install(run_validate, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run_validate("--plot", tmp_path / "a.png")
    assert (code, out, err) == (2, "", "--plot: needs matplotlib; pip install 'steptime[plot]'\n")


def test_nothing_to_draw_is_said(judged, tmp_path):
    with pytest.raises(ConfigError, match="no judged row has a step time"):
        plot.draw([j for j in judged if j.skipped], str(tmp_path / "a.png"))
    assert not (tmp_path / "a.png").exists()


def test_matplotlib_is_loaded_for_a_picture_alone():
    code = (
        "import sys; from steptime.commands.cli import main; main(['validate', '--source', 'KOR22']); "
        "assert 'matplotlib' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
