"""Plans that --emit-config writes: each kind of layer, run through 3dtrn, with the checkpoint's own number of parameters.

Names are those that transformers 5 saves. Totals are sums over the shapes, which the tests write down one by one.
"""

import json
import math

import pytest
import torch
import yaml

from steptime import Model
from steptime.commands import cli
from steptime.model.blocks import n_params


def written(make, command, shapes, config):
    """The model section that --emit-config writes for these shapes, and its text."""
    make.save_safetensors(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        make.folder / "m.safetensors",
    )
    make.write("config.json", json.dumps(config).encode())
    assert command(make.folder / "m.safetensors", "--emit-config", make.folder / "plan.yaml")[0] == 0
    text = (make.folder / "plan.yaml").read_text()
    return yaml.safe_load(text)["model"], text


def mixture(layers=2):
    """Width 64, 4 experts of width 32, 4 heads of 16.

    Two tables of 256 x 64, and in a layer 4 x 64 x 64, a router of 4 x 64, 4 experts of 3 x 32 x 64 and 2 x 64.
    """
    shapes = {"model.embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64), "model.norm.weight": (64,)}
    for p in (f"model.layers.{n}." for n in range(layers)):
        shapes |= {f"{p}self_attn.{name}_proj.weight": (64, 64) for name in "qkvo"}
        shapes |= {f"{p}{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
        shapes[f"{p}mlp.gate.weight"] = (4, 64)
        for e in range(4):
            shapes |= {f"{p}mlp.experts.{e}.{name}_proj.weight": (32, 64) for name in ("gate", "up")}
            shapes[f"{p}mlp.experts.{e}.down_proj.weight"] = (64, 32)
    return shapes


def test_emitted_mixture_is_a_model_of_as_many_parameters(make, command):
    shapes = mixture()
    config = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
    plan, _ = written(make, command, shapes, config)
    model = Model.model_validate(plan)
    assert (model.moe.n_experts, model.moe.expert_inter_sz, model.moe.experts_per_token) == (4, 32, 2)
    assert (
        n_params(model)
        == sum(map(math.prod, shapes.values()))
        == 2 * 256 * 64 + 64 + 2 * (4 * 64 * 64 + 256 + 4 * 6144 + 128)
    )


def test_what_no_shape_tells_of_a_mixture_is_one_line(make, command):
    plan, text = written(make, command, mixture(), {"num_attention_heads": 4})
    assert "experts_per_token" not in plan["moe"]
    assert (
        text.count("  # moe.experts_per_token: not known from names and shapes; needs a config next to the weights\n")
        == 1
    )


def test_emitted_runs_of_layers_are_a_model(make, command):
    shapes = {name: shape for name, shape in mixture(3).items() if ".1.mlp" not in name}
    shapes |= {f"model.layers.1.mlp.{name}_proj.weight": (96, 64) for name in ("gate", "up")} | {
        "model.layers.1.mlp.down_proj.weight": (64, 96)
    }
    config = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
    plan, _ = written(make, command, shapes, config)
    model = Model.model_validate(plan)
    assert [(run.repeat, run.kind) for run in model.layers] == [(1, "moe"), (1, "dense"), (1, "moe")]
    assert n_params(model) == sum(map(math.prod, shapes.values()))


def test_parts_that_no_plan_has_are_comments(make, command):
    shapes = mixture() | {f"vision_tower.layers.0.{name}.weight": (32, 32) for name in ("q_proj", "k_proj")}
    plan, text = written(make, command, shapes, {"num_attention_heads": 4})
    assert "vision" not in plan
    assert "  # vision: {n_layers: 1, params: 2048} in the checkpoint; no plan key for it\n" in text


LATENT = {  # 4 heads of 16 + 8, values of 16; latents of 24 and 16
    "q_a_proj": (24, 64), "q_a_layernorm": (24,), "q_b_proj": (96, 24), "kv_a_proj_with_mqa": (24, 64),
    "kv_a_layernorm": (16,), "kv_b_proj": (128, 16), "o_proj": (64, 64),
}  # fmt: skip
HEADS = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
GATED = HEADS | {"q_proj": (128, 64), "q_norm": (16,), "k_norm": (16,)}
DELTA = {  # 2 key heads of 8, 4 value heads of 8
    "in_proj_qkvz.weight": (96, 64), "in_proj_ba.weight": (8, 64), "conv1d.weight": (64, 1, 4), "A_log": (4,), "dt_bias": (4,),
    "norm.weight": (8,), "out_proj.weight": (64, 32),
}  # fmt: skip
MAMBA = {  # 8 heads of 16, 2 groups, 8 states
    "in_proj.weight": (296, 64), "conv1d.weight": (160, 1, 4), "conv1d.bias": (160,), "A_log": (8,), "D": (8,), "dt_bias": (8,),
    "norm.weight": (128,), "out_proj.weight": (64, 128),
}  # fmt: skip
MLP = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96,
         "vocab_size": 256}  # fmt: skip


def stack(*layers, prefix="model.layers."):
    """Tables of 256 x 64, and layers of {module: {part: shape}}, each with two norms."""
    found = {"model.embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64), "model.norm.weight": (64,)}
    for number, modules in enumerate(layers):
        norms = {f"{name}_layernorm": (64,) for name in ("input", "post_attention")}
        for module, parts in ({"": norms} | modules).items():
            for part, shape in parts.items():
                end = part if part.endswith(("weight", "bias", "A_log", "D")) else f"{part}.weight"
                found[".".join(filter(None, (f"{prefix}{number}", module, end)))] = shape
    return found


def sparse():
    """4 experts of width 32, and a shared one with its gate."""
    found = {"gate": (4, 64), "shared_expert_gate": (1, 64)}
    for part, shape in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items():
        found |= {f"experts.{e}.{part}.weight": shape for e in range(4)} | {f"shared_expert.{part}.weight": shape}
    return found


WIDE = {"": {f"{name}_layernorm": (64,) for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")}}
AHEAD = {"": {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head.norm.weight": (64,)}
         | {f"{name}_layernorm": (64,) for name in ("input", "post_attention")}}  # fmt: skip
MIXER = {"": {"norm": (64,)}}
NARROW = {"gate": (4, 64), "gate.e_score_correction_bias": (4,), "fc1_latent_proj": (16, 64), "fc2_latent_proj": (64, 16),
          "shared_experts.up_proj": (48, 64), "shared_experts.down_proj": (64, 48)}  # fmt: skip
NARROW |= {f"experts.{e}.{part}_proj": (96, 16)[::way] for e in range(4) for part, way in (("up", 1), ("down", -1))}
KINDS = {  # kind: (shapes, config, what the plan says)
    "latent attention, no config": (stack(*[{"self_attn": LATENT, "mlp": MLP}] * 2), {}, {"attention": {
        "kind": "mla", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}}),
    "prediction of a second token": (
        stack(*[{"self_attn": LATENT, "mlp": MLP}] * 2, {"self_attn": LATENT, "mlp": MLP} | AHEAD), {},
        {"mtp": 1, "n_layers": 2}),
    "windows": (
        stack(*[WIDE | {"self_attn": HEADS | {"q_norm": (16,), "k_norm": (16,)}, "mlp": MLP}] * 6), SIZES | {
            "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 32, "max_position_embeddings": 256,
            "tie_word_embeddings": False},
        {"attention": {"window": 32, "window_pattern": 6}, "post_norms": True, "activation": "gelu"}),
    "linear attention": (
        stack(*[{"linear_attn": DELTA, "mlp": sparse()}] * 3, {"self_attn": GATED, "mlp": sparse()}), SIZES | {
            "model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
        {"attention": {"gated": True}, "linear_attention": {
            "kind": "gated_delta_net", "n_value_heads": 4, "n_key_heads": 2, "key_head_dim": 8, "value_head_dim": 8,
            "conv_width": 4, "freq": [1, 1, 1, 0]}}),
    "Mamba hybrid": (
        stack(*[MIXER | {"mixer": parts} for parts in (MAMBA, HEADS, {"up_proj": (96, 64), "down_proj": (64, 96)}, MAMBA)],
              prefix="backbone.layers."), SIZES | {"model_type": "nemotron_h", "n_groups": 2},
        {"hybrid_pattern": "M*-M", "mamba": {"n_heads": 8, "head_dim": 16, "conv_width": 4, "n_groups": 2, "state_dim": 8}}),
    "experts on a latent": (
        stack(*[MIXER | {"mixer": parts} for parts in (MAMBA, HEADS, NARROW, MAMBA)], prefix="backbone.layers."),
        SIZES | {"model_type": "nemotron_h", "n_groups": 2, "ssm_state_size": 8, "hybrid_override_pattern": "M*EM",
                 "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_routed_experts": 4,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 96, "moe_latent_size": 16,
                 "moe_shared_expert_intermediate_size": 48},
        {"hybrid_pattern": "M*EM", "activation": "relu2", "moe": {
            "score_function": "sigmoid", "expert_bias": True, "n_experts": 4, "expert_inter_sz": 96, "experts_per_token": 2,
            "shared_expert_inter_sz": 48, "n_shared_experts": 1, "latent_sz": 16}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_emitted_plan_has_the_parameters_of_the_checkpoint(make, command, capsys, kind):
    shapes, config, said = KINDS[kind]
    plan, text = written(make, command, shapes, config)
    assert {key: plan[key] for key in said} == said
    assert "this model has" not in text
    job = {"model": plan, "parallelism": {"tp": 1, "pp": 1, "dp": 1}, "hardware": "dgx-h100",
           "data": {"gbs": 8, "seqlen": 64, "microbatch_sz": 1}}  # fmt: skip
    (make.folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert cli.main([str(make.folder / "job.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"]["total"] == sum(
        math.prod(shape) for name, shape in shapes.items() if "correction_bias" not in name
    )


def test_what_a_plan_lacks_is_counted(make, command):
    """Two norms of 64 that no plan has; and layers of Mamba's first version, with a state for each channel."""
    shapes = stack(*[{"self_attn": HEADS, "mlp": MLP}] * 2)
    extra = {f"model.layers.{n}.another_norm.weight": (64,) for n in range(2)}
    _, text = written(make, command, shapes | extra, {"num_attention_heads": 4, "rms_norm_eps": 1e-6})
    total = sum(map(math.prod, shapes.values()))
    assert f"  # this model has {total:,} parameters, 128 fewer than the checkpoint\n" in text
    old = MAMBA | {"A_log": (128, 8)}
    plan, text = written(make, command, stack(*[MIXER | {"mixer": old}] * 2), {"num_attention_heads": 4})
    assert "hybrid_pattern" not in plan
    assert "  # layer_kinds: {mamba: 2} in the checkpoint; no plan key for such layers\n" in text


def test_groups_and_states_of_mamba_are_only_known_together(make, command):
    plan, text = written(make, command, KINDS["Mamba hybrid"][0], {"num_attention_heads": 4})
    assert plan["mamba"] == {"n_heads": 8, "head_dim": 16, "conv_width": 4}
    assert "n_groups x state_dim = 16" in text
    assert text.count("mamba.state_dim: not known from names and shapes; needs a config next to the weights") == 1


def test_buffers_are_no_parameters_of_a_plan(make, command):
    shapes = mixture() | {f"model.layers.{n}.mlp.gate.e_score_correction_bias": (4,) for n in range(2)}
    config = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
    assert "this model has" not in written(make, command, shapes, config)[1]
