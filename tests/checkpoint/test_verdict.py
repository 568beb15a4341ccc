"""What the command says about `torch.load(weights_only=True)` is what torch does."""

import argparse
import collections
import datetime as dt
import enum
import functools
import importlib
import io
import pathlib
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import _weights_only_unpickler as unpickler

from steptime.checkpoint.name_tables import table, words
from steptime.checkpoint.pickles import known_globals, pickle_verdict
from steptime.checkpoint.pickles.pickle_verdict import BLOCKED_MODULES, DTENSOR, runs_code


class Color(enum.Enum):
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
    "enum": Color.RED,
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
    assert set(known_globals.ALLOWED) == set(unpickler._get_allowed_globals())
    assert set(unpickler._blocklisted_modules) == set(BLOCKED_MODULES)


def test_opcodes_are_those_of_the_installed_torch():
    """Every opcode outside the set makes torch refuse the stream by that opcode's number; those inside do not."""
    for number in range(256):
        try:
            unpickler.load(io.BytesIO(bytes([number]) + b"\x00" * 16))
            refused = False
        except Exception as error:  # noqa: BLE001 - whatever a stream of zeros leads to
            refused = f"Unsupported operand {number}" in str(error)
        assert refused is (number not in known_globals.OPCODES), hex(number)


def test_dtensor_names_are_torchs():
    import torch.distributed.tensor

    assert set(DTENSOR) >= {
        f"{t.__module__}.{t.__name__}" for t in (torch.distributed.tensor.DTensor, torch.distributed.DeviceMesh)
    }


