"""torchtitan's published rows by pull request or date: its release, attention, what it recomputes, its allocator."""

import pytest
from own_rows import own

from steptime.software.performance import load_software
from steptime.validation import row_native, row_torchtitan
from steptime.validation.measurements import shipped
from steptime.validation.row_kernels import attention_of
from steptime.validation.row_layers import stages
from steptime.validation.row_software import framework_of


@pytest.mark.parametrize(
    ("source", "release"),
    [
        ("pytorch/torchtitan PR #985", "0.1"),
        ("pytorch/torchtitan PR #1690", "0.2"),
        ("pytorch/torchtitan PR #3105", "2026-05"),
        ("pytorch/torchtitan PR #3571", "2026-06"),
        ("pytorch/torchtitan PR #3714", "2026-08"),
        ("pytorch/torchtitan PR #4143", ""),
        ("meta-pytorch/forge PR #31", ""),
        ("(ghstack, 2024-10-22)", "0.1"),
        ("2025-10-16", "0.2"),
        ("", ""),
    ],
)
def test_releases_of_torchtitan_by_pull_request_or_date(source, release):
    row = own(framework="torchtitan", source=source)
    assert row_torchtitan.torchtitan_release(row) == release
    assert framework_of(row).software == (f"torchtitan@{release}" if release else "torchtitan")


@pytest.mark.parametrize(
    ("source", "release"),
    [
        ("pytorch/torchtitan@28ed62e4 commit message (unmerged PR, 2026-07-17)", "2026-08"),
        ("pytorch/torchtitan@1 commit message (PR #3975, unmerged)", "2026-08"),
        ("pytorch/torchtitan@1 commit message (PR #3429)", "2026-05"),
        ("pytorch/torchtitan@b (2026-05)", "2026-05"),
        ("pytorch/torchtitan@1 commit message (PR #2107)", "0.2"),
    ],
)
def test_torchtitan_runs_flex_attention_since_june_2026(source, release):
    """Pull request 3571 of 2026-06-09 made it the default."""
    assert row_torchtitan.torchtitan_release(own(framework="torchtitan", source=source)) == release
    kernel = load_software("torchtitan" + ("@" + release if release else "")).kernels.attention_kernel
    assert kernel == {"2026-08": "flex", "2026-05": "sdpa-9.19", "0.1": "fa2"}.get(release, "sdpa")


@pytest.mark.parametrize(
    ("pull", "attention", "fused"),
    [
        (3570, "sdpa-9.19", False),
        (3571, "flex", False),
        (3713, "flex", False),
        (3714, "flex", "qkv_copied"),
        (3914, "flex", "qkv_copied"),
    ],
)
def test_one_product_for_q_k_and_v_since_pull_request_3714(pull, attention, fused):
    """Of 2026-06-24, two weeks after FlexAttention; per-op is what `selective` means since the latter."""
    row = own(framework="torchtitan", source=f"pytorch/torchtitan@1 commit message (PR #{pull})", recompute="selective")
    kernels = load_software(framework_of(row).software).kernels
    assert (kernels.attention_kernel, kernels.fused_projections) == (attention, fused)
    assert row_torchtitan.of_today(row) == (attention == "flex")


@pytest.mark.parametrize(
    ("pull", "tp", "said"),
    [
        (1690, 8, {"rope_impl": "composite", "qk_norm_gathered": True}),
        (1690, 1, {"rope_impl": "composite"}),
        (1870, 8, {"rope_impl": "composite"}),
        (2259, 8, {"rope_impl": "composite", "repeat_kv": False}),
        (2575, 8, {"rope_impl": "upcast", "repeat_kv": False}),
    ],
)
def test_heads_of_qwen3_by_pull_request(pull, tp, said):
    """1870 no longer gathers q and k, 2259 reads grouped heads as they are, 2575 rotates in fp32."""
    row = own(framework="torchtitan", model_name="Qwen3-32B", source=f"pytorch/torchtitan@1 (PR #{pull})", tp=tp)
    assert row_torchtitan.heads_of(row, "0.2", compiled=False) == said
    assert "rope_impl" not in row_torchtitan.heads_of(row, "0.2", compiled=True)


@pytest.mark.parametrize(
    ("experts", "pull", "notes", "again"),
    [
        ("64", 1610, "", True),
        ("64", 1672, "SAC policy: a2a and _to_copy not saved", True),
        ("64", 1672, "SAC policy: a2a and _to_copy saved", False),
        ("64", 2000, "", False),
        ("", 1610, "", False),
    ],
)
def test_per_op_checkpointing_keeps_all_to_alls_since_pull_request_1672(experts, pull, notes, again):
    source = f"pytorch/torchtitan@1 commit message (PR #{pull})"
    row = own(framework="torchtitan", source=source, overlap_notes=notes, n_experts=experts)
    assert row_torchtitan.recomputes_all_to_all(row) == again
    kept = {"recompute": {"granularity": "selective", "modules": ["per_op_resend"]}}
    found = row_native.recomputed_per_op("selective (per-op sac)", graph=False, resend=again)
    assert found == (kept if again else {"activation_checkpointing_type": "per-op"})


