"""The PyTorch-native stack in published rows: what is compiled, attention, recomputation, what one device keeps."""

import pytest
from own_rows import SHIPPED, own

from steptime.software.performance import load_software
from steptime.validation import row_hugging_face, row_native
from steptime.validation.judgement import judge
from steptime.validation.measurements import MeasuredRow
from steptime.validation.row_kernels import attention_of
from steptime.validation.row_plan import to_config


@pytest.mark.parametrize(
    ("notes", "release", "section"),
    [
        ("compile=on", "", {"compile": "all"}),
        ("compile=on", "0.1", {"compile": "blocks"}),
        ("compile=on (blocks)", "", {"compile": "blocks"}),
        ("compile=on (loss compiled too)", "0.1", {"compile": "all"}),
        ("compile=on (full inductor, no cudagraph)", "", {"compile": "all"}),
        ("compile=on (aot_fx_trace graph, regional inductor)", "", {}),
        ("compile=off", "", {}),
        ("compile=aot graph", "", {}),
        ("compile=aot graph, no inductor kernels stated", "", {}),
        ("", "", {}),
    ],
)
def test_what_is_compiled(notes, release, section):
    assert row_native.compile_of(release, notes) == section


@pytest.mark.parametrize(
    ("source", "compiled"),
    [
        ("PR #(ghstack, not for land, 2024-10-21)", "blocks"),
        ("PR #(ghstack, 2024-10-22)", "all"),
        ("PR #698", "all"),  # of 2024-11-25
        ("PR #808", "blocks"),
        ("PR #1033", "all"),
    ],
)
def test_the_months_in_which_torchtitan_compiled_the_loss(source, compiled):
    """From its commit e10cb9494 (2024-10-22) to e8977b007 (2024-12-18), and again since pull request 1033 (2025-04-02)."""
    row = own(framework="torchtitan", source=f"pytorch/torchtitan@1 commit message ({source})")
    assert row_native.native_kernels(row, "0.1", "compile=on")["compile"] == compiled


@pytest.mark.parametrize(
    ("source", "notes", "norm"),
    [
        ("PR #822", "compile=off", "eager"),
        ("PR #822", "compile=on", None),
        ("PR #985", "compile=off; deterministic; custom rmsnorm", "eager"),
        ("PR #985", "compile=off; deterministic; nn.rmsnorm", None),
        ("PR #(ghstack, 2024-06-13)", "compile=off; tp4+sp; fused rmsnorm", "fused"),
    ],
)
def test_torchtitans_own_norm_before_pull_request_985(source, notes, norm):
    """compute_rmsnorm of torchtitan/models/norms.py: upcast, normalize, downcast, times the weight, as Hugging Face's."""
    row = own(framework="torchtitan", source=f"pytorch/torchtitan@1 commit message ({source})")
    assert row_native.native_kernels(row, "0.1", notes).get("norm_impl") == norm


def test_a_loss_outside_of_what_is_compiled():
    """prime-rl's train.py takes torch's cross entropy of upcast logits (sft/train.py, cross_entropy; model.py, forward)."""
    assert row_native.compile_of("", "compile=on; FA3", "prime-rl SFT (FSDP2)") == {"compile": "blocks"}
    assert row_native.compile_of("", "torch.compile", "torchtitan+torchao") == {"compile": "all"}


def test_a_graph_that_is_traced_keeps_torchs_kernels():
    """GraphTrainer's passes make no kernels, unless its source says full inductor."""
    graph = "torchtitan GraphTrainer (SimpleFSDP)"
    assert row_native.compile_of("", "compile=on + forced cudagraph", graph) == {}
    assert row_native.compile_of("", "compile=on full inductor", graph) == {"compile": "all"}


@pytest.mark.parametrize(
    ("words", "recompute", "fsdp"),
    [
        ("simple_fsdp (ZeRO-3, DTensor)", "full", {"wrap": "parameter", "reshard_after_forward": True}),
        ("simple_fsdp 4 (ZeRO-3)", "none", {"wrap": "parameter", "reshard_after_forward": False}),
        ("fsdp2", "none", {"reshard_after_forward": True}),
    ],
)
def test_a_graph_without_marks_keeps_what_it_gathered(words, recompute, fsdp):
    """The pass that recomputes copies marked nodes alone, and without selective checkpointing nothing is marked."""
    row = own(framework="torchtitan", zero_or_fsdp=words, recompute=recompute, overlap_notes="compile=graph", pp=1)
    assert to_config(row).config["parallelism"]["fsdp"] == fsdp


