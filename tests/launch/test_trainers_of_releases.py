"""Configs as public repositories have them: flow mappings, defaults of releases, siblings, and devices that nobody tells."""

import pytest
from launch_readings import DATA, HARDWARE, job

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.model.blocks import n_params

NEOX = """# a setup
{ "pipe-parallel-size": 0, "model_parallel_size": 2,
  "num_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024, "pos_emb": "rotary", %s
  "train_micro_batch_size_per_gpu": 4,  # trained on 32 gpus
}
"""


def problems(tmp_path, name, text, **sets):
    with pytest.raises(ConfigError) as error:
        job(tmp_path, name, text, **sets)
    return [line.rpartition(name + ": ")[2] for line in error.value.problems]


def test_gpt_neox_in_braces_with_comments(tmp_path):
    """32 devices of the comment over tp 2; no pipeline is pp 1; GPT-2's tokenizer unless another is named."""
    found = job(tmp_path, "125M.yml", NEOX % "")
    layout = found.parallelism
    assert (layout.tp, layout.pp, layout.dp, found.data.gbs) == (2, 1, 16, 64)
    assert (
        "number of devices not set, 32 assumed: a comment of the file; else add --set parallelism.dp=N" in found.notes
    )
    assert (found.model.inter_sz, found.model.vocab_sz) == (3072, 50257)


def test_gpt_neox_says_the_width_of_both_halves_of_a_gated_mlp(tmp_path):
    """megatron/model/transformer.py, ParallelMLP: 4 * 768 * 2 / 3 = 2048 for both halves, up to a multiple of 384: 1152."""
    found = job(tmp_path, "llama.yml", NEOX % '"activation": "swiglu", "mlp_multiple_of": 384,')
    assert found.model.inter_sz == 1152


@pytest.mark.parametrize(("word", "layers"), [("one_in_four", 4), ("one_in_two", 8), ("whole_layer", 16)])
def test_olmo_replays_a_share_of_its_layers(tmp_path, word, layers):
    text = (
        "model: {d_model: 512, n_layers: 16, n_heads: 8, mlp_hidden_size: 2048, embedding_size: 1024, max_sequence_length: 512,\n"
        "  activation_type: swiglu}\n"
        f"global_train_batch_size: 64\ndevice_train_microbatch_size: 2\nactivation_checkpointing: {word}\n"
    )
    recompute = job(tmp_path, "olmo.yaml", text, parallelism__dp=8).performance.recompute
    assert (recompute.granularity, recompute.method, recompute.n_layers) == ("full", "block", layers)


def test_a_config_that_olmo_saved_tells_the_devices(tmp_path):
    """scripts/train.py: device_train_batch_size is global_train_batch_size over the world size: 64 / 4 = 16 devices, not 8."""
    text = (
        "model: {d_model: 512, n_layers: 16, n_heads: 8, mlp_hidden_size: 2048, embedding_size: 1024, max_sequence_length: 512,\n"
        "  activation_type: swiglu}\n"
        "global_train_batch_size: 64\ndevice_train_batch_size: 4\ndevice_train_microbatch_size: 2\ndevice_train_grad_accum: 2\n"
    )
    assert job(tmp_path, "olmo.yaml", text).parallelism.dp == 16


OLMO = """model: {{d_model: 4096, n_heads: 32, n_layers: 32, mlp_hidden_size: 22016, embedding_size: 100352, weight_tying: false,
  include_bias: false, activation_type: swiglu, layer_norm_type: rms, attention_layer_norm: true, norm_after: true,
  max_sequence_length: 4096}}
global_train_batch_size: 1024
device_train_microbatch_size: 2
precision: amp_bf16
{}
"""


def test_olmo_2_has_its_norms_after_attention_and_mlp(tmp_path):
    """As many parameters as OLMo 2 7B: norms of q and k over all heads (2 x 4096 a layer), two others a layer and the last."""
    model = job(tmp_path, "olmo.yaml", OLMO.format("fsdp: {wrapping_strategy: by_block, precision: mixed}")).model
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 4 * 4096
    assert n_params(model) == 2 * 100352 * 4096 + 32 * layer + 4096 == 7_298_617_344


