"""Asynchronous tensor parallelism in torch: collectives are split into pieces that overlap the adjacent projection.

torch 2.13 distributed/_symmetric_memory/__init__.py and _inductor/fx_passes/micro_pipeline_tp.py: an all-gather overlaps
the GEMMs that read it, a GEMM overlaps the reduce-scatter of its result; received pieces are summed by a separate kernel.
Pieces are copied by the device's copy engines and take no multiprocessors from the GEMM
(danielvegamyhre.github.io/ml/performance/2025/05/26/async-tp.html).
"""

from __future__ import annotations

from steptime.base.num import Num, maximum, minimum
from steptime.model.ops import Comm, Gemm, Op
from steptime.software.performance import EAGER_TORCH, Software


def applies(software: Software) -> bool:
    """Whether torch runs tensor parallelism asynchronously."""
    return software.family in EAGER_TORCH and software.overlap.tp is True


def waits_for_a_sum(ops: list[Op], i: int) -> bool:
    """Whether the gradient of what collective `i` gathers is the sum of several products.

    Its reduce-scatter then follows an addition, not a product, and stays whole (micro_pipeline_tp.py, _find_producer_matmul): of
    separate query, key and value projections, or gate and up.
    """
    readers = 0
    for op in ops[i + 1 :]:
        if isinstance(op, Comm) and op.region:
            break
        readers += isinstance(op, Gemm) and any(param.split_dim == 0 for param in op.params)
    return readers > 1


def sum_s(bytes_: Num, tp: Num, bytes_per_s: float) -> Num:
    """Seconds of the sum that ends a reduce-scatter: `bytes_` read, a `tp`-th of them written.

    _symmetric_memory/__init__.py, _fused_matmul_reduce_scatter_impl.

    >>> sum_s(8.0, 2, 1.0)
    12.0
    """
    return bytes_ * (1.0 + 1.0 / tp) / bytes_per_s


def hidden_s(comm_s: Num, compute_s: Num, tp: Num, piece_kernels_s: Num) -> Num:
    """Seconds of a collective that a projection hides; `piece_kernels_s`: kernels that only the pieces need.

    The rank's own piece is not sent: it is multiplied while the first other one arrives, or last, while the others leave. So all
    copies overlap `tp` - 1 of the projection's `tp` pieces (_pipelined_multi_all_gather_and_consume,
    _pipelined_produce_and_all2all).

    >>> hidden_s(7.0, 16.0, 8, 0.5), hidden_s(21.0, 16.0, 8, 0.5)
    (6.5, 13.5)
    """
    return maximum(0.0, minimum(comm_s, compute_s * (tp - 1.0) / tp) - piece_kernels_s)


def kernels_of_pieces_s(sent_bytes: Num, reduced_bytes: Num, tp: Num, bytes_per_s: float) -> Num:
    """Seconds of those kernels: a rank copies its piece of what is gathered to where others read it, or sums what it received."""
    own = 2.0 * (sent_bytes - reduced_bytes) / tp
    return own / bytes_per_s + sum_s(reduced_bytes, tp, bytes_per_s)
