"""Squared ReLU, by hand: what it keeps for backward, its kernels and the bytes they move."""

from __future__ import annotations

import pytest

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.model.mlp import mlp_ops
from steptime.model.model import Model
from steptime.model.ops import Tensor, tensor_bytes
from steptime.model.presets import load_model
from steptime.model.segments import kept_names
from steptime.model.shard import Shard
from steptime.software.performance import load_software


def shard_of(activation_impl: str) -> Shard:
    """One sequence of 4,096 tokens on one of eight sequence-parallel ranks of Megatron-Core."""
    software = load_software("megatron-core").replace(activation_impl=activation_impl)
    return Shard(1.0, 4096.0, 4096.0, 8.0, sp=True, vocab=256000.0, software=software)


def kept_by_mlp(model: Model, shard: Shard) -> float:
    """Bytes that the MLP half of a block keeps for backward, its input included."""
    ops = mlp_ops(model, shard)
    sizes = tensor_bytes(ops, Tensor("x2", shard.sequence_tokens * model.hidden_sz, shard.itemsize))
    return sum(sizes[name] for name in kept_names(ops, []))


@pytest.mark.parametrize("activation_impl", ["fused", "composite"])
def test_a_squared_relu_keeps_two_tensors_and_a_relu_one(activation_impl):
    """torch keeps relu(x), or compiled x, for the square, and its output for the projection after it.

    Nemotron-4-340B at tp 8, one sequence of 4,096 tokens in bf16: each is 4096 x 73728/8 x 2 = 75,497,472 B. Sequence-parallel
    Megatron keeps beside them, of 4096/8 = 512 tokens: the norm's input and output, 2 x 512 x 18432 x 2 = 37,748,736 B, and
    LayerNorm's mean and reciprocal deviation, 2 x 512 x 4 = 4,096 B. With a ReLU, which keeps its output alone, one less.
    """
    model, shard = load_model("nemotron4-340b"), shard_of(activation_impl)
    assert model.activation == "relu2"
    assert kept_by_mlp(model, shard) == 2 * 75_497_472 + 37_748_736 + 4_096
    assert kept_by_mlp(model.model_copy(update={"activation": "relu"}), shard) == 75_497_472 + 37_748_736 + 4_096


def test_nemotron_holds_its_squared_relus_on_the_first_stage():
    """Of 72 MiB each (above), one layer a chunk: what Nemotron-4-340B at tp 8, pp 12, vpp 8 holds more than with a ReLU.

    Megatron's first stage runs 2 (12 - 1) + (8 - 1) 12 = 106 forwards ahead and one more before its first backward: 107 x 72
    MiB = 7,704 MiB = 7.52 GiB.
    """
    sections = {
        "parallelism": {"tp": 8, "pp": 12, "dp": 1, "vpp": 8, "sp": True},
        "data": {"gbs": 48, "seqlen": 4096, "microbatch_sz": 1},
        "hardware": "dgx-h100",
    }
    squared, plain = (
        estimate(Job(model={"preset": "nemotron4-340b", "activation": word}, **sections)).memory.stages[0]
        for word in ("relu2", "relu")
    )
    assert squared.activations_bytes - plain.activations_bytes == 107 * 72 * 2**20


def test_kernels_and_bytes_of_a_squared_relu():
    """E = 4096 x 73728/8 x 2 = 75,497,472 B of bf16.

    Compiled: read x, write the output (2 E); backward read the gradient and x, write (3 E); one kernel each.
    Eager: relu 2 E and pow 2 E, two kernels. Backward of pow(r, 2) is grad * (2 * r^1): a copy of r (2 E), times 2 (2 E), times
    the gradient (3 E), with two tensors beside the result; then relu's, which reads the gradient and r and writes (3 E).
    """
    model, size = load_model("nemotron4-340b"), 75_497_472.0
    compiled = [op for op in mlp_ops(model, shard_of("fused")) if op.name.startswith("mlp.act")]
    assert [(op.name, op.forward_bytes, op.kernels) for op in compiled] == [("mlp.act", None, 1.0)]
    assert (compiled[0].inputs, compiled[0].saves) == (("mlp.up",), ("mlp.up",))
    relu, square = (op for op in mlp_ops(model, shard_of("composite")) if op.name.startswith("mlp.act"))
    assert (relu.forward_bytes, relu.backward_bytes, relu.kernels) == (2 * size, 3 * size, 1.0)
    assert (square.forward_bytes, square.backward_bytes) == (None, 7 * size)
    assert (square.kernels, square.backward_temp_bytes) == (2.0, 2 * size)  # 1 forward and 3 backward
