"""Flavors in the registry of a fork of torchtitan: nested configs, functions, widths, vocabularies."""

from pathlib import Path

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.launch.torchtitan.own_flavors import nested_sizes, registered

REGISTRY = """
llama3_configs = {{
    "{name}": Llama3Model.Config(
        dim={dim},
        n_layers=34,
        layer=Llama3TransformerBlock.Config(
            feed_forward=FeedForward.Config(
                hidden_dim=compute_ffn_hidden_dim({dim}, multiple_of=1024, ffn_dim_multiplier=1.3)
            ),
            attention=GQAttention.Config(n_heads=32, n_kv_heads=8, attn_backend="sdpa"),
        ),
        rope=RoPE.Config(dim={dim} // 32, max_seq_len=131072),
    ),
}}
"""
FUNCTION = """
def _9b(attn_backend="sdpa"):
    dim = 4096
    n_heads = 32
    return Llama3Model.Config(
        dim=dim, vocab_size=50 * 1000, norm=RMSNorm.Config(normalized_shape=dim),
        layers=_build_layers(n_layers=34, dim=dim, n_heads=n_heads, n_kv_heads=8, hidden_dim=3 * dim),
    )
llama3_configs = {"9B": _9b}
"""
JOB = """
[model]
name = "llama3"
flavor = "{flavor}"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
"""


def model_of(folder, registry, flavor):
    files = {"__init__.py": registry, "model.py": "class Config:\n    vocab_size: int = 64000\n"}
    at = folder / "torchtitan" / "models" / "llama3"
    (at / "train_configs").mkdir(parents=True)
    for name, text in files.items():
        (at / name).write_text(text)
    path = at / "train_configs" / "job.toml"
    path.write_text(JOB.format(flavor=flavor))
    return to_job(read("torchtitan", str(path), HARDWARE), HARDWARE).model


def test_a_flavor_of_nested_configs(tmp_path):
    """2 x 4 x 4096 / 3 = 10,922, x 1.3 = 14,198, up to a multiple of 1,024: 14,336; the vocabulary is the model's default."""
    model = model_of(tmp_path, REGISTRY.format(name="9B", dim=4096), "9B")
    sizes = (model.n_layers, model.hidden_sz, model.inter_sz, model.n_q_heads, model.n_kv_heads, model.vocab_sz)
    assert sizes == (34, 4096, 14336, 32, 8, 64000)


def test_a_flavor_that_a_function_returns(tmp_path):
    model = model_of(tmp_path, FUNCTION, "9B")
    assert (model.n_layers, model.hidden_sz, model.inter_sz, model.vocab_sz) == (34, 4096, 12288, 50000)


@pytest.mark.parametrize("ties", [True, False])
def test_the_embedding_of_a_flavor_is_tied_as_its_function_says(tmp_path, ties):
    """torchtitan/models/llama3/model.py: enable_weight_tying, false unless it is set."""
    registry = FUNCTION.replace("dim=dim, vocab", f"dim=dim, enable_weight_tying={ties}, vocab")
    assert model_of(tmp_path, registry, "9B").tie_embeddings is ties


def test_a_known_flavor_that_a_fork_has_changed_is_the_forks(tmp_path):
    assert model_of(tmp_path, REGISTRY.format(name="8B", dim=4096), "8B").n_layers == 34


@pytest.mark.parametrize("more", ["qk_norm=True, ", "n_heads=other(), "])
def test_an_unknown_argument_leaves_the_flavor_unknown(tmp_path, more):
    changed = REGISTRY.replace("GQAttention.Config(n_heads=32, ", f"GQAttention.Config({more}")
    assert nested_sizes(registered(changed.format(name="9B", dim=4096), "9B")) is None
    with pytest.raises(ConfigError, match=r"unknown flavor of llama3 \(got '9B'\)"):
        model_of(tmp_path, changed.format(name="9B", dim=4096), "9B")


OF_FAMILY = '[model]\nname = "{}"\nflavor = "{}"\n[training]\n{}\nseq_len = 128\n'


def test_a_flavor_of_experts_in_the_forks_own_registry(tmp_path: Path) -> None:
    """Releases had 2,000 entries where today's debugmodel has 2,048; nested arguments are not those of the flavor."""
    registry = tmp_path / "torchtitan" / "models" / "deepseek_v3" / "__init__.py"
    registry.parent.mkdir(parents=True)
    sizes = "        vocab_size=2000,\n        dim=256,\n        moe_args=MoEArgs(\n            n_layers=9,\n        ),"
    registry.write_text(
        f'configs = {{\n    "debugmodel": DeepSeekV3ModelArgs(\n{sizes}\n        n_layers=5,\n    ),\n}}\n'
    )
    config = registry.parent / "train_configs" / "debug.toml"
    config.parent.mkdir()
    config.write_text(OF_FAMILY.format("deepseek_v3", "debugmodel", "local_batch_size = 2"))
    found = to_job(read("auto", str(config), HARDWARE), HARDWARE)
    assert (found.model.vocab_sz, found.model.n_layers, found.model.hidden_sz) == (2000, 5, 256)
    assert any(
        note.startswith("model debugmodel, from torchtitan/models/deepseek_v3/__init__.py") for note in found.notes
    )


