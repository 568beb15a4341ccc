"""Presets: names, sources, and parameter counts against two independent counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_expert_presets
import yaml

from steptime.model import presets
from steptime.model.blocks import n_params
from steptime.model.model import Model
from steptime.model.presets import FOLDER, load_model, model_names

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- presets -->\n", "<!-- end of presets -->\n"

# Parameters of the Hugging Face class of each model (Llama, GPT2, Mistral, Nemotron, Phi3, Gemma, StableLm, Qwen2, Qwen3
# ...ForCausalLM of transformers 4.57.1) built on torch's meta device with these sizes, a tied head counted once. Where a hub
# page prints an exact total it is this one: 124,439,808 for gpt2, 7,241,732,096 for Mistral-7B-v0.1, 7,615,616,512 for
# Qwen2.5-7B, 8,030,261,248 for Meta-Llama-3-8B. Narayanan et al. 2021, Table 1, prints 1.7, 3.6, 7.5, 18.4, 39.1, 76.1,
# 145.6, 310.1, 529.6 and 1008.0 billion for the Megatron models. EleutherAI/pythia's README prints the eight of Pythia.
# Their hub pages print 2,779,683,840 for phi-2 and 1,418,270,720 for phi-1_5, with the 51,200 biases of a head that a preset does
# not have, and 6,888,095,744 for OLMo-7B-hf, whose 65 norms have no weights (65 x 4,096 fewer).
# Ministral 8B's card prints 8,019,808,256, Cerebras-GPT's 111 M, 256 M, 590 M, 1.3 B ... as GPT2LMHeadModel has them.
COUNTED = {
    "cerebras-gpt-111m": 111_050_496,
    "cerebras-gpt-256m": 255_977_024,
    "cerebras-gpt-590m": 590_310_912,
    "cerebras-gpt-1.3b": 1_315_723_264,
    "cerebras-gpt-2.7b": 2_651_553_280,
    "cerebras-gpt-6.7b": 6_658_404_352,
    "cerebras-gpt-13b": 12_853_386_240,
    "codellama-34b": 33_743_970_304,
    "codellama-70b": 68_976_910_336,
    "microllama-300m": 304_636_928,
    "ministral-8b": 8_019_808_256,
    "minitron-4b": 4_190_509_056,
    "openhermes-2.5-mistral-7b": 7_241_748_480,
    "pythia-14m": 14_067_712,
    "pythia-31m": 30_494_720,
    "tulu3-8b": 8_030_326_784,
    "yulan-mini-2.4b": 2_424_267_648,
    "tulu3-70b": 70_553_837_568,
    "tulu3-405b": 405_853_650_944,
    "command-r-35b": 34_980_831_232,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon3-1b": 1_669_408_768,
    "falcon3-3b": 3_227_655_168,
    "falcon3-7b": 7_455_550_464,
    "falcon3-10b": 10_305_653_760,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-small": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt3-125m": 125_226_240,
    "gpt3-350m": 355_871_744,
    "gpt3-760m": 760_300_032,
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
    "llama1-7b": 6_738_415_616,
    "llama1-13b": 13_015_864_320,
    "llama1-30b": 32_528_943_616,
    "llama1-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "megatron-1.7b": 1_652_230_656,
    "megatron-3.6b": 3_562_168_320,
    "megatron-7.5b": 7_467_786_240,
    "megatron-18b": 18_449_756_160,
    "megatron-22b": 22_074_273_792,
    "megatron-39b": 39_096_041_472,
    "megatron-76b": 76_050_739_200,
    "megatron-145b": 145_622_261_760,
    "megatron-175b": 174_615_846_912,
    "megatron-310b": 310_130_540_544,
    "megatron-530b": 529_600_819_200,
    "megatron-1t": 1_008_038_758_400,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-large-123b": 122_610_069_504,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "nemotron4-15b": 15_628_775_424,
    "nemotron4-340b": 341_029_195_776,
    "phi3-medium": 13_960_238_080,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "smollm3-3b": 3_075_098_624,
    "seed-oss-36b": 36_151_104_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "stablelm-3b": 2_795_443_200,
    "tinyllama-1.1b": 1_100_048_384,
    # totals that the hub's pages print for these repositories
    "codellama-7b": 6_738_546_688,
    "codellama-13b": 13_016_028_160,
    "open-llama-3b": 3_426_473_600,
    "yi-6b": 6_061_035_520,
    "yi-9b": 8_829_407_232,
    "yi-34b": 34_388_917_248,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-llm-67b": 67_425_001_472,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-1.8b": 1_836_828_672,
    "qwen1.5-4b": 3_950_369_280,
    "qwen1.5-7b": 7_721_324_544,
    "qwen1.5-14b": 14_167_290_880,
    "qwen1.5-32b": 32_512_218_112,
    "qwen1.5-72b": 72_287_920_128,
    "internlm2-1.8b": 1_889_110_016,
    "internlm2-7b": 7_737_708_544,
    "internlm2-20b": 19_861_149_696,
    "baichuan-7b": 7_000_559_616,
    "baichuan2-7b": 7_505_973_248,
    "chatglm3-6b": 6_243_584_000,
    "glm-4-9b": 9_399_951_360,
    "solar-10.7b": 10_731_524_096,
    "eeve-korean-10.8b": 10_804_924_416,
    "viking-7b": 7_550_013_440,
    "viking-13b": 14_030_361_600,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "olmo-1b": 1_176_832_000,
    "olmo-7b": 6_888_361_984,
    "olmo2-1b": 1_484_916_736,
    "phi-1.5": 1_418_219_520,
    "phi-2": 2_779_632_640,
    "phi4-mini": 3_836_021_760,
    "salamandra-2b": 2_253_490_176,
    "salamandra-7b": 7_768_117_248,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "sheared-llama-1.3b": 1_345_423_360,
    "sheared-llama-2.7b": 2_701_560_320,
    "eurollm-1.7b": 1_656_850_432,
    "eurollm-9b": 9_152_319_488,
}


def closed_form(m: Model) -> int:
    """Parameters by the sum everybody writes down once: weights, biases, norms, embeddings."""
    h, f, q, kv = m.hidden_sz, m.inter_sz, m.n_q_heads * m.head_dim, m.n_kv_heads * m.head_dim
    ups = 2 if m.glu else 1
    norm = h * (2 if m.norm == "layernorm" and m.norm_bias else 1)
    block = h * q + 2 * h * kv + q * h + (ups + 1) * h * f + (1 if m.shared_norm else 2) * norm
    if m.bias:
        block += h + ups * f + h
    if m.qkv_bias:
        block += q + 2 * kv
    if m.qk_norm:
        block += q + kv if m.qk_norm_type == "per_layer" else 2 * m.head_dim
    positions = (m.max_positions or 0) * h if m.learned_positions else 0
    return m.n_layers * block + norm + positions + m.vocab_sz * h * (1 if m.tie_embeddings else 2)


def document(name: str) -> dict:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


# Nemotron-H 8B, 47B, 56B and Nemotron Nano 9B, 12B v2: billions as published (arXiv 2504.03624; huggingface.co/nvidia)
HYBRIDS = {
    "nemotron-h-8b": 8.10,
    "nemotron-h-47b": 46.8,
    "nemotron-h-56b": 56.3,
    "nemotron-nano-9b-v2": 8.89,
    "nemotron-nano-12b-v2": 12.31,
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_presets(name):
    """Layer by layer from the files' own figures: d inner, G N = 8 state dims, norms of h before every layer and at the end."""
    m = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    h, mamba = m["hidden_sz"], m["mamba"]
    heads, d, states = mamba["n_heads"], mamba["n_heads"] * mamba["head_dim"], 2 * 8 * mamba["state_dim"]
    each = {
        "M": h + h * (2 * d + states + heads) + 5 * (d + states) + 3 * heads + d + d * h,
        "-": h + 2 * h * m["inter_sz"],
        "*": h + 128 * h * (2 * m["n_q_heads"] + 2 * 8),
    }
    total = sum(each[letter] for letter in m["hybrid_pattern"]) + h + 2 * 131_072 * h
    assert n_params(load_model(name)) == total
    assert total / 1e9 == pytest.approx(HYBRIDS[name], rel=2e-3)


