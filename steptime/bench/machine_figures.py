"""Figures of a machine file from measured rows, each with the error of the model on the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from steptime.bench import links, rate_fit, timings
from steptime.bench.device import BenchDevice, known_accelerator
from steptime.bench.machine_file import Figure, Provenance
from steptime.bench.runs.gemm import best


class Sweeps(NamedTuple):
    """Every row of one calibration, and what could not be measured."""

    gemms: list[timings.GemmTiming]
    attention: list[timings.AttentionTiming]
    moves: list[timings.MoveTiming]
    launches: list[timings.LaunchTiming]
    collectives: list[timings.CollectiveTiming]
    notes: list[str]

    def joined(self, other: Sweeps) -> Sweeps:
        """The rows of two calibrations."""
        pairs: Any = zip(self, other, strict=True)
        return Sweeps._make(mine + its for mine, its in pairs)


def figures(measured: Sweeps, device: BenchDevice, dtype: str, provenance: Provenance) -> dict[str, Figure]:
    """Fields of the accelerator, in SI units, for what was measured; attention's shares and memory's rate in `dtype`."""
    kernels = _kernels(measured.launches, provenance)
    memory = _memory(measured.moves, dtype, device.statistic, provenance)
    rate = float(memory["memory_bytes_per_s"].value) if memory else float("inf")
    share = float(memory["memory_efficiency"].value) if memory else 1.0
    gemm_s = float(kernels["kernels.gemm_kernel_s"].value) if kernels else 0.0
    under = rate_fit.KnownRates(rate * share, gemm_s, float(device.processors) if device.kind == "cuda" else None)
    products = _products(measured.gemms, dtype, device.statistic, under, provenance)
    known = known_accelerator(device)
    peaks = {} if known else _peaks(products)
    peak = known.peak_flops.get(dtype, 0.0) if known else float(peaks[f"peak_flops.{dtype}"].value)
    return peaks | products | memory | _attention(measured, device, dtype, peak, under, provenance) | kernels


def _peaks(products: dict[str, Figure]) -> dict[str, Figure]:
    """Replacement for the dense peak where no data sheet is known: the best shape, or the asymptote if that is higher."""
    found: dict[str, Figure] = {}
    for path, figure in products.items():
        field, _, dtype = path.partition(".")
        known = found.get(f"peak_flops.{dtype}")
        if field in {"best_flops", "sustained_flops"} and (known is None or figure.value > known.value):  # type: ignore[operator]
            source = f"no data sheet is known; the best measured rate is used as the peak; {figure.source}"
            found[f"peak_flops.{dtype}"] = Figure(figure.value, source)
    return found


def _products(
    gemms: Sequence[timings.GemmTiming],
    dtype: str,
    statistic: rate_fit.Statistic,
    under: rate_fit.KnownRates,
    provenance: Provenance,
) -> dict[str, Figure]:
    """Best and sustained rates by dtype, and the depth overhead fitted for the config's dtype."""
    found: dict[str, Figure] = {}
    overheads: Sequence[float] = rate_fit.OVERHEADS
    tops = best(gemms)
    for name in sorted(tops, key=lambda name: name != dtype):
        row = tops[name]
        shape = f"best of {sum(r.dtype == name for r in gemms)} matrix multiplies, {row.m} x {row.n} x {row.k} {row.direction}"
        found[f"best_flops.{name}"] = Figure(
            row.flops / row.timing.min_s, provenance.measured(shape, row.timing.spread)
        )
        if sustained := rate_fit.gemm(gemms, name, under, statistic, overheads):
            what = f"asymptote for {sustained.points} matrix multiplies, fitted with an error of {_percent(sustained.error)}"
            found[f"sustained_flops.{name}"] = Figure(sustained.value, provenance.measured(what))
            if name == dtype:
                overheads = (sustained.depth_overhead,)
                what = f"{name} matrix multiplies, the depth overhead with the best fit"
                found["gemm_overhead_k"] = Figure(sustained.depth_overhead, provenance.measured(what))
    return found


