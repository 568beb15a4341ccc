"""Scripts as people have them: of forks, under Slurm, with files that they source, and what is left to be asked."""

import json

import pytest

from steptime.base.config import ConfigError
from steptime.launch.megatron.releases import fitting_release
from steptime.launch.read import read
from steptime.launch.reading import LaunchFlag, Reading, left_out_differences, to_job
from steptime.launch.vocabulary import entries_of

SIZES = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 2 --global-batch-size 64"
FLAGS = f"{SIZES} --vocab-size 1000 --bf16"
H100 = {"hardware.node_type": "dgx-h100"}
RUN = "torchrun --nproc_per_node 8 pretrain_gpt.py "


def job_of_script(tmp_path, text, added=(), **sets):
    path = tmp_path / "run.sh"
    path.write_text(text)
    sets = H100 | {key.replace("__", "."): value for key, value in sets.items()}
    return to_job(read("megatron", str(path), sets, [str(name) for name in added]), sets)


def problems(tmp_path, text, **sets):
    with pytest.raises(ConfigError) as error:
        job_of_script(tmp_path, text, **sets)
    return [line.partition("run.sh: ")[2] for line in error.value.problems]


def test_a_script_that_submits_itself(tmp_path):
    """Under sbatch SLURM_JOB_ID is set; 4 nodes of 8 tasks over tp 2 and pp 4."""
    text = (
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n"
        'if [ -z $SLURM_JOB_ID ]; then\n  sbatch "$0"\n  exit\nfi\n'
        f'CMD="pretrain_gpt.py {FLAGS} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"\n'
        "srun singularity exec image.sif ./launch.sh $CMD\n"
    )
    layout = job_of_script(tmp_path, text).parallelism
    assert (layout.tp, layout.pp, layout.dp) == (2, 4, 4)


def test_a_script_of_grid_engine_has_the_nodes_of_its_header(tmp_path):
    """8 nodes of the kind rt_AF, which the script gives 8 processes each: 64 over tp 2 and pp 4."""
    text = (
        '#$ -l rt_AF=8\nif [[ "$SGE_RESOURCE_TYPE" == "rt_F" ]]; then\n  N=4\n'
        'elif [[ "$SGE_RESOURCE_TYPE" == "rt_AF" ]]; then\n  N=8\nfi\n'
        f"mpirun -np $((NHOSTS * N)) --npernode $N python pretrain_gpt.py {FLAGS} --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 4\n"
    )
    assert job_of_script(tmp_path, text).parallelism.dp == 8