# What picklescan, modelscan and fickling test against, and what got past lists of known dangers: names only.
_NAMES = """
os.system posix.system nt.system os.popen os.execl subprocess.Popen subprocess.getoutput builtins.eval builtins.exec
builtins.compile builtins.open builtins.getattr builtins.apply builtins.__import__ __builtin__.eval __builtin__.file
commands.getoutput commands.getstatusoutput popen2.popen3 urllib2.urlopen httplib.HTTPSConnection exceptions.eval
runpy.run_module runpy._run_code importlib.import_module importlib.util.spec_from_file_location pkgutil.resolve_name
pkgutil.get_loader shutil.rmtree socket.socket socket.create_connection ctypes.CDLL ctypes.util.find_library
pickle.loads pickle.load _pickle.loads marshal.loads shelve.open types.FunctionType types.CodeType operator.attrgetter
operator.methodcaller functools.reduce functools.partialmethod pip.main pip._internal.main.main ensurepip._run_pip
setuptools.sandbox.run_setup pkg_resources.run_script distutils.spawn.spawn distutils.file_util.write_file sys.exit
sys.settrace webbrowser.open code.interact code.InteractiveInterpreter codeop.compile_command bdb.Bdb bdb.Bdb.run
pdb.run pdb.Pdb pydoc.pipepager pydoc.locate timeit.timeit timeit.main trace.Trace trace.Trace.run profile.run
profile.Profile cProfile.run cProfile.runctx doctest.debug_script doctest.DocTestRunner asyncio.run
asyncio.create_subprocess_shell asyncio.unix_events._UnixSubprocessTransport._start
multiprocessing.util.spawnv_passfds concurrent.futures.ThreadPoolExecutor threading.Thread signal.signal
atexit.register urllib.request.urlopen http.client.HTTPSConnection ftplib.FTP smtplib.SMTP telnetlib.Telnet
ssl.SSLSocket xmlrpc.client.ServerProxy logging.config.listen tempfile.NamedTemporaryFile zipfile.ZipFile tarfile.open
zipimport.zipimporter venv.create venv.main sqlite3.connect pty.spawn pathlib.Path.write_text pathlib.Path.unlink
idlelib.pyshell.ModifiedInterpreter.runcode idlelib.run.Executive.runcode idlelib.autocomplete.AutoComplete.get_entity
idlelib.debugobj.ObjectTreeItem.SetText lib2to3.pgen2.grammar.Grammar.loadgrammar lib2to3.pgen2.pgen.ParserGenerator
test.support.script_helper.run_python_until_end test.support.script_helper.assert_python_ok _pyrepl.pager.pipe_pager
_pyrepl.console.InteractiveColoredConsole _aix_support._read_cmd_output _osx_support._read_output
_osx_support._find_build_tool _posixsubprocess.fork_exec _ctypes.dlopen _testcapi.run_in_subinterp nturl2path.os
uuid._get_command_stdout uuid._popen uuid.os.system random._os.system datetime.sys.modules collections._sys.modules
platform.popen sysconfig._parse_makefile turtle.Screen antigravity.webbrowser.open wsgiref.simple_server.make_server
torch.load torch.hub.load torch.hub.load_state_dict_from_url torch.jit.load torch.jit.script
torch.package.PackageImporter torch.serialization.load torch.serialization.os.system torch.ops.load_library
torch.classes.load_library torch.library.torch.utils.collect_env.run torch.utils.collect_env.run
torch.utils.cpp_extension.load_inline torch.utils.bottleneck.__main__.run_cprofile
torch.utils._config_module.ConfigModule.load_config torch.utils.data.datapipes.utils.decoder.basichandlers
torch.jit.unsupported_tensor_ops.execWrapper torch.testing._internal.common_utils.shell torch.distributed.run.main
torch.distributed.rpc.rpc_sync torch._dynamo.guards.GuardBuilder.get torch._dynamo.config.load_config
torch._inductor.codecache.compile_file torch._inductor.codecache.load_by_key_path
torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression torch.fx.graph_module._exec_with_source
torch.nn.Module.register_forward_hook torch.storage._load_from_bytes torch._utils.os.system
torch.nn.modules.module.Module.__init__ torch.optim.lr_scheduler.sys.modules torch.save numpy.load numpy.loadtxt
numpy.ctypeslib.load_library numpy.testing._private.utils.runstring numpy.f2py.compile
numpy.f2py.crackfortran.getlincoef numpy.f2py.crackfortran._eval_length numpy.f2py.diagnose.run_command
numpy.distutils.exec_command.exec_command numpy.lib.npyio.load numpy.lib._datasource.open numpy.memmap
requests.api.get requests.get aiohttp.client.request httpx.get cloudpickle.loads dill.loads joblib.load pandas.eval
pandas.read_pickle pandas.io.pickle.read_pickle IPython.get_ipython IPython.core.page.page fsspec.open
paramiko.client.connect jax._src.numpy.load fire.core.fire sh.bash mymodule.f.__globals__ mymodule.Thing.__reduce__
mymodule.os.system collections.abc.sys.modules
"""
DANGERS = _NAMES.split()


@pytest.mark.parametrize("path", DANGERS)
def test_what_runs_code_is_named(path):
    assert runs_code(path)


@pytest.mark.parametrize("path", sorted(known_globals.INERT))
def test_what_is_listed_builds_data(path):
    assert not runs_code(path)


@pytest.mark.parametrize(
    "path", ["torch.nn.modules.linear.Linear", "torch.optim.adamw.AdamW", "torch.distributed.checkpoint.metadata.Metadata",
             "megatron.core.enums.ModelType", "__main__.Config", "mypackage.config.Mode", "collections.OrderedDict"],
)  # fmt: skip
def test_classes_are_no_errors(path):
    assert not runs_code(path)


def test_the_verdict_does_not_vary_with_the_python_that_runs():
    """Nothing asks the running interpreter which modules it has; what later or earlier ones have is listed."""
    assert "stdlib_module_names" not in Path(pickle_verdict.__file__).read_text()
    public = {name for name in sys.stdlib_module_names if not name.startswith("_")}
    assert public <= known_globals.PRESENT
    assert {"distutils", "imp", "commands", "annotationlib", "compression"} <= known_globals.PRESENT


