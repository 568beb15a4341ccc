"""Megatron-LM's flags: which key of a plan each becomes, what is left out, what is approximated."""

from __future__ import annotations

import pytest
from megatron_readings import H100, LEFT_OUT, RELEASE, problems, reading, script

from steptime.launch.megatron.parallelism_section import stages_of
from steptime.launch.megatron.sources import read_megatron
from steptime.launch.reading import to_job

# --- single flags: what each becomes ---

CASES = [
    ((), "parallelism.zero_level", 0),
    (("--use-distributed-optimizer",), "parallelism.zero_level", 1),
    (("--optimizer muon",), "performance.optimizer", "muon"),
    (("--optimizer muon", "--use-distributed-optimizer"), "performance.optimizer", "dist_muon"),
    (("--optimizer dist_muon",), "parallelism.zero_level", 1),
    (("--optimizer muon", "--muon-tp-mode duplicated"), "performance.muon_tp_mode", "duplicated"),
    (
        ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim", "--megatron-fsdp-main-grads-dtype bf16"),
        "performance.main_grad_dtype",
        "bf16",
    ),
    (("--megatron-fsdp-main-grads-dtype bf16",), "performance.main_grad_dtype", "fp32"),
    (("--optimizer lion",), "performance.optimizer", "lion"),
    (("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"), "performance.overlap.dp", True),
    # fp32 gradients are two thirds of the bytes, bf16 parameters one third
    (("--use-distributed-optimizer", "--overlap-grad-reduce"), "performance.overlap.dp", 0.667),
    (("--use-distributed-optimizer", "--overlap-grad-reduce", "--grad-reduce-in-bf16"), "performance.overlap.dp", 0.5),
    (("--overlap-grad-reduce",), "performance.overlap.dp", True),
    (("--num-distributed-optimizer-instances 2", "--use-distributed-optimizer"), "parallelism.replicas", 2),
    (("--tensor-model-parallel-size 2",), "parallelism.sp", False),
    (("--tensor-model-parallel-size 2", "--sequence-parallel"), "parallelism.sp", True),
    (("--sequence-parallel",), "parallelism.sp", False),
    (("--tensor-model-parallel-size 2", "--sequence-parallel", "--tp-comm-overlap"), "performance.overlap.tp", True),
    (("--model-parallel-size 4",), "parallelism.dp", 2),
    (("--context-parallel-size 2",), "parallelism.cp_comm_type", "p2p"),
    (("--context-parallel-size 2", "--cp-comm-type allgather"), "parallelism.cp_comm_type", "all_gather"),
    (("--context-parallel-size 2", "--cp-comm-type a2a a2a"), "parallelism.cp_comm_type", "a2a"),
    (("--context-parallel-size 4", "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"), "parallelism.cp_a2a", 2),
    # a ring of a single group, and one of groups of a single rank
    (("--context-parallel-size 2", "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes '[2 1]'"),
     "parallelism.cp_comm_type", "a2a"),
    (("--context-parallel-size 2", "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 2"),
     "parallelism.cp_comm_type", "p2p"),
    (("--pipeline-model-parallel-size 2", "--num-layers-per-virtual-pipeline-stage 2"), "parallelism.vpp", 2),
    (("--pipeline-model-parallel-size 4", "--num-virtual-stages-per-pipeline-rank 2"), "performance.overlap.pp", True),
    (
        ("--pipeline-model-parallel-size 4", "--num-virtual-stages-per-pipeline-rank 2", "--no-overlap-p2p-communication"),
        "performance.overlap.pp",
        False,
    ),
    (("--pipeline-model-parallel-size 4",), "performance.overlap.pp", False),
    (("--pipeline-model-parallel-size 4", "--decoder-last-pipeline-num-layers 2"), "parallelism.layers_per_stage", [2, 2, 2, 2]),
    (("--pipeline-model-parallel-size 4", "--decoder-first-pipeline-num-layers 5"), "parallelism.layers_per_stage", [5, 1, 1, 1]),
    (
        ("--pipeline-model-parallel-size 2", "--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 3"),
        "parallelism.layers_per_stage",
        [5, 3],
    ),
    (
        ("--pipeline-model-parallel-size 2", "--num-layers 6 --account-for-embedding-in-pipeline-split",
         "--account-for-loss-in-pipeline-split"),
        "parallelism.embedding_and_loss_count_as_layers", True,
    ),
    (
        ("--pipeline-model-parallel-size 2", "--num-layers 7 --account-for-loss-in-pipeline-split"),
        "parallelism.layers_per_stage", [4, 3],
    ),
    (
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout 'Et|tt*2|ttt|tL'"),
        "parallelism.layers_per_stage", [1, 3, 3, 1],
    ),
    (("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-layout 'Et|tt*2|ttt|tL'"), "parallelism.vpp", 2),
    (("--ddp-num-buckets 5",), "parallelism.n_param_buckets", 5),
    # 40e6 elements of fp32 gradients
    (("--ddp-bucket-size 40000000",), "parallelism.bucket_size_mb", 160.0),
    ((), "performance.activation_checkpointing_type", "none"),
    (("--recompute-activations",), "performance.recompute", {"granularity": "selective", "modules": ["core_attn"]}),
    (
        ("--recompute-granularity selective", "--recompute-modules core_attn layernorm moe_act"),
        "performance.recompute.modules", ["core_attn", "layernorm"],
    ),
    (
        ("--recompute-granularity full", "--recompute-method block", "--recompute-num-layers 3"),
        "performance.recompute", {"granularity": "full", "method": "block", "n_layers": 3},
    ),
    (("--fp8-format hybrid",), "performance.precision", "fp8_delayed"),
    (("--fp8-format e4m3", "--fp8-recipe mxfp8", "--fp8-param-gather"), "performance.precision", "mxfp8"),
    (("--fp8-format hybrid", "--fp8-recipe tensorwise", "--fp8-param-gather"), "performance.fp8_params", True),
    (("--fp8-format hybrid", "--fp8-recipe blockwise"), "performance.precision", "fp8_blockwise"),
    (("--fp4-format e2m1",), "performance.precision", "nvfp4"),
    ((), "performance.main_grad_dtype", "fp32"),
    (("--grad-reduce-in-bf16",), "performance.main_grad_dtype", "bf16"),
    (("--use-precision-aware-optimizer", "--main-grads-dtype bf16"), "performance.main_grad_dtype", "bf16"),
    (("--use-precision-aware-optimizer",), "performance.master_dtype", "remainder"),
    (
        ("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"),
        "performance.moment_dtype", "bf16",
    ),
    (("--attention-backend unfused",), "performance.attention_impl", "unfused"),
    (("--transformer-impl local",), "performance.attention_impl", "unfused"),
    (("--transformer-impl local", "--use-flash-attn"), "performance.attention_impl", "flash"),
    (("--attention-backend local", "--no-masked-softmax-fusion"), "performance.softmax_impl", "composite"),
    (("--position-embedding-type rope", "--no-rope-fusion"), "performance.rope_impl", "own_tables"),
    (("--swiglu", "--no-bias-swiglu-fusion"), "performance.activation_impl", "composite"),
    (("--disable-bias-linear",), "performance.activation_impl", "composite"),
    (("--cross-entropy-loss-fusion",), "performance.loss_impl", "native"),
    (("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl te"), "performance.loss_impl", "fused"),
    (("--cuda-graph-impl local", "--cuda-graph-scope attn mlp"), "performance.cuda_graphs", True),
    (("--enable-cuda-graph",), "performance.cuda_graphs", True),
    (("--no-gradient-accumulation-fusion",), "performance.grad_accumulation_fusion", False),
    # 4 * 1024 * 2 / 3 = 2730.67, down to a multiple of 64
    (("--swiglu",), "model.inter_sz", 2688),
    ((), "model.inter_sz", 4096),
    (("--squared-relu", "--disable-bias-linear"), "model.activation", "relu2"),
    (("--squared-relu", "--disable-bias-linear"), "performance.activation_impl", "fused"),
    (("--quick-geglu",), "model.activation", "gelu"),
    (("--group-query-attention", "--num-query-groups 2"), "model.n_kv_heads", 2),
    (("--num-query-groups 2",), "model.n_kv_heads", 8),
    (("--kv-channels 64",), "model.head_dim", 64),
    (("--normalization RMSNorm",), "model.norm_bias", False),
    (("--disable-bias-linear", "--add-qkv-bias"), "model.qkv_bias", True),
    (("--qk-layernorm",), "model.qk_norm", True),
    (("--untie-embeddings-and-output-weights",), "model.tie_embeddings", False),
    (("--use-rotary-position-embeddings",), "model.learned_positions", False),
    (("--position-embedding-type none",), "model.rotary_embeds", False),
    (("--hidden-dropout 0", "--attention-dropout 0"), "model.dropout", 0.0),
    (("--hidden-dropout 0",), "model.dropout", 0.0),
    (("--hidden-dropout 0",), "model.attention_dropout", 0.1),
    (("--attention-dropout 0",), "model.attention_dropout", 0.0),
    (("--attention-dropout 0",), "model.dropout", 0.1),
    (("--tokenizer-type NullTokenizer", "--vocab-size 128256"), "model.vocab_sz", 128257),
    (("--padded-vocab-size 51200",), "model.vocab_sz", 51200),
    # 50257 up to a multiple of 256
    (("--make-vocab-size-divisible-by 256",), "performance.vocab_multiple", 256),
    (("--global-batch-size 32", "--micro-batch-size 4"), "data.microbatch_sz", 4),
    (("--num-layers 4", "--num-layers 12"), "model.n_layers", 12),
    (("--hidden-size=2048",), "model.hidden_sz", 2048),
    (
        ("--cuda-graph-impl transformer_engine", "--cuda-graph-scope attn moe_router"),
        "performance.cuda_graphs", ["attn", "moe_router"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "key", "value"), CASES)
def test_a_flag_becomes_a_key(flags, key, value):
    found = reading(*flags)
    node = found.config
    for part in key.split("."):
        node = node[part]
    assert node == value


def test_the_master_copy_is_whole_under_other_recipes():
    """megatron-core 0.16.1 core/optimizer/optimizer_config.py: remainders with no recipe or delayed scaling alone."""
    flags = ("--use-precision-aware-optimizer", "--fp8-format hybrid")
    assert reading(*flags).config["performance"]["master_dtype"] == "remainder"
    assert "master_dtype" not in reading(*flags, "--fp8-recipe tensorwise").config["performance"]


def test_a_batch_that_nobody_says_is_one_micro_batch_each():
    text = script("--tensor-model-parallel-size 2").replace("--global-batch-size 64", "")
    found = read_megatron("run.sh", text)
    assert found.config["data"]["gbs"] == 4
    assert "global batch not set, 4 assumed: one micro-batch per replica" in found.config["notes"]


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*3|(tt|)*2tL", ["Ettt", "tt", "tt", "tL"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        ("E,t*2|t,L", ["Ett", "tL"]),
        ("Et||tL", ["Et", "", "tL"]),
        ("Et|*2tL", ["Et", "", "tL"]),
    ],
)  # fmt: skip
def test_pipeline_layouts_are_spelled_out(layout, stages):
    assert stages_of(layout) == stages