def _memory(
    moves: Sequence[timings.MoveTiming], dtype: str, statistic: rate_fit.Statistic, provenance: Provenance
) -> dict[str, Figure]:
    streaming = rate_fit.memory(moves, dtype=dtype, statistic=statistic)
    if streaming is None:
        return {}
    what = f"median of {streaming.efficiency.points} streaming kernels over it, deviation {_percent(streaming.efficiency.error)}"
    return {
        "memory_bytes_per_s": Figure(
            streaming.bytes_per_s.value, provenance.measured("the fastest copy, or kernel if faster")
        ),
        "memory_efficiency": Figure(streaming.efficiency.value, provenance.measured(what)),
    }


def _attention(
    measured: Sweeps, device: BenchDevice, dtype: str, peak: float, under: rate_fit.KnownRates, provenance: Provenance
) -> dict[str, Figure]:
    """Shares of `peak` [FLOP/s] at the config's own length, and the ramp over all lengths."""
    if not peak or not measured.attention:
        return {}
    over_lengths = rate_fit.attention(measured.attention, dtype, peak, under, statistic=device.statistic)
    if over_lengths is None:
        return {}
    ramps = (over_lengths.ramp_tokens,)
    length = measured.attention[0].seqlen  # the config's own comes first
    own = [row for row in measured.attention if row.seqlen == length]
    fitted = rate_fit.attention(own, dtype, peak, under, statistic=device.statistic, ramps=ramps) or over_lengths
    found: dict[str, Figure] = {}
    for direction, one in (("forward", fitted.forward), ("backward", fitted.backward)):
        every = over_lengths.forward if direction == "forward" else over_lengths.backward
        what = f"{dtype}, {length} tokens; over {every.points} lengths a single share has an error of {_percent(every.error)}"
        source = provenance.measured(what)
        if one.value > 1.0:
            source = f"assumed: 1, but measured {one.value:.2f} was found; {source}"
        found[f"attention_{direction}_efficiency"] = Figure(min(one.value, 1.0), source)
    found["attention_ramp_tokens"] = Figure(
        fitted.ramp_tokens, provenance.measured("the ramp that fits all lengths best")
    )
    return found


def _kernels(launches: Sequence[timings.LaunchTiming], provenance: Provenance) -> dict[str, Figure]:
    """Fixed times of a kernel."""
    timing_of = {row.name: row.timing for row in launches}
    if not {"gemm", "move"} <= timing_of.keys():
        return {}

    def figure(name: str, what: str) -> Figure:
        return Figure(timing_of[name].median_s, provenance.measured(what, timing_of[name].spread))

    found = {f"kernels.{name}_kernel_s": figure(name, f"a tiny {name} kernel in a queue") for name in ("gemm", "move")}
    found["kernels.layer_gap_s"] = Figure(0.0, "assumed: none besides the kernels' own times")
    if "host" in timing_of:
        found["kernels.host_kernel_s"] = figure("host", "launching a tiny kernel")
    return found


def tiers(
    collectives: Sequence[timings.CollectiveTiming], crossing: frozenset[str], per_node: int, provenance: Provenance
) -> list[dict[str, Figure]]:
    """Network tiers, innermost first; `crossing`: axes whose groups span nodes, each of `per_node` processes."""
    inside = [row for row in collectives if row.axis not in crossing]
    across = [row for row in collectives if row.axis in crossing]
    found = []
    for name, rows in (("node", inside), ("network", across)):
        tier = links.tier(rows, name)
        if tier is None:
            continue
        what = f"{tier.points} collectives, fitted with an error of {_percent(tier.error)}"
        fields = {
            "name": Figure(name, ""),
            "bytes_per_s": Figure(tier.bytes_per_s, provenance.measured(what)),
            "latency_s": Figure(tier.latency_s, provenance.measured(what)),
            "efficiency": Figure(1.0, "losses are included in bytes_per_s"),
        }
        if name == "node" and across:
            fields["size"] = Figure(per_node, provenance.measured("processes on a node"))
        found.append(fields)
    return found


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"