def test_files_that_a_script_sources_are_read_beside_it_or_added(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    text = 'DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$DIR/conf/model.sh"\n' + RUN + "$MODEL\n"
    missing = problems(folder, text)
    assert len(missing) == 1
    assert "conf/model.sh, which was not found; put it in the same folder, or add --with FILE" in missing[0]
    other = tmp_path / "model.sh"
    other.write_text(f'MODEL="{FLAGS}"\n')
    assert job_of_script(folder, text, [other]).model.n_layers == 8
    (folder / "conf").mkdir()
    (folder / "conf" / "model.sh").write_text(f'MODEL="{FLAGS.replace("--num-layers 8", "--num-layers 6")}"\n')
    assert job_of_script(folder, text).model.n_layers == 6
    with pytest.raises(ConfigError, match="no such file"):
        job_of_script(folder, text, [tmp_path / "nothing.sh"])


def test_files_are_found_in_a_copy_of_the_repository(tmp_path):
    """A script of /data/user/project reads project/conf/model.sh, which here lies in another folder's conf."""
    folder = tmp_path / "copy" / "jobs"
    (folder.parent / "conf").mkdir(parents=True)
    folder.mkdir()
    (folder.parent / "conf" / "model.sh").write_text(f'MODEL="{FLAGS}"\n')
    text = "ROOT=/data/$USER/project\nsource $ROOT/conf/model.sh\n" + RUN + "$MODEL\n"
    assert job_of_script(folder, text).model.n_layers == 8


def test_a_file_outside_of_the_folder_is_not_read(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (tmp_path / "secret.sh").write_text("export TP=2\n")
    text = "source ../secret.sh\n" + RUN + FLAGS + " --tensor-model-parallel-size $TP\n"
    assert "$TP has no value" in problems(folder, text)[0]


def test_flags_without_a_launch_command(tmp_path):
    text = f'GPT_ARGS="{SIZES}"\nMORE=(--bf16 --vocab-size 1000)\nexport ALL="$GPT_ARGS --swiglu"\n'
    what = "no launch command: number of devices unknown; give the script that reads it --with this file, or"
    assert problems(tmp_path, text) == [f"{what} add --set parallelism.dp=N"]
    text += "TORCH_ARGS=(--nnodes 1 --node_rank $RANK --nproc_per_node 8)\n"  # of torchrun, not of the program
    found = job_of_script(tmp_path, text, parallelism__dp=4)
    assert (found.model.n_layers, found.model.glu, str(found.performance.precision)) == (8, True, "bf16")


@pytest.mark.parametrize(
    "launch",
    ["python pretrain_gpt.py ", "mpirun --bind-to none python pretrain_gpt.py ",
     "deepspeed --hostfile hosts --num_gpus 8 pretrain_gpt.py "],
)  # fmt: skip
def test_a_launch_without_a_count_is_asked_for_it(tmp_path, launch):
    told = problems(tmp_path, launch + FLAGS)
    assert len(told) == 1
    assert told[0].endswith("add --set parallelism.dp=N")


@pytest.mark.parametrize(
    ("launch", "dp"),
    [("deepspeed --num_gpus 8 pretrain_gpt.py ", 8), ("deepspeed pretrain_gpt.py ", 8),
     ("NUM_GPUS=16\ndeepspeed pretrain_gpt.py ", 16),
     ("num_gpus=$(($(ds_ssh nvidia-smi --query-gpu=name | wc -l)-2))\ndeepspeed pretrain_gpt.py ", 8),
     ("deepspeed --hostfile /tmp/hosts --include a:8\\,9\\,10\\,11@b:0\\,1\\,2\\,3 pretrain_gpt.py ", 8),
     ("msrun --worker_num 16 --local_worker_num 8 pretrain_gpt.py ", 16),
     ("torchrun --nproc_per_node gpu pretrain_gpt.py ", 8),
     ("N=$(nvidia-smi --list-gpus | wc -l)\ntorchrun --nnodes 2 --nproc_per_node $N pretrain_gpt.py ", 16)],
)  # fmt: skip
def test_counts_of_launchers(tmp_path, launch, dp):
    """dgx-h100 has 8 devices: what a script counts on a node of it, and what deepspeed starts without a hostfile."""
    assert job_of_script(tmp_path, launch + FLAGS).parallelism.dp == dp


def test_megatron_deepspeed_and_the_config_beside_it(tmp_path):
    """8 processes over tp 2 and pp 2; 6 layers and both ends count as 8 over 2 stages."""
    flags = FLAGS.replace("--bf16", "--fp16").replace("--num-layers 8", "--num-layers 6")
    text = (
        RUN
        + flags
        + (
            " --deepspeed --deepspeed_config ds.json --zero-stage 0 --checkpoint-activations "
            "--deepspeed-activation-checkpointing "
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --position-embedding-type alibi "
            "--no-pipeline-parallel "
            "--pp-partition-method 'type:transformer|embedding' --num-key-value-heads 4 --pad-vocab-size-to 2048 --num-experts 1"
        )
    )
    found = job_of_script(tmp_path, text)
    assert (found.parallelism.zero_level, found.performance.software) == (0, "megatron-deepspeed")
    assert found.performance.recompute.granularity == "full"
    assert (found.model.n_kv_heads, found.model.vocab_sz) == (4, 2048)
    assert (found.model.learned_positions, found.model.rotary_embeds) == (False, False)
    assert found.parallelism.embedding_and_loss_count_as_layers
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "train_batch_size": 64}')
    assert job_of_script(tmp_path, text).parallelism.zero_level == 1


def test_deepspeed_distributes_layers_that_the_stages_do_not_divide(tmp_path):
    """deepspeed/runtime/utils.py, partition_balanced: the first of 2 stages has 4 of 7 layers; Megatron-LM refuses them."""
    flags = FLAGS.replace("--num-layers 8", "--num-layers 7") + " --pipeline-model-parallel-size 2 --zero-stage 0"
    found = job_of_script(tmp_path, RUN + flags + " --deepspeed")
    assert list(found.layers_per_chunk) == [4, 3]
    with pytest.raises(ConfigError, match="pp\\*vpp = 2 must divide n_layers 7"):
        job_of_script(tmp_path, RUN + flags.replace(" --zero-stage 0", ""))


def test_fused_norms_and_optimizers_of_a_fork_are_the_usual_ones(tmp_path):
    """`--no-layer-norm-fusion` and `--no-optimizer-fusion` of a fork for MI250: without them both are as counted."""
    assert not [
        note for note in job_of_script(tmp_path, RUN + FLAGS + " --layer-norm-fusion true").notes if "fusion" in note
    ]
    notes = job_of_script(tmp_path, RUN + FLAGS + " --optimizer-fusion false").notes
    assert "approximated: --optimizer-fusion false: the optimizer is counted in one kernel" in notes


def test_sequences_over_ranks_of_megatron_deepspeed(tmp_path):
    """--ds-sequence-parallel-size is DeepSpeed's DistributedAttention: heads for tokens, 8 devices as dp 2 x cp 4."""
    flags = FLAGS + " --deepspeed --zero-stage 1 --ds-sequence-parallel-size 4 --use-flash-attn --no-pipeline-parallel"
    layout = job_of_script(tmp_path, RUN + flags).parallelism
    assert (layout.dp, layout.cp, layout.cp_comm_type) == (2, 4, "a2a")


def test_bf16_under_deepspeed_shards_its_states_at_stage_0(tmp_path):
    """deepspeed/runtime/bf16_optimizer.py partitions the fp32 copies over data parallelism whatever the stage says."""
    assert job_of_script(tmp_path, RUN + FLAGS + " --deepspeed --zero-stage 0").parallelism.zero_level == 1


def test_a_file_of_variables_alone_sizes_a_config(tmp_path):
    """MLPerf's config_*.sh: 2 nodes of 8, tp 4."""
    sizes = tmp_path / "config_DGXH100.sh"
    sizes.write_text("export DGXNNODES=2\nexport DGXNGPU=8\nexport TP=4\nexport MBS=$((1 + 1))\n")
    config = tmp_path / "job.yaml"
    config.write_text(
        "trainer: {devices: '${oc.decode:${oc.env:DGXNGPU,1}}', num_nodes: '${oc.decode:${oc.env:DGXNNODES,1}}',\n"
        "  precision: bf16}\n"
        "model: {mcore_gpt: true, megatron_amp_O2: true, num_layers: 8, hidden_size: 1024, num_attention_heads: 16,\n"
        "  encoder_seq_length: 512, max_position_embeddings: 512, tensor_model_parallel_size: '${oc.decode:${oc.env:TP,1}}',\n"
        "  micro_batch_size: '${oc.decode:${oc.env:MBS,1}}',\n"
        "  global_batch_size: '${multiply:${.micro_batch_size},${oc.env:N,8}}',\n"
        "  optim: {name: distributed_fused_adam}}\n"
    )
    sets = H100 | {"model.vocab_sz": 1000}
    found = to_job(read("nemo", str(config), sets, [str(sizes)]), sets)
    assert (found.parallelism.tp, found.parallelism.dp, found.data.gbs, found.data.microbatch_sz) == (4, 4, 16, 2)
    assert "sets variables of a job (DGXNNODES, DGXNGPU, TP, MBS)" in problems(tmp_path, sizes.read_text())[0]
    # the variables alone, where one config in conf/ beside them reads the nodes; of two it is not known which
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "job.yaml").write_text(config.read_text())
    (tmp_path / "conf" / "data.yaml").write_text("data_prefix: c4\n")
    again = to_job(read("auto", str(sizes), sets), sets)
    assert (again.parallelism, again.data) == (found.parallelism, found.data)
    (tmp_path / "conf" / "whole.yaml").write_text("defaults:\n  - megatron_gpt_config\n  - job # overrides of it\n")
    with pytest.raises(ConfigError, match="sets variables of a job"):  # a part: its optimizer is elsewhere
        read("auto", str(sizes), sets)
    (tmp_path / "conf" / "whole.yaml").write_text(config.read_text())
    with pytest.raises(ConfigError, match="sets variables of a job"):
        read("auto", str(sizes), sets)


