"""A job: sections in their several forms, resolved values, echo and replacement."""

import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from work import python_calls

from steptime.answer.assumptions import assumptions
from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.hardware.machine import Machine
from steptime.job.job import Job
from steptime.job.local_params import shard_of
from steptime.job.mesh import Fsdp
from steptime.job.offload_rules import OF_NO_PROFILE
from steptime.model.model import Model
from steptime.software.performance import OPTIONS, Performance
from steptime.software.recomputation import Recomputation

DLCALC = Path(__file__).parent / "data" / "dlcalc"


def usual_job(**changes):
    return jobs.job("llama3-70b", gbs=2048, seqlen=8192, tp=8, pp=4, dp=32).replace(**changes)


@pytest.mark.parametrize("name", ["llama3_70b", "llama3_70b_cross_dc", "llama3_70b_dlcalc_0.1.3"])
def test_configs_of_dlcalc_run_unchanged(name):
    loaded = Job.load(DLCALC / f"{name}.yaml")
    assert loaded.microbatches == 32
    assert loaded.zero_level == 1
    assert loaded.recompute.modules == {"core_attn"}
    assert loaded.model.tie_embeddings
    assert loaded.machine.devices_per_node == 8


def test_the_moe_config_of_dlcalc_runs():
    found = Job.load(DLCALC / "gpt_oss_120b.yaml", ["data.gbs=8448"])
    assert found.model.moe is not None
    assert (found.model.moe.n_experts, found.parallelism.ep, found.parallelism.etp) == (128, 8, 1)
    assert estimate(found).devices == 6 * 128


def test_forms_of_the_model_section(tmp_path):
    by_name = usual_job()
    assert usual_job(model={"preset": "llama3-70b"}) == by_name
    assert usual_job(model=by_name.model) == by_name
    shorter = usual_job(model={"preset": "llama3-70b", "n_layers": 40}).model
    assert (shorter.n_layers, shorter.hidden_sz) == (40, 8192)
    assert "changed: n_layers" in shorter.source
    assert (
        usual_job(model=Model(n_layers=8, hidden_sz=1024, inter_sz=4096, n_q_heads=8, vocab_sz=1000)).model.n_layers
        == 8
    )
    assert usual_job(model={"preset": "llama3-70b", "dropout": True}).model.dropout == 0.1
    assert (
        usual_job(model=by_name.model.model_copy(update={"dropout": 0.2}))
        .replace(**{"model.dropout": False})
        .model.dropout
        == 0.0
    )


def test_paths_are_relative_to_the_config(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, '
        '"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": false}'
    )
    machine = Machine.load("dgx-h100").model_dump(exclude_none=True, exclude={"provenance", "measured"})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**machine, "name": "mine"}))
    (tmp_path / "plan.yaml").write_text(
        "model: {hf: config.json}\nparallelism: {tp: 1, pp: 1, dp: 1}\n"
        "data: {gbs: 1, seqlen: 128, microbatch_sz: 1}\nhardware: {node_type: mine.yaml}\n"
    )
    loaded = Job.load(tmp_path / "plan.yaml")
    assert (loaded.model.n_layers, loaded.machine.name) == (8, "mine")
    assert Job.load(str(tmp_path / "plan.yaml")) == loaded


def test_forms_of_the_hardware_section():
    machine = Machine.load("dgx-h100")
    assert usual_job(hardware=machine).machine == machine
    assert usual_job(hardware={"node_type": machine}).machine == machine
    faster = usual_job(hardware={"node_type": "dgx-h100", "overrides": {"accelerator.memory_bytes": "96 GB"}})
    assert faster.machine.accelerator.memory_bytes == 96e9
    assert faster.replace(**{"hardware.overrides.accelerator.power_w": 500.0}).machine.accelerator.memory_bytes == 96e9
    assert Job(**usual_job(hardware=machine).to_config()).machine == machine
    with pytest.raises(ConfigError, match=r"^hardware.overrides: only for a machine given by name"):
        usual_job(hardware={"node_type": machine, "overrides": {"accelerator.power_w": 1.0}})


