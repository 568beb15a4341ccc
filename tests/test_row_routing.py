"""How evenly the experts of measured runs are loaded."""

import pytest
from own_rows import SHIPPED, own
from test_validate_rows import at

from steptime.validation import judgement, row_plan


def test_torchtitan_routes_as_it_learned_unless_told():
    """torchtitan/config/configs.py@6b960233: moe_force_load_balance is off; Nous's runs set it.

    The row of the standard exchange (fit) comes within 3 %.
    """
    learned, forced = (judgement.judge(SHIPPED[name]) for name in ("torchtitan-dsv3-n009", "nous-torchtitan-n002"))
    assert at(learned.config, "model.moe.imbalance_factor") == 1.22
    assert at(forced.config, "model.moe.imbalance_factor") is None
    assert abs(learned.step_error) < 0.03


def test_exchanges_that_do_not_wait_for_the_number_of_rows():
    """HybridEP with a factor of 1, and fused kernels of experts; MinimalAsyncEP, which always has room for the most."""
    hybrid, minimal = (row_plan.to_config(SHIPPED[f"torchtitan-{name}"]).config for name in ("pr-n030", "dsv3-n011"))
    said = {"dispatcher": "flex", "flex_backend": "hybridep", "non_blocking_capacity_factor": 1.0}
    assert at(hybrid, "performance.moe") == said
    assert at(hybrid, "performance.activation_impl") == "fused"
    assert at(minimal, "performance.moe") == {"dispatcher": "flex", "flex_backend": "minimal_async_ep"}


def test_memory_of_minimal_async_ep_in_a_traced_graph():
    """8 and 16 sequences (fit) within 5 %; as many rows as arrive on average left them 11 and 18 % too small."""
    found = [judgement.judge(SHIPPED[f"torchtitan-dsv3-{name}"]).memory_error for name in ("n013", "n010")]
    assert max(map(abs, found)) < 0.05


def test_natural_routing_is_uneven_and_forced_balance_is_not():
    """MOEZOO-007 and -008 (fit) differ in routing alone: 11.37 and 14.16 s, 1.245 times as long."""
    forced, natural = (judgement.judge(SHIPPED[name]) for name in ("MOEZOO-007", "MOEZOO-008"))
    assert at(forced.config, "model.moe.imbalance_factor") is None
    assert at(natural.config, "model.moe.imbalance_factor") == 1.6
    assert natural.predicted_step_s / forced.predicted_step_s == pytest.approx(14.16 / 11.37, rel=0.02)


def test_routing_of_a_trained_model_is_not_even():
    """8 ranks with 8 of 64 experts each, which differ by 0.85 of the mean: a rank by 0.85 / sqrt(8) = 0.301. The fullest of 8 is
    expected at the 7.625 / 8.25 = 0.924 quantile of a normal distribution, 1.434: 1 + 0.301 * 1.434 = 1.43.
    """
    tuned = row_plan.to_config(SHIPPED["mbridge-cards-n002"])
    assert at(tuned.config, "model.moe.imbalance_factor") == 1.43


def test_runs_of_25_09_drop_and_pad_tokens_behind_the_all_to_all():
    """NVIDIA-NeMo/Megatron-Bridge@v0.1.0rc4 scripts/performance/run_script.py.

    apply_moe_token_drop wants the all-to-all and pads (src/megatron/bridge/training/utils/moe_token_drop.py); CUDA graphs launch
    whole layers of Qwen3 30B, and DeepSeek-V3's shared expert overlaps the exchange.
    """
    qwen, deepseek = (row_plan.to_config(SHIPPED[name]).config for name in ("MBRIDGE-274", "MBRIDGE-272"))
    for config in (qwen, deepseek):
        assert at(config, "performance.moe.dispatcher") == "alltoall"
        assert (at(config, "model.moe.capacity_factor"), at(config, "model.moe.pad_to_capacity")) == (1.0, True)
    assert (at(qwen, "performance.cuda_graphs"), at(deepseek, "performance.cuda_graphs")) == (True, None)
    assert at(qwen, "performance.moe.shared_expert_overlap") is None
    assert at(deepseek, "performance.moe.shared_expert_overlap") is True


def test_recipes_of_nemo_2_drop_and_pad_tokens():
    """NVIDIA/NeMo@6f2c6fda scripts/performance/llm/pretrain_grok1_314b.py, performance mode: MegatronTokenDropCallback.

    Its defaults are a capacity of 1.0, padded. Rows of NeMo 24.09 state it in words; a user's own row of a NeMo 2 may train
    without the recipe.
    """
    mapped = row_plan.to_config(SHIPPED["DGXC-285"])
    assert at(mapped.config, "model.moe.capacity_factor") == 1.0
    assert at(mapped.config, "model.moe.pad_to_capacity") is True
    assert "capacity_factor: 1, padded, as in the recipe" in mapped.assumed
    stated = row_plan.to_config(SHIPPED["DGXC-011"])
    assert at(stated.config, "model.moe.capacity_factor") == 1.0
    assert not any("recipe" in assumption for assumption in stated.assumed)
    mine = own(framework="NeMo 2.0 25.04", n_experts=8, topk=2, moe_ffn_hidden=14336, ep=8, tp=1, pp=1)
    assert at(row_plan.to_config(mine).config, "model.moe.capacity_factor") is None


def test_local_batches_of_a_row_with_a_pipeline():
    """Kimi K2: 512 sequences over dp 32 are two local batches of 8; DeepSeek-V3's 512 over dp 64 are one."""
    kimi, deepseek = (row_plan.to_config(SHIPPED[f"AUTOMODEL-{name}"]).config for name in ("006", "005"))
    assert (at(kimi, "parallelism.pipeline_passes"), at(kimi, "parallelism.fsdp.no_sync")) == (2, False)
    assert (at(deepseek, "parallelism.pipeline_passes"), at(deepseek, "parallelism.fsdp.no_sync")) == (None, None)


def test_forced_balance_of_torchtitan_is_experts_in_turn():
    """Eight experts of a token on one rank of 8 or 16 experts; an all-to-all sends a copy for each expert wherever they are."""
    for name, limit in {"nous-torchtitan-n002": 1, "torchtitan-pr-n028": 1, "torchtitan-pr-n029": None}.items():
        assert at(row_plan.to_config(SHIPPED[name]).config, "model.moe.node_limit") == limit


def test_deepep_of_the_guide_to_deepseek_v3_on_gb200():
    """400 GB/s in dispatch and 190 in combine of what a rank receives: 1.25 and 2.63 ms for 500 MB, 3.88 ms for the two.

    Of 900 GB/s, with 31/32 of the bytes: 1 GB * 31/32 / 3.882 ms / 900 GB/s = 0.277. The layout of its note: an embedding and
    one layer, 30 chunks of two, the loss alone.
    """
    mapped = {name: row_plan.to_config(SHIPPED[f"DSV3-GB200-{name}"]).config for name in ("003", "004", "011")}
    rates = {name: at(config, "hardware.overrides") for name, config in mapped.items()}
    assert rates == {"003": None, "004": {"tiers.0.exchange_efficiency": 0.277}, "011": None}
    assert at(mapped["011"], "parallelism.layers_per_stage") == [1, *[2] * 30, 0]