def test_overrides_of_a_recipe_are_told_as_what_they_are(tmp_path):
    text = "MODEL_ARGS:\n  trainer.num_nodes: 1\n  model.config.num_layers: 12\n"
    assert problems(tmp_path, text) == [
        "MODEL_ARGS override a NeMo recipe that is not in the file; give the full config of the job with --from nemo"
    ]


def test_underscores_and_whole_command_lines(tmp_path):
    text = RUN + f'"{FLAGS.replace("-", "_").replace("__", "--")} --no_bias_gelu_fusion"'
    assert job_of_script(tmp_path, text).model.hidden_sz == 1024


def test_a_switch_may_say_true_or_false(tmp_path):
    found = job_of_script(
        tmp_path,
        RUN + FLAGS + " --sequence-parallel true --tensor-model-parallel-size 2 --use-distributed-optimizer false",
    )
    assert (found.parallelism.sp, found.parallelism.zero_level) == (True, 0)


def test_all_unset_variables_are_one_line(tmp_path):
    text = (
        RUN
        + FLAGS
        + " --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --cpu-offloading-num-layers 3"
    )
    assert problems(tmp_path, text) == [
        "line 1: $TP, $PP have no value; write TP=... PP=... before the command",
        "--cpu-offloading-num-layers 3: activation offloading; not modeled; --allow-unmodeled ignores it",
    ]


