"""Architectures of families with names of their own, as transformers 4.57 saves tiny models: ALBERT, CTRL, XLM, CPM-Ant."""

import pytest

from steptime.checkpoint.architecture import infer

NORM = {"weight": (48,), "bias": (48,)}
SQUARE = NORM | {"weight": (48, 48)}


def named(*parts):
    return {f"{module}.{name}": shape for module, shapes in parts for name, shape in shapes.items()}


ALBERT = named(("attention.LayerNorm", NORM), ("full_layer_layer_norm", NORM), ("ffn", {"weight": (96, 48), "bias": (96,)}),
               ("ffn_output", {"weight": (48, 96), "bias": (48,)}),
               *((f"attention.{part}", SQUARE) for part in ("query", "key", "value", "dense")))  # fmt: skip
CTRL = named(("layernorm1", NORM), ("layernorm2", NORM), ("ffn.0", {"weight": (96, 48)}), ("ffn.2", {"weight": (48, 96)}),
             *((f"multi_head_attention.{part}", SQUARE) for part in ("Wq", "Wk", "Wv", "dense")))  # fmt: skip
XLM = {
    **{f"attentions.{n}.{p}_lin.weight": (48, 48) for n in range(3) for p in ("q", "k", "v", "out")},
    **{f"layer_norm{i}.{n}.{p}": (48,) for n in range(3) for i in (1, 2) for p in ("weight", "bias")},
    **{f"ffns.{n}.lin{i}.weight": s for n in range(3) for i, s in ((1, (192, 48)), (2, (48, 192)))},
}  # fmt: skip
CPM_ANT = {
    **{f"self_att.self_attention.{p}.weight": (48, 48) for p in ("project_q", "project_k", "project_v", "attention_out")},
    "self_att.layernorm_before_attention.weight": (48,), "ffn.layernorm_before_ffn.weight": (48,),
    "ffn.ffn.w_in.w_0.weight": (96, 48), "ffn.ffn.w_in.w_1.weight": (96, 48), "ffn.ffn.w_out.weight": (48, 96),
}  # fmt: skip


def repeated(prefix, count, shapes):
    return {f"{prefix}{n}.{name}": shape for n in range(count) for name, shape in shapes.items()}


OTHERS = {  # names of transformers 4.57: tensors, config, and n_layers, inter_sz, glu, norm, n_q_heads, learned_positions
    "albert": (
        {"albert.embeddings.word_embeddings.weight": (300, 16), "albert.embeddings.position_embeddings.weight": (64, 16),
         "albert.encoder.embedding_hidden_mapping_in.weight": (48, 16),
         **repeated("albert.encoder.albert_layer_groups.0.albert_layers.", 1, ALBERT)},
        {"num_hidden_layers": 6, "hidden_size": 48, "num_attention_heads": 4}, (6, 96, False, "layernorm", 4, True),
    ),
    "ctrl": ({"transformer.w.weight": (300, 48), **repeated("transformer.h.", 3, CTRL)}, {"n_head": 4, "dff": 96},
             (3, 96, False, "layernorm", 4, False)),
    "xlm": ({"transformer.embeddings.weight": (300, 48), "transformer.position_embeddings.weight": (64, 48),
             **{f"transformer.{name}": shape for name, shape in XLM.items()}}, {"n_heads": 4, "emb_dim": 48},
            (3, 192, False, "layernorm", 4, True)),
    "cpmant": ({"cpmant.input_embedding.weight": (308, 48), **repeated("cpmant.encoder.layers.", 3, CPM_ANT)},
               {"dim_head": 12, "vocab_size": 300, "dim_ff": 96}, (3, 96, True, "rmsnorm", 4, False)),
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_families_with_names_of_their_own(family):
    shapes, config, said = OTHERS[family]
    found, problems = infer(shapes, [{"config": config | {"model_type": family}}])
    fields = ("n_layers", "inter_sz", "glu", "norm", "n_q_heads", "learned_positions")
    assert (problems, tuple(found[key]["value"] for key in fields)) == ([], said)
    assert found["hidden_sz"]["value"] == 48
    assert "parallel_residual" not in found
    assert ("kv_cache_bytes_per_token" in found) == (family == "ctrl")


def test_layers_that_are_stored_once_have_no_number_without_a_config():
    assert infer(OTHERS["albert"][0], [])[0]["n_layers"]["value"] is None
