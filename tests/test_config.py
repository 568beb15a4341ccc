"""Bad input: every problem at once, one line each, never a traceback."""

import pytest

from steptime.base.config import Config, ConfigError
from steptime.base.core_schemas import Field
from steptime.job.job import Job
from steptime.job.limits import DUALPIPE
from steptime.software.profiles import profile_names

PLAN = """
model: {n_layers: 80, hidden_sz: 8192, inter_sz: 28672, n_q_heads: 64, n_kv_heads: 8, vocab_sz: 128256}
parallelism: {tp: 8, pp: 2, dp: 64}
data: {gbs: 2048, seqlen: 2048, microbatch_sz: 1}
hardware: {node_type: dgx-h100}
"""
COMMA = "data.024: unknown key (got nothing); a comma separates keys, write numbers without it (1024)"


def problems(text=PLAN, *sets):
    with pytest.raises(ConfigError) as error:
        Job.load(text, sets)
    assert str(error.value) == "\n".join(error.value.problems)
    assert all("\n" not in line for line in error.value.problems)
    return error.value.problems


def test_the_plan_itself_is_sound():
    assert Job.load(PLAN).parallelism.devices == 1024


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        # unknown keys
        ("parallelism.tpp=8", "parallelism.tpp: unknown key (got 8); did you mean 'tp'?"),
        ("modle.n_layers=8", "modle: unknown key (got a mapping); did you mean 'model'?"),
        (
            "nonsense=1",
            (
                "nonsense: unknown key (got 1); valid: cross_dc, data, devices, hardware, model, notes, parallelism, "
                "performance, run"
            ),
        ),
        ("run.tokns=1e12", "run.tokns: unknown key (got 1e+12); did you mean 'tokens'?"),
        (
            "data.colour=red",
            "data.colour: unknown key (got 'red'); valid: gbs, microbatch_sz, seqlen",
        ),
        (
            "performance.recompute={granularity: full, metod: block}",
            "performance.recompute.metod: unknown key (got 'block'); did you mean 'method'?",
        ),
        ("data={gbs: 2048, seqlen: 2048, microbatch_sz: 1,024}", COMMA),
        # wrong types
        ("parallelism.tp=eight", "parallelism.tp: expected a whole number (got 'eight')"),
        ("parallelism.tp=8.5", "parallelism.tp: expected a whole number (got 8.5)"),
        ("parallelism.tp=true", "parallelism.tp: expected a whole number (got true)"),
        ("parallelism.tp=", "parallelism.tp: expected a whole number (got nothing)"),
        ("parallelism.tp=[8]", "parallelism.tp: expected a whole number (got a list of 1)"),
        ("parallelism.zero_level=true", "parallelism.zero_level: expected one of 0, 1, 2, 3 (got true)"),
        ("parallelism.sp=maybe", "parallelism.sp: expected true or false (got 'maybe')"),
        ("parallelism=8", "parallelism: expected a mapping (got 8); give its keys: 3dtrn explain --key parallelism"),
        ("data=[1, 2]", "data: expected a mapping (got a list of 2); give its keys: 3dtrn explain --key data"),
        ("run.tokens=many", "run.tokens: expected a number (got 'many')"),
        (
            "run={checkpoint_write_s: 3, checkpoint_bytes_per_s: 1 GB/s}",
            "run: checkpoint_write_s and checkpoint_bytes_per_s are both set; use one",
        ),
        ("run.tokens=.nan", "run.tokens: expected a finite number (got nan)"),
        ("run.checkpoint_write_s=.inf", "run.checkpoint_write_s: expected a finite number (got inf)"),
        ("run.checkpoint_interval_s=.inf", "run.checkpoint_interval_s: expected a finite number (got inf)"),
        ("run.checkpoint_interval_s=-.inf", "run.checkpoint_interval_s: expected a finite number (got -inf)"),
        ("run.restart_s=.inf", "run.restart_s: expected a finite number (got inf)"),
        ("parallelism.layers_per_stage=[40, x]", "parallelism.layers_per_stage[1]: expected a whole number (got 'x')"),
        (
            "parallelism.layers_per_stage=atuo",
            "parallelism.layers_per_stage: expected a list or auto (got 'atuo'); did you mean 'auto'?",
        ),
        # zero, negative, absurd
        ("parallelism.tp=0", "parallelism.tp: must be at least 1 (got 0)"),
        ("parallelism.dp=-4", "parallelism.dp: must be at least 1 (got -4)"),
        ("model.n_layers=0", "model.n_layers: must be at least 1 (got 0)"),
        ("model.n_layers=1e9", "model.n_layers: must be at most 10,000 (got 1000000000); lower it"),
        ("parallelism.tp=1e12", "parallelism.tp: must be at most 10,000 (got 1000000000000); lower it"),
        ("data.seqlen=2e9", "data.seqlen: must be at most 100,000,000 (got 2000000000); lower it"),
        ("data.gbs=1e15", "data.gbs: must be at most 100,000,000 (got 1000000000000000); lower it"),
        ("run.tokens=0", "run.tokens: must be greater than 0 (got 0)"),
        ("performance.moe.deepep_sms=7", "performance.moe.deepep_sms: must be a multiple of 2 (got 7)"),
        (
            "cross_dc={n_dcs: 1, interconnect_bandwidth_gbps: 10, interconnect_latency_s: 5 ms}",
            "cross_dc.n_dcs: must be at least 2 (got 1)",
        ),
        (
            "cross_dc={n_dcs: 2, interconnect_bandwidth_gbps: 10, interconnect_latency_s: 1e300}",
            "cross_dc.interconnect_latency_s: must be at most 60 (got 1e+300)",
        ),
        (
            f"performance.software={'9' * 70}x",
            f"performance.software: unknown profile (got '{'9' * 57}...'); valid: {', '.join(profile_names())}",
        ),
        # words
        (
            "performance.activation_checkpointing_type=selctive",
            (
                "performance.activation_checkpointing_type: expected one of none, selective, super-selective, per-op, full "
                "(got 'selctive'); "
                "did you mean 'selective'?"
            ),
        ),
        (
            "performance.activation_checkpointing_type=everything",
            (
                "performance.activation_checkpointing_type: expected one of none, selective, super-selective, per-op, full "
                "(got 'everything')"
            ),
        ),
        (
            "performance.recompute={granularity: selective, modules: [core_atn]}",
            (
                "performance.recompute.modules[0]: expected one of core_attn, layernorm, mlp, act, dropout, after_qkv, "
                "moe_act, mla_up_proj, moe, "
                "shared_experts, per_op, per_op_all, per_op_resend (got 'core_atn'); did you mean 'core_attn'?"
            ),
        ),
        (
            "performance.precision=int8",
            (
                "performance.precision: not modeled yet; use one of bf16, fp16, fp32, fp8_delayed, fp8_current, "
                "fp8_blockwise, mxfp8, nvfp4, fp8_tensorwise, fp8_rowwise, fp8_rowwise_gw_hp, mxfp8_torchao, "
                "nvfp4_torchao (got 'int8')"
            ),
        ),
        ("performance.offload=true", "performance.offload: not a key; use performance.offload_modules"),
        ("performance.cuda_graphs=maybe", "performance.cuda_graphs: expected true or false or a list (got 'maybe')"),
        (
            "parallelism.layers_per_stage=[]",
            "parallelism.layers_per_stage: expected pp*vpp = 2 counts (got []); give as many, or auto",
        ),
        (
            "performance.recompute={granularity: full, n_layers: []}",
            "performance.recompute.n_layers: expected one number, 2 (per stage) or 2 (per chunk) (got []); give as many",
        ),
        (
            "hardware.overrides.acelerator.power_w=3",
            "hardware.overrides.acelerator: unknown key (got a mapping); did you mean 'accelerator'?",
        ),
        (
            "parallelism.schedule=dualpipe",
            f"parallelism.schedule: {DUALPIPE} (got 'dualpipe')",
        ),
        (
            "performance.software=megatron",
            "performance.software: unknown profile (got 'megatron'); did you mean 'megatron-core'?",
        ),
        # machines and presets
        (
            "hardware.overrides.tiers.7.latency_s=1 us",
            "hardware.overrides.tiers.7.latency_s: '7' is not a valid index; valid: 0, 1",
        ),
        (
            "hardware.overrides.accelerator.peak_flop=1e15",
            "hardware.overrides.accelerator.peak_flop: unknown key (got 1e+15); did you mean 'peak_flops'?",
        ),
        ("model={preset: 8}", "model.preset: expected a name (got 8)"),
        ("model={preset: llama3-8b, hf: x.json}", "model: preset and hf are both given; use one"),
        ("model={preset: llama3-8b, n_layer: 4}", "model.n_layer: unknown key (got 4); did you mean 'n_layers'?"),
        # settings
        ("parallelism.tp.x=3", "parallelism.tp.x: parallelism.tp is a single value, not a section (got 8)"),
        ("parallelism.tp", "--set parallelism.tp: expected a.b=value"),
        ("=3", "--set =3: expected a.b=value"),
        ("a..b=3", "--set a..b=3: expected a.b=value"),
        ("parallelism.tp=[1", "--set parallelism.tp: line 2, column 1: did not find expected ',' or ']'"),
    ],
)
def test_one_line(setting, line):
    assert problems(PLAN, setting) == [line]


