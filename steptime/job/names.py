"""Other frameworks' names for keys of a plan, used in hints for unknown keys."""

from __future__ import annotations

_SPELLINGS: dict[str, str] = {
    "devices": "n_devices num_devices gpus n_gpus num_gpus world_size nproc n_chips",
    "hardware.nodes": "nnodes num_nodes n_nodes",
    "hardware.node_type": "machine accelerator gpu gpu_type node device instance instance_type cluster",
    "parallelism.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size "
    "tensor_parallelism model_parallel_size mp",
    "parallelism.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_size "
    "pipeline_parallelism n_stages num_stages pipeline_stages",
    "parallelism.dp": "data_parallel data_parallel_size data_parallel_degree dp_size data_parallelism "
    "data_parallel_shard_degree n_replicas",
    "parallelism.vpp": "virtual_pipeline_model_parallel_size virtual_pipeline num_virtual_stages interleave virtual_stages vp",
    "parallelism.cp": "context_parallel context_parallel_size context_parallel_degree cp_size context_parallelism "
    "ring_attention ulysses",
    "parallelism.ep": "expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size",
    "parallelism.sp": "sequence_parallel sequence_parallelism",
    "parallelism.zero_level": "zero zero_stage zero_optimization stage use_distributed_optimizer distributed_optimizer",
    "parallelism.replicas": "data_parallel_replicate_degree hsdp num_distributed_optimizer_instances",
    "parallelism.fsdp": "fully_shard fsdp2",
    "parallelism.schedule": "pipeline_schedule pipeline_parallel_schedule",
    "model.n_layers": "num_layers layers_count num_hidden_layers n_layer depth num_blocks",
    "model.hidden_sz": "hidden_size hidden d_model dim n_embd embed_dim model_dim emb_dim",
    "model.inter_sz": "ffn_hidden_size intermediate_size ffn_size d_ff ffn_dim mlp_dim ffn_hidden",
    "model.n_q_heads": "num_attention_heads n_heads n_head num_heads heads attention_heads",
    "model.n_kv_heads": "num_query_groups num_key_value_heads kv_heads num_kv_heads n_query_groups",
    "model.head_dim": "kv_channels d_head head_size d_kv",
    "model.vocab_sz": "vocab_size padded_vocab_size n_vocab vocab vocabulary_size",
    "model.max_positions": "max_position_embeddings max_sequence_length n_positions",
    "model.glu": "swiglu gated_linear_unit gated",
    "model.tie_embeddings": "tie_word_embeddings tied_embeddings share_embeddings_and_output_weights",
    "model.preset": "name_or_path model_name",
    "model.bias": "add_bias_linear use_bias",
    "model.norm": "normalization norm_type",
    "data.gbs": "global_batch_size batch_size train_batch_size batch global_batch global_batch_sz",
    "data.seqlen": "seq_len seq_length sequence_length max_seq_len encoder_seq_length context_length seq_sz",
    "data.microbatch_sz": "micro_batch_size mbs microbatch_size micro_batch train_micro_batch_size_per_gpu microbatch "
    "micro_batch_sz local_batch_size",
    "performance.activation_checkpointing_type": "activation_checkpointing gradient_checkpointing "
    "checkpointing activation_recompute recompute_granularity recomputation activation_checkpoint",
    "performance.precision": "dtype mixed_precision data_type compute_dtype",
    "performance.attention_impl": "flash_attention use_flash_attn attention_backend attn_implementation",
    "performance.software": "framework profile backend",
    "run.tokens": "n_tokens total_tokens num_tokens train_tokens",
    "run.price_per_device_hour": "price cost_per_gpu_hour price_per_gpu_hour gpu_hour_price",
}

_LEAVES = """model.preset model.hf model.n_layers model.hidden_sz model.inter_sz model.n_q_heads model.n_kv_heads model.head_dim
model.vocab_sz parallelism.tp parallelism.pp parallelism.dp parallelism.vpp parallelism.cp parallelism.ep parallelism.sp
parallelism.zero_level parallelism.fsdp parallelism.schedule parallelism.replicas parallelism.layers_per_stage data.gbs
data.seqlen data.microbatch_sz performance.precision performance.software performance.recompute
performance.activation_checkpointing_type performance.attention_impl performance.norm_impl performance.activation_impl
performance.loss_impl performance.rope_impl performance.param_dtype performance.main_grad_dtype
performance.overlap performance.cuda_graphs
performance.optimizer performance.compile model.lora model.mtp hardware.node_type hardware.nodes
hardware.overrides run.tokens run.price_per_device_hour devices"""

