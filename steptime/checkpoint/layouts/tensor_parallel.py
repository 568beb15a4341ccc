"""Global names and places for the tensors of ranks: layer numbers per stage, tensor-parallel dimension, experts.

Which tensors are split, and along which dimension: Megatron-LM `megatron/core/tensor_parallel/layers.py` (ColumnParallelLinear
splits rows of the weight, RowParallelLinear columns), `megatron/core/transformer/moe/experts.py`; names also of the
older `megatron/legacy/model/transformer.py` and of Meta's `llama/model.py`, which uses fairscale's layers of the same
names. Layer offsets: `transformer_block.get_num_layers_to_build`.
"""

from __future__ import annotations

import re
from typing import Any

from steptime.checkpoint.stored_records import StoredTensor

LAYER = re.compile(r"(^|\.)layers\.(\d{1,6})\.")
EXPERT = re.compile(r"(experts\.local_experts\.|experts\.linear_fc[12]\.(?:weight|bias))(\d{1,6})")
COLUMN = re.compile(
    r"(?:linear_qkv|linear_fc1|word_embeddings|output_layer|query_key_value|dense_h_to_4h|lm_head|linear_q_proj|"
    r"linear_q_up_proj|linear_kv_up_proj|linear_q|linear_kv|in_proj|conv1d|w[qkv13]|output)\.(?:weight|bias)\d*$"
)
ROW = re.compile(
    r"(?:linear_proj|linear_fc2|attention\.dense|self_attention\.dense|dense_4h_to_h|out_proj|wo|w2)\.weight\d*$"
)
WHOLE = re.compile(
    r"norm\w*\.(?:weight|bias)$|layer_?norm_(?:weight|bias)$|router\.\w+$|gate\.weight$|position_embeddings\.weight$|"
    r"(?:linear_proj|linear_fc2|dense|dense_4h_to_h|out_proj)\.bias$|rope\.freqs$|inv_freq$|"
    r"shared_experts\.gate_weight$|_extra_state$"
)
PACKED = {"experts.weight1": 1, "experts.weight2": 0}  # grouped GEMM packs all local experts into one matrix


def split_dim(name: str) -> int | None:
    """The dimension tensor parallelism splits, -1 for what every rank holds whole (norms, routers, row biases).

    None where the name is not known: then only a checksum distinguishes a copy from a slice.
    """
    packed = next((dim for end, dim in PACKED.items() if name.endswith(end)), None)
    if packed is not None:
        return packed
    if WHOLE.search(name):
        return -1
    return 0 if COLUMN.search(name) else 1 if ROW.search(name) else None


def make_global(tensors: list[StoredTensor], args: dict[str, Any]) -> None:
    """Number layers and experts over all ranks and give every model piece its offsets and whole shape."""
    model = [tensor for tensor in tensors if tensor.role == "model"]
    first = _first_layers(model, args)
    experts = 1 + max((rank_of(t, "ep") for t in model), default=0)
    ways = 1 + max((rank_of(t, "tp") for t in model), default=0)
    local = 1 + max((int(m[2]) for t in model if (m := EXPERT.search(t.name))), default=0)
    for tensor in model:
        start = first.get((rank_of(tensor, "chunk"), rank_of(tensor, "pp")), 0)
        if start:
            tensor.name = _shifted(LAYER, tensor.name, start)
        if experts > 1 and "experts" in tensor.name:
            base = rank_of(tensor, "ep") * local
            tensor.name = _shifted(EXPERT, tensor.name, base)
        place(tensor, ways, rank_of(tensor, "tp"), split_dim(tensor.name), experts)


def _shifted(pattern: re.Pattern[str], name: str, by: int) -> str:
    """`name` with the number in its first match raised."""
    match = pattern.search(name)
    if match is None:
        return name
    return f"{name[: match.start(2)]}{int(match[2]) + by}{name[match.end(2) :]}"


def rank_of(tensor: StoredTensor, axis: str) -> int:
    """The rank along `axis` that wrote the tensor; 0 where there is none."""
    return (tensor.rank or {}).get(axis, 0)


def _first_layers(model: list[StoredTensor], args: dict[str, Any]) -> dict[tuple[int, int], int]:
    """First global layer of each (virtual chunk, stage): chunks of one depth come before those of the next."""
    counts: dict[tuple[int, int], int] = {}
    for tensor in model:
        match = LAYER.search(tensor.name)
        key = (rank_of(tensor, "chunk"), rank_of(tensor, "pp"))
        counts[key] = max(counts.get(key, 0), int(match[2]) + 1 if match else 0)
    stages = max((args.get("pipeline_model_parallel_size") or 1, *(pp + 1 for _, pp in counts)))
    chunks = 1 + max((chunk for chunk, _ in counts), default=0)
    usual = max(counts.values(), default=0)
    first: dict[tuple[int, int], int] = {}
    at = 0
    for chunk in range(chunks):
        for stage in range(min(stages, 4096)):
            first[chunk, stage] = at
            at += counts.get((chunk, stage), usual)  # a missing rank is taken to hold as many as the others
    return first


def place(tensor: StoredTensor, ways: int, rank: int, dim: int | None, experts: int = 1) -> None:
    """Offsets and whole shape of the slice that tensor rank `rank` of `ways` holds along `dim`."""
    shape = tensor.shape
    if dim is None:
        return
    offsets, whole = [0] * len(shape), list(shape)
    if 0 <= dim < len(shape) and ways > 1:
        offsets[dim] = rank * shape[dim]
        whole[dim] = ways * shape[dim]
    packed = next((d for end, d in PACKED.items() if tensor.name.endswith(end)), None)
    if packed is not None and packed < len(shape) and experts > 1:
        offsets[packed] += rank_of(tensor, "ep") * whole[packed]
        whole[packed] *= experts
    tensor.offsets, tensor.global_shape = tuple(offsets), tuple(whole)
