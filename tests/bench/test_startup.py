"""Job start to first step, read from logs: stamps of every kind, hours and midnights crossed, logs that never started."""

# ruff: noqa: DTZ001, DTZ007 - logs state wall clocks without a zone

import csv
import json
from datetime import datetime, time
from pathlib import Path
from statistics import correlation
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.base.config import ConfigError
from steptime.bench.phases import JOB_STARTED, Phases, first_step_done, job_started
from steptime.bench.run_logs.stamps import in_name
from steptime.bench.run_logs.startup import (
    NeverStarted,
    Startup,
    Unclear,
    by_world_size,
    quantiles,
    read_log,
    read_stamps,
    step_of,
)
from steptime.report.bench_logs import startup_command
from steptime.report.table import Style, layout

PUBLISHED = Path(__file__).parents[1] / "data" / "bench" / "startup_perlmutter.csv"
ROWS = list(csv.DictReader(PUBLISHED.read_text().splitlines()))


@pytest.fixture
def log(tmp_path):
    """Writes a log and reads it."""

    def read(text, name="job.log"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_log(str(path))

    return read


def text_of(sections):
    return "\n".join(line for section in sections for line in layout(section, Style()))


# --- the published table ---


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["start"])
def test_a_published_row_from_its_log(row, log):
    """The log of each job in brief: its job start, its first step; the world size stands in the name."""
    stop = datetime.strptime(row["stop"], "%Y-%m-%d-%H%M%S")
    for stamp in (f"[{stop}]", f"[{stop:%H:%M:%S}]"):  # with its date, and the time of day alone
        found = log(f"Job started at: {row['start']} on nid\n{stamp} - step=0, loss=11.2\n", row["log"])
        assert isinstance(found, Startup)
        assert (found.seconds_s, found.stop) == (float(row["dt_correct"]), stop)
    assert in_name(row["log"]) == found.start


def test_the_published_differences_subtract_digits_and_are_wrong_in_118_of_119():
    for row in ROWS:
        start, stop = (int(row[key][-6:]) for key in ("start", "stop"))
        assert int(row["dt_published"]) == stop - start
        wrong = int(row["dt_published"]) - int(row["dt_correct"])
        minutes = int(row["stop"][-4:-2]) + 60 * int(row["stop"][-6:-4])
        minutes -= int(row["start"][-4:-2]) + 60 * int(row["start"][-6:-4])
        hours = int(row["stop"][-6:-4]) - int(row["start"][-6:-4])
        assert wrong == 40 * minutes + 4000 * hours
    assert sum(row["dt_published"] != row["dt_correct"] for row in ROWS) == 118


def test_the_published_rows_by_world_size():
    """n, minimum, median, maximum of each world size; p10 and p90 over all."""
    found = by_world_size(read_stamps(str(PUBLISHED)))
    assert {size: (q.n, q.min_s, q.median_s, q.max_s) for size, q in found.items()} == {
        4: (17, 60, 99, 210),
        8: (36, 51, 90, 483),
        16: (34, 48, 82, 900),
        32: (17, 59, 81, 290),
        64: (9, 84, 102, 313),
        128: (2, 129, 174, 219),
        256: (1, 153, 153, 153),
        512: (3, 226, 247, 250),
    }
    overall = quantiles([row.seconds_s for row in read_stamps(str(PUBLISHED))])
    assert overall == (48, 60, 89, 269, 900, 119)


def test_world_size_explains_two_percent_of_the_variance():
    rows = read_stamps(str(PUBLISHED))
    assert correlation([row.world_size for row in rows], [row.seconds_s for row in rows]) ** 2 == pytest.approx(
        0.022, abs=5e-4
    )


def test_names_alone_say_when_the_jobs_started(tmp_path):
    path = tmp_path / "names.csv"
    path.write_text("log,stop\n" + "".join(f"{row['log']},{row['stop']}\n" for row in ROWS))
    assert [row.seconds_s for row in read_stamps(str(path))] == [float(row["dt_correct"]) for row in ROWS]


def test_the_table_as_a_report():
    document, sections = startup_command([str(PUBLISHED)])
    text = text_of(sections)
    assert "median 89 s; 60 to 269 s (10th" in text
    assert "48 to 900 s in all" in text
    assert "119 of 119 logs" in text
    assert "no scaling law is fitted" in text
    assert "did not start" not in text
    assert len(document["startup"]["started"]) == 119
    assert document["startup"]["by_world_size"][0]["world_size"] == 4
    assert max(map(len, text.splitlines())) <= 80


# --- logs ---

START = "Job started at: 2023-10-05-235950 on nid008217\n"


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [("[23:59:55]", 5), ("[00:00:10]", 20), ("[2023-10-06 00:01:00]", 70), ("2023-10-06 00:00:10,5 - INFO", 20.5)],
)
def test_across_midnight(log, stamp, expected):
    assert log(f"{START}{stamp} step=0, loss=1\n").seconds_s == expected


