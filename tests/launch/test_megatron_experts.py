"""Flags of experts, latent attention and windows: what each becomes, by Megatron-Core's own words and defaults (0.16.1)."""

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.megatron.layer_kinds import listed
from steptime.launch.megatron.sources import read_megatron
from steptime.launch.nemo.formats import read_nemo
from steptime.launch.reading import to_job

EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 1024"


def reading(flags, start="torchrun --nproc_per_node 8 pretrain_gpt.py"):
    usual = "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 --seq-length 512 --bf16"
    more = "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 64 --vocab-size 50257 --disable-bias-linear"
    return read_megatron("run.sh", f"{start} {usual} {more} {flags}\n", {})


def section(flags, *path):
    found = reading(flags).config
    for key in path:
        found = found[key]
    return found


@pytest.mark.parametrize("more", ["", " --fp8-format e4m3 --fp8-recipe mxfp8"])
def test_the_op_fuser_has_epilogues_for_grouped_products_in_mxfp8_alone(more):
    """In bf16, and with experts in turn, its operations are those of TransformerEngine's modules."""
    found = reading(f"{EXPERTS} --use-transformer-engine-op-fuser{more}")
    assert "fused_mlp" not in found.config["performance"]["moe"]
    (flag,) = [flag for flag in found.flags if flag.name == "--use-transformer-engine-op-fuser"]
    assert (flag.status, flag.note) == ("approximated", "TransformerEngine's modules are counted")


@pytest.mark.parametrize(("dispatcher", "paged"), [("flex", True), ("alltoall", False)])
def test_pages_of_fused_experts(dispatcher, paged):
    """Paged stash belongs to the fused grouped MLP behind HybridEP."""
    said = "--moe-grouped-gemm --use-transformer-engine-op-fuser --fp8-format e4m3 --fp8-recipe mxfp8 --moe-paged-stash"
    found = reading(f"{EXPERTS} {said} --moe-token-dispatcher-type {dispatcher} --moe-router-dtype fp32")
    assert found.config["performance"]["moe"].get("paged_stash", False) is paged


@pytest.mark.parametrize(
    ("said", "backend", "status"),
    [
        ("flex --moe-flex-dispatcher-backend hybridep", "hybridep", "used"),
        ("flex --moe-flex-dispatcher-backend deepep", None, "used"),
        ("flex --moe-flex-dispatcher-backend ncclep", None, "approximated"),
        ("alltoall --moe-flex-dispatcher-backend hybridep", None, "irrelevant"),
    ],
)
def test_library_of_the_flex_dispatcher(said, backend, status):
    """DeepEP unless HybridEP is said; the other dispatchers have none."""
    found = reading(f"{EXPERTS} --moe-router-dtype fp32 --moe-token-dispatcher-type {said}")
    assert found.config["performance"]["moe"].get("flex_backend") == backend
    assert [flag.status for flag in found.flags if flag.name == "--moe-flex-dispatcher-backend"] == [status]


@pytest.mark.parametrize(
    ("said", "sms", "status"),
    [
        ("flex --moe-deepep-num-sms 24", 24, "used"),
        ("flex --moe-flex-dispatcher-num-sms 32", 32, "used"),
        ("flex --moe-flex-dispatcher-num-sms 32 --moe-flex-dispatcher-backend hybridep", None, "irrelevant"),
        ("alltoall --moe-deepep-num-sms 24", None, "irrelevant"),
    ],
)
def test_multiprocessors_of_deepep(said, sms, status):
    """Of DeepEP alone, by the older or the newer name."""
    found = reading(f"{EXPERTS} --moe-router-dtype fp32 --moe-token-dispatcher-type {said}")
    assert found.config["performance"]["moe"].get("deepep_sms") == sms
    assert [flag.status for flag in found.flags if flag.name.endswith("-num-sms")] == [status]


def test_odd_multiprocessors_of_deepep():
    """deep_ep/buffer.py, set_num_sms: the SM count must be even."""
    with pytest.raises(ConfigError, match=r"--moe-deepep-num-sms: expected an even number \(got 21\); use 22"):
        to_job(reading(f"{EXPERTS} --moe-token-dispatcher-type flex --moe-deepep-num-sms 21"), HARDWARE)


