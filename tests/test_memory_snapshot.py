"""`--trace-memory`: torch's own readers of a memory snapshot take it, and its largest sum is the memory table's."""

from __future__ import annotations

import pickle
from pathlib import Path

import drawn
import jobs
import pytest
from hypothesis import HealthCheck, given, settings
from torch.cuda import _memory_viz

from steptime import Job, estimate
from steptime.commands import cli
from steptime.report.memory_snapshot import snapshot

CONFIGS = Path(__file__).parents[1] / "configs"


def replayed(made, stage):
    """Bytes held after every event of a stage, from what the segments hold at the end backwards to the start."""
    events = made["device_traces"][stage]
    signs = {"alloc": 1, "free_requested": 0, "free_completed": -1}
    changes = [signs[event["action"]] * event["size"] for event in events]
    held = [made["segments"][stage]["total_size"] - sum(changes)]
    for change in changes:
        held.append(held[-1] + change)
    return held


def sound(made):
    """Every block is allocated once and freed as it was; blocks that live together do not overlap; time does not run back."""
    for segment, events in zip(made["segments"], made["device_traces"], strict=True):
        live, at = {}, 0
        for event in events:
            assert event["time_us"] >= at
            assert event["size"] > 0
            assert event["frames"][0].keys() == {"name", "filename", "line"}
            at = event["time_us"]
            if event["action"] == "alloc":
                assert all(
                    event["addr"] >= addr + size or event["addr"] + event["size"] <= addr for addr, size in live.items()
                )
                live[event["addr"]] = event["size"]
            elif event["action"] == "free_completed" and event["addr"] in live:
                assert live.pop(event["addr"]) == event["size"]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vpp": 2},
        {"schedule": "gpipe", "software": "torch"},
        {"schedule": "zero_bubble", "software": "torch"},
        {"zero_level": 3, "pp": 1, "dp": 8, "software": "fsdp2"},
        {"pp": 1, "dp": 8, "gbs": 8, "software": "torch"},
    ],
)
def test_the_peak_is_that_of_the_memory_table(changes):
    said = {"gbs": 32, "seqlen": 4096, "tp": 4, "pp": 4, "dp": 2} | changes
    found = estimate(jobs.job("llama3-8b", **said))
    made = snapshot(found)
    sound(made)
    for row in found.memory.stages:
        held = replayed(made, row.stage)
        assert max(held) == pytest.approx(row.allocated_bytes, abs=64)
        assert held[0] == held[-1] >= row.params_bytes + row.optimizer_bytes - 1


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn.plans())
def test_any_plan_has_a_sound_snapshot(plan):
    found = estimate(drawn.drawn_job(plan))
    made = snapshot(found)
    sound(made)
    for row in found.memory.stages:
        assert max(replayed(made, row.stage)) == pytest.approx(row.allocated_bytes, rel=1e-9, abs=4096)


def test_torch_reads_it(tmp_path):
    """The readers of torch/cuda/_memory_viz.py, and the page that they make for the viewer."""
    path = tmp_path / "memory.pickle"
    plan = CONFIGS / "llama3_8b_fsdp.yaml"
    assert cli.main([str(plan), "--brief", "--trace-memory", str(path)]) == 0
    made = pickle.loads(path.read_bytes())
    found = estimate(Job.load(plan))
    row = found.memory.stages[0]
    summed = _memory_viz.segsum(made)
    assert "segments: 1" in summed
    assert f"total_allocated: {_memory_viz.Bytes(made['segments'][0]['total_size'])}" in summed
    told = _memory_viz.trace(made)
    assert "Device 0" in told
    assert told.count(" = MEM[") + told.count(" = seg_0[") == sum(
        event["action"] == "alloc" for event in made["device_traces"][0]
    )
    lines = []
    _memory_viz.memory(made, format_flamegraph=lines.append)
    by_name = dict(line.rsplit(" ", 1) for line in lines[0].splitlines())
    name = next(line for line in by_name if "parameters" in line)
    assert int(by_name[name]) == round(row.params_bytes)
    assert "MemoryViz.js" in _memory_viz.trace_plot(made)


def test_another_suffix_is_told_first(capsys):
    assert cli.main(["nowhere.yaml", "--trace-memory", "memory.json"]) == 2
    assert capsys.readouterr().err.startswith("--trace-memory memory.json: unknown format")