@pytest.mark.parametrize(
    ("said", "zero", "unit", "weights"),
    [
        ("fsdp: {wrapping_strategy: by_block, precision: mixed}", 3, "block", "bf16"),
        ("fsdp: {wrapping_strategy: null, precision: mixed}", 3, "model", "bf16"),
        ("distributed_strategy: ddp", 0, None, "fp32"),
    ],
)
def test_olmo_says_how_its_weights_are_shared(tmp_path, said, zero, unit, weights):
    """olmo/config.py: FSDP unless ddp is said, the whole model one unit without a strategy; autocast over fp32 under DDP."""
    found = job(tmp_path, "olmo.yaml", OLMO.format(said))
    fsdp = found.parallelism.fsdp
    assert (found.zero_level, fsdp and fsdp.wrap) == (zero, unit)
    assert (found.performance.param_dtype or "bf16") == weights


@pytest.mark.parametrize(
    ("more", "devices"), [("", 8), ("hardware: gpu_multiprocess\n", None), ("compile_topology: v5p-256\n", None)]
)
def test_maxtext_has_every_device_of_the_host_in_one_process(tmp_path, more, devices):
    text = f"model_name: llama2-7b\nper_device_batch_size: 4\nmax_target_length: 2048\nici_fsdp_parallelism: -1\n{more}"
    if devices is None:
        with pytest.raises(ConfigError, match="number of devices unknown"):
            job(tmp_path, "job.yml", text)
    else:
        assert job(tmp_path, "job.yml", text).parallelism.dp == devices


@pytest.mark.parametrize(("launcher", "devices"), [("", 8), ("srun ", None)])
def test_a_script_of_maxtext_without_a_launcher_starts_one_process(tmp_path, launcher, devices):
    said = "model_name=llama2-7b per_device_batch_size=4 max_target_length=2048 ici_fsdp_parallelism=-1"
    text = f"{launcher}python3 -m MaxText.train base.yml {said}\n"
    (tmp_path / "base.yml").write_text("steps: 10\n")
    if devices is None:
        with pytest.raises(ConfigError, match="number of devices unknown"):
            job(tmp_path, "job.sh", text)
    else:
        assert job(tmp_path, "job.sh", text).parallelism.dp == devices


def test_maxtext_shards_between_nodes_too(tmp_path):
    text = (
        "model_name: llama3.1-8b\nper_device_batch_size: 1\nmax_target_length: 8192\nici_fsdp_parallelism: 8\n"
        "dcn_fsdp_parallelism: 4\nattention: cudnn_flash_te\nscan_layers: true\n"
    )
    assert job(tmp_path, "job.yml", text).parallelism.dp == 32


PRIMUS = """modules:
  pre_trainer:
    model: %s.yaml
    overrides: {micro_batch_size: 1, global_batch_size: 32, seq_length: 4096, expert_model_parallel_size: 8}
"""


def test_primus_trains_in_bf16_and_spreads_the_experts_of_its_model(tmp_path):
    """primus/configs/modules/megatron: bf16 and the distributed optimizer; gpt_oss_20B has 32 experts over 8 ranks."""
    found = job(tmp_path, "oss.yaml", PRIMUS % "gpt_oss_20B")
    assert (str(found.performance.precision), found.parallelism.zero_level, found.parallelism.ep) == ("bf16", 1, 8)


def test_devices_of_a_launcher_that_do_not_hold_the_states_are_asked_for(tmp_path):
    """16 bytes for each of 1e12 parameters of Kimi-K2 are 15 TiB; 8 devices have 640 GB."""
    told = problems(tmp_path, "kimi.yaml", PRIMUS % "kimi_k2")
    assert len(told) == 1
    assert "do not fit on 8 devices, the launcher's default" in told[0]
    assert told[0].endswith("add --set parallelism.dp=N")


