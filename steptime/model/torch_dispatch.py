"""How rows reach experts of plain torch modules and come back: torchtitan's token dispatchers as ops.

Source: pytorch/torchtitan@b5bcd76c torchtitan/models/common/token_dispatcher.py and torchtitan/distributed/deepep/deepep.py.
Letters: T tokens that this device routes, k experts per token, N = T k rows sent, R rows in this device's experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from steptime.model import async_ep, summed_product
from steptime.model.dispatch import dense_scores, gathered_maps, own_buffers
from steptime.model.ops import VECTORIZED, ByElement, Comm, Move, Op, Tensor
from steptime.model.padded_groups import padded, without_padding
from steptime.model.routing import FP32, INT64, Rows
from steptime.model.sublayers import Sublayer
from steptime.software.profiles import without_release

if TYPE_CHECKING:
    from steptime.base.num import Num

SORT_KERNELS = 6.0
"""Radix sort of the chosen experts, and the index operations around it (assumed: launches of torch.argsort)."""

ADDED = 1.5
"""Elements of a kernel that adds rows to the rows of a sum, in those of a kernel that reads one and writes one: it reads one of
the row and one of the sum, and writes the sum (torch aten/src/ATen/native/cuda/Indexing.cu, indexing_backward_kernel: without
vector loads, the rows of one sum in turn). 196,608 rows of 2,048 on B200: 403e6 * 1.5 elements at 148 * 2.6e9 a second take 1.57
ms, with the zeros 1.69; measured 1.85, where rows of padding are all added to one sum too (pytorch/ao pull request 4623)."""

PLAIN: dict[str, Any] = {"forward_by_element": VECTORIZED, "backward_by_element": VECTORIZED}
"""Of a kernel with vector loads."""

UNCOMPILED = frozenset({"torchtitan@0.1", "torchtitan@0.2", "torchtitan@0.2.1"})
"""Software whose torch.compile leaves out how rows reach experts and come back: torchtitan before 2026-04-14 (pull request 2741).
Its apply_compile skipped the experts with their dispatch since 2025-10-29 (pull request 1895); before, the graph broke there."""


def dispatch(rows: Rows, x: str, probs: str) -> tuple[list[Op], str]:
    """From tokens to the rows of this device's experts, in their order: ops, and the tensor of rows.

    Tokens are sorted by expert; over ep the rows of each rank go to it, and are put in the order of its experts. A flexible
    dispatcher (DeepEP, HybridEP) sends each token once to every rank with one of its experts.
    """
    if async_ep.uses(rows):
        return async_ep.dispatch(rows, x, probs)
    return _exchanged(rows, x, probs) if exchanges(rows) else _sorted(rows, x, probs)


def _sorted(rows: Rows, x: str, probs: str) -> tuple[list[Op], str]:
    """Tokens as rows sorted by expert, all to all over ep, then in the order of the rank's experts."""
    order, tokens = Tensor("moe.order", rows.sent, INT64), Tensor("moe.tokens", rows.sent, INT64)
    ops: list[Op] = [
        Move(
            "moe.sort",
            (probs,),
            (Tensor("moe.ranked", rows.sent, FP32),),
            (order.name,),
            (order, tokens),
            forward_temp_bytes=INT64 * rows.sent,
            kernels=SORT_KERNELS,
            role="moe",
        )
    ]
    h, size = rows.hidden, rows.shard.itemsize
    routed = Tensor("moe.routed", rows.sent * h, size)
    gathered = _gathered(rows, routed, rows.tokens * h * size)
    ops.append(Move("moe.permute", (x,), (routed,), (tokens.name,), **gathered, kernels=2.0, role="moe"))
    if not rows.spread:
        more, x = padded(rows, routed.name)
        return [*ops, *more], x
    arrived, here = Tensor("moe.arrived", rows.received * h, size), Tensor("moe.rows", rows.room * h, size)
    places = Tensor("moe.places", rows.room, INT64)
    counts = INT64 * rows.moe.n_experts
    return [
        *ops,
        Comm("moe.counts", kind="all_to_all", axis="ep", bytes=counts, role="moe"),
        _to_all("moe.dispatch", routed.name, arrived, arrived.bytes),
        Move(
            "moe.local_permute",
            (arrived.name,),
            (here,),
            (places.name,),
            (places,),
            **_gathered(rows, here, arrived.bytes),
            kernels=SORT_KERNELS,
            role="moe",
        ),
    ], here.name


