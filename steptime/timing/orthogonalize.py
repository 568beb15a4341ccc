"""Seconds that Muon takes to orthogonalize the momenta of matrices: Newton-Schulz iterations and their collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from steptime.base.num import Num, maximum, minimum
from steptime.cost.comm import Collective, CommCost
from steptime.cost.compute import gemm_pass
from steptime.cost.part_seconds import Context
from steptime.cost.rates import Rates
from steptime.fsdp.collective_ranks import shard_group
from steptime.job.job import Job
from steptime.job.local_params import CountedParams
from steptime.job.mesh import Group
from steptime.memory.optimizer_moments import matrix, orthogonalized
from steptime.memory.states import shard_ranks
from steptime.model.ops import Gemm, Kind, Param

STEPS = 5.0
"""Iterations of a step (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Megatron-Core's muon_num_ns_steps)."""
BF16, FP32 = 2.0, 4.0
"""Bytes of one number."""
NORMS, MOMENTA, PRODUCTS = "Muon norms", "Muon momenta", "Muon products"
"""Names of its collectives, whose seconds are part of the optimizer's."""


class MatrixCall(NamedTuple):
    """A collective that orthogonalizing takes."""

    name: str
    kind: Kind
    group: Group
    bytes: Num
    """Of the full tensor of one call [B]."""
    count: Num
    """Calls for one matrix, or of a step."""
    cost: CommCost


def orthogonalize_s(job: Job, counted: CountedParams, context: Context) -> Num:
    """Seconds for the matrices that one device updates; if whole ones are distributed, for an even share or the longest."""
    every: Num = 0.0
    longest: Num = 0.0
    for count, p, elements in matrices(job, counted):
        seconds = matrix_s(job, p, elements, context)
        every = every + count * seconds
        longest = maximum(longest, seconds)
    return maximum(every, longest)


def matrices(job: Job, counted: CountedParams) -> Iterator[tuple[Num, Param, Num]]:
    """The matrices that one device orthogonalizes: how many alike (an even share of distributed ones), and elements here."""
    optimizer = job.software.states.optimizer
    if optimizer in {"muon", "dist_muon"}:
        for params, count in counted:
            for p in (p for p in params if orthogonalized(p.param)):
                ranks = shard_ranks(job, p.param.group) if optimizer == "dist_muon" else 1
                yield count * p.tensors / ranks, p.param, p.each


def calls_of_step(job: Job, counted: CountedParams, context: Context) -> list[MatrixCall]:
    """Collectives of all matrices of a step, equal ones summed. Their seconds are part of the optimizer's."""
    found: dict[tuple[str, str, Num], MatrixCall] = {}
    for count, p, elements in matrices(job, counted):
        for call in matrix_calls(job, p, elements, context):
            key = call.name, call.kind, call.bytes
            before = found[key].count if key in found else 0.0
            found[key] = call._replace(count=before + count * call.count)
    return list(found.values())


def matrix_s(job: Job, p: Param, elements: Num, context: Context) -> Num:
    """Seconds for one matrix with so many elements on this device: its products and its collectives.

    Under tensor parallelism blockwise iterates over each rank's own block, duplicated over the whole matrix.
    """
    sent_s = sum([call.count * call.cost.time_s for call in matrix_calls(job, p, elements, context)])
    if sharded(job):
        return sent_s + iterations_s(sharded_products(p, shard_ranks(job, p.group)), context.rates)
    rows, columns = matrix(p, elements)
    short, long = minimum(rows, columns), maximum(rows, columns)
    if split(p) and job.software.states.muon_tp_mode == "duplicated":
        short, long = minimum(*p.shape), maximum(*p.shape)
    elif split(p) and job.software.states.muon_tp_mode == "distributed":
        short, long = (columns, rows) if p.split_dim == 0 else (rows, columns)
    return sent_s + newton_schulz_s(short, long, context.rates)


def split(p: Param) -> bool:
    """Whether tensor parallelism splits one matrix."""
    return p.split_dim is not None and not p.n_experts


def sharded(job: Job) -> bool:
    """Whether matrices are DTensors that FSDP2 shards by rows."""
    return job.software.family == "fsdp2" and job.zero_level >= 2


def matrix_calls(job: Job, p: Param, elements: Num, context: Context) -> list[MatrixCall]:
    """Collectives of one matrix with so many elements on this device.

    duplicated: the fp32 momentum is gathered over tp, and every rank iterates over the whole. distributed: the ranks add up their
    Gram matrices of the dimension that is not split, in bf16, once an iteration (NVIDIA-NeMo/Emerging-Optimizers
    orthogonalized_optimizers/muon_utils.py, newton_schulz_tp).
    """
    if sharded(job):
        around = shard_group(job, p.group)
        return [
            MatrixCall(name, kind, around, size, n, Collective(kind, around, context.tiers).cost(size))
            for name, kind, size, n in calls(*p.shape[-2:])
        ]
    mode = job.software.states.muon_tp_mode
    if not split(p) or mode == "blockwise":
        return []
    of: tuple[str, Kind, Num, float] = (MOMENTA, "all_gather", FP32 * elements * job.parallelism.tp, 1.0)
    if mode == "distributed":
        rows, columns = matrix(p, elements)
        kept = columns if p.split_dim == 0 else rows
        of = PRODUCTS, "all_reduce", BF16 * kept * kept, STEPS
    name, kind, size, n = of
    return [MatrixCall(name, kind, context.groups["tp"], size, n, context.collective(kind, size, "tp"))]


def sharded_products(p: Param, ranks: Num) -> tuple[tuple[Num, Num, Num], ...]:
    """Products of an iteration on one of the ranks among which FSDP2 shards a matrix by rows: rows, columns, depth.

    torch.optim.Muon on DTensors: torch/optim/_muon.py (2.13), _zeropower_via_newtonschulz, on a CPU over 4 ranks. X has at least
    as many columns as rows; of a weight with more rows it is the transpose, sharded by columns. The time of the host, which
    dispatches some 30 operations on DTensors for each matrix, is not counted.
    """
    rows, columns = p.shape[-2:]
    share = -(-rows // ranks)
    if rows > columns:
        return (columns, columns, share), (columns, columns, columns), (columns, share, columns)
    return (share, rows, columns), (share, rows, rows), (share, columns, rows)


def calls(rows: Num, columns: Num) -> list[tuple[str, Kind, Num, float]]:
    """Collectives of a matrix that FSDP2 shards, in a step: name, kind, bytes of the full tensor, how many.

    Of more rows than columns each rank multiplies its columns of the transpose X, and A = X X^T and its square, of which it has
    a term, are all-reduced: twice m^2 in bf16 an iteration; all ranks square A. Otherwise X is gathered for X X^T, A for its
    square, X again for B X. First one number is all-reduced, the norm. Source: as `sharded_products`.
    """
    norm: tuple[str, Kind, Num, float] = (NORMS, "all_reduce", BF16, 1.0)
    if rows > columns:
        return [norm, (PRODUCTS, "all_reduce", BF16 * columns * columns, 2.0 * STEPS)]
    return [
        norm,
        (MOMENTA, "all_gather", BF16 * rows * columns, 2.0 * STEPS),
        (PRODUCTS, "all_gather", BF16 * rows * rows, STEPS),
    ]


def newton_schulz_s(m: Num, n: Num, r: Rates) -> Num:
    """Seconds of five iterations on an m x n matrix in bf16: A = X X^T, B = b A + c A A, X = a X + B X.

    4 m^2 n + 2 m^3 FLOPs each (Jordan et al. 2024). A and B are m x m, so bytes are those of three products.
    """
    return iterations_s(((m, m, n), (m, m, m), (m, n, m)), r)


def iterations_s(products: Iterable[tuple[Num, Num, Num]], r: Rates) -> Num:
    """Seconds of five iterations, each of these products: rows, columns, depth."""
    seconds: Num = 0.0
    for rows, columns, depth in products:
        product = Gemm("newton_schulz", (), (), m=rows, n=columns, k=depth)
        moved = BF16 * (rows * depth + depth * columns + 2.0 * rows * columns)
        seconds = seconds + gemm_pass(product, r, rows, columns, depth, moved).time_s
    return STEPS * seconds
