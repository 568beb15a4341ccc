"""A Mamba-2 layer as a list of ops: norm, input projection, convolution and scan, gated norm, output projection, residual.

megatron/core/ssm/mamba_layer.py and mamba_mixer.py (0.16.1), whose scan is mamba_ssm's mamba_split_conv1d_scan_combined
(mamba_ssm/ops/triton/ssd_combined.py, state-spaces/mamba@e9594ce). Letters: S tokens, d inner width, H heads, P head_dim,
G groups, N state, C chunk; widths on this device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from steptime.base.num import maximum, same
from steptime.model.ops import ByElement, Comm, Move, Op, Param, Tensor
from steptime.model.quantize import backward_casts, cast, cast_norm
from steptime.model.scans import Scan
from steptime.model.sublayers import FP32, casts, dropout, enter_tp, leave_tp, linear, norm, residual

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import Mamba, Model
    from steptime.model.shard import Shard


class Widths(NamedTuple):
    """One device's share of a Mamba-2 mixer."""

    mamba: Mamba
    inner: Num
    """d: heads * head_dim."""
    heads: Num
    groups: Num
    tokens: Num

    @property
    def convolved(self) -> Num:
        """Channels of the causal convolution: x, B and C."""
        return self.inner + 2.0 * self.groups * self.mamba.state_dim

    @property
    def projected(self) -> Num:
        """Outputs of the input projection: z, x, B, C and dt."""
        return self.inner + self.convolved + self.heads

    @property
    def chunk_states(self) -> Num:
        """Elements of the states at the ends of all chunks: S/C * d * N."""
        return self.tokens / self.mamba.chunk_sz * self.inner * self.mamba.state_dim


def widths(model: Model, shard: Shard) -> Widths:
    """The share of one device.

    Raises:
        ValueError: the model has no Mamba layers.
    """
    mamba = model.mamba
    if mamba is None:
        raise ValueError("model.mamba: not set, so there are no Mamba layers")
    heads = mamba.heads(model.hidden_sz) / shard.tp
    return Widths(mamba, heads * mamba.head_dim, heads, mamba.n_groups / shard.tp, shard.tokens)


def mamba_ops(model: Model, shard: Shard) -> list[Op]:
    """One Mamba-2 layer, from tensor "x" to "y"."""
    w, hidden, rows = widths(model, shard), model.hidden_sz, shard.sequence_tokens
    whole_inner = w.mamba.heads(hidden) * w.mamba.head_dim
    normed, n1 = norm("mamba.norm", "x", rows, hidden, model, shard)
    normed, operand = cast_norm(normed, n1, rows * hidden, shard)
    entered, operand = enter_tp("mamba", operand, hidden, shard, shard.software.recipe)
    outputs = 2 * (whole_inner + w.mamba.n_groups * w.mamba.state_dim) + w.mamba.heads(hidden)
    weight = (Param("mamba.in_proj.weight", (outputs, hidden), 0),)
    project = linear(
        "mamba.in_proj", operand, "mamba.zx", hidden, w.projected, shard, weight, casts(shard, w.projected, hidden)
    )
    moved, zx = (
        exchange("mamba.to_heads", "mamba.zx", w.projected, 5.0, shard) if shard.context_split else ([], "mamba.zx")
    )
    scanned, y = scan(w, shard, zx, whole_inner)
    returned, y = exchange("mamba.to_tokens", y, w.inner, 1.0, shard) if shard.context_split else ([], y)
    gated, y = gated_norm(w, shard, y, whole_inner)
    quantized, operand = cast("mamba.gated", y, w.tokens * w.inner, shard)
    back = backward_casts(shard, shard.tokens, hidden, w.inner, reduced=True)
    weight = (Param("mamba.out_proj.weight", (hidden, whole_inner), 1),)
    out = linear("mamba.out_proj", operand, "mamba.out", w.inner, hidden, shard, weight, back)
    left, branch = leave_tp("mamba", "mamba.out", hidden, shard)
    dropped, branch = dropout("mamba.dropout", branch, rows * hidden, model, shard)
    last = residual("mamba.residual", "x", branch, "y", rows * hidden, shard)
    return [*normed, *entered, project, *moved, *scanned, *returned, *gated, *quantized, out, *left, *dropped, last]


def exchange(name: str, x: str, width: Num, calls: float, shard: Shard) -> tuple[list[Op], str]:
    """All-to-all from tokens to heads, or back, over context-parallel ranks, and a copy that reorders tokens.

    megatron/core/ssm/mamba_context_parallel.py, pre_conv_ssm (z, x, B, C and dt one by one) and post_conv_ssm.
    """
    exchanged = Tensor(f"{name}.out", shard.tokens * width, shard.itemsize)
    ordered = exchanged._replace(name=f"{name}.ordered")
    bytes_ = exchanged.bytes / calls
    swap = Comm(
        name, (x,), (exchanged,), kind="all_to_all", backward="all_to_all", axis="cp", bytes=bytes_, count=calls
    )
    return [swap, Move(f"{name}.order", (exchanged.name,), (ordered,))], ordered.name