def test_across_the_hour(log):
    """18:59:52 to 19:00:46 is 54 s; as digits it is 4,094."""
    assert log("Job started at: 2023-10-15-185952 on x\n[19:00:46] step=0, loss\n").seconds_s == 54


@pytest.mark.parametrize(
    "text",
    ["step=0, loss", "step=0", "step=0 loss", "[step=0]", "train/step=0|", "step = 0/100", "RANK: 0 / 7 step=0,"],
)
def test_step_0(text):
    assert step_of(text)[1] == "0"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "step=01,",
            "step=00",
            "step=0.5",
            "step=0-10",
            "warmup_step=0",
            "global_step=0",
            "--step=0",
            "laststep=0",
            "step=10,",
        ),
        *(
            "[rank3] step=0,",
            "rank=1 step=0",
            "local_rank=1 step=0",
            "[default2]: step=0",
            "3: step=0,",
            "RANK: 3 / 7 step=0",
        ),
    ],
)
def test_what_is_not_step_0_of_rank_0(log, text):
    found = log(f"{START}[23:59:58] {text}\n" if text[0] not in "[3" else f"{START}{text}\n")
    assert isinstance(found, NeverStarted)


def test_rank_0_may_come_late(log):
    found = log(f"{START}1: [23:59:51] step=0,\n0: [23:59:58] step=0,\n0: [23:59:59] step=1,\n")
    assert found.seconds_s == 8


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("RANK: 0 / 7", 8),
        ("WORLD_SIZE=16", 16),
        ("world_size: 32", 32),
        ('"world_size": 4,', 4),
        ("> using world size: 64,", 64),
    ],
)
def test_world_size_from_the_text_first(log, line, size):
    assert log(f"{START}{line}\n[23:59:58] step=0,\n", "x-ngpu2.log").world_size == size


@pytest.mark.parametrize("line", ["LOCAL_WORLD_SIZE=4", "model_parallel_world_size: 2", "LOCAL_RANK: 0 / 3"])
def test_world_size_else_from_the_name(log, line):
    assert log(f"{START}{line}\n[23:59:58] step=0,\n", "x-nhosts2-ngpu8-y.log").world_size == 8
    assert log(f"{START}{line}\n[23:59:58] step=0,\n", "x.log").world_size is None


def test_the_model_and_colours(log):
    coloured = f"{START}MODEL_SIZE_KEY=GPT1T_1L\n[\x1b[36m23:59:58\x1b[0m] \x1b[1mstep\x1b[0m=\x1b[36m0\x1b[0m, loss\n"
    found = log(coloured)
    assert (found.seconds_s, found.model) == (8, "GPT1T_1L")


def test_a_log_without_step_0(log, tmp_path):
    found = log(f"{START}[23:59:58] importing\n\n[00:00:09] warmup_step=0\nKilled\n", "x-ngpu8.log")
    assert found == NeverStarted("x-ngpu8.log", 4, datetime(2023, 10, 5, 23, 59, 50), time(0, 0, 9), 8)
    document, sections = startup_command([str(tmp_path / "x-ngpu8.log")])
    text = text_of(sections)
    assert "0 of 1 logs" in text
    assert "did not start" in text
    assert "00:00:09" in text
    assert document["startup"]["never_started"][0] == {
        "log": "x-ngpu8.log", "lines": 4, "start": "2023-10-05T23:59:50", "last": "00:00:09", "world_size": 8,
    }  # fmt: skip
    assert document["startup"]["quantiles"] is None


def test_a_log_without_a_job_start(log, tmp_path):
    found = log("[00:00:09] step=0, loss\n")
    assert found == Unclear("job.log", "no line states a job start", 1)
    assert "no line states a job start" in text_of(startup_command([str(tmp_path / "job.log")])[1])
    named = log("[19:12:15] step=0, loss\n", "x-2023-10-05-191101.log")
    assert (named.seconds_s, named.notes) == (74, ("job start from the file's name",))


def test_clocks_that_differ_are_said_so(log):
    found = log("Job started at: 2023-10-05-191101\n[2023-10-05 17:11:01] step=0,\n")
    assert found.why == "step 0 is stamped 7200 s before the job start: the clocks or time zones differ"


def test_a_step_without_a_stamp(log):
    """Rich prints a time only where it changes."""
    found = log(f"{START}[23:59:58] compiling\n           step=0, loss\n")
    assert (found.seconds_s, found.notes) == (8, ("step 0 has no time stamp; the last one before it is used",))
    assert log(f"{START}step=0, loss\n") == Unclear("job.log", "no line states a time stamp at step=0", 2)


def test_the_last_attempt_before_step_0_counts(log):
    again = "Job started at: 2023-10-06-000100 on x\n[00:01:30] step=0,\nJob started at: 2023-10-06-010000\n"
    found = log(f"{START}[23:59:58] error\n{again}")
    assert (found.seconds_s, found.notes) == (30, ("2 job starts; the last before step 0 is used",))