def test_listed_names_of_the_standard_library_torch_and_numpy_are_there():
    """A name that no version has would be a hole that nobody needs; those of other versions are few and known."""
    elsewhere = {"pathlib._local", "numpy.core.multiarray", "numpy.core.numeric", "numpy.core.records", "torch.tensor"}
    for library in ("python", "numpy", "torch"):
        for module, names in table("pickle_globals")["data"][library].items():
            if module in elsewhere:
                continue
            loaded = importlib.import_module(module)
            for name in words(names):
                if name not in {"_rebuild_sparse_csr_tensor", "_rebuild_xla_tensor", "bool", "byte"}:
                    assert functools.reduce(getattr, name.split("."), loaded) is not None, (module, name)


@pytest.mark.parametrize("name", ["pickle_globals", "element_types", "names"])
def test_every_table_has_its_source(name):
    for about, entries in table(name).items():
        assert len(words(entries["source"])) > 2, about


@pytest.mark.parametrize("name", ["pickle_globals", "names"])
def test_no_list_has_a_word_twice(name):
    for about, entries in table(name).items():
        for key, value in entries.items():
            for names in value.values() if isinstance(value, dict) else [value]:
                found = () if key == "source" or isinstance(names, int) else words(names)
                assert len(set(found)) == len(found), (about, key, found)


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"cmyproject.tools\nrun\nX\x01\x00\x00\x00a\x85R.", "myproject.tools.run called with 1 argument"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(cmyproject\nrun\ncbuiltins\nobject\n)NtR.", "myproject.run named"),
        (b"cfunctools\npartial\ncbuiltins\nset\n\x85R)R.", "the result of a call called with 0 arguments"),
        (b"ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.", "collections.OrderedDict named"),
        (b"ctorch.storage\n_load_from_bytes\nC\x03abc\x85R.", "torch.storage._load_from_bytes called"),
    ],
    ids=["function of a project", "passed to a call", "computed function", "attributes of a class", "bytes of no stream"],
)  # fmt: skip
def test_ways_to_run_code_without_a_known_name(make, summarize, stream, words):
    summary = summarize(make.write("x.pkl", b"\x80\x03" + stream))
    assert summary.exit_code == 1
    assert words in summary.all_problems[0].message


def test_a_member_of_an_enum_is_data_until_it_is_called(make, summarize):
    """Python 3.11.0 to 3.11.3 pickles a member as getattr(class, name); DCP's `.metadata` holds torch's memory formats."""
    looked_up = (
        b"\x80\x02cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
        b"X\x17\x00\x00\x00TORCH_CONTIGUOUS_FORMAT\x86R"
    )
    assert summarize(make.write("x.pkl", looked_up + b".")).exit_code == 0
    assert summarize(make.write("x.pkl", looked_up + b")R.")).exit_code == 1


def test_a_class_of_another_project_is_named_and_no_error(make, summarize):
    summary = summarize(make.write("x.pkl", b"\x80\x02cmyproject.config\nConfig\n)\x81."))
    assert (summary.exit_code, [p.code for p in summary.all_problems]) == (0, ["UNKNOWN_GLOBAL"])
    assert summarize(make.write("x.pkl", b"\x80\x02cmyproject.config\nConfig\n)\x81."), strict=True).exit_code == 1


EVIL = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."


def test_every_stream_of_a_file_is_read(make, summarize, codes):
    """Behind the first pickle, in bytes that a loader inside it gets, in a further member, in an array of objects."""
    behind = pickle.dumps({}, 2) + EVIL
    inside = pickle.dumps(1, 2) + EVIL
    nested = b"\x80\x03cpickle\nloads\nB" + len(inside).to_bytes(4, "little") + inside + b"\x85R."
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + EVIL
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
        archive.writestr("a/constants.pkl", EVIL)
    legacy = io.BytesIO()
    torch.save({}, legacy, _use_new_zipfile_serialization=False)
    first = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    rows = {"behind.pkl": behind, "nested.pkl": nested, "array.npy": array, "member.pt": out.getvalue(),
            "zip.pt": make.torch_zip(behind), "legacy.pt": first + EVIL + legacy.getvalue()[len(first) + 6:]}  # fmt: skip
    for name, data in rows.items():
        summary = summarize(make.write(name, data))
        assert summary.exit_code == 1, name
        assert "DANGEROUS_PICKLE" in codes(summary), name
        assert any("posix.system" in problem.message for problem in summary.all_problems), name


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
