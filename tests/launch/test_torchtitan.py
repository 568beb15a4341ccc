"""torchtitan's TOML files, logs and config functions as plans."""

import pytest
from launch_readings import DATA, HARDWARE, REFUSED, golden_text, one_line, read, saved_and_read_back, status

from steptime.base.config import ConfigError
from steptime.launch.keys import load_table, rule_of, spelled, table_file
from steptime.launch.reading import to_job
from steptime.launch.torchtitan.flavors import MODELS, hidden_dim
from steptime.launch.torchtitan.job_config import read_torchtitan
from steptime.model.presets import load_model

REGISTRY = "torchtitan/config_registry.py"
CASES = {
    "torchtitan/llama3_8b.toml": None,
    "torchtitan/llama3_70b.toml": None,
    "torchtitan/llama3_405b.toml": None,
    "torchtitan/hsdp_cp.toml": None,
    "torchtitan/llama3_8b.log": None,
    "torchtitan/debugmodel_old.log": None,
    f"{REGISTRY}:llama3_8b": {"parallelism.dp": 64},
    f"{REGISTRY}:llama3_8b_tp": None,
    f"{REGISTRY}:llama3_8b_long": None,
    f"{REGISTRY}:llama3_8b_float8": None,
    f"{REGISTRY}:llama3_8b_flex": None,
}
MINIMAL = """
[model]
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "none"
"""


OR = "; or add --set model=NAME"


def minimal(*changes):
    """The minimal job with lines replaced: ("old", "new"), or a line added to a section: ("[section]", "line")."""
    text = MINIMAL
    for old, new in changes:
        text = text.replace(old, f"{old}\n{new}" if old.startswith("[") else new)
    return text


def config(*changes, sets=None, env=None):
    return read_torchtitan("job.toml", minimal(*changes), env or {}, sets).config


@pytest.mark.parametrize("name", CASES)
def test_a_job_is_the_plan_on_record(name, golden):
    found = read(read_torchtitan, name, CASES[name])
    stem = name.replace("/", "_").replace(".py:", "_").removesuffix(".toml")
    golden(f"launch/{stem}.yaml", golden_text(found))
    saved_and_read_back(found, CASES[name])


def test_the_rest_of_the_devices_is_sharded_over():
    """64 A100, tp 8: 8 shards, each 8 sequences: 64 per step."""
    found = read(read_torchtitan, "torchtitan/llama3_70b.toml").config
    assert found["parallelism"]["dp"] == 8
    assert found["data"] == {"gbs": 64, "seqlen": 8192, "microbatch_sz": 8}


def test_replicas_shards_and_every_second_block():
    """2 x 8 replicas and shards; gbs 64 over 16 ranks of one sequence: 4 micro-batches; every second block is recomputed."""
    found = read(read_torchtitan, "torchtitan/hsdp_cp.toml")
    layout = found.config["parallelism"]
    assert (layout["dp"], layout["replicas"], layout["cp"], layout["cp_comm_type"]) == (16, 2, 2, "p2p")
    assert not layout["fsdp"]["reshard_after_forward"]
    assert found.config["performance"]["recompute"] == {"granularity": "full", "method": "every", "n_layers": 2}
    assert to_job(found, HARDWARE).microbatches == 4


def test_what_changes_cost_and_is_not_modeled_is_an_error_until_it_is_allowed():
    text = MINIMAL.replace(
        'flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.float8", "quantize.linear.other"]'
    )
    found = read_torchtitan("a.toml", text)
    assert [flag.name for flag in found.of("unmodeled")] == ["model.converters"]
    with pytest.raises(ConfigError, match=r"model\.converters \[.*float8.*--allow-unmodeled"):
        to_job(found, HARDWARE)
    job = to_job(found, HARDWARE, allow_unmodeled=True)
    assert len(job.notes) == 1
    assert str(job.performance.precision) == "bf16"


FLOAT8 = "[quantize.linear.float8]\n"


