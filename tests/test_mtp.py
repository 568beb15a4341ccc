"""Multi-token prediction: parameters and FLOPs as published, and where its modules lie, in numbers worked out by hand."""

import jobs
import pytest

from steptime import estimate
from steptime.job.assembly import Assembly
from steptime.model.hf import read_hf_config

SMALL = {"n_layers": 4, "hidden_sz": 1024, "inter_sz": 4096, "n_q_heads": 8, "vocab_sz": 51200}


job = jobs.usually(gbs=128, hardware="hgx-h800", dp=64)


def small(mtp, performance=None, *, repeated=False, **parallelism):
    return estimate(job(SMALL | {"mtp": mtp, "mtp_repeated": repeated}, performance, dp=2, **parallelism))


def deepseek(mtp):
    return estimate(job({"preset": "deepseek-v3", "mtp": mtp}, ep=64))


def test_parameters_of_deepseek_v3():
    """11.6 B unique ones (published: 11.5 B), by hand, with h = 7168, 128 heads, ranks 1536 and 512, widths 128 + 64 and 128:

    attention 1536 h + 1536 + 128 * 192 * 1536 + 576 h + 512 + 128 * 256 * 512 + h * 128 * 128 = 187,107,328;
    experts 257 * 3 * 2048 h = 11,318,329,344, their router 256 h = 1,835,008; two norms of the layer, three more, 2 h^2.
    (deepseek-ai/DeepSeek-V3 README_WEIGHTS.md)
    """
    h = 7168
    layer = 187_107_328 + 11_318_329_344 + 1_835_008 + 2 * h
    more = deepseek(1).params.total - deepseek(0).params.total
    assert more == layer + 3 * h + 2 * h * h
    assert more == pytest.approx(11.5e9, rel=0.01)


def test_parameters_of_glm_4_5():
    """355 B with the layer of prediction and without both ends (arXiv 2508.06471, table 1)."""
    found = estimate(job({"preset": "glm-4.5", "mtp": 1}, ep=32)).params.total - 2 * 151_552 * 5120
    assert round(found / 1e9) == 355


@pytest.mark.parametrize(("mtp", "gflops"), [(0, 249.81), (1, 259.99)])
def test_flops_of_deepseek_v3_are_those_that_megatron_counts(mtp, gflops):
    """GFLOP per token at 4,096 tokens, of Megatron-LM's num_floating_point_operations, without routers: 6 * 256 h each."""
    per_token = deepseek(mtp).flops.model_per_step / (128 * 4096)
    routers = 6.0 * 256 * 7168 * (58 + mtp)
    assert (per_token - routers) / 1e9 == pytest.approx(gflops, abs=0.006)


def test_the_last_stage_holds_the_modules_and_a_copy_of_the_embedding():
    """Of each depth a layer, 4 h^2 + 3 h * 4096 + 2 h, and 2 h^2 + 3 h; once the embedding."""
    plain, ahead = small(0, pp=2).params, small(2, pp=2).params
    h, embedding = 1024, 1024 * 51200
    depth = 4 * h * h + 3 * h * 4096 + 2 * h + 2 * h * h + 3 * h
    assert ahead.tied_copies == embedding
    assert ahead.total - plain.total == 2 * depth
    assert [a - b for a, b in zip(ahead.per_stage, plain.per_stage, strict=True)] == [0, 2 * depth + embedding]
    assert small(2).params.tied_copies == 0


def test_depths_that_repeat_one_layer_run_twice_and_weigh_once():
    """Parameters of one depth, products and kept activations of two; the gradient of a depth waits for the other's."""
    one, two, repeated = small(1), small(2), small(2, repeated=True)
    assert repeated.params.total == one.params.total
    assert repeated.flops == two.flops
    assert repeated.memory.stages[0].activations_bytes == two.memory.stages[0].activations_bytes
    states = [e.memory.stages[0].params_bytes + e.memory.stages[0].gradients_bytes for e in (one, repeated)]
    assert states[0] == states[1]


def test_the_copy_is_reduced_between_the_ends():
    rows = [row for row in small(1, pp=2).collectives if row.axis == "embedding"]
    assert [(row.kind, row.ranks, row.bytes) for row in rows] == [("all_reduce", 2, 4.0 * 1024 * 51200)]
    assert not [row for row in small(1).collectives if row.axis == "embedding"]


