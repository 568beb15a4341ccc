"""The dense MLP as a list of ops: norm, up (and gate) projection, activation, down projection, residual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from steptime.model.ops import VECTORIZED, ByElement, Move, Op, Param, Role, Tensor
from steptime.model.quantize import Operand, backward_casts, cast, cast_norm, cast_per_product
from steptime.model.sublayers import Sublayer, add_branch, casts, enter_tp, leave_tp, linear, linear_params, norm_before

if TYPE_CHECKING:
    from steptime.model.model import Model
    from steptime.model.shard import Shard


class Words(NamedTuple):
    """Names of the ops of one MLP, and their role in the layer."""

    name: str
    role: Role
    act: Role
    """Role of its activation."""


MLP = Words("mlp", "mlp", "act")


def mlp_ops(model: Model, shard: Shard, x: str = "x2") -> list[Op]:
    """The MLP half of a block, which adds its output to `x` and leaves "y".

    It reads `x`; parallel to attention, the layer's input "x", through the norm in front of attention where that is shared
    (transformers modeling_gpt_neox.py, GPTNeoXLayer.forward; modeling_phi.py, PhiDecoderLayer.forward).
    """
    source = "x" if model.parallel_residual else x
    normed, n2 = ([], "attn.norm.out") if model.shared_norm else norm_before("mlp", source, model, shard)
    normed, operand = cast_norm(normed, n2, shard.sequence_tokens * model.hidden_sz, shard)
    inner, branch = feed_forward(model, shard, operand, MLP)
    return [*normed, *inner, *add_branch("mlp", x, branch, "y", model, shard)]


def feed_forward(model: Model, shard: Shard, operand: Operand, words: Words) -> Sublayer:
    """Enter the tensor-parallel region, up, activation, down, and leave it."""
    hidden, width = model.hidden_sz, model.inter_sz / shard.tp
    entered, operand = enter_tp(words.name, operand, hidden, shard, shard.software.recipe, words.role)
    late, operand = cast_per_product(f"{words.name}.up", operand, shard.tokens * hidden, shard, words.role)
    inner, act = glu(model, shard, operand, words) if model.glu else plain(model, shard, operand, words)
    quantized, operand = cast(f"{words.name}.act", act, shard.tokens * width, shard, role=words.act)
    weight = Param(f"{words.name}.down.weight", (hidden, model.inter_sz), 1)
    bias = (Param(f"{words.name}.down.bias", (hidden,)),) if model.bias else ()
    back, out = backward_casts(shard, shard.tokens, hidden, width, reduced=True), f"{words.name}.down.out"
    down = linear(f"{words.name}.down", operand, out, width, hidden, shard, (weight, *bias), back, words.role)
    left, branch = leave_tp(words.name, out, hidden, shard, words.role)
    return [*entered, *late, *inner, *quantized, down, *left], branch


def glu(model: Model, shard: Shard, x: Operand, words: Words) -> Sublayer:
    """act(gate) * up (Shazeer 2020)."""
    hidden, width, at, role = model.hidden_sz, model.inter_sz / shard.tp, words.name, words.role
    gate, up = f"{at}.gate", f"{at}.up"
    if shard.software.kernels.fused_projections is True:
        gate = up = f"{at}.gate_up"
        params = linear_params(gate, (2 * model.inter_sz, hidden), model.bias)
        back = casts(shard, 2.0 * width, hidden)
        ops: list[Op] = [linear(gate, x, gate, hidden, 2.0 * width, shard, params, back, role)]
    else:
        shape = (model.inter_sz, hidden)
        w_gate, w_up = linear_params(gate, shape, model.bias), linear_params(up, shape, model.bias)
        ops = [
            linear(f"{at}.gate_proj", x, gate, hidden, width, shard, w_gate, casts(shard, width, hidden), role),
            linear(f"{at}.up_proj", x, up, hidden, width, shard, w_up, casts(shard, width, hidden), role),
        ]
    out = Tensor(f"{at}.act.out", shard.tokens * width, shard.itemsize)
    if shard.software.kernels.activation_impl == "fused":
        both = tuple(dict.fromkeys((gate, up)))
        return [*ops, Move(f"{at}.act", both, (out,), both, role=words.act)], out.name
    return [*ops, *gated(model, shard, gate, up, out, words)], out.name


def gated(model: Model, shard: Shard, gate: str, up: str, out: Tensor, words: Words) -> list[Op]:
    """act(gate) * up kernel by kernel: an activation (`activate`), and a product that keeps act(gate) and up.

    Fused it is one kernel that keeps gate and up (Megatron's bias_swiglu, megatron/core/fusions/fused_bias_swiglu.py).
    """
    clamps: list[Op] = []
    if model.swiglu_limit is not None:
        clamps, gate, up = clamped(gate, up, out, words)
    ops, activated = activate(model, shard, gate, out._replace(name=f"{words.name}.act.gate"), words)
    ops = [*clamps, *ops]
    if shard.software.kernels.fused_projections is True:
        # megatron/core/transformer/mlp.py, glu: up + glu_linear_offset is a new tensor even where the offset is 0
        shifted = out._replace(name=f"{words.name}.act.up")
        ops.append(Move(f"{words.name}.act.offset", (up,), (shifted,), forward_bytes=2.0 * out.bytes, role=words.act))
        up = shifted.name
    return [*ops, Move(f"{words.name}.act.mul", (activated, up), (out,), (activated, up), role=words.act)]


def clamped(gate: str, up: str, out: Tensor, words: Words) -> tuple[list[Op], str, str]:
    """Gate and up clamped, a kernel each that keeps its input (megatron/core/transformer/moe/experts.py, glu).

    Backward compares the input with each limit, which makes masks of one byte, joins the masks of two limits, and chooses the
    gradient or zero (torch/csrc/autograd/FunctionsManual.cpp, clamp_backward). Halves of one tensor are read row by row.
    """
    halves, size = gate == up, out.itemsize
    ops: list[Op] = []
    for name, x, limits in ((f"{words.name}.act.clamp_gate", gate, 1.0), (f"{words.name}.act.clamp_up", up, 2.0)):
        compared, joined, chosen = limits * (size + 1.0), (limits - 1.0) * 3.0, 1.0 + 2.0 * size
        slow = ByElement(out.elements, 2.0 * out.bytes) if halves else VECTORIZED
        slow_back = (
            ByElement((limits + 1.0) * out.elements, (compared + chosen) * out.elements) if halves else VECTORIZED
        )
        op = Move(
            name,
            (x,),
            (out._replace(name=f"{name}.out"),),
            (x,),
            forward_bytes=2.0 * out.bytes,
            backward_bytes=(compared + joined + chosen) * out.elements,
            forward_by_element=slow,
            backward_by_element=slow_back,
            kernels=0.5 + limits,  # one forward, two for each limit backward
            role=words.act,
        )
        ops.append(op)
    first, second = (op.outputs[0].name for op in ops)
    return ops, first, second


def plain(model: Model, shard: Shard, x: Operand, words: Words) -> Sublayer:
    """act(up)."""
    width, at = model.inter_sz / shard.tp, words.name
    read_from = f"{at}.up"
    params = linear_params(read_from, (model.inter_sz, model.hidden_sz), model.bias)
    back = casts(shard, width, model.hidden_sz)
    up = linear(f"{at}.up_proj", x, read_from, model.hidden_sz, width, shard, params, back, words.role)
    out = Tensor(f"{at}.act.out", shard.tokens * width, shard.itemsize)
    if shard.software.kernels.activation_impl == "fused" and model.activation == "relu2":
        # megatron/core/activations.py, squared_relu under torch.compile: one kernel, which keeps its input (seen with torch 2.13)
        return [up, Move(f"{at}.act", (read_from,), (out,), (read_from,), role=words.act)], out.name
    activation, activated = activate(model, shard, read_from, out, words)
    return [up, *activation], activated


def activate(model: Model, shard: Shard, x: str, out: Tensor, words: Words) -> Sublayer:
    """The activation of `x`, or of the half of it with the size of `out`, kernel by kernel.

    GELU and SiLU keep their input, ReLU its output. Squared ReLU is two kernels, pow(relu(x), 2) (megatron/core/activations.py,
    squared_relu; transformers activations.py, ReLUSquaredActivation): the first keeps its output, which is all that the second
    keeps. `x` lives until both are done; the second's gradient is grad * (2 * relu(x)^1), a kernel and a tensor for each of the
    three (torch/csrc/autograd/FunctionsManual.cpp, pow_backward).
    """
    size, squared = out.bytes, model.activation == "relu2"
    first = out._replace(name=f"{words.name}.act.relu") if squared else out
    kept, role = first.name if model.activation in {"relu", "relu2"} else x, words.act
    ops: list[Op] = [Move(f"{words.name}.act", (x,), (first,), (kept,), (), (), 2.0 * size, 3.0 * size, role=role)]
    if squared:
        # gate and up are parts of x, which is read later anyway
        kept_bytes = 0.0 if model.glu and shard.software.kernels.fused_projections is True else size
        back: dict[str, Any] = {"backward_bytes": 7.0 * size, "backward_temp_bytes": 2.0 * size, "role": role}
        # one kernel forward and three backward: two on average
        two: dict[str, Any] = {"kernels": 2.0, "forward_temp_bytes": kept_bytes}
        ops.append(Move(f"{words.name}.act.square", (first.name,), (out,), (first.name,), **two, **back))
    return ops, out.name