@pytest.mark.parametrize(
    ("kind", "files", "entries"),
    [
        ("GPT2BPETokenizer", ["data/gpt2-vocab.json", "data/gpt2-merges.txt"], 50257),
        ("GPT2BPETokenizer", [], 50257),
        ("GPT2BPETokenizer", ["/x/europa-tokenizer/vocab.json"], None),
        ("GPT2BPETokenizer", ["/x/north_tokenizer_131072-rc3/vocab.json"], 131072),  # its own name counts
        ("HuggingFaceTokenizer", ["google/gemma-7b"], 256000),  # a preset's embedding
        ("Llama2Tokenizer", ["/data/tokenizer.model"], None),  # the type reads any SentencePiece model
        ("Llama2Tokenizer", ["src/own-100k.ver3.model"], None),
        ("HuggingFaceTokenizer", ["meta-llama/Llama-3.1-8B"], 128256),
        ("HuggingFaceTokenizer", ["own/model"], None),
        ("HuggingFaceTokenizer", ["alehc/swissai-tokenizer"], 131072),
        ("HFTokenizer", ["ckpt/llama3-8b-instruct/tokenizer/tokenizer.json"], 128256),  # inside the model's folder
        ("HFTokenizer", ["ckpt/llama3-8b-instruct/tokenizer/own.json"], None),
        ("TokenizerFromFile", ["/x/starcoder-tokenizer/15b/tokenizer.json"], 49152),  # a size of the family
    ],
)
def test_a_vocabulary_is_never_guessed_against_the_file(kind, files, entries):
    found = entries_of(kind, files)
    assert (found and found[0]) == entries
    of_llama = entries_of("Llama2Tokenizer", ["/data/tokenizer.model"], about="llama2/pretrain_7b.sh")
    assert of_llama is not None
    assert of_llama[0] == 32000


