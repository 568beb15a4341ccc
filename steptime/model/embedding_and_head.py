"""The two ends of the model: embedding, and final norm, head and loss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.model.loss_of_pieces import chunks_of_head, loss_of_pieces
from steptime.model.ops import Comm, Gemm, Kind, Move, Op, Param, Tensor
from steptime.model.quantize import Backward, Operand, backward_casts, cast
from steptime.model.sublayers import FP32, cast_weight, dropout, enter_tp, norm
from steptime.software.performance import EAGER_TORCH

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import Model
    from steptime.model.shard import Shard

TOKEN_ID = 8.0
"""Bytes of one token id (int64)."""
BOOL = 1.0
"""Bytes of one bool."""


def embedding_ops(model: Model, shard: Shard, positions: Num) -> list[Op]:
    """Token (and position) table look-up to the first block's "x"; rows of the vocabulary split by tp.

    A split table gives partial rows, summed by reduce-scatter (sp) or all-reduce (megatron/core/tensor_parallel/layers.py,
    VocabParallelEmbedding).
    """
    rows, hidden, size = shard.sequence_tokens, model.hidden_sz, shard.itemsize
    found = Tensor("embedding.out", shard.tokens * hidden, size)
    table = Param("embedding.weight", (shard.vocab, hidden), 0, vocab=True)
    kept: tuple[Tensor, ...] = (Tensor("embedding.ids", shard.tokens, TOKEN_ID),)
    if shard.split and shard.software.kernels.vocab_parallel:
        kept += (Tensor("embedding.mask", shard.tokens, BOOL),)
    rows_moved = 2.0 * found.bytes  # read and written
    main = shard.software.bytes_of(shard.software.states.main_grad_dtype)
    # a dense gradient of the table in the compute dtype, zeroed and read; the main one read and written
    dense_gradient = shard.vocab / shard.tp * hidden * (2.0 * size + 2.0 * main)
    names = tuple(t.name for t in kept)
    ops: list[Op] = [
        Move(
            "embedding",
            (),
            (found,),
            names,
            kept,
            (table,),
            forward_bytes=rows_moved,
            backward_bytes=rows_moved + dense_gradient,
        )
    ]
    x = found.name
    if shard.split:
        more, x = reduce_embedding(model, shard, found)
        ops += more
    if model.learned_positions:
        out = Tensor("embedding.positions.out", rows * hidden, size)
        ids = Tensor("embedding.position_ids", shard.tokens, TOKEN_ID, for_weight=True)
        params = (Param("embedding.positions.weight", (positions, hidden)),)
        moved = 3.0 * out.bytes
        ops.append(
            Move("embedding.positions", (x,), (out,), (ids.name,), (ids,), params, moved, out.bytes, same_grad=True)
        )
        x = out.name
    dropped, _ = dropout("embedding.dropout", x, rows * hidden, model, shard)
    return [*ops, *dropped]


def reduce_embedding(model: Model, shard: Shard, found: Tensor) -> tuple[list[Op], str]:
    """Sum the partial rows over tp.

    With sp a reduce-scatter; where a position table follows, Megatron all-reduces and keeps its share
    (megatron/core/models/common/embeddings/language_model_embedding.py, reduce_scatter_embeddings).
    """
    if not shard.sp:
        return [Comm("embedding.reduce", (found.name,), kind="all_reduce", bytes=found.bytes)], found.name
    out = Tensor("embedding.scattered", shard.sequence_tokens * model.hidden_sz, shard.itemsize)
    kind: Kind = "all_reduce" if model.learned_positions else "reduce_scatter"
    comm = Comm("embedding.reduce", (found.name,), (out,), kind=kind, backward="all_gather", bytes=found.bytes)
    return [comm], out.name


def head_ops(model: Model, shard: Shard) -> list[Op]:
    """Final norm, logits and cross entropy, from the last block's "x"."""
    normed, x = norm("head.norm", "x", shard.sequence_tokens, model.hidden_sz, model, shard, "")
    return [*normed, *output_ops(model, shard, x)]