def test_phases_of_our_own_logs(log, tmp_path):
    """Of 4 s from job start to the first step the phases account for 0.8 + 0.85 + 0.1 + 1.0 + 0.2 = 2.95 s."""
    phases = {"launcher": 0.8, "imports": 0.85, "init": 0.1, "build": 1.0, "first_step": 0.2, "steady": 0.05}
    lines = [f"phase {name} {value:.2f} s" for name, value in phases.items()]
    lines.insert(5, "[23:59:54] step=0, loss=1")
    found = log(START + "\n".join(lines))
    assert found.phases_s == phases
    assert found.other_s == pytest.approx(1.05)
    text = text_of(startup_command([str(tmp_path / "job.log")])[1])
    assert "first step" in text
    assert "1.05" in text
    bare = log("\n".join(f"phase {name} {value:.2f} s" for name, value in phases.items()))
    assert bare.seconds_s == pytest.approx(2.95)
    assert bare.start is None


def test_the_lines_of_our_own_benchmark(log):
    """Written by it, read by us: 60 s from job start to the first step, the process 2 s after the job script."""
    clock = iter([15.0, 16.5])
    phases = Phases({JOB_STARTED: "10"}, now=lambda: next(clock))
    phases.seconds, phases._last = {"launcher": 2.0}, 12.0
    phases.end("imports")
    phases.end("init")
    lines = [job_started(10), *phases.lines, first_step_done(70, "ddp")]
    found = log("\n".join(lines))
    assert (found.seconds_s, found.phases_s) == (60, {"launcher": 2.0, "imports": 3.0, "init": 1.5})
    assert found.other_s == 53.5


def test_any_bytes_can_be_read(log):
    noise = bytes(range(256)) * 400
    assert isinstance(log(noise), NeverStarted)
    long = b"x" * 3_000_000 + b" step=0,"  # one line; its beginning alone is read
    bars = b"10%\r20%\r[23:59:58] step=0, loss\r30%"
    assert log(START.encode() + noise + b"\n" + long + b"\n" + bars).seconds_s == 8
    assert isinstance(log(START.encode() + long), NeverStarted)
    assert log(b"") == NeverStarted("job.log", 0, None, None, None)


pieces = st.sampled_from(
    ["Job started at: ", "2023-10-05-191101", "[19:12:15]", "2023-13-99 19:12:15", "step=0", ",", "\n", "\r", " ", "rank=", "3",
     "phase build ", "1e9 s", "RANK: 0 / ", "world_size=", "99", "\x1b[1m", "\0", "2023-10-05T19:11:01+99:99",
     "Thu Feb 31 19:11:01 2023"]
)  # fmt: skip


@given(st.lists(st.one_of(pieces, st.text(max_size=4)), max_size=30).map("".join))
def test_any_text_can_be_read(text):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "job-ngpu8.log"
        path.write_text(text, encoding="utf-8", errors="replace")
        found = read_log(str(path))
        document, sections = startup_command([str(path)])
    assert json.dumps(document, allow_nan=False)
    assert text_of(sections)
    assert not isinstance(found, Startup) or found.seconds_s >= 0


def test_files_that_cannot_be_read_are_one_line_each(tmp_path):
    with pytest.raises(ConfigError) as error:
        startup_command([str(tmp_path / "none.log"), str(tmp_path)])
    assert len(error.value.problems) == 2
    assert error.value.problems[0].endswith("none.log: no such file")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("start,stop\n1,2\n", "expected columns log,start,stop and a row for each job"),
        ("log,start,stop\n", "expected columns log,start,stop and a row for each job"),
        ("", "expected columns log,start,stop and a row for each job"),
        (
            "log,start,stop\nx,2023-10-05-191101,soon\n",
            "row 1: stop: expected a stamp like 2023-10-05-191101 (got 'soon')",
        ),
        ("log,start,stop\nx,2023-10-05-191101\n", "row 1: stop: expected a stamp like 2023-10-05-191101 (got '')"),
        ("log,stop\nx,2023-10-05-191101\n", "row 1: start: expected a stamp like 2023-10-05-191101 (got '')"),
        (
            "log,start,stop\nx,2023-10-05-191101,2023-10-05-191001\n",
            "row 1: stop: 60 s before start (got '2023-10-05-191001', '2023-10-05-191101')",
        ),
        (
            "log,start,stop,world_size\nx,2023-10-05-191101,2023-10-05-191102,2x4\n",
            "row 1: world_size: expected a whole number (got '2x4')",
        ),
        ('log,start,stop\n"' + "x\n" * 200_000, "not CSV (field larger than field limit (131072))"),
    ],
)
def test_bad_lists_of_stamps(tmp_path, text, problem):
    path = tmp_path / "stamps.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        startup_command([str(path)])
    assert [line.endswith(problem) for line in error.value.problems] == [True]
