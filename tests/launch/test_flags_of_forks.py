"""Flags of forks of Megatron-LM, and what a script says of its vocabulary."""

import json

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.megatron.sources import from_arguments
from steptime.launch.read import read
from steptime.launch.reading import to_job

RUN = (
    "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --bf16 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8"
)
GPT2 = "--vocab-file gpt2-vocab.json"


def job_of(folder, flags, before=""):
    path = folder / "run.sh"
    path.write_text(f"#!/bin/bash\n{before}{RUN} {flags}\n", encoding="utf-8")
    return to_job(read("megatron", str(path), HARDWARE), HARDWARE)


def problem_of(folder, flags, before=""):
    with pytest.raises(ConfigError) as error:
        job_of(folder, flags, before)
    (line,) = error.value.problems
    return line


def test_swiglu_of_opengptx_keeps_the_width_that_is_given(tmp_path):
    """Three matrices of h * ffn; without --ffn-hidden-size the width is 4h, not two thirds of it."""
    model = job_of(tmp_path, f"{GPT2} --t5-swiglu --ffn-hidden-size 2816").model
    assert (model.glu, model.activation, model.inter_sz) == (True, "silu", 2816)
    assert job_of(tmp_path, f"{GPT2} --t5-swiglu").model.inter_sz == 4 * 1024


def test_batches_that_are_not_padded_are_counted_at_full_length(tmp_path):
    job = job_of(tmp_path, f"{GPT2} --no-pad-to-seq-lengths")
    assert job.data.seqlen == 1024
    assert any("--no-pad-to-seq-lengths" in note and "full length" in note for note in job.notes)


def test_how_samples_are_cut_has_no_cost(tmp_path):
    """A sample of MLPerf's GPT-3 is not one token longer than --seq-length; the sequence is that long either way."""
    assert job_of(tmp_path, f"{GPT2} --no-seq-len-plus-one-tokens").data.seqlen == 1024


def test_training_on_processors_alone_is_refused(tmp_path):
    assert "--no-cuda" in problem_of(tmp_path, f"{GPT2} --no-cuda")


def test_the_vocabulary_that_the_script_states(tmp_path):
    """A variable VOCAB_SIZE says what a tokenizer of another name does not; a known tokenizer goes before it."""
    own = "--tokenizer-type SentencePieceTokenizer --tokenizer-model unigram_own.model"
    assert problem_of(tmp_path, own).endswith("vocabulary size unknown; add --set model.vocab_sz=N")
    job = job_of(tmp_path, own, "VOCAB_SIZE=250680\n")
    assert job.model.vocab_sz == 250680
    assert "vocabulary not set, VOCAB_SIZE of the script assumed: 250680" in job.notes
    assert job_of(tmp_path, GPT2, "VOCAB_SIZE=250680\n").model.vocab_sz == 50257
    assert "vocabulary size unknown" in problem_of(tmp_path, own, "VOCAB_SIZE=250k\n")


def test_masks_trained_over_frozen_weights_are_refused(tmp_path):
    told = problem_of(tmp_path, f"{GPT2} --N 2 --M 4 --mask-only --gumbel-scale-range 1e2 5e2")
    assert "--mask-only" in told
    assert "its name suggests a cost" in told


def test_activations_of_a_fork_by_one_name(tmp_path):
    """--activation and --no-bias: a gated function has a third matrix, the others two; an MLP without bias has none."""
    model = job_of(tmp_path, f"{GPT2} --activation swiglu --ffn-hidden-size 2816 --no-bias").model
    assert (model.glu, model.activation, model.inter_sz, model.bias) == (True, "silu", 2816, False)
    plain = job_of(tmp_path, f"{GPT2} --activation gelu").model
    assert (plain.glu, plain.activation, plain.bias) == (False, "gelu", True)