def output_ops(model: Model, shard: Shard, x: str, *, shared: bool = False) -> list[Op]:
    """Logits and cross entropy of `x`; `shared`: the weight is another head's.

    Loss, composite: logits upcast to fp32 and one fp32 copy kept (megatron/core/tensor_parallel/cross_entropy.py; torch's
    cross_entropy of logits.float()). fused: one copy in the compute dtype (TransformerEngine's parallel_cross_entropy; torch's
    cross_entropy of bf16 logits). compiled: the logits themselves (see `compiled_loss`).
    With loss_chunks the logits of one part of the tokens exist at a time: each part runs backward before the next one starts
    (pytorch/torchtitan torchtitan/components/loss.py, ChunkedCELoss). pieces: the loss alone, of all logits (`loss_of_pieces`).
    A quantized head is one of TransformerEngine's projections under MXFP8 (NVIDIA/Megatron-LM@d98e8a6
    megatron/core/extensions/transformer_engine.py, TELMHeadColumnParallelLinear).
    """
    hidden, size = model.hidden_sz, shard.itemsize
    columns = shard.vocab / shard.tp
    chunks = chunks_of_head(shard)
    quantized = shard.software.quantized_head and shard.software.precision == "mxfp8"
    recipe = shard.software.recipe if quantized else None
    more, operand = cast("head", x, shard.sequence_tokens * hidden, shard) if quantized else ([], Operand(x, x))
    back = backward_casts(shard, shard.tokens / chunks, columns, hidden) if quantized else Backward(0.0, 0.0)
    entered, operand = enter_tp("head", operand, hidden, shard, recipe)
    logits = Tensor("head.logits", shard.tokens * columns / chunks, size)
    weight = Param("head.weight", (shard.vocab, hidden), 0, vocab=True, shared=shared)
    copied = cast_weight("head", columns * hidden, shard)
    gemm = Gemm(
        "head.proj",
        (operand.read,),
        (logits,),
        (operand.kept, *(copy.name for copy in copied)),
        copied,
        (weight,),
        m=shard.tokens / chunks,
        n=columns,
        k=hidden,
        count=chunks,
        itemsize=size,
        recipe=recipe,
        cast_bytes=back.bytes,
        cast_kernels=back.kernels,
        keeps_columns=operand.columns,
    )
    return [*more, *entered, gemm, *loss_ops(shard, logits)]


def loss_ops(shard: Shard, logits: Tensor) -> list[Op]:
    """Cross entropy; with a split vocabulary three all-reduces of one fp32 value per token (max, target logit, sum).

    A trainer may gather the logits of all ranks first: each then holds all of them, and the loss needs no communication.
    """
    stays = shard.software.buffers.logits_stay
    if shard.split and shard.software.comm.gathered_logits:
        chunks = chunks_of_head(shard)
        parts = Tensor("head.logits.parts", shard.tp * logits.elements, logits.itemsize)
        whole = Tensor("head.logits.whole", parts.elements, logits.itemsize)
        moved = chunks * (parts.bytes + whole.bytes)
        torch = shard.software.family in EAGER_TORCH
        kept = stays or not torch  # torch's training loop lets them go
        back = chunks * 2.0 * logits.bytes if torch else moved  # DTensor's backward copies a rank's own part
        gather = Comm("head.concat", (logits.name,), (parts,), kind="all_gather", bytes=parts.bytes, count=chunks)
        cat = Move("head.cat", (parts.name,), (whole,), (), (), (), moved, back, chunks)
        return [gather, cat, *torch_loss(shard, whole, logits_kept=kept, split=False)]
    parallel = shard.software.kernels.vocab_parallel
    ops = [vocab_parallel_loss(shard, logits)] if parallel else torch_loss(shard, logits, logits_kept=stays)
    if shard.split:
        per_token = shard.tokens * FP32
        ops += [Comm(f"loss.{what}", kind="all_reduce", bytes=per_token) for what in ("max", "target", "sum")]
    return ops


def torch_loss(shard: Shard, logits: Tensor, *, logits_kept: bool = False, split: bool = True) -> list[Op]:
    """Cross entropy as torch runs it, kernel by kernel: upcast (composite, below fp32), log_softmax, nll_loss.

    Backward therefore holds three copies: log_softmax's output, its gradient, and that of its input (torch/nn/functional.py,
    cross_entropy; aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss). `logits_kept`: the trainer also keeps the logits.
    `split`: they are split where the vocabulary is, not gathered before.
    Over a split vocabulary log_softmax and its backward are written in Python, one kernel per operation and one copy more at each
    peak: the exponentials (torch/distributed/tensor/parallel/loss.py, _log_softmax, _nll_loss_and_log_softmax_backward). In a
    traced graph log_softmax's output is freed once it is exponentiated, before the sum with the gradient, and the logits once
    they are upcast; nothing else holds them.
    """
    ids = Tensor("loss.targets", shard.tokens, TOKEN_ID)
    chunks = chunks_of_head(shard)
    if shard.software.kernels.loss_impl == "compiled":
        return [compiled_loss(shard, logits, ids, chunks)]
    if shard.software.kernels.loss_impl == "pieces":
        return [
            loss_of_pieces(shard, logits, ids, logits_kept=logits_kept, split=shard.split and split and not logits_kept)
        ]
    if shard.software.kernels.loss_impl == "in_place":
        return in_place_loss(logits, ids, chunks)
    x, logits_bytes, ops = logits, 0.0, list[Op]()
    stay = (logits.name,) if logits_kept else ()
    traced = shard.software.kernels.loss_impl == "traced"
    if (traced or shard.software.kernels.loss_impl == "composite") and logits.itemsize < FP32:
        x = Tensor("loss.upcast", logits.elements, FP32)
        logits_bytes = 0.0 if traced else logits.bytes  # a training loop holds the logits until the loss is computed
        moved = chunks * (logits.bytes + x.bytes)
        ops.append(
            Move("loss.cast", (logits.name,), (x,), stay, (), (), moved, moved + kept_bytes(stay, logits), chunks)
        )
        stay = ()
    log_probs = Tensor("loss.log_probs", logits.elements, x.itemsize)
    kept, more, size = (log_probs.name, *stay), (log_probs,), chunks * x.bytes
    if shard.split and split and not logits_kept:
        softmax = Move("loss.log_softmax", (x.name,), more, kept, (), (), 8.0 * size, 7.0 * size, 6.0 * chunks)
        extra = 0.0 if traced else x.bytes
    else:
        softmax = Move("loss.log_softmax", (x.name,), more, kept, (), (), 2.0 * size, 3.0 * size, chunks)
        extra = 0.0
    ops.append(replace(softmax, forward_temp_bytes=logits_bytes + extra, backward_temp_bytes=extra))
    picked = shard.tokens * (TOKEN_ID + x.itemsize)
    nll = Move("loss.nll", kept[:1], (), (ids.name,), (ids,), (), picked, chunks * log_probs.bytes, chunks)
    return [*ops, nll]


