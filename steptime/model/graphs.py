"""Which ops of a layer are launched from CUDA graphs.

Source: megatron/core/transformer/transformer_layer.py, _te_cuda_graph_capture, and moe/moe_layer.py (megatron-core 0.16.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import Comm, Op
from steptime.model.scans import Scan
from steptime.model.segments import MOE, depths, runs

if TYPE_CHECKING:
    from steptime.software.timing_settings import Graphs

NONE: frozenset[int] = frozenset()


def captured(ops: list[Op], graphs: Graphs) -> frozenset[int]:
    """The ops of a part that graphs launch: all of them, none, or those of the named modules of each layer."""
    if isinstance(graphs, bool):
        return frozenset(range(len(ops))) if graphs else NONE
    stretches = depths(ops) or [range(len(ops))]
    return frozenset(i for stretch in stretches for i in of_layer(ops, stretch, frozenset(graphs)))


def of_layer(ops: list[Op], layer: range, modules: frozenset[str]) -> list[int]:
    """The ops of one layer that graphs launch.

    attn: all before the norm of MLP or experts. mlp: the rest of a layer without experts. moe: the rest of one with them.
    moe_router: that norm, shared experts, the router and its losses; moe_preprocess: the ops before the tokens are sent.
    mamba: a whole layer with a scan.
    """
    if any(isinstance(ops[i], Scan) for i in layer):
        return list(layer) if "mamba" in modules else []
    norms = [run.start for run in runs(ops, {"norm"}) if run.start in layer]
    attends = any(ops[i].role == "core_attn" for i in layer)
    second = next((start for start in norms[1 if attends else 0 :]), layer.stop)
    first, rest = range(layer.start, second), range(second, layer.stop)
    found = list(first) if attends and "attn" in modules else []
    experts = [i for i in rest if ops[i].role in MOE]
    if not experts:
        dense = any(ops[i].role == "mlp" for i in rest)
        return found + (list(rest) if dense and "mlp" in modules else [])
    if "moe" in modules:
        return found + list(rest)
    sent = next((i for i in experts if isinstance(op := ops[i], Comm) and op.backward), layer.stop)
    before = {"", "norm", "router", "shared_experts"} if "moe_router" in modules else set[str]()
    before |= {"moe"} if "moe_preprocess" in modules else set[str]()
    return found + [i for i in rest if i < sent and ops[i].role in before]