def test_a_debugmodel_of_before_02_is_asked_for(tmp_path: Path) -> None:
    """8 layers in November 2024, 6 in May 2025, and the vocabulary of the test's tokenizer."""
    config = tmp_path / "debug.toml"
    config.write_text(OF_FAMILY.format("llama3", "debugmodel", "batch_size = 8"))
    with pytest.raises(ConfigError, match=r"debugmodel: releases before .* differ in its layers"):
        read("auto", str(config), HARDWARE)


def test_a_debugmodel_of_02_with_names_that_were_renamed_later(tmp_path: Path) -> None:
    """v0.2.0 has training.seed and training.deterministic, and a debugmodel of 6 layers and 2,048 entries."""
    config = tmp_path / "debug.toml"
    config.write_text(
        OF_FAMILY.format("llama3", "debugmodel", "seed = 42\ndeterministic = false\nlocal_batch_size = 8")
    )
    model = to_job(read("auto", str(config), HARDWARE), HARDWARE).model
    assert (model.n_layers, model.vocab_sz) == (6, 2048)


def test_a_debugmodel_of_before_02_takes_its_vocabulary_from_the_tests_tokenizer(tmp_path: Path) -> None:
    """300 tokens in the file and 256 reserved ones are 556; without the file the model is asked for."""
    at = tmp_path / "torchtitan" / "models" / "llama"
    at.mkdir(parents=True)
    (at / "__init__.py").write_text(
        'llama3_configs = {\n    "debugmodel": ModelArgs(dim=256, n_layers=8, n_heads=16),\n}\n'
    )
    (at / "model.py").write_text("class ModelArgs:\n    vocab_size: int = -1  # defined later by tokenizer\n")
    config = tmp_path / "train_configs" / "debug.toml"
    config.parent.mkdir()
    named = 'flavor = "debugmodel"\ntokenizer_path = "./test/assets/test.model"'
    text = OF_FAMILY.format("llama3", "debugmodel", "batch_size = 8")
    config.write_text(text.replace('flavor = "debugmodel"', named))
    with pytest.raises(ConfigError, match=r"debugmodel: releases before .* differ in its layers"):
        read("auto", str(config), HARDWARE)
    tokens = tmp_path / "test" / "assets" / "test.model"
    tokens.parent.mkdir(parents=True)
    tokens.write_text("".join(f"IQ== {rank}\n" for rank in range(300)))
    model = to_job(read("auto", str(config), HARDWARE), HARDWARE).model
    assert (model.n_layers, model.hidden_sz, model.vocab_sz) == (8, 256, 556)


def test_emulated_float8_is_not_counted_as_fast(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    text = OF_FAMILY.format("llama3", "8B", "local_batch_size = 1").replace(
        "[training]", 'converters = ["quantize.linear.float8"]\n[training]'
    )
    config.write_text(f"{text}[quantize.linear.float8]\nemulate = true\n")
    refused = read("auto", str(config), HARDWARE).of("unmodeled")
    assert [flag.name for flag in refused] == ["quantize.linear.float8.emulate"]
    config.write_text(config.read_text().replace("converters", "# converters"))
    assert read("auto", str(config), HARDWARE).of("unmodeled") == []


OWN_WIDTH = """
class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        {change}
        self.w1 = nn.Linear(dim, {wide}, bias=False)
class TransformerBlock(nn.Module):
    def __init__(self, layer_id: int, model_args: TransformerModelArgs):
        self.feed_forward = FeedForward(dim=model_args.dim, hidden_dim={given})
"""


def of_own_width(
    folder: Path, flavor: str, change: str = "", wide: str = "hidden_dim", given: str = "model_args.ffn_dim"
) -> Path:
    at = folder / "torchtitan" / "models" / "llama3"
    (at / "model").mkdir(parents=True)
    (at / "__init__.py").write_text(
        "llama3_configs = {\n"
        '    "1B": TransformerModelArgs(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8),\n'
        '    "8B": TransformerModelArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=9216),\n}\n'
    )
    (at / "model" / "args.py").write_text("class Args:\n    vocab_size: int = 128256\n    ffn_dim: int = 8192\n")
    (at / "model" / "model.py").write_text(OWN_WIDTH.format(change=change, wide=wide, given=given))
    config = at / "train_configs" / "job.toml"
    config.parent.mkdir()
    config.write_text(JOB.format(flavor=flavor))
    return config


@pytest.mark.parametrize(("flavor", "width"), [("1B", 8192), ("8B", 9216)])
def test_a_fork_whose_arguments_give_the_feed_forward_width(tmp_path: Path, flavor: str, width: int) -> None:
    """The default of the arguments, or the flavor's own; torchtitan's rule gives 5,632 and 14,336."""
    path = of_own_width(tmp_path, flavor)
    assert to_job(read("torchtitan", str(path), HARDWARE), HARDWARE).model.inter_sz == width


@pytest.mark.parametrize(
    "computed",
    [
        {"change": "hidden_dim = int(2 * hidden_dim / 3)"},
        {"wide": "int(2 * hidden_dim / 3)"},
        {"given": "4 * model_args.dim"},
    ],
)
def test_a_fork_that_computes_from_its_own_width_is_asked_for(tmp_path: Path, computed: dict[str, str]) -> None:
    path = of_own_width(tmp_path, "1B", **computed)
    with pytest.raises(ConfigError, match=r"have ffn_dim, whose use is not read; add --set model=NAME"):
        read("torchtitan", str(path), HARDWARE)


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary"),
    [
        ("torchtitan/datasets/tokenizer/original/tokenizer.model", 128256),
        ("./assets/tokenizer/Llama-3.2-1B", 128256),
        ("models/Llama3.2-3B-Instruct/tokenizer.model", 128256),
        ("own/tokenizer.model", None),
        ("torchtitan/tokenizers/Llama-chem-1B", None),
        ("assets/Llama-3-german/tokenizer.json", None),
    ],
)
def test_the_vocabulary_of_llama_3_by_its_tokenizer(tmp_path: Path, tokenizer: str, vocabulary: int | None) -> None:
    at = tmp_path / "torchtitan" / "models" / "llama"
    at.mkdir(parents=True)
    (at / "__init__.py").write_text('llama3_configs = {"1B": ModelArgs(dim=2048, n_layers=16, n_heads=32)}\n')
    config = tmp_path / "train_configs" / "job.toml"
    config.parent.mkdir()
    named = f'flavor = "1B"\ntokenizer_path = "{tokenizer}"'
    config.write_text(OF_FAMILY.format("llama3", "1B", "batch_size = 1").replace('flavor = "1B"', named))
    sets = {**HARDWARE, "parallelism.dp": 8}
    if vocabulary is None:
        with pytest.raises(ConfigError, match=r"unknown flavor of llama3 \(got '1B'\)"):
            read("torchtitan", str(config), sets)
    else:
        assert to_job(read("torchtitan", str(config), sets), sets).model.vocab_sz == vocabulary


