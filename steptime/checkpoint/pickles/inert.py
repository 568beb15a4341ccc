"""Globals that a stream may name without a report: those that build data, by the library that writes them.

The verdict is default-deny: whatever is not listed here is named in the report. Each list was taken from what the writer
pickles (torch 2.13 and earlier, numpy 1 and 2, transformers 5, accelerate 1, Lightning 2, DeepSpeed 0.19, Megatron-LM);
a test holds every entry of torch, numpy and the standard library against the installed ones.
"""

from __future__ import annotations

_PLAIN: dict[str, str] = {
    "_codecs": "encode",
    "_io": "BytesIO",
    "argparse": "Namespace",
    "array": "array _array_reconstructor",
    "builtins": (
        "Ellipsis NotImplemented bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"
    ),
    "collections": "ChainMap Counter OrderedDict UserDict UserList defaultdict deque",
    "copyreg": "_reconstructor __newobj__ __newobj_ex__",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial",
    "io": "BytesIO",
    "ipaddress": "IPv4Address IPv4Network IPv6Address IPv6Network",
    "itertools": "count",
    "logging": "Logger getLogger",
    "operator": "itemgetter",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "random": "Random",
    "re": "_compile",
    "types": "SimpleNamespace",
    "uuid": "SafeUUID UUID",
    "zoneinfo": "ZoneInfo ZoneInfo._unpickle",
}
_NUMPY: dict[str, str] = {
    "numpy": (
        "bool_ bool byte complex128 complex64 datetime64 dtype float16 float32 float64 int16 int32 int64 int8 longlong matrix "
        "ndarray str_ timedelta64 uint16 uint32 uint64 uint8 void"
    ),
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.core.records": "recarray record",
    "numpy.rec": "recarray record",
    "numpy.ma": "MaskedArray",
    "numpy.ma.core": "MaskedArray _mareconstruct",
    "numpy.random": "RandomState",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._sfc64": "SFC64",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "numpy.random.mtrand": "RandomState",
    "numpy.dtypes": "Float32DType Float64DType Int64DType",
}
_TORCH: dict[str, str] = {
    "torch": "Generator Size Tensor device dtype layout memory_format strided sparse_coo",
    "torch._C": "Generator",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_sparse_csr_tensor _rebuild_xla_tensor",
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed.tensor": "DTensor",
    "torch.nested._internal.nested_tensor": "NestedTensor _rebuild_njt",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage",
    "torch.tensor": "_rebuild_from_type",
}
_WRITERS: dict[str, str] = {
    "accelerate.state": "PartialState",
    "accelerate.utils.dataclasses": "DeepSpeedPlugin DistributedType FullyShardedDataParallelPlugin",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "jax._src.array": "_reconstruct_array",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "megatron.core.enums": "ModelType",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState RerunStateMachine",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType LayerType ModelType",
    "megatron.model.enums": "AttnMaskType AttnType LayerType ModelType PositionEmbeddingType",
    "ml_dtypes": "bfloat16 float8_e4m3fn float8_e5m2",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode FloatNode IntegerNode StringNode",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "transformers.trainer_pt_utils": "AcceleratorConfig",
    "transformers.trainer_utils": "EvaluationStrategy HubStrategy IntervalStrategy SaveStrategy SchedulerType",
    "transformers.training_args": "OptimizerNames ParallelMode TrainingArguments",
    "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments",
    "typing": "Any",
}

INERT: frozenset[str] = frozenset(
    f"{module}.{name}"
    for library in (_PLAIN, _NUMPY, _TORCH, _WRITERS)
    for module, names in library.items()
    for name in names.split()
)
CLASSES: dict[str, int] = {
    "torch._dynamo.decorators": 1, "torch.distributed._mesh_layout": 1, "torch.distributed._shard.metadata": 1,
    "torch.distributed._shard.sharded_tensor": 3, "torch.distributed._shard.sharding_spec": 2,
    "torch.distributed._tensor": 2, "torch.distributed.checkpoint.filesystem": 1,
    "torch.distributed.checkpoint.metadata": 1, "torch.distributed.checkpoint.planner": 1, "torch.distributed.device_mesh": 1,
    "torch.distributed.tensor": 2, "torch.nn.modules": 2, "torch.optim": 2,
}  # fmt: skip
"""Parts of torch whose classes records and pickled modules name, and how many names below them a class has at most."""
CALLERS = frozenset(
    {"collections.defaultdict", "numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__randomstate_ctor",
     "torch._tensor._rebuild_from_type_v2", "torch.tensor._rebuild_from_type"}
)  # fmt: skip
"""Listed globals that call what they are given: in a stream with one of them every function it names may be called."""
NAMES = ("torch.nn.functional.", "torch._C._nn.")
"""Packages of torch whose functions a pickled module may hold, as long as nothing calls them."""

_PRESENT = """
BaseHTTPServer CGIHTTPServer ConfigParser Cookie DocXMLRPCServer HTMLParser Queue SimpleHTTPServer SimpleXMLRPCServer
SocketServer StringIO Tkinter UserDict UserList UserString abc aifc annotationlib antigravity anydbm argparse array
ast asynchat asyncio asyncore atexit audioop base64 bdb binascii binhex bisect bsddb builtins bz2 cPickle cProfile
cStringIO calendar cgi cgitb chunk cmath cmd code codecs codeop collections colorsys commands compileall compiler
compression concurrent configparser contextlib contextvars cookielib copy copy_reg copyreg crypt csv ctypes curses
dataclasses datetime dbhash dbm decimal difflib dircache dis distutils doctest dumbdbm dummy_threading email encodings
ensurepip enum errno exceptions faulthandler fcntl filecmp fileinput fnmatch formatter fractions ftplib functools
functorch future_builtins gc gdbm genericpath getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac hotshot
html htmlentitydefs htmllib http httplib idlelib ihooks imaplib imghdr imp importlib imputil inspect io ipaddress
itertools json keyword lib2to3 linecache locale logging lzma macpath mailbox mailcap marshal math md5 mimetools
mimetypes mimify mmap modulefinder msilib msvcrt multiprocessing netrc new nis nntplib nt ntpath nturl2path numbers
numpy opcode operator optparse os ossaudiodev parser pathlib pdb pickle pickletools pip pipes pkg_resources pkgutil
platform plistlib popen2 poplib posix posixfile posixpath pprint profile profiling pstats pty pwd py_compile pyclbr
pydoc pydoc_data pyexpat queue quopri random re readline repr reprlib resource rexec rfc822 rlcompleter robotparser
runpy sched secrets select selectors sets setuptools sgmllib sha shelve shlex shutil signal site smtpd smtplib sndhdr
socket socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics string stringprep struct
subprocess sunau symbol symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios test textwrap this
thread threading time timeit tkinter token tokenize tomllib torch torchgen trace traceback tracemalloc tty turtle
turtledemo types typing unicodedata unittest urllib urllib2 urlparse user uu uuid venv warnings wave weakref
webbrowser wheel winreg winsound wsgiref xdrlib xml xmlrpc xmlrpclib xxlimited xxsubtype zipapp zipfile zipimport zlib
zoneinfo
"""
PRESENT: frozenset[str] = frozenset(_PRESENT.split())
"""Top-level modules that are there wherever a checkpoint is loaded: the standard library of Python 2.7 and 3.6 to 3.15
without its underscored modules, what installs packages, torch and numpy."""