@pytest.mark.parametrize(
    ("words", "stages", "framework", "freed"),
    [
        ("fsdp2", 1, "torchtitan", True),
        ("fsdp2", 2, "torchtitan", False),
        ("fsdp2 reshard always", 2, "torchtitan", True),
        ("fsdp2 8 (reshard never = ZeRO-2 style)", 1, "torchtitan", False),
        ("fsdp1 zero2", 1, "torchtitan", False),
        ("zero2", 1, "torchtitan", False),
        ("fsdp2", 1, "litgpt benchmark_litgpt.py", False),  # its shard_mode is zero2 unless said
        ("fsdp1 zero3", 1, "litgpt benchmark_litgpt.py", True),
    ],
)
def test_whether_parameters_are_freed_after_forward(words, stages, framework, freed):
    assert row_native.resharded(own(framework=framework, zero_or_fsdp=words, pp=stages)) is freed


def test_a_row_of_today_that_names_another_attention():
    row = own(framework="torchtitan", source="mlc-ai/pith-train issue #79 (2026-07-22)", overlap_notes="SDPA")
    assert attention_of(row, "sdpa") == {"attention_kernel": "sdpa-9.19"}


_FA2, _BEST = {"attention_kernel": "fa2"}, {"attention_kernel": "best"}


@pytest.mark.parametrize(
    ("source", "group", "gpu", "found"),
    [
        ("pytorch/torchtitan@d66b72a6 commit message (PR #1690)", "torchtitan-pr", "H100-96GB-SXM", _FA2),
        ("pytorch/torchtitan@d9bdfbb2 commit message (PR #1881)", "torchtitan-pr", "H100-96GB-SXM", {}),
        ("pytorch/torchtitan@27aa4907 commit message (PR #3429)", "torchtitan-pr", "H100-96GB-SXM", {}),
        ("pytorch/torchtitan@refs/heads/autoresearch-parallelize (2026-05)", "torchtitan-ar", "B200-180GB-SXM", _FA2),
        ("pytorch/torchtitan@1 commit message (PR #1690)", "torchtitan-pr", "B200-180GB-SXM", _BEST),
        ("pytorch/torchtitan@58b03444 commit message (PR #3105)", "torchtitan-pr", "GB200-186GB", {}),
    ],
)
def test_torchtitan_prefers_cudnn_everywhere_since_october_2025(source, group, gpu, found):
    """Pull request 1776 (2025-10-09) put cuDNN's kernel first on every device; the sweep of May 2026 could not run it."""
    row = own(framework="torchtitan", source=source, source_group=group, gpu=gpu)
    assert attention_of(row, "compile=off") == found


@pytest.mark.parametrize(
    ("notes", "graphs"),
    [
        ("compile=graph (same, deterministic off)", None),
        ("compile=graph (production passes: bucketing/prefetch, regional inductor, cudagraph)", True),
        ("compile=graph (+ 2-layer buckets + auto overlap)", True),
        ("compile=graph (+ regional inductor for swiglu chain)", True),
    ],
)
def test_passes_on_top_of_graph_trainers_own(notes, graphs):
    """A ladder of passes: each step written with + keeps those before it, CUDA graphs too.

    Compiled in regions, the activation still returns what the traced backward reads of it: the source's memory stays 49.1 GiB.
    """
    section = row_native.native_kernels(own(framework="torchtitan GraphTrainer", overlap_notes=notes), "2026-05", notes)
    assert section.get("cuda_graphs") == graphs
    assert "activation_impl" not in section


def test_graph_trainers_default_policy_kept_gathered_parameters_for_five_days():
    """Until pull request 3056 of 2026-04-28, two hours before the commit of 3141, which was measured before that."""
    of = {
        "framework": "torchtitan GraphTrainer (SimpleFSDP)",
        "zero_or_fsdp": "simple_fsdp",
        "recompute": "selective",
        "pp": "1",
    }
    kept = own(source="pytorch/torchtitan@a364b4b4 commit message (PR #3141)", **of)
    later = own(source="pytorch/torchtitan@14f6a75e commit message (PR #3132)", **of)
    assert (row_native.resharded(kept), row_native.resharded(later)) == (False, True)


@pytest.mark.parametrize(
    ("pull", "notes", "kernel"),
    [
        (1513, "compile=off", "efficient"),
        (1610, "compile=loss only; flexattention", "flex"),
        (2107, "compile=on (model+loss); interleaved1f1b", "flex"),
        (2564, "compile=aot graph; standard all-to-all", "flex_eager"),
        (2564, "compile=aot graph; regional inductor", "flex"),
        (3361, "compile=on; sdpa", "efficient"),
    ],
)
def test_attention_of_deepseek_in_torchtitan(pull, notes, kernel):
    """Keys wider than values: the memory-efficient kernel until pull request 1610, FlexAttention since."""
    row = own(framework="torchtitan", source=f"pytorch/torchtitan@1 commit message (PR #{pull})", attention_kind="mla")
    assert attention_of(row, notes) == {"attention_kernel": kernel}


