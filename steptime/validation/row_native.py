"""Settings of a measured row of the PyTorch-native stack (torch.compile, torchao, FSDP, offload), from its text."""

from __future__ import annotations

import re
from typing import Any

from steptime.software.performance import load_software
from steptime.validation import row_hugging_face
from steptime.validation.measurements import MeasuredRow
from steptime.validation.row_torchtitan import (
    before,
    before_expandable_segments,
    by_parameter,
    compiles_blocks_alone,
    compiles_loss,
    heads_of,
    norm_of,
    saves_gathers,
    step_graph,
    traced,
    waits_for_gathers,
)

TORCHAO_WORDS = (
    ("gw_hp", "fp8_rowwise_gw_hp"),
    ("rowwise", "fp8_rowwise"),
    ("mxfp8", "mxfp8_torchao"),
    ("nvfp4", "nvfp4_torchao"),
    ("tensorwise", "fp8_tensorwise"),
    ("dynamic", "fp8_tensorwise"),
    ("fp8 delayed", "fp8_tensorwise"),
    ("fp8 all-gather", "fp8_tensorwise"),
)
"""First match wins. torchao's delayed scaling too reads each tensor for its maximum (torchao 0.6 float8_linear.py)."""


def of_thunder(row: MeasuredRow) -> bool:
    """Whether thunder traced litgpt's model: no profile has its executors; under Dynamo inductor's are close."""
    words = f"{row.text('framework')}; {row.text('overlap_notes')}".lower()
    return bool(re.search(r"litgpt \+ thunder|compile=thunder", words))


def compile_of(release: str, notes: str, framework: str = "", *, with_loss: bool = False) -> dict[str, Any]:
    """What torch.compile compiled, where the notes say `compile=`, or its name.

    torchtitan compiled only blocks before its compile.components (mid-2025), the loss too since, and in the months of
    `compiles_loss` (`with_loss`); a graph that is traced (aot_eager, GraphTrainer without full inductor) keeps torch's own
    kernels. prime-rl upcasts the logits and takes torch's cross entropy outside of what it compiles
    (PrimeIntellect-ai/prime-rl@01c3ad6 src/prime_rl/trainer/model.py, forward; sft/train.py).
    """
    found = re.search(r"\bcompile=([a-z_]*)([^;]*)", re.sub(r"^torch\.compile$", "compile=on", notes))
    if found and f"{found[1]}{found[2]}".startswith("loss only"):
        return {"loss_impl": "compiled"}
    if not found or (found[1] != "on" and "inductor" not in notes.replace("no inductor", "")):
        return {}
    of_graph = "aot_fx_trace" in notes or "graphtrainer" in framework.lower()
    if "regional inductor" in notes or (of_graph and "full inductor" not in notes):
        return {}
    said = "loss" in found[2] or "full inductor" in found[2]
    loss = said or with_loss or not (release == "0.1" or "(blocks)" in found[2])
    loss = loss and not re.search("prime-rl|litgpt", framework)
    return {"compile": "all" if loss else "blocks"}


AROUND_EXPERTS = ["attn", "mlp", "moe_router"]
"""Modules in piecewise CUDA graphs: not the exchange and the experts, whose row counts the host reads in every step."""


def native_kernels(row: MeasuredRow, release: str, notes: str) -> dict[str, Any]:
    """torch.compile, chunks of the loss and CUDA graphs."""
    section = compile_of(release, notes, row.text("framework"), with_loss=release == "0.1" and compiles_loss(row))
    if row.text("framework").startswith("torchtitan"):
        section |= heads_of(row, release, compiled="compile" in section)
        section |= {} if "compile" in section else norm_of(row, notes)
        section |= {"compile": "blocks"} if "compile" in section and compiles_blocks_alone(row) else {}
        section |= {"activation_impl": "fused"} if "fusedgroupedexperts" in notes else {}
        if before_expandable_segments(row):
            section["expandable_segments"] = False
    if found := re.search(r"chunked (?:ce|cross entropy)(?: \((\d+) loss chunks\))?", notes):
        section |= {"loss_chunks": int(found[1] or 8)} | ({"loss_impl": "pieces"} if release == "0.1" else {})
    elif re.search(r"full[- ]logits", notes) or (traced(row) and before(row, 3248, "2026-06-15")):
        section["loss_chunks"] = (
            1  # GraphTrainer replaced the chunked loss until pull request 3248 (its configs.py@9e07ee8a2)
        )
    section |= row_hugging_face.of_hugging_face(row, notes)
    if re.search(r"experts torch\._grouped_mm|expert backend torch_mm", f"{notes}; {row.text('note')}"):
        section["grouped_workspaces"] = 0
    if "attention and its projections compiled" in notes:  # what is left of a block has kernels of its own
        section["compile"] = "blocks"
    if "piecewise cudagraph" in notes and (row.whole("n_experts") or 0) > 1:
        section["cuda_graphs"] = AROUND_EXPERTS
    elif "cudagraph" in notes.replace("no cudagraph", "") or "cuda graph" in notes or "compile=graph (+" in notes:
        # the latter are passes on top of GraphTrainer's own, CUDA graphs among them (@7bc6d9b7 autoresearch/results.tsv)
        section["cuda_graphs"] = True
    if by_parameter(row) and section.get("compile") != "all":
        section["loss_impl"] = "traced"
    if traced(row) and row.text("recompute").lower().partition(" ")[0] in {"full", "selective"}:
        section["recompute_stops_early"] = True
    if graph := step_graph(row, notes):
        section["step_graph"] = graph
    if waits_for_gathers(notes):
        section["overlap"] = {"dp": False}
    return section