def test_devices_of_a_launcher_that_the_layout_does_not_fit_are_asked_for(tmp_path):
    """ep 16 does not divide 8 ranks; what else is wrong is said beside it."""
    text = (PRIMUS % "gpt_oss_20B").replace("size: 8", "size: 16")
    (told,) = problems(tmp_path, "oss.yaml", text)
    assert told.startswith("number of devices unknown (the launcher's default is 8: parallelism.ep")
    told, beside = problems(tmp_path, "oss.yaml", text, **{"performance.precision": "mxfp8"})
    assert told.startswith("number of devices unknown")
    assert beside.startswith("performance.precision: ")


def test_megatron_sft_of_ms_swift_has_defaults_of_its_own(tmp_path):
    """MegatronArguments: bf16, selective recomputation, the distributed optimizer, a batch of 16."""
    text = "NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen2.5-7B --tensor_model_parallel_size 2 --max_length 4096\n"
    found = job(tmp_path, "sft.sh", "#!/bin/bash\n" + text)
    layout, data, performance = found.parallelism, found.data, found.performance
    assert (found.model.name, layout.tp, layout.dp, layout.zero_level) == ("qwen2.5-7b", 2, 2, 1)
    assert (data.gbs, data.microbatch_sz, data.seqlen) == (16, 1, 4096)
    assert (str(performance.precision), performance.recompute.granularity) == ("bf16", "selective")
    assert not any("assumed to have no cost" in note for note in found.notes)  # --model gives the model


def test_version_1_of_llamafactory_has_defaults_of_its_own(tmp_path):
    """src/llamafactory/v1/config/training_args.py: bf16, recomputation, one sequence of 2048 tokens on each device."""
    text = "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ndist_config: {name: fsdp2}\ntrain_dataset: own.yaml\ncutoff_len: 2048\n"
    found = job(tmp_path, "v1.yaml", text.replace("cutoff_len: 2048\n", "") + "finetuning_type: full\n")
    performance = found.performance
    assert (str(performance.precision), performance.activation_checkpointing_type) == ("bf16", "full")
    assert (found.data.microbatch_sz, found.data.seqlen, found.parallelism.dp) == (1, 2048, 8)


def test_a_script_and_the_config_that_it_names_from_the_top_of_its_repository(tmp_path):
    config = "stage: sft\nfinetuning_type: full\nmodel: Qwen/Qwen3-0.6B\nbf16: true\nper_device_train_batch_size: 2\n"
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "job.yaml").write_text(config)
    text = "#!/bin/bash\nFORCE_TORCHRUN=1 llamafactory-cli train examples/job.yaml cutoff_len=1024\n"
    found = job(tmp_path, "scripts/run.sh", text)
    assert (found.model.name, found.data.microbatch_sz, found.data.seqlen) == ("qwen3-0.6b", 2, 1024)
    (tmp_path / "examples" / "job.yaml").unlink()
    missing = "line 2 reads examples/job.yaml, which was not found; put it in the same folder, or add --with FILE"
    assert problems(tmp_path, "scripts/run.sh", text) == [missing]


def test_a_teacher_beside_the_model_is_one_reason(tmp_path):
    text = (
        "#!/bin/bash\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 8 "
        "--micro-batch-size 1 --vocab-size 100 --bf16 --mos --num-layers-teacher 4 --hidden-size-teacher 128\n"
    )
    told = problems(tmp_path, "kd.sh", text)
    assert [line.partition(":")[0] for line in told] == ["--num-layers-teacher 4"]


@pytest.mark.parametrize(
    ("name", "vocabulary"), [("bigcode/starcoder2-tokenizer", 49152), ("mistralai/Mistral-Large-Instruct-2407", 32768)]
)
def test_tokenizers_by_their_repositories(tmp_path, name, vocabulary):
    text = (
        "trainer: {num_nodes: 1, devices: 8, precision: bf16}\nexp_manager: {}\n"
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, encoder_seq_length: 8, micro_batch_size: 1, "
        f"global_batch_size: 8, tokenizer: {{library: huggingface, type: {name}}}, optim: {{name: fused_adam}}}}\n"
    )
    assert job(tmp_path, "job.yaml", text).model.vocab_sz == vocabulary