def in_place_loss(logits: Tensor, ids: Tensor, chunks: float) -> list[Op]:
    """Unsloth's cross entropy, whose gradient takes the place of the logits that it reads.

    transformers 4.45 upcasts the logits and copies all but the last position of each sequence, which the kernel keeps; their
    gradient is copied into zeros of the whole length (models/llama/modeling_llama.py, LlamaForCausalLM.forward;
    foundation-model-stack/fms-acceleration@876e2ed fms_acceleration_foak/kernels/unsloth/cross_entropy_loss.py). The missing
    position is counted.
    """
    wide, shifted = Tensor("loss.upcast", logits.elements, FP32), Tensor("loss.shifted", logits.elements, FP32)
    cast, size = chunks * (logits.bytes + wide.bytes), chunks * wide.bytes
    return [
        Move("loss.cast", (logits.name,), (wide,), (), (), (), cast, cast, chunks),
        Move("loss.shift", (wide.name,), (shifted,), (), (), (), 2.0 * size, 3.0 * size, chunks),
        Move(
            "loss",
            (shifted.name,),
            (),
            (shifted.name, ids.name),
            (ids,),
            (),
            size,
            2.0 * size,
            chunks,
            backward_temp_bytes=-shifted.bytes,
        ),
    ]


def kept_bytes(kept: tuple[str, ...], logits: Tensor) -> Num:
    """Bytes of the logits where they are `kept` for backward."""
    return logits.bytes if kept else 0.0


def compiled_loss(shard: Shard, logits: Tensor, ids: Tensor, chunks: float) -> Op:
    """Cross entropy of upcast logits as inductor compiles it: they are read once, and once more to make their gradient.

    AOTAutograd keeps the logits in their own dtype, the targets, and of each token the maximum and the logarithm of the sum
    in fp32: the partitioner recomputes all that is element-wise (tests/truth/test_torch_compile.py).
    """
    rows = (Tensor("loss.max", shard.tokens / chunks, FP32), Tensor("loss.log_sum", shard.tokens / chunks, FP32))
    saves = (logits.name, ids.name, *(t.name for t in rows))
    moved = chunks * logits.bytes
    return Move("loss", (logits.name,), (), saves, (ids, *rows), (), moved, 2.0 * moved, chunks)


def vocab_parallel_loss(shard: Shard, logits: Tensor) -> Op:
    """Megatron's and TransformerEngine's cross entropy over a split vocabulary.

    The upcast logits become the softmax, and that the gradient, in place; a cast down follows. Compiled (native), the gradient is
    not made in place: it is a second fp32 tensor (megatron/core/fusions/fused_cross_entropy.py, calculate_gradients). Fused, the
    gradient takes the place of the logits in forward, and backward hands it on (TransformerEngine v2.9
    transformer_engine/pytorch/triton/cross_entropy.py): the copy that is kept is never a second tensor.
    """
    ids = Tensor("loss.targets", shard.tokens, TOKEN_ID)
    wide = shard.software.kernels.loss_impl != "fused"
    second = FP32 * logits.elements if shard.software.kernels.loss_impl == "native" else 0.0
    in_place = 0.0 if wide else logits.bytes
    kept = Tensor("loss.softmax", logits.elements, FP32 if wide else logits.itemsize)
    mask = Tensor("loss.mask", shard.tokens, BOOL)
    # forward: read logits, write the upcast, read and write the softmax; backward: read it, write fp32, write the downcast
    forward = logits.bytes + (3.0 * kept.bytes if wide else kept.bytes)
    backward = kept.bytes + logits.bytes + (2.0 * kept.bytes if wide else 0.0)
    return Move(
        "loss",
        (logits.name,),
        (),
        (kept.name, ids.name, mask.name),
        (kept, ids, mask),
        forward_bytes=forward,
        backward_bytes=backward,
        kernels=4.0,
        forward_temp_bytes=-in_place,
        backward_temp_bytes=second - in_place,
    )