def _gathered(rows: Rows, taken: Tensor, source: Num) -> dict[str, Any]:
    """Rows taken by index from a tensor of `source` bytes, x[indices]; backward adds their gradients to zeros of that size.

    Eager torch sorts them by index first; of the sums, it writes zeros, then reads and writes. Compiled on Hopper and later, they
    are atomic additions (torch/_inductor/utils.py, needs_fallback_due_to_atomic_add_limitations).
    """
    if not eager(rows):
        return _moved(taken)
    return {
        "forward_bytes": 2.0 * taken.bytes,
        "backward_bytes": taken.bytes + 3.0 * source,
        "backward_by_element": ByElement(ADDED * taken.elements, taken.bytes + 2.0 * source),
    }


def eager(rows: Rows) -> bool:
    """Whether the dispatch's index operations are eager torch's, one element at a time."""
    software = rows.shard.software
    return software.kernels.compile == "none" or software.name in UNCOMPILED


def fused(rows: Rows) -> bool:
    """Whether one kernel puts rows in order: NeMo AutoModel's moe_permute_fusion (nemo_automodel/components/moe/experts.py)."""
    return without_release(rows.shard.software.name) == "automodel"


def _moved(rows: Tensor) -> dict[str, Num]:
    """Bytes of a gather of rows by index_select, and of its backward: gradients added into zeros by index."""
    return {"forward_bytes": 2.0 * rows.bytes, "backward_bytes": 3.0 * rows.bytes}


def _to_all(name: str, x: str, out: Tensor, bytes_: Num) -> Comm:
    """Rows to their ranks and back."""
    return Comm(name, (x,), (out,), kind="all_to_all", backward="all_to_all", axis="ep", bytes=bytes_, role="moe")


def exchanges(rows: Rows) -> bool:
    """Whether DeepEP or HybridEP carries the rows, one copy of a token to each rank with one of its experts."""
    return rows.shard.software.moe.dispatcher == "flex" and rows.spread


def weighted_activation(rows: Rows) -> bool:
    """Whether the experts' activation applies the scores, as in NeMo AutoModel, whose activation is Megatron's fused one.

    NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/moe/experts.py, GroupedExpertsDeepEP and GroupedExpertsTE.
    """
    software = rows.shard.software
    return (
        exchanges(rows)
        and without_release(software.name) == "automodel"
        and software.kernels.activation_impl == "fused"
    )


def arriving(rows: Rows) -> Num:
    """Tokens with any of this device's experts, from all ranks."""
    return rows.tokens * rows.routing.distinct(1.0 * rows.shard.ep) * rows.load


def _exchanged(rows: Rows, x: str, probs: str) -> tuple[list[Op], str]:
    """Tokens and scores that arrive, and their rows in the order of the experts (torchtitan/distributed/deepep/deepep.py).

    HybridEP receives them in a buffer of its own (`dispatch.own_buffers`); backward sums their gradients into that buffer.
    """
    size, k = rows.shard.itemsize, rows.moe.experts_per_token
    away = own_buffers(rows)
    arrived = Tensor("moe.arrived", arriving(rows) * rows.hidden, size, outside=away)
    scores = Tensor("moe.arrived.probs", arriving(rows) * k, FP32, outside=away)
    here, ranked = Tensor("moe.rows", rows.room * rows.hidden, size), Tensor("moe.ranked", rows.room, FP32)
    places, taken = Tensor("moe.places", rows.here, INT64), here._replace(elements=rows.here * rows.hidden)
    get = replace(_to_all("moe.dispatch", x, arrived, arrived.bytes), routing=rows.routing)
    get = replace(get, inputs=(x, probs), outputs=(arrived, scores), score_bytes=dense_scores(rows, arriving(rows)))
    put = Move(
        "moe.local_permute",
        (arrived.name, scores.name),
        (here, ranked),
        (places.name,),
        (places,),
        **(_moved(taken) if fused(rows) else _gathered(rows, taken, arrived.bytes)),
        kernels=SORT_KERNELS,
        role="moe",
    )
    return [*gathered_maps(rows), get, permuted_by_library(rows, put)], here.name


def permuted_by_library(rows: Rows, op: Move) -> Move:
    """HybridEP's permutation: one kernel that reads every row that arrived once and writes it for each expert, or back their sum.

    Both trainers call it (torchtitan/distributed/deepep/hybridep.py@aa1d3741 and NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/
    components/moe/megatron/fused_a2a.py: dispatch_with_permute, combine_with_unpermute), and backward calls the other of the two.
    """
    if not own_buffers(rows):
        return op
    moved = (arriving(rows) + rows.here) * rows.hidden * rows.shard.itemsize
    return replace(op, forward_bytes=moved, backward_bytes=moved, kernels=1.0, **PLAIN)


