"""Architectures from names and shapes, and the folded tree."""

import math

import pytest

from steptime.checkpoint.architecture import infer
from steptime.checkpoint.stored_records import StoredTensor
from steptime.checkpoint.tree import build, ranges
from steptime.model.model import Moe


def tensors(shapes):
    return [
        StoredTensor(name, shape, "bfloat16", 2 * math.prod(shape), unique=math.prod(shape))
        for name, shape in shapes.items()
    ]


def layers(count, shapes, prefix="model.layers."):
    return {f"{prefix}{n}.{name}": shape for n in range(count) for name, shape in shapes.items()}


GPT2 = {
    "transformer.wte.weight": (50257, 768), "transformer.wpe.weight": (1024, 768),
    **layers(12, {
        "attn.c_attn.weight": (768, 2304), "attn.c_attn.bias": (2304,), "attn.c_proj.weight": (768, 768),
        "attn.c_proj.bias": (768,), "mlp.c_fc.weight": (768, 3072), "mlp.c_proj.weight": (3072, 768),
        "ln_1.weight": (768,), "ln_1.bias": (768,), "ln_2.weight": (768,), "ln_2.bias": (768,),
    }, "transformer.h."),
    "transformer.ln_f.weight": (768,),
}  # fmt: skip
MEGATRON = {
    "embedding.word_embeddings.weight": (32768, 4096),
    **layers(8, {
        "self_attention.linear_qkv.weight": (6144, 4096), "self_attention.linear_qkv.layer_norm_weight": (4096,),
        "self_attention.linear_proj.weight": (4096, 4096), "mlp.linear_fc1.weight": (28672, 4096),
        "mlp.linear_fc2.weight": (4096, 14336),
    }, "decoder.layers."),
    "output_layer.weight": (32768, 4096),
}  # fmt: skip
TITAN = {
    "tok_embeddings.weight": (128256, 4096),
    **layers(4, {
        "attention.wq.weight": (4096, 4096), "attention.wk.weight": (1024, 4096), "attention.wv.weight": (1024, 4096),
        "attention.wo.weight": (4096, 4096), "feed_forward.w1.weight": (14336, 4096), "attention_norm.weight": (4096,),
        "feed_forward.w2.weight": (4096, 14336), "feed_forward.w3.weight": (14336, 4096),
    }, "layers."),
    "output.weight": (128256, 4096),
}  # fmt: skip
QWEN3_MOE = {
    "model.embed_tokens.weight": (151936, 2048), "lm_head.weight": (151936, 2048),
    **layers(3, {
        "self_attn.q_proj.weight": (4096, 2048), "self_attn.k_proj.weight": (512, 2048),
        "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,), "mlp.gate.weight": (8, 2048),
        **{f"mlp.experts.{e}.{p}_proj.weight": s for e in range(8)
           for p, s in {"gate": (768, 2048), "up": (768, 2048), "down": (2048, 768)}.items()},
    }),
}  # fmt: skip


def values(found):
    return {key: entry["value"] for key, entry in found.items()}


def test_gpt2():
    found, problems = infer(GPT2, [{"config": {"n_head": 12}}])
    assert problems == []
    assert values(found) == {
        "vocab_sz": 50257, "hidden_sz": 768, "learned_positions": True, "max_positions": 1024, "tie_embeddings": True,
        "n_layers": 12, "inter_sz": 3072, "glu": False, "norm": "layernorm", "norm_bias": True, "bias": True,
        "qk_norm": False,
        "kv_cache_bytes_per_token": 36864, "q_rows": 768, "kv_rows": 768, "n_q_heads": 12, "head_dim": 64, "n_kv_heads": 12,
    }  # fmt: skip
    assert found["n_q_heads"]["from"] == "config.json"


def test_megatron_names_and_arguments():
    args = {"num_attention_heads": 32, "num_query_groups": 8, "group_query_attention": True, "kv_channels": 128}
    found = values(infer(MEGATRON, [{"args": args}])[0])
    assert (found["inter_sz"], found["glu"], found["q_rows"], found["kv_rows"]) == (14336, True, 4096, 1024)
    assert (found["n_q_heads"], found["n_kv_heads"], found["head_dim"], found["norm"]) == (32, 8, 128, "rmsnorm")


ARGS = {
    "num_layers": 8,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "group_query_attention": True,
    "kv_channels": 128,
}


