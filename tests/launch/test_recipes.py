"""Recipes in Python of NeMo 2.0 and Megatron-Bridge: read by their syntax, through the modules that lie beside them."""

import pytest
from launch_readings import HARDWARE, status

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

NEMO = """
import nemo_run as run
from pkg.recipes.optim import adam
from pkg.recipes.precision import half as bf16_mixed

def model() -> run.Config[pl.LightningModule]:
    return run.Config(LlamaModel, config=run.Config(Llama3Config8B))

def trainer(tensor_parallelism: int = 1, num_nodes: int = 1, num_gpus_per_node: int = 8, callbacks=None):
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        pipeline_dtype=torch.bfloat16,
        ddp=run.Config(DistributedDataParallelConfig, grad_reduce_in_fp32=True, overlap_grad_reduce=True),
    )
    return run.Config(
        nl.Trainer, devices=num_gpus_per_node, num_nodes=num_nodes, plugins=bf16_mixed(), strategy=strategy,
        callbacks=callbacks,
    )

def pretrain_recipe(dir=None, num_nodes: int = 2, performance_mode: bool = False, fn=pretrain) -> run.Partial:
    recipe = run.Partial(
        fn,
        model=model(),
        trainer=trainer(tensor_parallelism=4, num_nodes=num_nodes, callbacks=[run.Config(TimingCallback)]),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
        optim=adam(max_lr=3e-4),
    )
    if performance_mode:
        for callback in recipe.trainer.callbacks:
            callback.on = True
    return recipe

def finetune_recipe(peft_scheme: str = "LoRA") -> run.Partial:
    recipe = pretrain_recipe()
    if peft_scheme.lower() in ["lora", "dora"]:
        recipe.peft = run.Config(PEFTS[peft_scheme])
        recipe.peft.dim = 8
    return recipe
"""
OPTIM = """
def adam(precision: str = "bf16-mixed", max_lr: float = 1e-4) -> run.Config:
    return run.Config(
        MegatronOptimizerModule,
        config=run.Config(
            OptimizerConfig, optimizer="adam", lr=max_lr, bf16=precision == "bf16-mixed", use_distributed_optimizer=True
        ),
    )
"""
PRECISION = """
def half():
    return run.Config(MegatronMixedPrecision, precision="bf16-mixed", grad_reduce_in_fp32=True)
"""
COMMON = """
from megatron.bridge.training.config import ConfigContainer

def _pretrain_common() -> ConfigContainer:
    optimizer, scheduler = both(lr_warmup_iters=500)
    return ConfigContainer(
        model=None,
        train=TrainingConfig(global_batch_size=32, micro_batch_size=2),
        optimizer=optimizer,
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
        dataset=GPTDatasetConfig(seq_length=4096),
        mixed_precision="bf16_mixed",
    )

def both(lr_warmup_iters):
    return OptimizerConfig(optimizer="adam"), SchedulerConfig(lr_warmup_iters=lr_warmup_iters)

def benchmark(cfg) -> None:
    cfg.train.manual_gc = True
    if hasattr(cfg.model, "moe_grouped_gemm") and cfg.model.moe_grouped_gemm:
        cfg.model.gradient_accumulation_fusion = False
    cfg.model.cross_entropy_loss_fusion = True
"""
OWN = """
from megatron.bridge.training.config import ConfigContainer
from pkg.recipes.common import _pretrain_common, benchmark

HF_ID = "Qwen/Qwen3-8B"

def qwen3_8b_pretrain_16gpu_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained(HF_ID).to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.optimizer.exp_avg_dtype = torch.float32
    benchmark(cfg)
    return cfg
"""
ALIAS = (
    "from pkg.recipes.h100.own import qwen3_8b_pretrain_16gpu_config as qwen3_8b_config  # of megatron.bridge.recipes\n"
)


@pytest.fixture
def repository(tmp_path):
    """A checkout: the modules of its recipes, and two levels of folders."""
    files = {
        "nemo.py": NEMO,
        "optim.py": OPTIM,
        "precision.py": PRECISION,
        "common.py": COMMON,
        "h100/own.py": OWN,
        "alias.py": "from megatron.bridge.recipes import x\n" + ALIAS,
    }
    for name, text in files.items():
        path = tmp_path / "pkg" / "recipes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "pkg" / "recipes"


def read_recipe(path, **sets):
    found = HARDWARE | {key.replace("__", "."): value for key, value in sets.items()}
    reading = read("auto", str(path), found)
    return reading, to_job(reading, found)