def test_every_preset_is_counted_here():
    assert set(model_names()) == COUNTED.keys() | HYBRIDS.keys() | test_expert_presets.COUNTED.keys()


def test_parameters():
    models = {name: load_model(name) for name in COUNTED}
    assert {name: n_params(model) for name, model in models.items()} == COUNTED
    assert {name: closed_form(model) for name, model in models.items()} == COUNTED


def test_every_preset_says_where_its_figures_come_from():
    for name in COUNTED:
        model = load_model(name)
        assert model.name == name
        assert any(word in model.source for word in ("config.json", "README.md", "arXiv", "github")), name
        assert "memory" not in model.source, name


def test_the_name_says_the_size():
    """A file under the wrong name would show here: the size in the name is the count, to 45 % (Falcon3-1B has 1.67)."""
    units = {"m": 1e6, "b": 1e9, "t": 1e12}
    for name, count in COUNTED.items():
        number, unit = name.rpartition("-")[2][:-1], name[-1]
        if number.replace(".", "").isdigit() and unit in units:
            assert float(number) * units[unit] == pytest.approx(count, rel=0.45), name


def test_names_and_aliases_are_unique():
    seen = {}
    for name in model_names():
        for spelling in [name, *document(name).get("aliases", [])]:
            key = presets._key(spelling)
            assert key not in seen, f"{spelling} of {name} is also {seen[key]}"
            seen[key] = name