def test_recomputation_runs_the_modules_again():
    """Selective and full recomputation repeat the module's layer, block does not; its head never runs again."""

    def replayed(**recompute):
        found = small(1, {"recompute": recompute}, pp=2)
        rows = [row for row in found.gemms if row.name.startswith("mtp.1.") and row.pass_ == "forward"]
        plain = min(row.count_per_step for row in rows)
        return {row.name.removeprefix("mtp.1.") for row in rows if row.count_per_step > plain}

    assert replayed(granularity="selective", modules=["mlp"]) == {"mlp.gate_up", "mlp.down"}
    whole = replayed(granularity="full", method="uniform", n_layers=1)
    assert whole == {"eh_proj", "attn.qkv", "attn.proj", "mlp.gate_up", "mlp.down"}
    assert replayed(granularity="full", method="block", n_layers=1) == set()


def test_tokens_at_the_ends_of_a_rank_go_to_its_neighbors():
    """Ids and positions, then labels and mask: 8 sends of 8 bytes a depth and micro-batch."""
    rows = [
        row
        for row in small(1, cp=2).collectives
        if row.kind == "send_recv" and row.name.startswith("mtp.") and row.bytes < 1e3
    ]
    assert [(row.bytes, row.count_per_step) for row in rows] == [(8.0, 64 * 4.0), (8.0, 64 * 4.0)]


def test_hugging_face_says_the_depth(tmp_path):
    config = (
        '{"model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,'
        '"num_attention_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2,'
        '"q_lora_rank": 24, "kv_lora_rank": 16, "num_nextn_predict_layers": %s}'
    )
    for said, depth in (("1", 1), ("0", None), ("null", None)):
        (tmp_path / "config.json").write_text(config % said)
        assert read_hf_config(tmp_path).get("mtp") == depth


@pytest.mark.parametrize(
    ("mtp", "counts"),
    [
        (0, [3, *[4] * 13, 3, 3]),  # 61 = 16 * 3 + 13
        (1, [3, *[4] * 14, 2]),  # 62 = 16 * 3 + 14, of which the last has one ahead
        (2, [4, *[4] * 14, 1]),  # 63 = 16 * 3 + 15, of which the last has two
    ],
)
def test_layers_per_stage_auto_counts_depths_as_layers_of_the_last_stage(mtp, counts):
    """DeepSeek-V3's 61 layers over 16 stages."""
    plan = job({"preset": "deepseek-v3", "mtp": mtp}, pp=16, dp=8, ep=8, layers_per_stage="auto")
    assert plan.layers_per_chunk == counts


def test_a_depth_keeps_what_it_joins_and_its_loss():
    """Of 4,096 tokens: states and embeddings side by side, twice 1,024 values in bf16, which the projection keeps; a mask and a
    scaled loss in fp32, and the number of tokens. Five kernels make the loss (mask, sum, division for the log, factor, division;
    megatron/core/models/gpt/gpt_model.py, _postprocess), each of which reads and writes 4 bytes a token.
    """
    head = Assembly(job(SMALL | {"mtp": 1})).head
    ops = {op.name: op for op in head.ops}
    assert [head.sizes[name] for name in ops["mtp.1.eh_proj"].saves] == [4096 * 2 * 1024 * 2]
    scale = ops["mtp.1.loss.scale"]
    assert sum(t.bytes for t in scale.stats) == 2 * 4096 * 4 + 4
    assert (scale.kernels, scale.forward_bytes) == (5, 5 * 2 * 4096 * 4)


def test_the_joined_states_are_projected_by_columns_and_gathered():
    """tp 2 of 1,024: 512 columns each, put together to 4,096 tokens of 1,024 in bf16, 8 MiB, read and written in order; backward
    this rank's half. With sp it goes on with its 2,048 tokens.
    """
    head = Assembly(job(SMALL | {"mtp": 1}, tp=2, dp=32)).head
    ops = {op.name: op for op in head.ops}
    whole = 4096 * 1024 * 2
    assert ops["mtp.1.eh_proj"].n == 512
    assert ops["mtp.1.eh_proj.collect"].bytes == head.sizes["mtp.1.eh_proj.parts"] == whole
    order = ops["mtp.1.eh_proj.order"]
    assert (order.forward_bytes, order.backward_bytes) == (2 * whole, whole)
    assert [t.bytes for t in order.outputs] == [whole / 2, whole / 2]