def test_a_recipe_of_nemo_is_followed_through_its_functions(repository):
    """16 devices / tp 4 = 4 replicas; the batch and precision are those that the called functions set."""
    _, found = read_recipe(f"{repository / 'nemo.py'}:pretrain_recipe")
    layout, data = found.parallelism, found.data
    assert (found.model.n_layers, found.model.vocab_sz) == (32, 128256)
    assert (layout.tp, layout.pp, layout.dp, layout.zero_level) == (4, 1, 4, 1)
    assert (data.gbs, data.microbatch_sz, data.seqlen, found.performance.precision) == (512, 1, 8192, "bf16")


def test_adapters_of_a_recipe_are_one_line(repository):
    with pytest.raises(ConfigError, match="adapters over frozen weights"):
        read_recipe(f"{repository / 'nemo.py'}:finetune_recipe")


@pytest.mark.parametrize(("word", "rank"), [("lora", 8), ("dora", None)])
def test_adapters_by_the_word_that_the_framework_maps(repository, word, rank):
    """collections/llm/peft/__init__.py: PEFT_STR2CLS has lora and dora in both spellings; the rank is the recipe's own."""
    text = NEMO.replace("PEFTS[peft_scheme]", "PEFT_STR2CLS[peft_scheme.lower()]").replace('= "LoRA"', f'= "{word}"')
    (repository / "nemo.py").write_text("from nemo.collections.llm.peft import PEFT_STR2CLS\n" + text, encoding="utf-8")
    if rank is None:
        with pytest.raises(ConfigError, match=r"frozen weights \(dora\)"):
            read_recipe(f"{repository / 'nemo.py'}:finetune_recipe")
    else:
        assert read_recipe(f"{repository / 'nemo.py'}:finetune_recipe")[1].model.lora.rank == rank


@pytest.mark.parametrize("name", ["h100/own.py:qwen3_8b_pretrain_16gpu_config", "alias.py:qwen3_8b_config"])
def test_a_recipe_of_bridge_is_followed_to_its_base(repository, name):
    """The base's batch and length, the model by its repository, 16 devices by the function's name; an undecided if is told."""
    reading, found = read_recipe(repository / name)
    layout, data = found.parallelism, found.data
    assert (found.model.n_layers, found.model.hidden_sz) == (36, 4096)
    assert (layout.tp, layout.dp, layout.zero_level) == (4, 4, 1)
    assert (data.gbs, data.microbatch_sz, data.seqlen) == (32, 2, 4096)
    assert status(reading, "model.cross_entropy_loss_fusion") == "used"
    fates = [flag.status for flag in reading.flags if flag.name == "model.gradient_accumulation_fusion"]
    assert "approximated" in fates


def test_what_a_base_that_is_not_there_says_is_asked_for(repository):
    (repository / "common.py").unlink()
    with pytest.raises(ConfigError, match=r"sequence length unknown.*--set data.seqlen=N"):
        read_recipe(f"{repository / 'h100/own.py'}:qwen3_8b_pretrain_16gpu_config")


def test_a_module_that_hands_on_itself_ends(repository):
    (repository / "alias.py").write_text(
        "from pkg.recipes.alias import f\n# megatron.bridge ConfigContainer\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="no function 'f'"):
        read("nemo", f"{repository / 'alias.py'}:f", HARDWARE)


def test_nothing_of_a_recipe_runs(repository, tmp_path):
    trap = tmp_path / "ran"
    text = NEMO.replace(
        "    return recipe\n", f"    __import__('pathlib').Path({str(trap)!r}).touch()\n    return recipe\n", 1
    )
    (repository / "nemo.py").write_text(text, encoding="utf-8")
    read_recipe(f"{repository / 'nemo.py'}:pretrain_recipe")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen25Config7B", "qwen2.5-7b"),
        ("Qwen25Config3B", "qwen2.5-3b"),
        ("MixtralConfig8x7B", "mixtral-8x7b"),
        ("MistralSmall3Config24B", "mistral-small-24b"),
        ("MistralNeMoConfig123B", "mistral-large-123b"),
    ],
)
def test_a_class_of_a_model_names_its_preset(repository, name, preset):
    (repository / "nemo.py").write_text(NEMO.replace("Llama3Config8B", name), encoding="utf-8")
    assert read("nemo", f"{repository / 'nemo.py'}:pretrain_recipe", HARDWARE).config["model"] == preset


