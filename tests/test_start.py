"""What a process of the command line changes to start sooner means the same as before; each test runs in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from steptime.commands import start

ROOT = Path(__file__).parents[1]
DATACLASSES = """
import copy, dataclasses, pickle
@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Point:
    x: int
    y: float = 0.5
    tags: tuple = dataclasses.field(default_factory=tuple, compare=False)
@dataclasses.dataclass
class Base:
    a: int
    def __post_init__(self):
        self.twice = 2 * self.a
@dataclasses.dataclass
class Derived(Base):
    b: str = "b"
@dataclasses.dataclass
class Own(Derived):
    def __init__(self):
        super().__init__(3, "own")
p = Point(1)
assert repr(p) == "Point(x=1, y=0.5, tags=())" and p == Point(1, 0.5, ("other",)) and p != Point(2)
assert p < Point(1, 0.75) and sorted([Point(2), p])[0] is p
assert hash(p) == hash(Point(1)) and {p: 1}[Point(1)] == 1
assert dataclasses.replace(p, y=2.0) == Point(1, 2.0) and copy.copy(p) == p and pickle.loads(pickle.dumps(p)) == p
for change in (lambda: setattr(p, "x", 2), lambda: delattr(p, "x")):
    try:
        change()
    except dataclasses.FrozenInstanceError:
        pass
    else:
        raise SystemExit("not frozen")
assert (Derived(2).twice, Derived(2).b, Own().twice, Own() == Own(), Base(3) == Own()) == (4, "b", 6, True, False)
assert repr(Own()) == "Own(a=3, b='own')"
try:
    Derived()
except TypeError as error:
    assert "missing 1 required positional argument: 'a'" in str(error), error
else:
    raise SystemExit("a field without default left out")
"""
ANNOTATIONS = """
import typing
class Row(typing.NamedTuple):
    first: "int | None"
    second: "list[Row]"
    third: "dict[str,\\n int]"
assert typing.get_type_hints(Row) == {"first": int | None, "second": list[Row], "third": dict[str, int]}
try:
    typing.get_type_hints(typing.NamedTuple("Wrong", [("x", "int +")]))
except SyntaxError:
    pass
else:
    raise SystemExit("no error")
"""
MODULES = """
import base64, importlib.util, re, secrets, zoneinfo
import pydantic
assert importlib.util.find_spec("secrets").name == "secrets"
assert base64.b64decode(base64.b64encode(b"plan")) == b"plan" and len(secrets.token_hex(4)) == 8
assert zoneinfo.ZoneInfo.__module__ == "zoneinfo" and issubclass(zoneinfo.ZoneInfoNotFoundError, KeyError)
assert type(re.compile("a+")) is re.Pattern and re.compile("a+").fullmatch("aaa")
class Secret(pydantic.BaseModel):
    word: pydantic.SecretStr
    raw: pydantic.Base64Bytes
    size: pydantic.ByteSize
found = Secret(word="plan", raw="cGxhbg==", size="2 KiB")
assert (found.word == pydantic.SecretStr("plan"), found.raw, found.size) == (True, b"plan", 2048)
"""
YAML = """
import yaml
text = "a: [1, 2.5, yes, 2026-01-02, ~, 'x']"
for loader in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    assert yaml.load(text, loader)["a"][:3] == [1, 2.5, True] and str(yaml.load(text, loader)["a"][3]) == "2026-01-02"
try:
    yaml.load("a: \\x01", yaml.SafeLoader)
except yaml.reader.ReaderError:
    pass
else:
    raise SystemExit("a control character was read")
"""


@pytest.mark.parametrize(
    "script", [DATACLASSES, ANNOTATIONS, MODULES, YAML], ids=["dataclasses", "hints", "modules", "yaml"]
)
def test_modules_mean_the_same(script):
    before = "from steptime.commands import start\nstart.sooner()\nstart.packages()\n"
    for first in ("", before):
        done = subprocess.run(
            [sys.executable, "-c", first + script], check=False, capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr


def test_a_report_is_that_of_a_process_which_changes_nothing():
    plan = str(ROOT / "configs" / "llama3_70b.yaml")
    programs = ("main()", "main(sys.argv[1:])")
    texts = [
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"import sys\nfrom steptime.commands.cli import main\nsys.exit({each})",
                plan,
                "--json",
            ],
            check=True,
            capture_output=True,
            cwd=ROOT,
        ).stdout
        for each in programs
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 1000


def test_unused_patterns_and_methods_are_not_made():
    script = """
import dataclasses, re, sys
from steptime.commands import start
start.sooner()
start.packages()
from yaml.reader import Reader
assert type(Reader.NON_PRINTABLE) is not re.Pattern
@dataclasses.dataclass
class Point:
    x: int
before = Point.__init__
Point(1)
late = hasattr(dataclasses, "_create_fn")  # later versions of Python make all methods of a class at once
assert (Point.__init__ is not before) == late and Point.__init__.__code__.co_varnames == ("self", "x")
assert "hashlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_without_changes_nothing_is_replaced():
    assert start.StandIn not in {type(module) for module in list(sys.modules.values())}
