"""Settings that a trainer's config leaves to the defaults of its framework, and of the release in its checkout."""

import pytest
from launch_readings import HARDWARE, job

from steptime.launch.read import read

LLAMA = "meta-llama/Llama-3.1-8B"
AXOLOTL = f"base_model: {LLAMA}\ndatasets:\n  - path: data\n    type: alpaca\n"
FACTORY = (
    f"model_name_or_path: {LLAMA}\nstage: sft\nfinetuning_type: full\ndataset: data\nper_device_train_batch_size: 1\n"
)


def test_axolotl_takes_one_sequence_of_512_in_bf16(tmp_path):
    """utils/schemas/training.py, micro_batch_size 1; config.py, sequence_len 512 and bf16 auto. 8 devices: a batch of 8."""
    found = job(tmp_path, "a.yml", AXOLOTL)
    assert (found.data.gbs, found.data.seqlen, found.data.microbatch_sz) == (8, 512, 1)
    assert found.performance.precision == "bf16"


@pytest.mark.parametrize(
    ("line", "precision"), [("bf16: auto", "bf16"), ("fp16: true", "fp16"), ("bf16: false", "fp32")]
)
def test_axolotls_auto_gives_way_to_fp16(tmp_path, line, precision):
    """utils/config/__init__.py, normalize_config: fp16 with bf16 auto switches bf16 off."""
    assert job(tmp_path, "a.yml", f"{AXOLOTL}{line}\n").performance.precision == precision


@pytest.mark.parametrize(
    ("line", "kernel"),
    [
        ("", "fused"),
        ("optimizer: adamw_torch", None),
        ("optimizer: adamw_torch_fused", "fused"),
        ("optimizer: adamw_8bit", None),
    ],
)
def test_the_kernel_of_the_optimizer_by_its_name(tmp_path, line, kernel):
    """training_args.py, OptimizerNames: torch's AdamW, foreach as the profile, or fused; Axolotl's default is fused since 0.8."""
    assert job(tmp_path, "a.yml", f"{AXOLOTL}{line}\n").performance.optimizer_impl == kernel
    script = f"torchrun --nproc_per_node 8 train.py --model_name_or_path {LLAMA} --per_device_train_batch_size 1 --bf16"
    optim = "--block_size 2048 " + line.replace("optimizer: ", "--optim ")
    found = job(tmp_path, "a.sh", f"{script} {optim} --optim_args x --train_sampling_strategy random\n")
    assert found.performance.optimizer_impl == (kernel if line else None)


@pytest.mark.parametrize(("method", "precision"), [("full", "fp32"), ("lora", "bf16")])
def test_llama_factory_without_bf16_loads_the_models_own_dtype(tmp_path, method, precision):
    """model/patcher.py, infer_optim_dtype: bf16; model/adapter.py then casts what is trained to fp32: all, or the adapters."""
    text = FACTORY.replace("full", method)
    assert job(tmp_path, "a.yaml", text).performance.precision == precision


def test_llama_factorys_length_is_that_of_its_checkout(tmp_path):
    """hparams/data_args.py, cutoff_len: 2,048 tokens; 1,024 in releases up to 0.9.0."""
    config = tmp_path / "examples" / "train_full"
    config.mkdir(parents=True)
    assert job(config, "a.yaml", FACTORY).data.seqlen == 2048
    arguments = tmp_path / "src" / "llamafactory" / "hparams" / "data_args.py"
    arguments.parent.mkdir(parents=True)
    arguments.write_text(
        "@dataclass\nclass DataArguments:\n    cutoff_len: int = field(\n        default=1024,\n    )\n"
    )
    assert job(config, "a.yaml", FACTORY).data.seqlen == 1024
    assert job(config, "a.yaml", f"{FACTORY}cutoff_len: 512\n").data.seqlen == 512


PROGRAM = "arguments = SFTConfig(max_length=1024, per_device_train_batch_size=2)\nSFTTrainer(model, args=arguments)\n"
PRECISION = "performance.precision"
RECOMPUTE = "performance.activation_checkpointing_type"


