"""`Inventory`: everything known about a checkpoint, computed once from the sections the readers return."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from steptime.checkpoint import adapter, architecture, counting, difference, quantized, tree
from steptime.checkpoint.confignames import FIELDS, from_config
from steptime.checkpoint.escape import escaped
from steptime.checkpoint.roles import ADAM_NAMES, state_name
from steptime.checkpoint.stored_records import Problem, Section, Shape, StoredTensor
from steptime.checkpoint.weight_names import BUFFERS

INCOMPLETE = frozenset(
    {"TRUNCATED", "MISSING_SHARD", "MISSING_RANK", "MISSING_METADATA", "MISSING_FILE", "SHORT_FILE", "STORAGE_MISSING",
     "STORAGE_SMALL", "UNCOMMITTED", "LEFTOVER", "MISSING_TENSOR", "MISSING_ITERATION", "INCOMPLETE_COVER", "NOT_DCP"}
)  # fmt: skip

OF_WEIGHTS = ("gguf", "config", "params")  # what is said beside other weights describes those


@dataclass(slots=True, eq=False)
class IO:
    """Cost of the summary: files opened, bytes read, wall time [s]."""

    files_opened: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


class StoredModel(NamedTuple):
    """One of several models of a folder: its files' path, unique parameters before quantization, and architecture."""

    path: str
    params: int
    architecture: dict[str, dict[str, Any]]


