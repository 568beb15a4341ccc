"""LoRA in the files of Megatron's own trainers: ms-swift's megatron sft, NeMo 1 and 2, Megatron-Bridge."""

import pytest
from launch_readings import DATA, HARDWARE, job_of

from steptime import estimate
from steptime.base.config import ConfigError
from steptime.launch.read import read

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SWIFT = (
    "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --train_type {} --lora_rank 64 --target_modules {} "
    "--max_length 4096 --global_batch_size 16 --tensor_model_parallel_size {}\n"
)


def script(tmp_path, *words):
    (tmp_path / "train.sh").write_text(SWIFT.format(*words))
    return tmp_path / "train.sh"


def test_adapters_of_ms_swift(tmp_path):
    """By hand, rank 64 beside every projection of Qwen3-8B: 64 x (4096 + 6144) + 64 x (4096 + 4096) for q, k, v in one and o,
    64 x (4096 + 24576) for gate and up in one, 64 x (12288 + 4096) for down, in 36 layers."""
    found = job_of(script(tmp_path, "lora", "all-linear", 1))
    lora = found.model.lora
    assert (lora.rank, lora.targets, lora.dropout, found.parallelism.dp) == (64, EVERY, 0.05, 8)
    layer = 64 * (4096 + 6144) + 64 * (4096 + 4096) + 64 * (4096 + 24576) + 64 * (12288 + 4096)
    assert estimate(found).trained_params == 36 * layer
    assert job_of(script(tmp_path, "full", "all-linear", 1)).model.lora is None


def test_split_adapters_of_ms_swift(tmp_path):
    """With tp each rank holds one matrix whole and its part of the other: the same trained parameters in all."""
    found = job_of(script(tmp_path, "lora", "all-linear", 2))
    assert (found.parallelism.tp, found.parallelism.dp, found.model.lora.split) == (2, 4, "one")
    layer = 64 * (4096 + 6144) + 64 * (4096 + 4096) + 64 * (4096 + 24576) + 64 * (12288 + 4096)
    assert estimate(found).trained_params == 36 * layer


MINDSPEED = """torchrun --nproc_per_node 8 posttrain_gpt.py --stage sft --use-mcore-models --num-layers 36 --hidden-size 4096 \\
  --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 \\
  --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 32 --padded-vocab-size 151936 --swiglu --bf16 \\
  --position-embedding-type rope --tokenizer-type PretrainedFromHF --tensor-model-parallel-size 2 --disable-bias-linear \\
  --normalization RMSNorm --use-distributed-optimizer --reuse-fp32-param {}
"""


def test_adapters_of_mindspeed(tmp_path):
    """By hand, rank 8 beside q, k, v in one and o: 8 x (4096 + 6144) + 8 x (4096 + 4096) in 36 layers; without targets none."""
    path = tmp_path / "train.sh"
    path.write_text(MINDSPEED.format("--lora-r 8 --lora-fusion --lora-target-modules linear_qkv linear_proj"))
    found = job_of(path)
    assert (found.parallelism.dp, found.model.lora.split, found.model.lora.dropout) == (4, "one", 0.0)
    assert estimate(found).trained_params == 36 * (8 * (4096 + 6144) + 8 * (4096 + 4096))
    path.write_text(MINDSPEED.format("--lora-r 8"))
    assert job_of(path).model.lora is None


def test_masters_that_share_storage_with_the_weights_of_mindspeed(tmp_path):
    """2 bytes less than fp32 masters for each parameter of the shard: a remainder of bf16, as TransformerEngine's."""
    path = tmp_path / "train.sh"
    sizes = []
    for flag in ("--reuse-fp32-param", ""):
        path.write_text(MINDSPEED.replace("--reuse-fp32-param", flag).format(""))
        found = job_of(path)
        sizes.append(estimate(found).memory.stages[0].optimizer_bytes)
        assert found.performance.master_dtype == ("remainder" if flag else None)
    params = estimate(found).trained_params
    assert sizes[1] - sizes[0] == pytest.approx(2 * params / 2 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("longlora", "all-linear", 1), "train_type longlora: adapters over frozen weights (longlora): every weight"),
        (("lora", "linear_qkv,router", 1), "target_modules linear_qkv,router: adapters of router; not modeled"),
    ],
)
def test_what_is_not_modeled_is_told(tmp_path, words, why):
    with pytest.raises(ConfigError) as error:
        job_of(script(tmp_path, *words))
    assert any(why in line for line in error.value.problems), error.value.problems


