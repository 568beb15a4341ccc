"""Multi-token prediction as ops: the modules after the decoder that predict tokens further ahead, and the head of every depth.

A module joins the hidden states with the embeddings of the next tokens, projects them back to the hidden size and runs one more
layer, as the decoder's last one is; embedding and head are the model's own. Sources: megatron/core/transformer/
multi_token_prediction.py and megatron/core/models/gpt/gpt_model.py, _postprocess (0.16.1); DeepSeek-V3, arXiv 2412.19437, 2.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.model.embedding_and_head import TOKEN_ID, output_ops
from steptime.model.ops import Comm, Gemm, Move, Op, Param, Tensor
from steptime.model.quantize import backward_casts, cast
from steptime.model.sublayers import FP32, enter_tp, linear, linear_params, norm

if TYPE_CHECKING:
    from steptime.model.model import Model
    from steptime.model.shard import Shard

ROLL_KERNELS = 4.0
"""Kernels that shift a tensor of tokens by one position: roll, zero at the end, the sum returned in two (roll_tensor)."""
SCALE_KERNELS = 5.0
"""Kernels of a depth's loss: mask, sum and division for the log, its factor, division by the number of tokens."""


def inside(shard: Shard) -> Shard:
    """The recipe of the modules: NVFP4 is not applied to them (MultiTokenPredictionLayer._proj_and_transformer_layer)."""
    recipe = shard.software.recipe
    if recipe is None or recipe.name != "nvfp4":
        return shard
    return replace(shard, software=shard.software.replace(precision="bf16"))


def head_ops(model: Model, shard: Shard, embedding: list[Op], layer: list[Op]) -> list[Op]:
    """From the last block's "x": final norm, the module of each depth, their heads and losses, and last the next token's head.

    `embedding`: ops of the embedding; `layer`: those of one more layer, from "x" to "y". Outputs of all depths are put together
    in one tensor, of which each head gets its part.
    """
    rows, hidden, size = shard.sequence_tokens, model.hidden_sz, shard.itemsize
    normed, x = norm("head.norm", "x", rows, hidden, model, shard, "")
    ops, outs = [*normed], [x]
    for depth in range(1, model.mtp + 1):
        prefix = f"mtp.{depth}."
        own = module_ops(model, inside(shard), embedding, layer, depth)
        if model.mtp_repeated and depth > 1:
            own = [replace(op, params=tuple(map(of_the_first, op.params))) for op in own]
        ops += renamed(own, prefix, {"hidden": outs[-1]})
        outs.append(f"{prefix}final_norm.out")
    parts = tuple(Tensor(f"mtp.joined.{depth}", rows * hidden, size) for depth in range(model.mtp + 1))
    ops.append(Move("mtp.join", tuple(outs), parts))
    for depth in range(1, model.mtp + 1):
        head = [*rolled("labels", shard), *output_ops(model, shard, "out", shared=True), scale(shard)]
        ops += renamed(head, f"mtp.{depth}.", {"out": parts[depth].name})
    return [*ops, *with_previous_logits(output_ops(model, shard, parts[0].name))]


def with_previous_logits(ops: list[Op]) -> list[Op]:
    """The last head, besides the logits of the previous depth, which GPTModel._postprocess references until it returns."""
    [logits] = [op.outputs[0] for op in ops if isinstance(op, Gemm)]
    return [
        replace(op, forward_temp_bytes=op.forward_temp_bytes + logits.bytes) if isinstance(op, Move) else op
        for op in ops
    ]


def module_ops(model: Model, shard: Shard, embedding: list[Op], layer: list[Op], depth: int) -> list[Op]:
    """One depth, from tensor "hidden" to "final_norm.out"."""
    rows, hidden = shard.sequence_tokens, model.hidden_sz
    found = next(op.outputs[-1].name for op in reversed(embedding) if op.outputs)
    known = [replace(op, params=tuple(p._replace(shared=True) for p in op.params)) for op in embedding]
    enorm, e = norm("enorm", found, rows, hidden, model, shard, "")
    hnorm, h = norm("hnorm", "hidden", rows, hidden, model, shard, "")
    both = Tensor("joined", rows * 2.0 * hidden, shard.itemsize)
    joined = Move("concat", (e, h), (both,), same_grad=True)
    final, _ = norm("final_norm", "y", rows, hidden, model, shard, "")
    keeps_x = any("x" in op.saves for op in layer)
    own = [*enorm, *hnorm, joined, *project(model, shard, both.name, keeps_x=keeps_x), *layer, *final]
    return [*rolled("ids", shard), *known, *(replace(op, depth=depth) for op in own)]