@pytest.mark.parametrize(
    ("said", "quantized"),
    [
        ("--fp8-format e4m3 --fp8-recipe mxfp8", True),
        ("--fp8-format e4m3", None),
        ("--fp4-format e2m1", None),
        ("", None),
    ],
)
def test_heads_are_quantized_in_mxfp8_alone(said, quantized):
    """megatron/core/fp8_utils.py, is_mxfp8_output_proj_active."""
    found = reading(f"{said} --fp8-output-proj")
    assert found.config["performance"].get("quantized_head") is quantized
    (flag,) = [flag for flag in found.flags if flag.name == "--fp8-output-proj"]
    assert flag.status == ("used" if quantized else "irrelevant")
    assert flag.note == ("performance.quantized_head" if quantized else "only with fp8_recipe mxfp8")


def test_what_is_unsaid_is_as_the_parser_has_it():
    """Top 2, no balancing loss as its coefficient is 0, all-gather, experts as wide as the MLP and split over tp."""
    plan = reading("--num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel").config
    assert plan["model"]["moe"] == {
        "n_experts": 8, "expert_inter_sz": 4096, "experts_per_token": 2, "score_function": "softmax", "pre_softmax": False,
        "expert_bias": False, "load_balancing": "none", "z_loss": False,
    }  # fmt: skip
    assert plan["performance"]["moe"] == {
        "dispatcher": "allgather", "permute_fusion": False, "router_dtype": "compute", "grouped_gemm": False,
        "shared_expert_overlap": False, "deterministic": False, "delay_wgrad_compute": False,
    }  # fmt: skip
    assert (plan["parallelism"]["ep"], plan["parallelism"]["etp"]) == (1, 2)
    assert to_job(reading("--num-experts 8"), HARDWARE).model.moe is not None


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        ("--moe-layer-freq 2", ("model", "layers"), [{"kind": kind, "repeat": 1} for kind in ("moe", "dense") * 4]),
        ("--moe-layer-freq '([0]*3+[1]*5)'", ("model", "moe", "n_dense_layers"), 3),
        ("--moe-layer-freq '([0]+[1]*3)*2'", ("model", "layers"),
         [{"kind": "dense", "repeat": 1}, {"kind": "moe", "repeat": 3}] * 2),
        ("--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 8",
         ("model", "linear_attention"),
         {"kind": "gated_delta_net", "n_key_heads": 8, "n_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128,
          "conv_width": 4, "freq": 4}),
        ("--experimental-attention-variant gated_delta_net --linear-attention-freq '([1]*3+[0])*2'",
         ("model", "linear_attention", "freq"), [1, 1, 1, 0, 1, 1, 1, 0]),
        ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3", ("model", "mtp"), 1),
        ("--quick-geglu --activation-func-clamp-value 7.0", ("model", "swiglu_limit"), 7.0),
        ("--moe-router-topk 4", ("model", "moe", "experts_per_token"), 4),
        ("--moe-router-score-function sigmoid", ("model", "moe", "score_function"), "sigmoid"),
        ("--moe-router-pre-softmax", ("model", "moe", "pre_softmax"), True),
        ("--moe-router-enable-expert-bias", ("model", "moe", "expert_bias"), True),
        ("--moe-aux-loss-coeff 1e-2", ("model", "moe", "load_balancing"), "aux_loss"),
        ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4", ("model", "moe", "load_balancing"),
         "seq_aux_loss"),
        ("--moe-router-load-balancing-type sinkhorn", ("model", "moe", "load_balancing"), "sinkhorn"),
        ("--moe-z-loss-coeff 1e-3", ("model", "moe", "z_loss"), True),
        ("--moe-latent-size 64", ("model", "moe", "latent_sz"), 64),
        ("--moe-expert-capacity-factor 1.5", ("model", "moe", "capacity_factor"), 1.5),
        ("--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity", ("model", "moe", "pad_to_capacity"), True),
        ("--moe-router-num-groups 8 --moe-router-group-topk 4", ("model", "moe", "node_limit"), 4),
        ("--moe-shared-expert-intermediate-size 2048", ("model", "moe", "n_shared_experts"), 2),
        ("--moe-shared-expert-intermediate-size 512", ("model", "moe", "shared_expert_inter_sz"), 512),
        ("--moe-token-dispatcher-type alltoall_seq", ("performance", "moe", "dispatcher"), "alltoall"),
        ("--moe-router-dtype fp32", ("performance", "moe", "router_dtype"), "fp32"),
        ("--moe-grouped-gemm", ("performance", "moe", "grouped_gemm"), True),
        ("--moe-permute-fusion", ("performance", "moe", "permute_fusion"), True),
        ("--moe-grouped-gemm --use-transformer-engine-op-fuser --fp8-format e4m3 --fp8-recipe mxfp8",
         ("performance", "moe", "fused_mlp"), True),
        ("--expert-model-parallel-size 4", ("parallelism", "ep"), 4),
        ("--expert-model-parallel-size 4 --overlap-moe-expert-parallel-comm", ("performance", "overlap", "ep"), True),
        (
            "--expert-model-parallel-size 4 --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
            ("performance", "moe", "delay_wgrad_compute"), True,
        ),
        ("--moe-layer-recompute", ("performance", "recompute", "modules"), ["core_attn", "moe"]),
        (
            "--recompute-granularity selective --recompute-modules moe_act layernorm mla_up_proj",
            ("performance", "recompute", "modules"), ["moe_act", "layernorm"],
        ),
    ],
)  # fmt: skip
def test_a_flag_of_experts_becomes_a_key(flags, path, value):
    assert section(f"{EXPERTS} {flags}", *path) == value


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("--multi-latent-attention --qk-layernorm", {
            "kind": "mla", "kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}),
        ("--multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512", {
            "kind": "mla", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128}),
        # 127 positions to the left, and a position itself
        ("--window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable",
         {"window": 128, "window_pattern": 2, "sinks": True}),
        ("--attention-output-gate", {"gated": True}),
    ],
)  # fmt: skip
def test_kinds_of_attention(flags, value):
    assert section(flags, "model", "attention") == value
    to_job(reading(flags), HARDWARE)


