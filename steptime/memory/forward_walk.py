"""Activation memory of a forward pass over the ops of one part."""

from __future__ import annotations

from collections.abc import Iterator

from steptime.base.num import Num
from steptime.memory.ledger import Ledger, Peak
from steptime.model.ops import Attention, Gemm, Move, Op
from steptime.model.scans import Chunked, Scan


def walk_forward(ops: list[Op], sizes: dict[str, Num], kept: list[str], x: str, out: str) -> Peak:
    """The peak of a forward."""
    *_, ledger = forward_steps(ops, sizes, kept, x, out)
    return ledger.peak


def forward_steps(ops: list[Op], sizes: dict[str, Num], kept: list[str], x: str, out: str) -> Iterator[Ledger]:
    """Forward op by op: outputs are allocated, and freed after their last reader unless kept or passed on."""
    last_use = {name: i for i, op in enumerate(ops) for name in op.inputs}
    stay = {*kept, out}
    ledger = Ledger(sizes[x])
    for i, op in enumerate(ops):
        allocated: Num = 0.0
        gone: Num = 0.0
        for tensor in op.allocates:
            size = sizes[tensor.name]
            allocated = allocated + size
            if tensor.name not in last_use and tensor.name not in stay:
                gone = gone + size
        ledger.bytes = ledger.bytes + allocated
        ledger.mark(op.name, forward_temp(op))
        for name in dict.fromkeys(op.inputs):
            if last_use[name] == i and name not in stay:
                gone = gone + sizes[name]
        ledger.bytes = ledger.bytes - gone
        yield ledger


def forward_temp(op: Op) -> Num:
    """Bytes that exist only while an op runs forward."""
    if isinstance(op, Gemm):
        return op.temp_bytes
    return op.forward_temp_bytes if isinstance(op, (Move, Attention, Scan, Chunked)) else 0.0