ACCELERATE = """distributed_type: FSDP
mixed_precision: bf16
num_processes: 16
num_machines: 2
fsdp_config: {fsdp_sharding_strategy: %s, fsdp_version: %s}
model_name_or_path: Qwen/Qwen3-0.6B
per_device_train_batch_size: 1
max_length: 1024
"""


@pytest.mark.parametrize(
    ("strategy", "version", "said"),
    [("FULL_SHARD", "1", (1, True, 1)), ("FULL_SHARD", "2", (2, True, 1)), ("SHARD_GRAD_OP", "null", (1, False, 1)),
     ("HYBRID_SHARD", "1", (1, True, 2)), ("2", "1", (1, False, 1))],
)  # fmt: skip
def test_fsdp_of_accelerate_is_version_1_unless_another_is_said(tmp_path, strategy, version, said):
    """accelerate utils/dataclasses.py: FSDP_VERSION 1, gradients reduced in bf16; a hybrid shards within nodes of 8."""
    layout = job(tmp_path, "fsdp.yaml", ACCELERATE % (strategy, version)).parallelism
    assert (layout.fsdp.version, layout.fsdp.reshard_after_forward, layout.replicas) == said
    assert (layout.fsdp.reduce_dtype, layout.dp) == ("bf16", 16)


@pytest.mark.parametrize(
    ("keys", "said"),
    [("fsdp_backward_prefetch: BACKWARD_POST", (1, "post", True)), ("fsdp_backward_prefetch: NO_PREFETCH", (0, "pre", True)),
     ("fsdp_backward_prefetch: BACKWARD_PRE, fsdp_use_orig_params: false", (1, "pre", False))],
)  # fmt: skip
def test_what_version_1_gathers_when(tmp_path, keys, said):
    fsdp = job(tmp_path, "fsdp.yaml", ACCELERATE % ("FULL_SHARD", f"1, {keys}")).parallelism.fsdp
    assert (fsdp.prefetch, fsdp.backward_prefetch, fsdp.original_params) == said


def test_fsdp_of_training_arguments_and_of_axolotl(tmp_path):
    text = "model_name_or_path: Qwen/Qwen3-0.6B\nper_device_train_batch_size: 1\nmax_length: 512\nbf16: true\n"
    assert job(tmp_path, "args.yaml", text + "fsdp: full_shard auto_wrap\n").parallelism.fsdp.version == 1
    assert (
        job(tmp_path, "args.yaml", text + "fsdp: full_shard\nfsdp_config: {version: 2}\n").parallelism.fsdp.version == 2
    )
    text = "base_model: Qwen/Qwen3-0.6B\nmicro_batch_size: 1\nsequence_len: 512\nbf16: true\nfsdp_version: "
    assert [job(tmp_path, "ax.yaml", f"{text}{n}\n").parallelism.fsdp.version for n in (1, 2)] == [1, 2]


ACCELERATED = """distributed_type: {0}
mixed_precision: bf16
num_processes: 8
{1}"""
SFT = """accelerate launch --config_file job.yaml train.py --model_name_or_path meta-llama/Llama-3.1-8B \\
  --per_device_train_batch_size 2 --max_seq_length 4096
"""
ZERO_3 = "deepspeed_config: {{zero_stage: 3, offload_optimizer_device: {}, offload_param_device: {}}}"