def test_unknown_machine_and_preset_name_their_neighbours():
    (line,) = problems(PLAN, "hardware.node_type=dgx-h10")
    assert line.startswith("hardware.node_type: ")
    assert "'dgx-h10'" in line
    assert "dgx-h100" in line
    (line,) = problems(PLAN, "model=llama3-7b")
    assert line.startswith("model.preset: ")
    assert "'llama3-7b'" in line
    assert "llama3-70b" in line


def test_sharding_alone_is_a_layout():
    """FSDP shares everything among all devices: tp and pp are 1 where they are not given, and dp is the 8 devices."""
    rest = "data: {gbs: 8, seqlen: 64, microbatch_sz: 1}\nhardware: dgx-h100\n"
    plan = f"model: llama3-8b\ndevices: 8\nparallelism: {{fsdp: {{}}%s}}\n{rest}"
    alone, halved = (Job.load(plan % more).parallelism for more in ("", ", tp: 2"))
    assert (alone.tp, alone.pp, alone.dp) == (1, 1, 8)
    assert (halved.tp, halved.pp, halved.dp) == (2, 1, 4)


def test_missing_sections_and_keys():
    assert problems("model: llama3-8b\n") == [
        "parallelism: required key is missing; give {tp: 1, pp: 1} and devices: N, or let 3dtrn search PLAN --devices N find it",
        "data: required key is missing; give gbs, seqlen and microbatch_sz",
        "hardware: required key is missing; name a machine (3dtrn machines)",
    ]
    assert problems(PLAN, "data={gbs: 64}") == [
        "data.seqlen: required key is missing; give the tokens per sequence",
        "data.microbatch_sz: required key is missing; give the sequences per micro-batch, or let 3dtrn search PLAN find it",
    ]