def test_resolved_values():
    plain = usual_job()
    assert (plain.sp, plain.zero_level, plain.schedule, plain.microbatches) == (True, 1, "1f1b", 64)
    assert plain.recompute == Recomputation()
    assert plain.software.states.param_dtype == "bf16"
    assert not plain.software.overlap.pp
    alone = usual_job(parallelism={"tp": 1, "pp": 1, "dp": 1, "sp": True})
    assert not alone.sp
    assert "sp has no effect with tp 1" in assumptions(alone)
    woven = usual_job(**{"parallelism.vpp": 5})
    assert (woven.schedule, woven.software.overlap.pp) == ("interleaved", True)
    sharded = usual_job(parallelism={"tp": 8, "pp": 1, "dp": 32, "fsdp": {}})
    assert (sharded.software.name, sharded.zero_level) == ("fsdp2", 3)
    assert sharded.replace(**{"parallelism.fsdp.reshard_after_forward": False}).zero_level == 2


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, [20, 20, 20, 20]),
        ({"parallelism.vpp": 2}, [10] * 8),
        ({"parallelism.layers_per_stage": [19, 21, 21, 19]}, [19, 21, 21, 19]),
        ({"model.n_layers": 78, "parallelism.layers_per_stage": "auto"}, [19, 20, 20, 19]),
        ({"model.n_layers": 79, "parallelism.layers_per_stage": "auto"}, [20, 20, 20, 19]),
        # Llama-3 405B: 126 layers + 2 on 16 stages of 8, Grattafiori et al. 2024, section 3.3.2
        ({"model.n_layers": 126, "parallelism.embedding_and_loss_count_as_layers": True}, [31, 32, 32, 31]),
        ({"model.n_layers": 2, "parallelism.embedding_and_loss_count_as_layers": True}, [0, 1, 1, 0]),
    ],
)
def test_layers_per_chunk(changes, counts):
    layered = usual_job(**changes)
    assert layered.layers_per_chunk == counts
    assert sum(counts) == layered.model.n_layers


def test_one_chunk_holds_all_layers():
    whole = {"tp": 8, "pp": 1, "dp": 32, "embedding_and_loss_count_as_layers": True}
    assert usual_job(parallelism=whole).layers_per_chunk == [80]


@pytest.mark.parametrize(
    ("performance", "plan"),
    [
        ({}, Recomputation()),
        ({"activation_checkpointing_type": "none"}, Recomputation()),
        ({"activation_checkpointing_type": "selective"}, Recomputation("selective", modules=frozenset({"core_attn"}))),
        (
            {"activation_checkpointing_type": "super-selective"},
            Recomputation("selective", modules=frozenset({"core_attn", "layernorm", "act", "dropout"})),
        ),
        ({"activation_checkpointing_type": "full"}, Recomputation("full", "uniform", (1,) * 8)),
        ({"recompute": {"granularity": "selective"}}, Recomputation("selective", modules=frozenset({"core_attn"}))),
        (
            {"recompute": {"granularity": "selective", "modules": ["mlp"]}},
            Recomputation("selective", modules=frozenset({"mlp"})),
        ),
        (
            {"recompute": {"granularity": "full", "method": "block", "n_layers": 2}},
            Recomputation("full", "block", (2,) * 8),
        ),
        # one number per stage: chunk c of stage r is entry c*pp + r
        (
            {"recompute": {"granularity": "full", "method": "block", "n_layers": [4, 3, 2, 0]}},
            Recomputation("full", "block", (4, 3, 2, 0, 4, 3, 2, 0)),
        ),
        (
            {"recompute": {"granularity": "full", "method": "block", "n_layers": [8, 7, 6, 5, 4, 3, 2, 1]}},
            Recomputation("full", "block", (8, 7, 6, 5, 4, 3, 2, 1)),
        ),
    ],
)
def test_recompute_has_one_normal_form(performance, plan):
    planned = usual_job(performance=performance, **{"parallelism.vpp": 2})
    assert planned.recompute == plan
    assert Job(**planned.to_config()).recompute == plan


def test_replace_resolves_again_and_checks():
    before = usual_job()
    after = before.replace(**{"parallelism.tp": 4, "parallelism.dp": 64})
    assert (after.parallelism.tp, after.microbatches, before.microbatches) == (4, 32, 64)
    assert before.replace(**{"performance.software": "megatron-2021"}).software.kernels.attention_impl == "unfused"
    assert before.replace(**{"model.n_q_heads": 32, "model.n_layers": 40}).model.n_layers == 40
    assert before.replace(model="llama3-8b").model.n_layers == 32
    with pytest.raises(ConfigError, match=r"^parallelism.tp: must divide n_q_heads 64 \(got 3\)"):
        before.replace(**{"parallelism.tp": 3})
    with pytest.raises(ConfigError, match=r"^parallelism.tpp: unknown key"):
        before.replace(**{"parallelism.tpp": 3})


def test_the_last_of_two_ways_to_say_one_thing_wins():
    full = usual_job(performance=Performance(activation_checkpointing_type="full"))
    block = full.replace(**{"performance.recompute": {"granularity": "full", "method": "block", "n_layers": 2}})
    assert block.recompute.method == "block"
    assert block.replace(**{"performance.activation_checkpointing_type": "none"}).recompute == Recomputation()
    assert (
        full.replace(
            **{"parallelism.n_param_buckets": 3, "parallelism.bucket_size_mb": 50.0}
        ).parallelism.n_param_buckets
        is None
    )