@pytest.mark.parametrize(
    ("gpu", "source", "notes", "again"),
    [
        ("H100-SXM5-96", "pytorch/torchtitan@1 commit message (PR #1775)", "", False),  # FlashAttention's
        ("H100-SXM5-96", "pytorch/torchtitan@1 commit message (PR #1881)", "", True),
        ("H100-SXM5-96", "pytorch/torchtitan@1 commit message (PR #1881)", "FlexAttention", False),
        ("H100-SXM5-96", "pytorch/torchtitan@1 commit message (PR #2095)", "", False),
        ("B200-SXM-180", "pytorch/torchtitan@1 commit message (PR #1195)", "", False),
        ("B200-SXM-180", "pytorch/torchtitan@1 commit message (PR #1197)", "", True),
        ("B200-SXM-180", "pytorch/ao@1 docs/source/workflows/training.md", "", True),
        ("H100-SXM5-80", "pytorch/ao@1 docs/source/workflows/training.md", "", False),
        ("MI300X-192", "pytorch/torchtitan@1 commit message (PR #1881)", "", False),
    ],
)
def test_per_op_checkpointing_keeps_cudnns_attention_since_pull_request_2095(gpu, source, notes, again):
    row = own(framework="torchtitan", source=source, gpu=gpu, overlap_notes=notes)
    assert row_torchtitan.recomputes_attention(row) == again
    kept = {"recompute": {"granularity": "selective", "modules": ["per_op", "core_attn"]}}
    found = row_native.recomputed_per_op("selective (per-op sac)", graph=False, attend=again)
    assert found == (kept if again else {"activation_checkpointing_type": "per-op"})


@pytest.mark.parametrize(
    ("gpu", "said", "cudnn"),
    [
        ("H100-96GB-SXM", "PR #(ghstack, 2024-10-22)", True),
        ("H100-96GB-SXM", "PR #(ghstack, not for land, 2024-10-14)", True),
        ("H100-96GB-SXM", "PR #(ghstack POC, 2024-07-18)", False),
        ("H100-96GB-SXM", "PR #698", False),  # of 2024-11-25
        ("A100-80GB-SXM", "PR #(ghstack, 2024-10-22)", False),
    ],
)
def test_torch_took_cudnns_attention_on_h100_until_2024_10_22(gpu, said, cudnn):
    """torch 2.5's order of kernels, and its main branch's until pytorch pull request 138522; its output is copied."""
    row = own(framework="torchtitan", gpu=gpu, source=f"pytorch/torchtitan@1 commit message ({said})")
    copied = {"attention_kernel": "best", "attention_backend": "cudnn"}
    assert attention_of(row, "compile=on") == (copied if cudnn else {"attention_kernel": "fa2"})
    assert row_torchtitan.recomputes_attention(row) == cudnn


@pytest.mark.parametrize(
    ("source", "older"),
    [
        ("PR #165", True),
        ("PR #687", False),
        ("PR #(ghstack, 2024-10-22)", True),
        ("PR #(ghstack, not for land, 2024-10-14)", True),
        ("PR #(ghstack, 2024-10-23)", False),
        ("README, 2024-12", False),
    ],
)
def test_expandable_segments_since_the_afternoon_of_2024_10_22(source, older):
    row = own(framework="torchtitan", source=f"pytorch/torchtitan@1 commit message ({source})")
    assert row_torchtitan.before_expandable_segments(row) == older


def test_two_older_runs_set_expandable_segments_themselves():
    """PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True" stands in the command of their commit message."""
    for commit in ("eb0da76d", "46658697"):
        row = own(
            framework="torchtitan", source=f"pytorch/torchtitan@{commit} commit message (PR #(ghstack, 2024-10-14))"
        )
        assert not row_torchtitan.before_expandable_segments(row)


@pytest.mark.parametrize(
    ("pull", "framework", "precision", "notes", "compiled"),
    [
        (3914, "torchtitan", "nvfp4", "compile=on", "blocks"),
        (3914, "torchtitan", "mxfp8", "compile=on", "blocks"),
        (3914, "torchtitan", "bf16", "compile=on", "all"),
        (3914, "torchtitan", "nvfp4", "compile=off", None),
        (3000, "torchtitan", "mxfp8", "compile=on", "all"),
    ],
)
def test_the_configs_of_nvfp4_and_mxfp8_compile_the_model_alone(pull, framework, precision, notes, compiled):
    """components=["model"] in torchtitan's config functions of the summer of 2026; by default the loss too."""
    source = f"pytorch/torchtitan@1 commit message (PR #{pull})"
    row = own(framework=framework, source=source, precision=precision, overlap_notes=notes)
    release = row_torchtitan.torchtitan_release(row)
    assert row_native.native_kernels(row, release, notes).get("compile") == compiled


def test_the_ends_of_a_pipeline_have_a_layer_less():
    """61 layers and one each for embedding and head over 16 chunks: 15 times 4 and the last 3, of which the ends hold 3 and 2.

    pytorch/torchtitan@36a4b694 torchtitan/distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part, and
    config/job_config.py, pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers: 1.
    """
    row = next(row for row in shipped() if row.id == "torchtitan-pr-n028")
    assert stages(row, []) == {"layers_per_stage": [3, *[4] * 14, 2]}
    assert load_software("torchtitan@0.2.1").layout.stage_exchange == "one_stream"
