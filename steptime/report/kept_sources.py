"""Why an op keeps tensors for backward: the framework's code that saves them, or the setting that decides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from steptime.model.ops import Attention, Gemm, Move, Op
from steptime.model.scans import Chunked, Scan
from steptime.report.constants import setting_source

if TYPE_CHECKING:
    from steptime.job.job import Job

TORCH = "torch tools/autograd/derivatives.yaml: tensors read by the backward formula of the op"


class Keeper(NamedTuple):
    """What keeps tensors, in words; the profile's setting that decides it, or the code of Megatron and of torch."""

    label: str
    shows: Callable[[Op], bool]
    setting: str = ""
    megatron: str = ""
    torch: str = TORCH


def _is(*kinds: type) -> Callable[[Op], bool]:
    return lambda op: isinstance(op, kinds)


def _starts(word: str) -> Callable[[Op], bool]:
    return lambda op: op.name.startswith(word)


KEEPERS = (
    Keeper("loss", _starts("loss"), setting="loss_impl"),
    Keeper(
        "embedding", _starts("embedding"), megatron="core tensor_parallel/layers.py, VocabParallelEmbedding.forward"
    ),
    Keeper("core attention", _is(Attention), setting="attention_impl"),
    Keeper("dropout", lambda op: isinstance(op, Move) and op.draws_mask, setting="dropout_mask_bytes"),
    Keeper("norms", lambda op: op.name.endswith("norm"), setting="norm_impl"),
    Keeper("activation functions", lambda op: ".act" in op.name, setting="activation_impl"),
    Keeper("rotary embedding", lambda op: ".rope" in op.name, setting="rope_impl"),
    Keeper(
        "router, dispatch and combine",
        lambda op: op.name.startswith("moe.") or op.role == "router",
        megatron="core transformer/moe/router.py, moe_utils.py:1185; TransformerEngine v2.9 pytorch/permutation.py:295, 678",
    ),
    Keeper(
        "projections",
        _is(Gemm),
        megatron="TransformerEngine v2.9 pytorch/module/linear.py:429, layernorm_linear.py:458, grouped_linear.py:231",
        torch="torch tools/autograd/derivatives.yaml, mm: both operands",
    ),
    Keeper(
        "Mamba scan",
        _is(Scan),
        megatron="core ssm/mamba_mixer.py; state-spaces/mamba@e9594ce mamba_ssm/ops/triton/ssd_combined.py",
    ),
    Keeper(
        "linear attention in chunks",
        _is(Chunked),
        megatron="flash-linear-attention v0.5.2 fla/ops, chunk.py of each rule: save_for_backward",
    ),
)
"""In the order in which they are tested."""
OTHERS = Keeper("other operations", lambda _: True, megatron=TORCH)
REPLAYED = Keeper(
    "inputs of recomputed layers",
    lambda _: True,
    megatron="core tensor_parallel/random.py, CheckpointFunction.forward: save_for_backward(*args)",
    torch="torch utils/checkpoint.py: the checkpoint keeps its arguments",
)


def keeper_of(op: Op | None) -> Keeper:
    """The role of an op for its saved tensors; None: layers that are recomputed."""
    return REPLAYED if op is None else next((one for one in KEEPERS if one.shows(op)), OTHERS)


def source_of(job: Job, keeper: Keeper) -> str:
    """The code or setting behind a keeper in a job's framework."""
    if keeper.setting:
        value = job.software.settings()[keeper.setting]
        return f"{keeper.setting} {value}: {setting_source(job, keeper.setting)}"
    return keeper.megatron if job.software.family == "megatron-core" and keeper.megatron else keeper.torch
