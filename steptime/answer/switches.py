"""Settings besides the layout that shorten a job's step: those that its software has, each tried by an estimate.

Only settings of the job's own framework are tried: what its users can switch on. An estimate with a setting rests on measured
runs of that framework, on accelerators of that architecture, that use it; where there are none, the setting is named as not
verified. tests/test_switches.py counts the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

from steptime.answer.fixes import Answer
from steptime.answer.measured import ARCHITECTURES
from steptime.base.config import ConfigError
from steptime.base.rows import Saving, Verdict
from steptime.base.words import argument
from steptime.job.job import Job

LEAST = 0.03
"""Share of the step that a setting must save to be named."""
MEGATRON = frozenset({"megatron-core", "megatron-bridge", "nemo"})
"""Profiles of the code of Megatron-Core with all of its switches."""
NATIVE = frozenset({"torch", "fsdp2", "torchtitan", "litgpt", "accelerate"})
"""Profiles of torch's own modules that torch.compile takes whole."""
TORCHAO = frozenset({"fsdp2", "torchtitan", "automodel", "accelerate"})
"""Profiles of FSDP2 with torchao's 8-bit recipes: not those of JAX, nor trainers with TransformerEngine's or none."""
Change: TypeAlias = dict[str, Any]
Names: TypeAlias = frozenset[str]


class Switch(NamedTuple):
    """A setting that may shorten the step."""

    name: str
    change: Callable[[Job], Change | None]
    """The keys that switch it on; None where the job's software lacks it, or has it on already."""
    parts: Names
    """The parts of the step that it shortens (`time.parts_s`)."""
    measured: Mapping[str, Names]
    """Code base (`code_base`) to the architectures of accelerators with at least `FEW` of its runs that use the setting."""
    exact: bool = True
    """Whether the arithmetic stays as precise."""


UNVERIFIED = "not verified"
FEW = 3
"""Runs of the split `fit` from which on a setting counts as measured."""


class EstimatedJob(Answer, Protocol):
    """The parts of an estimate that a saving is taken from."""

    @property
    def job(self) -> Job:
        """The job."""
        ...


Estimated: TypeAlias = Callable[[Job], EstimatedJob]
Tried: TypeAlias = tuple[Saving, Switch]


def savings(
    found: EstimatedJob,
    parts_s: Mapping[str, float],
    estimate: Estimated,
    *,
    exact: bool = True,
    without: Iterable[str] = (),
) -> list[Saving]:
    """The settings that save at least `LEAST` of a job's step, most first; then all of them together, where they save more.

    A setting that changes the precision may save only beside others: torchao's casts are kernels of their own in eager modules,
    which torch.compile fuses. Such a setting is tried together with those that save by themselves.

    None of a job without enough memory, whose step cannot run: `answer.fixes` has what makes it fit. `parts_s`: seconds of the
    parts of the step (`Time.parts_s`). `exact`: only settings that keep the arithmetic as precise. `without`: keys, or sections,
    that are not changed.
    """
    tried: list[Tried] = []
    only_together: list[Tried] = []
    for switch in SWITCHES if found.peaks.verdict != "does_not_fit" else ():
        share = sum(parts_s.get(part, 0.0) for part in switch.parts) / found.step_s
        change = switch.change(found.job) if share >= LEAST and (switch.exact or not exact) else None
        kept = change and any(f"{key}.".startswith(f"{own}.") for key in change for own in without)
        if change and not kept:
            with suppress(ConfigError):  # what cannot run
                saving = _estimated(found, estimate, switch.name, change, _note(found.job, switch))
                if saving.step_change <= -LEAST and _better(saving.verdict, found):
                    tried.append((saving, switch))
                elif not switch.exact:
                    only_together.append((saving, switch))
    tried.sort(key=lambda one: one[0].step_s)
    return [*(saving for saving, _ in tried), *_together(found, estimate, tried, only_together)]


def _better(verdict: Verdict, found: EstimatedJob) -> bool:
    """Whether a verdict is no worse than the job's own."""
    order: tuple[Verdict, ...] = ("fits", "tight", "does_not_fit")
    return order.index(verdict) <= order.index(found.peaks.verdict)


def _estimated(found: EstimatedJob, estimate: Estimated, name: str, change: Change, note: str) -> Saving:
    other = estimate(found.job.replace(**change))
    words = " ".join(f"--set {path}={argument(value)}" for path, value in change.items())
    peaks, relative = other.peaks, other.step_s / found.step_s - 1.0
    return Saving(name, words, other.step_s, relative, peaks.verdict, peaks.most_bytes, note)


