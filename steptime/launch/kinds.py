"""Which kind of launch file a text is: its framework, or a plan."""

from __future__ import annotations

import json
import re
import tomllib

from steptime.base.config import ConfigError
from steptime.base.document import parse
from steptime.job.job import Job
from steptime.launch.keys import load_table, table_file
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.program_calls import kind_started
from steptime.launch.shell.grammar import PROGRAM

KINDS = {
    "megatron": ("steptime.launch.megatron.sources", "read_megatron"),
    "torchtitan": ("steptime.launch.torchtitan.job_config", "read_torchtitan"),
    "nemo": ("steptime.launch.nemo.formats", "read_nemo"),
    "deepspeed": ("steptime.launch.deepspeed", "read_deepspeed"),
}
"""Kind of launch file -> module and function (path, text, env, sets, beside) that read it, imported when asked for."""
TABLES = (
    "llamafactory", "axolotl", "swift", "litgpt", "nanotron", "gpt-neox", "maxtext", "llm-foundry", "olmo", "primus",
    "torchtune", "automodel", "levanter", "openrlhf", "verl", "transformers",
)  # fmt: skip
"""Kinds that are translated by a table of keys only; Primus by those of Megatron-LM or torchtitan."""
_BEGINS = re.compile(r"^[^#\n]*?(?<!-)-{8,} arguments -{8,}", re.MULTILINE)
_SIZE = re.compile(r"\bhidden_size \.{3,} \d+[ \t\r]*$", re.MULTILINE)  # of Megatron's dump; GPT-NeoX's lines say more
_STEPS = re.compile(r":::MLLOG|\biteration\s+\d+\s*/\s*\d+\s*\|")
"""Of logs of steps: mlcommons/logging, Megatron-LM."""
_LAUNCHED = r"\b(?:accelerate|torchrun|deepspeed|srun|deepy\.py)\b"
_DS_KEYS = "zero_optimization|train_batch_size|train_micro_batch_size_per_gpu"
STARTS = r"\b(?:srun|mpirun|torchrun|python3?|deepspeed)\s"


def is_plan(text: str) -> bool:
    """Whether a text is a plan: only sections of one, among them a model and where it runs.

    >>> is_plan("{model: llama3-8b, devices: 8, data: {gbs: 8}}"), is_plan("{model: {}, trainer: {}}")
    (True, False)
    """
    if len(text) > 100_000 or not re.search(r"\b(?:parallelism|hardware|devices)\b", text):
        return False
    try:
        found = parse(text, "")
    except ConfigError:
        return False
    sections = found.keys() if isinstance(found, dict) else set()
    runs = bool({"parallelism", "hardware", "devices"} & sections)
    return "model" in sections and runs and sections <= {*Job.model_fields}


def kind_of(path: str, text: str, nearby: NearbyFiles | None = None, *, outer: bool = True) -> str:
    """The kind of a file for `--from auto`: the most specific whose marks it has; in comments, if nowhere else.

    A script of accelerate, torchrun or srun is of the kind of the config that it names, where that is found `nearby` it; an
    `outer` one without marks is of the kind of the scripts that it runs.

    Raises:
        ConfigError: it has no marks of any kind.
    """
    nearby = nearby or NearbyFiles()
    bare = re.sub(r"^[ \t]*#.*", "", text, flags=re.MULTILINE) if _is_shell(path, text) else text
    dump = (begins := _BEGINS.search(text)) and _SIZE.search(text, begins.end())
    kinds = ["megatron"] if dump else _kinds(bare) or _kinds(text)
    if set(kinds) <= {"transformers", "deepspeed"} and re.search(_LAUNCHED, text):
        named = (nearby.text(name) for name in re.findall(r"[\w./-]+\.ya?ml\b", text))
        kinds += [kind for inside in named if inside for kind in _kinds(inside) if kind in TABLES]
    ordered = ("primus", *TABLES[:-1], "torchtitan", "nemo", "megatron", "transformers", "deepspeed")
    telling = [kind for kind in ordered if kind in kinds]
    if telling[:1] == ["swift"] and re.search(r"\bmegatron (?:sft|pt|rlhf)\b", text):
        return "swift" if _runs_swift(path, text, nearby) else "megatron"  # ms-swift's own launcher of Megatron-Core
    if telling[:1] == ["transformers"] and _is_ds_config(text):
        return "deepspeed"
    if not telling and _is_shell(path, text):  # which reports what it launches
        return kind_started(text, nearby) or (_kind_within(path, text, bare, nearby) if outer else "megatron")
    if not telling and _STEPS.search(text):
        raise ConfigError(f"{path}: a log that does not print the job's config; give the config or the script")
    if not telling:
        _complete(path, text)
        known = f"unknown framework; use --from {', '.join([*KINDS, *TABLES])}"
        raise ConfigError(f"{path}: {PROGRAM if path.endswith('.py') else known}")
    return telling[0]


