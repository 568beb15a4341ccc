"""Software profiles: complete, sourced, and resolved with a job's own options."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from jobs import job

from steptime import software
from steptime.answer.assumptions import assumptions
from steptime.base.config import Config, ConfigError, build
from steptime.job.job import Job
from steptime.software.hidden_shares import Overlap
from steptime.software.performance import SETTING_GROUPS, Performance, Software, load_software, resolve
from steptime.software.profiles import profile_mapping, profile_names, profile_releases

OTHERS = [
    *(
        "accelerate",
        "accelerate-ddp",
        "automodel",
        "aleph-alpha",
        "bloom",
        "deepspeed-2021",
        "fms-fsdp",
        "internevo",
        "llm-foundry",
        "megatron-core-fsdp2",
        "paddle",
    ),
    *(
        "litgpt",
        "litgpt-ddp",
        "megatron-deepspeed",
        "megatron-deepspeed-2021",
        "nanotron",
        "torchtitan",
        "torchtitan-ddp",
    ),
]
"""Profiles of other trainers, each over one of the profiles below."""
NAMES = [
    *("deepspeed", "fsdp2", "megatron-2021", "megatron-bridge", "megatron-core", "nemo", "nemo-2022"),
    *("paxml", "torch", "xla"),
]


def test_names():
    assert profile_names() == sorted(NAMES + OTHERS)


@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_every_switch_says_where_it_comes_from(name):
    profile = load_software(name)
    axes = Overlap.model_fields.keys() - {"offload"}  # a plan's own
    own = {"overlap", "step_graph"}  # a plan's too
    switches = set(profile.settings()) - own | {f"overlap.{axis}" for axis in axes}
    assert set(profile.sources) == switches
    assert all(len(text) > 8 for text in profile.sources.values())
    assert profile.name == name
    assert all(share is not None for axis, share in profile.overlap if axis in axes)


@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_every_switch_is_set_in_the_file_itself(name):
    profile = load_software(name)
    others = {
        "any_layout",
        "compute_capability",
        "moe",
        "saved_fp8_weights",
        "quantized_head",
    }  # the machine's, and a plan's own
    assert profile.model_fields_set == set(Software.model_fields) - others
    for cls in SETTING_GROUPS.values():
        assert set(profile_mapping(name)) >= {each.name for each in fields(cls)} - {"measured", "node_s", "step_graph"}


@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_every_profile_and_release_is_valid(name):
    """Read without validation at a start, they are what validation makes of them, in value and in type."""
    for said in (name, *(f"{name}@{release}" for release in profile_releases(name))):
        groups: dict = {}
        for key, value in profile_mapping(said).items():
            group = next((group for group, cls in SETTING_GROUPS.items() if key in cls.__annotations__), None)
            groups.setdefault(group, {})[key] = value
        found = load_software(said)
        for group in groups.keys() & SETTING_GROUPS.keys():
            assert repr(build(_checked(SETTING_GROUPS[group]), groups[group])) == repr(getattr(found, group))
            groups[group] = getattr(found, group)
        assert repr(build(Software, groups.pop(None) | groups)) == repr(found)


def _checked(group: type) -> type[Config]:
    """The class of a group as one whose values are validated."""
    defaults = {each.name: each.default for each in fields(group) if each.default is not MISSING}
    return type(Config)(
        group.__name__, (Config,), {"__annotations__": get_type_hints(group, include_extras=True), **defaults}
    )


@pytest.mark.parametrize(
    ("name", "precision", "bytes_per_parameter"),
    [
        # parameter, main gradient, master copy, two moments
        ("megatron-core", None, 2 + 4 + 4 + 8),
        ("megatron-2021", None, 2 + 4 + 4 + 8),
        ("megatron-core", "fp32", 4 + 4 + 0 + 8),
        ("torch", None, 2 + 2 + 0 + 4),
        ("torch", "fp32", 4 + 4 + 0 + 8),
        ("fsdp2", None, 4 + 4 + 0 + 8),
        ("deepspeed", None, 2 + 2 + 4 + 8),
    ],
)
def test_state_recipes(name, precision, bytes_per_parameter):
    s = resolve(Performance(software=name, precision=precision))
    one = s.bytes_of(s.states.param_dtype) + s.bytes_of(s.states.main_grad_dtype) + s.bytes_of(s.states.master_dtype)
    assert one + 2 * s.bytes_of(s.states.moment_dtype) == bytes_per_parameter


def test_a_job_overrides_its_profile():
    said = Performance(precision="fp16", moment_dtype="bf16", overlap=Overlap(tp=0.5))
    s = resolve(said)
    assert (s.precision, s.states.param_dtype) == ("fp16", "fp16")
    assert (s.states.moment_dtype, s.states.main_grad_dtype) == ("bf16", "fp32")
    assert (s.overlap.tp, s.overlap.dp) == (0.5, True)
    assert load_software("megatron-core").precision == "bf16"


def test_a_switch_finds_its_group():
    """What is flat in files and configs lands in the group of its name, and comes back flat."""
    profile = load_software("megatron-core")
    changed = profile.replace(precision="fp32", norm_impl="composite", clip_grad=False, loss_impl="fused")
    assert (changed.precision, changed.states.clip_grad) == ("fp32", False)
    assert (changed.kernels.norm_impl, changed.kernels.loss_impl) == ("composite", "fused")
    said = {"precision": "fp32", "norm_impl": "composite", "clip_grad": False, "loss_impl": "fused"}
    assert changed.settings() == profile.settings() | said
    assert profile.kernels.norm_impl == "fused"
    with pytest.raises(TypeError, match="not an option of a profile: norm"):
        profile.replace(norm="fused")
    with pytest.raises(TypeError, match="not settings of KernelSettings: norm"):
        profile.kernels.replace(norm="fused")


def test_pipeline_sends_overlap_in_interleaved_schedules_only():
    assert resolve(Performance()).overlap.pp is False
    assert resolve(Performance(), interleaved=True).overlap.pp is True
    assert resolve(Performance(overlap=Overlap(pp=0.3))).overlap.pp == 0.3


def test_unknown_profile():
    with pytest.raises(ConfigError) as error:
        Performance(software="megatron-cor")
    assert error.value.problems == [
        "performance.software: unknown profile (got 'megatron-cor'); did you mean 'megatron-core'?"
    ]


def test_a_profile_extends_another_switch_by_switch(tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text(
        "as_of: its own\nsp: true\noverlap: {tp: false, dp: true}\nsources: {sp: here, zero: there}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "as_of: 2026\nextends: base\nsp: false\noverlap: {tp: true}\nsources: {sp: own}\n"
        "releases:\n  '1.0': {zero: 2}\n  '1.1':\n"
    )
    monkeypatch.setattr("steptime.software.profiles._FOLDER", tmp_path)
    monkeypatch.setattr("steptime.software.profiles.profile_names", lambda: ["base", "own"])
    expected = {
        "family": "base",
        "name": "own",
        "as_of": "2026",
        "sp": False,
        "overlap": {"tp": True, "dp": True},
        "sources": {"sp": "own", "zero": "there"},
    }
    assert profile_mapping("own") == expected
    assert profile_mapping("own@1.0") == expected | {"name": "own@1.0", "as_of": "", "zero": 2}
    assert profile_mapping("own@1.1") == expected | {"name": "own@1.1", "as_of": ""}
    assert profile_releases("own") == ["1.0", "1.1"]
    for wrong, text in [("own@2", "'2'); known: 1.0, 1.1"), ("base@1", "'1'); base has no releases, use base")]:
        with pytest.raises(ConfigError, match="unknown release") as error:
            profile_mapping(wrong)
        assert error.value.problems[0].endswith(text)


@pytest.mark.parametrize(
    "layers", [{"parallel_residual": True}, {"pre_norms": False, "post_norms": True}], ids=["beside", "after"]
)
def test_layers_that_megatron_core_has_not_are_of_fsdp2(layers):
    shape = {"n_layers": 8, "hidden_sz": 512, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 1000}
    assert job(shape).software.name == "megatron-core"
    assert job(shape | layers, software=None).software.name == "fsdp2"


@pytest.mark.parametrize("software", [*NAMES, *OTHERS])
def test_the_echo_of_a_profile_reads_back(software):
    """It states every switch, also those that can be changed only for other frameworks."""
    one = job(software=software)
    assert Job(**one.to_config()) == one


def test_every_profile_states_its_release_or_date():
    """In its own file, not by extension; a release says it in its name. The report of a plan names it."""
    for name in NAMES + OTHERS:
        assert load_software(name).as_of
        for release in profile_releases(name):
            assert load_software(f"{name}@{release}").as_of == ""
    files = Path(software.__file__).parents[1] / "data" / "software"
    assert all("\nas_of: " in "\n" + path.read_text(encoding="utf-8") for path in files.glob("*.yaml"))
    titan = (files / "torchtitan.yaml").read_text(encoding="utf-8")
    assert f"# titan = pytorch/torchtitan@{load_software('torchtitan').as_of.split()[-1]} (2026-08)" in titan


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (None, "software: megatron-core (default; release 0.16.1)"),
        ("megatron-core", "software: megatron-core (release 0.16.1)"),
        ("torchtitan", "software: torchtitan (August 2026, b5bcd76c)"),
        ("torchtitan@0.2", "software: torchtitan@0.2"),
    ],
)
def test_the_report_names_the_release(said, line):
    performance = {} if said is None else {"performance": {"software": said}}
    data = {"gbs": 64, "seqlen": 2048, "microbatch_sz": 1}
    plan = Job(
        model="llama3-8b", parallelism={"tp": 8, "pp": 1, "dp": 8}, data=data, hardware="dgx-h100", **performance
    )
    assert line in assumptions(plan)