@pytest.mark.parametrize(
    ("converters", "section", "said"),
    [
        # float8.py: Float8LinearConfig() without a recipe name, which scales by tensor; the all-gather in float8 is its own
        ('["float8"]', "", {"precision": "fp8_tensorwise"}),
        ('["float8"]', "[float8]\nenable_fsdp_float8_all_gather = true\n", {"precision": "fp8_tensorwise", "fp8_params": True}),
        ('["quantize.linear.float8"]', f'{FLOAT8}recipe_name = "rowwise"\n', {"precision": "fp8_rowwise"}),
        (
            '["quantize.linear.float8"]', f'{FLOAT8}recipe_name = "rowwise"\nenable_fsdp_float8_all_gather = true\n',
            {"precision": "fp8_rowwise"},
        ),
        ('["float8"]', '[float8]\nrecipe_name = "rowwise_with_gw_hp"\n', {"precision": "fp8_rowwise_gw_hp"}),
        ('["quantize.linear.mx"]', "", {"precision": "mxfp8_torchao"}),
        ('["quantize.linear.nvfp4"]', "", {"precision": "nvfp4_torchao"}),
        ("[]", f'{FLOAT8}recipe_name = "rowwise"\n', {"precision": "bf16"}),
    ],
)  # fmt: skip
def test_converters_are_the_recipe_that_torchao_names(converters, section, said):
    text = MINIMAL.replace('flavor = "8B"', f'flavor = "8B"\nconverters = {converters}') + section
    performance = read_torchtitan("a.toml", text).config["performance"]
    assert {key: performance[key] for key in ("precision", "fp8_params") if key in performance} == said
    assert (
        to_job(read_torchtitan("a.toml", text), {"hardware.node_type": "dgx-b200"}).performance.precision
        == said["precision"]
    )


@pytest.mark.parametrize(
    ("line", "groups"), [("prefetch_distance = 3", 3), ("prefetch_distance = 1", None), ("", None)]
)
def test_groups_gathered_ahead(line, groups):
    """parallelism.prefetch_distance, of forks: set_modules_to_forward_prefetch and _backward_prefetch of so many blocks."""
    assert config(("[parallelism]", line))["parallelism"]["fsdp"].get("prefetch") == groups


def test_a_job_with_float8_of_an_older_kind_or_without_fsdp_is_refused():
    for old, new in (
        ("training]", 'training]\nfp8_linear = "delayed"'),
        ("degree = 8", "degree = 1\n[float8]\nenable_float8_linear=true"),
    ):
        found = read_torchtitan("a.toml", MINIMAL.replace(old, new), {"WORLD_SIZE": "1"} if "degree" in old else {})
        assert len(found.of("unmodeled")) == 1, found.flags


def test_a_log_tells_the_devices_and_the_model():
    found = read(read_torchtitan, "torchtitan/llama3_8b.log")
    assert found.framework == "torchtitan 0.2.0"
    assert found.config["model"] == {"preset": "llama3-8b"}
    assert found.config["parallelism"]["dp"] == 16
    text = (DATA / "torchtitan/llama3_8b.log").read_text()
    wide = text.replace("n_layers=32", "n_layers=33")
    line = one_line(read_torchtitan, wide, "a.log")
    assert line.startswith("a.log: the log counts 8,030,261,248 parameters, and the model that it describes has 8,248,")
    other = wide.replace("8,030,261,248", "8,248,373,248")
    model = read_torchtitan("a.log", other).config["model"]
    assert model["n_layers"] == 33  # a block of Llama 3 8B has 218,112,000 parameters


def test_flavors_are_the_presets():
    for family in ("llama3", "qwen3"):
        for section in table_file(MODELS)[family].values():
            if "preset" in section:
                assert load_model(section["preset"]).name == section["preset"]
    # torchtitan's own arithmetic: 2/3 of 4 * dim, times the multiplier, rounded up
    assert hidden_dim(8192, 4096, "1.3") == load_model("llama3-70b").inter_sz
    assert hidden_dim(16384, 4096, "1.2") == load_model("llama3-405b").inter_sz