def test_a_head_of_its_own(tmp_path):
    """Megatron-LLaMA's --causal-lm: vocabulary * h more parameters; with tp the head is whole on each rank, which is refused."""
    tied, own = (job_of(tmp_path, f"{GPT2} {flag}").model for flag in ("", "--causal-lm"))
    assert (tied.tie_embeddings, own.tie_embeddings) == (True, False)
    told = problem_of(tmp_path, f"{GPT2} --causal-lm --tensor-model-parallel-size 2")
    assert "a head of its own that tensor-parallel ranks do not divide" in told


def test_compiled_operators_of_an_npu_cost_nothing(tmp_path):
    assert job_of(tmp_path, f"{GPT2} --jit-compile").model == job_of(tmp_path, GPT2).model


@pytest.mark.parametrize(
    "flag", ["--grad_comp", "--use_error_feedback", "--compression-kind topk", "--cross-site-delay 20", "--zb-runtime"]
)
def test_other_exchanges_and_schedules_are_refused(tmp_path, flag):
    """Compressed gradients, a delay that a fork adds to its messages, a fork's runtime of another schedule."""
    assert "its name suggests a cost" in problem_of(tmp_path, f"{GPT2} {flag}")
    assert job_of(tmp_path, f"{GPT2} --log-compression-rate").data.gbs == 8


def test_a_script_that_only_checks_its_job_says_how_it_is_started(tmp_path):
    """By default it ends before its launch command, with the variable that makes it go on in its own words."""
    check = 'if [[ "${GO:-0}" != "1" ]]; then\n  echo "  GO=1 bash $0"\n  exit 0\nfi\n'
    told = problem_of(tmp_path, GPT2, check)
    assert "line 3 prints how it is started: GO=1 bash" in told
    assert told.endswith("write GO=1 before the command")


def test_overlap_of_one_kernel_that_multiplies_and_communicates(tmp_path):
    """MindSpeed's --use-mc2 hides communication of tensor parallelism, which is counted as not hidden and told."""
    for flag in ("--use-mc2", "--use-ascend-mc2"):
        job = job_of(tmp_path, f"{GPT2} {flag} --tensor-model-parallel-size 2")
        assert any(flag in note and "under its products" in note for note in job.notes)
        assert not any(flag in note for note in job_of(tmp_path, f"{GPT2} {flag}").notes)


def test_a_variable_whose_default_is_a_command(tmp_path):
    """The user gives the variable; the back end by the host's name is no question."""
    before = 'WORLD=${WORLD:-$(wc -l < "$LIST")}\n[[ $(hostname) == x4* ]] && BE=ccl\n'
    told = problem_of(tmp_path, f"{GPT2} --distributed-backend $BE --global-batch-size $((WORLD * 8))", before)
    assert "--global-batch-size" in told
    assert "--distributed-backend" not in told
    assert told.endswith("write WORLD=... before the command")


def test_a_sentencepiece_model_beside_a_tokenizer_of_another_type(tmp_path):
    """Two pieces (fields of number 1, the text in the first of each); Qwen's tokenizer reads ranks, so these are not its."""
    (tmp_path / "own.model").write_bytes(b"\x0a\x03\x0a\x01a\x0a\x03\x0a\x01b")
    flags = "--tokenizer-model own.model --tokenizer-type"
    assert job_of(tmp_path, f"{flags} GPTSentencePieceTokenizer").model.vocab_sz == 2
    assert problem_of(tmp_path, f"{flags} QwenTokenizer").endswith(
        "vocabulary size unknown; add --set model.vocab_sz=N"
    )


@pytest.mark.parametrize(("flag", "half"), [("--bf16", "fp16"), ("--fp16", "bf16")])
def test_two_half_precisions(tmp_path, flag, half):
    """DeepSpeed casts the module to the ds_config's, whatever Megatron-LM made it in; which was meant is asked for."""
    (tmp_path / "ds.json").write_text(json.dumps({half: {"enabled": True}, "train_batch_size": 8}), encoding="utf-8")
    script = RUN.replace("--bf16", flag) + f" {GPT2} --deepspeed --deepspeed_config ds.json --zero-stage 1"
    path = tmp_path / "run.sh"
    path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        to_job(read("megatron", str(path), HARDWARE), HARDWARE)
    (line,) = error.value.problems
    told = f"ds.json: {half}.enabled contradicts {flag}; add --set performance.precision={half} or {flag[2:]}"
    assert line.endswith(told)
    sets = HARDWARE | {"performance.precision": half}
    assert to_job(read("megatron", str(path), sets), sets).performance.precision == half