@pytest.mark.parametrize(
    ("pin", "changed", "asked", "settings"),
    [
        ("transformers", ("", ""), {PRECISION, RECOMPUTE}, (None, None)),
        ("trl>=0.9", ("", ""), {PRECISION, RECOMPUTE}, (None, None)),
        ("trl==0.21.0", ("", ""), set(), ("bf16", "full")),
        ("trl==0.19.1", ("", ""), set(), ("fp32", None)),
        ("trl<0.20", ("", ""), set(), ("fp32", None)),
        ("trl~=0.12", ("", ""), {PRECISION, RECOMPUTE}, (None, None)),
        ("trl~=0.12.1", ("", ""), set(), ("fp32", None)),
        ("# trl==0.9\ntrl", ("", ""), {PRECISION, RECOMPUTE}, (None, None)),
        ("trl==0.21.0", ("SFTConfig(", "trl.SFTConfig("), set(), ("bf16", "full")),
        ("trl==0.21.0", ("max_length", "fp16=True, max_length"), set(), ("fp16", "full")),
        ("trl==0.21.0", ("max_length", "gradient_checkpointing=False, max_length"), set(), ("bf16", None)),
        ("trl", ("args=", "tokenizer=t, args="), set(), ("fp32", None)),
        ("trl", ("max_length", "max_seq_length"), set(), ("fp32", None)),
        ("trl", ("max_length", "fp16=True, max_length"), {RECOMPUTE}, ("fp16", None)),
        ("trl", ("max_length", "bf16=True, gradient_checkpointing=True, max_length"), set(), ("bf16", "full")),
    ],
)
def test_what_a_program_leaves_to_sftconfig(tmp_path, pin, changed, asked, settings):
    """huggingface/trl 3510 and 3629: bf16 and gradient checkpointing on since 0.20, where neither is said; 0.16 took SFTTrainer's
    tokenizer away, 0.20 SFTConfig's max_seq_length. `~=0.12` allows every 0 from 0.12 on (PEP 440); with fp16 bf16 stays off.
    """
    files = {"run.sh": f"torchrun --nproc_per_node 8 sft.py --model_name_or_path {LLAMA}\n", "requirements.txt": pin}
    for name, text in (files | {"sft.py": PROGRAM.replace(*changed)}).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = read("auto", str(tmp_path / "run.sh"), HARDWARE)
    assert set(found.left_open) == asked
    performance = found.config["performance"]
    assert (performance.get("precision"), performance.get("activation_checkpointing_type")) == settings


@pytest.mark.parametrize(
    ("words", "unit", "ahead"),
    [
        ("full_shard", "model", 0),
        ("full_shard auto_wrap", "block", 0),
        ("full_shard auto_wrap --fsdp_min_num_params 2000", "block", 0),
        ("full_shard auto_wrap --fsdp_backward_prefetch backward_pre", "block", 1),
        ("full_shard --fsdp_backward_prefetch backward_post", "model", 1),
    ],
)
def test_fsdp_of_the_trainer_wraps_and_gathers_ahead_only_where_it_is_said(tmp_path, words, unit, ahead):
    """transformers training_args.py: no AUTO_WRAP_POLICY without auto_wrap, and backward_prefetch NO_PREFETCH; accelerate
    utils/dataclasses.py: NO_WRAP, the whole model as one unit, for the first of them.
    """
    first, _, rest = words.partition(" --")
    script = f"torchrun --nproc_per_node 8 train.py --model_name_or_path {LLAMA} --bf16 True --model_max_length 2048"
    found = job(tmp_path, "run.sh", f'{script} --fsdp "{first}"{" --" if rest else ""}{rest}\n').parallelism.fsdp
    assert (found.wrap, found.prefetch) == (unit, ahead)


@pytest.mark.parametrize(
    ("policy", "unit"),
    [("", "model"), ("NO_WRAP", "model"), ("TRANSFORMER_BASED_WRAP", "block"), ("SIZE_BASED_WRAP", "block")],
)
def test_a_config_of_accelerate_without_a_policy_wraps_the_whole_model(tmp_path, policy, unit):
    """accelerate utils/dataclasses.py, FullyShardedDataParallelPlugin: FSDP_AUTO_WRAP_POLICY is NO_WRAP where nothing is said."""
    said = f"  fsdp_auto_wrap_policy: {policy}\n" if policy else ""
    text = f"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n{said}"
    found = job(tmp_path, "acc.yaml", text, model="llama3-8b", data__seqlen=2048)
    assert found.parallelism.fsdp.wrap == unit


SIZES = "  d_model: 512\n  n_heads: 8\n  n_layers: 6\n  vocab_size: 1024\n"
LOSSES = [
    (f"name: mpt_causal_lm\n{SIZES}", "fused"),
    (f"name: mpt_causal_lm\n  loss_fn: torch_crossentropy\n{SIZES}", "composite"),
    ("name: hf_causal_lm\n  pretrained_model_name_or_path: gpt2\n", "composite"),
]


@pytest.mark.parametrize(("model", "loss"), LOSSES)
def test_the_loss_of_llm_foundry(tmp_path, model, loss):
    """modeling_mpt.py: flash-attn's kernel by default; hf_base.py: the loss of the Hugging Face model's own forward."""
    text = f"max_seq_len: 1024\nmodel:\n  {model}train_loader: {{name: text}}\nglobal_train_batch_size: 16\n"
    more = "device_train_microbatch_size: 2\nfsdp_config: {}\n"
    found = job(tmp_path, "job.yaml", text + more, parallelism__dp=8)
    assert found.software.kernels.loss_impl == loss
