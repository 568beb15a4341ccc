"""The PyTorch-native stack by hand: compiled and chunked losses, checkpointing per op, casts of torchao, what the host needs."""

import re

import pytest

from steptime import Job, estimate
from steptime.cost import compute
from steptime.cost.compute import gemm_pass
from steptime.cost.host import launch_host_s
from steptime.cost.part_seconds import part_time
from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories
from steptime.model.ops import Gemm, Move
from steptime.software.performance import load_software
from steptime.timing.part_times import pricing

TOKENS, HIDDEN, INTER, KV, VOCAB, LAYERS, HEADS = 8192, 4096, 14336, 1024, 128256, 32, 32
"""Llama-3 8B at micro-batch 1 of 8,192 tokens."""


def llama(**performance):
    return estimate(
        Job(
            model="llama3-8b",
            parallelism={"tp": 1, "pp": 1, "dp": 8, "fsdp": {}},
            data={"gbs": 8, "seqlen": TOKENS, "microbatch_sz": 1},
            performance={"software": "torchtitan@0.2", **performance},
            hardware="grand-teton-h100",
        )
    )


def moves(found, name):
    """Forward and backward bytes of a memory-bound op of the head."""
    [op] = [op for op in found.assembly.head.ops if op.name == name]
    return op.forward_bytes, op.backward_bytes


def test_a_compiled_loss_reads_the_logits_once_and_again_for_their_gradient():
    """T V logits of 2 bytes: read forward; read, and their gradient written, backward."""
    logits = TOKENS * VOCAB * 2
    assert moves(llama(compile="all"), "loss") == (logits, 2 * logits)


def test_an_eager_loss_moves_as_much_in_chunks_and_holds_an_eighth():
    """Upcast: 2 + 4 bytes each way. Log-softmax: 4 + 4 forward; its output, its gradient and the logits' gradient backward."""
    logits = TOKENS * VOCAB
    whole, chunked = llama(), llama(loss_chunks=8)
    for found in (whole, chunked):
        assert moves(found, "loss.cast") == (6 * logits, 6 * logits)
        assert moves(found, "loss.log_softmax") == (8 * logits, 12 * logits)
    assert whole.assembly.head.sizes["head.logits"] == 2 * logits
    assert chunked.assembly.head.sizes["head.logits"] == 2 * logits / 8
    [gemm] = [op for op in chunked.assembly.head.ops if isinstance(op, Gemm)]
    assert (gemm.m, gemm.count, gemm.flops) == (TOKENS / 8, 8, 2 * logits * HIDDEN)


def test_what_per_op_checkpointing_keeps_of_a_layer():
    """Input, q, v, gate and down of the products, attention's output and its log-sum-exp; compiled without down's output."""
    kept = TOKENS * (2 * (HIDDEN + HIDDEN + KV + INTER + HIDDEN + HIDDEN) + 4 * 32)
    eager = llama(activation_checkpointing_type="per-op")
    compiled = llama(activation_checkpointing_type="per-op", compile="all")
    ends = [found.memory.stages[0].activations_bytes for found in (eager, compiled)]
    # both ends of the model keep the same, but for the loss: compare layers through a model of one layer less
    fewer = llama_layers(LAYERS - 1, activation_checkpointing_type="per-op")
    assert ends[0] - fewer.memory.stages[0].activations_bytes == pytest.approx(kept)
    fewer = llama_layers(LAYERS - 1, activation_checkpointing_type="per-op", compile="all")
    assert ends[1] - fewer.memory.stages[0].activations_bytes == pytest.approx(kept - TOKENS * 2 * HIDDEN)


def llama_layers(layers, **performance):
    return estimate(
        llama(**performance).assembly.job.replace(**{"model.preset": "llama3-8b", "model.n_layers": layers})
    )


def test_per_op_checkpointing_runs_k_o_and_up_again():
    """Of seven products those of even place: 2 T h (KV + h + INTER) FLOPs a layer, without attention, which is kept."""
    found = llama(activation_checkpointing_type="per-op")
    plain = llama()
    again = 2 * TOKENS * HIDDEN * (KV + HIDDEN + INTER) * LAYERS * 8
    assert found.flops.hardware_per_step - plain.flops.hardware_per_step == pytest.approx(again)


