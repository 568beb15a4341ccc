"""Ask a process that runs Megatron-Core, and describe the same configuration to our model."""

from __future__ import annotations

import json
from pathlib import Path

import forked

from steptime.model.model import Model
from steptime.model.shard import Shard
from steptime.software.performance import load_software
from steptime.software.settings import MoeSettings

WORLD = Path(__file__).with_name("mcore_world.py")


def ask(configs, **world):
    """Answers of Megatron-Core on rank `rank` of tp*dp*pp ranks, one for each configuration; `checked` reads one.

    `world`: tp, pp, dp, ep = 1, etp = tp, rank = 0, instances = 1.
    """
    request = json.dumps({**world, "configs": configs})
    return json.loads(megatron(WORLD, request))


def cases(layouts, variants, whole):
    """(layout, variant): every variant on the layouts of `whole`, and on a quarter of the others, another one on each."""
    others = [layout for layout in layouts if layout not in whole]
    found = [(layout, variant) for layout in whole for variant in variants]
    numbered = [(n, layout) for n, layout in enumerate(others)]
    return found + [(layout, v) for n, layout in numbered for m, v in enumerate(variants) if (n + m) % 4 == 0]


def megatron(script, text):
    """What a script says to a text, in a process that has Megatron-Core imported already."""
    done = forked.run(forked.server("mcore_imports"), script, stdin=text)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def checked(answer):
    """The answer, unless Megatron failed on this configuration."""
    assert "error" not in answer, answer["trace"]
    return answer


def model(c):
    """Our model of the same configuration; its vocabulary is the padded one that Megatron's GPTModel is given."""
    glu = c.get("glu", True)
    return Model(
        n_layers=c["layers"],
        hidden_sz=c["h"],
        inter_sz=c["i"],
        n_q_heads=c["nq"],
        n_kv_heads=c["nkv"],
        head_dim=c["d"],
        vocab_sz=c["vocab"],
        glu=glu,
        activation=c.get("activation", "silu" if glu else "gelu"),
        swiglu_limit=c.get("limit"),
        learned_positions=c.get("learned_positions", False),
        max_positions=c["s"] if c.get("learned_positions") else None,
        dropout=c.get("dropout", 0.0),
        tie_embeddings=c.get("tied", False),
        norm=c.get("norm", "RMSNorm").lower(),
        bias=c.get("bias", False),
        norm_bias=c.get("norm", "RMSNorm") == "LayerNorm",
        qk_norm=c.get("qk_norm", False),
        rotary_embeds="hybrid" not in c and not c.get("learned_positions", False),
        hybrid_pattern=c.get("hybrid"),
        mamba=mamba(c["mamba"]) if "mamba" in c else None,
        moe=experts(c["moe"]) if "moe" in c else None,
        attention=latent(c["mla"]) if "mla" in c else {},
        linear_attention=linear(c["linear"]) if "linear" in c else None,
        mtp=c.get("mtp", 0),
    )


def latent(said):
    """Megatron's keys of latent attention in ours."""
    names = {
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "v_head_dim": "v_head_dim",
    }
    return {"kind": "mla"} | {ours: said[theirs] for ours, theirs in names.items()}


def linear(said):
    """Megatron's keys of linear attention in ours."""
    names = {
        "n_key_heads": "linear_num_key_heads",
        "n_value_heads": "linear_num_value_heads",
        "key_head_dim": "linear_key_head_dim",
        "value_head_dim": "linear_value_head_dim",
        "conv_width": "linear_conv_kernel_dim",
        "freq": "linear_attention_freq",
    }
    return {ours: said[theirs] for ours, theirs in names.items()}


def mamba(said):
    """Megatron's keys of Mamba layers in ours."""
    names = {"mamba_num_heads": "n_heads", "mamba_head_dim": "head_dim", "mamba_state_dim": "state_dim"}
    return {ours: said[theirs] for theirs, ours in {**names, "mamba_num_groups": "n_groups"}.items() if theirs in said}


def experts(said):
    """Megatron's keys of a mixture of experts in ours."""
    shared = said.get("moe_shared_expert_intermediate_size") or 0
    return {
        "n_experts": said["num_moe_experts"],
        "expert_inter_sz": said["moe_ffn_hidden_size"],
        "experts_per_token": said["moe_router_topk"],
        "n_shared_experts": 1 if shared else 0,
        "shared_expert_inter_sz": shared,
        "latent_sz": said.get("moe_latent_size"),
        "shared_expert_gate": said.get("moe_shared_expert_gate", False),
        "score_function": said.get("moe_router_score_function", "softmax"),
        "pre_softmax": said.get("moe_router_pre_softmax", False),
        "expert_bias": said.get("moe_router_enable_expert_bias", False),
        "load_balancing": said.get("moe_router_load_balancing_type", "none"),
        "z_loss": bool(said.get("moe_z_loss_coeff")),
        "capacity_factor": said.get("moe_expert_capacity_factor"),
        "pad_to_capacity": said.get("moe_pad_expert_input_to_capacity", False),
    }


def shard(c, tp, ep=1, etp=None):
    """What our op lists see of it: the megatron-core profile with the kernels of Megatron's local spec."""
    software = load_software("megatron-core").replace(
        precision=c.get("dtype", "bf16"),
        attention_impl="unfused",
        scores_in_buffer=True,
        norm_impl="composite",
        softmax_impl="fused" if c.get("fused_softmax") else "composite",
        activation_impl="fused" if c.get("fused_activation", True) else "composite",
        rope_impl="own_tables",
        loss_impl="composite",
        grad_accumulation_fusion=c.get("grad_accumulation_fusion", False),
    )
    b, s, said = float(c["b"]), float(c["s"]), c.get("moe", {})
    how = MoeSettings(
        dispatcher=said.get("moe_token_dispatcher_type", "alltoall"),
        permute_fusion=said.get("moe_permute_fusion", False),
        router_dtype=said.get("moe_router_dtype") or "compute",
        grouped_gemm=c.get("grouped", True),
        shared_expert_overlap=said.get("moe_shared_expert_overlap", False),
        deterministic=c.get("deterministic", False),
    )
    software = software.model_copy(update={"moe": how})
    spread = {"ep": float(ep), "etp": float(etp or tp)}
    return Shard(b, s, s, float(tp), sp=c.get("sp", False), vocab=c["vocab"], software=software, **spread)


def part(module):
    """embedding, head, or the number of the block that a module belongs to."""
    if module.startswith("embedding"):
        return "embedding"
    return int(module.split(".")[2]) if module.startswith("decoder.layers.") else "head"