def test_aliases_load_their_model():
    for name in model_names():
        for alias in document(name).get("aliases", []):
            assert load_model(alias).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("llama3-70b", "llama3-70b"),
        ("llama-3-70b", "llama3-70b"),
        ("Llama3_70B", "llama3-70b"),
        ("meta-llama/Meta-Llama-3-70B", "llama3-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-0.6B-Base", "qwen3-0.6b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-Nemo-Base-2407", "mistral-nemo-12b"),
        ("microsoft/Phi-3-mini-128k-instruct", "phi3-mini"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("google/gemma-7b-it", "gemma-7b"),
        ("openai-community/gpt2", "gpt2-small"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("gpt3", "gpt3-175b"),
        ("megatron-1008b", "megatron-1t"),
        (" llama3 8b ", "llama3-8b"),
    ],
)
def test_spelling_is_lenient(spelling, name):
    assert load_model(spelling).name == name


def test_a_file_name_reads_one_file_once(monkeypatch):
    """Both spellings are one model; changes are read of the file, so that the model itself stays as it is."""
    read = []
    real = presets.shipped
    presets._read.cache_clear()
    monkeypatch.setattr(presets, "shipped", lambda path: read.append(path.name) or real(path))
    load_model("llama3-70b")
    load_model("meta-llama/Meta-Llama-3-70B")
    assert read == ["llama3-70b.yaml"]
    assert load_model("llama3-70b", n_layers=4).n_layers == 4
    assert load_model("llama3-70b").n_layers == 80
    assert read == ["llama3-70b.yaml"] * 2


def test_unknown_names_tell_near_matches_in_one_line():
    with pytest.raises(ValueError, match=r"^unknown model 'llama3-7b'; did you mean .*'llama3-8b'.* lists them\)$"):
        load_model("llama3-7b")
    with pytest.raises(ValueError, match=r"did you mean 'chatglm3-6b'\?"):
        load_model("chat-base")  # words that any family's names have


@pytest.mark.parametrize(
    "name",
    ["", "zzz", "/", "../llama3-8b.yaml/../x", "llama3-8b.yaml", "*", "qwen2-57b", "llama3-8bb", "\0", "x" * 300],
)
def test_unknown_names(name):
    with pytest.raises(ValueError, match="unknown model") as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_changes():
    model = load_model("llama3-70b", n_layers=40)
    assert (model.n_layers, model.hidden_sz) == (40, 8192)
    assert model.source.endswith("(changed: n_layers)")


def test_changes_that_do_not_exist():
    with pytest.raises(ValueError, match=r"model\.n_layer: .*n_layers"):
        load_model("llama3-70b", n_layer=40)


def test_order_is_family_then_size():
    names = model_names()
    assert [n for n in names if n.startswith("llama3-")] == [f"llama3-{s}" for s in ("1b", "3b", "8b", "70b", "405b")]
    assert names.index("megatron-530b") < names.index("megatron-1t")


def table() -> str:
    """The presets as a Markdown table."""
    rows = [
        "| preset | parameters | layers | hidden | MLP | heads (kv) | vocabulary | also |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name in model_names():
        m = load_model(name)
        heads = f"{m.n_q_heads} ({m.n_kv_heads})" if m.n_kv_heads != m.n_q_heads else f"{m.n_q_heads}"
        also = ", ".join(document(name).get("aliases", []))
        sizes = " | ".join(f"{n:,}" for n in (n_params(m), m.n_layers, m.hidden_sz, m.inter_sz))
        rows.append(f"| {name} | {sizes} | {heads} | {m.vocab_sz:,} | {also} |")
    return "\n".join(rows) + "\n"


def test_the_documented_table_is_this_one(update_golden):
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    written, _, after = rest.partition(END)
    if update_golden:
        written = table()
        PAGE.write_text(before + BEGIN + written + END + after, encoding="utf-8")
    assert written == table(), "presets changed; if that is right: pytest tests/test_presets.py --update-golden"


def test_sources_keep_their_paths_whole():
    """A folded line that breaks inside a repository's name would leave a blank in it."""
    for name in model_names():
        assert "- " not in load_model(name).source


def test_dropout_of_phi_2_is_that_of_its_config():
    """resid_pdrop 0.1, as copied in github sdpython/experimental-experiment (export of Phi-2); OPT's is 0.1 too.

    Neither drops scores: attention_dropout is 0.0 in both (transformers configuration_phi.py, configuration_opt.py).
    """
    for name in ("phi-2", "opt-125m", "opt-13b", "opt-66b"):
        assert (load_model(name).dropout, load_model(name).attention_dropout) == (0.1, 0.0), name
