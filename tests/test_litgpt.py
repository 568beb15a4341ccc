"""litgpt under thunder's benchmark, and torch's autocast: what layers keep, by hand, and the words of rows."""

import pytest
from jobs import job
from own_rows import own

from steptime import estimate
from steptime.base.config import ConfigError
from steptime.fsdp.of_job import reduced_in
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.job.mesh import Fsdp
from steptime.memory.part_memories import PartMemories
from steptime.validation import row_native
from steptime.validation.row_plan import to_config

ONE = {"n_gpus": 1, "tp": 1, "pp": 1, "recompute": "none"}
LITGPT = {"framework": "litgpt benchmark_litgpt.py", "gpu": "H100-80GB-SXM", "zero_or_fsdp": "fsdp2 zero2"}


@pytest.mark.parametrize(
    ("cells", "software", "kernel"),
    [
        ({"overlap_notes": "compile=on (inductor)", "note": "container pjnl-20240814"}, "litgpt", "best"),
        ({"overlap_notes": "compile=on (inductor)", "note": "pjnl-20241209"}, "litgpt", None),
        ({"overlap_notes": "compile=on (thunder inductor_cat_cudnn as dynamo backend)"}, "litgpt", "best"),
        ({"overlap_notes": "compile=on (thunder inductor_cat as dynamo backend)"}, "litgpt", None),
        ({"overlap_notes": "compile=thunder inductor_cat_cudnn (thunder.distributed fsdp)"}, "fsdp2", None),
        (ONE | {"overlap_notes": "compile=on (inductor)", "zero_or_fsdp": "none (1 GPU)"}, "litgpt-ddp", None),
    ],
)
def test_litgpt_with_its_kernels(cells, software, kernel):
    """What is compiled leaves the loss alone; torch 2.5, not yet or no more in other containers, takes cuDNN's attention."""
    found = to_config(own(**LITGPT | {"pp": "1"} | cells)).config["performance"]
    assert (found["software"], found.get("attention_kernel")) == (software, kernel)
    assert found.get("compile", "blocks") == "blocks"


def layer(plan):
    """What a layer of a plan keeps."""
    assembly = Assembly(plan)
    return PartMemories(assembly).plain[assembly.kinds[0]]


def test_what_litgpt_keeps_of_a_layer():
    """Of a token of h 64 and inner 176 in bf16: 2 norms' inputs and outputs, q, k, the product of 3 h, attention's output, the
    MLP's 3 x 176; cuDNN's output is copied, h more. Statistics: 2 of norms, one of each of 4 heads, in fp32."""
    shape = {"hidden_sz": 64, "inter_sz": 176, "n_q_heads": 4, "vocab_sz": 128, "n_layers": 1}
    h, inner, statistics = 64, 176, 4 * (2 + 4)
    for backend, tensors in (("direct", 4 + 2 + 3 + 1), ("cudnn", 4 + 2 + 3 + 1 + 1)):
        performance = {"software": "litgpt-ddp", "compile": "blocks", "attention_backend": backend}
        plan = job(model=shape, performance=performance, dp=1, gbs=1, seqlen=16)
        assert layer(plan).saved == 16 * (2 * (tensors * h + 3 * inner) + statistics)


def test_autocast_keeps_copies_of_fp32_weights():
    """Of a layer of 8 matrices with 4 h^2 + 3 h i = 4 * 64^2 + 3 * 64 * 176 elements, 2 bytes each."""
    shape = {"hidden_sz": 64, "inter_sz": 176, "n_q_heads": 4, "vocab_sz": 128, "n_layers": 1}
    saved = []
    for dtype in ("fp32", "bf16"):
        plan = job(model=shape, performance={"software": "torch", "param_dtype": dtype}, dp=1, gbs=1, seqlen=16)
        saved.append(layer(plan).saved)
    assert saved[0] - saved[1] == 2 * (4 * 64**2 + 3 * 64 * 176)


@pytest.mark.parametrize("options", [{}, {"version": 1, "reshard_after_forward": False}])
def test_modules_are_wrapped_one_by_one_under_the_first_fsdp_alone(options):
    with pytest.raises(ConfigError, match=r"^parallelism\.fsdp\.wrap: module is modeled for version 1"):
        Fsdp(wrap="module", **options)


@pytest.mark.parametrize(("said", "wrapped"), [("fsdp1 zero3", {"wrap": "module"}), ("fsdp1 zero2", {})])
def test_thunders_benchmark_wraps_every_module(said, wrapped):
    """Under ZeRO 2 nothing is freed after forward, so it makes no difference."""
    assert row_native.by_module(own(framework="litgpt benchmark_litgpt.py"), said) == wrapped


@pytest.mark.parametrize(
    ("cells", "dtype"),
    [
        ({}, "bf16"),
        ({"zero_or_fsdp": "fsdp1 zero2"}, "bf16"),
        ({"overlap_notes": "fp32 reduce"}, "fp32"),
        ({"framework": "torchtitan", "precision": "bf16"}, "fp32"),
    ],
)
def test_litgpt_reduces_gradients_in_bf16(cells, dtype):
    """FSDP2's policy says bf16 for both, FSDP 1 has bf16 parameters and no policy; torchtitan's default is fp32."""
    assert reduced_in(Job(**to_config(own(**LITGPT | {"pp": "1"} | cells)).config)) == dtype


def test_bytes_of_a_reduced_block_by_hand():
    """Llama-2 7B's block: 4 * 4,096^2 + 3 * 4,096 * 11,008 + 2 * 4,096 = 202,383,360 parameters of 2 bytes."""
    shape = {"hidden_sz": 4096, "inter_sz": 11008, "n_q_heads": 32, "vocab_sz": 32000, "n_layers": 2}
    fsdp = {"reduce_dtype": "bf16", "reshard_after_forward": False}
    plan = job(shape, software="litgpt", fsdp=fsdp, dp=8, gbs=8, seqlen=4096)
    rows = {row.name: row for row in estimate(plan).collectives}
    assert rows["block gradients"].bytes == 2 * 202_383_360
    assert not plan.software.states.clip_grad
