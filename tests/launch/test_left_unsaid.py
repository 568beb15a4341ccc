"""What a launch file leaves unsaid: taken from the program or the framework where these say it, asked for where nobody does."""

import pytest
from launch_readings import HARDWARE

from steptime import estimate
from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.report.estimate_text import report


def job_of(folder, files, name, sets=None):
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    sets = HARDWARE | (sets or {})
    return to_job(read("auto", str(folder / name), sets), sets)


def problems(folder, files, name):
    with pytest.raises(ConfigError) as error:
        job_of(folder, files, name)
    return [line.rpartition(f"{name}: ")[2] for line in error.value.problems]


TRAINER = """torchrun --nproc_per_node=4 train.py --model_name_or_path meta-llama/Llama-2-7b-hf \\
  --bf16 True --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --fsdp "full_shard auto_wrap"
"""


def test_the_sequence_is_the_default_of_the_program_beside_the_script(tmp_path):
    """Stanford Alpaca's train.py: a field of a dataclass says 512, which no flag changes."""
    code = (
        "@dataclass\nclass Arguments(TrainingArguments):\n    model_max_length: int = field(default=512, metadata={})\n"
    )
    job = job_of(tmp_path, {"train.sh": TRAINER, "train.py": code}, "train.sh")
    assert (job.data.seqlen, job.data.gbs, job.parallelism.dp) == (512, 2 * 4 * 4, 4)
    assert "sequence length not set, 512 assumed: the default of train.py" in job.notes


def test_a_flag_goes_before_the_default_of_the_program(tmp_path):
    code = 'parser.add_argument("--model_max_length", type=int, default=512)\n'
    script = TRAINER.rstrip() + " --model_max_length 2048\n"
    assert job_of(tmp_path, {"train.sh": script, "train.py": code}, "train.sh").data.seqlen == 2048


def test_two_defaults_of_one_name_are_none(tmp_path):
    code = "class A:\n    max_length: int = 512\nclass B:\n    max_length: int = 1024\n"
    told = problems(tmp_path, {"train.sh": TRAINER, "train.py": code}, "train.sh")
    assert told == ["sequence length unknown; add --set data.seqlen=N"]


def test_a_program_that_is_not_there_is_not_guessed(tmp_path):
    assert problems(tmp_path, {"train.sh": TRAINER}, "train.sh") == ["sequence length unknown; add --set data.seqlen=N"]


@pytest.mark.parametrize(
    ("text", "length"),
    [
        # data_args.py: cutoff_len 2048
        ("model_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: full\nbf16: true\nper_device_train_batch_size: 1\n", 2048),
        # schemas/config.py: sequence_len 512
        ("base_model: Qwen/Qwen2.5-7B\nbf16: true\nmicro_batch_size: 1\ngradient_accumulation_steps: 2\n", 512),
    ],
)  # fmt: skip
def test_the_framework_says_how_long_sequences_are(tmp_path, text, length):
    job = job_of(tmp_path, {"job.yaml": text}, "job.yaml")
    assert job.data.seqlen == length
    assert any(note.startswith(f"sequence length not set, {length} assumed: the default of ") for note in job.notes)


def test_a_config_without_offload_in_its_name_is_not_refused_for_offload(tmp_path):
    script = "deepspeed --num_gpus 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 2048 --bf16 "
    script += "--per_device_train_batch_size 1 --deepspeed ds_zero2_no_offload.json\n"
    assert job_of(tmp_path, {"train.sh": script}, "train.sh").parallelism.zero_level == 2
    told = problems(tmp_path, {"train.sh": script.replace("_no_offload", "_offload")}, "train.sh")
    assert told[0].startswith("deepspeed ds_zero2_offload.json: states in host memory")


def test_a_config_that_is_there_says_itself_what_it_offloads(tmp_path):
    script = "deepspeed --num_gpus 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 2048 --bf16 "
    script += "--per_device_train_batch_size 1 --deepspeed zero3_offload.json\n"
    config = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}'
    job = job_of(tmp_path, {"train.sh": script, "zero3_offload.json": config}, "train.sh")
    assert job.parallelism.zero_level == 3


