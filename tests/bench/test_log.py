"""Output on two real ranks, in a log, through a pipe and on a terminal; failures; the stopwatch of the start."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time

import forked
import pytest
from bench.launch import fork_ranks, torchrun

from steptime.base.config import ConfigError
from steptime.bench import log, phases
from steptime.bench.log import alike, guarded, progress, tee
from steptime.bench.phases import Phases, job_start_s, job_started, process_start_s, step_line
from steptime.bench.world import Launch

SCRIPT = """
import os, signal, sys
from pathlib import Path
from steptime.bench.log import guarded
from steptime.bench.world import find, finish, start
from steptime.base.config import ConfigError

launch, how = find(), sys.argv[2]

def run():
    import torch, torch.distributed as dist
    world = start(launch, "cpu")
    print("measured by", world.world_size)
    if how != "well" and world.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"raises": RuntimeError("out of luck"), "bad": ConfigError("model.n_layers: must be at least 1")}[how]
    dist.all_reduce(torch.ones(1))
    if how != "well":
        signal.pause()
    finish(world)

sys.exit(guarded(run, launch, Path(sys.argv[1])))
"""


def worker(rank=1):
    return Launch("torchrun", rank, 2, rank, 2, 0, 1, "localhost", 29500)


@pytest.fixture
def run_ranks(tmp_path):
    """Run the script on two ranks: (the finished launcher, the log's text)."""
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)

    def run(how, start=fork_ranks):
        path = tmp_path / "out" / f"{how}.log"
        return start(script, 2, str(path), how), path.read_text()

    return run


def test_two_ranks_print_each_line_once(run_ranks):
    done, text = run_ranks("well")
    assert (done.returncode, done.stdout) == (0, "measured by 2\n")
    assert text == "measured by 2\n"


def test_a_rank_that_raises_ends_the_job_with_its_traceback_in_the_log(run_ranks):
    done, text = run_ranks("raises", torchrun)
    assert done.returncode != 0
    for told in (done.stderr, text):
        assert "[rank 1] Traceback (most recent call last):" in told
        assert "[rank 1] RuntimeError: out of luck" in told


def test_a_rank_that_is_killed_ends_the_job_and_the_other_tells_where_it_was(run_ranks):
    done, text = run_ranks("killed")
    assert done.returncode != 0
    assert "most recent call" in text
    assert "in run" in text


def test_bad_input_on_one_rank_is_one_line_and_no_traceback(run_ranks):
    done, text = run_ranks("bad")
    assert done.returncode != 0
    for told in (done.stderr, text):
        assert "[rank 1] model.n_layers: must be at least 1" in told
        assert "[rank 1] Traceback" not in told


# --- one process ---


def fail(error):
    def run():
        raise error

    return run


def test_exit_codes(capsys, tmp_path):
    assert guarded(lambda: None, None) == 0
    assert guarded(lambda: 1, None) == 1
    assert guarded(fail(KeyboardInterrupt()), None) == 130
    assert capsys.readouterr() == ("", "")
    assert guarded(fail(ConfigError(["a: wrong", "b: wrong"])), None) == 2
    assert capsys.readouterr().err == "a: wrong\nb: wrong\n"
    assert guarded(fail(ValueError("odd")), None) == 1
    assert capsys.readouterr().err.endswith("ValueError: odd\n")
    with pytest.raises(SystemExit):  # argparse's help
        guarded(fail(SystemExit(0)), None)


def test_what_is_bad_on_every_rank_is_told_by_the_root(capsys, tmp_path):
    def run(launch):
        with alike(launch):
            raise ConfigError("a: wrong")

    path = tmp_path / "run.log"
    with pytest.raises(SystemExit) as left:
        guarded(lambda: run(worker(1)), worker(1), path)
    assert left.value.code == 2
    assert guarded(lambda: run(worker(0)), worker(0), path) == 2
    assert guarded(lambda: run(None), None) == 2
    assert capsys.readouterr() == ("", "a: wrong\n" * 2)
    assert path.read_text() == "a: wrong\n"


def test_the_roots_traceback_is_in_the_log_once(capsys, tmp_path):
    path = tmp_path / "new" / "run.log"
    assert guarded(fail(ValueError("odd")), None, path) == 1
    assert path.read_text().count("ValueError: odd") == 1
    assert guarded(lambda: print("again"), None, path) == 0
    assert path.read_text().endswith("ValueError: odd\nagain\n")  # appended