def test_all_problems_at_once_in_the_order_of_the_file():
    wrong = ("parallelism.tp=0", "parallelism.qq=1", "data.gbs=x", "model.glu=perhaps", "performance.precision=bf17")
    assert problems(PLAN, *wrong) == [
        "model.glu: expected true or false (got 'perhaps')",
        "parallelism.tp: must be at least 1 (got 0)",
        (
            "parallelism.qq: unknown key (got 1); valid: bucket_size_mb, cp, cp_a2a, cp_comm_type, dp, "
            "embedding_and_loss_count_as_layers, ep, etp, fsdp, layers_per_stage, microbatch_group_sz, n_param_buckets, "
            "pipeline_passes, pp, "
            "replicas, schedule, sp, tp, vpp, zero_level, zero_plus_plus"
        ),
        (
            "performance.precision: expected one of fp32, bf16, fp16, fp8_delayed, fp8_current, fp8_blockwise, mxfp8, nvfp4, "
            "fp8_tensorwise, fp8_rowwise, fp8_rowwise_gw_hp, mxfp8_torchao, nvfp4_torchao (got 'bf17'); did you mean 'bf16'?"
        ),
        "data.gbs: expected a whole number (got 'x')",
    ]


def test_a_typo_hides_no_broken_rule():
    lines = problems(PLAN, "parallelism.tpp=7", "data.gbs=2000", "nonsense", "hardware.node_type=dgx-h10")
    assert [line.partition(":")[0] for line in lines] == [
        "--set nonsense",
        "parallelism.tpp",
        "hardware.node_type",
        "data.gbs",
    ]


