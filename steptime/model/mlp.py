"""The dense MLP as a list of ops: norm, up (and gate) projection, activation, down projection, residual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.model.attention import casts, linear_params
from steptime.model.ops import Move, Op, Param, Tensor
from steptime.model.quantize import Operand, backward_casts, cast, cast_norm
from steptime.model.sublayers import Sublayer, dropout, enter_tp, leave_tp, linear, norm, residual

if TYPE_CHECKING:
    from steptime.model.model import Model
    from steptime.model.shard import Shard


def mlp_ops(model: Model, shard: Shard) -> list[Op]:
    """The MLP half of a block, from "x2" to "y"."""
    rows, hidden = shard.sequence_tokens, model.hidden_sz
    normed, n2 = norm("mlp.norm", "x2", rows, hidden, model, shard)
    normed, operand = cast_norm(normed, n2, rows * hidden, shard)
    entered, operand = enter_tp("mlp", operand, hidden, shard, shard.software.recipe, "mlp")
    inner, act = glu(model, shard, operand) if model.glu else plain(model, shard, operand)
    width = model.inter_sz / shard.tp
    quantised, operand = cast("mlp.act", act, shard.tokens * width, shard, role="act")
    weight = Param("mlp.down.weight", (hidden, model.inter_sz), 1)
    bias = (Param("mlp.down.bias", (hidden,)),) if model.bias else ()
    back = backward_casts(shard, shard.tokens, hidden, width, reduced=True)
    down = linear("mlp.down", operand, "mlp.down.out", width, hidden, shard, (weight, *bias), back, "mlp")
    left, branch = leave_tp("mlp", "mlp.down.out", hidden, shard, "mlp")
    dropped, branch = dropout("mlp.dropout", branch, rows * hidden, model, shard)
    last = residual("mlp.residual", "x2", branch, "y", rows * hidden, shard)
    return [*normed, *entered, *inner, *quantised, down, *left, *dropped, last]


def glu(model: Model, shard: Shard, x: Operand) -> Sublayer:
    """act(gate) * up (Shazeer 2020).

    fused: one kernel that keeps gate and up (Megatron's bias_swiglu, megatron/core/fusions/fused_bias_swiglu.py).
    composite: an activation (`activate`) and a product that keeps act(gate) and up.
    """
    hidden, width, size = model.hidden_sz, model.inter_sz / shard.tp, shard.itemsize
    elements = shard.tokens * width
    gate, up = "mlp.gate", "mlp.up"
    if shard.software.kernels.fused_projections:
        gate = up = "mlp.gate_up"
        params = linear_params("mlp.gate_up", (2 * model.inter_sz, hidden), model.bias)
        back = casts(shard, 2.0 * width, hidden)
        ops: list[Op] = [linear("mlp.gate_up", x, gate, hidden, 2.0 * width, shard, params, back, "mlp")]
    else:
        shape = (model.inter_sz, hidden)
        w_gate, w_up = linear_params("mlp.gate", shape, model.bias), linear_params("mlp.up", shape, model.bias)
        ops = [
            linear("mlp.gate_proj", x, gate, hidden, width, shard, w_gate, casts(shard, width, hidden), "mlp"),
            linear("mlp.up_proj", x, up, hidden, width, shard, w_up, casts(shard, width, hidden), "mlp"),
        ]
    both = tuple(dict.fromkeys((gate, up)))
    out = Tensor("mlp.act.out", elements, size)
    if shard.software.kernels.activation_impl == "fused":
        return [*ops, Move("mlp.act", both, (out,), both, role="act")], out.name
    made, activated = activate(model, shard, gate, Tensor("mlp.act.gate", elements, size))
    ops += made
    if shard.software.kernels.fused_projections:
        # megatron/core/transformer/mlp.py, glu: up + glu_linear_offset is a new tensor even where the offset is 0
        shifted = Tensor("mlp.act.up", elements, size)
        ops.append(Move("mlp.act.offset", (up,), (shifted,), forward_bytes=2.0 * out.bytes, role="act"))
        up = "mlp.act.up"
    return [*ops, Move("mlp.act.mul", (activated, up), (out,), (activated, up), role="act")], out.name


def plain(model: Model, shard: Shard, x: Operand) -> Sublayer:
    """act(up)."""
    width = model.inter_sz / shard.tp
    params = linear_params("mlp.up", (model.inter_sz, model.hidden_sz), model.bias)
    up = linear(
        "mlp.up_proj", x, "mlp.up", model.hidden_sz, width, shard, params, casts(shard, width, model.hidden_sz), "mlp"
    )
    out = Tensor("mlp.act.out", shard.tokens * width, shard.itemsize)
    if shard.software.kernels.activation_impl == "fused" and model.activation == "relu2":
        # megatron/core/activations.py, squared_relu under torch.compile: one kernel, which keeps its input (seen with torch 2.13)
        return [up, Move("mlp.act", ("mlp.up",), (out,), ("mlp.up",), role="act")], out.name
    made, activated = activate(model, shard, "mlp.up", out)
    return [up, *made], activated


def activate(model: Model, shard: Shard, x: str, out: Tensor) -> Sublayer:
    """The activation of `x`, or of the half of it that is as large as `out`, kernels.

    GELU and SiLU keep their input, ReLU its output. Squared ReLU is two kernels, pow(relu(x), 2) (megatron/core/activations.py,
    squared_relu; transformers activations.py, ReLUSquaredActivation): the first keeps its output, which is all that the second
    keeps. `x` lives until both are done; the second's gradient is grad * (2 * relu(x)^1), a kernel and a tensor for each of the
    three (torch/csrc/autograd/FunctionsManual.cpp, pow_backward).
    """
    size, squared = out.bytes, model.activation == "relu2"
    first = out._replace(name="mlp.act.relu") if squared else out
    kept = first.name if model.activation in {"relu", "relu2"} else x
    ops: list[Op] = [Move("mlp.act", (x,), (first,), (kept,), (), (), 2.0 * size, 3.0 * size, role="act")]
    if squared:
        held = (
            0.0 if model.glu and shard.software.kernels.fused_projections else size
        )  # there x holds up, which is read later
        back: dict[str, Any] = {"backward_bytes": 7.0 * size, "backward_temp_bytes": 2.0 * size}
        # one kernel forward and three backward: two in the mean
        ops.append(
            Move(
                "mlp.act.square",
                (first.name,),
                (out,),
                (first.name,),
                kernels=2.0,
                forward_temp_bytes=held,
                role="act",
                **back,
            )
        )
    return ops, out.name
