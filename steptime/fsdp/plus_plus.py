"""ZeRO++ of DeepSpeed: quantized all-gathers and reductions, and a second partition of the parameters within nodes.

Sources: Wang et al. 2023 (arXiv 2306.10209), sections 3.1 to 3.3 (qwZ, hpZ, qgZ); deepspeedai/DeepSpeed@edaa7221
deepspeed/runtime/zero/partition_parameters.py (_all_gather_coalesced, CUDAQuantizer, _partition_param_sec) and
runtime/comm/coalesced_collectives.py (all_to_all_quant_reduce). What the quantizing kernels take is their bytes; the host waits
for the device once for each parameter of the first forward of a step (_partition_param_sec), which is not counted.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from steptime.base.num import Num, minimum, where
from steptime.fsdp.collective_ranks import backward_group
from steptime.job.job import Job
from steptime.job.mesh import Group, ZeroPlusPlus
from steptime.model.ops import Kind

SCALES = 4.0 / 4096.0
"""Bytes of fp32 scales per weight: groups of 4,000 to 8,000 elements (CUDAQuantizer.quantize), of 4,096 where that divides the
shard of a weight. Gradients have one group for each row or column (all_to_all_quant_reduce), counted likewise."""
INT8, INT4 = 1.0 + SCALES, 0.5 + SCALES
"""Bytes per quantized element with its scale: weights in int8, gradients in int4 (arXiv 2306.10209, sections 3.1 and 3.3)."""
HALF = 2.0
"""Bytes per dequantized element: DeepSpeed dequantizes to fp16 (CUDAQuantizer.dequantize; all_to_all_quant_reduce)."""


class Scatter(NamedTuple):
    """One collective of a reduction, and how often it is called."""

    name: str
    kind: Kind
    bytes: Num
    group: Group
    calls: Num = 1.0


def settings(job: Job) -> ZeroPlusPlus:
    """What the plan says of ZeRO++; nothing where it says nothing."""
    return job.parallelism.zero_plus_plus or _nothing()


@cache
def _nothing() -> ZeroPlusPlus:
    return ZeroPlusPlus()


def has_second_partition(job: Job) -> bool:
    """Whether all gathers but the first of a step run among neighbors (hpZ)."""
    return settings(job).hpz_partition_size > 1


def secondary_bytes(job: Job, padded: Num) -> Num:
    """Bytes of the second partition (hpZ) on a device, `padded` elements in all.

    Each parameter's is cut from what its first forward of a step gathered, and stays until the optimizer's step has run
    (stage3.py, invalidate_secondary_tensor).
    """
    return padded * job.software.itemsize / backward_group(job).ranks if has_second_partition(job) else 0.0


def sent_bytes(job: Job, padded: Num, gathered: Num) -> Num:
    """Bytes that an all-gather sends, as much as its buffer `gathered`; with qwZ `padded` elements in int8, and their scales."""
    return padded * INT8 if settings(job).quantized_weights else gathered


def flat_bytes(job: Job, padded: Num) -> Num:
    """Bytes of an all-gather's buffers until parameters are copied out: qwZ's, and what they are dequantized to, in fp16."""
    said = settings(job)
    return padded * (INT8 + HALF if said.quantized_weights else job.software.itemsize)


def dequantized_bytes(job: Job, padded: Num) -> Num:
    """Bytes that qwZ moves beside the copy out of the buffers: int8 read and fp16 written, and of other dtypes their cast."""
    if not settings(job).quantized_weights:
        return 0.0
    cast = 0.0 if job.software.compute_dtype == "fp16" else HALF + job.software.itemsize
    return padded * (INT8 + HALF + cast)


def reduction_bytes(job: Job, elements: Num, itemsize: float) -> Num:
    """Bytes that a reduction reads: a copy in `itemsize`, or where qgZ runs what is sent and received in int4."""
    plain = elements * itemsize
    if not settings(job).quantized_gradients:
        return plain
    devices = job.parallelism.dp * job.parallelism.cp
    return where(devices > job.machine.devices_per_node, 2.0 * INT4 * elements, plain)


def reduction(job: Job, elements: Num, bytes_: Num, matrices: Num, over: Group) -> list[Scatter]:
    """The collectives that reduce a group's gradients: one reduce-scatter of `bytes_`, or qgZ's of `elements` in int4.

    qgZ exchanges a matrix among the devices of a node, adds up, and exchanges the sums, 1/n of it, among nodes; each call has a
    second one for its scales. On a single node it is a reduce-scatter. Vectors, which are always reduced so, are not told apart.
    """
    nodes, inside = node_groups(job, over)
    if not settings(job).quantized_gradients or not matrices:
        return [Scatter("gradients", "reduce_scatter", bytes_, over)]
    pieces = {"": elements * 0.5 / matrices, " scales": elements * SCALES / matrices}
    local, several = inside.ranks, where(nodes.ranks > 1, 1.0, 0.0)
    return [
        Scatter("gradients", "reduce_scatter", bytes_, over, 1.0 - several),
        *[
            Scatter(f"gradients{what}, within nodes", "all_to_all", size, inside, several * matrices)
            for what, size in pieces.items()
        ],
        *[
            Scatter(f"gradients{what}, between nodes", "all_to_all", size / local, nodes, several * matrices)
            for what, size in pieces.items()
        ],
    ]


def node_groups(job: Job, over: Group) -> tuple[Group, Group]:
    """The ranks of a collective as nodes, one rank of each, and the ranks inside a node."""
    local = minimum(job.machine.devices_per_node, over.ranks)
    return over._replace(ranks=over.ranks / local, stride=local), over._replace(ranks=local)
