"""Activations that wait in the host's memory: what stays, what comes back when, and seconds, in numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import jobs
import pytest

from steptime.answer.result import estimate
from steptime.commands.cli import main
from steptime.cost.comm import CommCost
from steptime.cost.part_seconds import host_copy
from steptime.job.assembly import Assembly
from steptime.launch.read import read
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.op_walk import BackwardWalk, kept_by_part
from steptime.memory.part_memories import PartMemories, with_more
from steptime.model.offload import groups
from steptime.model.ops import Gemm
from steptime.model.segments import find_segments

# a layer of Llama-3 8B: 4096 tokens of h 4096 in bf16 are 32 MiB; q 32, k and v 8 each, the output 32
MIB = 2.0**20
ALL = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]


def offloading_job(modules, performance=None, **parallelism):
    said = {"offload_modules": modules} if modules else {}
    return jobs.job("llama3-8b", performance=said | (performance or {}), **parallelism)


def layer(of):
    assembly = Assembly(of)
    return PartMemories(assembly).selective[assembly.kinds[0]]


@pytest.mark.parametrize(
    ("modules", "gone"),
    [
        (["attn_norm"], 32),  # the layer's input
        (["qkv_linear"], 32),  # the norm's output, which the projection keeps
        (["core_attn"], 32 + 8 + 8),  # q, k and v; the output is kept by the output projection too
        (["core_attn", "attn_proj"], 32 + 8 + 8 + 32),
        (["mlp_norm"], 32),  # what attention leaves
        (ALL, 4 * 32 + 8 + 8 + 32),
    ],
)
def test_what_leaves_the_device(modules, gone):
    """Sums of rows are below 2^20 elements, and stay (min_offloaded_tensor_size)."""
    assert layer(offloading_job(None)).saved - layer(offloading_job(modules)).saved == gone * MIB


def test_small_tensors_stay():
    """255 tokens of h 4096 are 1,044,480 elements, fewer than 2^20; 256 are as many."""
    few, enough = (
        layer(jobs.job("llama3-8b", seqlen=n, performance={"offload_modules": ["attn_norm"]})).ahead for n in (255, 256)
    )
    assert (few, enough) == (0, 256 * 4096 * 2)


def test_a_storage_that_two_ops_keep_comes_back_twice():
    """q, k, v and the output by the kernel, the output by the projection again: 32 + 8 + 8 + 32 + 32 MiB."""
    assert layer(offloading_job(["core_attn", "attn_proj"])).ahead == 112 * MIB


def test_a_discarded_output_is_sent_too_and_nothing_is_gained():
    """The norm's output is made again in backward, but was sent when the projection saved it: a copy of 32 MiB comes back."""
    again = {"recompute": {"granularity": "selective", "modules": ["layernorm"]}}
    assert layer(offloading_job(["qkv_linear"], again)).ahead == 32 * MIB
    assert layer(offloading_job(["qkv_linear"], again)).saved == layer(offloading_job(None, again)).saved
    assert (
        layer(offloading_job(["qkv_linear"], again)).backward.bytes
        >= layer(offloading_job(None, again)).backward.bytes + 32 * MIB
    )
    assert layer(offloading_job(["attn_norm"], again)).ahead == 32 * MIB


def test_a_copy_is_made_of_what_another_module_keeps():
    """The attention's output, 32 MiB, stays for the output projection; q, k, v and the output, 80 MiB, are sent and come back."""
    assert layer(offloading_job(["core_attn"])).ahead == 80 * MIB


@pytest.mark.parametrize(("tokens", "sent"), [(1024, 0), (2048, 4096 * 4096 * 2)])
def test_rows_of_an_expert_below_the_least_size_keep_the_input_of_all(tokens, sent):
    """Mixtral, 2 of 8 experts: of 1024 tokens 256 rows of h 4096 an expert, 2^20 elements in the mean, so some have fewer."""
    model = {"preset": "mixtral-8x7b", "n_layers": 2}
    assembly = Assembly(jobs.job(model, seqlen=tokens, performance={"offload_modules": ["expert_fc1"]}))
    part = assembly.kinds[0]
    (group,) = groups(part.ops, part.x, [], frozenset({"expert_fc1"}))
    assert sum(part.sizes[copy.name] for copy in group.copies) == sent


def test_experts_send_what_their_products_and_activation_read():
    """Mixtral, 2 of 8 experts for 4096 tokens: 8192 rows of h 4096, and of 2 * 14336; ep 1, bf16."""
    model = {"preset": "mixtral-8x7b", "n_layers": 2}
    assembly = Assembly(jobs.job(model, performance={"offload_modules": ["expert_fc1", "moe_act"]}))
    part = assembly.kinds[0]
    sent = groups(part.ops, part.x, find_segments(part.ops, frozenset()), frozenset({"expert_fc1", "moe_act"}))
    sizes = {group.module.name: sum(part.sizes[copy.name] for copy in group.copies) for group in sent}
    assert sizes == {"expert_fc1": 8192 * 4096 * 2, "moe_act": 8192 * 2 * 14336 * 2}
    assert isinstance(part.ops[sent[0].module.commit], Gemm)


