"""What the command says about `torch.load(weights_only=True)` is what torch does."""

import argparse
import collections
import datetime as dt
import enum
import io
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import _weights_only_unpickler as unpickler

from steptime.checkpoint.pickles import allowlist
from steptime.checkpoint.pickles.pickle_verdict import BLOCKED_MODULES, DTENSOR, runs_code


class Colour(enum.Enum):
    RED = 1


class Mine:
    pass


class MyTensor(torch.Tensor):
    pass


OBJECTS = {
    "tensor": torch.ones(2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "fp8": torch.ones(2).to(torch.float8_e5m2),
    "containers": {"a": [1, 2.5, None, True, (1,), {3}, b"x", "y", 2**70, 1j], "b": collections.OrderedDict(a=1)},
    "counter": collections.Counter("abca"),
    "size": torch.ones(2, 3).shape,
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "optimizer": torch.optim.Adam([torch.ones(1, requires_grad=True)]).state_dict(),
    "sparse": torch.eye(2).to_sparse_coo(),
    "meta": torch.empty(2, device="meta"),
    "bytearray": bytearray(b"abc"),
    "namespace": argparse.Namespace(a=1),
    "numpy": np.ones(2),
    "numpy_scalar": np.float32(1),
    "path": pathlib.PurePosixPath("/a"),
    "date": dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
    "enum": Colour.RED,
    "object": Mine(),
    "subclass": torch.ones(2).as_subclass(MyTensor),
    "defaultdict": collections.defaultdict(list),
    "frozenset": frozenset({1}),
    "function": print,
    "class": dict,
}


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.filterwarnings("ignore")
def test_verdict_is_torchs(make, summarize, name, protocol):
    path = make.folder / "o.pt"
    torch.save({"x": OBJECTS[name]}, path, pickle_protocol=protocol)
    try:
        torch.load(path, weights_only=True)
        accepted = True
    except pickle.UnpicklingError:
        accepted = False
    assert summarize(path).to_dict()["pickle"]["weights_only_loadable"] is accepted


def test_allowlist_is_that_of_the_installed_torch():
    assert set(allowlist.ALLOWED) == set(unpickler._get_allowed_globals())
    assert set(unpickler._blocklisted_modules) == set(BLOCKED_MODULES)


def test_opcodes_are_those_of_the_installed_torch():
    """Every opcode outside the set makes torch refuse the stream by that opcode's number; those inside do not."""
    for number in range(256):
        try:
            unpickler.load(io.BytesIO(bytes([number]) + b"\x00" * 16))
            refused = False
        except Exception as error:  # noqa: BLE001 - whatever a stream of zeros leads to
            refused = f"Unsupported operand {number}" in str(error)
        assert refused is (number not in allowlist.OPCODES), hex(number)


def test_dtensor_names_are_torchs():
    import torch.distributed.tensor

    assert set(DTENSOR) >= {
        f"{t.__module__}.{t.__name__}" for t in (torch.distributed.tensor.DTensor, torch.distributed.DeviceMesh)
    }


@pytest.mark.parametrize(
    "path",
    ["os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "builtins.getattr",
     "builtins.__import__", "runpy.run_module", "importlib.import_module", "shutil.rmtree", "socket.socket", "ctypes.CDLL",
     "pickle.loads", "marshal.loads", "types.FunctionType", "operator.attrgetter", "operator.methodcaller", "pip.main",
     "torch.load", "torch.hub.load", "torch.jit.load", "numpy.load", "numpy.testing._private.utils.runstring",
     "webbrowser.open", "code.interact", "pdb.run", "timeit.timeit", "cProfile.run", "bdb.Bdb", "asyncio.run",
     "multiprocessing.util.spawnv_passfds", "urllib.request.urlopen", "logging.config.listen", "doctest.debug_script",
     "torch.serialization.os.system", "collections.abc.sys.modules", "__builtin__.eval", "commands.getoutput"],
)  # fmt: skip
def test_known_dangers(path):
    assert runs_code(path)


@pytest.mark.parametrize(
    "path",
    ["collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "argparse.Namespace", "datetime.datetime",
     "numpy.core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy.dtype", "megatron.core.enums.ModelType",
     "omegaconf.dictconfig.DictConfig", "builtins.set", "builtins.dict", "pathlib.PosixPath", "__main__.Config",
     "transformers.training_args.TrainingArguments", "copyreg._reconstructor", "random.Random"],
)  # fmt: skip
def test_constructors_of_data_are_not_dangers(path):
    assert not runs_code(path)


def test_python_2_names_load_as_torch_maps_them(make, summarize):
    stream = b"\x80\x02c__builtin__\nset\n]\x85R."
    document = summarize(make.write("p.pt", make.torch_zip(stream))).to_dict()
    assert document["pickle"]["weights_only_loadable"] is True


def test_nothing_of_the_stream_is_imported(make):
    path = make.write("i.pkl", b"\x80\x02cthis\ns\ncantigravity\nfly\n\x86.")
    code = (
        "import sys; from steptime.commands import summarize_ckpt; summarize_ckpt.main(sys.argv[1:]);"
        "sys.exit(9 if {'this', 'antigravity'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, timeout=60, check=False)
    assert (done.returncode, b"Zen of Python" in done.stdout) == (0, False)
