"""Seconds that Muon takes to orthogonalize the momenta of matrices: Newton-Schulz iterations and their collectives."""

from __future__ import annotations

from collections.abc import Iterable

from steptime.base.num import Num, maximum, minimum
from steptime.cost.comm import Collective
from steptime.cost.compute import gemm_pass
from steptime.cost.parts import Context
from steptime.cost.rates import Rates
from steptime.fsdp.ranks import shard_group
from steptime.job.job import Job
from steptime.job.local_params import CountedParams
from steptime.memory.moments import matrix, orthogonalized
from steptime.memory.states import shard_ranks
from steptime.model.ops import Gemm, Kind, Param

STEPS = 5.0
"""Iterations of a step (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Megatron-Core's muon_num_ns_steps)."""
BF16, FP32 = 2.0, 4.0
"""Bytes of one number."""


def orthogonalize_s(job: Job, held: CountedParams, context: Context) -> Num:
    """Seconds for the matrices that one device updates; if whole ones are distributed, for an even share or the longest."""
    software = job.software
    if software.states.optimizer not in {"muon", "dist_muon"}:
        return 0.0
    every: Num = 0.0
    longest: Num = 0.0
    for params, count in held:
        for p in (p for p in params if orthogonalized(p.param)):
            ranks = shard_ranks(job, p.param.group) if software.states.optimizer == "dist_muon" else 1
            seconds = matrix_s(job, p.param, p.each, context)
            every = every + count * p.tensors * seconds / ranks
            longest = maximum(longest, seconds)
    return maximum(every, longest)


def matrix_s(job: Job, p: Param, elements: Num, context: Context) -> Num:
    """Seconds for one matrix with so many elements on this device.

    duplicated: the fp32 momentum is gathered over tp, and every rank iterates over the whole. distributed: the ranks add up their
    Gram matrices of the dimension that is not split, in bf16, once an iteration (NVIDIA-NeMo/Emerging-Optimizers
    orthogonalized_optimizers/muon_utils.py, newton_schulz_tp).
    """
    tp, mode = job.parallelism.tp, job.software.states.muon_tp_mode
    if sharded(job):
        return sharded_matrix_s(job, p, context)
    rows, columns = matrix(p, elements)
    split = p.split_dim is not None and not p.n_experts
    if not split or mode == "blockwise":
        return newton_schulz_s(minimum(rows, columns), maximum(rows, columns), context.rates)
    if mode == "duplicated":
        whole = minimum(*p.shape), maximum(*p.shape)
        gather = context.collective("all_gather", FP32 * elements * tp, "tp")
        return newton_schulz_s(*whole, context.rates) + gather.time_s
    kept, shared = (columns, rows) if p.split_dim == 0 else (rows, columns)
    reduction = context.collective("all_reduce", BF16 * kept * kept, "tp")
    return newton_schulz_s(kept, shared, context.rates) + STEPS * reduction.time_s


def sharded(job: Job) -> bool:
    """Whether matrices are DTensors that FSDP2 shards by rows."""
    return job.software.family == "fsdp2" and job.zero_level >= 2


def sharded_matrix_s(job: Job, p: Param, context: Context) -> Num:
    """Seconds for one matrix whose rows FSDP2 shards: torch.optim.Muon on DTensors, product by product.

    torch/optim/_muon.py (2.13), _zeropower_via_newtonschulz, on a CPU over 4 ranks. X has at least as many columns as rows; of a
    weight with more rows it is the transpose, sharded by columns. Then each rank multiplies its columns, and A and its square, of
    which it has a term, are all-reduced: twice m^2 in bf16 an iteration; all ranks square A. Sharded by rows, X is gathered for
    X X^T, A for its square, X again for B X. First one number is all-reduced, the norm. The time of the host, which dispatches
    some 30 operations on DTensors for each matrix, is not counted.
    """
    ranks = shard_ranks(job, p.group)
    rows, columns = p.shape[-2:]
    share = -(-rows // ranks)
    if rows > columns:
        products = (columns, columns, share), (columns, columns, columns), (columns, share, columns)
    else:
        products = (share, rows, columns), (share, rows, rows), (share, columns, rows)
    around = shard_group(job, p.group)
    sent_s = [n * Collective(kind, around, context.tiers).cost(size).time_s for kind, size, n in calls(rows, columns)]
    return sum(sent_s) + iterations_s(products, context.rates)


def calls(rows: Num, columns: Num) -> list[tuple[Kind, Num, float]]:
    """Collectives of a sharded matrix in a step: kind, bytes of the full tensor, how many."""
    norm: tuple[Kind, Num, float] = ("all_reduce", BF16, 1.0)
    if rows > columns:
        return [norm, ("all_reduce", BF16 * columns * columns, 2.0 * STEPS)]
    return [norm, ("all_gather", BF16 * rows * columns, 2.0 * STEPS), ("all_gather", BF16 * rows * rows, STEPS)]


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