def test_a_value_that_reads_like_a_hint_is_none():
    """Unknown keys are dropped or renamed by what the error knows, not by its words."""
    text = PLAN.replace("dp: 64", "dp: 64, color: \"did you mean 'vpp'?\"")
    [line] = problems(text)
    assert line.startswith("""parallelism.color: unknown key (got "did you mean 'vpp'?"); valid: """)


def test_problems_say_where_they_are():
    with pytest.raises(ConfigError) as error:
        Job.load(PLAN, ["parallelism.tpp=8", "performance.offload=true", "data.gbs=0"])
    found = [(p.path, p.unknown, p.meant) for p in error.value.details]
    assert found == [
        ("parallelism.tpp", True, "tp"),
        ("performance.offload", True, ""),
        ("data.gbs", False, ""),
    ]
    assert [p.line for p in error.value.details] == error.value.problems


def test_a_machine_file_with_a_line_end_in_its_name_is_told_in_one_line():
    assert problems(PLAN, 'hardware.node_type="a\\nb.yaml"') == ["hardware.node_type: a b.yaml: no such file"]


@pytest.mark.parametrize("text", ["1e12", "'1e12'", "1.0e+12", "1_000_000_000_000", "1000000000000"])
def test_numbers_as_people_write_them(text):
    assert Job.load(PLAN, [f"run.tokens={text}"]).run.tokens == 1e12


@pytest.mark.parametrize("text", ["2e3", "'2048'", "2.048e3", "2_048", "02048"])
def test_whole_numbers_as_people_write_them(text):
    assert Job.load(PLAN, [f"data.seqlen={text}"]).data.seqlen in {2000, 2048}


def test_keywords_tell_problems_too():
    class Tank(Config):
        litres: float
        full: bool = False

    with pytest.raises(ConfigError, match=r"^litres: expected a number \(got true\)$"):
        Tank(litres=True)
    with pytest.raises(ConfigError, match=r"^litre: unknown key"):
        Tank(litres=3, litre=3)
    assert Tank(litres="1e3").litres == 1000.0


# --- documents ---------------------------------------------------------------------------------------------------------


def test_a_setting_of_a_presets_section_leaves_the_rest_of_it():
    """--set model.moe.node_limit=2 keeps the preset's 256 experts, and model.attention.window its sinks."""
    batch = "data: {gbs: 8, seqlen: 128, microbatch_sz: 1}, hardware: dgx-h100"
    plan = f"{{model: deepseek-v3, devices: 8, parallelism: {{tp: 1, pp: 1}}, {batch}}}"
    moe = Job.load(plan, ["model.moe.node_limit=2"]).model.moe
    assert (moe.node_limit, moe.n_experts, moe.experts_per_token) == (2, 256, 8)
    attention = Job.load(plan.replace("deepseek-v3", "gpt-oss-20b"), ["model.attention.window=64"]).model.attention
    assert (attention.window, attention.sinks) == (64, True)


def test_a_default_section_is_dumped_before_any_value_of_it_was_read():
    """Its class is not built then; pydantic 2.13 dumps it only once it is."""

    class Inner(Config):
        size: int = 2

    class Outer(Config):
        inner: Inner = Field(default_factory=Inner.model_construct)

    assert Outer().model_dump() == {"inner": {"size": 2}}
