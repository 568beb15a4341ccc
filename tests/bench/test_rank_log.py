"""Output on two real ranks, in a log, through a pipe and on a terminal; failures; the stopwatch of the start."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings

import forked
import pytest
from bench.launch import fork_ranks, torchrun

from steptime.base.config import ConfigError
from steptime.bench import phases, rank_log
from steptime.bench.phases import Phases, first_step_done, job_start_s, job_started, process_start_s
from steptime.bench.rank_log import LOG, guarded, progress, same_problems

SCRIPT = """
import os, signal, sys
from pathlib import Path
from steptime.bench.rank_log import LOG, guarded
from steptime.bench.world import find, finish, start
from steptime.base.config import ConfigError

launch, how = find(), sys.argv[2]

def run():
    import torch, torch.distributed as dist
    world = start(launch, "cpu")
    print("measured by", world.world_size)
    LOG.info("%s is there", world.line)
    if how != "well" and world.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"raises": RuntimeError("out of luck"), "bad": ConfigError("model.n_layers: must be at least 1")}[how]
    dist.all_reduce(torch.ones(1))
    if how != "well":
        signal.pause()
    finish(world)

sys.exit(guarded(run, launch.rank, Path(sys.argv[1])))
"""


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
    assert text == "rank 0 of 2, local rank 0, node 0 of 1, cpu, gloo, by torchrun is there\n"
    assert text in done.stderr
    assert "rank 1 of 2" not in done.stderr


def test_a_rank_that_raises_ends_the_job_with_its_traceback_in_the_log(run_ranks):
    done, text = run_ranks("raises", torchrun)
    assert done.returncode != 0
    for told in (done.stderr, text):
        assert "[rank 1] Traceback (most recent call last):" in told
        assert "[rank 1] RuntimeError: out of luck" in told
        assert "rank 0 of 2, local rank 0, node 0 of 1, cpu, gloo, by torchrun is there\n" in told


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


def test_exit_codes(capsys):
    assert guarded(lambda: None) == 0
    assert guarded(lambda: 1) == 1
    assert guarded(fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")
    assert guarded(fail(ConfigError(["a: wrong", "b: wrong"]))) == 2
    assert capsys.readouterr().err == "a: wrong\nb: wrong\n"
    assert guarded(fail(ValueError("odd"))) == 1
    assert capsys.readouterr().err.endswith("ValueError: odd\n")
    with pytest.raises(SystemExit):  # argparse's help
        guarded(fail(SystemExit(0)))


def test_what_is_bad_on_every_rank_is_told_by_the_root(capsys, tmp_path):
    def run(rank):
        with same_problems(rank):
            raise ConfigError("a: wrong")

    path = tmp_path / "run.log"
    with pytest.raises(SystemExit) as left:
        guarded(lambda: run(1), 1, path)
    assert left.value.code == 2
    assert guarded(lambda: run(0), 0, path) == 2
    assert capsys.readouterr() == ("", "a: wrong\n")
    assert path.read_text() == "a: wrong\n"


@pytest.mark.filterwarnings("default")
def test_the_root_speaks_on_standard_error_and_in_the_log(capsys, tmp_path):
    path = tmp_path / "new" / "run.log"

    def run():
        LOG.info("phase init %g s", 0.5)
        LOG.debug("torch: version 2.13.0")
        warnings.warn("slow", stacklevel=1)

    assert guarded(run, 0, path) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("phase init 0.5 s\n")
    assert "version" not in err
    text = path.read_text()
    assert text.startswith("phase init 0.5 s\ntorch: version 2.13.0\n")
    assert "UserWarning: slow" in text
    assert guarded(fail(ValueError("odd")), 0, path) == 1
    assert path.read_text().startswith(text)  # appended
    assert path.read_text().count("ValueError: odd") == 1


@pytest.mark.filterwarnings("default")
def test_other_ranks_are_silent_until_they_fail(capsys, tmp_path):
    path = tmp_path / "run.log"

    def run():
        print("noise")
        LOG.info("noise")
        warnings.warn("noise", stacklevel=1)

    assert guarded(run, 1, path) == 0
    assert capsys.readouterr() == ("", "")
    assert guarded(fail(ConfigError(["a: wrong", "b: wrong"])), 1, path) == 2
    assert capsys.readouterr() == ("", "[rank 1] a: wrong\n[rank 1] b: wrong\n")
    assert path.read_text() == "[rank 1] a: wrong\n[rank 1] b: wrong\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_that_cannot_be_written_is_one_line(capsys, tmp_path, rank):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run.log"
    assert guarded(lambda: print("never"), rank, path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[rank 1] " * rank + f"{path}: the log cannot be written (")
    assert err.count("\n") == 1


def test_nothing_is_left_of_it(tmp_path):
    streams, shown, handlers = (sys.stdout, sys.stderr), warnings.showwarning, list(LOG.handlers)
    guarded(fail(ValueError("odd")), 1, tmp_path / "run.log")
    assert (sys.stdout, sys.stderr) == streams
    assert warnings.showwarning is shown
    assert LOG.handlers == handlers


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
from steptime.bench.rank_log import guarded, progress

def run():
    done = progress(20000, "gemm")
    for _ in range(20000):
        done()

path = Path(sys.argv[0])
code = guarded(run, 0, path.with_suffix(".log"))
path.with_suffix(".done").write_text(str(code))
sys.exit(code)
"""


