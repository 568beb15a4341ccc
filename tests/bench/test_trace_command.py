"""`3dtrn explain CONFIG --trace`: real traces of a CPU and of two gloo ranks, and bad input."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bench.launch import fork, fork_ranks
from bench.traces import (
    CONFIG,
    TWO_STREAMS,
    job_of,
)

from steptime import estimate
from steptime.bench.profiler_trace.attribution import attribute
from steptime.bench.profiler_trace.events import read, read_all
from steptime.bench.profiler_trace.intervals import ORDER
from steptime.bench.profiler_trace.kernel_names import COMM
from steptime.commands import cli

ROOT = Path(__file__).parents[2]
STEP = Path(__file__).with_name("traced_step.py")


@pytest.fixture
def explain(capsys, tmp_path):
    """Run `3dtrn explain` on a config of this layout: (exit code, stdout, stderr)."""

    def call(*args, **layout):
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(CONFIG | {"parallelism": CONFIG["parallelism"] | layout}), encoding="utf-8")
        code = cli.main(["explain", str(path), "--trace", *map(str, args)])
        return (code, *capsys.readouterr())

    return call


# --- real traces -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A DDP step of two gloo ranks, one trace each."""
    where = tmp_path_factory.mktemp("ddp")
    done = fork_ranks(STEP, 2, where)
    assert done.returncode == 0, done.stderr
    return [str(where / f"rank{rank}.json") for rank in (0, 1)]


@pytest.fixture(scope="module")
def recomputed(tmp_path_factory):
    """One process, both blocks recomputed."""
    where = tmp_path_factory.mktemp("alone")
    done = fork(STEP, where, "recompute")
    assert done.returncode == 0, done.stderr
    return str(where / "rank0.json")


def test_two_gloo_ranks(two_ranks):
    job = job_of(dp=2)
    traces = read_all(two_ranks[::-1])
    assert [(trace.rank, trace.world_size, trace.on_cpu) for trace in traces] == [(0, 2, True), (1, 2, True)]
    assert [step.number for step in traces[0].steps] == [1, 2, 3]
    found = attribute(traces, job, estimate(job).time)
    for rank, trace in zip(found.ranks, traces, strict=True):
        spans = {step.number: step.end - step.start for step in trace.steps}
        assert spans[rank.step] == sorted(spans.values())[1]  # the median of three
        assert rank.step_s == pytest.approx(spans[rank.step] * 1e-9, rel=1e-12)
        assert sum(rank.parts_s.values()) == pytest.approx(rank.step_s, rel=1e-12)
        assert {"gemm", "attention", "memory_bound", "optimizer", "launch", "idle"} <= set(rank.parts_s)
        assert set(rank.parts_s) <= set(ORDER)
        assert "recompute" not in rank.parts_s
        # DDP reduces its buckets (4 of 0.5 MB and less) on threads of gloo's own
        reduced = next(call for call in rank.collectives if call.kind == "all_reduce")
        assert (reduced.part, reduced.calls >= 3) == ("dp_comm", True)
        assert reduced.total_s > 0
        assert reduced.hidden_s + reduced.exposed_s == pytest.approx(reduced.total_s)
        assert reduced.total_s <= rank.step_s
    assert found.notes[0] == "collectives of default_pg (2 ranks) count as data-parallel: the plan's only axis"


def test_two_gloo_ranks_on_the_command_line(two_ranks, explain):
    code, out, _ = explain(*two_ranks, dp=2)
    assert code == 0
    assert all(
        part in out for part in ("matrix multiplies", "data-parallel communication", "all-reduce", "over 2 ranks")
    )
    document = json.loads(explain(*two_ranks, "--json", dp=2)[1])
    assert document["schema"] == "3dtrn-trace/1"
    assert sum(row["measured_s"] for row in document["rows"]) == pytest.approx(
        document["measured"]["step_s"], rel=1e-12
    )
    assert sum(row["predicted_s"] for row in document["rows"]) == pytest.approx(
        document["predicted"]["step_s"], rel=1e-12
    )
    widths = [abs(row["difference_s"]) for row in document["rows"]]
    assert widths == sorted(widths, reverse=True)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]


