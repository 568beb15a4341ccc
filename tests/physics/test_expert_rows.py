"""Rows of experts, and what a router keeps of them: 8 tokens of 128 values to 2 of 8 experts of 64, fp32 probabilities."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.job.assembly import Assembly
from steptime.job.parts import Part
from steptime.timing.part_times import launches

MOE = {"n_experts": 8, "expert_inter_sz": 64, "experts_per_token": 2}


def layer(moe=None, *, biased=False, **said) -> Part:
    """A layer with such experts."""
    return Assembly(job(model={"moe": MOE | (moe or {}), "n_q_heads": 2, "bias": biased}, **said)).kinds[0]


@pytest.mark.parametrize(
    ("layout", "experts", "rows"),
    [
        ({}, 8, 2),  # 8 * 2 rows for 8 experts
        ({"dp": 2, "ep": 2}, 4, 4),  # 16 rows of either rank, half to each
        (
            {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
            4,
            4,
        ),  # the same of either pair, of which each rank computes all, half as wide
        ({"tp": 2, "ep": 2, "etp": 1}, 4, 2),  # the pair has one sequence, 4 tokens a rank: 16 rows over both
    ],
)
def test_rows_of_an_expert(layout, experts, rows):
    """Ranks of etp gather what arrives at each of them (megatron/core/transformer/moe/token_dispatcher.py)."""
    [up] = [op for op in layer(microbatches=2, **layout).ops if op.name == "experts.up"]
    assert (up.count, up.m) == (experts, rows)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({}, 128 + 2 * 8 * 4),  # softmax of the chosen logits
        ({"pre_softmax": True}, 128 + 8 * 8 * 4),  # of all experts'
        ({"score_function": "sigmoid"}, 128 + 8 * 8 * 4 + 8 * 3 * 4),  # every score, the chosen ones and their sum
        ({"score_function": "sigmoid", "experts_per_token": 1}, 64 + 8 * 8 * 4),  # one score is not divided by a sum
    ],
)
def test_what_the_choice_of_experts_keeps(said, kept):
    """Indices of 8 bytes, and scores of 4 (moe_utils.py, topk_routing_with_score_function): autograd keeps the outputs of softmax
    and sigmoid, and both operands of the division.
    """
    [choice] = [op for op in layer(said).ops if op.name == "moe.top_k"]
    assert sum(t.bytes for t in choice.stats) == kept


def test_shared_experts_quantize_their_input_themselves():
    """fp8: 8 * 128 elements read in bf16 and written by rows and by columns, 2 + 1 + 1 bytes each; the columns are kept."""
    on = machine(peak_flops={"bf16": 1.0, "fp32": 1.0, "fp8": 1.0})
    part = layer({"n_shared_experts": 1}, on=on, performance={"precision": "fp8_delayed"})
    [cast] = [op for op in part.ops if op.name == "shared.cast"]
    [first] = [op for op in part.ops if op.name == "shared.gate_up"]
    assert cast.forward_bytes == 4 * 8 * 128
    assert [part.sizes[name] for name in first.saves] == [8 * 128]


@pytest.mark.parametrize(("tp", "ep", "experts", "width"), [(2, 1, 8, 32), (2, 2, 4, 64), (1, 2, 4, 64)])
def test_torchtitan_splits_experts_or_spreads_them(tp, ep, experts, width):
    """On one rank of ep, tensor parallelism cuts each expert's 64 columns; over several, each expert is whole (enable_ep)."""
    on = {"tp": tp, "dp": 2, "ep": ep}
    [up] = [
        op
        for op in Assembly(job("fsdp2", model={"moe": MOE, "n_q_heads": 2}, **on)).kinds[0].ops
        if op.name == "experts.up"
    ]
    assert (up.count, up.n) == (experts, width)


def test_torchtitan_copies_rows_in_two_kernels():
    """The tokens' numbers, positions divided by k, and 16 rows of 256 bytes read and written."""
    [permute] = [op for op in Assembly(job("fsdp2", model={"moe": MOE})).kinds[0].ops if op.name == "moe.permute"]
    assert (permute.kernels, permute.forward_bytes) == (2, 2 * 16 * 256)


def test_gradients_of_rows_that_torchtitan_gathers():
    """16 rows of 256 bytes, 128 elements, of 8 tokens. Backward of x[indices]: the rows are read; the 8 rows of the sum are
    written as zeros, read and written. The kernel that adds reads an element of the row and one of the sum and writes the sum:
    three accesses for each of 16 * 128 elements, where a kernel without vector loads has two. On two ranks of ep, a rank's 16 of
    the 32 rows are put in the order of its experts, and go back without a sum.
    """
    [permute] = [op for op in Assembly(job("fsdp2", model={"moe": MOE})).kinds[0].ops if op.name == "moe.permute"]
    assert permute.backward_bytes == 16 * 256 + 3 * 8 * 256
    assert permute.backward_by_element == (1.5 * 16 * 128, 16 * 256 + 2 * 8 * 256)
    spread = Assembly(job("fsdp2", model={"moe": MOE}, dp=2, ep=2)).kinds[0].ops
    [sort] = [op for op in spread if op.name == "moe.local_permute"]
    assert (sort.backward_bytes, sort.backward_by_element) == (4 * 16 * 256, (1.5 * 16 * 128, 3 * 16 * 256))
    [back] = [op for op in spread if op.name == "moe.local_unpermute"]
    assert back.backward_bytes == 2 * 16 * 256