def accelerated(tmp_path, kind, more=""):
    (tmp_path / "job.yaml").write_text(ACCELERATED.format(kind, more))
    return tmp_path, "train.sh", "#!/bin/bash\n" + SFT


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("MULTI_GPU", "", ("accelerate-ddp", None, None, None)),  # DDP: nothing is sharded
        ("DEEPSPEED", "", ("deepspeed", 2, None, None)),  # accelerate's default
        ("DEEPSPEED", "deepspeed_config: {zero_stage: 1}", ("deepspeed", 1, None, None)),
        ("DEEPSPEED", "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}", ("deepspeed", 2, 1.0, False)),
        ("DEEPSPEED", ZERO_3.format("none", "none"), ("deepspeed", 3, None, None)),
        ("DEEPSPEED", ZERO_3.format("cpu", "none"), ("deepspeed", 3, 1.0, False)),
        ("DEEPSPEED", ZERO_3.format("cpu", "cpu"), ("deepspeed", 3, 1.0, True)),
        ("FSDP", "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}", ("accelerate", None, None, None)),
        ("FSDP", "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}", ("accelerate", None, 1.0, True)),
    ],
)
def test_what_accelerate_starts(tmp_path, kind, more, said):
    """commands/config: distributed_type says what runs the steps; the host's memory as its section says."""
    found = job(*accelerated(tmp_path, kind, more))
    away = found.performance.cpu_offload
    host = (away.share, away.params) if away.share else (None, None)
    assert (found.performance.software, found.parallelism.zero_level, *host) == said


def test_states_on_nvme_are_refused(tmp_path):
    told = problems(*accelerated(tmp_path, "DEEPSPEED", ZERO_3.format("nvme", "none")))
    assert told[0].startswith("deepspeed_config.offload_optimizer_device nvme: optimizer states on nvme; not modeled")


def test_what_accelerate_starts_otherwise_is_refused(tmp_path):
    told = problems(*accelerated(tmp_path, "MEGATRON_LM"))
    assert told[0].startswith("distributed_type: expected one of FSDP, DEEPSPEED, MULTI_GPU")
    assert len(told) == 1


def test_axolotl_says_fsdp_by_its_version(tmp_path):
    text = (
        "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 2\nsequence_len: 4096\nbf16: true\nfsdp_version: 2\n"
        "fsdp_config: {offload_params: true, reshard_after_forward: %s}\n"
    )
    kept, freed = (job(tmp_path, "job.yaml", text % word) for word in ("false", "true"))
    assert (kept.parallelism.fsdp.reshard_after_forward, freed.parallelism.fsdp.reshard_after_forward) == (False, True)
    assert freed.performance.cpu_offload.params
    assert freed.parallelism.fsdp.version == 2


def test_llamafactory_1_reduces_in_fp32(tmp_path):
    """fsdp2.py, get_mp_policy: parameters in bf16, reductions in fp32."""
    text = (
        "model: Qwen/Qwen3-4B\ntrain_dataset: x\ncutoff_len: 2048\n"
        "dist_config: {name: fsdp2, offload_params: true, reshard_after_forward: true}\nllamafactory-cli: v1\n"
    )
    found = to_job(read("llamafactory", write(tmp_path, text), HARDWARE), HARDWARE)
    assert (found.parallelism.fsdp.version, found.parallelism.fsdp.reduce_dtype) == (2, "fp32")
    assert found.performance.cpu_offload.params


def write(folder, text):
    (folder / "v1.yaml").write_text(text)
    return str(folder / "v1.yaml")


@pytest.mark.parametrize(("tied", "norms"), [("true", 1), ("false", 2)])
def test_gpt_neox_has_attention_and_mlp_beside_each_other(tmp_path, tied, norms):
    """megatron/model/transformer.py, gpt_j_residual; with tp its sum is exchanged once, which is not modeled."""
    more = f'"gpt_j_residual": true, "gpt_j_tied": {tied},'
    found = job(tmp_path, "job.yml", NEOX.replace('"model_parallel_size": 2', '"model_parallel_size": 1') % more)
    assert (found.model.parallel_residual, found.model.shared_norm) == (True, norms == 1)
    by_two = job(tmp_path, "tp.yml", NEOX % more)
    assert not by_two.model.parallel_residual
    assert any("attention parallel to the MLP with tp" in note for note in by_two.notes)