def test_files_to_be_filled_in_say_nothing_of_a_vocabulary(tmp_path):
    """A text in a file's place names no tokenizer: then its type does."""
    place = "--vocab-file vocab file for gpt training --merge-file merge file for gpt training"
    job = job_of(tmp_path, f"{place} --tokenizer-type GPT2BPETokenizer")
    assert job.model.vocab_sz == 50257


def test_a_tokenizer_by_its_path(tmp_path):
    """A fork's --tokenizer-path names its tokenizer as --tokenizer-model does."""
    public = job_of(tmp_path, "--tokenizer-path meta-llama/Llama-2-7b-hf")
    assert public.model.vocab_sz == 32000
    told = problem_of(tmp_path, "--tokenizer-type SentencePieceTokenizer --tokenizer-path own_32k_v2.model")
    assert told.endswith("vocabulary size unknown; add --set model.vocab_sz=N")


@pytest.mark.parametrize(
    "flag", ["--no-delay-grad-reduce", "--fault-injector-delay-start-iteration 3", "--retry-delay 3"]
)
def test_delays_that_are_no_part_of_a_step(tmp_path, flag):
    """Megatron-Core 0.4 to 0.8 has --no-delay-grad-reduce; the others are of faults and of starting again."""
    assert job_of(tmp_path, f"{GPT2} {flag}").parallelism == job_of(tmp_path, GPT2).parallelism


@pytest.mark.parametrize("flag", ["--nnodes <N>", "--nnodes=<N>", "--nnodes $N"])
def test_nodes_that_are_to_be_filled_in_are_asked_for(tmp_path, flag):
    """torchrun's default of one node is for a command without the option."""
    path = tmp_path / "run.sh"
    path.write_text(f"N=<number of nodes>\n{RUN.replace('--nnodes 1', flag)} {GPT2}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--nnodes: <.* is to be filled in; add --set parallelism.dp=N"):
        to_job(read("megatron", str(path), HARDWARE), HARDWARE)


def test_the_half_precision_of_a_ds_config_alone(tmp_path):
    """DeepSpeed casts the module although no flag of the program names a half precision."""
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": True}, "train_batch_size": 8}), encoding="utf-8")
    path = tmp_path / "run.sh"
    flags = f"{GPT2} --deepspeed --deepspeed_config ds.json"
    path.write_text(f"{RUN.replace(' --bf16', '')} {flags}\n", encoding="utf-8")
    assert to_job(read("megatron", str(path), HARDWARE), HARDWARE).performance.precision == "fp16"


def test_gpt2s_tokenizer_does_not_read_the_size_of_a_vocabulary(tmp_path):
    """NVIDIA/Megatron-LM megatron/training/tokenizer/tokenizer.py, build_tokenizer: it pads the tokenizer's own size."""
    job = job_of(tmp_path, f"{GPT2} --merge-file gpt2-merges.txt --vocab-size 32000")
    assert job.model.vocab_sz == 50257
    told = "vocabulary 50257, GPT-2's (gpt2-vocab.json): GPT2BPETokenizer does not read --vocab-size 32000"
    assert told in job.notes
    own = "--vocab-file own.json --merge-file own.txt --vocab-size 32000"
    assert job_of(tmp_path, own).model.vocab_sz == 32000