def test_a_worker_is_silent_until_it_fails(capsys, tmp_path):
    path = tmp_path / "run.log"
    assert guarded(lambda: print("noise"), worker(), path) == 0
    assert capsys.readouterr() == ("", "")
    assert guarded(fail(ConfigError("a: wrong")), worker(), path) == 2
    assert capsys.readouterr() == ("", "[rank 1] a: wrong\n")
    assert path.read_text() == "[rank 1] a: wrong\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_that_cannot_be_written_is_one_line(capsys, tmp_path, rank):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run.log"
    assert guarded(lambda: print("never"), worker(rank), path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[rank 1] " * rank + f"{path}: the log cannot be written (")
    assert err.count("\n") == 1


def test_streams_are_put_back_even_on_failure(capsys, tmp_path):
    before = sys.stdout, sys.stderr

    def run():
        print("out")
        print("err", file=sys.stderr)
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"), tee(tmp_path / "run.log"):
        run()
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("out\n", "err\n")
    assert (tmp_path / "run.log").read_text() == "out\nerr\n"


def test_a_copied_stream_is_still_a_stream(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="latin-1") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", None)  # closed by the caller
        with tee(tmp_path / "run.log"):
            assert (sys.stdout.encoding, sys.stdout.fileno(), sys.stdout.isatty()) == ("latin-1", out.fileno(), False)
            print("to nobody", file=sys.stderr)
            assert not sys.stderr.isatty()
            with pytest.raises(io.UnsupportedOperation):
                sys.stderr.fileno()
    assert (tmp_path / "run.log").read_text() == "to nobody\n"


def python(code, tmp_path, shell="{}"):
    """A script in a shell pipeline: "{}" is where it stands."""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = shell.format(f"{sys.executable} {script}")
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=forked.clean(), check=False
    )


PROGRESS = """
import sys
from pathlib import Path
from steptime.bench.log import guarded, progress

def run():
    with progress(40, "gemm") as step:
        for _ in range(40):
            step()
    for i in range(20000):
        print("row", i)
    Path(sys.argv[0]).with_suffix(".done").write_text("done")

sys.exit(guarded(run, None, Path(sys.argv[0]).with_suffix(".log")))
"""


def test_a_pipe_gets_plain_lines(tmp_path):
    done = python(PROGRESS, tmp_path, "{} 2>&1 | cat")
    assert done.returncode == 0
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)  # nothing below a space but line ends
    lines = [line for line in done.stdout.splitlines() if line.startswith("gemm")]
    assert [line.split(",")[0] for line in lines] == [f"gemm {4 * i}/40" for i in range(1, 11)]
    assert lines[0].endswith(" left")
    assert lines[-1].endswith(" in all")


def test_a_reader_that_leaves_does_not_end_the_measurement(tmp_path):
    done = python(PROGRESS, tmp_path, "{} | head -n 1")
    assert (done.returncode, done.stdout) == (0, "row 0\n")
    assert "BrokenPipe" not in done.stderr
    assert (tmp_path / "script.done").exists()
    assert (tmp_path / "script.log").read_text().endswith("row 19999\n")


# --- progress ---


def read_to_line_end(terminal):
    """All that has arrived, however late it arrives."""
    seen = b""
    while not seen.endswith(b"\n"):
        seen += os.read(terminal, 1 << 16)
    return seen.decode()


@pytest.fixture
def terminal():
    """A pseudo-terminal: (the stream a program writes to, a reader of what a person would get)."""
    import pty
    import tty

    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        yield stream, lambda: read_to_line_end(ours)
    os.close(ours)


def test_a_terminal_gets_a_bar_without_colours(monkeypatch, terminal, tmp_path):
    stream, seen = terminal
    monkeypatch.setenv("TERM", "xterm")
    with progress(4, "gemm", stream=stream) as step:
        for _ in range(4):
            step()
    shown = seen()
    assert shown.count("\r") == 5
    assert "\x1b" not in shown
    assert shown.startswith("\rgemm [######..................] 1/4\r")
    assert "] 4/4, 0 s in all" in shown
    assert shown.endswith("\n")


def test_a_dumb_terminal_gets_lines(monkeypatch, terminal):
    stream, seen = terminal
    monkeypatch.setenv("TERM", "dumb")
    with progress(1, "gemm", stream=stream) as step:
        step()
    assert seen() == "gemm 1/1, 0 s in all\n"