def test_a_checkpoint_gives_the_model_where_flags_leave_its_biases_open(tmp_path):
    """Megatron's --use-checkpoint-args puts the checkpoint's groups and biases over the flags: 64 heads here have 8 groups."""
    flags = (
        "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096 "
    )
    flags += "--micro-batch-size 1 --global-batch-size 8 --normalization RMSNorm --swiglu --bf16 --use-checkpoint-args "
    flags += "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --ffn-hidden-size 28672"
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} --tensor-model-parallel-size 8\n"
    (told,) = problems(tmp_path, {"llama2.sh": script}, "llama2.sh")
    assert told.startswith("--use-checkpoint-args: sizes, groups and biases of the checkpoint")
    said = script.replace("--bf16", "--bf16 --disable-bias-linear --group-query-attention --num-query-groups 8")
    assert job_of(tmp_path, {"llama2.sh": said}, "llama2.sh").model.n_kv_heads == 8
    answered = job_of(tmp_path, {"llama2.sh": script}, "llama2.sh", {"model": "llama2-70b"})
    assert answered.model.n_kv_heads == 8
    own = script.replace("--tokenizer-model tokenizer.model", "--tokenizer-model merged/ja_llama.model")
    notes = job_of(tmp_path, {"own.sh": own}, "own.sh", {"model": "llama2-70b"}).notes
    whose = "vocabulary not set, that of llama2-70b assumed"
    assert [any(note.startswith(whose) for note in each) for each in (answered.notes, notes)] == [False, True]


@pytest.mark.parametrize(
    ("tokenizer", "hidden"), [("Llama-2-70b-hf", 8192), ("Llama-2-70b-ja", 8192), ("Llama-2-70b-hf", 4096)]
)
def test_a_checkpoint_named_after_a_preset_with_the_same_sizes_has_its_groups(tmp_path, tokenizer, hidden):
    """Llama 2 70B: 64 heads in 8 groups, no biases, 32000 entries; another name or size is asked for."""
    flags = (
        f"--num-layers 80 --hidden-size {hidden} --ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 4096 "
    )
    flags += "--micro-batch-size 1 --global-batch-size 8 --bf16 --use-checkpoint-args --tensor-model-parallel-size 8 "
    flags += f"--tokenizer-type Llama2Tokenizer --tokenizer-model /hf/{tokenizer}/tokenizer.model --hidden-dropout 0"
    files = {"run.sh": f"torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py {flags}\n"}
    if (tokenizer, hidden) != ("Llama-2-70b-hf", 8192):
        (told,) = problems(tmp_path, files, "run.sh")
        assert told.startswith("--use-checkpoint-args: sizes, groups and biases of the checkpoint")
        return
    model = job_of(tmp_path, files, "run.sh").model
    assert (model.n_kv_heads, model.bias, model.vocab_sz, model.dropout) == (8, False, 32000, 0.0)


def test_a_forks_own_model_is_not_the_debug_model(tmp_path):
    text = '[model]\nconfig = "own/transformer-1.3B"\n[training]\nbatch_size = 32\nseq_len = 2048\n'
    assert problems(tmp_path, {"job.toml": text}, "job.toml") == [
        "model.config: not among the presets (got 'own/transformer-1.3B'); add --set model=NAME"
    ]
    assert job_of(tmp_path, {"job.toml": text}, "job.toml", {"model": "llama3-1b"}).data.seqlen == 2048
    four = text + "gradient_accumulation_steps = 4\n"
    # fla-org/flame README: the global batch is batch_size x gradient_accumulation_steps x GPUs, here 32 x 4 x 8
    assert job_of(tmp_path, {"job.toml": four}, "job.toml", {"model": "llama3-1b"}).data.gbs == 1024


def test_linear_layers_of_gpt_neox_have_biases_unless_it_is_said(tmp_path):
    text = '{"pipe-parallel-size": 1, "num-layers": 12, "hidden-size": 768, "num-attention-heads": 12, "seq-length": 2048, '
    text += '"max-position-embeddings": 2048, "pos-emb": "rotary", "train_micro_batch_size_per_gpu": 4%s}'
    assert job_of(tmp_path, {"job.yml": text % ""}, "job.yml").model.bias
    assert not job_of(tmp_path, {"job.yml": text % ', "use_bias_in_attn_linear": false'}, "job.yml").model.bias