def test_stacked_layers_of_megatron_are_those_of_its_arguments():
    """torch_dist keeps equal layers as one tensor with the layers as its first dimension."""
    one = {name.replace("layers.0.", "layers."): (8, *s) for name, s in MEGATRON.items() if "layers.0." in name}
    stacked = {name: shape for name, shape in MEGATRON.items() if "layers." not in name} | one
    found, problems = infer(stacked, [{"args": ARGS}])
    assert (values(found), problems) == (values(infer(MEGATRON, [{"args": ARGS}])[0]), [])
    assert found["n_layers"]["value"] == 8


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", ["local", "packed"])
def test_fused_gates_of_megatron_experts(form, gated):
    """4 experts of width 96 in a model of width 64: gate and up are one matrix of 192 rows."""
    rows = 192 if gated else 96
    experts = {
        "local": {f"mlp.experts.local_experts.{e}.linear_fc{n}.weight": s
                  for e in range(4) for n, s in ((1, (rows, 64)), (2, (64, 96)))},
        "packed": {"mlp.experts.experts.linear_fc1.weight": (4, rows, 64), "mlp.experts.experts.linear_fc2.weight": (4, 64, 96)},
    }[form]  # fmt: skip
    shapes = {"embedding.word_embeddings.weight": (256, 64)} | layers(2, {
        "self_attention.linear_qkv.weight": (128, 64), "self_attention.linear_proj.weight": (64, 64),
        "mlp.router.weight": (4, 64), "pre_mlp_layernorm.weight": (64,), **experts,
    }, "decoder.layers.")  # fmt: skip
    found = values(infer(shapes, [])[0])
    assert (found["glu"], found["inter_sz"]) == (gated, 96)
    assert found["moe"] == {"n_experts": 4, "expert_inter_sz": 96}


def test_what_shapes_cannot_tell_stays_unset():
    found = infer(TITAN, [])[0]
    assert "n_q_heads" not in found
    assert found["head_dim"]["value"] is None
    assert found["head_dim"]["candidates"] == [32, 64, 128, 256]
    assert "4 : 1" in found["head_dim"]["from"]


def test_mixture_of_experts():
    found = values(infer(QWEN3_MOE, [{"config": {"num_experts_per_tok": 2, "num_experts": 8}}])[0])
    assert found["moe"] == {"n_experts": 8, "expert_inter_sz": 768, "experts_per_token": 2}
    assert (found["head_dim"], found["n_q_heads"], found["n_kv_heads"], found["qk_norm"]) == (128, 32, 4, True)


def test_latent_attention_and_leading_dense_layers():
    shapes = {
        "model.embed_tokens.weight": (1000, 64),
        **layers(3, {"self_attn.kv_a_proj_with_mqa.weight": (80, 64), "input_layernorm.weight": (64,)}),
        "model.layers.0.mlp.down_proj.weight": (64, 256), "model.layers.0.mlp.up_proj.weight": (256, 64),
        **{f"model.layers.{n}.mlp.experts.{e}.down_proj.weight": (64, 32) for n in (1, 2) for e in range(4)},
    }  # fmt: skip
    found = values(infer(shapes, [])[0])
    assert found["attention"] == {"kind": "mla"}
    assert found["moe"]["n_dense_layers"] == 1


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 5), ("num_hidden_layers", 9), ("vocab_size", 7)])
def test_config_that_disagrees_is_a_problem(key, value):
    problems = infer(TITAN, [{"config": {key: value}}])[1]
    assert [problem.code for problem in problems] == ["CONFIG_MISMATCH"]


def test_config_of_the_wrong_kind_is_ignored():
    for config in ({"hidden_size": "big"}, {"num_attention_heads": [1]}, {"text_config": 3}, {"head_dim": -1}):
        infer(TITAN, [{"config": config}])


def test_no_transformer_no_architecture():
    assert infer({"conv1.weight": (64, 3, 7, 7), "fc.bias": (10,)}, []) == ({}, [])


def test_tree_folds_equal_layers_only():
    shapes = layers(4, {"w": (2, 3)}, "layers.") | {"layers.2.w": (5, 3), "norm": (3,)}
    tree = build(tensors(shapes))
    group, odd = tree.children["layers"].children.values()
    assert (group.name, group.repeat, group.params) == ("[0-1,3]", 3, 18)
    assert (odd.name, odd.params) == ("2.w", 15)
    assert tree.params == sum(math.prod(s) for s in shapes.values())


def test_tree_of_very_deep_names():
    tree = build(tensors({".".join("a" * 5000): (2,)}))
    assert tree.params == 2


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0, 1, 2, 5], "0-2,5"), ([0, 2, 4, 6], "0-6:2"), ([7], "7"), ([1, 5], "1,5"), ([3, 4], "3-4")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_broken_config_beside_the_weights_is_a_warning(make, summarize, codes):
    make.save_safetensors(make.llama(2), make.folder / "model.safetensors")
    make.write("config.json", b"{broken")
    summary = summarize(make.folder)
    assert (summary.exit_code, codes(summary)) == (0, {"BAD_CONFIG"})
    assert summarize(make.folder, strict=True).exit_code == 1


