"""Settings that a trainer's config leaves to the defaults of its framework, and of the release in its checkout."""

import pytest
from launch_readings import job

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