@pytest.mark.parametrize(
    ("remark", "entries"), [("official llama tokenizer.model", 32000), ("offical llama3 tokenizer", 128256)]
)
def test_a_comment_says_whose_official_tokenizer_it_is(tmp_path, remark, entries):
    flags = f"{SIZES} --tokenizer-type GPTSentencePieceTokenizer --make-vocab-size-divisible-by 1 --tokenizer-model $TOKENIZER"
    script = f"TOKENIZER=$BASE/tokenizer.model # {remark}\n{RUN}{flags}"
    assert job_of_script(tmp_path, script).model.vocab_sz == entries
    assert problems(tmp_path, script.replace("offici", "my ").replace("offica", "my a"))[0].startswith("vocabulary")


def test_a_padding_as_large_as_a_vocabulary_tells_it(tmp_path):
    """16032 x tp 8 is Llama 3's 128256; the usual multiple 128 tells nothing."""
    flags = f"{SIZES} --tensor-model-parallel-size 8 --tokenizer-type PretrainedFromHF --make-vocab-size-divisible-by "
    assert job_of_script(tmp_path, RUN + flags + "16032").model.vocab_sz == 128256
    assert problems(tmp_path, RUN + flags + "128") == ["vocabulary size unknown; add --set model.vocab_sz=N"]


def test_a_vocabulary_is_counted_where_its_file_is(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2}')
    assert entries_of("GPT2BPETokenizer", [str(tmp_path / "vocab.json")]) == (3, "as counted in vocab.json")
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "b"}, {"content": "<e>"}]}'
    )
    assert entries_of("", [str(tmp_path / "tokenizer.json")])[0] == 3
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    assert entries_of("", [str(tmp_path)])[0] == 77


def test_a_sentencepiece_model_beside_the_script_is_counted(tmp_path):
    """Pieces <unk>, <EOD> and "a" x 200 (a length of two bytes), each with a score; Megatron adds four that it lacks: 7."""
    pieces = [b"<unk>", b"<EOD>", b"a" * 200]
    score = b"\x15" + bytes(4)
    inner = [b"\x0a" + _varint(len(piece)) + piece + score for piece in pieces]
    raw = b"".join(b"\x0a" + _varint(len(piece)) + piece for piece in inner) + b"\x12\x02\x08\x01"
    (tmp_path / "own.model").write_bytes(raw)
    flags = SIZES + " --tokenizer-model own.model --make-vocab-size-divisible-by 1 --tokenizer-type "
    assert job_of_script(tmp_path, RUN + flags + "SentencePieceTokenizer").model.vocab_sz == 7
    assert job_of_script(tmp_path, RUN + flags + "Llama2Tokenizer").model.vocab_sz == 3
    long = flags.replace("own.model", "x" * 5000 + ".model") + "SentencePieceTokenizer"
    assert "vocabulary" in problems(tmp_path, RUN + long)[0]
    (tmp_path / "own.model").write_bytes(raw[:5])
    assert "vocabulary" in problems(tmp_path, RUN + flags + "SentencePieceTokenizer")[0]


