"""Experts, latent attention and windows of a Hugging Face config.json: which keys of a family set which fields of `Model`."""

from __future__ import annotations

from typing import NamedTuple

Json = dict[str, object]


class Experts(NamedTuple):
    """The keys of one family that describe its experts; "" where it has none."""

    n_experts: str
    width: str
    shared: str = ""
    """Number of shared experts, each as wide as a routed one."""
    shared_width: str = ""
    """Total width of the shared experts."""
    dense_layers: str = ""
    step: str = ""
    """Interval of layers with experts; the last layer of each interval has them."""
    latent: str = ""
    """Width of the latent that routed experts read."""
    fixed: Json = {}  # noqa: RUF012 (a tuple's default, never changed)
    """Fields of `model.moe` that are fixed by the modeling code."""

    def read(self, values: Json) -> tuple[Json, list[str]]:
        """The `moe` section, and what is wrong with it."""
        problems: list[str] = []

        def number(key: str, least: int) -> int:
            found = values.get(key)
            if isinstance(found, int) and not isinstance(found, bool) and found >= least:
                return found
            problems.append(f"{key}: expected a whole number of at least {least}, got {found!r}")
            return max(least, 1)

        respelt = self.n_experts not in values and "num_local_experts" in values  # as transformers 5 saves Qwen3-MoE
        section = self.fixed | {
            "n_experts": number("num_local_experts" if respelt else self.n_experts, 1),
            "expert_inter_sz": number(self.width, 1),
            "experts_per_token": number("num_experts_per_tok", 1),
        }
        if values.get(self.shared) is not None:
            section["n_shared_experts"] = number(self.shared, 0)
        if self.shared_width:
            section["shared_expert_inter_sz"] = number(self.shared_width, 0)
            section["n_shared_experts"] = 1 if section["shared_expert_inter_sz"] else 0
        if values.get(self.latent) is not None:
            section["latent_sz"] = number(self.latent, 1)
        if self.dense_layers:
            section["n_dense_layers"] = number(self.dense_layers, 0)
        if self.step and (step := number(self.step, 1)) > 1:
            section["moe_frequency"] = 1.0 / step
        groups, chosen = values.get("n_group"), values.get("topk_group")
        greedy = values.get("topk_method") == "greedy"  # DeepSeek-V2's other choice: of all experts
        if isinstance(groups, int) and isinstance(chosen, int) and chosen < groups and not greedy:
            section |= {"node_limit": number("topk_group", 1), "n_groups": groups}
        if values.get("mlp_only_layers"):
            problems.append("mlp_only_layers: only the first layers, or every n-th one, can be dense")
        return section, problems


_ROUTED = Experts("n_routed_experts", "moe_intermediate_size", "n_shared_experts", dense_layers="first_k_dense_replace")
_SIGMOID: Json = {"score_function": "sigmoid", "expert_bias": True}
_QWEN = Experts("num_experts", "moe_intermediate_size", step="decoder_sparse_step")

EXPERTS: dict[str, Experts] = {
    "deepseek_v2": _ROUTED._replace(fixed={"pre_softmax": True}),
    "deepseek_v3": _ROUTED._replace(fixed=_SIGMOID),
    "kimi_k2": _ROUTED._replace(fixed=_SIGMOID),
    "glm4_moe": _ROUTED._replace(fixed=_SIGMOID),
    "mixtral": Experts("num_local_experts", "intermediate_size"),
    "gpt_oss": Experts("num_local_experts", "intermediate_size"),
    "qwen3_moe": _QWEN,
    "qwen2_moe": _QWEN._replace(
        shared_width="shared_expert_intermediate_size", fixed={"shared_expert_gate": True, "pre_softmax": True}
    ),
    "olmoe": Experts("num_experts", "intermediate_size", fixed={"pre_softmax": True}),
    "qwen3_next": _QWEN._replace(shared_width="shared_expert_intermediate_size", fixed={"shared_expert_gate": True}),
    "kimi_linear": Experts(
        "num_experts",
        "moe_intermediate_size",
        "num_shared_experts",
        dense_layers="first_k_dense_replace",
        fixed=_SIGMOID,
    ),
    "nemotron_h": Experts(
        "n_routed_experts",
        "moe_intermediate_size",
        shared_width="moe_shared_expert_intermediate_size",
        latent="moe_latent_size",
        fixed=_SIGMOID,
    ),
    "dots1": _ROUTED._replace(fixed=_SIGMOID),
    "solar_open": _ROUTED._replace(dense_layers="", fixed=_SIGMOID),
    "ernie4_5_moe": Experts(
        "moe_num_experts",
        "moe_intermediate_size",
        "moe_num_shared_experts",
        dense_layers="moe_layer_start_index",
        fixed={"pre_softmax": True, "expert_bias": True},
    ),
    "granitemoe": Experts("num_local_experts", "intermediate_size"),
    "minimax_m2": Experts("num_local_experts", "intermediate_size", fixed=_SIGMOID),
    "qwen3_5_moe_text": _QWEN._replace(
        shared_width="shared_expert_intermediate_size", fixed={"shared_expert_gate": True}
    ),
    "minimax": Experts("num_local_experts", "intermediate_size"),
    "minimax_text_01": Experts("num_local_experts", "intermediate_size"),
    # one shared expert, as wide as the others whatever the file says (modeling_llama4.py, Llama4TextMoe)
    "llama4_text": Experts(
        "num_local_experts",
        "intermediate_size",
        step="interleave_moe_layer_step",
        fixed={"score_function": "sigmoid", "n_shared_experts": 1},
    ),
}

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_linear")
"""Families with latent attention."""


def no_kinds(model_type: str) -> dict[str, str]:
    """Keys about experts or latents that are refused in a family not known to have them."""
    experts = {} if model_type in EXPERTS else dict.fromkeys(EXPERT_COUNTS, "a mixture of experts of this family")
    latents = {} if model_type in LATENT else {"kv_lora_rank": "latent attention of this family"}
    return experts | latents


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent(values: Json) -> Json:
    """The `attention` section of latent attention; with a null q_lora_rank queries are projected directly."""
    found = {key: values[key] for key in LATENT_KEYS if values.get(key) is not None}
    return {"kind": "mla", **found}


def pattern(kinds: list[object]) -> int | None:
    """The n where the last of every n layers has full attention; None where there is no such n.

    >>> pattern(["sliding_attention", "full_attention", "sliding_attention", "full_attention"])
    2
    """
    full = [kind == "full_attention" for kind in kinds]
    first = full.index(True) + 1 if True in full else len(full) + 1
    return first if full == [(layer + 1) % first == 0 for layer in range(len(full))] else None
