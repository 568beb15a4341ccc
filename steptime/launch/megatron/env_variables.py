"""Settings from the environment of a Megatron job, and from the program that it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from steptime.launch.job_keys import JobKeys
from steptime.launch.reading import LaunchFlag, Reading

_GPT = re.compile(r"(^|/)pretrain_(gpt|mamba|hybrid)\.py$")
_VARIABLES: dict[str, tuple[str, Mapping[str, bool] | None]] = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("deterministic", {"0": True}),
    "CUBLAS_WORKSPACE_CONFIG": ("cublas_workspace", None),
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments", {"expandable_segments:True": True}),
    "PYTORCH_ALLOC_CONF": ("expandable_segments", {"expandable_segments:True": True}),
}
"""Variable -> the key of the plan's performance section, and the meanings of its words; None: sizes and counts unchanged."""
_BLOCKING = "the host synchronizes after every kernel; counted with the launch times of the profile"
_SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": _BLOCKING,
    "HIP_LAUNCH_BLOCKING": _BLOCKING,
    "TORCH_COMPILE_DISABLE": "functions that torch.compile fuses run one operation at a time; counted as fused",
}
"""Variables that change the cost where they are 1, and what is counted in their place."""
_SIZES = re.compile(r"(:\d+:\d+)+")


def switched_on(variables: Mapping[str, str]) -> list[LaunchFlag]:
    """The variables that are on and whose cost is approximated."""
    return [LaunchFlag(name, "1", "approximated", why) for name, why in _SWITCHES.items() if variables.get(name) == "1"]


def put_backend(keys: JobKeys, variables: Mapping[str, str]) -> None:
    """The attention back end that remains when variables turn off one or both; a flag overrides them."""
    off = tuple(name for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if variables.get(name) == "0")
    said = "attention_backend" in keys.values
    if off and not said:
        left = "unfused" if len(off) == 2 else "fused" if off == ("NVTE_FLASH_ATTN",) else "flash"
        keys.put("attention_backend", left)
    if len(off) == 2 or (off and not said):
        key = "attention_impl" if len(off) == 2 else "attention_backend"
        keys.assumed_flags.append(LaunchFlag(", ".join(off), "0", "used", f"performance.{key}"))


def put_tokenizer(keys: JobKeys, program: str, variables: Mapping[str, str]) -> None:
    """The tokenizer of pretrain_gpt.py and similar programs by default (args_defaults: GPT2BPETokenizer).

    Where the file has flags only, the tokenizer is the one named by their variable, which the sourcing script passes on.
    """
    named = variables.get("TOKENIZER_MODEL", "")
    if not program and named and keys.get("tokenizer_model") is None and keys.get("vocab_size") is None:
        keys.put("tokenizer_model", named)
    if _GPT.search(program) and all(
        keys.get(key) is None for key in ("tokenizer_type", "vocab_size", "tokenizer_model")
    ):
        keys.put("tokenizer_type", "GPT2BPETokenizer")
        note = "model.vocab_sz: its default tokenizer is GPT-2's"
        keys.assumed_flags.append(LaunchFlag(program, "", "used", note))


def with_variables(reading: Reading, variables: Mapping[str, str]) -> Reading:
    """The reading, including what environment variables decide about kernels and workspaces."""
    performance, flags = dict(reading.config["performance"]), list(reading.flags)
    for variable, (key, words) in _VARIABLES.items():
        said = variables.get(variable, "")
        value = words.get(said) if words is not None else said if _SIZES.fullmatch(said) else None
        if value is not None:
            performance[key] = value
            flags.append(LaunchFlag(variable, said, "used", f"performance.{key}"))
    threads = variables.get("OMP_NUM_THREADS", "")
    if "cpu_offload" in performance and threads.isdecimal() and int(threads) > 0:
        performance["cpu_offload"] = performance["cpu_offload"] | {"threads": int(threads)}
        flags.append(LaunchFlag("OMP_NUM_THREADS", threads, "used", "performance.cpu_offload.threads"))
    return reading._replace(config=reading.config | {"performance": performance}, flags=flags)


def from_outside(environment: Mapping[str, str]) -> str:
    """Variables of the environment in words: numbers and switches with values; others, possibly secret, only by name."""
    shown = re.compile(r"\d{1,6}|true|false", re.IGNORECASE)
    names = [name for name in sorted(environment) if not name.isdecimal()]
    return ", ".join(f"{name}={environment[name]}" if shown.fullmatch(environment[name]) else name for name in names)