def test_axolotl_replicates_shards_and_offloads_what_it_recomputes(tmp_path):
    """utils/schemas/validation.py: gradient_checkpointing offload is activation_offloading; 8 shards in each of 2 replicas."""
    text = (
        "base_model: axolotl-ai-co/gpt-oss-120b-dequantized\nmicro_batch_size: 1\nsequence_len: 4096\nbf16: true\n"
        "dp_shard_size: 8\ndp_replicate_size: 2\ngradient_checkpointing: offload\nfsdp_version: 2\n"
        "fsdp_config: {reshard_after_forward: %s}\n"
    )
    found = job(tmp_path, "job.yaml", text % 8)
    layout = found.parallelism
    assert (layout.dp, layout.replicas, layout.fsdp.reshard_after_forward, found.data.gbs) == (16, 2, True, 16)
    assert (found.performance.activation_checkpointing_type, found.performance.activation_offload) == ("full", True)
    told = problems(tmp_path, "job.yaml", text % 4)
    assert told[0].startswith("fsdp_config.reshard_after_forward 4: parameters that stay gathered on some ranks")


@pytest.mark.parametrize(
    ("flags", "precision"),
    [("", "bf16"), ("--dtype AUTO", "bf16"), ("--torch_dtype float16", "fp16"), ("--fp16 true", "fp16")],
)
def test_ms_swift_takes_the_dtype_of_the_model(tmp_path, flags, precision):
    """base_args/model_args.py, _init_mixed_precision; a path as ModelScope's cache spells it, flags of release 2."""
    text = f"NPROC_PER_NODE=3 swift sft --model_type qwen2-1_5b-instruct --batch_size 4 --sft_type full {flags} "
    text += "--max_length 2048 --model_id_or_path /models/Qwen2-1___5B-Instruct "
    text += "--gradient_accumulation_steps 8 --deepspeed default-zero3\n"
    found = job(tmp_path, "train.sh", text)
    assert (found.performance.precision, found.parallelism.dp, found.data.gbs) == (precision, 3, 96)
    assert found.model.n_layers == 28


def test_megatron_sft_of_ms_swift_is_a_job_of_megatron(tmp_path):
    """Whatever else of ms-swift its flags are; the model is that of the checkpoint's folder."""
    text = (
        "NPROC_PER_NODE=8 megatron sft --load ./converted/Qwen3-30B-A3B-mcore --train_type full --max_length 8192 \\\n"
        " --tensor_model_parallel_size 2 --expert_model_parallel_size 4 --sequence_parallel true --global_batch_size 16\n"
    )
    found = job(tmp_path, "train.sh", text)
    assert (found.model.n_layers, found.parallelism.tp, found.parallelism.ep, found.parallelism.dp) == (48, 2, 4, 4)
    told = problems(
        tmp_path, "train.sh", text.replace("--load ./converted/Qwen3-30B-A3B-mcore", "--model zai-org/GLM-4.6")
    )
    assert told == ["model 'zai-org/GLM-4.6' is not among the presets; add --set model=NAME"]


def test_liger_fuses_what_hugging_face_writes_op_by_op(tmp_path):
    """Norms, rotary embedding and activation are kernels of Liger; its loss takes parts of the tokens, one after the other.

    Qwen3 4B has 151,936 words of 2,560: 59.4: 60 parts, of a power of two of tokens only 32
    (fused_linear_cross_entropy.py).
    """
    text = (DATA / "trainers" / "llamafactory.yaml").read_text(encoding="utf-8")
    (tmp_path / "plan.yaml").write_text(f"{text}\nenable_liger_kernel: true\n", encoding="utf-8")
    sets = HARDWARE | {"parallelism.dp": 8}
    reading = read("llamafactory", str(tmp_path / "plan.yaml"), sets)
    found = to_job(reading, sets, allow_unmodeled=True).performance
    assert (found.norm_impl, found.rope_impl, found.activation_impl) == ("fused", "fused", "fused")
    assert (found.loss_impl, found.loss_chunks) == ("fused", 32)
    other = read("llamafactory", str(tmp_path / "plan.yaml"), HARDWARE | {"parallelism.dp": 8, "model": "llama2-7b"})
    assert other.config["performance"]["loss_chunks"] == 8  # 32,000 words of 4,096
