"""The number of devices of a job: from a launcher's line, a log, or the environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from steptime.base.config import ConfigError, show
from steptime.hardware.machine import Machine
from steptime.launch.job_keys import JobKeys
from steptime.launch.reading import Env, LaunchFlag, Sets

_PER_NODE = re.compile(r"(?:--nproc[-_]per[-_]node|--ntasks-per-node|--gpus-per-node)[= ](\d+)|\bNGPU=(\d+)")
_NODES = re.compile(r"--(?:nnodes|nodes)[= ](\d+)(?![\d:])|\bNNODES=(\d+)")
_ALL = re.compile(
    r"(?:--ntasks|--world[-_]size)[= ](\d+)|\bWORLD_SIZE=(\d+)|\bworld[_ ]size\b\s*(?:[:=]|is|of)?\s*(\d+)"
)


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(group for group in found.groups() if group)) if found else None


def devices_in(text: str, env: Env = None) -> int | None:
    """All devices of a job by the first launcher line of a text (torchrun, srun), else by WORLD_SIZE, or NGPU and NNODES.

    >>> devices_in("srun --nodes=2 torchrun --nproc_per_node=8 train.py"), devices_in("", {"NGPU": "4"})
    (16, 4)
    """
    for words in (text, " ".join(f"{key}={value}" for key, value in (env or {}).items() if key in _NAMES)):
        if (whole := _first(_ALL, words)) is not None:
            return whole
        if (per_node := _first(_PER_NODE, words)) is not None:
            return per_node * (_first(_NODES, words) or 1)
    return None


_COMMENT = re.compile(
    r"#.*(?:\b(?:preset for|(?<!as it was )trained on|hardware: (?:single|one) node) \(?(\d+)x? (?:\w+ ){0,2}?GPUs?\b"
    r"|\bfor (\d+) nodes? of (\d+) (?:x )?[A-Z]\d"
    r"|\btune run (?:--nnodes (\d+) )?--nproc_per_node (\d+)|\btune run \w+_(single)_device)",
    re.IGNORECASE,
)
_ANOTHER = re.compile(r"\bon (\d+)x? (?:\w+ ){0,2}GPUs?\b", re.IGNORECASE)
"""Of a comment that may name the devices of another run than the config's: "validated on 8 GPUs"."""
_OF_A_RUN = re.compile(r"#.*\bas it was trained on (\d+)x? (?:\w+ ){0,2}?(?:\w+\s*#\s*)?GPUs", re.IGNORECASE)


def of_comment(text: str) -> int | None:
    """The devices for which a comment of a config says that it is, or its batch.

    A preset for 64 A100 GPUs (torchtitan), a batch size "trained on 32 gpus" (Pythia). None where comments name other numbers.

    >>> of_comment("# tune run --nproc_per_node 2 full_finetune_distributed")
    2
    """
    found = _COMMENT.search(text)
    if found is None:
        return None
    whole, many, each, nodes, per_node, single = found.groups()
    said = 1 if single else int(whole) if whole else int(many or nodes or 1) * int(each or per_node)
    comments = "\n".join(re.findall(r"#[^\n]*", text))
    return None if {int(count) for count in _ANOTHER.findall(comments)} - {said} else said


def of_a_run(text: str) -> dict[str, str]:
    """The question of devices, where a comment says on how many a model was trained: a copy with other degrees keeps it.

    EleutherAI/gpt-neox configs/20B.yml, on 96x 40GB A100 GPUs

    >>> of_a_run("# as it was trained on 96x 40GB A100 GPUs.")["devices"]
    'number of devices unknown: a comment says that the model was trained on 96; add --set parallelism.dp=N'
    """
    found = _OF_A_RUN.search(text)
    told = f"a comment says that the model was trained on {found[1]}" if found else ""
    return {"devices": f"number of devices unknown: {told}; {SET_DEVICES}"} if found else {}


_NAMED = re.compile(
    r"(?i)(?<![\da-z])(?<!\d[-_])(\d{1,5}|single)(?:[-_]?gpus?|x[-_]?(?:gb|b|h|a|mi)\d{2,3})(?![a-z\d])"
)


def of_name(name: str) -> int | None:
    """The devices that the name of a config says; None where it says none, or two numbers ("16-32-gpus").

    >>> [of_name(f"{name}.toml") for name in ("8b_8_gpus", "70b-16xb200-16k", "10b_4x_a100_40GB", "20b_single_gpu", "3_8b")]
    [8, 16, 4, 1, None]
    """
    counts = {int(count) if count.isdecimal() else 1 for count in _NAMED.findall(name.rpartition("/")[2])}
    return counts.pop() if len(counts) == 1 else None