PATHS: dict[str, str] = {
    **{path.rpartition(".")[2]: path for path in (*_SPELLINGS, *_LEAVES.split())},
    **{word: path for path, words in _SPELLINGS.items() for word in words.split()},
}
"""A word -> the dotted key of a plan that it means; includes our own keys, for one written in another section."""


def meant_path(key: object) -> str:
    """The dotted key meant by a word of another framework, or by one of ours in the wrong section; "" for none.

    >>> meant_path("tensor-model-parallel-size"), meant_path("tp"), meant_path("what")
    ('parallelism.tp', 'parallelism.tp', '')
    """
    return PATHS.get(str(key).lower().lstrip("-").replace("-", "_"), "")


MISSING = {
    "model": "; name a preset (3dtrn models), or give its fields",
    "parallelism": "; give {tp: 1, pp: 1} and devices: N, or let 3dtrn search PLAN --devices N find it",
    "data": "; give gbs, seqlen and microbatch_sz",
    "hardware": "; name a machine (3dtrn machines)",
    **dict.fromkeys(
        (f"model.{key}" for key in ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "vocab_sz")),
        "; give it, or name a preset (3dtrn models)",
    ),
    **dict.fromkeys(("parallelism.tp", "parallelism.pp"), "; give it (1: none), or let 3dtrn search PLAN find it"),
    "parallelism.dp": "; give it, or devices: N",
    "data.gbs": "; give the sequences per step of the whole job",
    "data.seqlen": "; give the tokens per sequence",
    "data.microbatch_sz": "; give the sequences per micro-batch, or let 3dtrn search PLAN find it",
    "hardware.node_type": "; name a machine (3dtrn machines), or give the path of a machine file",
    "": "; give it (3dtrn explain --key KEY: its meaning and unit)",
    "performance.recompute.granularity": "; full (whole layers: method, n_layers) or selective (modules, memory_budget)",
}
"""Required keys of a plan -> what to give where they are missing; "": any other."""

_FULL = "performance.activation_checkpointing_type: full"
_WHOLE_LAYERS = f"{_FULL}, or {{granularity: full, method: uniform, n_layers: 1}}"
_WORDS = ("none", "selective", "super-selective", "per-op")
FIXES: dict[str, str] = {
    "parallelism.fsdp=true": "; write {} for the defaults of the software profile",
    "parallelism.fsdp=false": "; leave it out: without it zero_level decides",
    "performance.recompute=true": f"; whole layers: {_WHOLE_LAYERS}",
    "performance.recompute=full": f"; whole layers: {_WHOLE_LAYERS}",
    "performance.recompute=false": "; leave it out",
    **{
        f"performance.recompute={word}": f"; write performance.activation_checkpointing_type: {word}" for word in _WORDS
    },
    "performance.activation_checkpointing_type=true": "; write full for whole layers (gradient checkpointing)",
    "performance.activation_checkpointing_type=false": "; write none",
    **{
        f"performance.precision={word}": "; which fp8: fp8_tensorwise or fp8_rowwise (torchao), fp8_delayed, fp8_current or "
        "fp8_blockwise (TransformerEngine)"
        for word in ("float8", "fp8_e4m3", "e4m3")
    },
    **{
        f"performance.loss_impl={word}": "; chunks of tokens are performance.loss_chunks, such as 8"
        for word in ("chunked", "chunk", "chunked_ce")
    },
    **{
        f"performance.loss_impl={word}": "; write fused, and performance.loss_chunks for a head that takes part of the tokens "
        "at a time"
        for word in ("liger", "fused_linear", "cut")
    },
    "performance.compile=true": "; write all",
    "performance.compile=false": "; write none",
    "": "; give its keys: 3dtrn explain --key {path}",
}
"""KEY=VALUE -> the end of the error line; "": where a mapping is expected."""