NEMO_1 = "  peft: {{peft_scheme: {0}, lora_tuning: {{adapter_dim: 16, target_modules: [attention], adapter_dropout: 0.1}}}}\n"
BRIDGE = "peft: {{_target_: megatron.bridge.peft.{0}, dim: 16, target_modules: [linear_proj, linear_fc2], alpha: 32}}\n"
NEMO_2 = "peft: {{_target_: nemo.collections.llm.peft.{0}}}\n"
FILES = {  # a file, how it begins its model, where adapters stand, and what they are
    "nemo/llama3_1_70b.yaml": (NEMO_1, "\nmodel:\n", "lora", 16, EVERY[:4], 0.1),
    "nemo/llama3_70b_container.yaml": (BRIDGE, "\nmodel:\n", "lora.LoRA", 16, ["o_proj", "down_proj"], 0.0),
    "nemo/llama3_70b_recipe.yaml": (NEMO_2, "\nmodel:\n", "lora.LoRA", 32, EVERY, 0.0),
}
OTHERS = dict.fromkeys(FILES, "dora.DoRA") | {"nemo/llama3_1_70b.yaml": "ptuning"}


def with_adapters(tmp_path, name, method, tp):
    text = (DATA / name).read_text(encoding="utf-8").replace("\npeft: null\n", "\n")
    text = text.replace("  fp8: hybrid\n", "").replace("fp8_param_gather: true", "fp8_param_gather: false")
    section, begin, *_ = FILES[name]
    section = section.format(method)
    added = f"{begin}{section}" if section.startswith(" ") else f"\n{section}{begin[1:]}"
    assert begin in text
    text = text.replace("tensor_model_parallel_size: 4", f"tensor_model_parallel_size: {tp}").replace(begin, added, 1)
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "job.yaml"


@pytest.mark.parametrize("name", FILES)
def test_adapters_of_nemo(tmp_path, name):
    """Defaults of LoRA's own: rank 32 beside all four (fused) projections, no dropout (peft/lora.py)."""
    *_, method, rank, targets, dropout = FILES[name]
    sets = HARDWARE | {"parallelism.dp": 8, "data.gbs": 64}
    reading = read("nemo", str(with_adapters(tmp_path, name, method, 1)), sets)
    lora = reading.config["model"]["lora"]
    assert (lora["rank"], lora["targets"], lora["dropout"]) == (rank, targets, dropout)
    split = read("nemo", str(with_adapters(tmp_path, name, method, 4)), sets)
    assert split.config["model"]["lora"] == lora
    assert split.config["parallelism"]["tp"] == 4
    other = read("nemo", str(with_adapters(tmp_path, name, OTHERS[name], 1)), sets)
    assert "lora" not in other.config["model"]
    assert any("adapters over frozen weights" in flag.note for flag in other.of("unmodeled"))


def test_flags_of_training_beside_a_named_model_of_ms_swift(tmp_path):
    """Experts keep at most twice their share, balanced by a loss, and one more depth predicts the token after the next."""
    text = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --train_type full --max_length 4096 "
    text += "--global_batch_size 16 --expert_model_parallel_size 8 "
    (tmp_path / "plain.sh").write_text(text)
    (tmp_path / "more.sh").write_text(
        text + "--mtp_num_layers 1 --moe_expert_capacity_factor 2 --moe_aux_loss_coeff 1e-3"
    )
    plain, more = (job_of(tmp_path / name).model for name in ("plain.sh", "more.sh"))
    assert (plain.mtp, plain.moe.capacity_factor, plain.moe.load_balancing) == (0, None, "none")
    assert (more.mtp, more.moe.capacity_factor, more.moe.load_balancing) == (1, 2.0, "aux_loss")
    assert (
        (more.moe.n_experts, more.moe.expert_inter_sz) == (plain.moe.n_experts, plain.moe.expert_inter_sz) == (128, 768)
    )