def said_dtypes(row: MeasuredRow, notes: str) -> dict[str, Any]:
    """Dtype of the gradients where the source states it."""
    said = row.text("precision").lower()
    section: dict[str, Any] = {}
    if "fp32 grad" in said:
        section["main_grad_dtype"] = "fp32"
    if "bf16 grad" in said or "bf16 grad reduce" in notes:
        section["main_grad_dtype"] = "bf16"
    return section


def native_states(row: MeasuredRow) -> dict[str, Any]:
    """Dtypes of the parameters, gradients and optimizer states, where the precision's text states more than its first word."""
    said = row.text("precision").lower()
    if "pure" in said or "bf16 params" in said or "params/grads/adam bf16" in said:
        return {"param_dtype": "bf16", "main_grad_dtype": "bf16", "moment_dtype": "bf16"}
    if re.search(r"bf16 (adam|optimizer)", said):
        return {"moment_dtype": "bf16"}
    return {}


HOOKED = frozenset({"torch", "fsdp2", "deepspeed"})
"""Families whose rows offload activations through torch's saved-tensor hooks, or equivalently."""
_AWAY = r"(?:, | \+ )(?:activation cpu offload|checkpoints offloaded to cpu|cpu offload of [\d.]+ % of activations)$"
_SHARES = {
    "torchtitan@9dc418a8": (0.53, "tensors of the MLP's width, 4 of those saved per block"),
    "sac_and_offload": (0.86, "of saved activations, from the shares in the source (33.1 of 39.0 %, 36.5 of 41.9 %)"),
}
"""Words in a row's notes or source, and the share of what a layer keeps that is offloaded with them.

pytorch/torchtitan@9dc418a8 torchtitan/parallelisms/offload_utils.py sends what has 14336 * 8192 elements or more: of Llama-3 8B's
block gate, its SiLU, up and their product, 4 * 224 of 1,697 MiB. pytorch/torchtitan@28ed62e4: the commit message."""


def recomputed_besides(said: str) -> tuple[str, bool]:
    """What is recomputed, without the words that say that the rest is offloaded, and whether there are such words."""
    left = re.sub(_AWAY, "", said)
    return left, left != said or "offload" in said


def offloaded(row: MeasuredRow, section: dict[str, Any], assumed: list[str]) -> dict[str, Any]:
    """How much of its activations a row offloads to host memory, and whether both copies hide; empty for none."""
    words = "; ".join(row.text(column) for column in ("note", "overlap_notes", "source")).lower()
    if (
        not re.search(_AWAY, row.text("recompute").lower())
        and "activation cpu offload" not in row.text("zero_or_fsdp").lower()
    ):
        return {}
    share, why = next((of for said, of in _SHARES.items() if said in words), (1.0, ""))
    if moved := re.search(r"gb moved per gpu: ([\d.]+)(?: of ([\d.]+))?", words):
        share = float(moved[1]) / float(moved[2] or 1.0)
    if why:
        assumed.append(f"activation_offload: {share:g}, {why}")
    found: dict[str, Any] = {"activation_offload": share} if share else {}
    one_way = {"overlap": section.get("overlap", {}) | {"offload": 0.5}}
    return found | (one_way if "h2d exposed" in words else {})


