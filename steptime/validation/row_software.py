"""The `performance` section of a measured row, from its text: framework, precision, recomputation, overlap."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from steptime.base.document import parse_mapping, read_source
from steptime.software import frameworks
from steptime.software.performance import EAGER_TORCH, load_software
from steptime.software.profiles import profile_names, profile_releases
from steptime.validation import row_hugging_face, row_native, row_torchtitan
from steptime.validation.measurements import FOLDER, MeasuredRow, SkipRowError
from steptime.validation.recipes import quantized_head, recipe_of
from steptime.validation.row_experts import dispatch_of, positions_of
from steptime.validation.row_kernels import attention_of, graphs_of, kernel_of_month, overlap_of, segments_of
from steptime.validation.row_scripts import performance_of_script


class RowFramework(NamedTuple):
    """A framework's words, the family it is reported under, and its profile."""

    words: str
    family: str
    profile: str
    own: bool = True
    """False where the profile is only the nearest."""
    release: str = ""
    """The release that the row names, where the profile distinguishes it."""
    alone: str = ""
    """The profile that it runs with several devices, for a run on one."""

    @property
    def base(self) -> str:
        """The profile that its own profile extends."""
        return load_software(self.profile).family

    @property
    def sharded(self) -> bool:
        """Whether the profile accepts torch FSDP's options."""
        return frameworks.framework_of(self.profile, self.base).fully_shards

    @property
    def software(self) -> str:
        """The profile, with the release where it is known."""
        return f"{self.profile}@{self.release}" if self.release else self.profile


_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MODULES = {"core_attn", "layernorm", "mlp", "act", "dropout", "moe", "moe_act", "shared_experts", "mla_up_proj"}


@cache
def _tables() -> dict[str, Any]:
    """The frameworks of measured rows, and those without a profile."""
    return parse_mapping(*read_source(FOLDER / "frameworks.yaml"))


@cache
def row_frameworks() -> list[RowFramework]:
    """All frameworks; the first whose words match is a row's."""
    return [RowFramework(**entry) for entry in _tables()["frameworks"]]


def framework_of(row: MeasuredRow, *, known: bool = True) -> RowFramework:
    """The framework of a row, with its release unless it is treated as unknown.

    Raises:
        SkipRowError: no profile describes it.
    """
    found = _framework(row)
    if not known:
        return found
    native = found.profile.startswith("torchtitan")
    return found._replace(
        release=row_torchtitan.torchtitan_release(row) if native else release_of(found, row.text("framework"))
    )


def _framework(row: MeasuredRow) -> RowFramework:
    said = row.text("framework").lower()
    if found := next((word for word in _tables()["no_profile"] if word in said), ""):
        title = "XLA (Levanter, T5X)" if found in {"levanter", "t5x"} else found
        raise SkipRowError(f"not modeled yet: framework {title}")
    if said in profile_names():
        return RowFramework(said, said, said)
    found_one = next((framework for framework in row_frameworks() if re.search(framework.words, said)), None)
    if found_one is None:
        profile = "fsdp2" if row.text("zero_or_fsdp").lower().startswith("fsdp") else "megatron-core"
        return RowFramework("", said or "not stated", profile, own=False)
    if found_one.family == "Megatron-LM" and row.text("precision").lower().startswith("fp16"):
        return RowFramework("", "Megatron-LM 2020-2022", "megatron-2021", own=False)
    sharded = re.search(r"\bfsdp", row.text("zero_or_fsdp").lower())
    if sharded and "primus" in said:  # use_torch_fsdp2 in its 70B configs (AMD-AGI/Primus examples/megatron/configs)
        return found_one._replace(profile="megatron-core-fsdp2")
    if not found_one.sharded and sharded and not found_one.base.startswith("megatron"):
        return found_one._replace(profile="fsdp2", own=False)
    if found_one.profile == "litgpt" and row_native.of_thunder(row):
        return found_one._replace(profile="fsdp2" if sharded else "torch", own=False)
    if found_one.sharded and not sharded and row.whole("n_gpus") == 1:
        own = f"{found_one.profile}-ddp"
        known = own in profile_names()
        return found_one._replace(profile=own if known else "torch", alone="" if known else found_one.profile)
    return found_one


def release_of(framework: RowFramework, words: str) -> str:
    """The release in a framework's words, as far as its profile distinguishes releases: 24.12 from "NeMo 24.12.01"."""
    said = re.findall(r"\d+\.\d+", words)
    return next((release for release in profile_releases(framework.profile) if release in said), "")


