"""Moments: the optimizer's averages of past gradients, in bytes by tensor, and the temporaries of an update."""

from __future__ import annotations

from functools import reduce

from steptime.base.num import Num, maximum, where
from steptime.job.job import Job
from steptime.job.local_params import CountedParams
from steptime.model.ops import Param
from steptime.software.state_bytes import FP32, PER_ELEMENT, QUANTIZED

SMALLEST_QUANTIZED = 4096.0
"""Tensors with fewer elements keep fp32 moments (torchao/optim/adam.py, _new_buffer; bitsandbytes' min_8bit_size)."""


def mean_moments(job: Job, counted: CountedParams) -> dict[str, Num]:
    """Bytes of moments per parameter, mean of those that one device holds of some chunks, by parameter group."""
    if job.software.states.optimizer in PER_ELEMENT:
        return dict.fromkeys(
            [group for params, _ in counted for group in params.elements], job.software.state_bytes.moments
        )
    moments: dict[str, Num] = {}
    elements: dict[str, Num] = {}
    for params, count in counted:
        for p in params:
            group = p.param.group
            moments[group] = moments.get(group, 0.0) + count * p.tensors * tensor_moments(job, p.param, p.each)
            elements[group] = elements.get(group, 0.0) + count * p.tensors * p.each
    return {group: bytes_ / elements[group] for group, bytes_ in moments.items()}


def tensor_moments(job: Job, p: Param, elements: Num) -> Num:
    """Bytes of the moments of one tensor with `elements` elements.

    adamw_8bit: two codes of a byte, each block of 256 with an fp32 scale for either. adafactor: the mean squares of rows and of
    columns (Shazeer and Stern 2018, algorithm 4; torch/optim/_adafactor.py, which factors the last two dimensions), a whole
    second moment of vectors. muon: one momentum of a matrix that it orthogonalizes, Adam's two of all others
    (megatron/core/optimizer/emerging_optimizers.py).
    """
    size = job.software.bytes_of(job.software.states.moment_dtype)
    match job.software.states.optimizer:
        case "adamw_8bit":
            return elements * where(elements < SMALLEST_QUANTIZED, 2.0 * FP32, QUANTIZED)
        case "adafactor":
            return size * (sum(matrix(p, elements)) if len(p.shape) - bool(p.n_experts) > 1 else elements)
        case _:
            return elements * size * (1.0 if orthogonalized(p) else 2.0)


def orthogonalized(p: Param) -> bool:
    """Whether Muon updates the parameter: a matrix that is neither the embedding nor the head.

    Source: megatron/core/optimizer/layer_wise_optimizer.py, is_managed_by_layer_wise_optimizer.
    """
    return len(p.shape) - bool(p.n_experts) == 2 and not p.vocab


def matrix(p: Param, elements: Num) -> tuple[Num, Num]:
    """Rows and columns of a matrix on one device: tensor parallelism splits rows or columns, etp is taken to split rows."""
    whole_rows, columns = p.shape[-2:]
    if p.n_experts or p.split_dim is None:
        return elements / columns, columns
    return (whole_rows, elements / whole_rows) if p.split_dim == len(p.shape) - 1 else (elements / columns, columns)


def unevenness(job: Job, counted: CountedParams, ranks: dict[str, Num]) -> dict[str, Num]:
    """Parameters of the rank with the most beyond the mean, where whole matrices are distributed over ranks, by group.

    Megatron packs matrices so that no rank does much more than another, and pads every rank's part of the buffer to the fullest
    one's (layer_wise_optimizer.py, _compute_per_buffer_param_layout). Packing is taken to be even, but that a rank cannot have
    less than one matrix.
    """
    if job.software.states.optimizer != "dist_muon":
        return dict.fromkeys(ranks, 0.0)
    matrices = dict.fromkeys(ranks, 0.0)
    largest: dict[str, Num] = dict.fromkeys(ranks, 0.0)
    for params, count in counted:
        for p in (p for p in params if orthogonalized(p.param)):
            group = p.param.group
            matrices[group] = matrices[group] + count * p.tensors * p.each
            largest[group] = maximum(largest[group], p.each)
    return {group: maximum(0.0, largest[group] - matrices[group] / n) for group, n in ranks.items()}


def update_temporaries(job: Job, counted: CountedParams, ranks: dict[str, Num]) -> Num:
    """Bytes of temporaries that an update holds for the tensor that it works on.

    adafactor: the estimate that becomes the update (torch/optim/_adafactor.py, _single_tensor_adafactor). muon: the orthogonal
    matrix in fp32 with the products of it and its two scales (Megatron-Core optimizer/emerging_optimizers.py,
    scaled_orthogonalize_fn); the iterations, in bf16, hold less. adamw in a loop: `looped_temporaries`.
    """
    software = job.software
    optimizer, size = software.states.optimizer, software.bytes_of(software.states.moment_dtype)
    most = looped_temporaries(job, counted, ranks)
    if optimizer not in {"adafactor", "muon", "dist_muon"}:
        return most
    for params, _ in counted:
        for p in params:
            if optimizer == "adafactor":
                most = maximum(most, size * p.each)
            elif orthogonalized(p.param):
                most = maximum(most, 3.0 * FP32 * p.each)
    return most


def looped_temporaries(job: Job, counted: CountedParams, ranks: dict[str, Num]) -> Num:
    """Those of AdamW in a loop over tensors: the root of the second moment and its quotient (_single_tensor_adam).

    Of the shard on this device where ZeRO shards tensors over `ranks` (torch/optim/adam.py).
    """
    software = job.software
    most: Num = 0.0
    if software.states.optimizer != "adamw" or software.states.optimizer_impl != "for_loop":
        return most
    size = software.bytes_of(software.states.moment_dtype)
    each = [p.each / (ranks[p.param.group] if job.zero_level >= 2 else 1) for params, _ in counted for p in params]
    return 2.0 * size * reduce(maximum, each, most)