UNMODELED = [
    (("--mtp-num-layers 1", "--mtp-standalone"),
     "--mtp-standalone true: multi-token prediction on a separate stage"),
    (("--optimizer soap",), "--optimizer soap: an optimizer other than Adam: counted with Adam's two moments"),
    (("--exp-avg-dtype fp8", "--use-precision-aware-optimizer"),
     "--exp-avg-dtype fp8: dtypes other than both moments in fp32, bf16 or fp16: counted as fp32"),
    (("--tensor-modle-parallel-size 2",),
     f"--tensor-modle-parallel-size 2: not an option of {RELEASE}; did you mean --tensor-model-parallel-size?"),
    (("--my-own-hidden-size 3",), f"--my-own-hidden-size 3: not an option of {RELEASE}; its name suggests a cost"),
        (("--frobnicate-tensor-size 3",), f"--frobnicate-tensor-size 3: not an option of {RELEASE}; its name suggests a cost"),
]  # fmt: skip


def test_a_group_of_micro_batches_that_megatron_refuses_is_refused():
    """20 sequences on dp 2 are 10 micro-batches: groups of pp 4 leave 2, fewer than pp (core schedules.py, :1007); 5 divides."""
    flags = ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 20",)
    found = reading(*flags)
    assert found.config["parallelism"]["microbatch_group_sz"] == 4
    rule = "must be from pp 4 to the 10 micro-batches, and the last group empty or at least pp (got 4); use 5"
    assert problems(to_job, found, H100) == [f"run.sh: parallelism.microbatch_group_sz: {rule}"]
    said = reading(*flags, "--microbatch-group-size-per-virtual-pipeline-stage 5")
    assert to_job(said, H100).parallelism.microbatch_group_sz == 5
    assert "microbatch_group_sz" not in reading(flags[0].replace("20", "16")).config["parallelism"]  # 8 micro-batches