def test_cache_bytes_of_a_token():
    """Llama 3 8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072 (its model card's 128 KiB); heads need not be known.

    DeepSeek-V3 caches 512 + 64 numbers a layer: 61 x 576 x 2 = 70,272 bytes (arXiv 2405.04434, table 1, by its formula).
    """
    llama = {
        "model.embed_tokens.weight": (128256, 4096),
        **layers(32, {"self_attn.q_proj.weight": (4096, 4096), "self_attn.k_proj.weight": (1024, 4096)}),
    }
    assert values(infer(llama, [])[0])["kv_cache_bytes_per_token"] == 131_072
    latent = {
        "model.embed_tokens.weight": (129280, 7168),
        **layers(61, {"self_attn.kv_a_proj_with_mqa.weight": (576, 7168), "self_attn.o_proj.weight": (7168, 16384)}),
    }
    assert values(infer(latent, [])[0])["kv_cache_bytes_per_token"] == 70_272


@pytest.mark.parametrize("prefix", ["bert.encoder.layer.", "model.vision_tower.layers."])
def test_encoders_have_no_cache(prefix):
    shapes = {
        "bert.embeddings.word_embeddings.weight": (30522, 768),
        **layers(2, {"attention.self.query.weight": (768, 768), "attention.self.key.weight": (768, 768)}, prefix),
    }
    assert "kv_cache_bytes_per_token" not in infer(shapes, [])[0]