def test_a_traced_graph_keeps_every_product_that_backward_or_the_replay_reads():
    """Input, q, k, v, output projection, gate and up, attention's output and log-sum-exp; no product runs again.

    down's output is read by the next layer alone (GraphTrainer, memory_policy.py@27aa4907, _make_default_memory_policy).
    """
    recompute = {"granularity": "selective", "modules": ["per_op_all"]}
    found, plain = llama(recompute=recompute), llama()
    fewer = llama_layers(LAYERS - 1, recompute=recompute)
    kept = TOKENS * (2 * (HIDDEN + HIDDEN + 2 * KV + HIDDEN + 2 * INTER + HIDDEN) + 4 * 32)
    held = [each.memory.stages[0].activations_bytes for each in (found, fewer)]
    assert held[0] - held[1] == pytest.approx(kept)
    assert found.flops.hardware_per_step == plain.flops.hardware_per_step


def layer_saved(assembly):
    """Bytes that the last layer keeps for backward."""
    (*_, (_, _, memory)) = PartMemories(assembly).resident(assembly.chunks[0])
    return memory.saved


def test_all_to_alls_run_again_before_september_2025():
    """ep 2, 64 tokens to 2 of 4 experts each, 128 rows of 32 in bf16 there and back: 2 x 128 x 32 x 2 B = 16,384 B a layer are
    not kept (torchtitan before pull request 1672), and the dispatch and the combination of each layer run twice before their
    backward.
    """

    def found(policy):
        return estimate(
            Job(
                model={
                    "n_layers": 2, "hidden_sz": 32, "inter_sz": 64, "n_q_heads": 4, "n_kv_heads": 4, "vocab_sz": 64,
                    "glu": True, "norm": "rmsnorm", "bias": False, "tie_embeddings": False,
                    "moe": {"n_experts": 4, "experts_per_token": 2, "expert_inter_sz": 16, "imbalance_factor": 1.0},
                },
                parallelism={"tp": 1, "pp": 1, "dp": 4, "ep": 2, "fsdp": {}},
                performance={"software": "torchtitan", "recompute": {"granularity": "selective", "modules": [policy]}},
                data={"gbs": 4, "seqlen": 64, "microbatch_sz": 1},
                hardware="dgx-h100",
            )
        )  # fmt: skip

    kept, again = found("per_op"), found("per_op_resend")
    held = [layer_saved(each.timing.assembly) for each in (kept, again)]
    assert held[0] - held[1] == 16_384
    counts = [{row.name: row.count_per_step for row in each.collectives} for each in (kept, again)]
    for name in ("moe.dispatch", "moe.combine"):
        assert [each[name] for each in counts] == [2, 4]


def test_attention_runs_again_where_the_list_lacks_its_kernel():
    """With per_op, core_attn says so (cuDNN's kernel, torchtitan before pull request 2095).

    Of each token its output, 2 B for each element of the hidden size, and its log-sum-exp, 4 B for each head, are not kept.
    """
    every = (["per_op"], ["per_op", "core_attn"])
    kept, again = (llama(recompute={"granularity": "selective", "modules": modules}) for modules in every)
    held = [layer_saved(found.timing.assembly) for found in (kept, again)]
    assert held[0] - held[1] == TOKENS * (2 * HIDDEN + 4 * HEADS)


def test_compiled_per_op_checkpointing_does_not_run_down_again():
    """Of seven products k, o and up run again as in eager torch; down's output is neither kept nor needed."""
    found, plain = (llama(compile="all", activation_checkpointing_type=word) for word in ("per-op", "none"))
    again = 2 * TOKENS * HIDDEN * (KV + HIDDEN + INTER) * LAYERS * 8
    assert found.flops.hardware_per_step - plain.flops.hardware_per_step == pytest.approx(again)


def test_every_other_layer_runs_again():
    """Half of the layers, whole but for nothing: torchtitan's early_stop is off."""
    every = llama(recompute={"granularity": "full", "method": "every", "n_layers": 2})
    full, plain = llama(activation_checkpointing_type="full"), llama()
    extra = [found.flops.hardware_per_step - plain.flops.hardware_per_step for found in (every, full)]
    assert extra[0] == pytest.approx(extra[1] / 2)
    held = [found.memory.stages[0].activations_bytes for found in (plain, every, full)]
    assert held[0] > held[1] > held[2]


@pytest.mark.parametrize(("budget", "dropped"), [(1.0, 0), (0.95, 2 * HIDDEN + INTER), (0.7, 2 * HIDDEN + INTER)])
def test_a_memory_budget_drops_what_is_element_wise(budget, dropped):
    """Both norms' outputs and the product of the activation; sums of rows stay, and so does what products and attention made."""
    found = llama(compile="all", recompute={"granularity": "selective", "memory_budget": budget})
    whole = llama(compile="all")
    saved = whole.memory.stages[0].activations_bytes - found.memory.stages[0].activations_bytes
    assert saved == pytest.approx(2 * TOKENS * dropped * LAYERS)


