"""The door of checkpoints: damaged and rearranged ones of every format through `summarize-ckpt`. Needs the test extra."""

from __future__ import annotations

import contextlib
import os
import random
import re
from pathlib import Path

from checkpoint_seeds import Files, seeds
from fuzzing import Case, Door, damaged

from steptime.checkpoint import summarize_checkpoint
from steptime.commands.summarize_ckpt import main as summarize_ckpt

OPTIONS = (
    [], ["--json"], ["--json=full"], ["--tensors"], ["--depth", "9"], ["--all"], ["--emit-config", os.devnull], ["--id"],
    ["--diff"],
)  # fmt: skip


def files_of(folder: Path, most: int = 300_000) -> Files:
    """The files of a folder by their path in it; long ones are cut, which is one more way to be damaged."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes()[:most] for path in paths}


def rearranged(files: Files, draw: random.Random, pool: list[bytes]) -> Files:
    """A file less, one more under another number, or one in place of another."""
    found = dict(files)
    name = draw.choice(sorted(found))
    kind = draw.randrange(5)
    if kind == 0 and len(found) > 1:
        del found[name]
    elif kind == 1:
        number = draw.choice(("0", "1", "7", "00000", "99999999", "20000000"))
        found[re.sub(r"\d+", lambda old: number if draw.random() < 0.5 else old[0], name)] = found[name]
    elif kind == 2:
        found[name] = draw.choice(pool)
    elif kind == 3:
        found[f"{draw.choice(('x', 'model', 'iter_0000009', 'zero'))}/{name}"] = found[name]
    else:
        found[name + draw.choice((".tmp", ".index.json", ".pt", "-00001-of-00002.safetensors"))] = found[name]
    return found


def door(folders: list[Path]) -> Door:
    """Checkpoints of `seeds`, and those that lie in folders."""
    known = seeds()
    for folder in folders:
        known |= {str(one): files for one in sorted(folder.iterdir()) if one.is_dir() and (files := files_of(one))}
    pool = [data for files in known.values() for data in files.values()]

    def make(draw: random.Random, folder: Path) -> Case:
        files = known[draw.choice(sorted(known))]
        if draw.random() < 0.3:
            files = rearranged(files, draw, pool)
        hurt = draw.sample(sorted(files), min(len(files), draw.choice((1, 1, 1, 2))))
        for name, data in files.items():
            path = folder / name
            with contextlib.suppress(OSError):  # a file where a folder is
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(damaged(data, draw, pool) if name in hurt else data)
        alone = len(files) == 1 and draw.random() < 0.8
        path = str(folder / next(iter(files))) if alone else str(folder)
        options = list(draw.choice(OPTIONS))
        argv = [path, *options, *([str(folder)] if options == ["--diff"] else [])]
        told = f"summarize-ckpt {' '.join(argv)}"
        return Case(lambda: summarize_ckpt(argv), told, json="--json" in told)

    def warm(folder: Path) -> None:
        for number, files in enumerate(known.values()):
            for name, data in files.items():
                path = folder / str(number) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            summarize_checkpoint(folder / str(number))

    return Door(make, warm)
