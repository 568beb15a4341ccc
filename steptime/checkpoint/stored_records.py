"""Records that readers fill: tensors, problems, the contents of one file, the contents of a set of files.

Shapes are in elements, sizes in bytes, offsets in the unit their name says. Nothing here reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from steptime.checkpoint.pickles.pickle_verdict import PickleFacts

Shape = tuple[int, ...]
MAX_ELEMENTS = 1 << 63
GAPS = frozenset({"MISSING_RANK", "MISSING_FILE", "MISSING_SHARD", "TRUNCATED"})
"""Problems that explain missing tensors or pieces."""


@dataclass(slots=True)
class Problem:
    """One thing that is wrong with a checkpoint; `severity` is "error" (exit 1) or "warning" (exit 1 under --strict)."""

    code: str
    message: str
    file: str | None = None
    tensor: str | None = None
    severity: str = "error"


class UnreadableError(Exception):
    """A file or directory of which nothing can be summarized; carries the `Problem` that is the reason."""

    def __init__(self, code: str, message: str, file: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(code, message, file)


@dataclass(slots=True)
class StoredTensor:
    """One named tensor as stored: `shape` [elements] and `nbytes` are of the piece in `file`, `global_shape` of the whole.

    `storage` names the storage inside `file`, which spans `storage_nbytes` and has the `checksum` the container keeps of
    it; the tensor covers `extent` bytes of it from `start`. `offsets` are its first element in the whole. `unique` is the
    number of elements nobody counted before (0 for an alias), filled by `counting.count`.
    """

    name: str
    shape: Shape
    dtype: str
    nbytes: int
    file: str = ""
    role: str = ""
    storage: str | None = None
    storage_nbytes: int = 0
    start: int = 0
    extent: int = -1
    checksum: int | None = None
    global_shape: Shape | None = None
    offsets: Shape | None = None
    rank: dict[str, int] | None = None
    alias_of: str | None = None
    unique: int = 0
    note: str = ""

    @property
    def numel(self) -> int:
        """Elements of the stored piece; a 0-d tensor has one."""
        return prod(self.shape)

    @property
    def whole(self) -> Shape:
        """Shape of the whole tensor, of which this may be a piece."""
        return self.shape if self.global_shape is None else self.global_shape


@dataclass(slots=True)
class Contents:
    """What one file holds: tensors, problems, printable facts; `nbytes` of the file, of which `read` bytes were read."""

    file: str
    format: str
    tensors: list[StoredTensor] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    pickle: PickleFacts | None = None
    nbytes: int = 0
    read: int = 0

    def problem(self, code: str, message: str, tensor: str | None = None, severity: str = "error") -> None:
        """Note one problem of this file."""
        self.problems.append(Problem(code, message, self.file, tensor, severity))

    def drop_impossible(self) -> None:
        """Drop tensors of 2**63 elements or more, which no library can hold, and report them."""
        shapes = {t.shape for t in self.tensors} | {t.global_shape for t in self.tensors if t.global_shape is not None}
        huge = {shape for shape in shapes if prod(shape) >= MAX_ELEMENTS}
        wrong = [t for t in self.tensors if t.shape in huge or t.global_shape in huge] if huge else []
        if wrong:
            gone = set(map(id, wrong))
            self.tensors[:] = [tensor for tensor in self.tensors if id(tensor) not in gone]
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            self.problem("BAD_TENSOR", f"tensor {wrong[0].name}{more}: 2**63 elements or more", wrong[0].name)


@dataclass(slots=True)
class Section:
    """One set of files that belong together, e.g. the shards of a model or all ranks of one iteration.

    `parallelism` has degrees (tp, pp, ...) with their `source`; `ranks` one row per (stage, rank) for the table;
    `facts` holds what the files say about themselves (step, args, config, metadata), `stem` what their names have in common.
    """

    format: str
    container: str
    path: str
    tensors: list[StoredTensor] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    pickles: list[PickleFacts] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    read: int = 0
    parallelism: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    stem: str = ""
    same_as: str | None = None
    unread: int = 0  # files of the set that could not be read
    notes: list[str] = field(default_factory=list)

    def problem(
        self, code: str, message: str, file: str | None = None, tensor: str | None = None, severity: str = "error"
    ) -> None:
        """Note one problem of this set."""
        self.problems.append(Problem(code, message, file, tensor, severity))

    @property
    def torn(self) -> bool:
        """Whether parts of the set are known to be missing, so that its tensors are not all of the model's."""
        return bool(self.unread) or any(problem.code in GAPS for problem in self.problems)

    def absorb(self, contents: Contents) -> None:
        """Add the contents of one file, except its facts, which the caller interprets."""
        self.tensors += contents.tensors
        self.problems += contents.problems
        self.files.append(contents.file)
        self.nbytes += contents.nbytes
        self.read += contents.read
        if contents.pickle is not None:
            self.pickles.append(contents.pickle)