def test_windows_as_long_as_the_sequence_are_none():
    assert "attention" not in reading("--window-size 512,0").config["model"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (f"{EXPERTS} --moe-use-upcycling", "--moe-use-upcycling true: a dense checkpoint made into experts"),
        (f"{EXPERTS} --moe-extended-tp", "--moe-extended-tp true: each expert split over tp and ep together"),
    ],
)
def test_what_is_not_modeled_is_one_line(flags, line):
    with pytest.raises(ConfigError) as error:
        to_job(reading(flags), HARDWARE)
    assert error.value.problems == [f"run.sh: {line}; not modeled; --allow-unmodeled ignores it"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (f"{EXPERTS} --moe-layer-freq [0]*3", "--moe-layer-freq: expected a number or 8 layers of 0 and 1 (got [0]*3)"),
        (f"{EXPERTS} --moe-token-dispatcher-type pigeon",
         "--moe-token-dispatcher-type: expected one of allgather, alltoall, alltoall_seq, flex (got 'pigeon')"),
    ],
)  # fmt: skip
def test_what_megatron_does_not_take_is_one_line(flags, problem):
    with pytest.raises(ConfigError) as error:
        reading(flags)
    assert [line for line in error.value.problems if "moe" in line] == [f"run.sh: {problem}"]


def test_experts_of_older_releases_are_refused():
    old = "--DDP-impl local --num-experts 8 --moe-router-topk 1"
    with pytest.raises(ConfigError) as error:
        to_job(reading(old), HARDWARE)
    assert len(error.value.problems) == 1
    assert "--num-experts 8: mixture of experts of older releases and DeepSpeed" in error.value.problems[0]


def test_one_expert_and_switches_of_experts_alone_are_dense():
    for flags in ("--num-experts 1 --moe-router-topk 1", "--moe-grouped-gemm --moe-router-topk 4 --moe-latent-size 8"):
        found = reading(flags)
        assert "moe" not in found.config["model"]
        assert found.of("unmodeled") == []


