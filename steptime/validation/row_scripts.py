"""Settings in the launch scripts or the model code of a measured row's source, which the row does not state."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from steptime.validation.measurements import MeasuredRow


class Scripted(NamedTuple):
    """Settings of the rows whose source, framework and model match `words`, a regular expression in lower case."""

    words: str
    performance: dict[str, Any]
    model: dict[str, Any]
    """Dimensions, norm, biases, positions and dropout of the model itself."""


LEGACY = {"activation_impl": "composite", "rope_impl": "own_tables"}
"""Megatron-LM's own layers of 2023: torch's SiLU and product (transformer.py, ParallelMLP.__init__: swiglu), rotary embedding
kernel by kernel (apply_rotary_pos_emb)."""

EARLY_EXPERTS = {"dispatcher": "allgather", "permute_fusion": False}
"""Megatron-Core of April 2024: --moe-token-dispatcher-type is allgather by default, and --moe-permute-fusion came later."""

SWIFT = {"rope_impl": "own_tables", "loss_impl": "fused", "attention_mask": False}
"""ms-swift of April 2026: apply_rope_fusion is false, and with TransformerEngine 2.8 or later cross_entropy_fusion_impl is te
(native again since 2026-06-17; modelscope/ms-swift@3a45ea4c5 swift/megatron/arguments/megatron_args.py). Packed sequences have no
attention mask (swift/template/base.py: one is made unless padding_free)."""

SCRIPTS = (
    Scripted("^simumax;", {"attention_mask": False, "cublas_workspace": ":4096:2:16:8"}, {}),
    Scripted("^qwen-readme;", {"norm_impl": "fused", "rope_impl": "composite"}, {}),
    # the table of 2025 is older than BackendConfig.rope_fusion (NVIDIA-NeMo/Automodel@89e3a9fdd nemo_automodel/components):
    # moe/rope_utils.py, view_as_complex, for latent attention; gpt-oss runs attn flex (examples/benchmark/configs/gptoss_*)
    # and than pytorch/pytorch pull request 164777: both pipelines of the table of 2025-10-06 exchange in time steps
    Scripted(
        r"^automodel; nemo automodel \(pytorch.*; (deepseek|kimi)",
        {"rope_impl": "complex", "software": "automodel@2025-10"},
        {},
    ),
    Scripted(
        r"^automodel; nemo automodel \(pytorch.*; gpt-oss", {"rope_impl": "composite", "attention_kernel": "flex"}, {}
    ),
    Scripted(r"^automodel; nemo automodel \(pytorch", {"rope_impl": "composite"}, {}),
    # those of June 2026, with rope_fusion, which is forced off since 2026-07-13 (pull request 3028)
    Scripted("^automodel.*; nemo automodel", {"rope_impl": "fused"}, {}),
    Scripted("^xtuner;", {"norm_impl": "fused", "rope_impl": "fused"}, {}),
    Scripted(
        "^flagperf; megatron-lm core_v0.6.0; llama3",
        {},
        {"bias": True, "norm_bias": False, "rotary_embeds": False, "learned_positions": True, "dropout": 0.1},
    ),
    Scripted(
        "^flagperf; megatron-lm core_v0.6.0; mixtral",
        {"rope_impl": "own_tables", "moe": EARLY_EXPERTS},
        {"dropout": 0.1},
    ),
    Scripted(
        "^flagperf; pai-megatron-patch .*; qwen1.5-moe",
        {"rope_impl": "own_tables", "moe": EARLY_EXPERTS | {"grouped_gemm": False}},
        {"qkv_bias": True},
    ),
    Scripted("^flagperf; paddle.*; gpt3", {}, {"dropout": 0.1}),
    Scripted("^megatron-sft-recipes; ms-swift .*megatron sft.*; qwen2.5", SWIFT, {"qkv_bias": True}),
    Scripted("^megatron-sft-recipes; ms-swift .*megatron sft", SWIFT, {}),
    Scripted("^flagperf; flagscale@ed55532 .*; aquila2", LEGACY, {}),
    Scripted("^flagperf; flagscale@26cd664 .*; llama2", LEGACY | {"norm_impl": "eager"}, {}),
    Scripted(
        "^flagperf; megatron-deepspeed zero-1; llama2",
        LEGACY | {"rope_impl": "composite"},
        {"norm": "layernorm", "bias": True, "norm_bias": True, "vocab_sz": 50304},
    ),
)
"""The first match of a row is its own.