SET_DEVICES = "add --set parallelism.dp=N"
"""The user's fix where the number of devices is unknown."""
OF_EXAMPLE = "no arguments given"
"""Begins the note that the arguments of a script are those of an example in its comments."""
OF_OPTIONS = "the script's options (getopts)"
"""Begins the note that a script is read as run without its options."""
FIRST_OF_SEVERAL = ", of which only the first is read"
"""In the note that a script launches several jobs."""
NOT_STATED = "number of devices not set"
"""Start of the note on a number of devices that no file states; the report prints it below its first lines."""
LAUNCHED = "launched on "
"""Start of the note on the nodes and processes that a launch command states."""
NOT_THE_FILES = "number of devices set to "
"""Start of the note on a number of devices that the user's settings make and the file contradicts; printed at the same place."""


def taken(devices: int, by: str) -> str:
    """The note on a number that a framework's own launcher takes by default.

    >>> taken(8, "run_train.sh, NGPU 8 unless it is set")
    'number of devices not set, 8 assumed: run_train.sh, NGPU 8 unless it is set; else add --set parallelism.dp=N'
    """
    return f"{NOT_STATED}, {devices} assumed: {by}; else {SET_DEVICES}"


def written(file: str, text: str) -> tuple[int | None, list[str]]:
    """The devices by a config's name, else by a comment, which copies of an example keep; and the note on it.

    >>> written("a_8_gpus.toml", "# a preset for 64 A100 GPUs")[0], written("a.toml", "")
    (8, (None, []))
    """
    found = {"the name of the file": of_name(file), "a comment of the file": of_comment(text)}
    by = next((by for by, devices in found.items() if devices), "")
    return (found[by], [taken(found[by] or 0, by)]) if by else (None, [])


