"""Selects one of several saves in a directory.

Tracker files: Megatron `latest_checkpointed_iteration.txt` (checkpointing.py), DeepSpeed `latest`
(runtime/engine.py). Without one the highest number is taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from steptime.checkpoint.roles import of_file
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.source import Source
from steptime.checkpoint.stored_records import Problem, UnreadableError

STEP_DIR = re.compile(
    r"^(?:iter_|global_step|checkpoint[-_]|step[-_]?|epoch[-_]?|ckpt[-_]?|iteration[-_]?)?(\d{1,12})$"
)
FLAX = re.compile(r"^checkpoint_\d{1,12}$")  # a file of msgpack, flax/training/checkpoints.py
NAMED_DIRS = {"release"}
WEIGHTS = (".safetensors", ".distcp", ".pt", ".pth", ".bin", ".gguf", ".msgpack", ".h5")
TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest.txt")
_UNCOMMITTED = re.compile(r"\.(?:orbax-checkpoint-tmp|tmp)(?:[-.]\d+)*$|^tmp-")


@dataclass(slots=True)
class ChosenSave:
    """The folders to summarize, their step, and the other saves by name."""

    folders: list[Folder]
    step: int | None = None
    others: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def step_of(name: str) -> int | None:
    """The training step in a directory's name, e.g. 5000 in iter_0005000."""
    match = STEP_DIR.match(name)
    return int(match[1]) if match else None


def choose(scan: FolderScan, folder: Folder) -> ChosenSave:
    """The save to summarize: `folder` itself, or its sub-directory with the tracker's name or the highest number.

    Weights in the folder itself are the model, and its saves are others; but DeepSpeed's save that a tracker names completes the
    files next to it.
    """
    tracker, target = _tracker(folder)
    saves = [name for name in folder.dirs if step_of(name) is not None or name in NAMED_DIRS or name == target]
    if any(map(FLAX.match, folder.files)):
        return _flax(folder, everything=scan.everything)
    if not saves:
        own = ChosenSave([folder], step_of(folder.path.rstrip("/").rpartition("/")[2]))
        if tracker and target:
            message = f"{tracker} names {target}, which does not exist"
            own.problems.append(Problem("MISSING_ITERATION", message, tracker))
        return own
    if not any(name.endswith(WEIGHTS) and not of_file(name) for name in folder.files):
        return _among(scan, folder, saves, tracker, target)
    if not scan.everything:
        others = [name for name in saves if name != target]
        folder.dirs = [name for name in folder.dirs if name not in others]
        return ChosenSave([folder], others=others)
    return ChosenSave([folder])


def _flax(folder: Folder, *, everything: bool) -> ChosenSave:
    """Flax's own saves are files of one folder: the one with the highest number, unless all are requested."""
    saves = sorted((name for name in folder.files if FLAX.match(name)), key=lambda name: step_of(name) or 0)
    others = [] if everything else saves[:-1]
    folder.files = [name for name in folder.files if name not in others]
    return ChosenSave([folder], step_of(saves[-1]), others)


def _among(scan: FolderScan, folder: Folder, saves: list[str], tracker: str | None, target: str | None) -> ChosenSave:
    problems: list[Problem] = []
    named = [name for name in saves if target is not None and (name == target or str(step_of(name)) == target)]
    saves.sort(key=lambda name: -1 if (step := step_of(name)) is None else step)
    chosen = named[0] if named else saves[-1]
    if target is not None and not named:
        problems.append(Problem("MISSING_ITERATION", f"{tracker} names {target}, which does not exist", tracker))
    unfinished = "an unfinished save (never renamed to its final name)"
    problems += [Problem("UNCOMMITTED", unfinished, name) for name in folder.dirs if _UNCOMMITTED.search(name)]
    others = [name for name in saves if name != chosen]
    if target is not None and named and step_of(chosen) is not None:
        newer = [name for name in others if (step_of(name) or -1) > (step_of(chosen) or 0)]
        if newer:
            message = f"{', '.join(newer)} is newer than the one in {tracker}: an unfinished save, or a rollback"
            problems.append(Problem("NEWER_ITERATION", message, tracker, severity="warning"))
    names = [chosen, *others] if scan.everything else [chosen]
    folders = list(scan.inside(folder, names, problems))
    return ChosenSave(folders, step_of(chosen), [] if scan.everything else others, problems)


def _tracker(folder: Folder) -> tuple[str | None, str | None]:
    """(tracker file, what it names) where there is one."""
    for name in TRACKERS:
        if name not in folder.files:
            continue
        try:
            with Source(folder.join(name), name) as source:
                text = source.upto(0, 200).decode("utf-8", "replace").strip()
        except UnreadableError:
            continue
        return name, str(int(text)) if text.isdecimal() and text.isascii() else text
    return None, None
