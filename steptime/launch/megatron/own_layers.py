"""Whether a job has Megatron's own layers where its flags do not say so: what its checkout and its container tell."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from steptime.launch.job_keys import JobKeys
from steptime.launch.megatron.releases import of_core
from steptime.launch.python.program_values import defaults_in
from steptime.launch.shell.script import Script

_FIRST_WITH_TE = "22.09"
"""NVIDIA TransformerEngine, README.rst: preinstalled in the PyTorch container on NGC in versions 22.09 and later."""
_OFF_BY_DEFAULT = re.compile(r"'--use-mcore-models', action='store_true',\s*help='(?!DEPRECATED)", re.IGNORECASE)
"""A parser of core 0.3 to 0.7, whose models are the older ones unless the flag is given."""
_DATED, _TE_BY_DEFAULT = re.compile(r"Megatron-LM-(2[34]\d{4})\b"), "240101"
"""Pai-Megatron-Patch's folders of Megatron-LM by their dates; before core 0.5, without fused rotary embedding, in 2023."""
_PARSERS = ("megatron/training/arguments.py", "megatron/arguments.py")
_SWITCH = {"moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"}
"""SwitchMLP of the older models (megatron/model/transformer.py), and up to core 0.4 of all (core/transformer/switch_mlp.py)."""
_MINDSPEED = "mindspeed_llm/training/arguments.py"
_OF_MINDSPEED = {"--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--no-shared-storage"}
"""Ascend/MindSpeed-LLM's parser, and flags of MindSpeed, over which it runs. Its layers are Megatron-LM's own, which have
flash attention with --use-flash-attn (core/transformer/dot_product_attention.py, dot_product_attention_forward_wrapper)."""
_SPECS = {"get_gpt_layer_local_spec": "local", "get_gpt_layer_with_transformer_engine_spec": "transformer_engine"}
"""Functions of Megatron-Core's models/gpt/gpt_layer_specs.py, and the --transformer-impl whose layers they make."""


def put_spec(keys: JobKeys) -> None:
    """The layers of one of Megatron-Core's own functions, which pretrain_gpt.py calls without arguments (model_provider)."""
    module, _, function = " ".join(keys.words("spec")).partition(" ")
    if module == "megatron.core.models.gpt.gpt_layer_specs" and function in _SPECS and not keys.on("qk_layernorm"):
        keys.put("transformer_impl", _SPECS[function], by=keys.name("spec"))
        keys.defaults |= {"use_legacy_models": ("use_legacy_models", False)}
        keys.without_effect("spec", f"the layers of --transformer-impl {_SPECS[function]}")


def put_own_layers(keys: JobKeys, script: Script) -> None:
    """Set the default of --transformer-impl to that of the parser next to the program, or of a container without others.

    Up to core 0.5 the models of Megatron-Core (--use-mcore-models) have TransformerEngine's layers whatever that is; later
    pretrain_gpt.py asks for it (its use_te).
    """
    if keys.nearby.text(_MINDSPEED) or _OF_MINDSPEED & {keys.name(key) for key in keys.values}:
        keys.defaults |= {"use_legacy_models": ("use_legacy_models", True)}
        keys.defaults |= {"apply_rope_fusion": ("use_fused_rotary_pos_emb", False)}
        if "transformer_impl" in keys.defaults.keys() - keys.values.keys():
            keys.defaults |= {"transformer_impl": ("transformer_impl", "local")}
            keys.notes.append("Megatron's own layers: the default of --transformer-impl in MindSpeed-LLM")
        return
    path = PurePosixPath(script.program)
    program = (keys.nearby.text(script.program) or keys.nearby.text(path.name) or "") if path.name else ""
    parsers = (keys.nearby.text(str(path.parent / name)) for name in _PARSERS) if program else ()
    parser = next(filter(None, parsers), "")
    asks = {"use_mcore_models", "deprecated_use_mcore_models"} & keys.values.keys()
    if parser and not asks and _OFF_BY_DEFAULT.search(parser) and "--use-legacy-models" not in parser:
        keys.defaults |= {"use_legacy_models": ("use_legacy_models", True)}
    elif "--use-legacy-models" in parser:
        keys.defaults |= {"use_legacy_models": ("use_legacy_models", False)}
    if "'--overlap-p2p-communication'," in parser:
        keys.defaults |= {"overlap_p2p_comm": ("overlap_p2p_communication", False)}
    # later parsers have flags of experts, those of 2026 by the fields of TransformerConfig
    if keys.on("use_legacy_models") or ("--num-experts" in parser and not re.search(r"--moe-|moe_router", parser)):
        keys.defaults |= {key: (key, value) for key, value in _SWITCH.items() if key in keys.defaults}
    dated = "" if parser else next(iter(_DATED.findall(" ".join(script.variables.values()))), "")
    dated = dated if dated < _TE_BY_DEFAULT else ""
    if dated:
        keys.defaults |= {"apply_rope_fusion": ("apply_rope_fusion", False)}
        keys.defaults |= {} if asks else {"use_legacy_models": ("use_legacy_models", True)}
    if "transformer_impl" in keys.values or "transformer_impl" not in keys.defaults:
        return
    of_core = asks and "use_te" not in program
    if parser and not of_core and defaults_in(parser).get("transformer_impl") == "local":
        why = "the default of --transformer-impl in the arguments.py of the checkout"
    elif dated and not of_core:
        why = f"the default of --transformer-impl in Megatron-LM-{dated}"
    elif not parser and script.container and script.container < _FIRST_WITH_TE:
        why = f"the container pytorch:{script.container} has no TransformerEngine"
    else:
        return
    keys.defaults |= {"transformer_impl": ("transformer_impl", "local")}
    keys.notes.append(f"Megatron's own layers: {why}")


def have_one_attention(keys: JobKeys) -> bool:
    """Whether the local layers are Megatron-Core's, which have one attention whatever is asked for; told where nobody says it."""
    if keys.on("use_legacy_models"):
        return False
    surely, perhaps = of_core(keys.values)
    if surely or "use_legacy_models" in keys.defaults:  # as the parser of its checkout says
        keys.without_effect("use_flash_attn", "Megatron-Core's own layers have one attention, with all scores")
        return True
    if perhaps:
        older = "flash attention of the older models: from core 0.8 on local layers keep all scores"
        keys.approximate("use_flash_attn", older)
    return False