ON_ONE_DEVICE = ("norm_impl", "activation_impl", "loss_impl", "loss_chunks", "rope_impl", "attention_kernel")


def of_one_device(profile: str) -> dict[str, Any]:
    """Settings of a trainer of the profile on one device: its kernels."""
    usual = load_software(profile).settings()
    return {key: usual[key] for key in ON_ONE_DEVICE}


def torchao_recipe(row: MeasuredRow, notes: str) -> dict[str, Any]:
    """The torchao recipe that the precision names; empty where it names none.

    torchtitan's auto filter of May 2026 converts no linear: it asks configs whether they are modules (torchao/float8/
    float8_utils.py, _auto_filter_for_recipe; torchtitan/components/quantization/float8.py@5681e36, convert). Such runs print an
    MFU, which one with a float8 linear leaves out, and as much memory as in bf16 (results.tsv of that branch: 168.7 GiB both).
    """
    said = row.text("precision").lower()
    found = next((recipe for word, recipe in TORCHAO_WORDS if word in said), "")
    if not found:
        return {}
    if "auto filter" in said:
        return {"precision": "bf16"}
    gathered = found == "fp8_tensorwise" and re.search(r"(fp8|float8)( fsdp)? all-gather", f"{said} {notes}")
    tail = re.search(r"except (?:the )?last (\d+) % of layers", notes)
    ends = {"bf16_layers_at_end": -(-row.needed("n_layers") * int(tail[1]) // 100)} if tail else {}
    return {"precision": found, "fp8_params": bool(gathered)} | ends


def recomputed_per_op(
    said: str, *, graph: bool, latest: bool = False, resend: bool = False, attend: bool = False
) -> dict[str, Any]:
    """Selective checkpointing of torchtitan: per op, every other layer, or by a memory budget; nothing for other words.

    Without a word it is per op, its only one since 2026 (torchtitan/config/configs.py@b5bcd76c, SelectiveAC). `resend`: all-to-
    alls run again (`recomputes_all_to_all`); `attend`: attention does (`recomputes_attention`).
    """
    said = "selective (per-op)" if said == "selective" and latest else said
    if re.fullmatch(r"selective \((per-op|(per-op|graph) sac[^)]*)\)", said):
        if not graph and not resend and not attend:
            return {"activation_checkpointing_type": "per-op"}
        policy = "per_op_all" if graph else "per_op_resend" if resend else "per_op"
        return {"recompute": {"granularity": "selective", "modules": [policy, *["core_attn"] * attend]}}
    if found := re.match(r"torch\.compile activation memory budget ([\d.]+)", said):
        return {"recompute": {"granularity": "selective", "memory_budget": float(found[1])}}
    if said == "selective (every other layer)":
        return {"recompute": {"granularity": "full", "method": "every", "n_layers": 2}}
    return {}


def resharded(row: MeasuredRow) -> bool:
    """Whether parameters are freed after forward, from the words of `zero_or_fsdp`.

    In a pipeline torchtitan does not by default, nor does litgpt's benchmark (Lightning-AI/lightning-thunder@6d352e58
    thunder/benchmarks/benchmark_litgpt.py: shard_mode zero2), nor a traced graph in which nothing is marked for recomputation
    (pytorch/torchtitan@27aa4907 torchtitan/experiments/graph_trainer/selective_activation_remat.py) or that keeps all it gathers.
    """
    said = row.text("zero_or_fsdp").lower()
    if by_parameter(row) and (row.text("recompute").lower() == "none" or saves_gathers(row)):
        return False
    if re.search(r"\bzero-?2|reshard never", said):
        return False
    usual = row.whole("pp") in {None, 1} and not ("litgpt" in row.text("framework").lower() and said == "fsdp2")
    return usual or "reshard always" in said


def by_module(row: MeasuredRow, said: str) -> dict[str, Any]:
    """Litgpt's benchmark wraps every module for itself by default (benchmark_litgpt.py as above: bucketing_mode none)."""
    return {"wrap": "module"} if "litgpt" in row.text("framework").lower() and "zero3" in said else {}


def reduced_in(row: MeasuredRow) -> dict[str, Any]:
    """The dtype of FSDP's gradient reduction in the row's words; else it is the profile's."""
    words = f"{row.text('overlap_notes')} {row.text('precision')}".lower()
    said = re.search(r"(fp32|bf16) reduce", words)
    return {"reduce_dtype": said[1]} if said else {}