def test_values_of_one_job_do_not_leak_into_another():
    first = usual_job()
    assert first.layers_per_chunk == [20] * 4
    assert first.replace(**{"parallelism.pp": 2, "parallelism.dp": 64}).layers_per_chunk == [40, 40]


def test_assumptions_say_what_a_machine_leaves_to_defaults(tmp_path):
    bare = tmp_path / "box.yaml"
    bare.write_text(
        "{name: box, accelerator: {name: card, peak_flops: {bf16: 4e14}, memory_bytes: 80 GiB, usable_memory_bytes: 79 GiB,"
        " memory_bytes_per_s: 2 TB/s, memory_efficiency: 0.9}, devices_per_node: 8,"
        " tiers: [{name: link, size: 8, bytes_per_s: 2e11, latency_s: 2 us, efficiency: 0.7},"
        " {name: net, bytes_per_s: 25 GB/s, latency_s: 5 us}]}"
    )
    assert (
        "box defaults (not in its file): accelerator.attention_forward_efficiency 0.5, "
        "accelerator.attention_backward_efficiency 0.4, "
        "tiers.1.efficiency 0.8, accelerator.sustained_flops.bf16 as a fixed fraction of the best measured shape or of the peak, "
        "no accelerator.sm_count, so no wave quantization"
    ) in assumptions(usual_job(hardware=str(bare)))
    assert "does not say" not in "\n".join(assumptions(usual_job()))


def test_assumptions_say_what_was_unsaid():
    said = "\n".join(assumptions(usual_job()))
    assert "software: megatron-core (default; release 0.16.1)" in said
    assert "attention_impl flash" in said
    assert "not verified without a GPU" in said
    unfused = {
        "attention_impl": "unfused",
        "norm_impl": "composite",
        "activation_impl": "composite",
        "loss_impl": "composite",
    }
    assert "only a GPU kernel" not in "\n".join(assumptions(usual_job(performance=unfused)))


@pytest.mark.parametrize(("graphs", "said"), [(True, 1), (["attn"], 1), (False, 0)])
def test_assumptions_say_that_the_memory_of_cuda_graphs_is_not_counted(graphs, said):
    found = "\n".join(assumptions(usual_job(performance={"cuda_graphs": graphs})))
    assert found.count("memory: what CUDA graphs hold besides is not counted") == said


def test_assumptions_of_a_traced_graph():
    """Expandable segments leave 2.4 % of activations and transients in pieces, fixed ones a fifth."""
    layout = {"tp": 1, "pp": 1, "dp": 64, "fsdp": {"wrap": "parameter"}}
    said = {"software": "fsdp2", "expandable_segments": True}
    assert "reserved = allocated + 2.4 % of" in "\n".join(assumptions(usual_job(parallelism=layout, performance=said)))
    fixed = assumptions(usual_job(parallelism=layout, performance={"software": "fsdp2"}))
    assert "reserved = allocated + 20 %" in "\n".join(fixed)


@pytest.mark.parametrize(
    ("layout", "note"),
    [
        ({"tp": 4, "pp": 1, "dp": 1}, "note: 4 of the 8 devices of a dgx-h100 node are used"),
        ({"tp": 4, "pp": 1, "dp": 4}, None),
        ({"tp": 4, "pp": 1, "dp": 32}, None),
        ({"tp": 4, "pp": 5, "dp": 1}, "note: 20 devices on nodes of 8: the last node is partly used"),
        (
            {"tp": 16, "pp": 1, "dp": 1},
            "note: tp 16 is wider than nvlink (8 devices), so its collectives use the next network tier",
        ),
    ],
)
def test_notes_are_no_errors(layout, note):
    assert [line for line in assumptions(usual_job(parallelism=layout)) if line.startswith("note")] == (
        [note] if note else []
    )


layouts = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "dp": st.sampled_from([1, 2, 8]),
        "vpp": st.sampled_from([1, 2]),
    },
    optional={
        "sp": st.booleans(),
        "zero_level": st.integers(0, 3),
        "layers_per_stage": st.just("auto"),
        "bucket_size_mb": st.floats(1, 1e4),
        "fsdp": st.fixed_dictionaries({"reshard_after_forward": st.booleans()}),
        "replicas": st.sampled_from([1, 2]),
    },
)
performances = st.fixed_dictionaries(
    {},
    optional={
        "activation_checkpointing_type": st.sampled_from(["none", "selective", "super-selective", "full"]),
        "precision": st.sampled_from(["bf16", "fp16", "fp32"]),
        "software": st.sampled_from(["megatron-core", "megatron-2021", "torch", "fsdp2", "deepspeed"]),
        "moment_dtype": st.sampled_from(["bf16", "fp32"]),
        "overlap": st.fixed_dictionaries({"dp": st.one_of(st.booleans(), st.floats(0, 1))}),
    },
)