def test_of_a_bar_the_log_has_the_end(monkeypatch, terminal, tmp_path):
    stream, _ = terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with tee(tmp_path / "run.log"):
        with progress(2, "gemm") as step:
            step()
            step()
        print("done", file=sys.stderr)
    assert (tmp_path / "run.log").read_text() == f"gemm [{'#' * 24}] 2/2, 0 s in all\ndone\n"


def test_the_time_left_is_that_of_steady_steps(monkeypatch):
    """The first step takes 60 s, the others 2 s: after three of ten, seven are left, 14 s."""
    clock = iter([0.0, 60.0, 62.0, 64.0])
    monkeypatch.setattr(log, "perf_counter", lambda: next(clock))
    out = io.StringIO()
    with progress(10, "step", stream=out) as step:
        for _ in range(3):
            step()
    assert out.getvalue() == "step 1/10\nstep 2/10, 16 s left\nstep 3/10, 14 s left\n"


def test_progress_that_is_not_shown():
    out = io.StringIO()
    with progress(2, "step", stream=out, shown=False) as step:
        step()
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations(seconds, words):
    assert log._duration(seconds) == words


# --- stamps and phases ---


def test_stamps():
    # 2023-10-05 19:11:01 UTC is 1696533061
    assert job_started(1696533061, "nid008217") == "Job started at: 2023-10-05-191101 on nid008217"
    assert step_line(0, {"loss": 2.5, "dt": 1 / 3, "by": "me"}, 1696533075) == (
        "2023-10-05 19:11:15 step=0, loss=2.5, dt=0.333333, by=me"
    )
    assert re.fullmatch(r"Job started at: \d{4}-\d\d-\d\d-\d{6} on \S+", job_started())


def test_the_job_scripts_stamp():
    assert job_start_s({}) is None
    assert job_start_s({"STEPTIME_JOB_STARTED": "1696533061.25"}) == 1696533061.25
    assert job_start_s({"STEPTIME_JOB_STARTED": "2023-10-05-191101"}) == 1696533061
    with pytest.raises(ConfigError, match="STEPTIME_JOB_STARTED: expected seconds or YYYY-MM-DD-HHMMSS"):
        job_start_s({"STEPTIME_JOB_STARTED": "yesterday"})


def test_phases_follow_one_another(monkeypatch):
    """Job at 100 s, process at 103, imports until 104.5, init 105, build 106, first step 107.5, four steps until 108.5."""
    monkeypatch.setattr(phases, "process_start_s", lambda: 103.0)
    clock = iter([104.5, 105.0, 106.0, 107.5, 108.5])
    found = Phases({"STEPTIME_JOB_STARTED": "100"}, lambda: next(clock))
    for name in ("imports", "init", "build", "first_step"):
        found.end(name)
    assert found.end("steady", 4) == 0.25
    assert found.seconds == {
        "launcher": 3.0,
        "imports": 1.5,
        "init": 0.5,
        "build": 1.0,
        "first_step": 1.5,
        "steady": 0.25,
    }
    assert found.until("first_step") == 7.5
    assert found.lines[:2] == ["phase launcher 3 s", "phase imports 1.5 s"]
    with pytest.raises(KeyError):
        found.until("lunch")


def test_without_a_job_script_the_start_is_that_of_the_process(monkeypatch):
    monkeypatch.setattr(phases, "process_start_s", lambda: 103.0)
    found = Phases({}, lambda: 104.5)
    found.end("imports")
    assert found.seconds == {"launcher": None, "imports": 1.5}
    assert found.until("imports") == 1.5
    assert found.lines == ["phase imports 1.5 s"]


def test_the_start_of_a_process_lies_between_its_launch_and_its_first_line():
    """Clock ticks are 10 ms."""
    before = time.time()
    code = "import time; now = time.time(); from steptime.bench.phases import process_start_s; print(process_start_s(), now)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=forked.clean(), check=True)
    began, first_line = map(float, done.stdout.split())
    assert before - 0.02 <= began <= first_line + 0.02


def test_the_start_of_a_process_without_proc(monkeypatch):
    import psutil

    monkeypatch.setattr(phases, "PROC_STAT", phases.PROC_STAT.parent / "none")
    assert process_start_s() == psutil.Process().create_time()