QWEN3 = """
def _small(*, attn_backend, vocab_size):
    dim = 256
    return Qwen3Model.Config(
        vocab_size=vocab_size, dim=dim, norm=_norm(dim), enable_weight_tying=True, lm_head=Linear.Config(in_features=dim),
        layers=_build_layers(n_layers=8, dim=dim, n_heads=4, n_kv_heads=2, head_dim=128, hidden_dim={width}),
    )
def _own(attn_backend):
    return _small(attn_backend=attn_backend, vocab_size=50257)
qwen3_configs = {{"{name}": _own}}
"""
OF_QWEN3 = """
def job() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("{name}"), training=TrainingConfig(local_batch_size=1, seq_len=1024))
"""


@pytest.mark.parametrize(("name", "width"), [("10M", 1024), ("debugmodel", 2048)])
def test_a_flavor_of_qwen3_that_a_fork_has(tmp_path: Path, name: str, width: int) -> None:
    """A flavor of its own, and one whose sizes are not torchtitan's; a function returns another's config with a vocabulary."""
    at = tmp_path / "torchtitan" / "models" / "qwen3"
    at.mkdir(parents=True)
    (at / "__init__.py").write_text(QWEN3.format(name=name, width=width))
    (at / "config_registry.py").write_text(OF_QWEN3.format(name=name))
    found = to_job(read("auto", f"{at / 'config_registry.py'}:job", HARDWARE), HARDWARE)
    model = found.model
    assert (model.n_layers, model.hidden_sz, model.inter_sz, model.vocab_sz) == (8, 256, width, 50257)
    assert (model.n_q_heads, model.n_kv_heads, model.head_dim) == (4, 2, 128)
    assert model.tie_embeddings
    assert model.qk_norm
    assert any(note.startswith(f"model {name}, from torchtitan/models/qwen3") for note in found.notes)


def test_a_flavor_in_a_comment_is_not_the_forks(tmp_path: Path) -> None:
    """2 x 4 x 2048 / 3 = 5,461, x 1.5 = 8,191, up to a multiple of 256: 8,192; with the 1.3 and 1,024 of the comment 7,168."""
    at = tmp_path / "torchtitan" / "models" / "llama3"
    (at / "train_configs").mkdir(parents=True)
    sizes = "dim=2048, n_layers=16, n_heads=32, vocab_size=128256"
    (at / "__init__.py").write_text(
        f'llama3_configs = {{\n    # "1B": TransformerModelArgs({sizes}, ffn_dim_multiplier=1.3, multiple_of=1024),\n'
        f'    "1B": TransformerModelArgs({sizes}, ffn_dim_multiplier=1.5,  # (was 1.3)\n        multiple_of=256),\n}}\n'
    )
    config = at / "train_configs" / "job.toml"
    config.write_text(JOB.format(flavor="1B"))
    assert to_job(read("torchtitan", str(config), HARDWARE), HARDWARE).model.inter_sz == 8192
