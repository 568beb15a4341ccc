"""Other files that a launch file uses: those that it sources, runs or names, and those that the user adds with --with."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from glob import escape
from itertools import islice
from pathlib import Path, PurePosixPath

from steptime.base.config import ConfigError

PART_OF_A_JOB = "{} names no model; {} beside it names it: give that script, or add --set model=NAME"
MOST_BYTES = 2_000_000
"""Size limit of any file that a launch file reads."""


class NearbyFiles:
    """The files that a launch file may read: added ones by their name, others only within its own folder.

    `folder`: that of the launch file; None: no files are searched for in it. `added`: paths.
    """

    def __init__(self, folder: Path | None = None, added: Iterable[str] = ()) -> None:
        self.folder = folder
        self.added = [Path(name) for name in added]
        self.written: dict[str, str] = {}
        """Name -> text of the files that a script writes before it reads them."""
        for path in self.added:
            if not path.is_file():
                raise ConfigError(f"--with {path}: no such file")

    def path(self, name: str) -> Path | None:
        """The path of a name, as a script or a config writes it; None where there is no such file.

        The part before a name without a value ("$DIR/args.sh") is ignored, and so is a folder that does not exist.
        """
        known = re.split(r"[\s\ue000-\uf8ff]+|\$\{?\w+\}?|\$\([^)]*\)", name.strip("'\""))[-1].lstrip("/")
        pure = PurePosixPath(known)
        if not pure.name or pure.name == "..":
            return None
        found = next((path for path in self.added if path.name == pure.name), None)
        if found is not None or self.folder is None:
            return found
        pure = PurePosixPath(*[part for part in pure.parts if part not in {"..", "."}])
        # a path from the top of its repository (examples/train/job.yaml), where the file lies below that, wherever that was
        # when the script was written (/scratch/user/project/examples/train/job.yaml)
        tails = [PurePosixPath(*pure.parts[i:]) for i in range(len(pure.parts) - 1)]
        here = self.folder.resolve()
        above = [parent / tail for tail in tails for parent in (here, *here.parents[:6])]
        exact = [self.folder / known] if len(pure.parts) > 1 or self._in_repository(known) else []
        # a program or config alone is also that of a folder above, from which the script is started
        bare = here.parents[:4] if "/" not in name and pure.suffix in {".py", ".yaml", ".yml", ".json"} else []
        candidates = (*exact, self.folder / pure, *above, self.folder / pure.name, *(folder / pure for folder in bare))
        return next((path for path in candidates if is_readable(path)), None)

    def repository(self) -> Path | None:
        """The top of the checkout that the folder is in."""
        above = [self.folder.resolve(), *self.folder.resolve().parents] if self.folder is not None else []
        return next((folder for folder in above if (folder / ".git").exists()), None)

    def _in_repository(self, name: str) -> bool:
        """Whether a path relative to the folder stays inside the checkout."""
        root = self.repository()
        return root is not None and self.folder is not None and (self.folder / name).resolve().is_relative_to(root)

    def needed(self, name: str, where: str) -> str:
        """The text of a file without which a job is not known; `where`: what reads it.

        Raises:
            ConfigError: it was not found; the line names the one file of that name in the repository, if there is one.
        """
        if (text := self.text(name)) is not None:
            return text
        root = self.repository()
        same = [*islice(root.rglob(escape(PurePosixPath(name).name)), 2)] if root is not None else []
        fix = f"add --with {same[0] if len(same) == 1 else 'FILE'}"
        raise ConfigError(f"{where} {name}, which was not found; put it in the same folder, or {fix}")

    def script_of(self, path: str) -> str:
        """The name of the one script in the folder that names a file of it; "" where there is none, or several."""
        name = re.compile(rf"(?<![\w.-]){re.escape(PurePosixPath(path).name)}(?![\w-])")
        inside = sorted(self.folder.glob("*")) if self.folder is not None else []
        scripts = [found for found in inside if found.suffix in {".sh", ".slurm", ".sbatch"} and is_readable(found)]
        naming = [found.name for found in scripts if name.search(read_nearby(found))]
        return naming[0] if len(naming) == 1 else ""

    def config_of_nodes(self, name: str) -> Path | None:
        """The one config in the folder's conf/ that reads the number of nodes from variable `name` (MLPerf's of NeMo).

        The job's sizes may be in a folder of their own (configs/), beside that conf/.

        None where there is none, or several, or it is a part of another one that adds to it (hydra's defaults).

        Raises:
            ConfigError: the program beside it trains adapters, of which the config says nothing.
        """
        above = self.folder.parent if self.folder and self.folder.name else (self.folder or Path()).resolve().parent
        folders = [self.folder, above] if self.folder else []
        inside = ((where, sorted((*where.glob("conf/*.yaml"), *where.glob("src/conf/*.yaml")))) for where in folders)
        folder, configs = next(filter(lambda found: found[1], inside), (Path(), []))
        texts = {path: read_nearby(path) for path in configs if is_readable(path)}
        reads = [path for path, text in texts.items() if f"oc.env:{name}" in text]
        part = re.compile(rf"^\s*- {re.escape(reads[0].stem)}\b", re.MULTILINE) if reads else None
        around = [text for text in texts.values() if part and part.search(text)]
        own = {key for text in around for key in re.findall(r"^(\w+):", text, re.MULTILINE)} - {"defaults", "hydra"}
        # other whole configs that it composes; those of a section have an @ or a word before them
        composed = re.compile(r"^\s*- (\w+)\s*(?:#.*)?$", re.MULTILINE)
        also = {name for text in around for name in composed.findall(text)} - {"_self_"}
        if len(reads) != 1 or own or also - {reads[0].stem}:
            return None
        if re.search(r"\bLoRA\(", NearbyFiles(folder).text("train.py") or "") and "peft" not in texts[reads[0]]:
            why = "train.py beside it trains adapters over frozen weights (LoRA), whose settings are in its code"
            raise ConfigError(f"{reads[0]}: {why}; not modeled")
        return reads[0]

    def text(self, name: str) -> str | None:
        """The text of that file; None where there is none, or it cannot be read."""
        if (written := self.written.get(PurePosixPath(name.strip("'\"")).name)) is not None:
            return written
        path = self.path(name)
        try:
            return read_nearby(path) if path is not None else None
        except OSError:
            return None


def is_readable(path: Path) -> bool:
    """Whether a file of that name exists, and is not too large."""
    try:
        return path.is_file() and path.stat().st_size <= MOST_BYTES
    except OSError:  # a name longer than file systems have
        return False


def read_nearby(path: Path) -> str:
    """The text of such a file; what is not UTF-8 is replaced.

    Raises:
        OSError: it cannot be read.
        ConfigError: as `with_numbers`.
    """
    return with_numbers(path.read_text(encoding="utf-8", errors="replace"), path)


def with_numbers(text: str, path: Path | str) -> str:
    """The text, after checking that all its numbers can be read.

    Raises:
        ConfigError: one of them has more digits than Python reads.
    """
    most = sys.int_info.default_max_str_digits
    if found := re.search(rf"\d{{{most}}}", text):
        line = text.count("\n", 0, found.start()) + 1
        raise ConfigError(f"{path}: line {line}: a number of {most:,} digits or more; the file seems to be damaged")
    return text
