"""Settings from the environment of a Megatron job, and from the program that it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import load_table
from steptime.launch.reading import LaunchFlag, Reading

_GPT = re.compile(r"(^|/)pretrain_(gpt|mamba|hybrid)\.py$")
_SIZES = re.compile(r"(:\d+:\d+)+")


def switched_on(variables: Mapping[str, str]) -> list[LaunchFlag]:
    """The variables that are on and whose cost is approximated."""
    known = load_table("megatron").raw["variables_on"].items()
    return [LaunchFlag(name, "1", "approximated", why) for name, why in known if variables.get(name) == "1"]


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
    for variable, rule in load_table("megatron").raw["environment"].items():
        said = variables.get(variable, "")
        value = rule["words"].get(said) if "words" in rule else said if _SIZES.fullmatch(said) else None
        if value is not None:
            performance[rule["to"]] = value
            flags.append(LaunchFlag(variable, said, "used", f"performance.{rule['to']}"))
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