def test_a_word_of_mixed_precision_given_to_a_function_that_cannot_be_followed(tmp_path):
    """mixed_precision.py, get_mixed_precision_config: a lookup with try and except; "bf16_with_mxfp8_mixed" is MXFP8."""
    (tmp_path / "words.py").write_text(
        "def get_mixed_precision_config(name):\n    try:\n        return WORDS[name]()\n    except KeyError:\n        raise\n"
    )
    (tmp_path / "job.py").write_text(
        "from words import get_mixed_precision_config\n"
        "def pretrain() -> ConfigContainer:\n"
        "    cfg = ConfigContainer(model=AutoBridge.from_hf_pretrained('Qwen/Qwen3-8B').to_megatron_provider())\n"
        "    cfg.model.seq_length = 4096\n    cfg.dataset.seq_length = 4096\n"
        "    cfg.train.global_batch_size = 64\n    cfg.train.micro_batch_size = 1\n"
        "    cfg.mixed_precision = get_mixed_precision_config('bf16_with_mxfp8_mixed')\n"
        "    return cfg\n"
    )
    sets = {"hardware.node_type": "dgx-b200", "parallelism.dp": 8}
    job = to_job(read("nemo", f"{tmp_path / 'job.py'}:pretrain", sets), sets)
    assert job.performance.precision == "mxfp8"


def test_a_function_that_looks_at_the_machine_is_told_and_not_followed(tmp_path):
    """As Megatron-Bridge's apply_flex_dispatcher_backend: what a test decides on the device is not known."""
    text = PROVIDED.replace("PROVIDER", "Qwen2ModelProvider7B").replace(
        "    return ConfigContainer(", "    cfg = ConfigContainer("
    )
    text += "    choose(cfg.model)\n    return cfg\n\ndef choose(model):\n    if torch.cuda.device_count():\n        return\n"
    (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
    job = to_job(
        read("auto", f"{tmp_path / 'recipe.py'}:pretrain_config", HARDWARE | {"devices": 8}), HARDWARE | {"devices": 8}
    )
    assert any("choose(cfg.model)" in note and "what it sets is not read" in note for note in job.notes)


def test_small_qwen_of_nemo_has_a_head_of_its_own(repository):
    """NeMo 2's qwen2.py shares no embeddings below 3 billion parameters, where Hugging Face's models do; Megatron-Bridge does."""
    (repository / "nemo.py").write_text(NEMO.replace("Llama3Config8B", "Qwen2Config1P5B"), encoding="utf-8")
    model = read("nemo", f"{repository / 'nemo.py'}:pretrain_recipe", HARDWARE).config["model"]
    assert (model["hidden_sz"], model["vocab_sz"], model["tie_embeddings"]) == (1536, 151936, False)


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("Qwen2ModelProvider7B", "qwen2.5-7b"),
        ("Qwen25ModelProvider500M", "qwen2.5-0.5b"),
        ("NemotronHModel8BProvider", "nemotron-h-8b"),
        ("DeepSeekV2LiteModelProvider", "deepseek-v2-lite"),
        ("Qwen3MoEModelProvider30B_A3B", "qwen3-30b-a3b"),
    ],
)
def test_a_class_of_a_provider_names_its_preset(tmp_path, provider, model):
    """Megatron-Bridge's classes of models as its recipes called them in 2025, models/*/..._provider.py."""
    (tmp_path / "recipe.py").write_text(PROVIDED.replace("PROVIDER", provider), encoding="utf-8")
    assert read("auto", f"{tmp_path / 'recipe.py'}:pretrain_config", HARDWARE).config["model"] == model


def test_a_class_of_gpt_says_its_sizes_and_no_dropout(tmp_path):
    """models/gpt_provider.py, GPTProvider175B: 96 layers of 12,288, hidden_dropout 0.0; its vocabulary is the tokenizer's."""
    (tmp_path / "recipe.py").write_text(PROVIDED.replace("PROVIDER", "GPTProvider175B"), encoding="utf-8")
    reading = read("auto", f"{tmp_path / 'recipe.py'}:pretrain_config", HARDWARE | {"devices": 64})
    model = to_job(reading, HARDWARE | {"devices": 64}).model
    assert (model.n_layers, model.hidden_sz, model.dropout, model.vocab_sz) == (96, 12288, 0.0, 51200)


PROVIDED = """
from megatron.bridge.training.config import ConfigContainer

def model_config(tensor_parallelism: int = 2):
    return PROVIDER(tensor_model_parallel_size=tensor_parallelism, pipeline_model_parallel_size=1)

def pretrain_config(global_batch_size: int = 64) -> ConfigContainer:
    return ConfigContainer(
        model=model_config(),
        train=TrainingConfig(global_batch_size=global_batch_size, micro_batch_size=1),
        dataset=GPTDatasetConfig(seq_length=2048),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=51200),
        mixed_precision="bf16_mixed",
    )
"""


