"""Vision-language models by their names and shapes: the language model is found, the other parts stand apart.

Names are those that transformers 5 saves (`modeling_*.py` of the family); what its own models have is in test_libraries.py.
The language model by hand: width 64, MLP 96, 2 key heads of 16, a layer 2 x 64^2 + 2 x 32 x 64 + 3 x 64 x 96 + 2 x 64 = 30,848;
three with embedding and norm 3 x 30,848 + 8,192 + 64 = 100,800.
"""

from math import prod

import pytest

from steptime.checkpoint.architecture import infer

HEADS = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
MLP = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}


def language(prefix, crossed=()):
    """Three layers; those of `crossed` attend to the image."""
    found = {f"{prefix}embed_tokens.weight": (128, 64), f"{prefix}norm.weight": (64,)}
    for n in range(3):
        layer, attention = f"{prefix}layers.{n}.", "cross_attn" if n in crossed else "self_attn"
        found |= {f"{layer}{attention}.{name}.weight": shape for name, shape in HEADS.items()}
        found |= {f"{layer}mlp.{name}.weight": shape for name, shape in MLP.items()}
        found |= {f"{layer}{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
        if n in crossed:
            found |= {f"{layer}cross_attn.{name}_norm.weight": (16,) for name in "qk"}
    return found


def encoder(layer, outer):
    """Two layers of width 32, 2 x (32 x 96 + 2 x 32) = 6,272, and 1,568 of patches."""
    found = {f"{outer}.weight": (32, 3, 4, 4), f"{outer}.bias": (32,)}
    for n in range(2):
        found |= {f"{layer.format(n)}attn.weight": (96, 32), f"{layer.format(n)}norm.weight": (32,)}
        found |= {f"{layer.format(n)}norm.bias": (32,)}
    return found


FAMILIES = {  # (prefix of the language model, of a layer of the encoder, its patches, a matrix of the projector)
    "qwen2_vl": ("model.", "visual.blocks.{}.", "visual.patch_embed.proj", "visual.merger.mlp.0.weight"),
    "qwen2_vl of transformers 4.52": (
        "model.language_model.", "model.visual.blocks.{}.", "model.visual.patch_embed.proj", "model.visual.merger.mlp.0.weight",
    ),
    "paligemma": (
        "language_model.model.", "vision_tower.vision_model.encoder.layers.{}.",
        "vision_tower.vision_model.embeddings.patch_embedding", "multi_modal_projector.linear.weight",
    ),
    "llava_onevision": (
        "language_model.model.", "vision_tower.encoder.layers.{}.", "vision_tower.embeddings.patch_embedding",
        "multi_modal_projector.linear_1.weight",
    ),
    "internvl": (
        "language_model.model.", "vision_model.encoder.layers.{}.", "vision_model.embeddings.patch_embedding", "mlp1.1.weight",
    ),
    "mllama": (
        "language_model.model.", "vision_model.transformer.layers.{}.", "vision_model.patch_embedding",
        "multi_modal_projector.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_told_apart(family):
    prefix, layer, patches, projector = FAMILIES[family]
    crossed = (1,) if family == "mllama" else ()
    text = language(prefix, crossed)
    assert sum(map(prod, text.values())) == 100_800 + 32 * len(crossed)
    shapes = encoder(layer, patches) | {projector: (64, 32)} | text  # the encoder comes first in some files
    found = {key: entry["value"] for key, entry in infer(shapes, [])[0].items()}
    assert [found[key] for key in ("n_layers", "hidden_sz", "inter_sz", "vocab_sz")] == [3, 64, 96, 128]
    assert found["vision"] == {"n_layers": 2, "hidden_sz": 32, "params": 6_272 + 1_568}
    assert found["projector"] == {"params": 2_048}
    assert (found["qk_norm"], found["glu"]) == (False, True)
    assert found.get("layer_kinds") == ({"attention": 2, "cross_attention": 1} if crossed else None)
    assert found["kv_cache_bytes_per_token"] == 2 * (3 - len(crossed)) * 32 * 2  # keys and values, 2 bytes each