def test_a_variable_without_a_value_is_told_as_one(tmp_path):
    script = "torchrun --nproc_per_node 8 train.py --model_name_or_path $MODEL --max_seq_length 2048 "
    script += "--per_device_train_batch_size 1\n"
    assert problems(tmp_path, {"train.sh": script}, "train.sh") == [
        "model $MODEL has no value; add --set model=NAME (3dtrn models), or --set model.hf=CONFIG.json"
    ]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("job.yaml", "model_name_or_path: Qwen/Qwen3-8B\ntemplate: qwen\ninfer_backend: vllm\n",
         "infer_backend vllm: this job does not train"),
        ("job.yaml", "model_name_or_path: Qwen/Qwen3-8B\ntemplate: qwen\nexport_dir: out\n",
         "export_dir out: this job does not train"),
        ("run.sh", "python scripts/vllm_infer.py --model_name_or_path Qwen/Qwen3-8B --template qwen --cutoff_len 2048\n",
         "line 1 runs scripts/vllm_infer.py, which does not train"),
    ],
)  # fmt: skip
def test_a_job_that_does_not_train_is_refused_as_one(tmp_path, name, text, told):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read("llamafactory", str(tmp_path / name), HARDWARE)
    assert error.value.problems == [f"{tmp_path / name}: {told}"]


def test_names_and_values_of_any_length_are_cut(tmp_path):
    """Python converts no text of more than 4,300 digits to a number."""
    digits = "1" * 5000
    script = (
        f"torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {digits} --hidden-size x{digits} --n-{digits} 1 "
    )
    for line in problems(tmp_path, {"run.sh": script + "--num-attention-heads 8 --bf16\n"}, "run.sh"):
        assert len(line) < 250
    text = f"model_name_or_path: m{digits}\nfinetuning_type: full\nper_device_train_batch_size: '{digits}'\n"
    for line in problems(tmp_path, {"job.yaml": text}, "job.yaml"):
        assert len(line) < 250


def test_a_batch_of_all_ranks_goes_before_steps_of_accumulation(tmp_path):
    text = "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\nbf16: true\nper_device_train_batch_size: 1\n"
    job = job_of(tmp_path, {"job.yaml": text + "global_batch_size: 96\n"}, "job.yaml")
    assert (job.data.gbs, job.data.microbatch_sz, job.parallelism.dp) == (96, 1, 8)


def test_fsdps_own_file_says_whether_layers_are_recomputed(tmp_path):
    script = TRAINER.rstrip() + " --model_max_length 2048 --fsdp_config conf/fsdp.json\n"
    config = '{"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "activation_checkpointing": true}'
    job = job_of(tmp_path, {"train.sh": script, "conf/fsdp.json": config}, "train.sh")
    assert job.performance.activation_checkpointing_type == "full"
    assert job_of(tmp_path, {"train.sh": script, "conf/fsdp.json": "{}"}, "train.sh").performance.recompute is None


def test_a_word_that_a_script_expects_is_asked_for_where_a_plan_needs_it(tmp_path):
    script = "ZERO=$2\ndeepspeed main.py --model_name_or_path facebook/opt-1.3b --max_seq_len 512 --zero_stage $ZERO --deepspeed "
    script += "--per_device_train_batch_size 4 --bf16\n"
    assert problems(tmp_path, {"run.sh": script}, "run.sh") == [
        "line 1: zero_stage: $2 has no value; add --set parallelism.zero_level=N"
    ]
    usual = script.replace("ZERO=$2", 'ZERO=$2\nif [ "$ZERO" == "" ]; then ZERO=3; fi')
    assert job_of(tmp_path, {"run.sh": usual}, "run.sh").parallelism.zero_level == 3


