"""What the globals of a pickle stream mean: which would run code on a plain load, which `weights_only=True` refuses.

A denylist is never complete, so nothing here says that a file is harmless. Two sets are reported instead: globals that
are known to run code when a plain unpickler meets them (standard library functions outside a short list of inert types,
and loaders of torch and numpy), and every other global that is not on torch's own allowlist, which a loader must import.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from steptime.checkpoint.pickles.allowlist import ALLOWED
from steptime.checkpoint.pickles.values import COMPUTED

if TYPE_CHECKING:
    from steptime.checkpoint.pickles.interpreter import PickleInterpreter
    from steptime.checkpoint.pickles.values import Ref

BLOCKED_MODULES = frozenset({"sys", "os", "posix", "nt"})  # torch _weights_only_unpickler._blocklisted_modules
OPAQUE_OPCODE_LIMIT = 8

# Standard library globals that only build data.
INERT_MODULES = frozenset(
    {"array", "collections", "collections.abc", "datetime", "decimal", "enum", "fractions", "ipaddress", "numbers",
     "random", "uuid", "zoneinfo"}
)  # fmt: skip
INERT = frozenset(
    {"_codecs.encode", "argparse.Namespace", "builtins.bool", "builtins.bytearray", "builtins.bytes",
     "builtins.complex", "builtins.dict", "builtins.float", "builtins.frozenset", "builtins.int", "builtins.list",
     "builtins.object", "builtins.range", "builtins.set", "builtins.slice", "builtins.str", "builtins.tuple",
     "builtins.Ellipsis", "builtins.NotImplemented", "copy_reg._reconstructor", "copyreg._reconstructor",
     "copyreg.__newobj__", "copyreg.__newobj_ex__", "functools.partial", "itertools.count", "logging.Logger",
     "logging.getLogger", "operator.itemgetter", "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath",
     "pathlib.PurePosixPath", "pathlib.PureWindowsPath", "pathlib.WindowsPath", "pathlib._local.PosixPath",
     "pathlib._local.WindowsPath", "re._compile", "threading.Lock", "types.SimpleNamespace", "_thread.lock"}
)  # fmt: skip
# Outside the standard library: prefixes that load other files, compile text or start programs.
RUNS_CODE = (
    "numpy.f2py.", "numpy.load", "numpy.testing.", "numpy.lib.npyio.", "torch.hub.", "torch.load", "torch.jit.",
    "torch.package.", "torch.serialization.load", "torch.utils._config_module.", "torch.utils.bottleneck.",
    "torch.utils.collect_env.", "torch.utils.cpp_extension.", "torch.utils.data.datapipes.", "torch.testing.",
    "torch.fx.", "torch._dynamo.", "torch._inductor.", "torch.distributed.run.", "torch.distributed.rpc.",
    "torch.storage._load_from_bytes", "pip.", "setuptools.", "pkg_resources.", "distutils.", "cloudpickle.", "dill.",
    "joblib.", "IPython.", "pandas.eval", "pandas.io.", "requests.", "copyreg extension.", "_pickle.", "__builtin__.",
    "exceptions.", "commands.", "popen2.", "urllib2.", "aiohttp.", "httpx.", "paramiko.", "fsspec.", "pty.", "nt.",
)  # fmt: skip
_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}
DTENSOR = frozenset(
    {"torch.distributed.device_mesh.DeviceMesh", "torch.distributed.tensor._dtensor_spec.DTensorSpec",
     "torch.distributed.tensor._dtensor_spec.TensorMeta", "torch.distributed.tensor.DTensor",
     "torch.distributed.tensor.placement_types.Partial", "torch.distributed.tensor.placement_types.Replicate",
     "torch.distributed.tensor.placement_types.Shard"}
)  # fmt: skip


@dataclass(slots=True)
class Danger:
    """A global that runs code on a plain load: `argc` arguments at byte `at`, or only named when `argc` is None."""

    path: str
    at: int
    argc: int | None

    def text(self, where: str) -> str:
        """The line a person reads."""
        act = "named" if self.argc is None else f"called with {self.argc} argument{'s' * (self.argc != 1)}"
        return (
            f"DANGER {self.path} {act} at byte {self.at} of {where}: "
            "loading it with torch.load(weights_only=False) or pickle would run it"
        )


@dataclass(slots=True)
class PickleFacts:
    """What one stream names.

    `refused` lists why `torch.load(weights_only=True)` would not take it; [] means it would,
    after importing torch.distributed.tensor when `needs_dtensor`.
    """

    where: str
    refs: list[str] = field(default_factory=list)
    dangerous: list[Danger] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    needs_dtensor: bool = False
    torch_file: bool = True


def _canonical(path: str) -> str:
    module, _, name = path.partition(".")
    return f"{_PYTHON2.get(module, module)}.{name}"


def runs_code(path: str) -> bool:
    """Whether a plain unpickler that calls this global would run more than a constructor of data."""
    path = _canonical(path)
    if path in ALLOWED or path in INERT:
        return False
    root, *rest = path.split(".")
    if root == COMPUTED:
        return True
    if path.rsplit(".", 1)[0] in INERT_MODULES:
        return False
    if root in sys.stdlib_module_names or path.startswith(RUNS_CODE):
        return True
    # torch.serialization.os.system, X.__init__.__globals__: a dotted name walks attributes out of its module
    doors = {*BLOCKED_MODULES, "subprocess", "builtins", "eval", "exec"}
    return any(part in doors or (part.startswith("__") and part.endswith("__")) for part in rest)


def _danger(ref: Ref) -> Danger | None:
    if not runs_code(ref.path) or (ref.resolved and not ref.called):
        return None
    return Danger(ref.path, ref.called or ref.at, ref.argc if ref.called else None)


def judge(machine: PickleInterpreter, where: str, torch_file: bool = True) -> PickleFacts:
    """The facts of the stream a machine has run (or broke off in): `where` names it for messages.

    `torch_file` says whether `torch.load` is what reads such a file at all (torch reads DCP's `.metadata`
    with plain pickle).
    """
    facts = PickleFacts(where, torch_file=torch_file)
    for ref in machine.refs.values():
        path = _canonical(ref.path)
        facts.refs.append(ref.path)
        danger = _danger(ref)
        if danger is not None:
            facts.dangerous.append(danger)
        if path in DTENSOR:
            facts.needs_dtensor = True
        elif path not in ALLOWED or ref.module in BLOCKED_MODULES:
            facts.refused.append(ref.path)
            if danger is None:
                facts.needs.append(ref.path)
    if machine.memoized:
        machine.foreign.add(0x94)
    if machine.foreign:
        facts.refused.append(
            f"opcodes {' '.join(f'0x{op:02x}' for op in sorted(machine.foreign)[:OPAQUE_OPCODE_LIMIT])}"
        )
    if machine.indirect:
        facts.refused.append(f"a call of a computed function at byte {machine.indirect}")
    facts.refs.sort()
    facts.needs.sort()
    return facts
