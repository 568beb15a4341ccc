"""`--trace`: the events are those of the Trace Event Format, and their times and bytes those of the estimate."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import drawn
import jobs
import pytest
from hypothesis import HealthCheck, given, settings
from work import python_calls

from steptime import estimate
from steptime.answer.memory_over_time import stage_holds
from steptime.base.config import ConfigError
from steptime.commands import cli
from steptime.report import trace
from steptime.timing.op_times import chunk_op_times
from steptime.timing.timeline import Timeline

CONFIGS = Path(__file__).parents[1] / "configs"
GIB = 2.0**30
NS = 1.01e-3
"""Microseconds that rounding two times to nanoseconds may move them apart."""


def events_of(found):
    document = json.loads(trace.trace(found), parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    return document["traceEvents"]


def pipelined(**changes):
    said = {"gbs": 64, "seqlen": 4096, "tp": 4, "pp": 4, "dp": 2, "vpp": 2} | changes
    return estimate(jobs.job("llama3-8b", **said))


@pytest.fixture(scope="module")
def found():
    return pipelined()


@pytest.fixture(scope="module")
def events(found):
    return events_of(found)


# --- the format ------------------------------------------------------------------------------------------------------------

FIELDS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"ph", "name", "cat", "pid", "tid", "ts", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "bp", "name", "cat", "id", "pid", "tid", "ts"},
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
}
"""What the Trace Event Format asks of each phase (complete, counter, flow start, flow end, metadata)."""
METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def well_formed(events):
    for event in events:
        assert event.keys() - {"args"} == FIELDS[event["ph"]] - {"args"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] >= 1
        assert event["tid"] >= 1
        assert event["ts"] >= 0.0
        if event["ph"] == "X":
            assert event["dur"] >= 0.0
        if event["ph"] == "C":
            assert all(isinstance(value, float) and value >= 0.0 for value in event["args"].values())
        if event["ph"] == "f":
            assert event["bp"] == "e"
        if event["ph"] == "M":
            assert event["args"].keys() == {METADATA[event["name"]]}


def nested(events):
    """Slices of one thread lie one after the other or one inside the other."""
    threads = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for slices in threads.values():
        stack = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            start, end = round(1000 * event["ts"]), round(1000 * event["ts"]) + round(1000 * event["dur"])
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], event
            stack.append(end)


def test_every_event_has_the_fields_of_its_phase(events):
    assert {event["ph"] for event in events} == FIELDS.keys()
    well_formed(events)


def test_slices_of_a_track_nest(events):
    nested(events)


def test_every_track_has_a_name(events):
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= named.keys()
    assert {name.partition(" ")[0] for name in named.values()} == {"compute", "tp", "dp", "pp"}
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"stage {i}" for i in range(4)]


def test_arrows_join_the_sender_to_the_action_that_waits(found, events):
    """Every micro-batch crosses every boundary between the 8 chunks down and up: 2 * 7 * 32 arrows."""
    compute = [
        e for e in events if e["ph"] == "X" and e["cat"] == "compute" and "args" in e and "micro-batch" in e["args"]
    ]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 7 * found.job.microbatches
    from_slice = {(e["pid"], round(e["ts"] + e["dur"], 3)): e for e in compute}
    into_slice = {(e["pid"], e["ts"]): e for e in compute}
    for number, start in starts.items():
        sender = from_slice[start["pid"], round(start["ts"] + 0.001, 3)]
        receiver = into_slice[ends[number]["pid"], ends[number]["ts"]]
        assert sender["name"] == receiver["name"] == start["name"]
        assert sender["pid"] != receiver["pid"]
        assert sender["ts"] + sender["dur"] <= receiver["ts"] + NS


# --- the times -------------------------------------------------------------------------------------------------------------


def test_the_last_event_ends_with_the_step(found, events):
    assert max(e["ts"] + e.get("dur", 0.0) for e in events) == pytest.approx(1e6 * found.step_s, abs=NS)


def test_compute_is_busy_as_long_as_the_walk_says(found, events):
    for stage, busy_s in enumerate(found.timing.walk.busy_s):
        own = [e for e in events if e["ph"] == "X" and e["pid"] == stage + 1 and "micro-batch" in e.get("args", {})]
        assert len(own) == 2 * 2 * found.job.microbatches
        assert sum(e["dur"] for e in own) == pytest.approx(1e6 * busy_s, rel=1e-6)


@pytest.mark.parametrize(
    "performance",
    [
        {},
        {"activation_checkpointing_type": "selective"},
        {"activation_checkpointing_type": "full"},
        {"recompute": {"granularity": "full", "method": "block", "n_layers": 1}},
    ],
)
def test_the_ops_of_a_chunk_sum_to_its_seconds(performance):
    found = pipelined(performance=performance)
    for stage, chunks in zip(found.assembly.stages, found.timing.chunks, strict=True):
        for chunk, seconds in zip(stage, chunks, strict=True):
            for direction, expected in zip("FB", seconds[:2], strict=True):
                layers = chunk_op_times(found.timing, chunk, direction)
                assert sum(op.seconds for layer in layers for op in layer.ops) == pytest.approx(expected, rel=1e-9)
                assert len(layers) == chunk.layers + chunk.embedding + chunk.head


def test_communication_of_the_actions_is_that_of_the_step():
    """Exposed and hidden seconds of the tensor-parallel axis on the busiest stage, summed over the actions."""
    found = pipelined(sp=True)
    timeline, stage = Timeline(found.timing), found.timing.busiest
    traffic = [of for chunk in range(2) for way in "FB" for of in timeline.traffic(stage, chunk, way)]
    exposed_s = found.job.microbatches * sum(of.exposed_s for of in traffic)
    busy_s = found.job.microbatches * sum(of.busy_s for of in traffic)
    partial_s = found.timing.norm_reduce.time_s
    assert exposed_s + partial_s == pytest.approx(found.time.parts_s["tp_comm"], rel=1e-9)
    assert busy_s - exposed_s == pytest.approx(found.time.hidden_s["tp_comm"], rel=1e-9)


def test_what_surrounds_the_pipeline_makes_up_the_step():
    """Gathered before it, and after it reduced, updated, waited for: with the makespan, the step."""
    found = pipelined(software="megatron-core")
    timeline = Timeline(found.timing)
    after = {s.kind: s.end_s - s.start_s for s in timeline.around(0) if s.kind in {"optimizer", "stragglers"}}
    assert after["optimizer"] == pytest.approx(found.time.parts_s["optimizer"])
    assert after["stragglers"] == pytest.approx(found.time.parts_s["stragglers"])
    assert max(s.end_s for s in timeline.around(0)) == pytest.approx(found.step_s)
    buckets = [s for s in timeline.around(0) if s.kind == "dp_comm"]
    dp = found.timing.dp
    expected = sum(c.cost.time_s for calls in (dp.reductions, dp.gathers) for chunk in calls[0] for c in chunk)
    assert sum(s.end_s - s.start_s for s in buckets) == pytest.approx(expected)


# --- the bytes -------------------------------------------------------------------------------------------------------------


def peak_bytes(found, stage):
    """The most that any action, or the optimizer step, of a stage holds."""
    holds = stage_holds(found.assembly, found.timing.states)[stage]
    row = found.memory.stages[stage]
    fixed = row.params_bytes + row.optimizer_bytes
    actions = [span.action for span in Timeline(found.timing).actions[stage]]
    held = list(holds.actions(actions))
    update = holds.gradients + holds.optimizer_step.transient_bytes
    assert held[-1].kept_bytes == pytest.approx(0.0, abs=1.0)
    return fixed + max(update, *(h.activations_bytes + h.transient_bytes + h.gradients_bytes for h in held))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn.plans())
def test_any_plan_has_a_sound_trace_whose_peak_is_the_tables(plan):
    found = estimate(drawn.drawn_job(plan))
    for row in found.memory.stages:
        assert peak_bytes(found, row.stage) == pytest.approx(row.allocated_bytes, rel=1e-9)
    events = events_of(found)
    well_formed(events)
    nested(events)
    assert max(e["ts"] + e.get("dur", 0.0) for e in events) <= 1e6 * found.step_s + 1.0


def test_axes_of_one_sequence_have_tracks_of_their_own():
    """Under a2a+p2p the exchange of heads and the ring run in the same action: each in slices of its own thread."""
    parallel = {"cp": 4, "cp_comm_type": "a2a+p2p", "cp_a2a": 2, "tp": 2, "pp": 1, "dp": 1}
    found = estimate(jobs.job("llama3-8b", gbs=2, seqlen=256, **parallel))
    events = events_of(found)
    nested(events)
    threads = {cat: {e["tid"] for e in events if e["ph"] == "X" and e["cat"] == cat} for cat in ("cp_a2a", "cp_p2p")}
    assert all(threads.values())
    assert not threads["cp_a2a"] & threads["cp_p2p"]


def test_counters_reach_the_peak_of_the_table(found, events):
    for row in found.memory.stages:
        counters = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == row.stage + 1]
        assert max(sum(args.values()) for args in counters) == pytest.approx(row.allocated_bytes / GIB, abs=1e-5)


# --- the command -----------------------------------------------------------------------------------------------------------


def test_gzip_by_suffix(found, tmp_path):
    plain, small = tmp_path / "step.json", tmp_path / "step.json.gz"
    trace.write(found, str(plain))
    trace.write(found, str(small))
    assert gzip.decompress(small.read_bytes()) == plain.read_bytes()
    assert json.loads(plain.read_text())["otherData"]["step_s"] == found.step_s


def test_a_file_that_cannot_be_written_is_told(found, tmp_path):
    (tmp_path / "step.json").mkdir()
    with pytest.raises(ConfigError, match=r"--trace .*step.json: cannot be written"):
        trace.write(found, str(tmp_path / "step.json"))


def test_the_command_writes_it_beside_the_report(tmp_path, capsys):
    file = tmp_path / "step.json"
    assert cli.main([str(CONFIGS / "llama2_7b_1gpu.yaml"), "--brief", "--trace", str(file)]) == 0
    assert "MFU" in capsys.readouterr().out
    assert json.loads(file.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("step.txt", "--trace step.txt: unknown format; use a file name that ends in one of .json, .json.gz"),
        ("no/such/step.json", "--trace no/such/step.json: folder no/such does not exist"),
    ],
)
def test_where_it_cannot_be_written_is_told_first(path, line, capsys):
    assert cli.main(["no_such_plan.yaml", "--trace", path]) == 2
    assert capsys.readouterr().err == line + "\n"


def test_sixteen_thousand_actions_take_a_second():
    """32 stages, 256 micro-batches, forward and backward: 16,384 actions."""
    model = {"preset": "llama3-70b", "n_layers": 128}
    found = estimate(jobs.job(model, gbs=256, seqlen=4096, tp=8, pp=32, dp=1))
    text, calls = python_calls(lambda: trace.trace(found))
    assert text.count('"micro-batch"') == 16384
    assert calls < 80 * 16384  # 64 each


def test_a_forward_that_runs_beside_a_backward_is_sent_when_both_are_done():
    """DualPipe's pairs; every other action's output leaves at its own end."""
    line = Timeline(pipelined(software="torch", schedule="dualpipev", gbs=32).timing)
    sent = {(of.stage, of.action): of.start_s for of in line.sent()}
    paired = 0
    for stage, spans in enumerate(line.actions):
        for (action, _, end_s), following in zip(spans, [*spans[1:], None], strict=True):
            beside = following is not None and (action.kind, following.action.kind) == ("F", "B")
            if (stage, action) in sent:
                assert sent[stage, action] == (following.end_s if beside else end_s)
                paired += beside
    assert paired > 4