def test_flags_of_forks_by_megatrons_names(tmp_path):
    """Megatron-LLaMA's --RMSNorm, --tokenizer-file of BigCode's, MindSpeed-LLM's layer of Qwen3; numbers of RoPE cost nothing."""
    flags = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    flags += "--micro-batch-size 1 --bf16 --RMSNorm --swiglu --disable-bias-linear --rope-scaling-type llama3 --qk-layernorm "
    flags += "--tokenizer-type TokenizerFromFile --tokenizer-file /fsx/tokenizer-starcoder/tokenizer.json "
    flags += "--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec"
    job = job_of(tmp_path, {"run.sh": f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}\n"}, "run.sh")
    assert (job.model.norm, job.model.vocab_sz, job.model.qk_norm) == ("rmsnorm", 49152, True)


def test_a_script_without_words_takes_the_branch_for_none(tmp_path):
    """bash compares an empty $1: Megatron-DeepSpeed's finetune_llama.sh converts with a word, and trains without."""
    script = 'if [ "$1" = "convert" ]; then task="tools/convert.py"; else task="train.py"; fi\n'
    script += 'cmd="deepspeed --num_gpus 8 $task --model_name_or_path Qwen/Qwen3-8B --max_seq_length 2048 '
    script += '--per_device_train_batch_size 1 --bf16 --deepspeed ds_z3.json"\neval "$cmd"\n'
    job = job_of(tmp_path, {"run.sh": script}, "run.sh")
    assert (job.parallelism.dp, job.parallelism.zero_level) == (8, 3)


def test_the_last_of_a_repeated_key_counts(tmp_path):
    text = "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\nbf16: true\nper_device_train_batch_size: 1\n"
    job = job_of(tmp_path, {"job.yaml": text + "per_device_train_batch_size: 4\n"}, "job.yaml")
    assert job.data.microbatch_sz == 4


def test_keys_of_mixed_origin(tmp_path):
    """MaxText's degree 1 between slices costs nothing, GPT-NeoX's mlp_type llama is gated, prompts trained alone are told."""
    maxtext = "model_name: llama2-7b\nper_device_batch_size: 4\nmax_target_length: 2048\nici_fsdp_parallelism: 8\n"
    assert job_of(tmp_path, {"a.yml": maxtext + "dcn_tensor_parallelism: 1\n"}, "a.yml").parallelism.dp == 8
    assert (
        "dcn_tensor_parallelism 2" in problems(tmp_path, {"b.yml": maxtext + "dcn_tensor_parallelism: 2\n"}, "b.yml")[0]
    )
    neox = '{"pipe-parallel-size": 1, "num-layers": 12, "hidden-size": 768, "num-attention-heads": 12, "seq-length": 2048, '
    neox += '"pos-emb": "rotary", "train_micro_batch_size_per_gpu": 4, "mlp_type": "llama", "intermediate_size": 2048}'
    assert job_of(tmp_path, {"c.yml": neox}, "c.yml").model.glu
    tuned = TRAINER.rstrip() + " --model_max_length 512 --pre_seq_len 128\n"
    assert problems(tmp_path, {"d.sh": tuned}, "d.sh")[0].startswith("pre_seq_len 128: partial training")


def test_a_tokenizers_folder_may_count_its_entries(tmp_path):
    flags = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    flags += "--micro-batch-size 1 --bf16 --tokenizer-type TokenizerFromFile "
    flags += "--tokenizer-file /data/bytelevel-bpe-v1-49152/tokenizer.json"
    assert (
        job_of(tmp_path, {"run.sh": f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}\n"}, "run.sh").model.vocab_sz
        == 49152
    )


def test_a_tokenizer_of_ones_own_is_not_the_one_that_it_is_called_after(tmp_path):
    flags = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    flags += "--micro-batch-size 1 --bf16 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}"
    for own in ("/llm/zjllm-llama3-tokenizer", "hfl/chinese-llama-2-7b"):
        assert problems(tmp_path, {"own.sh": f"{script}{own}\n"}, "own.sh") == [
            "vocabulary size unknown; add --set model.vocab_sz=N"
        ]
    for known in ("meta-llama/Meta-Llama-3-8B", "/models/llama3/tokenizer.model"):
        assert job_of(tmp_path, {"known.sh": f"{script}{known}\n"}, "known.sh").model.vocab_sz == 128256


def test_megatrons_programs_that_generate_are_refused_as_such(tmp_path):
    script = "python generate_samples.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512\n"
    assert problems(tmp_path, {"run.sh": script}, "run.sh") == ["line 1 runs generate_samples.py, which does not train"]


_SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --vocab-size 1000"
)


@pytest.mark.parametrize(
    ("name", "text", "whose"),
    [
        ("job.toml", "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nseq_len = 2048\n[parallelism]\n", "run_train.sh"),
        ("run.sh", f"deepspeed pretrain_gpt.py {_SMALL} --fp16\n", "deepspeed, every device of one node"),
    ],
)  # fmt: skip
def test_a_number_of_devices_that_is_taken_is_told_below_the_first_lines(tmp_path, name, text, whose):
    """Of one node where the launcher's own default is that; not where the user tells the number."""
    for sets, told in (({}, True), ({"devices": 16}, False)):
        lines = report(estimate(job_of(tmp_path, {name: text}, name, sets))).partition("\n\n")[0]
        words = " ".join(lines.split())
        assert (f"number of devices not set, 8 assumed: {whose}" in words) == told
        assert ("number of devices not set" in words) == told


@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        ("torchrun --nnodes $N --nproc_per_node $G", "--nnodes: $N has no value; write N=... G=... before the command, or"),
        ("python", "launched by python only: number of processes unknown;"),
    ],
)  # fmt: skip
def test_a_trainers_launch_without_a_number_of_devices_is_told_with_the_fix(tmp_path, launcher, told):
    """The reason is the launch command's own, with what to write."""
    run = TRAINER.replace("torchrun --nproc_per_node=4", launcher).replace("\n", " --model_max_length 2048\n")
    lines = [line.removeprefix("line 1: ") for line in problems(tmp_path, {"run.sh": run}, "run.sh")]
    assert f"{told} add --set parallelism.dp=N" in lines