@dataclass(eq=False)
class Inventory:
    """A checkpoint: its sections (sets of files), and totals over all of them.

    A section that repeats the tensors of another (`same_as`) is listed but not counted.
    """

    path: str
    sections: list[Section]
    problems: list[Problem] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    io: IO = field(default_factory=IO)
    strict: bool = False

    def __post_init__(self) -> None:
        """Count every element once and decide which role represents the model."""
        for section in self.sections:
            _printable(section)
            counting.count(section)
            section.problems += counting.dragged(section.tensors)

    @cached_property
    def counted(self) -> list[Section]:
        """The sections that count, largest model first."""
        own = [section for section in self.sections if section.same_as is None]
        return sorted(own, key=lambda s: (-sum(t.role in ("model", "") for t in s.tensors), s.path))

    @cached_property
    def tensors(self) -> list[StoredTensor]:
        """Every stored piece of every counted section."""
        return [tensor for section in self.counted for tensor in section.tensors]

    @cached_property
    def model(self) -> list[StoredTensor]:
        """The model's tensors; where no role is known, all tensors without one."""
        named = [t for t in self.tensors if t.role == "model"]
        return named or [t for t in self.tensors if not t.role]

    @cached_property
    def restored(self) -> quantized.Restored:
        """The model before quantization: full matrices in place of packed ones."""
        return quantized.restore(self.model, [section.facts for section in self.counted])

    @cached_property
    def params(self) -> int:
        """Unique elements of the model: tied, aliased and replicated ones once."""
        return sum([t.unique for t in self.model])

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Whole shapes of the model's tensors by name."""
        return {t.name: t.whole for t in self.model}

    @property
    def structure(self) -> difference.Structure:
        """{name: (whole shape, dtype)} of the model, or of everything where nothing is one."""
        return {t.name: (t.whole, t.dtype) for t in self.model or self.tensors}

    @cached_property
    def totals(self) -> dict[str, int]:
        """Counts [elements] and sizes [bytes] of the whole checkpoint."""
        return {
            "tensors": sum(row["tensors"] for row in self._roles),
            "pieces": len(self.tensors),
            "params": self.params,
            "buffers": self.tree.elements(BUFFERS),
            "logical_params": _elements(self.shapes.values()),
            "stored_params": _elements([t.shape for t in self.model if t.alias_of is None]),
            "logical_bytes": sum(row["bytes"] for row in self._roles),
            "stored_bytes": counting.stored_bytes(self.tensors),
            "file_bytes": sum(section.nbytes for section in self.sections),
        }

    @cached_property
    def by_dtype(self) -> list[dict[str, Any]]:
        """Per element type, over all roles: tensors, unique elements, bytes; largest first."""
        return self._grouped("dtype", 0)

    @cached_property
    def _roles(self) -> list[dict[str, Any]]:
        return self._grouped("role", 1)

    @cached_property
    def _kinds(self) -> dict[tuple[str, str], tuple[AbstractSet[str], int, int]]:
        """(distinct names, unique elements, bytes) by dtype and role."""
        kinds: defaultdict[tuple[str, str], list[StoredTensor]] = defaultdict(list)
        for tensor in self.tensors:
            kinds[tensor.dtype, tensor.role].append(tensor)
        one = len(kinds) == 1 and self.model  # then the model is everything
        return {
            key: (
                self.shapes.keys() if one else {t.name for t in group},
                sum([t.unique for t in group]),
                sum([t.nbytes for t in group]),
            )
            for key, group in kinds.items()
        }

    def _grouped(self, field: str, at: int) -> list[dict[str, Any]]:
        """Distinct names of each role, unique elements and bytes by dtype (`at` 0) or role (1); largest first."""
        rows: dict[str, dict[str, Any]] = {}
        names: defaultdict[tuple[str, str], list[AbstractSet[str]]] = defaultdict(list)
        for kind, (own, params, nbytes) in self._kinds.items():
            row = rows.setdefault(kind[at], {field: kind[at], "tensors": 0, "params": 0, "bytes": 0})
            row["params"] += params
            row["bytes"] += nbytes
            names[kind[at], kind[1]].append(own)
        for (group, _), sets in names.items():
            rows[group]["tensors"] += len(sets[0] if len(sets) == 1 else set().union(*sets))
        return sorted(rows.values(), key=lambda row: -row["bytes"])

    @cached_property
    def by_role(self) -> dict[str, Any]:
        """Model, master copies, optimizer states and the rest."""
        rows = {row["role"]: row for row in self._roles}
        nbytes = {role: row["bytes"] for role, row in rows.items()}
        states = {state_name(t.name) for t in self.tensors if t.role == "optimizer"}
        named = sorted(state for state in states if not state.isdecimal())
        return {
            "model": {"params": self.params, "bytes": sum(t.nbytes for t in self.model)},
            "master": {"params": rows["master"]["params"], "bytes": nbytes["master"]} if "master" in rows else None,
            "optimizer": {
                "kind": "adam" if any(states >= names for names in ADAM_NAMES) else None,
                "states": named,
                "bytes": nbytes.get("optimizer", 0),
            },
            "other": {"bytes": nbytes.get("other", 0) + (nbytes.get("", 0) if "model" in rows else 0)},
        }

    @cached_property
    def tree(self) -> tree.Node:
        """The model's modules as before quantization, identical layers folded."""
        return tree.build(self.restored.tensors)

    @cached_property
    def architecture(self) -> dict[str, dict[str, Any]]:
        """The architecture from names, shapes and configs: {field: {value, from}}."""
        return self._inferred[0]

    @cached_property
    def models(self) -> list[StoredModel]:
        """The sets of files that are a language model each by themselves, where there are several."""
        sets = [(s, own) for s in self.counted if (own := [t for t in s.tensors if t.role in ("", "model")])]
        if len(sets) < 2 or self.adapter or any("pipeline" in section.facts for section, _ in sets):
            return []
        found = []
        for section, own in sets:
            whole = quantized.restore(own, [section.facts])
            shapes = {t.name: t.whole for t in whole.tensors}
            about = architecture.infer(shapes, [section.facts])[0]
            if about.get("vocab_sz", {}).get("from") in shapes:  # an embedding of its own, not what a config says
                found.append(StoredModel(section.path or ".", whole.params, about))
        return found if len(found) > 1 else []

    @cached_property
    def _inferred(self) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
        facts = [section.facts | ({"slices": True} if section.torn else {}) for section in self.counted]
        if self.adapter or self.models or any("pipeline" in fact for fact in facts):
            return {}, []
        if facts and facts[0].get("part"):  # its shapes are of a part: only what is stated holds
            stated = ((key, value, source) for source, known in from_config(facts[0]) for key, value in known.items())
            return {key: {"value": value, "from": source} for key, value, source in stated if key in FIELDS}, []
        rest = [{key: fact[key] for key in fact if key not in OF_WEIGHTS} for fact in facts[1:]]
        rows = self.restored.rows
        if rows and not rows[0].tensors:  # packed in a way that is not known: no shape can be trusted
            facts = [fact | {"slices": True} for fact in facts]
        tensors = self.restored.tensors
        shapes = self.shapes if tensors is self.model else {t.name: t.whole for t in tensors}
        return architecture.infer(shapes, [*facts[:1], *rest], {t.name for t in tensors if t.alias_of})

    @cached_property
    def all_problems(self) -> list[Problem]:
        """Every problem, errors first."""
        found = [*self.problems, *(p for s in self.sections for p in s.problems), *self._inferred[1]]
        return sorted(found, key=lambda p: p.severity != "error")

    @cached_property
    def adapter(self) -> dict[str, Any] | None:
        """Kind, rank, targets and base model of the largest set if it is an adapter, else None."""
        return adapter.describe(self.counted[0]) if self.counted else None

    @property
    def complete(self) -> bool:
        """Whether something was read and nothing was found to be missing."""
        missing = any(p.code in INCOMPLETE for p in self.all_problems) or any(s.unread for s in self.sections)
        missing = missing or any(section.facts.get("part") for section in self.counted)
        return bool(self.sections) and not missing

    @property
    def step(self) -> int | None:
        """The training step, where a file or its name says it."""
        steps = (section.facts.get("step") for section in self.counted)
        return next((step for step in steps if type(step) is int), None)

    @property
    def exit_code(self) -> int:
        """0 summarized, 1 summarized with problems (warnings count when `strict`), 2 nothing could be read."""
        if not self.sections:
            return 2
        return int(any(p.severity == "error" or self.strict for p in self.all_problems))

    @cached_property
    def id(self) -> str:
        """Structural hash: equal for checkpoints with the same tensor names, shapes and dtypes."""
        return difference.structural_hash(self.model or self.tensors)


def _printable(section: Section) -> None:
    """Texts of a file that reports show (element types, names of formats), without control characters."""
    section.format, section.container = escaped(section.format), escaped(section.container)
    odd = {dtype: escaped(dtype) for dtype in {tensor.dtype for tensor in section.tensors} if not dtype.isprintable()}
    for tensor in section.tensors if odd else ():
        tensor.dtype = odd.get(tensor.dtype, tensor.dtype)


def _elements(shapes: Iterable[Shape]) -> int:
    return sum(prod(shape) * count for shape, count in Counter(shapes).items())