def test_a_config_object_has_latents_of_its_own_size():
    """MLATransformerConfig: ranks of 512, where the parser has none for queries and 32 for keys."""
    fields = {
        "num_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 4096, "seq_length": 512,
        "vocab_size": 1000, "multi_latent_attention": "true", "qk_layernorm": "true",
    }  # fmt: skip
    lines = "\n".join(f"  {key}: {value}" for key, value in fields.items())
    batch = "train:\n  global_batch_size: 8\n  micro_batch_size: 1\n"
    text = f"_target_: megatron.bridge.training.config.ConfigContainer\nmodel:\n{lines}\n{batch}"
    attention = read_nemo("job", text, {}).config["model"]["attention"]
    assert (attention["q_lora_rank"], attention["kv_lora_rank"]) == (512, 512)


@pytest.mark.parametrize("text", ["[0]*99999*99999", "__import__('os')", "[0]-[1]", "[[0]]*2", "(" * 5000])
def test_other_python_is_no_pattern(text):
    assert set(listed(text)) <= {0}
    assert len(listed(text)) <= 10_000


@pytest.mark.parametrize(
    ("frequency", "first", "dense"), [("-1", "2", 2), ("1", "-1", None), ("1", "0", None), ("-1", "-1", None)]
)
def test_dense_layers_before_those_with_experts(frequency, first, dense):
    """MindSpeed-LLM's layer n of 0, 1, ... has experts if n >= --first-k-dense-replace and n % --moe-layer-freq == 0."""
    flags = f"{EXPERTS} --moe-layer-freq {frequency} --first-k-dense-replace {first} --n-shared-experts 2"
    moe = section(flags, "model", "moe")
    assert moe.get("n_dense_layers") == dense
    assert (moe["n_shared_experts"], moe["shared_expert_inter_sz"]) == (2, 2048)
    every = section(f"{EXPERTS} --moe-layer-freq 2 --first-k-dense-replace 3", "model", "layers")
    assert [(run["kind"], run["repeat"]) for run in every] == [
        ("dense", 4),
        ("moe", 1),
        ("dense", 1),
        ("moe", 1),
        ("dense", 1),
    ]


def test_a_router_of_mindspeed_without_a_loss():
    flags = "--num-experts 8 --moe-intermediate-size 1024 --moe-router-load-balancing-type softmax_topk --moe-aux-loss-coeff 0.01"
    moe = section(flags, "model", "moe")
    assert (moe["expert_inter_sz"], moe["load_balancing"], moe["pre_softmax"]) == (1024, "none", True)
    with pytest.raises(ConfigError, match=r"moe-layer-freq: expected a number or 8 layers of 0 and 1 \(got 0\)"):
        section(f"{EXPERTS} --moe-layer-freq 0", "model")


def test_experts_of_mindspeed_llm():
    """Its --n-shared-experts have a routed one's width each, 2 x 768; layers before --first-k-dense-replace are dense."""
    said = (
        "--num-experts 8 --moe-intermediate-size 768 --n-shared-experts 2 --first-k-dense-replace 3 --moe-layer-freq 1"
    )
    fused = "--moe-grouped-gemm --use-fused-moe-token-permute-and-unpermute --gemm-gradient-accumulation-fusion"
    found = reading(f"{said} {fused} --moe-token-dispatcher-type alltoall")
    moe = found.config["model"]["moe"]
    keys = ("expert_inter_sz", "n_shared_experts", "shared_expert_inter_sz", "n_dense_layers")
    assert [moe[key] for key in keys] == [768, 2, 1536, 3]
    assert found.config["performance"]["moe"]["permute_fusion"]
    assert [flag.name for flag in found.of("approximated")] == ["--gemm-gradient-accumulation-fusion"]
    plain = reading(said.replace("--n-shared-experts 2 --first-k-dense-replace 3 ", "")).config["model"]["moe"]
    assert [plain.get(key) for key in keys] == [768, None, None, None]