def test_selective_is_per_op_in_todays_torchtitan():
    """Its only selective checkpointing; before, the word alone may mean every n-th layer."""
    found = row_native.recomputed_per_op("selective", graph=False, latest=True)
    assert found == {"activation_checkpointing_type": "per-op"}
    assert row_native.recomputed_per_op("selective", graph=False) == {}


@pytest.mark.parametrize(
    ("hidden", "vocab", "parts"), [(4096, 128256, 32), (4096, 32000, 8), (4096, 4096, 1), (3584, 151936, 32)]
)
def test_liger_cuts_the_tokens_by_the_power_of_two_at_vocab_over_hidden(hidden, vocab, parts):
    """128,256 / 4,096 = 31.3: 32; 32,000 / 4,096 = 7.8: 8; 151,936 / 3,584 = 42.4.

    16,384 tokens in 43 parts are 381.02 each, of which the power of two above is 512: 32 parts.
    """
    assert row_hugging_face.liger_chunks(hidden, vocab) == parts


ONE = {"n_gpus": 1, "tp": 1, "pp": 1, "zero_or_fsdp": "none (1 GPU)", "recompute": "none"}


def test_a_trainer_on_one_device_keeps_its_kernels():
    """Hugging Face's norms and positions are op by op with or without FSDP; torchtitan keeps fp32 states under autocast."""
    face = to_config(own(framework="HF Trainer + accelerate FSDP1", **ONE)).config["performance"]
    assert face["software"] == "accelerate-ddp"
    kernels = load_software("accelerate-ddp").kernels
    assert (kernels.norm_impl, kernels.rope_impl) == ("eager", "eager")
    titan = own(framework="torchtitan GraphTrainer", source="pytorch/torchtitan PR #1", **ONE)
    assert to_config(titan).config["performance"]["software"] == "torchtitan-ddp@0.1"
    states = load_software("torchtitan-ddp").states
    assert (states.param_dtype, states.moment_dtype, states.optimizer_impl) == ("fp32", "fp32", "fused")
    assert load_software("torchtitan-ddp@0.1").kernels.loss_chunks == 1  # one loss over all tokens
    fused = own(framework="HF Trainer + accelerate FSDP1", overlap_notes="plugin foak-fast-kernels", **ONE)
    assert to_config(fused).config["performance"]["norm_impl"] == "fused"


@pytest.mark.parametrize(
    ("framework", "notes", "kernel"),
    [
        ("DeepSpeed ZeRO-3 DeepCompile", "compile=on (inductor)", "efficient"),
        ("DeepSpeed ZeRO-3 DeepCompile", "eager backend", None),
        ("DeepSpeed ZeRO-3", "compile=off", None),
    ],
)
def test_a_traced_model_of_transformers_has_its_mask_as_a_tensor(framework, notes, kernel):
    """FlashAttention takes no mask, and only without one does transformers leave keys and values shared."""
    row = own(framework=framework, zero_or_fsdp="zero3", overlap_notes=notes)
    section = row_hugging_face.of_deepspeed(row, notes)
    assert (section.get("attention_kernel"), section.get("repeat_kv")) == (kernel, True if kernel else None)


@pytest.mark.parametrize(
    ("notes", "note"),
    [("attention materialized (no flash attention)", ""), ("", "attention implementation eager (materialized scores)")],
)
def test_attention_that_its_source_calls_eager_is_unfused(notes, note):
    row = own(framework="DeepSpeed ZeRO-3", overlap_notes=notes, note=note)
    assert to_config(row).config["performance"]["attention_impl"] == "unfused"


@pytest.mark.parametrize(
    ("notes", "waits"),
    [
        ("compile=aot graph; standard all-to-all", True),
        ("compile=graph (fsdp ag/rs bucketing)", True),
        ("compile=graph (production passes: bucketing/prefetch, regional inductor)", False),
        ("compile=graph (+ 2-layer buckets + auto overlap)", False),
        ("compile=aot_eager graph; manual bucketing", False),
        ("compile=on; piecewise cudagraph; standard all-to-all", True),
        ("compile=on; no cudagraph; standard all-to-all", False),
        ("compile=off", False),
    ],
)
def test_a_traced_graph_hides_its_gathers_by_a_pass_alone(notes, waits):
    found = row_native.native_kernels(MeasuredRow({"framework": "torchtitan GraphTrainer"}, "native", 2), "", notes)
    assert (found.get("overlap") == {"dp": False}) == waits


