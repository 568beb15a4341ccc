"""What the figures of trainers' tables become in a plan: a table of data/launch names a figure by @ and a word."""

from __future__ import annotations

_PLAN_KEYS = {
    "model": "model model_type weights overrides", "model.lora": "adapter adapter_everywhere base_bits",
    "model.lora.dropout": "adapter_dropout", "model.lora.rank": "adapter_rank",
    "model.lora.targets": "adapter_mlp adapter_targets lora_key lora_mlp lora_projection lora_query lora_value",
    "model.inter_sz": "mlp mlp_multiple mlp_ratio", "model.vocab_sz": "tokenizer vocabulary",
    "devices": "devices nodes per_node", "data.gbs": "batch steps tokens_batch",
    "data.microbatch_sz": "micro micro_of_stage device_batch", "parallelism": "deepspeed distributed",
    "parallelism.dp": "dp_dcn dp_dcn_shard dp_shard", "parallelism.fsdp": "fsdp fsdp_strategy fsdp_version",
    "parallelism.fsdp.backward_prefetch": "fsdp_prefetch", "parallelism.fsdp.no_sync": "sync_each_batch",
    "parallelism.fsdp.original_params": "fsdp_original_params", "parallelism.fsdp.wrap": "fsdp_least fsdp_policy",
    "parallelism.layers_per_stage": "chunks_rounded layers_per_chunk", "parallelism.replicas": "dp_replicate",
    "performance.attention_impl": "attention flash", "performance.attention_backend": "backend_attention",
    "performance.compile": "backend_compile compile compile_backend dynamo",
    "performance.cpu_offload": "fsdp_offload offload_optimizer offload_params", "performance.cuda_graphs": "backend_graphs",
    "performance.loss_impl": "liger", "performance.optimizer": "optimizer",
    "performance.precision": "bf16 fp16 fp8 fsdp_precision half pure_bf16",
    "performance.recompute": "checkpointed_layers checkpointing replayed wrapped_checkpointing",
    "performance.rope_impl": "backend_rope",
}  # fmt: skip
"""Key of a plan -> the figures that decide it."""
_KEY_OF = {f"@{figure}": key for key, figures in _PLAN_KEYS.items() for figure in figures.split()}


def plan_key(to: str) -> str:
    """What a table says that a key becomes, with a figure as the key of the plan that it decides.

    >>> plan_key("@micro"), plan_key("data.seqlen")
    ('data.microbatch_sz', 'data.seqlen')
    """
    return _KEY_OF.get(to, to)