def _together(
    found: EstimatedJob, estimate: Estimated, tried: list[Tried], only_together: list[Tried]
) -> Iterator[Saving]:
    """As many of the settings as can run together, each of which saves more, as each is set beside those before it.

    Those of `only_together` save nothing by themselves, and count where they save `LEAST` here.
    """
    best: Saving | None = None
    names: list[str] = []
    every: Change = {}
    for saving, switch in [*tried, *(only_together if tried else [])]:
        change = switch.change(found.job.replace(**every))
        if change is None:
            continue
        if best is None:
            best, names, every = saving, [switch.name], change
            continue
        with suppress(ConfigError):
            more = _estimated(found, estimate, "together", every | change, "")
            least = LEAST if (saving, switch) in only_together else 0.0
            if more.step_s < best.step_s * (1.0 - least) and _better(more.verdict, found):
                best, names, every = more, [*names, switch.name], every | change
    if best is not None and len(names) > 1:
        parts = [saving.note for saving, switch in [*tried, *only_together] if switch.name in names]
        notes = ["not all verified"] if any(UNVERIFIED in part for part in parts) else []
        notes += [_by_itself(saving) for saving, switch in only_together if switch.name in names]
        yield best._replace(name=f"together: {', '.join(names)}", note="; ".join(notes))


def _by_itself(saving: Saving) -> str:
    """A setting that only saves beside others: what it does by itself."""
    return f"{saving.name}, which change the precision of training: by themselves {100.0 * saving.step_change:+.1f} %"


def _note(job: Job, switch: Switch) -> str:
    """Whether measured runs use a setting, and whether it changes the arithmetic."""
    of, where = code_base(job), architecture(job)
    known = where in switch.measured.get(of, frozenset())
    notes = [] if known else [f"{UNVERIFIED}: no measured runs of {of} on {where}"]
    return "; ".join([*([] if switch.exact else ["changes the precision of training"]), *notes])


def code_base(job: Job) -> str:
    """The code whose runs are evidence for a setting: that of Megatron-Core, or torch with or without FSDP2."""
    if _profile(job) in MEGATRON:
        return "Megatron-Core"
    return {"fsdp2": "FSDP2"}.get(job.software.family, job.software.family)


def _profile(job: Job) -> str:
    """The software profile without its release."""
    return job.software.name.partition("@")[0]


def architecture(job: Job) -> str:
    """The architecture of the job's accelerators."""
    chip = job.machine.accelerator.name.partition("-")[0]
    return ARCHITECTURES.get(chip, chip)


def _graphs(job: Job) -> Change | None:
    """CUDA graphs: of whole layers or steps; with experts of the modules before the tokens are sent.

    megatron/core/transformer/transformer_config.py (0.16.1), __post_init__: full recomputation only with a graph of the whole
    step, which cannot hold experts whose rows the host must know; no router in a graph that recomputation of moe covers; no
    preprocessing with an expert capacity. torchtitan captures forward and backward, without a pipeline and experts
    (`trainer.py`, disable_cuda_graphs).
    """
    software, moe = job.software, job.model.moe
    if software.timing.cuda_graphs or not job.machine.accelerator.compute_capability:
        return None
    if _profile(job) == "torchtitan":
        return {"performance.cuda_graphs": True} if moe is None and job.parallelism.pp == 1 else None
    if _profile(job) not in MEGATRON:
        return None
    if moe is None:
        return {"performance.cuda_graphs": True}
    if job.recompute.granularity == "full":
        return None
    modules = ["attn", *(["mamba"] if job.model.mamba else [])]
    if "moe" not in job.recompute.modules:
        modules += ["moe_router", *([] if moe.capacity_factor is not None else ["moe_preprocess"])]
    return {"performance.cuda_graphs": modules}


def _dispatcher(job: Job) -> Change | None:
    """DeepEP, or HybridEP on Blackwell as Megatron-Bridge's recipes have it: one copy of a token for all experts of a rank.

    Both libraries are for Hopper and newer (deepseek-ai/DeepEP, README, requirements). Not with overlapped shared experts
    (`_shared_overlap`).
    """
    how = job.software.moe
    if job.model.moe is None or job.parallelism.ep == 1 or how.dispatcher == "flex" or how.shared_expert_overlap:
        return None
    if _profile(job) not in {*MEGATRON, "torchtitan", "automodel"} or architecture(job) not in {"Hopper", "Blackwell"}:
        return None
    hybrid = architecture(job) == "Blackwell" and _profile(job) != "torchtitan"
    chosen: Change = {"performance.moe.dispatcher": "flex"}
    return chosen | ({"performance.moe.flex_backend": "hybridep"} if hybrid else {})


