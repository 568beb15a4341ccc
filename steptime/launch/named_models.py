"""Models by the names that repositories and recipes give them."""

from __future__ import annotations

import re

from steptime.model.presets import aliases, model_names

_SPELLINGS = {
    # builders of torchtune: torchtune.models.qwen2_5.lora_qwen2_5_7b_instruct
    r"^torchtune\.models\.mistral\.(?:q?lora-)?mistral-7b$": "mistral-7b-v0.2",  # 32,000 entries, as v0.1 and v0.2
    r"^torchtune\.models\.[\w-]+\.(?:q?lora-)?": "",
    r"^hf-(?=llama)": "",
    r"^llama3-[1-3]-(?=\d+b)": "llama3-",
    r"^qwen2-5-(?=\d)": "qwen2.5-",
    r"^(qwen[\d.]+)-([01])-(\d+b)": r"\1-\2.\3",
    r"^phi4-14b$": "phi4",
    r"^(?:nousresearch-|unsloth-)?meta-": "",
    r"^nvidia-(?=nemotron-)": "",
    r"^(nemotron-.*)-(?:bf16|fp8|nvfp4)$": r"\1",
    r"^llama-?([23])(?:\.[0-3])?-": r"llama\1-",
    r"^llama-?4-(?:maverick-)?17b-?128e.*": "llama4-maverick",
    r"^llama-?4-(?:scout-)?17b-?16e.*": "llama4-scout",
    r"^qwq-32b.*": "qwen2.5-32b",  # config.json of Qwen/QwQ-32B
    r"^deepseek-r1-distill-qwen-": "qwen2.5-",
    r"^deepseek-r1-distill-llama-": "llama3-",
    r"^qwen2-(?=(?:0\.5|1\.5|7|72)b)": "qwen2.5-",  # their config.json have the sizes of Qwen2.5's
    r"^(?:vicuna|alpaca|llama)-(7|13|30|65)b(?:-hf|-v1\.[0-3])?$": r"llama1-\1b",
    r"^vicuna-(7|13)b-v1\.5.*": r"llama2-\1b",
    r"^amber(?:chat)?$": "llama1-7b",  # LLM360/Amber: LLaMA's own sizes
    r"^gemma-([23])-": r"gemma\1-",
    r"-rope-\w+$": "",
    r"^open-llama-(7b|13b)(?:-v2)?$": r"llama1-\1",
    r"^zephyr-7b-.*": "mistral-7b-v0.2",
    r"^internlm2-5-": "internlm2.5-",
    r"^internlm2-1-8b": "internlm2-1.8b",
    r"^codellama-(7|13)b-python.*": r"llama2-\1b",
    r"^(yi-\d+b)-200k$": r"\1",
    r"^(qwen3-\d+b)-thinking-2507$": r"\1",
    r"^deepseek-r1-0528-qwen3-8b$": "qwen3-8b",
    r"^(gpt-oss-\d+b)-(?:dequantized|bf16)$": r"\1",
    # fine-tuned with the config.json of what they are trained from
    r"^hermes-3-(?=llama-3\.[12]-)": "",
    r"^llama3-nemotron-(?:nano-)?(8|70)b.*": r"llama3-\1b",
    r"^(?:openthinker[23]?|bespoke-stratos|s1(?:\.1)?|sky-t1)-(7|32)b.*": r"qwen2.5-\1b",
    r"^deepseek-(?:math-7b|prover-v1\.5)-.*": "deepseek-llm-7b",
    r"^qwen3-coder-30b-a3b.*": "qwen3-30b-a3b",
    r"^solar-10\.7b-.*": "solar-10.7b",
    r"-mcore$": "",  # converted for Megatron-Core by ms-swift
    r"^medgemma-27b-text-it$": "gemma3-27b",  # google/medgemma-27b-text-it: Gemma 3 without its vision tower
    r"(?:-unsloth)?-bnb-4bit$": "",  # packed by bitsandbytes
    r"^(qwen2\.5)-(?:math|coder)-": r"\1-",
    r"^phi-?3-(mini|medium)-(?:4k|128k)-": r"phi3-\1-",
    r"^mistral-7b-(?:instruct-)?v0\.[12]$": "mistral-7b-v0.2",
    r"^mistral-large-instruct-2407$": "mistral-large-123b",
    r"^deepseek-(?:r1|v3(?:\.1)?(?:-base|-0324)?)$": "deepseek-v3",
    r"^tinyllama-v1\.1$": "tinyllama-1.1b",
    r"^smollm2-([\d.]+[bm])-.*": r"smollm2-\1",
}
"""How repositories spell names, and how the presets do."""


_TRAINED = re.compile(
    r"(?:-(?:sft|dpo|cpt|full|ft|merged|final|local|model|bf16|fp16|checkpoint|ckpt|step|steps|epoch)(?:-?\d{1,6})?)+$"
)
"""What trainings leave at the end of a name; no sizes follow from it."""
_NO_NAME = re.compile(
    r"(?:checkpoint|ckpt|step|epoch|snapshot|global_step)s?[-_]?\d*|main|hf|final|original|latest|[0-9a-f]{40}",
    re.IGNORECASE,
)
"""Folders inside the one that has a model's name."""


def _last_name(path: str) -> str:
    """The part of a path that names a model: not a checkpoint within it, nor a snapshot of the hub's cache.

    >>> _last_name("hub/models--Qwen--Qwen3-8B/snapshots/main"), _last_name("/ckpt/Qwen3-8B/checkpoint-500")
    ('Qwen3-8B', 'Qwen3-8B')
    """
    parts = [part for part in path.split("/") if part]
    while len(parts) > 1 and _NO_NAME.fullmatch(parts[-1]):
        parts.pop()
    last = parts[-1] if parts else ""
    return last.rpartition("--")[2] if last.startswith("models--") else last


_OTHER = re.compile(
    r"(?:^|-)(?:vl\d*|vlm|llava|internvl[\d.]*|paligemma2?|idefics\d?|pixtral|mllama|minicpm-v|vision|omni|audio|whisper|"
    r"moondream\d?|molmo|smolvlm\d?|glm-4(?:\.\d)?v)(?:-|$)"
)


def sees_or_hears(name: str) -> bool:
    """Whether a model's name says that it takes images or sound beside text.

    >>> sees_or_hears("Qwen/Qwen2.5-VL-7B-Instruct"), sees_or_hears("Qwen/Qwen2.5-7B")
    (True, False)
    """
    return bool(_OTHER.search(_last_name(name).lower().replace("_", "-")))


def preset_of(name: str) -> str | None:
    """The preset of a model as Hugging Face's hub names it; None where there is none.

    >>> preset_of("meta-llama/Llama-3.2-3B"), preset_of("Qwen/Qwen3-4B-Instruct-2507"), preset_of("own/model")
    ('llama3-3b', 'qwen3-4b', None)
    """
    words = _last_name(name).lower().replace("___", ".").replace("_", "-")  # ___ is ModelScope's dot
    for pattern, meant in _SPELLINGS.items():
        words = re.sub(pattern, meant, words)
    plain = re.sub(r"-(?:instruct|chat|base|it|hf|pt)(?:-.*)?$|-v0\.[1-3]$|-\d{4}$", "", re.sub(_TRAINED, "", words))
    known = {found: found for found in model_names()} | aliases()
    dashless = {found.replace("-", ""): preset for found, preset in known.items()}
    return next(
        (named for named in (known.get(words), known.get(plain), dashless.get(plain.replace("-", ""))) if named), None
    )
