"""Megatron-Core's multi-token prediction over its local layer spec."""

from __future__ import annotations


def block(config, spec):
    """What GPTModel is given for it on this stage."""
    if not config.mtp_num_layers:
        return {}
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()  # it remembers how many depths the first model had
    return {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)}
