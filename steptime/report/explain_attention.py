"""Attention explained: FLOPs over the kernel's rate, what moves around it, and the figures that the rate comes from."""

from __future__ import annotations

from steptime.answer.result import Estimate
from steptime.cost.compute import CHUNK_S_PER_TOKEN, RATED_LENGTH
from steptime.cost.rates import attention_efficiency, flash_kernel, scores_in_memory
from steptime.model.ops import Attention
from steptime.model.scans import Chunked
from steptime.report.breakdown import part_title
from steptime.report.constants import machine_source
from steptime.report.explain_layers import calls
from steptime.report.format import BINARY, SI, quantity, seconds, whole
from steptime.report.kernel_table import KernelTime, op_times
from steptime.report.table import Fact, FactList


def attention(estimate: Estimate) -> FactList:
    """Each attention kernel: FLOPs over the rate at this length, forward and backward, times its calls."""
    rates = estimate.timing.rates
    facts = []
    for row in op_times(estimate):
        if row.part != "attention":
            continue
        lines = [calls(row.times, row.forward_s, row.backward_s, estimate)]
        if isinstance(row.op, Attention):
            lines += _attention_kernel(row, row.op, estimate)
        elif isinstance(row.op, Chunked):
            op, flops, token_s = row.op, quantity(rates.chunk_flops, SI, "FLOP/s"), CHUNK_S_PER_TOKEN * rates.slowness
            lines.append(
                f"forward: {op.slowness:g} times the longer of {quantity(row.forward_flops, SI, 'FLOP')} at {flops} and "
                f"{whole(op.seq)} tokens of {token_s * 1e9:.0f} ns; backward {op.backward_times:g} times that "
                "(benchmarks of fla-org/flash-linear-attention)"
            )
        facts.append(Fact(row.name, lines))
    return FactList(part_title(estimate, "attention"), [*facts, *_attention_rates(estimate)])


def _attention_kernel(row: KernelTime, op: Attention, estimate: Estimate) -> list[str]:
    """Arithmetic of a call, and what moves around it."""
    rates = estimate.timing.rates
    ramp, (ahead, back) = rates.attention_ramp_tokens, rates.attention_head_64
    seen = op.reach or op.kv_len
    longer = seen / (seen + ramp) * (RATED_LENGTH + ramp) / RATED_LENGTH
    ahead_rate, back_rate = (
        quantity(rate, SI, "FLOP/s") for rate in (rates.attention_forward_flops, rates.attention_backward_flops)
    )
    work = f"{quantity(row.forward_flops, SI, 'FLOP')} ({op.causal_share:.3g} of all scores)"
    lines = [f"forward: {work} at {ahead_rate}, {_backward(op)} at {back_rate}"]
    if ramp:
        lines.append(
            f"both rates x {longer:.4g} for the keys seen: [{whole(seen)} / ({whole(seen)} + {ramp:g})] / "
            f"[{RATED_LENGTH:g} / ({RATED_LENGTH:g} + {ramp:g})]: kernels compute blocks crossed by the causal mask in full"
        )
    if op.d_qk <= 64 and (ahead, back) != (1.0, 1.0):
        lines.append(f"forward x {ahead:g}, backward x {back:g} for heads of {whole(op.d_qk)}, not 128")
    if ramp:
        where = machine_source(estimate.job, "accelerator.attention_ramp_tokens")
        lines.append(f"attention_ramp_tokens {ramp:g}: {where}")
    if op.drops:
        drawn = op.full_flops / (2.0 * (op.d_qk + op.d_v)) * op.causal_share
        lines.append(
            f"dropout of {quantity(drawn, SI, 'scores')} at {quantity(rates.drawn_per_s, SI, 'scores/s')} besides, forward and "
            "backward (NVIDIA/TransformerEngine issue 3312)"
        )
    if op.merge_forward_bytes or op.merge_backward_bytes:
        forward, backward = (
            quantity(float(size), BINARY) for size in (op.merge_forward_bytes, op.merge_backward_bytes)
        )
        what = "of scores, kernel by kernel" if scores_in_memory(estimate.job.software) else "of pieces and their sums"
        kernels = f", {op.merge_kernels:g} kernels of {seconds(rates.move_kernel_s)}" if op.merge_kernels else ""
        rate = quantity(rates.bytes_per_s, SI, "B/s")
        lines.append(f"around it forward moves {forward}, backward {backward} {what}, at {rate}{kernels}")
    return [*lines, f"each + {seconds(op.calls * rates.gemm_kernel_s)} launch"]


def _attention_rates(estimate: Estimate) -> list[Fact]:
    """The kernel's shares of the dense peak, and the machine's figures that they come from."""
    job, device = estimate.job, estimate.job.machine.accelerator
    kernel, shares = flash_kernel(device, job.software), attention_efficiency(device, job.software)
    if scores_in_memory(job.software):
        how = "of matrix multiplies, in fp32 for one product of two forward and two of five backward"
        return [Fact("rates", [f"{how} (torch/_higher_order_ops/flex_attention.py)"])]
    own = {"best": "attention", "cudnn-9.19": "cudnn"}.get(kernel, "fa2")
    facts = []
    for direction, share in zip(("forward", "backward"), shares, strict=True):
        key = f"{own}_{direction}_efficiency"
        key = key if getattr(device, key) else f"attention_{direction}_efficiency"
        value = getattr(device, key)
        times = "" if share == value else f" x {share / value:.3g} for {kernel}"
        facts.append(Fact(key, [f"{value:g} of the dense peak{times}: {machine_source(job, f'accelerator.{key}')}"]))
    return facts


def _backward(op: Attention) -> str:
    """FLOPs of backward over those of forward."""
    share = (3.0 * op.d_qk + 2.0 * op.d_v) / (op.d_qk + op.d_v)
    qk, v = whole(op.d_qk), whole(op.d_v)
    widths = f"; [3 x {qk} + 2 x {v}] / [{qk} + {v}] for q, k of width {qk} and v of {v}" if qk != v else ""
    return f"backward {share:.3g} times that (5 products to 2, FlashAttention-2, arXiv 2307.08691{widths})"