BASE = """
def model() -> run.Config[pl.LightningModule]:
    return run.Config(LlamaModel, config=run.Config(Llama31Nemotron70BConfig))

def trainer(tp: int = 1, num_nodes: int = 1):
    return run.Config(
        nl.Trainer, devices=8, num_nodes=num_nodes, strategy=run.Config(nl.MegatronStrategy, tensor_model_parallel_size=tp)
    )
"""
OVER = """
import nemo_run as run
from pkg.recipes import base_8b

def model() -> run.Config[pl.LightningModule]:
    config = base_8b.model()
    config.config.seq_length = 16384
    return config

def pretrain_recipe(num_nodes: int = 4) -> run.Partial:
    return run.Partial(
        pretrain, model=model(), trainer=base_8b.trainer(tp=8, num_nodes=num_nodes),
        data=run.Config(MockDataModule, seq_length=16384, global_batch_size=512, micro_batch_size=1),
    )
"""


def test_a_recipe_over_the_functions_of_another_module(repository):
    """Llama 3.1 Nemotron 70B has the sizes of Llama 3.1 70B; 4 nodes of 8 devices over tp 8 are 4 replicas."""
    (repository / "base_8b.py").write_text(BASE)
    (repository / "over.py").write_text(OVER)
    _, found = read_recipe(f"{repository / 'over.py'}:pretrain_recipe")
    assert (found.model.n_layers, found.model.hidden_sz, found.model.vocab_sz) == (80, 8192, 128256)
    assert (found.parallelism.tp, found.parallelism.dp, found.data.seqlen) == (8, 4, 16384)


@pytest.mark.parametrize(
    ("model", "activation"),
    [
        (
            "AutoBridge.from_hf_pretrained('meta-llama/Meta-Llama-3-8B').to_megatron_provider(load_weights=False)",
            "fused",
        ),
        ("AutoBridge.from_hf_pretrained('Qwen/Qwen3-8B').to_megatron_provider(load_weights=False)", "composite"),
        ("Qwen2ModelProvider7B()", "composite"),
    ],
)
def test_fusions_of_a_provider_are_not_those_of_a_bare_config(tmp_path, model, activation):
    """Megatron-Bridge models/gpt_provider.py: gradient_accumulation_fusion where TransformerEngine is installed, and
    cross_entropy_loss_fusion, with Megatron-Core's own implementation; models/llama/llama_bridge.py: bias_activation_fusion.
    """
    text = PROVIDED.replace("model=model_config()", f"model={model}")
    (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
    sets = HARDWARE | {"devices": 8}
    performance = to_job(read("auto", f"{tmp_path / 'recipe.py'}:pretrain_config", sets), sets).performance
    assert performance.grad_accumulation_fusion is True
    assert performance.activation_impl == activation
    assert performance.loss_impl == "native"


def test_a_provider_with_settings_of_its_own_is_no_bare_config(tmp_path):
    """Megatron-Bridge models/gemma/gemma3_provider.py: a gated MLP and RMSNorm, which a bare config of Megatron-Core has not."""
    made = "Gemma3ModelProvider(num_layers=26, hidden_size=1152, num_attention_heads=4, ffn_hidden_size=6912)"
    text = PROVIDED.replace("model=model_config()", f"model={made}")
    (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
    path = f"{tmp_path / 'recipe.py'}:pretrain_config"
    with pytest.raises(
        ConfigError, match="its model is a Gemma3ModelProvider, whose own settings are not known; add --set model=NAME"
    ):
        read("auto", path, HARDWARE | {"devices": 8})
    assert read("auto", path, HARDWARE | {"devices": 8, "model": "llama3-8b"}).config["parallelism"]["dp"] == 8
    text = text.replace("Gemma3ModelProvider", "GPTModelProvider")
    (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
    assert read("auto", path, HARDWARE | {"devices": 8}).config["performance"]["grad_accumulation_fusion"] is True


def test_recipes_of_nemo_2s_first_releases(repository):
    """nemo/collections/llm/utils.py had Config and Partial itself; nodes and devices were arguments without a default."""
    for name in ("nemo.py", "optim.py", "precision.py"):
        text = (
            (repository / name)
            .read_text(encoding="utf-8")
            .replace("run.Config", "Config")
            .replace("run.Partial", "Partial")
        )
        text = text.replace("dir=None, num_nodes: int = 2, ", "num_nodes: int, num_gpus_per_node: int, ")
        text = text.replace(
            "num_nodes=num_nodes, callbacks=[", "num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node, callbacks=["
        )
        text = text.replace("import nemo_run as run", "from nemo.collections.llm.utils import Config, Partial")
        (repository / name).write_text(text, encoding="utf-8")
    path = f"{repository / 'nemo.py'}:pretrain_recipe"
    with pytest.raises(ConfigError, match=r"number of devices unknown; add --set parallelism\.dp=N"):
        to_job(read("auto", path, HARDWARE), HARDWARE)
    job = to_job(read("auto", path, HARDWARE | {"devices": 16}), HARDWARE | {"devices": 16})
    assert (job.parallelism.tp, job.parallelism.dp, job.data.gbs, job.model.n_layers) == (4, 4, 512, 32)