def test_a_reader_that_leaves_does_not_end_the_measurement(tmp_path):
    done = python(PROGRESS, tmp_path, "{} 2>&1 | head -n 1")
    assert (done.returncode, done.stdout) == (0, "gemm 1/20000, 0 s\n")
    assert done.stderr == ""
    assert (tmp_path / "script.done").read_text() == "0"
    assert (tmp_path / "script.log").read_text().splitlines()[-1].startswith("gemm 20000/20000, ")


def test_progress_counts_what_is_done_and_the_seconds(monkeypatch, capsys):
    clock = iter([0.0, 60.0, 62.4])
    monkeypatch.setattr(rank_log, "perf_counter", lambda: next(clock))

    def run():
        done = progress(10, "benchmark")
        done()
        done()

    assert guarded(run) == 0
    assert capsys.readouterr().err == "benchmark 1/10, 60 s\nbenchmark 2/10, 62 s\n"


# --- stamps and phases ---


def test_stamps(monkeypatch):
    """2023-10-05 19:11:01 UTC is 1696533061."""
    monkeypatch.setattr(phases.socket, "gethostname", lambda: "nid008217")
    assert job_started(1696533061) == "Job started at: 2023-10-05-191101 on nid008217"
    assert first_step_done(1696533075.9, "ddp") == "2023-10-05 19:11:15 step=0, layout=ddp"


def test_the_job_scripts_stamp():
    assert job_start_s({}) is None
    assert job_start_s({"STEPTIME_JOB_STARTED": "1696533061.25"}) == 1696533061.25
    assert job_start_s({"STEPTIME_JOB_STARTED": "2023-10-05-191101"}) == 1696533061
    with pytest.raises(ConfigError, match="STEPTIME_JOB_STARTED: expected seconds or YYYY-MM-DD-HHMMSS"):
        job_start_s({"STEPTIME_JOB_STARTED": "yesterday"})


def test_phases_follow_one_another(monkeypatch):
    """Job at 100 s, process at 103, imports until 104.5, init 105, build 106, a pause, first step from 107 to 108.5."""
    monkeypatch.setattr(phases, "process_start_s", lambda: 103.0)
    clock = iter([104.5, 105.0, 106.0, 107.0, 108.5])
    found = Phases({"STEPTIME_JOB_STARTED": "100"}, lambda: next(clock))
    for name in ("imports", "init", "build"):
        found.end(name)
    found.skip()
    found.end("first_step")
    assert found.seconds == {
        "launcher": 3.0,
        "imports": 1.5,
        "init": 0.5,
        "build": 1.0,
        "first_step": 1.5,
    }
    assert found.lines[:2] == ["phase launcher 3 s", "phase imports 1.5 s"]


def test_without_a_job_script_the_start_is_that_of_the_process(monkeypatch):
    monkeypatch.setattr(phases, "process_start_s", lambda: 103.0)
    found = Phases({}, lambda: 104.5)
    found.end("imports")
    assert found.seconds == {"launcher": None, "imports": 1.5}
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