def scan(w: Widths, shard: Shard, x: str, whole_inner: int) -> tuple[list[Op], str]:
    """Convolution and scan as one autograd function, with the copies around it that move the batch first and back.

    It keeps zxBCdt, its output before the gate, and per head exp(A_log), A and dt_bias in fp32; convolution, states and decays
    are recomputed in backward (MambaSplitConv1dScanCombinedFn).
    """
    size, mamba, heads = shard.itemsize, w.mamba, int(whole_inner // w.mamba.head_dim)
    channels = whole_inner + 2 * mamba.n_groups * mamba.state_dim
    kernel = Param("mamba.conv.weight", (channels, 1, mamba.conv_width), 0)
    decay = (Param(f"mamba.{name}", (heads,), 0) for name in ("dt_bias", "A_log", "D"))
    params = (kernel, Param("mamba.conv.bias", (channels,), 0), *decay)
    together = same(shard.batch == 1)  # a single sequence is already in the right order
    ops: list[Op] = []
    if not together:
        exchanged = Tensor("mamba.zx.batch_first", w.tokens * w.projected, size)
        ops.append(reordered("mamba.batch_first", x, exchanged))
        x = exchanged.name
    ungated = Tensor("mamba.scan.ungated", w.tokens * w.inner, size)
    decays = Tensor("mamba.scan.decays", 3.0 * w.heads, FP32)
    y = Tensor("mamba.scan.out", w.tokens * w.inner, size)
    forward_temp, backward_temp = temporaries(w, size)
    ops.append(
        Scan(
            "mamba.scan",
            (x,),
            (y,),
            (x, ungated.name, decays.name),
            (ungated, decays),
            params,
            tokens=w.tokens,
            n_heads=w.heads,
            n_groups=w.groups,
            head_dim=mamba.head_dim,
            state_dim=mamba.state_dim,
            chunk_sz=mamba.chunk_sz,
            itemsize=size,
            forward_temp_bytes=forward_temp,
            backward_temp_bytes=backward_temp,
        )
    )
    if together:
        return ops, y.name
    back = y._replace(name="mamba.scan.sequence_first")
    return [*ops, reordered("mamba.sequence_first", y.name, back)], back.name


def reordered(name: str, x: str, out: Tensor) -> Move:
    """A transposed tensor made contiguous, forward and backward, which torch copies element by element (mamba_mixer.py)."""
    slow = ByElement(out.elements, 2.0 * out.bytes)
    return Move(name, (x,), (out,), forward_by_element=slow, backward_by_element=slow)


def temporaries(w: Widths, size: float) -> tuple[Num, Num]:
    """Bytes held inside the scan besides its inputs and outputs, forward and backward.

    Forward (_mamba_chunk_scan_combined_fwd): the convolved channels, dt and its sums in fp32, and first the states in fp32 with
    those that are passed on, before the output is allocated, then the passed states and C B^T in fp32.
    Backward (_mamba_chunk_scan_combined_bwd): convolved channels and their gradient, dt once more, C B^T, the gradient before the
    gate, and in _state_passing_bwd states and their gradients, each in fp32 and in the compute dtype.
    """
    s, channels, states = w.tokens, w.convolved * w.tokens * size, w.chunk_states
    steps = 2.0 * FP32 * w.heads * s
    products = FP32 * s * w.mamba.chunk_sz * w.groups
    passing = channels + steps + (FP32 + size) * states - 2.0 * size * s * w.inner
    forward = maximum(passing, channels + steps + size * states + products)
    backward = 2.0 * channels + steps + size * w.heads * s + products + size * s * w.inner
    return forward, backward + 2.0 * (FP32 + size) * states


def gated_norm(w: Widths, shard: Shard, x: str, whole_inner: int) -> tuple[list[Op], str]:
    """RMSNorm of the gated output by groups (ExtendedRMSNorm): keeps its input and one fp32 number per token and group."""
    out = Tensor("mamba.gated_norm.out", w.tokens * w.inner, shard.itemsize)
    rstd = Tensor("mamba.gated_norm.rstd", w.tokens * w.groups, FP32)
    weight = (Param("mamba.gated_norm.weight", (whole_inner,), 0),)
    return [Move("mamba.gated_norm", (x,), (out,), (x, rstd.name), (rstd,), weight)], out.name
