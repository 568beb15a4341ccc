"""Globals that a stream may name without a report, those that torch.load accepts, and modules that are always available.

The verdict is default-deny: whatever is not listed in data/checkpoint/pickle_globals.json is named in the report. A test
holds the lists against the installed Python, torch and numpy.
"""

from __future__ import annotations

from steptime.checkpoint.name_tables import table, words

_TABLES = table("pickle_globals")


def _paths(modules: dict[str, str | list[str]]) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for module, names in modules.items() for name in words(names))


ALLOWED = _paths(_TABLES["weights_only"]["names"])
"""Globals that `torch.load(weights_only=True)` of torch 2.13 accepts by default."""
OPCODES = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a\x80.")
"""Opcodes that torch's `_weights_only_unpickler.Unpickler.load` knows."""
LIBRARIES = {library: _paths(_TABLES["data"][library]) for library in ("python", "numpy", "torch", "writers")}
"""Globals that build data, by the library that writes them."""
INERT = frozenset().union(*LIBRARIES.values())
CLASSES: dict[str, int] = _TABLES["classes"]["names"]
"""Parts of torch whose classes records and pickled modules name, and how many names below them a class has at most."""
CALLERS = frozenset(_TABLES["callers"]["names"])
"""Listed globals that call their arguments: in a stream with one of them, every named function may be called."""
DTENSOR = frozenset(_TABLES["dtensor"]["names"])
"""Globals that `torch.load(weights_only=True)` accepts once torch.distributed.tensor is imported."""
NAMES = ("torch.nn.functional.", "torch._C._nn.")
"""Packages of torch whose functions a pickled module may hold, as long as nothing calls them."""
PRESENT = frozenset(words(_TABLES["present"]["names"]))
"""Top-level modules that are available wherever a checkpoint is loaded."""