def test_recomputation_is_told_by_autograd(recomputed):
    job = job_of()
    trace = read(recomputed)
    assert (trace.rank, trace.world_size, trace.transfers) == (0, None, [])
    found = attribute([trace], job, estimate(job).time)
    parts = found.busiest.parts_s
    assert sum(parts.values()) == pytest.approx(found.busiest.step_s, rel=1e-12)
    assert parts["recompute"] > 0
    # of three passes over the blocks' products one repeats forward, beside the head's: recomputation is the smaller
    assert parts["recompute"] < parts["gemm"] + parts["attention"] + parts["memory_bound"]
    assert not set(parts) & set(COMM)


def test_a_packed_trace_reads_the_same(two_ranks, tmp_path):
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(Path(two_ranks[1]).read_bytes()))
    assert read(str(packed))._replace(path="") == read(two_ranks[1])._replace(path="")


def test_chunks_of_any_size_give_the_same_events(two_ranks, monkeypatch):
    whole = read(two_ranks[0])
    monkeypatch.setattr("steptime.bench.profiler_trace.chrome_json._CHUNK", 4099)
    assert read(two_ranks[0]) == whole


# --- bad input -------------------------------------------------------------------------------------------------------------

EVENT = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a trace: no traceEvents"),
        ("no JSON at all", "not a trace: no traceEvents"),
        ('{"schemaVersion": 1}', "not a trace: no traceEvents"),
        ('{"a": nothing, "traceEvents": [', "the part before its events is not JSON"),
        ('{"traceEvents": [1, 2]}', "event 1 is not an object"),
        (f'{{"traceEvents": [{EVENT}, {EVENT[:30]}', "event 2 is truncated or not JSON"),
        (f'{{"traceEvents": [{EVENT}, ', "event 2 is truncated or not JSON"),
        ('{"traceEvents": []}', "no operators or kernels"),
        ('{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "no operators or kernels"),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(explain, tmp_path, text, said):
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    code, out, err = explain(path)
    assert (code, out) == (2, "")
    assert err.startswith(f"{path}: ")
    assert said in err
    assert err.count("\n") == 1


def test_missing_and_broken_files_are_all_named(explain, tmp_path):
    packed = tmp_path / "rank1.json.gz"
    packed.write_bytes(gzip.compress(f'{{"traceEvents": [{EVENT}]}}'.encode())[:-12])
    code, _, err = explain("nowhere.json", tmp_path, packed, dp=2)
    assert code == 2
    assert [line.rpartition(": ")[2] for line in err.splitlines()] == [
        "no such file",
        "is a directory; give the file of a trace",
        "ends early; the profiler had not finished writing it?",
    ]


def test_ranks_have_to_be_told_apart(explain, tmp_path):
    for name in ("a.json", "b.json", "rank3.json", "x-rank_3.json"):
        (tmp_path / name).write_text(f"[{EVENT}]", encoding="utf-8")
    assert explain(tmp_path / "a.json")[0] == 0  # alone it is rank 0
    err = explain(tmp_path / "a.json", tmp_path / "rank3.json", tmp_path / "x-rank_3.json", dp=4)[2].splitlines()
    assert "rank unknown" in err[0]
    assert "same rank 3 as " in err[1]


def test_a_trace_of_another_world_size(explain, written):
    trace = written(*TWO_STREAMS, world=2)
    code, _, err = explain(trace.path, dp=4)
    assert code == 2
    assert err == f"{trace.path}: world size 2, but the plan has 4 devices (tp cp pp dp); give the plan of that run\n"


def test_options_that_do_not_go_together(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    for args, said in (
        (["mfu", "--trace", "x.json"], "--trace: not together with mfu"),
        (["--yaml", "--trace", "x.json"], "--trace: not together with --yaml"),
    ):
        assert cli.main(["explain", str(plan), *args]) == 2
        assert capsys.readouterr().err == said + "\n"


def test_sorting_a_trace_imports_no_torch(written):
    path = written(*TWO_STREAMS, world=2).path
    code = (
        "import sys\nimport steptime.bench.profiler_trace.attribution, steptime.report.trace_tables\n"
        "from steptime.bench.profiler_trace.events import read\n"
        f"read({path!r})\nassert not {{'torch', 'numpy'}} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
