"""Files of trainers that a table of keys alone translates: what each says, by hand, and what it asks for."""

import pytest
from launch_readings import DATA, HARDWARE, REFUSED

from steptime.base.config import ConfigError
from steptime.launch.keys import load_table
from steptime.launch.named_models import preset_of
from steptime.launch.read import TABLES, kind_of, read
from steptime.launch.reading import to_job

FOLDER = DATA / "trainers"


def job(name, **sets):
    sets = HARDWARE | {key.replace("__", "."): value for key, value in sets.items()}
    return to_job(read("auto", str(FOLDER / name), sets), sets)


def problems(name, **sets):
    with pytest.raises(ConfigError) as error:
        job(name, **sets)
    return [line.rpartition(name + ": ")[2] for line in error.value.problems]


def shape(found):
    layout, data = found.parallelism, found.data
    return (
        (found.model.n_layers, found.model.hidden_sz, found.model.inter_sz, found.model.vocab_sz),
        (layout.tp, layout.pp, layout.dp, layout.zero_level),
        (data.gbs, data.seqlen, data.microbatch_sz),
        (found.performance.software, found.performance.precision, found.performance.activation_checkpointing_type),
    )


LLAMA3, QWEN3, LLAMA2 = (32, 4096, 14336, 128256), (36, 2560, 9728, 151936), (32, 4096, 11008, 32000)
SAID = [
    # 16 processes x micro-batch 2 x 4 steps
    ("accelerate.sh", {}, (LLAMA3, (1, 1, 16, 3), (128, 4096, 2), ("accelerate", "bf16", "full"))),
    # LLaMA-Factory recomputes unless it is told not to; 8 ranks x 1 x 2
    ("llamafactory.yaml", {"parallelism__dp": 8}, (QWEN3, (1, 1, 8, 2), (16, 2048, 1), ("deepspeed", "bf16", "full"))),
    ("nanotron.yaml", {}, ((16, 2048, 8192, 128256), (2, 1, 4, 1), (64, 4096, 2), ("nanotron", "bf16", None))),
    # 8 sharded x 2 slices, micro-batch 4; MaxText recomputes whole layers by default
    ("maxtext.yml", {}, (LLAMA2, (1, 1, 16, 3), (64, 2048, 4), ("xla", "bf16", "full"))),
    # the width 22016 is of both halves of SwiGLU
    ("olmo.yaml", {"parallelism__dp": 64}, ((32, 4096, 11008, 50304), (1, 1, 64, 3), (1024, 4096, 2), ("fsdp2", "bf16", None))),
    ("swift.sh", {}, ((64, 5120, 27648, 152064), (1, 1, 8, 3), (16, 8192, 1), ("deepspeed", "bf16", "full"))),
    ("gpt_neox.yml", {"parallelism__dp": 12, "model__vocab_sz": 50432},
     ((44, 6144, 24576, 50432), (2, 4, 12, 1), (1536, 2048, 4), ("megatron-deepspeed", "fp16", "full"))),
    ("primus.yaml", {"parallelism__dp": 8}, (LLAMA3, (1, 1, 8, 0), (128, 8192, 2), ("megatron-core", "bf16", "none"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sets", "said"), SAID)
def test_a_file_says_its_job(name, sets, said):
    found = shape(job(name, **sets))
    zero = found[1][3] if found[1][3] is not None else said[1][3]
    assert (found[0], (*found[1][:3], zero), found[2], found[3]) == said


def test_what_a_file_leaves_open_is_asked_for_at_once():
    devices = "number of devices unknown; add --set parallelism.dp=N"
    assert problems("llamafactory.yaml") == [devices]
    assert problems("gpt_neox.yml") == ["vocabulary size unknown; add --set model.vocab_sz=N", devices]


def test_adapters_are_refused_in_one_line():
    line = "adapter lora: adapters over frozen weights (LoRA): every weight is counted as trained"
    assert problems("axolotl.yaml", parallelism__dp=8) == [line + REFUSED]


def test_zero_by_the_name_of_a_file_is_told_and_a_file_beside_goes_before_it(tmp_path):
    assert "ZeRO stage 3 by the name of zero3" in job("swift.sh").notes
    text = (FOLDER / "llamafactory.yaml").read_text()
    (tmp_path / "ds_z2_config.json").write_text('{"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}')
    (tmp_path / "job.yaml").write_text(text)
    sets = HARDWARE | {"parallelism.dp": 8}
    found = to_job(read("llamafactory", str(tmp_path / "job.yaml"), sets), sets, allow_unmodelled=True)
    assert found.parallelism.zero_level == 1


@pytest.mark.parametrize(
    ("name", "preset"),
    [("meta-llama/Llama-3.1-70B-Instruct", "llama3-70b"), ("meta-llama/Llama-2-7b-hf", "llama2-7b"), ("gpt2-xl", "gpt2-xl"),
     ("mistralai/Mistral-7B-v0.1", "mistral-7b"), ("Qwen/Qwen2.5-32B", "qwen2.5-32b"), ("own/thing", None), ("", None)],
)  # fmt: skip
def test_presets_by_the_names_of_repositories(name, preset):
    assert preset_of(name) == preset


def test_every_table_names_its_source_and_its_marks():
    for kind in TABLES:
        raw = load_table(kind.replace("-", "_")).raw
        assert raw["source"]
        assert raw["marks"]


def test_a_text_without_marks_is_no_kind():
    with pytest.raises(ConfigError, match="which framework's it is cannot be told"):
        kind_of("x.yaml", "a: 1")
