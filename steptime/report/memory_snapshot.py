"""Memory over one step as torch's memory snapshot: `3dtrn PLAN --trace-memory FILE.pickle`.

The pickle that `torch.cuda.memory._dump_snapshot` writes and pytorch.org/memory_viz opens ("Active Memory Timeline"), of plain
dicts. A pipeline stage is a device. One block represents many of a framework: the activations of one micro-batch, all
gradients, the temporaries of an action. The largest value of their sum is `allocated` in the memory table. It has no real
addresses: the allocator's placement, its segments and its fragmentation are not modeled, and each block follows the previous one.

Format: docs.pytorch.org/docs/stable/torch_cuda_memory.html#snapshot-api-reference (`Snapshot`, `Segment`, `Block`, `TraceEntry`).
"""

from __future__ import annotations

from typing import Any

from steptime.answer.memory_over_time import StageHolds, stage_holds
from steptime.answer.result import Estimate
from steptime.report.trace import PASSES, layer_range
from steptime.schedule import ActionSpan
from steptime.timing.timeline import Timeline


def snapshot(estimate: Estimate) -> dict[str, Any]:
    """The snapshot at the end of a step, and every allocation and free of the step by stage [B, us]."""
    timeline = Timeline(estimate.timing)
    stages = [
        _SnapshotStage(estimate, timeline, holds) for holds in stage_holds(estimate.assembly, estimate.timing.states)
    ]
    for stage in stages:
        stage.step()
    return {"segments": [stage.segment() for stage in stages], "device_traces": [stage.events for stage in stages]}


class _SnapshotStage:
    """The blocks of one stage and their events."""

    def __init__(self, estimate: Estimate, timeline: Timeline, holds: StageHolds) -> None:
        self.timeline, self.holds = timeline, holds
        self.events: list[dict[str, Any]] = []
        self.live: dict[Any, dict[str, Any]] = {}
        """Blocks by what they hold."""
        self.total, self.address = 0, 1 << 20
        self.places: dict[str, int] = {}
        """Addresses of the allocated blocks."""
        self.frames: dict[str, list[dict[str, Any]]] = {}
        row = estimate.memory.stages[holds.stage]
        self.fixed = round(row.params_bytes + row.optimizer_bytes + holds.permanent)
        """Block that exists from the step's start to its end."""
        self.hold("parameters", "parameter", round(row.params_bytes))
        self.hold("optimizer states", "optimizer_state", round(row.optimizer_bytes))
        self.hold("workspaces, buffers", "unknown", self.fixed - self.total)
        self.places["gradients"] = self.address
        self.address += round(max(holds.gradients, holds.first_gradients))
        self.hold("gradients", "gradient", round(holds.first_gradients))
        self.events.clear()  # allocated before the step

    def hold(self, name: Any, category: str, size: int, at: float = 0.0, text: str = "") -> None:
        """Allocate a block, unless it is empty."""
        if size <= 0:
            return
        address = self.places.get(name, self.address)
        self.address = max(self.address, address + size)
        block = {"addr": address, "size": size, "stream": 0, "frames": self.frame(text or name), "category": category}
        self.total += size
        self.live[name] = block
        self.events.append({"action": "alloc", "time_us": round(1e6 * at), **block})

    def free(self, name: Any, at: float) -> int:
        """Free a block and return its size; 0 where there is none."""
        block = self.live.pop(name, None)
        if block is None:
            return 0
        self.total -= int(block["size"])
        for action in ("free_requested", "free_completed"):
            self.events.append({"action": action, "time_us": round(1e6 * at), **block})
        return int(block["size"])

    def resize(self, name: Any, category: str, size: int, at: float, text: str = "") -> None:
        """Resize a block: the surplus is freed, or the deficit allocated."""
        block = self.live.get(name)
        if (int(block["size"]) if block else 0) != max(size, 0):
            self.free(name, at)
            self.hold(name, category, size, at, text)

    def frame(self, text: str) -> list[dict[str, Any]]:
        """A one-frame stack that names a block's contents."""
        return self.frames.setdefault(text, [{"name": text, "filename": f"stage {self.holds.stage}", "line": 0}])

    def step(self) -> None:
        """Every action of the pipeline, then the optimizer."""
        spans = self.timeline.times[self.holds.stage].spans
        kept = 0
        for span, action in zip(spans, self.holds.actions([span.action for span in spans]), strict=True):
            before, kept = kept, round(action.kept_bytes)
            own, text = (span.action.microbatch, span.action.chunk), self.text(span)
            others = before - (int(self.live[own]["size"]) if own in self.live else 0)
            live_bytes = (
                action.gradients_bytes + action.activations_bytes + action.transient_bytes - self.holds.permanent
            )
            start, end = span.start_s, span.end_s
            self.resize(own, "activation", round(action.activations_bytes) - others, start, f"activations, {text}")
            self.resize("gradients", "gradient", round(action.gradients_bytes), start)
            self.hold("transient", "temporary", self.fixed + round(live_bytes) - self.total, start, f"during {text}")
            self.free("transient", end)
            self.resize(own, "activation", kept - others, end, f"activations, {text}")
            self.resize("gradients", "gradient", round(action.gradients_kept_bytes), end)
        for update in self.timeline.around(self.holds.stage):
            if update.kind == "optimizer":
                temporary = round(float(self.holds.optimizer_step.transient_bytes) - self.holds.permanent)
                self.hold("transient", "temporary", temporary, update.start_s, "during the optimizer's step")
                self.free("transient", update.end_s)
                self.resize("gradients", "gradient", round(self.holds.first_gradients), update.end_s)

    def text(self, span: ActionSpan) -> str:
        """An action in words."""
        kind, microbatch, virtual = span.action
        layers = layer_range(self.timeline, self.holds.stage, virtual)
        return f"{PASSES[kind]} of micro-batch {microbatch}, {layers or 'no layers'}"

    def segment(self) -> dict[str, Any]:
        """The blocks at the end of the step, as one segment without gaps."""
        blocks = [
            {"address": block["addr"], "size": block["size"], "requested_size": block["size"],
             "state": "active_allocated", "frames": block["frames"]}
            for block in self.live.values()
        ]  # fmt: skip
        sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), self.total)
        about = {"device": self.holds.stage, "address": 1 << 20, "stream": 0, "segment_type": "large", "frames": []}
        return about | sizes | {"blocks": blocks}