def _kinds(text: str) -> list[str]:
    """The kinds whose marks a text has."""
    marks = {kind: "|".join(patterns) for kind, patterns in table_file("kinds").items()}
    marks |= {kind: load_table(kind.replace("-", "_")).raw["marks"] for kind in TABLES}
    return [kind for kind, pattern in marks.items() if re.search(pattern, text, re.MULTILINE)]


def another(kind: str, path: str, text: str, nearby: NearbyFiles | None = None) -> str:
    """The message for a text that is not of this kind: another kind's, or not text at all; "" where neither is clear.

    >>> another("deepspeed", "a.toml", "[training]"), another("torchtitan", "a.toml", "[training]")
    ('is a file of torchtitan; try --from torchtitan', '')
    """
    kinds = _kinds(text)
    if kind in kinds:
        return ""
    if kinds:
        other = kind_of(path, text, nearby)
        return f"is a file of {other}; try --from {other}" if other != kind else ""
    return "is not a text file; expected a launch script, config or log" if _garbled(text) else ""


def _complete(path: str, text: str) -> None:
    """Check that a file with the name of a config is one.

    Raises:
        ConfigError: it is not valid YAML, JSON or TOML.
    """
    if path.endswith((".yaml", ".yml", ".json")):
        parse(text, path, repeats=True)
    elif path.endswith(".toml"):
        try:
            tomllib.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: not valid TOML ({error})") from None


_SCRIPT = re.compile(r"[\w./-]+\.(?:sh|slurm|sbatch)\b")


def _kind_within(path: str, text: str, bare: str, nearby: NearbyFiles) -> str:
    """The kind of the first script with marks of one that a script runs; `bare`: the script without its comments."""
    inside = (found for name in _SCRIPT.findall(bare) if (found := nearby.text(name)) and found != text)
    kinds = (kind_of(path, script, nearby, outer=False) for script in inside)
    return next((kind for kind in kinds if kind != "megatron"), "megatron")


def _runs_swift(path: str, text: str, nearby: NearbyFiles) -> bool:
    """Whether a script that may start ms-swift with or without Megatron-Core starts it without, as its variables are."""
    if not re.search(r"\bswift (?:sft|pt)\b", text):
        return False
    from steptime.launch.shell.script import read_script

    try:
        before = read_script(text, path, {}, nearby).before
    except ConfigError:
        return False
    return bool(before) and before[-1].text == "swift"


def _is_shell(path: str, text: str) -> bool:
    """Whether a file is a shell script, by its name or its first line."""
    return path.endswith((".sh", ".slurm", ".sbatch")) or bool(re.match(r"#!.*\b(?:ba|z)?sh\b|#SBATCH", text))


def names_its_config(text: str) -> bool:
    """Whether a script starts a custom program with a ds_config, which may not be there."""
    starts = not text.lstrip().startswith("{") and re.search(STARTS, text)
    return bool(starts and re.search(r"--deepspeed(?:_config)?[= ]+(?!--)\"?\$?[\w{}$./-]+", text))


def _is_ds_config(text: str) -> bool:
    """Whether a text is a ds_config.json, even if it contains flags of a trainer (for the autotuner)."""
    try:
        tree = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(tree, dict) and any(key in tree for key in _DS_KEYS.split("|"))


def _garbled(text: str) -> bool:
    """Whether at least one character in ten of the beginning is not text."""
    head = text[:4096]
    return 10 * sum(not (letter.isprintable() or letter.isspace()) or letter == "\ufffd" for letter in head) > len(head)