def test_a_ds_config_that_is_not_there_leaves_the_stage_open(tmp_path):
    """--deepspeed_config $1: without the file nobody tells the stage; with --zero-stage the flag does."""
    run = f"torchrun --nproc_per_node 8 pretrain_gpt.py {_SMALL} --fp16 --deepspeed --deepspeed_config $1"
    (line,) = problems(tmp_path, {"run.sh": f"{run}\n"}, "run.sh")
    asked = "pass script and arguments as one string: 'SCRIPT ARG ...', or add --set parallelism.zero_level=N"
    assert line == f"ds_config: $1 has no value; {asked}"
    (line,) = problems(tmp_path, {"c.sh": f"{run.replace('$1', 'zero.json')}\n"}, "c.sh")
    told = "ds_config zero.json was not found, so the ZeRO stage is unknown; add --set parallelism.zero_level=N"
    assert line == f"{told}, or the file --with FILE"
    assert job_of(tmp_path, {"run.sh": f"{run} --zero-stage 2\n"}, "run.sh").zero_level == 2
    assert job_of(tmp_path, {"run.sh": f"{run}\n"}, "run.sh", {"parallelism.zero_level": 1}).zero_level == 1


def test_a_hostfile_of_gpt_neox_leaves_the_number_of_devices_open(tmp_path):
    """deepy.py takes one node only where no hostfile says otherwise (deepspeed/launcher/runner.py, fetch_hostfile)."""
    text = "pipe_parallel_size: 1\nnum_layers: 4\nhidden_size: 256\nnum_attention_heads: 4\nseq_length: 128\n"
    text += "train_micro_batch_size_per_gpu: 4\nfp16: {enabled: true}\n"
    assert job_of(tmp_path, {"a.yml": text}, "a.yml").parallelism.dp == 8
    (line,) = problems(tmp_path, {"b.yml": f"{text}hostfile: /job/hosts\n"}, "b.yml")
    assert line == "number of devices unknown; add --set parallelism.dp=N"