def performance_of(row: MeasuredRow, framework: RowFramework, assumed: list[str]) -> dict[str, Any]:
    """The `performance` section of a row; what the row does not state is added to `assumed`.

    Raises:
        SkipRowError: something in it is not modeled.
    """
    notes = row.text("overlap_notes").lower()
    section: dict[str, Any] = {"software": framework.software}
    section |= low_precision(row, framework, assumed) or {"precision": precision_of(row, assumed)}
    if framework.own and profile_releases(framework.profile) and not framework.release:
        assumed.append(f"software: {framework.profile} with its default release, for {row.text('framework')!r}")
    if not framework.own:
        assumed.append(f"software: {framework.profile} for framework {row.text('framework') or 'not set'!r}")
    section |= recompute_of(row, framework, assumed) | row_native.said_dtypes(row, notes) | _kernels(row, notes)
    if framework.alone:
        section |= row_native.of_one_device(framework.alone)
    if framework.base in EAGER_TORCH:
        section |= row_native.native_kernels(row, framework.release, notes) | row_native.native_states(row)
        section |= attention_of(row, notes)
    section |= kernel_of_month(row) | segments_of(notes)
    section |= row_hugging_face.of_deepspeed(row, notes) if framework.base == "deepspeed" else {}
    overlap = overlap_of(notes, row.whole("tp") or 1, section["precision"])
    if overlap and not framework.sharded:
        section["overlap"] = overlap
    if framework.base in row_native.HOOKED:
        section |= row_native.offloaded(row, section, assumed)
    if how := dispatch_of(row, assumed):
        section["moe"] = how
    section |= positions_of(row, framework.base)
    if framework.base != "megatron-2021" and "attention_impl" not in section and _before_flash(row):
        section["attention_impl"] = "unfused"
        assumed.append("attention_impl: unfused, since it predates FlashAttention, or runs on V100")
    if _before_latent_kernels(row):
        section["attention_impl"] = "unfused"
        assumed.append(
            "attention_impl: unfused, since TransformerEngine had no kernel for latent attention on Blackwell"
        )
    return section | performance_of_script(row, assumed)


def _before_flash(row: MeasuredRow) -> bool:
    """FlashAttention needs Ampere (Dao-AILab/flash-attention README); fp16 on DeepSpeed is of 2020 and 2021, before it."""
    framework = row.text("framework").lower()
    old = "deepspeed" in framework and "flash" not in framework and row.text("precision").lower() == "fp16"
    return old or "v100" in row.text("gpu").lower()


def _before_latent_kernels(row: MeasuredRow) -> bool:
    """Latent attention on Blackwell in NeMo up to 25.04.

    NVIDIA/TransformerEngine v2.2 to v2.4 (June 2025): cuDNN's kernel for heads up to 128 wide on Blackwell
    (common/fused_attn/fused_attn.cpp), FlashAttention only where query and value heads are equally wide
    (pytorch/dot_product_attention/utils.py). v2.5 takes cuDNN's for 192 and 128.
    """
    early = re.search(r"nemo.* (2[34]\.\d\d|25\.0[1-4])", row.text("framework").lower())
    return bool(early) and row.text("attention_kind").lower() == "mla" and bool(re.match(r"G?B\d00", row.text("gpu")))


def low_precision(row: MeasuredRow, framework: RowFramework, assumed: list[str]) -> dict[str, Any]:
    """The recipe of a row; nothing where it has none.

    Raises:
        SkipRowError: a framework whose low-precision kernels no profile describes.
    """
    if framework.base == "fsdp2" and (found := row_native.torchao_recipe(row, row.text("overlap_notes").lower())):
        return found
    model = row.text("model_name")
    section = recipe_of(row.text("precision"), row.text("framework"), model, assumed)
    section |= quantized_head(section.get("precision", ""), model, row.text("overlap_notes").lower())
    if section and framework.base != "megatron-core":
        raise SkipRowError(f"not modeled yet: {precision_family(row.text('precision'))} with {framework.profile}")
    return section


def precision_of(row: MeasuredRow, assumed: list[str]) -> str:
    """bf16, fp16 or fp32.

    Raises:
        SkipRowError: any other precision.
    """
    said = row.text("precision").lower()
    if not said:
        assumed.append("precision: bf16")
        return "bf16"
    if "ambiguous" in said:
        raise SkipRowError("precision: ambiguous in the source")
    word = re.split(r"[^a-z0-9]", said)[0]
    if word not in _PRECISIONS:
        raise SkipRowError(f"not modeled yet: {precision_family(said)}")
    if "/" in said:
        assumed.append(f"precision: {word} of {said!r}")
    return _PRECISIONS[word]


