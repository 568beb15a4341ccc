"""The verdict on the globals of a pickle stream: which would run code in a plain load, which `weights_only=True` refuses.

Default-deny: a global is ignored only when it is listed as building data (`known_globals`). Everything else is named: as an error
when it is available wherever torch is, or is a function that the stream calls, since a plain load then runs it; as a warning when
it is a class of another project, whose code a load imports. No list proves that a file is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steptime.base.words import counted
from steptime.checkpoint.pickles.known_globals import ALLOWED, CALLERS, CLASSES, DTENSOR, INERT, NAMES, PRESENT
from steptime.checkpoint.pickles.pickle_streams import Streams
from steptime.checkpoint.pickles.values import COMPUTED, EXTENSION, STORAGE_LOADER, PickleState, Ref

BLOCKED_MODULES = frozenset({"sys", "os", "posix", "nt"})  # torch _weights_only_unpickler._blocklisted_modules
OPAQUE_OPCODE_LIMIT = 8
OWN = frozenset({"__main__", "__mp_main__", "__torch__"})  # the script that saved; the classes of a TorchScript archive
DOORS = frozenset({*BLOCKED_MODULES, "subprocess", "builtins", "eval", "exec", "system", "popen"})
_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}


@dataclass(slots=True)
class Danger:
    """A global that runs code on a plain load: `argc` arguments at byte `at` of `where`, or only named (`argc` None)."""

    path: str
    where: str
    at: int
    argc: int | None

    def text(self) -> str:
        """The line of the report."""
        act = "named" if self.argc is None else f"called with {counted(self.argc, 'argument')}"
        return (
            f"DANGER {self.path} {act} at byte {self.at} of {self.where}: "
            "loading it with torch.load(weights_only=False) or pickle would run it"
        )


@dataclass(slots=True)
class PickleFacts:
    """The globals that the streams of one file name.

    `unknown` are globals of other projects, whose code a plain load imports. `refused` lists why
    `torch.load(weights_only=True)` would not take it; [] means it would, after importing torch.distributed.tensor where
    it holds DTensors.
    """

    refs: list[str] = field(default_factory=list)
    dangerous: list[Danger] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    torch_file: bool = True


def _canonical(path: str) -> str:
    module, _, name = path.partition(".")
    return f"{_PYTHON2.get(module, module)}.{name}"


def is_inert(path: str) -> bool:
    """Whether a global only builds data, called or not; a member of such a class (an enum's) too."""
    path = _canonical(path)
    if path in ALLOWED or path in INERT:
        return True
    owner = next((owner for owner in CLASSES if path.startswith(f"{owner}.")), None)
    if owner is None:
        return False
    below = path[len(owner) + 1 :].split(".")
    return len(below) <= CLASSES[owner] and below[-1].lstrip("_")[:1].isupper()


def is_member(path: str) -> bool:
    """Whether a global is an attribute of a class that only builds data: Python 3.11.0 to 3.11.3 pickles an enum's so."""
    return is_inert(path.rpartition(".")[0])


def runs_code(path: str, called: bool = True) -> bool:
    """Whether a plain load that meets this global, and calls it or not, may run code other than constructors of data."""
    if is_inert(path):
        return False
    path = _canonical(path)
    root, *rest = path.split(".")
    if root in (COMPUTED, EXTENSION) or (root.startswith("_") and root not in OWN):
        return True
    if any(part in DOORS or (part.startswith("__") and part.endswith("__")) for part in rest):
        return True
    if root in PRESENT:
        return called or not (is_member(path) or path.startswith(NAMES))
    return called and not path.rpartition(".")[2][:1].isupper()


def _danger(ref: Ref, state: PickleState, passed: bool) -> Danger | None:
    read = ref.path == STORAGE_LOADER and not (passed or state.unread)  # its bytes are streams that are judged too
    if read or (ref.resolved and not ref.called):
        return None
    used = bool(ref.called or ref.patched or passed)
    if not (runs_code(ref.path, used) or ref.patched):
        return None
    return Danger(ref.path, state.where, ref.called or ref.at, ref.argc if ref.called else None)


def judge(*streams: Streams, torch_file: bool = True) -> PickleFacts:
    """Judge the globals of all `streams` of a file.

    `torch_file` is false for files that `torch.load` does not read (torch reads DCP's `.metadata` with plain pickle).
    """
    facts = PickleFacts(torch_file=torch_file)
    foreign: set[int] = set()
    for state in (state for found in streams for state in found.states):
        passed = any(ref.called and ref.path in CALLERS for ref in state.refs.values())
        for ref in state.refs.values():
            _judge_ref(facts, ref, state, passed)
        foreign |= state.foreign | ({0x94} if state.memoized else set())
        if state.indirect is not None:
            facts.refused.append(f"a call of a computed function at byte {state.indirect[0]}")
            facts.dangerous.append(Danger("the result of a call", state.where, *state.indirect))
    if foreign:
        facts.refused.append(f"opcodes {' '.join(f'0x{op:02x}' for op in sorted(foreign)[:OPAQUE_OPCODE_LIMIT])}")
    for names in (facts.refs, facts.needs, facts.refused, facts.unknown):
        names[:] = sorted(set(names))
    return facts


def _judge_ref(facts: PickleFacts, ref: Ref, state: PickleState, passed: bool) -> None:
    path = _canonical(ref.path)
    facts.refs.append(ref.path)
    danger = _danger(ref, state, passed)
    if danger is not None:
        facts.dangerous.append(danger)
    elif not (is_inert(path) or is_member(path) or ref.resolved or path == STORAGE_LOADER or path.startswith(NAMES)):
        facts.unknown.append(ref.path)
    if path not in DTENSOR and (path not in ALLOWED or ref.module in BLOCKED_MODULES):
        facts.refused.append(ref.path)
        if danger is None:
            facts.needs.append(ref.path)