def sparse(kinds):
    """A model of width 64 whose layers are dense (width 96) or have 4 experts (width 32)."""
    found = {"model.embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64)}
    for n, kind in enumerate(kinds):
        p = f"model.layers.{n}."
        found |= {f"{p}self_attn.q_proj.weight": (64, 64), f"{p}self_attn.k_proj.weight": (16, 64)}
        if kind == "dense":
            found |= {
                f"{p}mlp.gate_proj.weight": (96, 64),
                f"{p}mlp.up_proj.weight": (96, 64),
                f"{p}mlp.down_proj.weight": (64, 96),
            }
            continue
        found[f"{p}mlp.gate.weight"] = (4, 64)
        for e in range(4):
            found |= {f"{p}mlp.experts.{e}.gate_proj.weight": (32, 64), f"{p}mlp.experts.{e}.up_proj.weight": (32, 64)}
            found[f"{p}mlp.experts.{e}.down_proj.weight"] = (64, 32)
    return found


@pytest.mark.parametrize(("kinds", "dense", "share"), [
    ("dense moe moe moe", 1, None), ("dense moe dense moe", 0, 0.5), ("dense dense moe dense moe", 1, 0.5), ("moe moe", 0, None),
])  # fmt: skip
def test_which_layers_have_experts(kinds, dense, share):
    """As a plan says it: so many dense layers, then the last of each 1 / share."""
    kinds = kinds.split()
    found = values(infer(sparse(kinds), [])[0])
    moe = found["moe"]
    assert (moe.get("n_dense_layers", 0), moe.get("moe_frequency")) == (dense, share)
    assert "layers" not in found
    plan = Moe(n_experts=4, expert_inter_sz=32, experts_per_token=2, n_dense_layers=dense, moe_frequency=share or 1.0)
    assert [plan.at(n) for n in range(len(kinds))] == [kind == "moe" for kind in kinds]
    assert found["inter_sz"] == (96 if "dense" in kinds else 32)


def test_irregular_layers_are_listed_as_runs():
    """Sparse layers at no constant distance; and dense ones of two widths."""
    found = values(infer(sparse(["moe", "dense", "dense", "moe"]), [])[0])
    assert [(run["repeat"], run["kind"]) for run in found["layers"]] == [(1, "moe"), (2, "dense"), (1, "moe")]
    shapes = sparse(["dense"] * 3)
    shapes |= {"model.layers.2.mlp.down_proj.weight": (64, 128), "model.layers.2.mlp.up_proj.weight": (128, 64)}
    found = values(infer(shapes, [{"config": {"num_attention_heads": 4}}])[0])
    assert found["layers"] == [
        {"repeat": 2, "kind": "dense", "inter_sz": 96},
        {"repeat": 1, "kind": "dense", "inter_sz": 128},
    ]


def test_one_norm_a_layer_without_bias_may_be_layernorm(make, summarize):
    """Cohere's layers are parallel: attention and MLP share one LayerNorm without bias; a llama has two RMSNorms."""
    llama = make.llama(2)
    cohere = {name: tensor for name, tensor in llama.items() if "post_attention" not in name}
    for number, (state, norm) in enumerate(((llama, "rmsnorm"), (cohere, None))):
        make.save_safetensors(state, make.folder / f"{number}.safetensors")
        assert summarize(make.folder / f"{number}.safetensors").architecture["norm"]["value"] == norm


def test_norms_of_an_indexer_and_of_a_latent_are_not_the_layers():
    """DeepSeek-V3.2: the indexer's LayerNorm has a bias; DeepSeek's own names call the norm of the query's latent q_norm."""
    shapes = {"model.embed_tokens.weight": (256, 64)} | layers(2, {
        "attn.wq_a.weight": (96, 64), "attn.q_norm.weight": (96,), "attn.wq_b.weight": (4 * 24, 96),
        "attn.wkv_a.weight": (16 + 8, 64), "attn.kv_norm.weight": (16,), "attn.wkv_b.weight": (4 * 32, 16),
        "attn.wo.weight": (64, 4 * 16), "attn.indexer.k_norm.weight": (16,), "attn.indexer.k_norm.bias": (16,),
        "attn_norm.weight": (64,), "ffn_norm.weight": (64,), "ffn.w1.weight": (96, 64), "ffn.w2.weight": (64, 96),
        "ffn.w3.weight": (96, 64),
    })  # fmt: skip
    found, problems = infer(shapes, [{"config": {"head_dim": 24}}])
    assert (problems, found["norm"]["value"], found["qk_norm"]["value"]) == ([], "rmsnorm", False)
    assert found["attention"]["value"] == {
        "kind": "mla", "kv_lora_rank": 16, "q_lora_rank": 96, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
    }  # fmt: skip


BLOCK = {"attn.q_proj.weight": (64, 64), "attn.k_proj.weight": (64, 64), "norm.weight": (64,), "norm.bias": (64,)}
STAGES = {  # Swin: each stage is twice as wide as the one before
    f"encoder.layers.{stage}.blocks.{block}.{name}": tuple(n << stage for n in shape)
    for stage, blocks in enumerate((2, 6, 2)) for block in range(blocks) for name, shape in BLOCK.items()
}  # fmt: skip
VOCODER = {  # VITS: a text encoder, and a vocoder with more blocks and parameters
    "text_encoder.embed_tokens.weight": (38, 64), **layers(2, BLOCK, "text_encoder.encoder.layers."),
    **layers(12, {"convs1.0.weight": (512, 512, 3), "convs1.0.bias": (512,)}, "decoder.resblocks."),
}  # fmt: skip
BOTTLENECK = {  # MobileBERT: tables and the inside of layers are narrower than the layers
    "embeddings.word_embeddings.weight": (300, 16),
    **layers(2, BLOCK | {"bottleneck.dense.weight": (16, 64), "bottleneck.norm.weight": (16,)}, "encoder.layer."),
}  # fmt: skip
CONCATENATED = {  # Zamba: attention reads the embedding beside the activations
    "model.embed_tokens.weight": (300, 64), **layers(1, {"mamba.in_proj.weight": (256, 64)}),
    **{f"model.layers.{n}.shared.self_attn.{p}_proj.weight": (128, 128) for n in (1, 2) for p in "qk"},
    **{f"model.layers.{n}.shared.norm.weight": (128,) for n in (1, 2)},
}  # fmt: skip
CODEBOOKS = {"backbone.embed_tokens.weight": (32 * 300, 64), **layers(2, BLOCK, "backbone.layers.")}
OTHER_WIDTHS = {  # what a model has, what its config says, and the width and number of layers that are found
    "stages": (STAGES, {"hidden_size": 256, "num_hidden_layers": 3}, 256, 3),
    "vocoder": (VOCODER, {"hidden_size": 64, "num_hidden_layers": 2}, 64, 2),
    "bottleneck": (BOTTLENECK, {"hidden_size": 64, "num_hidden_layers": 2}, 64, 2),
    "concatenated": (CONCATENATED, {"hidden_size": 64, "num_hidden_layers": 3}, 64, 3),
    "codebooks": (CODEBOOKS, {"hidden_size": 64, "vocab_size": 300, "num_codebooks": 32}, 64, 2),
    "encoder apart": (CODEBOOKS, {"decoder_layers": 1, "encoder_config": {"num_hidden_layers": 2}}, 64, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_WIDTHS)
def test_a_config_that_is_right_is_no_mismatch(case):
    shapes, config, hidden, count = OTHER_WIDTHS[case]
    found, problems = infer(shapes, [{"config": config}])
    assert (problems, found["hidden_sz"]["value"], found["n_layers"]["value"]) == ([], hidden, count)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 128), ("num_hidden_layers", 3), ("vocab_size", 400)])
def test_a_config_of_another_model_is_a_mismatch(key, value):
    shapes = {"model.embed_tokens.weight": (300, 64), **layers(2, BLOCK)}
    config = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300} | {key: value}
    assert [problem.code for problem in infer(shapes, [{"config": config}])[1]] == ["CONFIG_MISMATCH"]