def _varint(number):
    """A whole number of protobuf's encoding below 2^14."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])


@pytest.mark.parametrize(
    ("arguments", "release"),
    [(["num_layers", "faiss_use_gpu"], "2.0"), (["img_dim"], "2.5 to 2.6"),
     (["langrl_inference_server_type"], "core 0.15 to core 0.16"), (["lion_beta1"], "core 0.17 to core 0.19"), (["own"], "")],
)  # fmt: skip
def test_the_releases_that_have_the_flags(arguments, release):
    assert fitting_release(arguments) == release


def test_flags_in_no_plan_that_differ():
    flags = [
        [LaunchFlag("a", "1", "unmodeled"), LaunchFlag("b", "1", "approximated")],
        [LaunchFlag("b", "2", "approximated")],
    ]
    a, b = (Reading("log", "", {}, said) for said in flags)
    assert left_out_differences([a, b], ["A", "B"]) == [
        "in no plan, but different: a (A 1, B unset)",
        "in no plan, but different: b (A 1, B 2)",
    ]


@pytest.mark.parametrize(
    "folder", ['$(cd "$(dirname "$0")" && pwd)', '$( cd "$( dirname "${BASH_SOURCE[0]}" )" >/dev/null 2>&1 && pwd -P )']
)
def test_a_program_of_its_own_under_deepspeed_has_no_defaults_of_a_trainer(tmp_path, folder):
    """The ds_config says the stage; batch, length and precision, which neither it nor the script has, are asked for at once."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}')
    script = tmp_path / "run.sh"
    script.write_text(
        f'#!/bin/bash\nD={folder}\ndeepspeed --num_gpus 8 "$D/train.py" --deepspeed --deepspeed_config "$D/ds.json"\n'
    )
    sets = H100 | {"model": "llama3-8b", "data.seqlen": 2048, "data.gbs": 16, "data.microbatch_sz": 2}
    found = to_job(read("transformers", str(script), sets), sets)
    assert (found.zero_level, found.parallelism.dp) == (3, 8)
    with pytest.raises(ConfigError) as error:
        to_job(read("auto", str(script), H100), H100)
    asked = [line.rpartition("add --set ")[2] for line in error.value.problems]
    assert [word.partition("=")[0] for word in asked] == [
        "performance.precision", "model", "data.gbs", "data.microbatch_sz", "data.seqlen",
    ]  # fmt: skip
    sets |= {"performance.precision": "bf16"}
    assert to_job(read("auto", str(script), sets), sets).data.gbs == 16
    (tmp_path / "ds.json").unlink()
    with pytest.raises(
        ConfigError, match=r"ds\.json was not found; add --with FILE, or --set parallelism\.zero_level=N"
    ):
        to_job(read("auto", str(script), sets), sets)


def test_a_ds_config_of_a_custom_program_says_its_batch_and_precision(tmp_path):
    """96 sequences in steps of 4 on each of 8 devices, of which 3 accumulate."""
    config = {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config | {"zero_optimization": {"stage": 2}}))
    (tmp_path / "bench.py").write_text("if args.gc:\n    model.gradient_checkpointing_enable()\n")
    script = tmp_path / "run.sh"
    script.write_text("deepspeed --num_gpus 8 bench.py --deepspeed_config ds.json --max_len 1024 --gc\n")
    sets = H100 | {"model": "llama2-7b"}
    job = to_job(read("auto", str(script), sets), sets)
    assert (job.zero_level, job.data.gbs, job.data.microbatch_sz, job.data.seqlen) == (2, 96, 4, 1024)
    assert (job.performance.precision, job.performance.activation_checkpointing_type) == ("fp16", "full")


def test_a_program_of_preference_learning_trains_otherwise(tmp_path):
    """Two models and pairs of sequences: not a step of pretraining."""
    text = RUN.replace("pretrain_gpt.py", "dpo_training_ref.py") + FLAGS
    assert "preference or reinforcement learning" in problems(tmp_path, text)[0]


@pytest.mark.parametrize(("word", "activation"), [("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu")])
def test_the_gated_activations_of_megatron_deepspeed(tmp_path, word, activation):
    """megatron/model/glu_activations.py: a half of the projection, through the function, times the other half."""
    model = job_of_script(tmp_path, f"{RUN}{FLAGS} --glu-activation {word}").model
    assert (model.glu, model.activation) == (True, activation)


def test_flags_spelled_with_underscores(tmp_path):
    spelled = " ".join(
        word.replace("-", "_").replace("__", "--", 1) if word[:2] == "--" else word for word in FLAGS.split()
    )
    assert "--num_layers" in spelled
    assert job_of_script(tmp_path, RUN + spelled) == job_of_script(tmp_path, RUN + FLAGS)