def test_the_tokenizer_of_llama_3_under_a_forks_flag(tmp_path):
    """arcee-ai/Megatron-LM-Llama-70B, tokenizer.py: --extra-hf-tokens more; a snapshot has the name of the folder above."""
    kind, hub = "--tokenizer-type Llama3Tokenizer --hf-tokenizer-path /data", "llama3_70B_base/snapshots/b4d08b7d"
    assert job_of(tmp_path, f"{kind}/{hub} --extra-hf-tokens 256").model.vocab_sz == 128256 + 256
    assert job_of(tmp_path, f"{kind}/llama31-8b").model.vocab_sz == 128256
    assert job_of(tmp_path, f"{kind}/llama-33b").model.vocab_sz == 32000  # a size of the first Llama


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("HIP_LAUNCH_BLOCKING", "the host synchronizes after every kernel"),
        ("TORCH_COMPILE_DISABLE", "functions that torch.compile fuses run one operation at a time"),
    ],
)
def test_variables_that_slow_a_job_down_are_told(tmp_path, variable, told):
    for value, count in ((1, 1), (0, 0)):
        notes = job_of(tmp_path, GPT2, f"export {variable}={value}\n").notes
        assert sum(note.startswith(f"approximated: {variable} 1: {told}") for note in notes) == count


def test_norms_that_a_forks_flags_take_away(tmp_path):
    """swiss-ai/Megatron-LM megatron/training/arguments.py: norms before attention, MLP and head are on by default."""
    assert "--no-mlp-layernorm true: no norm before the MLP" in problem_of(tmp_path, f"{GPT2} --no-mlp-layernorm")
    dump = {
        "attn_layernorm": "True",
        "final_layernorm": "True",
        "post_layer_norm": "False",
        "input_embeddings_multiplier": "1.0",
    }
    sizes = {
        "num_layers": "4",
        "hidden_size": "256",
        "num_attention_heads": "4",
        "seq_length": "128",
        "micro_batch_size": "1",
    }
    assert not from_arguments(sizes | dump, "log", world_size=8, vocab_size=1000).of("unmodeled")


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--eval-only True", "the job evaluates and does not train"),
        ("--no-train 1", "the job evaluates and does not train"),
        ("--skip-train", "the job evaluates and does not train"),
        ("--bitfit", "only biases are trained"),
    ],
)
def test_a_job_that_trains_nothing_or_only_biases_is_refused(tmp_path, flag, why):
    assert f": {why}; not modeled" in problem_of(tmp_path, f"{GPT2} {flag}")


def test_the_vocabulary_of_mt5(tmp_path):
    """250,100 tokens of the tokenizer, not the 250,112 rows of mT5's own embedding (huggingface/transformers#10528)."""
    job = job_of(tmp_path, "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path google/mt5-base")
    assert job.model.vocab_sz == 250100


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 2", 2),
        ("--recompute-method block --recompute-num-layers 2", None),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", 2),
    ],
)
def test_a_method_of_recomputation_alone(tmp_path, flags, layers):
    """Megatron-LM 2.5 has no granularity; later ones recompute nothing without it (transformer.py, recompute_granularity)."""
    performance = job_of(tmp_path, f"{GPT2} {flags}").performance
    assert (performance.recompute and performance.recompute.n_layers) == layers


def test_simulated_ranks_are_no_training(tmp_path):
    assert "--simulate-global-step true" in problem_of(
        tmp_path, f"{GPT2} --simulate-global-step --simulate-result-dir out"
    )


def test_a_curriculum_is_counted_at_its_full_length(tmp_path):
    job = job_of(tmp_path, f"{GPT2} --data-efficiency-curriculum-learning")
    assert job.data.seqlen == 1024
    assert any("--data-efficiency-curriculum-learning" in note and "given length" in note for note in job.notes)


def test_biases_of_a_part_of_the_layers(tmp_path):
    """Pai-Megatron-Patch's --disable-bias-linear-fc has no effect with --disable-bias-linear."""
    layers = job_of(tmp_path, f"{GPT2} --disable-bias-linear --disable-bias-linear-fc --disable-bias-attn-fc").model
    assert layers.bias is False


def test_deepspeed_without_a_config_has_no_known_stage(tmp_path):
    """deepspeed.initialize() asserts that there is one."""
    said = problem_of(tmp_path, f"{GPT2} --deepspeed")
    assert said.endswith("so the ZeRO stage is unknown; add --set parallelism.zero_level=N")
    assert job_of(tmp_path, f"{GPT2} --deepspeed --zero-stage 1").parallelism.zero_level == 1
