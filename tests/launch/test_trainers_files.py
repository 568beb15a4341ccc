"""Files of trainers that a table of keys alone translates: what each says, by hand, and what it asks for."""

import pytest
from launch_readings import DATA, HARDWARE, job_of

from steptime.base.config import ConfigError
from steptime.launch.keys import load_table
from steptime.launch.kinds import TABLES, kind_of
from steptime.launch.named_models import preset_of
from steptime.launch.read import read, read_as
from steptime.launch.reading import to_job
from steptime.model.lora import EVERY
from steptime.validation.logged import compare, read_run

FOLDER = DATA / "trainers"


def problems(name, **sets):
    with pytest.raises(ConfigError) as error:
        job_of(FOLDER / name, **sets)
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
    ("primus.yaml", {"parallelism__dp": 8}, (LLAMA3, (1, 1, 8, 1), (128, 8192, 2), ("megatron-core", "bf16", "none"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sets", "said"), SAID)
def test_a_file_says_its_job(name, sets, said):
    found = shape(job_of(FOLDER / name, **sets))
    zero = found[1][3] if found[1][3] is not None else said[1][3]
    assert (found[0], (*found[1][:3], zero), found[2], found[3]) == said


@pytest.mark.parametrize("name", ["llamafactory.yaml", "primus.yaml", "olmo.yaml"])
def test_a_launcher_of_its_own_takes_the_devices_of_one_node_and_says_so(name):
    """llamafactory-cli starts a process on each device of one node, Primus's run_pretrain.sh and OLMo's torchrun 8: dp 8."""
    found = job_of(FOLDER / name)
    assert found.parallelism.dp == 8
    assert any(note.startswith("number of devices not set, 8 assumed: ") for note in found.notes)


def test_adapters_of_a_file_are_the_plans():
    found = job_of(FOLDER / "axolotl.yaml", parallelism__dp=8).model
    assert found.lora is not None
    assert (found.n_layers, found.lora.rank, found.lora.targets) == (32, 16, list(EVERY))


def test_zero_by_the_name_of_a_file_is_told_and_a_file_beside_goes_before_it(tmp_path):
    assert "ZeRO stage 3 from the name zero3" in job_of(FOLDER / "swift.sh").notes
    text = (FOLDER / "llamafactory.yaml").read_text()
    (tmp_path / "ds_z2_config.json").write_text('{"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}')
    (tmp_path / "job.yaml").write_text(text)
    sets = HARDWARE | {"parallelism.dp": 8}
    found = to_job(read("llamafactory", str(tmp_path / "job.yaml"), sets), sets, allow_unmodeled=True)
    assert found.parallelism.zero_level == 1


@pytest.mark.parametrize(
    ("name", "preset"),
    [("meta-llama/Llama-3.1-70B-Instruct", "llama3-70b"), ("meta-llama/Llama-2-7b-hf", "llama2-7b"), ("gpt2-xl", "gpt2-xl"),
     ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.2"), ("Qwen/QwQ-32B", "qwen2.5-32b"), ("Qwen/Qwen2.5-32B", "qwen2.5-32b"),
     ("own/thing", None), ("", None)],
)  # fmt: skip
def test_presets_by_the_names_of_repositories(name, preset):
    assert preset_of(name) == preset


def test_every_table_names_its_source_and_its_marks():
    for kind in TABLES:
        raw = load_table(kind.replace("-", "_")).raw
        assert raw["source"]
        assert raw["marks"]


OTHER_TRAINER = "train: {lr: 1.0e-4, batch_size: 8}\nlogger: {name: wandb}\n"
"""Sections that a config of Lightning may have as well as one of Megatron-Bridge."""


@pytest.mark.parametrize("text", ["a: 1", OTHER_TRAINER])
def test_a_text_without_marks_is_no_kind(text):
    with pytest.raises(ConfigError, match="unknown framework; use --from"):
        kind_of("x.yaml", text)


TQDM = """\
  0%|          | 0/100 [00:00<?, ?it/s]
Loading checkpoint shards: 100%|####| 4/4 [00:10<00:00,  2.50s/it]
  1%|1         | 1/100 [00:05<08:15,  5.00s/it]
  2%|2         | 2/100 [00:07<06:00,  3.60s/it]
  3%|3         | 3/100 [00:10<05:00,  3.00s/it]
{'loss': 1.2, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.1}
  4%|4         | 4/100 [00:13<04:50,  2.00s/it]
"""
TIMER = "[INFO] [timer.py:260:stop] epoch=0/micro_step={micro}/global_step={step}, RunningAvgSamplesPerSec=9.1, "
SAMPLES = [
    TIMER.format(micro=8 * step, step=step) + f"CurrSamplesPerSec={rate}, MemAllocated=1.2GB, MaxMemAllocated=40.5GB"
    for step, rate in ((10, 9.0), (20, 16.0), (30, 32.0))
]
LOGS = [
    (TQDM, 2.5, None),  # the median of steps 3 and 4: the first two are warm-up
    ("Epoch 0:   1%|  | 5/900 [00:05<08:15,  5.00s/it]\nEpoch 0:   1%|  | 8/900 [00:05<08:15,  2.00it/s, loss=1.0]\n", 0.5, None),
    # 128 sequences: 8 s at 16 a second and 4 s at 32; the first line is warm-up
    ("\n".join(SAMPLES), 6.0, 40.5 * 2**30),
]  # fmt: skip


@pytest.mark.parametrize(("text", "step_s", "peak"), LOGS)
def test_a_log_without_a_config_takes_one_beside_it(tmp_path, text, step_s, peak):
    path = tmp_path / "train.log"
    path.write_text(text)
    sets = ["hardware.node_type=dgx-h100"]
    with pytest.raises(ConfigError, match="with --plan FILE"):
        read_run([str(path)], sets)
    run = read_run([str(path)], sets, plan=str(FOLDER / "accelerate.sh"))
    assert run.steady.step_s == pytest.approx(step_s)
    assert run.job.parallelism.dp == 16
    assert [row.allocated_bytes for row in compare(run).memory] == ([] if peak is None else [peak])


def test_a_plan_beside_a_log_may_be_a_plan(tmp_path):
    (tmp_path / "train.log").write_text(TQDM)
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "model: gpt2-xl\nparallelism: {tp: 1, pp: 1, dp: 8}\ndata: {gbs: 8, seqlen: 1024, microbatch_sz: 1}\nhardware: dgx-h100\n"
    )
    assert read_run([str(tmp_path / "train.log")], plan=str(plan)).job.parallelism.dp == 8


@pytest.mark.parametrize(
    ("optim", "optimizer"),
    [("adamw_torch", None), ("adamw_bnb_8bit", "adamw_8bit"), ("adamw_8bit", "adamw_8bit"), ("adafactor", None)],
)
def test_optimizers_of_hugging_face(tmp_path, optim, optimizer):
    """transformers' OptimizerNames; Adafactor's states under ZeRO's flat partition are not modeled, which a note says."""
    text = (FOLDER / "llamafactory.yaml").read_text(encoding="utf-8")
    (tmp_path / "plan.yaml").write_text(f"{text}\noptim: {optim}\n", encoding="utf-8")
    sets = HARDWARE | {"parallelism.dp": 8}
    reading = read("llamafactory", str(tmp_path / "plan.yaml"), sets)
    assert to_job(reading, sets, allow_unmodeled=True).performance.optimizer == optimizer
    assert any("an optimizer other than Adam" in flag.note for flag in reading.flags) == (optim == "adafactor")


@pytest.mark.parametrize(
    ("kind", "name", "text", "line"),
    [
        ("nanotron", "a.toml", "[model]\nx y = 1\n", r"a\.toml: not valid TOML \(Expected '='"),
        (
            "gpt-neox",
            "a.yml",
            "num_layers: 4\nhidden_size: wide\nnum_attention_heads: 4\n",
            r"^a\.yml: ",
        ),
        (
            "axolotl",
            "a.yml",
            "base_model: a\ntensor_parallel_size: $9\ncontext_parallel_size: $9\n",
            r"^a\.yml: ",
        ),
    ],
)
def test_what_is_no_number_and_no_toml_is_a_line(kind, name, text, line):
    with pytest.raises(ConfigError, match=line):
        to_job(read_as(kind, name, text, {}, {"hardware.node_type": "dgx-h100"}), {"hardware.node_type": "dgx-h100"})


ADAPTERS = [
    # a file of each trainer, and its adapters: the defaults of LLaMA-Factory, Axolotl, ms-swift and TRL are their own
    ("stage: sft\nfinetuning_type: lora\nlora_rank: 8\nmodel_name_or_path: Qwen/Qwen2-7B\ncutoff_len: 2048\n",
     (8, list(EVERY), 0.0, None)),
    (("stage: sft\nfinetuning_type: lora\nlora_rank: 64\nlora_target: q_proj,v_proj\nquantization_bit: 4\n"
     "model_name_or_path: Qwen/Qwen2-7B\ncutoff_len: 2048\n"), (64, ["q_proj", "v_proj"], 0.0, "nf4")),
    (("base_model: Qwen/Qwen2-7B\nadapter: lora\nlora_r: 16\nlora_dropout: 0.05\nlora_target_modules: [q_proj, o_proj]\n"
     "sequence_len: 2048\nmicro_batch_size: 1\n"), (16, ["q_proj", "o_proj"], 0.05, None)),
    (("base_model: Qwen/Qwen2-7B\nadapter: qlora\nload_in_4bit: true\nlora_r: 32\nlora_target_linear: true\nsequence_len: 2048\n"
     "micro_batch_size: 1\n"), (32, list(EVERY), 0.0, "nf4")),
    ("swift sft --model Qwen/Qwen2-7B --train_type lora --max_length 2048 --model_name own --model_author me\n",
     (8, list(EVERY), 0.05, None)),
    (("torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2-7B --per_device_train_batch_size 1 "
     "--max_seq_length 2048 --use_peft_lora True --lora_r 8\n"), (8, ["q_proj", "v_proj"], 0.05, "fp32")),
    # FastChat's train_lora.py knows no switch
    (("torchrun --nproc_per_node 8 train_lora.py --model_name_or_path lmsys/vicuna-7b-v1.5 --per_device_train_batch_size 1 "
     "--model_max_length 2048 --lora_r 8 --bf16 True\n"), (8, ["q_proj", "v_proj"], 0.05, "fp32")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), ADAPTERS)
def test_adapters_of_each_trainer(tmp_path, text, said):
    path = tmp_path / "job"
    path.write_text(text, encoding="utf-8")
    sets = HARDWARE | {"parallelism.dp": 8}
    found = to_job(read("auto", str(path), sets), sets).model.lora
    assert (found.rank, found.targets, found.dropout, found.base_dtype) == said


def test_another_model_keeps_the_files_adapters(tmp_path):
    path = tmp_path / "job"
    path.write_text(ADAPTERS[2][0], encoding="utf-8")
    sets = HARDWARE | {"parallelism.dp": 8, "model": "llama3-8b"}
    found = to_job(read("auto", str(path), sets), sets).model
    assert (found.name, found.lora.rank) == ("llama3-8b", 16)


FINE_TUNING = [
    # trained in part, and the words of its one line
    (("deepspeed --num_gpus 8 main.py --model_name_or_path Qwen/Qwen2-7B --per_device_train_batch_size 1 --max_seq_len 2048 "
      "--lora_dim 128 --zero_stage 3 --bf16 --deepspeed\n"), "adapters of DeepSpeed-Chat in every linear layer"),
    ("base_model: Qwen/Qwen2-7B\nadapter: ia3\nsequence_len: 2048\nmicro_batch_size: 1\n", "by a method other than LoRA"),
    ("base_model: Qwen/Qwen2-7B\nadapter: lora\nload_in_8bit: true\nlora_r: 8\nsequence_len: 2048\nmicro_batch_size: 1\n",
     "quantized frozen weights"),
    ("base_model: Qwen/Qwen2-7B\nadapter: lora\nlora_modules_to_save: [lm_head]\nsequence_len: 2048\nmicro_batch_size: 1\n",
     "weights trained in full in addition to adapters"),
    (("base_model: mistralai/Mixtral-8x7B-v0.1\nadapter: lora\nlora_r: 8\nsequence_len: 2048\nmicro_batch_size: 1\n"
     "fsdp: full_shard\nfsdp_version: 2\n"), "adapters are modeled only on dense layers with gqa"),
    ("model_name_or_path: Qwen/Qwen2-7B\nper_device_train_batch_size: 1\nmax_length: 2048\nspectrum_config_path: a.yaml\n",
     "frozen weights"),
    ("stage: sft\nfinetuning_type: full\nmixture_of_depths: convert\nmodel_name_or_path: Qwen/Qwen2-7B\ncutoff_len: 2048\n",
     "tokens that skip layers"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), FINE_TUNING)
def test_what_is_trained_in_another_way_is_one_line(tmp_path, text, words):
    path = tmp_path / "job"
    path.write_text(text, encoding="utf-8")
    sets = HARDWARE | {"parallelism.dp": 8}
    with pytest.raises(ConfigError) as error:
        to_job(read("auto", str(path), sets), sets)
    assert len(error.value.problems) == 1
    assert words in error.value.problems[0]


WHOLE = [
    # bf16: auto is bf16 wherever the device has it; a rank without an adapter trains nothing less
    ("base_model: Qwen/Qwen2-7B\nlora_r: 16\nbf16: auto\nsequence_len: 2048\nmicro_batch_size: 1\n",
     {"precision": "bf16"}),
    # --use_peft false goes before a rank
    (("model_name_or_path: Qwen/Qwen2-7B\nuse_peft: false\nlora_r: 16\nmax_length: 2048\nper_device_train_batch_size: 1\n"
     "optim: paged_adamw_8bit\n"), {"precision": "fp32", "optimizer": "adamw_8bit"}),
    # autocast leaves weights, and so gradients and moments, as they were loaded: fp32, or what torch_dtype says
    ("model_name_or_path: Qwen/Qwen2-7B\nbf16: true\nmax_length: 2048\nper_device_train_batch_size: 1\n",
     {"precision": "bf16", "param_dtype": "fp32", "main_grad_dtype": "fp32", "moment_dtype": "fp32"}),
    ("stage: sft\nfinetuning_type: full\nbf16: true\nmodel_name_or_path: Qwen/Qwen2-7B\ncutoff_len: 2048\n",
     {"precision": "bf16", "param_dtype": "fp32", "main_grad_dtype": "fp32", "moment_dtype": "fp32"}),
    ("stage: sft\nfinetuning_type: full\npure_bf16: true\nmodel_name_or_path: Qwen/Qwen2-7B\ncutoff_len: 2048\n",
     {"precision": "bf16", "param_dtype": "bf16", "main_grad_dtype": "bf16", "moment_dtype": "bf16"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), WHOLE)
def test_what_is_trained_whole_is_a_plan(tmp_path, text, said):
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    sets = HARDWARE | {"parallelism.dp": 8}
    reading = read("auto", str(path), sets)
    to_job(reading, sets)
    assert reading.config["performance"].items() >= said.items()


@pytest.mark.parametrize("more", ["bf16: true\ntorch_dtype: bfloat16\n", "bf16: true\nfsdp: full_shard\n"])
def test_weights_that_are_loaded_in_bf16_or_sharded_are_the_profiles(tmp_path, more):
    path = tmp_path / "job.yaml"
    path.write_text(f"model_name_or_path: Qwen/Qwen2-7B\nmax_length: 2048\n{more}", encoding="utf-8")
    performance = read("transformers", str(path), HARDWARE | {"parallelism.dp": 8}).config["performance"]
    assert (performance["precision"], "param_dtype" in performance) == ("bf16", False)


def test_degrees_of_accelerates_config(tmp_path):
    """8 processes: tp 2 x cp 2, and the two data-parallel ranks that are left; dp_shard_size follows from them."""
    path = tmp_path / "fsdp.yaml"
    path.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n"
        "  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 2\n  parallelism_config_dp_shard_size: 2\n"
        "  parallelism_config_dp_replicate_size: 1\n  parallelism_config_cp_comm_strategy: allgather\n"
    )
    sets = HARDWARE | {"model": "llama3-8b", "data.seqlen": 4096}
    layout = to_job(read("auto", str(path), sets), sets).parallelism
    assert (layout.tp, layout.cp, layout.dp) == (2, 2, 2)


def test_an_autotuner_is_no_trainer():
    text = '{"train_micro_batch_size_per_gpu": "auto", "autotuning": {"args": {"x": "--per_device_train_batch_size"}}}'
    assert kind_of("ds.json", text) == "deepspeed"


def test_monitors_beside_a_training_are_no_launches(tmp_path):
    """Three commands run Python; `swift sft`, inside `bash -lc`, is the one that trains."""
    path = tmp_path / "run.sh"
    path.write_text(
        "python monitor.py &\npython scrape.py &\n"
        'docker exec box bash -lc "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen2-7B --tuner_type full --max_length 2048"\n',
        encoding="utf-8",
    )
    found = to_job(read("swift", str(path), HARDWARE), HARDWARE)
    assert (found.parallelism.dp, found.data.seqlen) == (4, 2048)


def test_nodes_that_the_cluster_counts_are_asked_for(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nnodes ${NODES}:${NODES} --nproc-per-node $(nvidia-smi -L | wc -l) train.py "
        "--model_name_or_path Qwen/Qwen2-7B --max_length 2048 --per_device_train_batch_size 1\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as error:
        to_job(read("auto", str(path), HARDWARE), HARDWARE)
    fix = "write NODES=... before the command, or add --set parallelism.dp=N"
    assert error.value.problems == [f"{path}: line 1: --nnodes: $NODES has no value; {fix}"]


def test_a_count_that_only_a_run_tells_is_told_with_its_variable(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nnodes 2 --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2-7B --max_length 2048 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps $((64 / RANKS))\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as error:
        read("auto", str(path), HARDWARE)
    told = "line 1: gradient_accumulation_steps: $RANKS has no value; write RANKS=... before the command"
    assert error.value.problems == [f"{path}: {told}"]


@pytest.mark.parametrize(
    "name", ["ISTA-DASLab/Meta-Llama-3-8B-Instruct-AQLM-2Bit-1x16", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"]
)
def test_weights_that_a_repository_quantized_are_not_read_as_bf16(tmp_path, name):
    text = f"stage: sft\nfinetuning_type: lora\ncutoff_len: 2048\nbf16: true\nmodel_name_or_path: {name}\n"
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="quantized frozen weights"):
        to_job(read("auto", str(tmp_path / "job.yaml"), HARDWARE), HARDWARE)


def test_weights_that_bitsandbytes_packed_are_those_of_qlora(tmp_path):
    text = "stage: sft\nfinetuning_type: lora\ncutoff_len: 2048\nbf16: true\nmodel_name_or_path: unsloth/llama-3-8b-bnb-4bit\n"
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    lora = to_job(read("auto", str(tmp_path / "job.yaml"), HARDWARE), HARDWARE).model.lora
    assert lora is not None
    assert lora.base_dtype == "nf4"


@pytest.mark.parametrize("config", ["--config_file fsdp.json", "--config_file=fsdp.json"])
def test_a_config_of_accelerate_is_read_as_json_too(tmp_path, config):
    (tmp_path / "fsdp.json").write_text(
        '{"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}}',
        encoding="utf-8",
    )
    (tmp_path / "run.sh").write_text(
        f"accelerate launch {config} train.py --model_name_or_path Qwen/Qwen2-7B --max_length 2048\n", encoding="utf-8"
    )
    layout = to_job(read("auto", str(tmp_path / "run.sh"), HARDWARE), HARDWARE).parallelism
    assert layout.fsdp is not None
    assert (layout.dp, layout.fsdp.version) == (4, 2)


def test_a_section_about_attention_that_no_table_has_is_refused(tmp_path):
    text = (FOLDER / "nanotron.yaml").read_text(encoding="utf-8") + "\ninfini_attention:\n  segment_length: 1024\n"
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"infini_attention\.segment_length 1024: not an option of nanotron"):
        to_job(read("auto", str(tmp_path / "job.yaml"), HARDWARE), HARDWARE)


def test_bf16_of_gpt_neox_stands_in_its_fp16_section(tmp_path):
    """configs/pythia: fp16 {enabled: true, type: bfloat16}."""
    text = (FOLDER / "gpt_neox.yml").read_text(encoding="utf-8")
    (tmp_path / "job.yml").write_text(
        text.replace('"enabled": true', '"enabled": true, "type": "bfloat16"', 1), encoding="utf-8"
    )
    sets = HARDWARE | {"parallelism.dp": 12, "model.vocab_sz": 50432}
    assert to_job(read("auto", str(tmp_path / "job.yml"), sets), sets).performance.precision == "bf16"