@pytest.mark.parametrize(("flags", "line"), UNMODELED)
def test_what_costs_and_is_not_modeled_is_one_line(flags, line):
    found = reading(*flags)
    told = problems(to_job, found, H100)
    assert told == [f"run.sh: {line}{LEFT_OUT}"]
    job = to_job(found, H100, allow_unmodeled=True)
    assert f"ignored (not modeled): {line}" in job.notes


@pytest.mark.parametrize(
    ("flag", "note"),
    [
        (
            "--no-bias-dropout-fusion",
            "--no-bias-dropout-fusion true: bias, dropout and residual in separate kernels",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type p2p a2a",
            "--cp-comm-type p2p a2a: exchanges of several kinds: counted as a ring",
        ),
        (
            "--tensor-model-parallel-size 2 --distribute-saved-activations",
            "--distribute-saved-activations true: checkpoints spread over tensor-parallel ranks: each is counted with all",
        ),
        ("--embed-layernorm", "--embed-layernorm true: a norm of the embedding is not counted"),
    ],
)
def test_what_costs_little_is_approximated_and_told(flag, note):
    assert f"approximated: {note}" in to_job(reading(flag), H100).notes


def test_flags_of_forks_are_told_and_cost_nothing():
    """--trigger-path and its kin: names that speak of no size, layout, precision, recomputation, optimizer or overlap."""
    found = reading("--trigger-path /x --codecarbon-dir /y --use-z-loss --abort-on-unmet-fused-kernel-constraints")
    assert found.of("unmodeled") == []
    names = "--trigger-path, --codecarbon-dir, --use-z-loss, --abort-on-unmet-fused-kernel-constraints"
    assert f"not options of {RELEASE}, assumed to have no cost: {names}" in found.config["notes"]


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer adam",
        "--mtp-num-layers 0",
        "--rotary-percent 0.5",
        "--no-bias-dropout-fusion --disable-bias-linear --hidden-dropout 0 --attention-dropout 0",
        "--softmax-type vanilla",
        "--empty-unused-memory-level 0",
    ],
)
def test_a_value_that_changes_nothing_is_no_problem(flags):
    assert reading(flags).of("unmodeled") == []