@pytest.mark.parametrize(
    ("software", "tp", "changes", "seconds"),
    [
        ("megatron-core", 1, {}, 1.0),
        ("megatron-core", 8, {}, 1.0),
        ("torch", 1, {}, 1.0),
        ("torch", 2, {}, 2.5),
        ("torch", 2, {"compile": "blocks"}, 0.47),
        ("torch", 1, {"cuda_graphs": True}, 0.0),
    ],
)
def test_what_the_host_needs_for_a_launch(software, tp, changes, seconds):
    """Of 1 s in eager torch: DTensors take 2.5, compiled code 0.47, CUDA graphs nothing."""
    assert launch_host_s(load_software(software).replace(host_kernel_s=1.0, **changes), tp) == seconds


@pytest.mark.parametrize(
    ("software", "machine", "seconds"),
    [
        ("megatron-core", "aws-p5.48xlarge", 240e-6),
        ("megatron-core", "aws-p6-b300.48xlarge", 160e-6),
        ("megatron-core", "dgx-h100", 105e-6),
        ("megatron-bridge", "dgx-h100", 80e-6),
        ("nemo", "dgx-h100", 80e-6),
    ],
)
def test_a_machine_says_how_much_longer_its_hosts_take(software, machine, seconds):
    """80 us a launch where processes are bound to cores, 105 where they are not, as on AWS: 2.286 times that on p5 is 240."""
    assert launch_host_s(load_software(software).on(Machine.load(machine)), 8) == pytest.approx(seconds, rel=3e-3)


def test_grouped_products_of_torch_on_blackwell_run_at_their_measured_share_of_the_peak():
    """0.36 of 2,250 TFLOP/s is 810: of 8 groups of 16,000 rows 753 to 854 were measured. Elsewhere they run as dense ones do."""
    experts = Gemm("experts.up", m=16000.0, n=2048.0, k=7168.0, count=8.0, grouped=True)
    b200 = rates(Machine.load("dgx-b200").accelerator, load_software("fsdp2").replace(compute_factor=1.0))
    alone = gemm_pass(experts, b200, experts.m, experts.n, experts.k, 0.0)
    long = 810e12 / 1088e12 * b200.gemm_flops
    rows, depth = 16000 / 16120, 7168 / 7368
    assert experts.flops / long / rows / depth <= alone.compute_s <= experts.flops / long / rows / depth / 0.95
    for machine, profile in (("dgx-h100", "fsdp2"), ("dgx-b200", "megatron-core")):
        assert rates(Machine.load(machine).accelerator, load_software(profile)).grouped_share == 1.0


@pytest.mark.parametrize(
    ("software", "sequences", "changes", "copies"),
    [
        ("torchtitan", 16, {}, True),
        ("torchtitan", 1, {}, False),
        ("torchtitan", 16, {"compile": "blocks"}, False),
        ("megatron-core", 16, {}, False),
    ],
)
def test_dtensor_copies_what_it_gathers_along_the_sequence(software, sequences, changes, copies):
    """Llama-2 7B, tp 2, 16 sequences of 2,048: 268 MB are read and written around each of a layer's four collectives."""
    job = Job(
        model="llama2-7b",
        parallelism={"tp": 2, "pp": 1, "dp": 4, "sp": True},
        data={"gbs": 64, "seqlen": 2048, "microbatch_sz": sequences},
        performance={"software": software, **changes},
        hardware="grand-teton-h100",
    )
    context, layer = pricing(job).context, Assembly(job).kinds[0]
    full, rates_ = sequences * 2048 * 4096 * 2, pricing(job).context.rates
    each = 2 * full / rates_.bytes_per_s + rates_.move_kernel_s if copies else 0.0
    moves = sum(compute.forward(op, context.rates, layer.sizes).time_s for op in layer.ops if isinstance(op, Move))
    forward = part_time(layer.ops, layer.sizes, context, []).forward
    assert forward.memory_s == pytest.approx(moves + 4 * each)


def test_a_step_that_waits_for_its_host_says_so():
    """GPT-2 small at one sequence of 128 tokens: 12 layers of some 50 launches of 50 us are 30 ms, its kernels under 5."""
    job = Job(
        model="gpt2-small",
        parallelism={"tp": 1, "pp": 1, "dp": 1},
        data={"gbs": 1, "seqlen": 128, "microbatch_sz": 1},
        performance={"software": "torch"},
        hardware="dgx-h100",
    )
    found = estimate(job)
    [line] = [line for line in found.assumptions if line.startswith("host-bound")]
    assert re.match(
        r"host-bound: the device waits for kernel launches during \d\d % of the step \(part of the launch gaps\); larger ",
        line,
    )
    assert found.time.parts_s["launch"] > found.step_s / 2
    assert not any(line.startswith("host-bound") for line in llama().assumptions)