def test_a_pipeline_holds_a_layer_of_the_next_backward_beside_its_forward():
    """Stage 0 of 4 holds 4 micro-batches of 8 layers; of each 176 MiB a layer go, and one layer's copies are back: 208 MiB."""
    plain, away = (estimate(offloading_job(modules, pp=4, gbs=16)).memory.stages[0] for modules in (None, ALL))
    assert plain.activations_bytes - away.activations_bytes == pytest.approx(4 * 8 * 176 * MIB)
    assert away.allocated_bytes < plain.allocated_bytes - 4 * 8 * 176 * MIB + 1.5 * 208 * MIB


def test_copies_hide_under_a_layer_and_show_where_the_link_is_slower():
    """32 MiB of 32 layers and 8 micro-batches each way: 0.6 ms a layer, under its compute; at 0.5 GB/s 67 ms, less that."""
    fast = estimate(offloading_job(["attn_norm"]))
    assert fast.time.parts_s.get("host_comm", 0.0) == 0.0
    assert fast.time.hidden_s["host_comm"] == pytest.approx(2 * 8 * 32 * 32 * MIB / 55.6e9)
    slow = estimate(
        jobs.job(
            "llama3-8b",
            performance={"offload_modules": ["attn_norm"]},
            hardware={"node_type": "dgx-h100", "overrides": {"accelerator.host_bytes_per_s": 0.5e9}},
        )
    )
    hidden = sum(part.seconds for part in fast.timing.parts.layer[:2]) * 8 * 32
    assert slow.time.parts_s["host_comm"] == pytest.approx(2 * 8 * 32 * 32 * MIB / 0.5e9 - hidden)
    assert slow.step_s == pytest.approx(sum(slow.time.parts_s.values()))


def test_flags_of_megatron(tmp_path, capsys):
    """--fine-grained-activation-offloading and --offload-modules, and back as a script."""
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 32000 "
        "--fine-grained-activation-offloading --offload-modules core_attn attn_proj\n"
    )
    reading = read("megatron", str(script))
    assert reading.config["performance"]["offload_modules"] == ["core_attn", "attn_proj"]
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "model: llama3-8b\nparallelism: {tp: 1, pp: 1, dp: 8}\nperformance: {offload_modules: [mlp_norm]}\n"
        "data: {gbs: 8, seqlen: 4096, microbatch_sz: 1}\nhardware: {node_type: dgx-h100}\n"
    )
    assert main([str(plan), "--export", "megatron"]) == 0
    assert "--offload-modules mlp_norm" in capsys.readouterr().out.replace("\\\n", " ").replace("  ", " ")


def test_explained(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "model: llama3-8b\nparallelism: {tp: 1, pp: 1, dp: 8}\nperformance: {offload_modules: [mlp_norm]}\n"
        "data: {gbs: 8, seqlen: 4096, microbatch_sz: 1}\n"
        "hardware: {node_type: dgx-h100, overrides: {accelerator.host_bytes_per_s: 0.5 GB/s}}\n"
    )
    assert main(["explain", str(plan), "host_comm"]) == 0
    assert "32.0 MiB / 500 MB/s = 67.11 ms a layer" in " ".join(capsys.readouterr().out.split())


def test_nothing_but_the_inputs_gradient_is_left_after_backward():
    """Of what core attention and projection sent (112 MiB, the output twice) all is freed again: 32 MiB are the gradient of the
    layer's input. By then the preceding layer's 112 MiB have come back.
    """
    assembly = Assembly(offloading_job(["core_attn", "attn_proj"]))
    (part,) = assembly.kinds
    autograd = PartMemories(assembly).autograd_of(part)
    kept = kept_by_part(part.ops, part.x, frozenset(), autograd)
    walk = BackwardWalk(part.ops, kept.sizes, kept.segments, kept.names, autograd, kept.sent)
    *_, last = walk.steps(part.out)
    assert last.bytes == (32 + 112) * MIB


def test_what_is_back_from_the_host_lies_beside_both_passes():
    """3 bytes beside a forward's 12, 5 beside a backward's 14."""
    found = with_more(PartMemory(10.0, Peak(12.0, "a"), Peak(14.0, "b")), 3.0, 5.0)
    assert found == PartMemory(10.0, Peak(15.0, "a"), Peak(19.0, "b"))


def test_a_copy_to_the_host_takes_its_bytes_over_the_links_rate():
    """8 B at 2 B/s: 4 s, of which 1 s of compute hides as much, and slows nothing. No call has a latency of its own."""
    context = estimate(offloading_job(ALL)).timing.context
    found = host_copy("x", "offload", 8.0, replace(context, host_bytes_per_s=2.0), 1.0)
    assert (found.name, found.kind, found.bytes, found.axis) == ("x", "offload", 8.0, "host")
    assert found.cost == CommCost(0.0, 4.0, "host link", 4.0, "copy")
    assert (found.hidden_s, found.exposed_s) == (1.0, 3.0)