def combine(rows: Rows, x: str, probs: str) -> Sublayer:
    """The experts' rows back at their tokens, times their scores, summed (LocalTokenDispatcher.combine)."""
    if async_ep.uses(rows):
        return async_ep.combine(rows, x, probs)
    if exchanges(rows):
        return _returned(rows, x)
    h, size = rows.hidden, rows.shard.itemsize
    ops: list[Op] = []
    if rows.spread:
        back, home = Tensor("moe.unpermuted", rows.here * h, size), Tensor("moe.returned", rows.sent * h, size)
        copied = 2.0 * back.bytes  # rows[places] = x, whose backward takes them from there
        ops.append(Move("moe.local_unpermute", (x,), (back,), ("moe.places",), (), (), copied, copied, 2.0, role="moe"))
        ops.append(_to_all("moe.combine", back.name, home, rows.received * h * size))
        x = home.name
    else:
        ops, x = without_padding(rows, x)
    if summed_product.applies(rows):
        return [*ops, *summed_product.summed(rows, x)], "moe.out"
    more, weighed = weigh(rows, x, rows.sent * h)
    return [*ops, more, scatter(rows, weighed, rows.tokens, ("moe.tokens",))], "moe.out"


def weigh(rows: Rows, x: str, elements: Num) -> tuple[Op, Tensor]:
    """Rows times scores. Eager torch upcasts the rows for the product and keeps the copy; compiled, it keeps the rows."""
    shard, size = rows.shard, rows.shard.itemsize
    out, both = Tensor("moe.weighed", elements, size), (x, "moe.ranked")
    if shard.software.kernels.compile != "none" or size == FP32:
        return Move("moe.weigh", both, (out,), both, role="moe"), out
    wide = Tensor("moe.wide", elements, FP32)
    # forward: upcast, product, downcast; backward: upcast, both products and a sum, downcast
    forward_bytes, backward_bytes = (2.0 * size + 4.0 * FP32) * elements, (2.0 * size + 8.0 * FP32) * elements
    op = Move(
        "moe.weigh",
        both,
        (out,),
        (wide.name, "moe.ranked"),
        (wide,),
        (),
        forward_bytes,
        backward_bytes,
        3.0,
        forward_temp_bytes=FP32 * elements,
        backward_temp_bytes=(3.0 * FP32 - 2.0 * size) * elements,
        role="moe",
    )
    return op, out


def scatter(rows: Rows, x: Tensor, tokens: Num, saves: tuple[str, ...]) -> Move:
    """Rows added into zeros at their tokens, a copy of which takes the sum."""
    out = Tensor("moe.out", tokens * rows.hidden, x.itemsize)
    moved = x.bytes + 3.0 * out.bytes
    return Move(
        "moe.scatter",
        (x.name,),
        (out,),
        saves,
        (),
        (),
        moved,
        2.0 * x.bytes,
        3.0,
        forward_temp_bytes=out.bytes,
        role="moe",
    )


def _returned(rows: Rows, x: str) -> Sublayer:
    """DeepEP's combine: rows of one token are weighed, unless they were, and summed where they are, and sent once.

    Every row for which there is room is weighed. Eager torch multiplies rows and gradients for those of the scores, then sums.
    """
    elements, size = rows.room * rows.hidden, rows.shard.itemsize
    out, both = Tensor("moe.weighed", elements, size), (x, "moe.ranked")
    product = out.bytes if rows.shard.software.kernels.compile == "none" else 0.0
    weighed = [Move("moe.weigh", both, (out,), both, kernels=2.0, backward_temp_bytes=product, role="moe")]
    if weighted_activation(rows):
        out, weighed = out._replace(name=x), []
    summed = scatter(rows, out._replace(elements=rows.here * rows.hidden), arriving(rows), ("moe.places",))
    if eager(rows) and not fused(rows):  # scatter_add_ adds the elements of every row to their sums, one by one
        each = rows.here * rows.hidden
        added = ByElement(ADDED * each, each * size + 2.0 * summed.outputs[0].bytes)
        summed = replace(summed, forward_by_element=added)
    if own_buffers(rows):
        home = summed.outputs[0]._replace(outside="both")
        summed = permuted_by_library(rows, replace(summed, outputs=(home,), forward_temp_bytes=0.0))
    home = Tensor("moe.home", rows.tokens * rows.hidden, size)
    bytes_ = arriving(rows) * rows.hidden * size
    back = replace(_to_all("moe.combine", "moe.out", home, bytes_), routing=rows.routing)
    return [*weighed, summed, back], home.name