@pytest.mark.parametrize(
    ("framework", "source", "chunks"),
    [
        ("torchtitan GraphTrainer", "PR #(ghstack, unmerged, 2026-06-10)", 1),
        ("torchtitan GraphTrainer", "PR #(ghstack, unmerged, 2026-06-16)", None),
        ("torchtitan GraphTrainer", "pytorch/torchtitan@6b9602339", None),
        ("torchtitan", "PR #(ghstack, unmerged, 2026-06-10)", None),
    ],
)
def test_graph_trainer_had_no_chunked_loss_before_june_2026(framework, source, chunks):
    """Its configs replaced the chunked loss by a loss over all tokens until pull request 3248, merged on 2026-06-16."""
    row = own(framework=framework, source=source)
    assert row_native.native_kernels(row, "", "compile=on").get("loss_chunks") == chunks


@pytest.mark.parametrize(("release", "loss"), [("0.1", "pieces"), ("0.2", None), ("", None)])
def test_chunks_of_early_2025_are_of_the_loss_alone(release, loss):
    """Pull request 996 cut the logits that the model had returned; pull request 2937 runs the head with each chunk."""
    found = row_native.native_kernels(own(framework="torchtitan"), release, "compile=off; chunked cross entropy")
    assert (found["loss_chunks"], found.get("loss_impl")) == (8, loss)


def test_pieces_account_for_the_memory_that_pull_request_996_saved():
    """Llama-3 8B, 8,192 tokens: 1,050,673,152 logits. One loss: 12 B of each in backward, and a gap of 2 that the logits leave.

    Eight pieces: 2 + 4 + 4 / 8 B in forward: 7.5 B or 7.34 GiB less; the pull request reports 49.58 and 42.26 GiB. The estimates
    also differ by 2.4 % of it, which expandable segments lose.
    """
    whole, pieces = (judge(SHIPPED[f"torchtitan-pr-n0{n}"]) for n in (67, 68))
    saved = 7.5 * 8192 * 128_256 / 2**30
    assert saved == pytest.approx(49.58 - 42.26, abs=0.03)
    assert (whole.predicted_bytes - pieces.predicted_bytes) / 2**30 == pytest.approx(1.024 * saved, rel=1e-3)


def test_piecewise_cuda_graphs_leave_out_the_exchange_of_experts():
    """The host reads how many rows each rank sends (dropless all-to-all), so these are launched one by one."""
    words = "compile=on; piecewise cudagraph; standard all-to-all"
    experts = own(framework="torchtitan GraphTrainer", n_experts="64", topk="6", overlap_notes=words)
    dense = own(framework="torchtitan GraphTrainer", overlap_notes=words)
    assert row_native.native_kernels(experts, "", words)["cuda_graphs"] == ["attn", "mlp", "moe_router"]
    assert row_native.native_kernels(dense, "", words)["cuda_graphs"] is True


@pytest.mark.parametrize(("month", "kernel"), [("2026-05", "cudnn-9.19"), ("2026-04", "cudnn-9.19"), ("2026-02", None)])
def test_attention_of_megatron_core_by_its_month(month, kernel):
    """Megatron-Bridge 26.02 has cuDNN of 2025, 26.04 that of February 2026 (data/software/megatron-bridge.yaml)."""
    row = own(framework=f"Megatron-Core dev ({month})")
    assert to_config(row).config["performance"].get("attention_kernel") == kernel


@pytest.mark.parametrize(
    ("framework", "source", "notes", "graph"),
    [
        (
            "torchtitan graph_trainer (AOT joint graph)",
            "pytorch/torchtitan@fca8ab7b (PR #2570)",
            "compile=aot graph",
            "traced",
        ),
        (
            "torchtitan GraphTrainer",
            "pytorch/torchtitan@a0000000 (PR #3943)",
            "compile=on (aot_fx_trace, no cudagraph)",
            "simplified",
        ),
        ("torchtitan GraphTrainer", "pytorch/torchtitan@ar_base", "compile=graph (traced graph, no passes)", "traced"),
        ("torchtitan GraphTrainer", "pytorch/torchtitan@a0000000 (PR #3141)", "compile=on (full inductor)", None),
        ("torchtitan", "pytorch/torchtitan@d9bdfbb2 (PR #1881)", "compile=aot_eager graph", None),
    ],
)
def test_the_host_runs_a_graph_that_inductor_does_not_compile(framework, source, notes, graph):
    """Passes that remove nodes without effect are of pull requests 2917 to 2920 (torchtitan, 2026-04-12)."""
    row = own(framework=framework, source=source, overlap_notes=notes)
    assert row_native.native_kernels(row, "2026-05", notes).get("step_graph") == graph
