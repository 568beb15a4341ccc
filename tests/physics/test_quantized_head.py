"""Output heads in mxfp8: 8 tokens of 128 values to 1,024 logits."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.ops import Gemm, Move


def head(*, quantized: bool, precision: str = "mxfp8", **model):
    """Ops of the head."""
    said = job(
        on=Machine.load("dgx-b200"), model=model, performance={"precision": precision, "quantized_head": quantized}
    )
    return Assembly(said).head.ops


def test_casts_of_a_quantized_head():
    """A byte and a 32nd per element: the input is read once in bf16 and written by rows and by columns, 1,024 * (2 + 2 * 33/32)
    bytes; so is the gradient of the logits, 8,192 elements. Both copies of the input take the place of the bf16 one."""
    ops = head(quantized=True)
    [cast] = [op for op in ops if op.name == "head.cast"]
    [product] = [op for op in ops if isinstance(op, Gemm)]
    assert isinstance(cast, Move)
    assert cast.forward_bytes == 1_024 * (2 + 2 * 33 / 32)
    assert product.recipe is not None
    assert (product.recipe.name, product.cast_bytes) == ("mxfp8", 8_192 * (2 + 2 * 33 / 32))
    assert product.inputs + product.saves == ("head.norm.out.rows", "head.norm.out.columns")


@pytest.mark.parametrize(("quantized", "precision"), [(False, "mxfp8"), (True, "fp8_current"), (True, "bf16")])
def test_heads_stay_in_bf16(quantized, precision):
    """Unless it is said, and with other recipes (megatron/core/fp8_utils.py, is_mxfp8_output_proj_active)."""
    [product] = [op for op in head(quantized=quantized, precision=precision) if isinstance(op, Gemm)]
    assert product.recipe is None


def test_heads_of_multi_token_prediction():
    """They are the same module."""
    products = [op for op in head(quantized=True, mtp=1) if isinstance(op, Gemm) and op.name.endswith("head.proj")]
    assert [op.recipe.name for op in products] == ["mxfp8", "mxfp8"]
