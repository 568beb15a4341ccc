"""torch.compile in files of Hugging Face's trainers and in a ds_config: fused kernels, and attention with a mask."""

from __future__ import annotations

import json

import pytest
from megatron_readings import script

from steptime.launch.deepspeed import read_deepspeed
from steptime.launch.megatron.sources import read_megatron
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.reading import to_job
from steptime.launch.trainers.trainer_plan import read_trainer

SETS = {"hardware.node_type": "dgx-h100", "parallelism.dp": 8}
FILE = (
    "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 1\nmax_seq_length: 4096\nbf16: true\n"
)
ENGINE = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
}
MASK = {"attention_kernel": "efficient", "repeat_kv": True}
DEEP = {"compile": {"deepcompile": True}}


class Files(NearbyFiles):
    """A ds_config next to the file."""

    def __init__(self, tree: dict[str, object]) -> None:
        super().__init__()
        self.tree = tree

    def text(self, name: str) -> str | None:
        return json.dumps(self.tree) if name == "ds.json" else None


def section(text: str, kind: str = "transformers", engine: dict[str, object] | None = None) -> dict[str, object]:
    """What the lines put into the performance section."""
    found = read_trainer(kind, "job.yaml", FILE + text, {}, SETS, Files(engine) if engine else None)
    performance = to_job(found, SETS).to_config()["performance"]
    keys = ("compile", "attention_kernel", "repeat_kv", "overlap")
    return {key: performance[key] for key in keys if key in found.config["performance"]}


def test_a_compiled_model_has_a_mask():
    """scaled_dot_product_attention, transformers' default: the traced mask takes the memory-efficient kernel."""
    assert section("torch_compile: true\n") == {"compile": "all"} | MASK
    assert section("torch_compile: true\nattn_implementation: sdpa\n") == {"compile": "all"} | MASK
    assert section("torch_compile: false\n") == section("") == {}


@pytest.mark.parametrize("said", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
def test_flash_attention_of_its_own_package_has_none(said):
    assert section(f"torch_compile: true\nattn_implementation: {said}\n") == {"compile": "all"}


def test_names_of_other_trainers():
    """Axolotl's flash_attention and LLaMA-Factory's flash_attn: fa2."""
    base = "base_model: meta-llama/Meta-Llama-3-8B\nmicro_batch_size: 1\nsequence_len: 4096\n"
    for line, mask in (("flash_attention: true\n", {}), ("sdp_attention: true\n", MASK)):
        found = read_trainer("axolotl", "job.yaml", f"{base}bf16: true\ntorch_compile: true\n{line}", {}, SETS)
        performance = found.config["performance"]
        assert {key: performance[key] for key in MASK if key in performance} == mask
    assert section("torch_compile: true\nflash_attn: fa2\n", "llamafactory") == {"compile": "all"}
    assert section("torch_compile: true\nflash_attn: sdpa\n", "llamafactory") == {"compile": "all"} | MASK


def test_backends():
    """A backend by itself switches torch_compile on (training_args.py); eager and aot_eager trace and fuse nothing."""
    assert section("torch_compile_backend: inductor\n") == {"compile": "all"} | MASK
    assert section("torch_compile: true\ntorch_compile_backend: aot_eager\n") == MASK
    assert section("dynamo_config:\n  dynamo_backend: INDUCTOR\n") == {"compile": "all"} | MASK
    assert section("dynamo_backend: 'no'\n") == {}


def test_deepcompile_needs_a_trainer_that_compiles():
    """accelerate calls engine.compile with a dynamo backend; DeepCompile then waits for each gather of stage 3."""
    engine = ENGINE | DEEP
    compiled = section("torch_compile: true\ndeepspeed: ds.json\n", engine=engine)
    assert compiled.pop("overlap")["dp"] in (False, 0.0)
    assert compiled == {"compile": "all"} | MASK
    assert section("deepspeed: ds.json\n", engine=engine) == {}
    plain = section("torch_compile: true\ndeepspeed: ds.json\n", engine=ENGINE)
    assert plain == {"compile": "all"} | MASK


@pytest.mark.parametrize(
    ("compiles", "stage", "said"),
    [
        (DEEP, 3, {"compile": "all", "overlap": {"dp": False}} | MASK),
        (DEEP, 1, {"compile": "all"} | MASK),
        ({"compile": {"enabled": True, "backend": "inductor"}}, 2, {"compile": "all"} | MASK),
        ({"compile": {"deepcompile": False}}, 3, {}),
    ],
)
def test_a_ds_config_alone(compiles, stage, said):
    """Its engine compiles a model of transformers, as the profile deepspeed runs."""
    engine = ENGINE | {"zero_optimization": {"stage": stage, "overlap_comm": True}} | compiles
    told = SETS | {"model": "llama3-8b", "data.seqlen": 4096}
    found = read_deepspeed("ds.json", json.dumps(engine), {}, told)
    keys = ("compile", "overlap", *MASK)
    assert {key: found.config["performance"][key] for key in keys if key in found.config["performance"]} == said
    assert to_job(found, told)


def test_tuned_modes_are_told():
    found = read_trainer(
        "transformers", "j.yaml", f"{FILE}torch_compile: true\ntorch_compile_mode: max-autotune\n", {}, SETS
    )
    assert "torch_compile_mode" in [flag.name for flag in found.of("approximated")]


def test_megatrons_own_layers_are_not_compiled():
    """Megatron-DeepSpeed calls no engine.compile that is modeled: DeepCompile is told as left out."""
    text = script("--deepspeed", "--deepspeed_config ds.json", "--zero-stage 1", launch="deepspeed --num_gpus 8")
    found = read_megatron("run.sh", text, {}, None, Files(ENGINE | DEEP))
    assert "DeepCompile" in [flag.note for flag in found.of("unmodeled")]


@pytest.mark.parametrize(
    ("kind", "option", "impl"),
    [
        ("swift", "loss_type: channel_loss", None),
        ("swift", "enable_channel_loss: false", "fused"),
        ("swift", "sequence_parallel_size: 1", "fused"),
        ("llamafactory", "use_dft_loss: true", None),
        ("transformers", "label_smoothing_factor: 0.1", None),
        ("transformers", "label_smoothing_factor: 0.0", "fused"),
    ],
)
def test_a_loss_of_the_trainer_goes_before_ligers(kind: str, option: str, impl: str | None) -> None:
    """The trainer takes the labels from the model, whose fused head and loss then only make logits; the norms stay Liger's."""
    methods = "tuner_type: full\nfinetuning_type: full\ncutoff_len: 4096\nmax_length: 4096\n"
    text = f"{FILE}{option}\nuse_liger_kernel: true\n{methods}"
    sections = read_trainer(kind, "job.yaml", text, {}, SETS).config["performance"]
    assert (sections.get("loss_impl"), sections["norm_impl"]) == (impl, "fused")