def _expert_overlap(job: Job) -> Change | None:
    """overlap_moe_expert_parallel_comm, for GPT models without Mamba layers (models/gpt/gpt_model.py, build_schedule_plan).

    megatron/core/transformer/transformer_config.py (0.16.1), __post_init__: a pipeline must be interleaved, and MTP has one
    layer. Later, NVIDIA/Megatron-LM@d98e8a64: no recomputation of moe.
    """
    if job.model.moe is None or job.model.mamba or job.software.overlap.ep or _profile(job) not in MEGATRON:
        return None
    plain, interleaved = "moe" not in job.recompute.modules, job.parallelism.pp == 1 or job.parallelism.vpp > 1
    return {"performance.overlap.ep": True} if job.model.mtp <= 1 and interleaved and plain else None


def _shared_overlap(job: Job) -> Change | None:
    """moe_shared_expert_overlap; only where the all-to-all is not overlapped as a whole.

    With the alltoall dispatcher: 0.16.1 refuses flex (transformer_config.py, __post_init__), which later releases allow.
    """
    moe, how = job.model.moe, job.software.moe
    if moe is None or not moe.shared_expert_inter_sz or how.shared_expert_overlap or job.software.overlap.ep:
        return None
    ready = how.dispatcher == "alltoall" and _profile(job) in MEGATRON
    return {"performance.moe.shared_expert_overlap": True} if ready else None


def _tensor_overlap(job: Job) -> Change | None:
    """tp_comm_overlap: TransformerEngine's userbuffers, with sequence parallelism inside the innermost network.

    Not with nvfp4 (Megatron-Bridge scripts/performance/configs/llama).
    """
    software, tp = job.software, job.parallelism.tp
    if software.overlap.tp or not job.sp or tp > job.machine.tiers[0].size or software.precision == "nvfp4":
        return None
    return {"performance.overlap.tp": True} if _profile(job) in MEGATRON and tp > 1 else None


def _one_pass(job: Job) -> Change | None:
    """A step's micro-batches as one local batch: torch's pipeline then fills and drains once (docs/schedules.md)."""
    return {"parallelism.pipeline_passes": 1} if job.parallelism.pipeline_passes > 1 else None


def _compile(job: Job) -> Change | None:
    """torch.compile of blocks and loss."""
    native = _profile(job).removesuffix("-ddp") in NATIVE
    return {"performance.compile": "all"} if native and job.software.kernels.compile != "all" else None


def _low_precision(job: Job) -> Change | None:
    """The 8-bit recipe with most measured runs on the architecture."""
    recipes = {
        "Megatron-Core": {"Hopper": "fp8_delayed", "Blackwell": "mxfp8"},
        "FSDP2": {"Hopper": "fp8_tensorwise", "Blackwell": "fp8_rowwise"},
    }
    of = recipes.get(code_base(job), {}) if _profile(job) in MEGATRON | TORCHAO else {}
    name = of.get(architecture(job)) if job.software.recipe is None else None
    return {"performance.precision": name} if name else None


def _bf16_gradients(job: Job) -> Change | None:
    """grad_reduce_in_bf16."""
    wide = job.software.states.main_grad_dtype == "fp32" and job.software.precision != "fp32"
    return {"performance.main_grad_dtype": "bf16"} if wide and _profile(job) in MEGATRON else None


_BOTH = frozenset({"Hopper", "Blackwell"})
_BLACKWELL, _HOPPER = frozenset({"Blackwell"}), frozenset({"Hopper"})
_NATIVE_GEMM: Names = frozenset({"gemm", "memory_bound"})
SWITCHES = (
    Switch("CUDA graphs", _graphs, frozenset({"launch"}), {"Megatron-Core": _BLACKWELL, "FSDP2": _HOPPER}),
    Switch(
        "DeepEP or HybridEP",
        _dispatcher,
        frozenset({"ep_comm"}),
        {"Megatron-Core": _BOTH, "FSDP2": _BOTH},
    ),
    Switch("all-to-all under another micro-batch", _expert_overlap, frozenset({"ep_comm"}), {"Megatron-Core": _BOTH}),
    Switch("shared experts under the all-to-all", _shared_overlap, frozenset({"ep_comm"}), {}),
    Switch("tensor-parallel overlap (userbuffers)", _tensor_overlap, frozenset({"tp_comm"}), {"Megatron-Core": _BOTH}),
    Switch("one pass of the pipeline", _one_pass, frozenset({"bubble"}), {}),
    Switch("torch.compile", _compile, frozenset({"memory_bound", "launch", "recompute"}), {"FSDP2": _BOTH}),
    Switch(
        "8-bit matrix multiplies", _low_precision, _NATIVE_GEMM, {"Megatron-Core": _BOTH, "FSDP2": _BOTH}, exact=False
    ),
    Switch("bf16 gradients", _bf16_gradients, frozenset({"dp_comm", "gemm"}), {"Megatron-Core": _BOTH}, exact=False),
)
"""Every setting that is tried."""