- MooreThreads/SimuMax simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh: --no-create-attention-mask-in-dataloader;
  torch's workspace on Blackwell is that of 2025.
- Qwen's own modeling_qwen.py runs FlashAttention's fused norm, and its rotary kernel between two casts, 20 bytes an element.
- XTuner dispatches norms and rotary embeddings to Triton kernels (InternLM/xtuner xtuner/model/modules/dispatch).
- FlagOpen/FlagPerf@1b5a0303 training/benchmarks/llama3_8B and llama3_70B megatron/pretrain_llama3.sh: Megatron-LM's defaults for
  what Llama 3 has otherwise, since it has no --position-embedding-type (learned_absolute), no --disable-bias-linear, no
  --attention-dropout or --hidden-dropout (0.1). mixtral_8x7B/megatron/megatron_main.sh: the same dropout; --no-rope-fusion.
  qwen1.5_MoE/megatron/megatron_pai_main.sh: --no-rope-fusion, --add-qkv-bias, no --moe-grouped-gemm.
- The same, gpt3_6.7B/paddle/config/_base.py: hidden_dropout_prob and attention_probs_dropout_prob 0.1.
- fyh2001/megatron-sft-recipes@d16a2d1 scripts/benchmark/bench_megatron.sh has --cross_entropy_loss_fusion true and leaves
  ms-swift's other defaults; its container, modelscope's of swift 4.1.2, has TransformerEngine 2.13 (recommended in
  modelscope/ms-swift@3a45ea4c5 docs/source_en/Megatron-SWIFT/Quick-start.md). Qwen2.5 has biases of q, k and v.
- FlagPerf, aquila2_7b/flagscale and llama2_70B/megatron: FlagScale of 2023 runs Megatron-LM's own layers, with apex's RMSNorm
  for --apply-layernorm-rms (FlagOpen/FlagScale@c2362772 megatron/model/fused_layer_norm.py) and torch's kernels for
  --normalization RMSNorm (@83e7b602 megatron/model/utils.py, get_norm; @7ef8b368 rms_norm.py).
- The same, llama2_7b/megatron-deepspeed/megatron-deepspeed_main.sh: what follows "#--recompute-activations" is a comment, so the
  norm is Megatron's default and linear layers have biases. preprocess/tokenizer.json is GPT-NeoX's, 50,277 words padded to a
  multiple of 128. microsoft/Megatron-DeepSpeed@1bcd14d6 megatron/model/rotary_pos_embedding.py keeps its tables."""


def script_of(row: MeasuredRow) -> Scripted:
    """The settings of a row that its source's scripts or code have; none where they are unknown."""
    said = "; ".join((row.group, row.text("framework"), row.text("model_name"))).lower()
    return next((script for script in SCRIPTS if re.search(script.words, said)), Scripted("", {}, {}))


def performance_of_script(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """Its `performance` keys, added to `assumed`."""
    found = script_of(row).performance
    assumed += [
        f"{key}: {value}, from the scripts and the torch release of {row.group}" for key, value in found.items()
    ]
    return found


def model_of_script(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """Its `model` keys, added to `assumed`."""
    found = script_of(row).model
    assumed += [f"{key}: {value}, from the scripts of {row.group}" for key, value in found.items()]
    return found


def chunks_of_script(row: MeasuredRow) -> int | None:
    """Model chunks of each stage: 1 where no script of the source sets virtual stages (FlagPerf); None where nothing is known.

    FlagOpen/FlagPerf@1b5a0303: no --num-layers-per-virtual-pipeline-stage in training/benchmarks/*/megatron and flagscale;
    virtual_pp_degree 1 in gpt3_6.7B and llama1_7B paddle/config/_base.py.
    """
    return 1 if row.group == "flagperf" else None