@settings(max_examples=60, deadline=None)
@given(layouts, performances, st.sampled_from(["llama3-8b", "gpt2-small", "llama3-70b"]))
def test_the_echo_is_complete_and_reads_back_equal(layout, performance, model):
    try:
        first = Job(
            model=model,
            parallelism=layout,
            performance=performance,
            data={"gbs": 64, "seqlen": 1024, "microbatch_sz": 1},
            hardware="dgx-h100",
        )
    except ConfigError as error:
        bad = [line for line in error.problems if ": " not in line or "\n" in line]
        if bad:
            pytest.fail(str(bad))
        return
    echo = first.to_config()
    again = Job.load(yaml.safe_dump(echo))
    assert again == first
    assert hash(again) == hash(first)
    assert again.to_config() == echo
    assert again.software.replace(sp=first.software.layout.sp) == first.software
    for name in ("sp", "zero_level", "schedule", "recompute", "layers_per_chunk", "microbatches"):
        assert getattr(again, name) == getattr(first, name)


@pytest.mark.parametrize(
    ("key", "precision", "software", "machine"),
    [
        ("quantized_head", "mxfp8", "megatron-core", "dgx-b200"),
        ("saved_fp8_weights", "fp8_tensorwise", "fsdp2", "dgx-h100"),
    ],
)
def test_the_echo_has_keys_that_no_profile_sets(key, precision, software, machine):
    """A plan that sets one is another plan, also read back."""
    said = {"performance": {"precision": precision, "software": software, "activation_checkpointing_type": "none"}}
    plain = usual_job(model="llama3-8b", parallelism={"tp": 1, "pp": 1, "dp": 64}, hardware=machine, **said)
    one = plain.replace(**{f"performance.{key}": True})
    assert one != plain
    assert one.to_config()["performance"][key] is True
    assert Job(**one.to_config()) == one


def test_no_key_of_performance_is_missing_in_the_echo():
    written_apart = {"software", "overlap", "moe", "cpu_offload", "calibration"}
    in_recomputation = {"activation_checkpointing_type", "recompute"}
    assert set(Performance.model_fields) - set(OPTIONS) == {
        *OF_NO_PROFILE, *written_apart, *in_recomputation
    }  # fmt: skip


def test_loading_is_cheap_and_lean():
    code = (
        "import sys, time; start = time.process_time(); import pydantic_core, yaml\n"
        "base = time.process_time()\n"
        f"from steptime.job.job import Job; Job.load({str(DLCALC / 'llama3_70b.yaml')!r}); end = time.process_time()\n"
        "assert not {'numpy', 'torch'} & set(sys.modules); print((end - base) / (base - start))"
    )
    ratio = min(float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3))
    assert ratio < 2.0, "reading a job costs more than twice the import of pydantic-core and PyYAML"


def test_replacing_is_fast():
    base = usual_job()
    _, calls = python_calls(lambda: [base.replace(**{"parallelism.tp": tp}) for tp in (1, 2, 4, 8)])
    assert calls / 4 < 900  # 575: over 1,000 a second


def test_the_vocabulary_is_padded_to_the_multiple_that_is_said():
    """32,000 rows over tp 8: Megatron's usual 128 pads to 1,024 a time, a multiple of 1 to 8."""
    usual = usual_job(**{"model.vocab_sz": 32000})
    assert shard_of(usual).vocab == 32768
    assert shard_of(usual.replace(**{"performance.vocab_multiple": 1})).vocab == 32000
    with pytest.raises(ConfigError, match=r"performance\.vocab_multiple: must be at least 1 \(got 0\)"):
        usual.replace(**{"performance.vocab_multiple": 0})


def test_notes_are_lines_that_yaml_gives_back():
    """A next-line character is a line end to YAML, and would come back as a blank."""
    noted = usual_job().replace(notes=["left out\x85 here\n and  there"])
    assert noted.notes == ["left out here and there"]
    assert Job(**yaml.safe_load(yaml.safe_dump(noted.to_config(), allow_unicode=True))) == noted


POST = "backward_prefetch: post needs version 1, wrap block and prefetch 1; use pre"
COLUMNS = "shard_dim: 1 needs version 2, wrap block or model, no number in reshard_after_forward; use 0"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"backward_prefetch": "post"}, POST),
        ({"version": 1, "prefetch": 0, "backward_prefetch": "post"}, POST),
        ({"original_params": False}, "original_params: false needs version 1; set it, or use true"),
        *(({"shard_dim": 1, **other}, COLUMNS) for other in ({"reshard_after_forward": 2}, {"version": 1})),
    ],
)
def test_options_of_fsdp_1(options, line):
    with pytest.raises(ConfigError) as error:
        Fsdp(**options)
    assert line in str(error.value)