def project(model: Model, shard: Shard, x: str, *, keeps_x: bool) -> list[Op]:
    """From twice the hidden size to the hidden size, tensor "x": a column-parallel projection whose output is gathered.

    With sp each rank goes on with its tokens, a view of the whole, which therefore stays where the layer keeps "x".
    """
    rows, hidden, size = shard.sequence_tokens, model.hidden_sz, shard.itemsize
    columns = hidden / shard.tp
    ops, operand = cast("eh_proj", x, rows * 2.0 * hidden, shard)
    entered, operand = enter_tp("eh_proj", operand, 2 * hidden, shard, shard.software.recipe)
    back = backward_casts(shard, shard.tokens, columns, 2.0 * hidden)
    weight, out = linear_params("eh_proj", (hidden, 2 * hidden), bias=False), "eh_proj.out" if shard.split else "x"
    ops += [*entered, linear("eh_proj", operand, out, 2 * hidden, columns, shard, weight, back)]
    if not shard.split:
        return ops
    whole = Tensor("eh_proj.parts", shard.tokens * hidden, size)
    own = [Tensor("x", rows * hidden, size)]
    if shard.sp:
        own.append(Tensor("x.others", whole.elements - rows * hidden, size))
    ops.append(Comm("eh_proj.collect", (out,), (whole,), kind="all_gather", bytes=whole.bytes))
    moved = 2.0 * whole.bytes
    ops.append(Move("eh_proj.order", (whole.name,), tuple(own), forward_bytes=moved, backward_bytes=moved / shard.tp))
    if shard.sp:
        kept = (own[1].name,) if keeps_x else ()
        ops.append(Comm("eh_proj.scatter", saves=kept, backward="all_gather", bytes=whole.bytes))
    return ops


def rolled(what: str, shard: Shard) -> list[Op]:
    """Token ids and positions, or labels and their mask, shifted by one position; with cp ends go to neighbors (roll_tensor).

    Each rank has two stretches of a sequence, and so two ends of each tensor.
    """
    shifted = Tensor(f"{what}.rolled", 2.0 * shard.tokens, TOKEN_ID)
    moved, kernels = 2.0 * 2.0 * shifted.bytes, 2.0 * ROLL_KERNELS
    ops: list[Op] = [Move(f"{what}.roll", (), (shifted,), forward_bytes=moved, kernels=kernels, same_grad=True)]
    if shard.context_split:
        ends = shard.batch * TOKEN_ID
        ops.append(Comm(f"{what}.roll.ends", kind="send_recv", axis="cp", bytes=ends, count=4.0))
    return ops


def scale(shard: Shard) -> Op:
    """A depth's loss, masked, scaled and attached to the next loss's gradient (MTPLossAutoScaler); mask, loss, count are kept."""
    mask, loss = (Tensor(f"loss.{what}", shard.tokens, FP32) for what in ("token_mask", "scaled"))
    kept = (mask, loss, Tensor("loss.count", 1.0, FP32))
    names, moved = tuple(t.name for t in kept), 2.0 * SCALE_KERNELS * loss.bytes
    return Move("loss.scale", (), (), names, kept, (), moved, moved, SCALE_KERNELS)


def of_the_first(p: Param) -> Param:
    """A parameter of a later depth where all depths run the first one's layer (mtp_use_repeated_layer, _build_layers)."""
    return p if p.shared else p._replace(name=f"mtp.1.{p.name}", shared=True)


def renamed(ops: list[Op], prefix: str, inputs: dict[str, str]) -> list[Op]:
    """Ops whose names, tensors and own parameters get a prefix; `inputs` maps tensors of other parts to their names here."""

    def new(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(inputs.get(name, prefix + name) for name in names)

    def new_tensors(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(t._replace(name=prefix + t.name) for t in tensors)

    return [
        replace(
            op,
            name=prefix + op.name,
            inputs=new(op.inputs),
            outputs=new_tensors(op.outputs),
            saves=new(op.saves),
            stats=new_tensors(op.stats),
            params=tuple(p if p.shared else p._replace(name=prefix + p.name) for p in op.params),
        )
        for op in ops
    ]