def test_without_fsdp_there_is_autocast_or_no_mixed_precision():
    one = read_torchtitan("job.toml", minimal(("data_parallel_shard_degree = 8", "data_parallel_shard_degree = 1")))
    assert one.config["performance"]["software"] == "torchtitan-ddp@0.2"
    copies = "data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8"
    ddp = config(("data_parallel_shard_degree = 8", copies))
    assert (ddp["performance"]["software"], ddp["parallelism"]["dp"]) == ("torchtitan-ddp@0.2", 8)
    assert not one.of("unmodeled")  # the profile counts autocast's copies of the weights
    tp = [("data_parallel_shard_degree = 8", "data_parallel_shard_degree = 1\ntensor_parallel_degree = 4")]
    assert config(*tp)["performance"]["precision"] == "fp32"
    assert config(*tp)["parallelism"]["sp"]
    assert config(("[training]", 'dtype = "bfloat16"'))["performance"]["param_dtype"] == "bf16"


def test_pipelines_split_embedding_and_head_off_as_layers():
    """32 blocks and two ends over 4 stages: 34 = 9 + 9 + 8 + 8; the first and last give one up to the ends."""
    layout = config(("[parallelism]", "pipeline_parallel_degree = 4"), ("local_batch_size = 2", "local_batch_size = 8"))
    assert layout["parallelism"]["layers_per_stage"] == [8, 9, 8, 7]
    assert layout["data"] == {"gbs": 64, "seqlen": 4096, "microbatch_sz": 1}
    looped = config(("[parallelism]", 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "Interleaved1F1B"'))
    assert (looped["parallelism"]["vpp"], looped["parallelism"]["schedule"]) == (2, "interleaved")
    assert looped["parallelism"]["layers_per_stage"] == [4, 5, 4, 4, 4, 4, 4, 3]
    zbv = config(("[parallelism]", 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "ZBVZeroBubble"'))
    assert (zbv["parallelism"]["vpp"], zbv["parallelism"]["schedule"]) == (2, "zbv")
    unknown = minimal(
        ("[parallelism]", 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "FlexibleInterleaved1F1B"')
    )
    found = read_torchtitan("job.toml", unknown)
    assert status(found, "parallelism.pipeline_parallel_schedule") == "unmodeled"


def test_the_environment_and_the_user_tell_the_devices():
    rest = ("data_parallel_shard_degree = 8", "data_parallel_shard_degree = -1")
    assert config(rest, env={"NGPU": "8", "NNODES": "2"})["parallelism"]["dp"] == 16
    assert config(rest, env={"NGPU": "8"}, sets={"parallelism.dp": 32})["data"]["gbs"] == 64
    assert config(rest, sets={"parallelism": {"dp": 4}})["parallelism"]["dp"] == 4
    # what the user sets goes over the file, and the batch follows
    assert config(sets={"parallelism.dp": 4})["data"]["gbs"] == 8
    # a comment counts only where the file leaves the degree open
    preset = "# NOTE: this toml config is a preset for 64 A100 GPUs.\n"
    assert read_torchtitan("job.toml", preset + minimal(rest)).config["parallelism"]["dp"] == 64
    assert read_torchtitan("job.toml", preset + minimal()).config["parallelism"]["dp"] == 8


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            # run_train.sh's 8 do not hold 3 ranks of cp
            [("data_parallel_shard_degree = 8", "data_parallel_shard_degree = -1\ncontext_parallel_degree = 3")],
            ("job: number of devices unknown; add --set parallelism.dp=N (devices / 3), or set WORLD_SIZE"),
        ),
        (
            # nor 2 copies of 8 ranks of tp, and 2 copies of 4 would each be a single shard
            [
                ("data_parallel_shard_degree = 8", "data_parallel_shard_degree = -1\ntensor_parallel_degree = 8"),
                ("[parallelism]", "data_parallel_replicate_degree = 2"),
            ],
            ("job: number of devices unknown; add --set parallelism.dp=N (devices / 8), or set WORLD_SIZE"),
        ),
        (
            [
                ("data_parallel_shard_degree = 8", "data_parallel_shard_degree = -1\ntensor_parallel_degree = 4"),
                ("[parallelism]", "data_parallel_replicate_degree = 2"),
            ],
            ("job: number of devices unknown; add --set parallelism.dp=N (devices / 4), or set WORLD_SIZE"),
        ),
        (
            [("[parallelism]", "tensor_paralel_degree = 2")],
            "job: parallelism.tensor_paralel_degree 2: not an option of torchtitan 0.2; did you mean "
            "parallelism.tensor_parallel_degree?" + REFUSED,
        ),
        (
            [("[training]", "global_batch_size = 24")],
            "job: training.global_batch_size: must be a multiple of local_batch_size * data-parallel ranks = 2 * 8 (got 24)",
        ),
        (
            [("seq_len = 4096", "seq_len = 4096.5")],
            "job: training.seq_len: expected a whole number of at least 1 (got 4096.5)",
        ),
        (
            [("[model]", 'name = "flux"')],
            "job: model.name: flux, another kind of model (it makes images); not modeled",
        ),
        (
            [('"8B"', '"9B"')],
            "job: model.flavor: unknown flavor of llama3 (got '9B'); valid: 405B, 70B, 8B, debugmodel" + OR,
        ),
        # added in 2026-03, when jobs were functions
        (
            [('"8B"', '"1B"')],
            "job: model.flavor: unknown flavor of llama3 (got '1B'); valid: 405B, 70B, 8B, debugmodel" + OR,
        ),
        (
            [("[model]", 'name = "deepseek_v3"')],
            "job: model.flavor: unknown flavor of deepseek_v3 (got '8B'); valid: 16B, 236B, 671B, debugmodel" + OR,
        ),
        (
            [
                (
                    "data_parallel_shard_degree = 8",
                    ("data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1\ntensor_parallel_degree = 2"),
                )
            ],
            (
                "job: parallelism.data_parallel_replicate_degree: DDP cannot be combined with other parallelism; "
                "set data_parallel_shard_degree"
            ),
        ),
        (
            [('"none"', '"some"')],
            "job: activation_checkpoint.mode: expected none, selective, full or memory_budget (got 'some')",
        ),
    ],
)
def test_bad_settings_are_one_line(changes, line):
    assert one_line(read_torchtitan, minimal(*changes)) == line


def experts(*changes):
    """The 16B DeepSeek model on 8 ranks, with lines replaced."""
    return config(("[model]", 'name = "deepseek_v3"'), ('"8B"', '"16B"'), *changes)


def test_experts_lie_on_ranks_of_their_own():
    """expert_parallel_degree 8 of 8 ranks; DeepEP is the flexible dispatcher."""
    deepep = 'expert_parallel_degree = 8\nexpert_parallel_comm_backend = "deepep"'
    found = experts(("[parallelism]", deepep))
    assert found["parallelism"]["ep"] == 8
    assert found["performance"]["moe"] == {"dispatcher": "flex"}
    assert experts()["parallelism"]["ep"] == 1


@pytest.mark.parametrize(("library", "ranks"), [("deepep", 1), ("hybridep", 1), ("standard", None)])
def test_experts_that_tokens_take_in_turn(library, ranks):
    """Of 64 experts 16 are on each of 4 ranks, six of a token start at an even one: on 1.25 ranks on average, rounded."""
    lines = f'expert_parallel_degree = 4\nexpert_parallel_comm_backend = "{library}"'
    forced = ('mode = "none"', 'mode = "none"\n[debug]\nmoe_force_load_balance = true')
    found, free = experts(("[parallelism]", lines), forced)["model"], experts(("[parallelism]", lines))["model"]
    assert found["moe"].get("node_limit") == ranks
    assert free["moe"].get("node_limit") is None


@pytest.mark.parametrize(
    ("converter", "section", "said"),
    [
        ("mx", '[quantize.grouped_mm.mx]\nfqns = ["experts"]', "mxfp8_torchao"),
        ("mx", '[quantize.grouped_mm.mx]\nrecipe_name = "mxfp8"\nfqns = "experts"', "mxfp8_torchao"),
        ("float8", '[quantize.grouped_mm.float8]\nfqns = ["experts"]', "fp8_rowwise"),
        ("mx", "[quantize.grouped_mm.mx]\nfqns = []", None),
    ],
)
def test_products_of_experts_in_low_precision(converter, section, said):
    """quantize.grouped_mm of v0.2.2 converts the modules that fqns names; the projections stay in bf16."""
    lines = ('"8B"', f'"16B"\nconverters = ["quantize.grouped_mm.{converter}"]')
    found = config(("[model]", 'name = "deepseek_v3"'), lines, ('mode = "none"', f'mode = "none"\n{section}'))
    assert found["performance"].get("moe", {}).get("grouped_precision") == said
    assert found["performance"]["precision"] == "bf16"


@pytest.mark.parametrize("library", ["hybridep", "minimal_async_ep"])
def test_libraries_with_buffers_for_arriving_rows(library):
    lines = f'expert_parallel_degree = 8\nexpert_parallel_comm_backend = "{library}"'
    assert experts(("[parallelism]", lines))["performance"]["moe"] == {"dispatcher": "flex", "flex_backend": library}


@pytest.mark.parametrize(
    ("components", "parts"), [("", "all"), ("components = ['model']", "blocks"), ("components = ['loss']", None)]
)
def test_what_is_compiled(components, parts):
    """compile.components: blocks and loss unless the file says less."""
    text = MINIMAL + f"[compile]\nenable = true\n{components}\n"
    found = read_torchtitan("job.toml", text, {}, None)
    assert found.config["performance"].get("compile") == parts


def test_devices_that_contradict_the_degrees():
    line = one_line(read_torchtitan, minimal(), env={"WORLD_SIZE": "12"})
    assert line == "job: the product of the degrees is 8 devices, not 12"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {n_layers: 2}\n", "not valid TOML"),
        ("[training\nx = 1", "not valid TOML"),
        ('{"train_batch_size": 8}', "not valid TOML"),
        ("[tool.ruff]\nline-length = 120\n", "not a torchtitan job config: no section training or parallelism"),
        ("[titan] 2025-11-25 - root - INFO - Starting job\n", "the log does not print the job's config; run with"),
        ('[titan] INFO - Running with args: {"job": {"a": 1,\n', "the printed config is truncated"),
        ("[titan] INFO - Running with args: {a b}\n", "neither JSON nor a Python dict"),
        ("[titan] INFO - Running with args: {'lr': 0.1}\n", "the printed config is not torchtitan's"),
    ],
)
def test_other_files_are_one_line(text, words):
    assert words in one_line(read_torchtitan, text)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            "llama3_8b_while",
            "config_registry.py:67: cannot be evaluated statically (while config.training.seq_len < 9000:",
        ),
        ("llama3_9b", "no function 'llama3_9b'; did you mean 'llama3_8b'?"),
        ("", "several config functions: llama3_8b, "),
    ],
)
def test_functions_that_need_running_are_one_line(function, words):
    text = (DATA / REGISTRY).read_text()
    grown = "grown() -> Trainer.Config:\n    config = llama3_8b_tp()\n    config.training.seq_len += 4096\n"
    looped = grown.replace("grown", "while").replace(
        "    config.tr", "    while config.training.seq_len < 9000:\n        config.tr"
    )
    assert grown in text
    assert words in one_line(read_torchtitan, text.replace(grown, looped), f"{REGISTRY}:{function}".removesuffix(":"))
    assert one_line(read_torchtitan, "def f(:\n", "a.py:f").startswith("a.py:1: not valid Python")


def test_nothing_of_a_config_function_runs(tmp_path):
    trap = tmp_path / "ran"
    text = (
        f"import pathlib\npathlib.Path({str(trap)!r}).touch()\n"
        "def llama3_8b() -> Trainer.Config:\n"
        f"    __import__('pathlib').Path({str(trap)!r}).touch()\n"
        "    return Trainer.Config()\n"
    )
    assert "cannot be evaluated statically" in one_line(read_torchtitan, text, "a.py:llama3_8b")
    assert not trap.exists()


def test_the_table_knows_each_key_once():
    table = load_table("torchtitan")
    for old, new in table.renamed.items():
        assert rule_of(spelled(old, table), table), (old, new)
    assert all(rule_of(key, table).status == "used" for key in table.defaults)