@pytest.mark.parametrize(
    ("name", "changes", "entries"),
    [
        ("pretrain_llama3_8b.sh", (), 128256),
        ("pretrain.sh", (), None),  # nobody says whose sizes they are
        ("pretrain_llama3_8b.sh", ("14336", "14848"), None),  # another model
        ("pretrain_llama3_8b.sh", ("path-to-your-tokenizer", "/data/europa-tokenizer"), None),
    ],
)
def test_the_vocabulary_of_a_model_whose_name_and_sizes_the_job_has(tmp_path, name, changes, entries):
    """Where the tokenizer is left to be filled in; Llama 3 8B has 128,256 entries."""
    script = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu \\\n"
        "  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 --micro-batch-size 1 \\\n"
        "  --max-position-embeddings 4096 --global-batch-size 64 --bf16 --tokenizer-type HuggingFaceTokenizer \\\n"
        "  --tokenizer-model path-to-your-tokenizer --position-embedding-type rope\n"
    ).replace(*(changes or ("", "")))
    if entries is None:
        assert problems(tmp_path, {name: script}, name) == ["vocabulary size unknown; add --set model.vocab_sz=N"]
    else:
        job = job_of(tmp_path, {name: script}, name)
        assert job.model.vocab_sz == entries
        assert f"vocabulary not set, llama3-8b's, whose other sizes the job has, assumed: {entries}" in job.notes


def test_a_script_that_counts_its_ranks_has_as_many_devices(tmp_path):
    """2 x 2 x 4 = 16, of which DeepSpeed's launcher is told nothing: dp 4."""
    script = (
        "TP=2; PP=2; DP=4\nWORLD_SIZE=$((TP*PP*DP))\n"
        "deepspeed pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --num-layers 4 \\\n"
        "  --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1000 \\\n"
        "  --micro-batch-size 1 --global-batch-size 4 --bf16\n"
    )
    job = job_of(tmp_path, {"run.sh": script}, "run.sh")
    assert (job.parallelism.devices, job.parallelism.dp) == (16, 4)
    assert any(note.startswith("number of devices not set, 16 assumed: WORLD_SIZE of the script") for note in job.notes)


def test_nodes_that_the_environment_counts_are_one_and_said(tmp_path):
    script = (
        'echo "nodes ${NNODES}"\nNPROC_PER_NODE=8 \\\nmegatron pt --model Qwen/Qwen3-8B --max_length 4096 --micro_batch_size 1 '
        "--global_batch_size 64\n"
    )
    job = job_of(tmp_path, {"run.sh": script}, "run.sh")
    assert (
        "number of devices not set, 8 assumed: one node, since NNODES is not set; else add --set parallelism.dp=N"
        in job.notes
    )


@pytest.mark.parametrize(("library", "asked"), [("huggingface", False), ("sentencepiece", True)])
def test_a_sentencepiece_tokenizer_of_nemo_is_not_llama_3s(tmp_path, library, asked):
    """The sizes are Llama 3 8B's, and Mistral's; Llama 3 has tiktoken's encoding (128,256 entries), not a SentencePiece model."""
    model = (
        "mcore_gpt: true, micro_batch_size: 1, global_batch_size: 8, tensor_model_parallel_size: 1, num_layers: 32, "
        "pipeline_model_parallel_size: 1, encoder_seq_length: 4096, hidden_size: 4096, ffn_hidden_size: 14336, "
        "num_attention_heads: 32, num_query_groups: 8, normalization: rmsnorm, bias: false, activation: fast-swiglu, "
        "position_embedding_type: rope, share_embeddings_and_output_weights: false, hidden_dropout: 0.0, "
        "attention_dropout: 0.0"
    ).replace(", ", "\n  ")
    text = f"exp_manager:\n  name: a\ntrainer:\n  devices: 8\n  num_nodes: 1\n  precision: bf16\nmodel:\n  {model}\n"
    text += f"  tokenizer: {{library: {library}, type: null, model: null}}\n  optim: {{name: fused_adam}}\n"
    files = {"llama_config.yaml": text}
    if asked:
        assert problems(tmp_path, files, "llama_config.yaml") == ["vocabulary size unknown; add --set model.vocab_sz=N"]
    else:
        assert job_of(tmp_path, files, "llama_config.yaml").model.vocab_sz == 128256