def precision_family(said: str) -> str:
    """fp8, mxfp8, nvfp4, int8, bf16 ...: the precision without its recipe."""
    said = said.lower()
    if "mxfp8" in said:
        return "mxfp8"
    return re.split(r"[^a-z0-9]", said)[0] or "bf16"


def recompute_of(row: MeasuredRow, framework: RowFramework, assumed: list[str]) -> dict[str, Any]:
    """The keys that state what is recomputed.

    Raises:
        SkipRowError: a policy that cannot be expressed, or offloading.
    """
    said, away = row_native.recomputed_besides(row.text("recompute").lower())
    if away and framework.base not in row_native.HOOKED:
        raise SkipRowError("not modeled yet: activation offloading")
    if not said:
        assumed.append("recompute: none")
        return {}
    if re.fullmatch(r"none( \(.*\))?", said):
        return {"activation_checkpointing_type": "none"}
    if framework.profile in {"xla", "paxml"} and (policy := xla_policy(said)):
        assumed.append(f"policy {said!r}: recomputes {', '.join(policy)}")
        return {"recompute": {"granularity": "selective", "modules": policy}}
    if re.fullmatch(r"full( ?\(.*\))?", said):
        return {"activation_checkpointing_type": "full"}
    latest = framework.profile == "torchtitan" and framework.release in row_torchtitan.LATEST
    graph, resend = row_torchtitan.traced(row), row_torchtitan.recomputes_all_to_all(row)
    attend = row_torchtitan.recomputes_attention(row)
    per_op = row_native.recomputed_per_op(said, graph=graph, latest=latest, resend=resend, attend=attend)
    if framework.base in EAGER_TORCH and per_op:
        return per_op
    if re.fullmatch(r"selective( \((recompute-activations|core attention)\))?", said) and framework.base.startswith(
        "megatron"
    ):
        return {"activation_checkpointing_type": "selective"}
    if found := re.fullmatch(r"block ?\((\d+) of \d+ layers\)", said):
        chunks = (row.whole("pp") or 1) * (row.whole("vpp") or 1)
        if int(found[1]) % chunks == 0:
            return {"recompute": {"granularity": "full", "method": "block", "n_layers": int(found[1]) // chunks}}
    if found := re.fullmatch(r"selective ?\(\[?([a-z_ ,+]+)\]?\)", said):
        modules = re.split(r"[ ,+]+", found[1].strip())
        if set(modules) <= _MODULES:
            return {"recompute": {"granularity": "selective", "modules": modules}}
    raise SkipRowError(f"not modeled yet: recompute {said[:60]!r}")


def xla_policy(said: str) -> list[str]:
    """The modules that a rematerialization policy of MaxText or PaxML recomputes; empty for one that cannot be expressed.

    A policy names what it keeps (maxtext MaxText/layers/decoders.py, get_remat_policy): the projections of attention, or every
    matrix product with weights.
    """
    if said == "remat policy save_qkv_proj":
        return ["after_qkv"]
    if re.fullmatch(r"custom remat: save q,k,v,qkv,out_proj(,mlpwo)?|save_qkv_out_proj", said):
        return ["layernorm", "mlp"]
    return ["act", "core_attn", "layernorm"] if said in {"minimal", "save_dot_only"} else []


def _kernels(row: MeasuredRow, notes: str) -> dict[str, Any]:
    """Attention, norm and loss kernels where the source names them."""
    section: dict[str, Any] = {}
    if re.search(
        r"no flash ?attention|attention implementation eager|kernel (fused|torch)",
        f"{notes}; {row.text('note').lower()}",
    ):
        section["attention_impl"] = "unfused"
    elif "flash_attentionv1" in notes:
        section |= {"attention_impl": "flash", "attention_kernel": "fa1"}
    elif "flash_attention" in notes or "flashattention" in notes or "flash attention 2" in notes:
        section |= {"attention_impl": "flash", "attention_kernel": "fa2"}
    elif "flash attention" in row.text("framework").lower():
        section["attention_impl"] = "flash"
    if "kernel torch" in notes or (
        "hf" in row.text("framework").lower() and section.get("attention_impl") == "unfused"
    ):
        # transformers' models scale, mask, widen and narrow the scores kernel by kernel (models/llama/modeling_llama.py,
        # eager_attention_forward; Baichuan2's own code adds its biases and a bound besides)
        section["softmax_impl"] = "composite"
    if "; kernel " in notes and "rms kernel" not in notes:
        section["norm_impl"] = "composite"
    if graphs := graphs_of(notes):
        section["cuda_graphs"] = graphs
    if "ce fusion" in notes:
        section["loss_impl"] = "fused"
    if "fused rms norm off" in row.text("note"):
        section["norm_impl"] = "composite"
    return section