def is_told_first(note: str, devices: int, on_node: int) -> bool:
    """Whether the report prints a note on what a launch file leaves open below its first lines."""
    if re.match(r"vocabulary not set, (?:that of|.*\(GPT2BPETokenizer\))|approximated: --use-checkpoint-args", note):
        return True  # that tokenizer may read files of another, and the checkpoint may be of another model
    if nodes := re.match(r"launched on ([\d,]+) nodes? with", note):  # on more than the processes take there
        return int(nodes[1].replace(",", "")) > -(-devices // on_node)
    return note.startswith((NOT_STATED, NOT_THE_FILES, OF_EXAMPLE, OF_OPTIONS)) or FIRST_OF_SEVERAL in note


def still_true(notes: Iterable[str], sets: Sets) -> list[str]:
    """The notes of a script, but for those on a number of devices where the user tells the number."""
    return [note for note in notes if not (states_devices(sets) and note.startswith((NOT_STATED, LAUNCHED)))]


def is_default(note: str) -> bool:
    """Whether a note is on a number of devices that a launcher's default, or a variable of the script, gives."""
    return note.startswith(NOT_STATED)


def stated(devices: int | None, notes: Iterable[str], sets: Sets) -> int | None:
    """The devices that a launch file with these notes gives, but for a default where the user tells the number."""
    return None if states_devices(sets) and any(map(is_default, notes)) else devices


def of_script(keys: JobKeys, devices: int | None, notes: Iterable[str]) -> int | None:
    """The devices of a Megatron script, but for a default where a ds_config's batch sizes tell dp.

    A number in variables of the script that does not divide the batch is asked for.
    """
    devices = stated(devices, notes, keys.sets)
    note = next(filter(is_default, keys.notes), "")
    if devices is None or not note:
        return devices
    ranks = prod(keys.whole(f"{axis}_parallel_size") or 1 for axis in ("tensor_model", "pipeline_model", "context"))
    share = (keys.whole("micro_batch_size") or 1) * devices // ranks
    whole = keys.whole("global_batch_size") or share
    why = note.partition(" assumed: ")[2].partition("; else")[0]
    against = " of the script" in why and (devices % ranks or whole % share)
    if against:
        told = f"{devices} devices ({why}), {ranks} to a replica, do not divide the batch of {whole}"
        keys.ask("parallelism.dp", f"number of devices unknown: {told}")
    if not against and keys.whole("data_parallel_size") is None:
        return devices
    keys.notes = [note for note in keys.notes if not is_default(note)]
    return None


def states_devices(sets: Sets) -> bool:
    """Whether the user tells the number of devices."""
    return any(told(sets, key) is not None for key in ("parallelism.dp", "devices", "hardware.nodes"))


_NAMES = ("WORLD_SIZE", "NGPU", "NNODES")


def told(sets: Sets, key: str) -> Any:
    """The user's setting of a dotted key; None where nothing is set.

    >>> told({"data.seqlen": 4096}, "data.seqlen"), told({"model": "gpt2-xl"}, "model.n_layers")
    (4096, None)
    """
    sets = sets or {}
    if key in sets:
        return sets[key]
    section, _, name = key.partition(".")
    inside = sets.get(section)
    return inside.get(name) if isinstance(inside, Mapping) else None


def told_whole(sets: Sets, key: str) -> int | None:
    """The user's setting of a dotted key as a whole number.

    Raises:
        ConfigError: it is none.
    """
    value = told(sets, key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"--set {key}: expected a whole number of at least 1 (got {show(value)})")
    return value


def machine_told(sets: Sets) -> Machine | None:
    """The machine that the user names; None where none is named."""
    name = told(sets, "hardware.node_type") or told(sets, "hardware")
    try:
        return Machine.load(name) if isinstance(name, str) else None
    except ConfigError:  # reported with the whole plan
        return None


def on_node(sets: Sets) -> int | None:
    """Devices per node of the machine that the user names; None where none is named."""
    return machine.devices_per_node if (machine := machine_told(sets)) else None


def _launched(keys: JobKeys, ranks: int) -> int | None:
    """The number of devices that the framework's own launcher takes by default; None where it does not fit the ranks."""
    launcher = keys.launcher or {}
    if any(keys.get(key) not in (None, *values) for key, values in launcher.get("only", {}).items()):
        return None  # another launcher's
    devices = on_node(keys.sets) if launcher.get("devices") == "node" else launcher.get("devices")
    if devices is None or devices % ranks:
        return None
    keys.notes.append(taken(devices, launcher["by"]))
    keys.assumed_flags.append(LaunchFlag("devices", str(devices), "default", f"parallelism.dp: {launcher['by']}"))
    return int(devices)


def _told_number(sets: Sets) -> int | None:
    """The devices of the user's nodes, else the user's number."""
    nodes, each = told_whole(sets, "hardware.nodes"), on_node(sets)
    return nodes * each if nodes and each else told_whole(sets, "devices")


def _set_to(sets: Sets, degrees: Mapping[str, int], by_file: int) -> int:
    """The devices of the job that the user's settings make: dp is theirs, or what the file's devices and degrees give.

    >>> [_set_to(sets, {"tp": 2, "pp": 1}, 16) for sets in ({}, {"parallelism.dp": 4}, {"parallelism.tp": 4}, {"devices": 64})]
    [16, 8, 32, 64]
    """
    ranks = prod(degrees.values())
    own = prod(told_whole(sets, f"parallelism.{axis}") or degree for axis, degree in degrees.items())
    if dp := told_whole(sets, "parallelism.dp"):
        return dp * own
    return _told_number(sets) or (by_file if own == ranks else max(by_file // ranks, 1) * own)


def data_parallel(
    keys: JobKeys, degrees: Mapping[str, int], devices: int | None, fix: str = "", replicas: int = 1
) -> int | None:
    """Data-parallel ranks: the user's number, else the devices divided by the other degrees; None where neither is known.

    `replicas`: the number of copies that the ranks form; a launcher's default that has fewer ranks is not the job's.
    """
    if (ranks := prod(degrees.values())) < 1:  # a degree of 0, which the plan refuses
        return 1
    dp, by_file = told_whole(keys.sets, "parallelism.dp"), devices
    devices = (given := _told_number(keys.sets)) or devices
    if by_file is not None and (set_to := _set_to(keys.sets, degrees, by_file)) != by_file:
        keys.notes[:] = [note for note in keys.notes if not note.startswith(LAUNCHED)]
        keys.notes.append(f"{NOT_THE_FILES}{set_to:,}, while the file starts {by_file:,}")
    if dp is not None or (devices := devices or _launched(keys, ranks * replicas)) is None:
        return dp
    if devices % ranks or devices < ranks:
        words = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        fix = f" ({ranks}, {2 * ranks}, {3 * ranks} ... are){fix}" if given or fix else ""
        keys.problem(f"world size {devices} is not a multiple of {words} = {ranks}{fix}")
    return max(devices // ranks, 1)