def test_compiled_gradients_of_gathered_rows():
    """Compiled on Hopper and later, they are atomic additions: 16 rows of 256 bytes read, the sums read and written."""
    compiled = job("fsdp2", model={"moe": MOE}, performance={"compile": "all"})
    [permute] = [op for op in Assembly(compiled).kinds[0].ops if op.name == "moe.permute"]
    assert (permute.backward_bytes, permute.backward_by_element.elements) == (3 * 16 * 256, 0)


@pytest.mark.parametrize(("dtype", "bytes_", "kernels"), [("fp32", 28, 18), ("compute", 12, 17)])
def test_biases_of_experts_times_probabilities(dtype, bytes_, kernels):
    """Of each of 16 rows of 128: a product written 4, a sum that reads it and the bf16 row and writes 4 + 2 + 4, the experts'
    sums put together 4 + 4, cast 4 + 2. With bf16 probabilities all are 2 and nothing is cast. Two kernels for each of 8
    experts (megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias), which run without a pause: as long a gap as two.
    """
    part = layer(performance={"moe": {"router_dtype": dtype}}, biased=True)
    [bias] = [op for op in part.ops if op.name == "experts.bias"]
    assert (bias.forward_bytes, bias.kernels, launches(bias)) == (bytes_ * 16 * 128, kernels, kernels - 14)


def test_torchtitan_weighs_rows_in_fp32():
    """16 rows of 128, an element. Forward: upcast 2 + 4, product 4 + 4, downcast 4 + 2: 20. Backward: the gradient upcast 2 + 4,
    its products with the score 4 + 4 and with the row 4 + 4 + 4, a sum that reads 4, downcast 4 + 2: 36. Kept is the fp32 row.
    """
    [weigh] = [op for op in Assembly(job("fsdp2", model={"moe": MOE})).kinds[0].ops if op.name == "moe.weigh"]
    assert (weigh.forward_bytes, weigh.backward_bytes, weigh.kernels) == (20 * 16 * 128, 36 * 16 * 128, 3)
    assert (weigh.forward_temp_bytes, weigh.backward_temp_bytes) == (4 * 16 * 128, (3 * 4 - 2 * 2) * 16 * 128)


@pytest.mark.parametrize(
    ("moe", "kept"),
    [
        ({}, {}),
        # fp32 scores of 8 experts for 8 tokens and the loss; tokens of each expert in 64 bits, for each sequence
        ({"load_balancing": "aux_loss"}, {"moe.loss.softmax": 4 * (8 * 8 + 1), "moe.loss.counts": 8 * 8}),
        ({"load_balancing": "seq_aux_loss"}, {"moe.loss.softmax": 4 * (8 * 8 + 1), "moe.loss.counts": 8 * 8}),
        # a token's scores and their sum
        (
            {"load_balancing": "aux_loss", "score_function": "sigmoid"},
            {"moe.loss.scores": 4 * (8 * 9 + 1), "moe.loss.counts": 8 * 8},
        ),
        ({"z_loss": True}, {"moe.z_loss": 4 * (8 * 9 + 1)}),
    ],
    ids=str,
)
def test_what_losses_of_a_router_keep(moe, kept):
    """Megatron-Core's moe_utils.py, switch_load_balancing_loss_func and z_loss_func, on the router's fp32 scores."""
    part = layer(moe, performance={"moe": {"router_dtype": "fp32"}})
    saved = {name for op in part.ops for name in op.saves if name.startswith(("moe.loss", "moe.z_loss"))}
    assert {name: part.sizes[name] for name in saved} == kept


def test_activations_of_a_router_in_fp32():
    """Autocast copies the input of 8 tokens to 4,096 B of fp32, and the weight of 8 experts; the product keeps both copies. The
    gradient of the input's copy is one of activations, that of the weight's is counted as the parameter's.
    """
    part = Assembly(job("fsdp2", model={"moe": MOE}, performance={"moe": {"router_dtype": "fp32"}})).kinds[0]
    [router] = [op for op in part.ops if op.name == "moe.router"]
    assert sum(part.sizes[name] for name in router.inputs) == 4 * 8 * 128
    assert sum(part.sizes[name] for name in router.saves) == 4 * (8 + 8) * 128
    assert [p.elements for p in router.params] == [8 * 128]


def test_shared_experts_have_no_biases():
    """Gate, up and down of 64, 3 * 128 * 64 parameters, in a model whose other projections have biases: Megatron-Core allows none
    (megatron/core/transformer/moe/shared_experts.py, SharedExpertMLP).
    """
    part = layer({"n_shared_experts": 1}, biased=True)
    mine = [op for op in part.ops if op.role == "shared_experts"]
    assert sum(p.elements for op in mine for p in op.params) == 3 * 128 * 64
