"""The shape of the package: rooms, sizes, sources, lean imports. What the design fixes is enforced here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

import steptime

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "steptime"
FILES = sorted(PACKAGE.rglob("*.py"))
DATA = sorted((PACKAGE / "data").rglob("*.yaml"))

ROOMS = [
    *(
        "base",
        "hardware",
        "schedule",
        "software",
        "model",
        "job",
        "cost",
        "memory",
        "fsdp",
        "timing",
        "answer",
        "search",
    ),
    *("checkpoint", "launch", "validation", "bench", "report", "serve", "commands"),
]
"""The folders, bottom to top: a module imports from its own folder and from those before it, for types too."""


def module_of(path: Path) -> str:
    """The dotted name inside the package; "" for the package itself."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix("__init__").rstrip(".")


def room_of(module: str) -> str:
    """The folder that a module lies in; "" for the package itself. A `__main__` starts the command line from there."""
    return "commands" if module.endswith("__main__") else module.partition(".")[0]


MODULES = {module_of(path): path for path in FILES}
TEXTS = {path: path.read_text(encoding="utf-8") for path in FILES}


def imports(node: ast.AST, *, inside: bool = False):
    """(module or package name, whether inside a function) of every import, those for type checkers included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                known = full.removeprefix("steptime.") in MODULES
                yield (full if known else str(child.module)), inside
        else:
            yield from imports(child, inside=inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(TEXTS[path])


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@cache
def all_imports(path: Path) -> list[tuple[str, bool]]:
    return list(imports(tree(path)))


def own_imports(path: Path) -> set[str]:
    """The modules of the package that a module imports."""
    return {name.removeprefix("steptime.") for name, _ in all_imports(path) if name.startswith("steptime.")}


def offenders(check) -> dict[str, list]:
    """What a check of one file finds, by file; files without a finding are left out."""
    return {str(path.relative_to(PACKAGE)): found for path in FILES if (found := list(check(path)))}


# --- rooms ---


def test_every_module_lies_in_a_room():
    assert {room_of(module) for module in MODULES} == {"", *ROOMS}
    assert sorted(path.name for path in PACKAGE.iterdir() if path.suffix == ".py") == ["__init__.py", "__main__.py"]


def test_imports_point_downward():
    def upward(path):
        module = module_of(path)
        below = ROOMS[: ROOMS.index(room_of(module)) + 1] if module else ROOMS  # the package imports what is asked for
        return [name for name in own_imports(path) if room_of(name) not in below]

    assert offenders(upward) == {}


def test_no_modules_import_each_other():
    """Taken away again and again, modules whose own imports are all gone leave nothing: there is no circle."""
    left = {module: (own_imports(path) & MODULES.keys()) - {module} for module, path in MODULES.items() if module}
    while ready := [module for module, names in left.items() if not names & left.keys()]:
        for module in ready:
            del left[module]
    assert left == {}


def test_classes_have_one_name_each():
    """A public class's name stands for one thing in the whole package."""
    every = Counter(
        node.name
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, times in every.items() if times > 1} == set()


ALLOWED = {"pydantic", "pydantic_core", "yaml"}
LAZY = {"numpy", "tabulate", "matplotlib"}
HEAVY = {"torch", "safetensors", "h5py", "matplotlib", "psutil", "mpi4py"}


def test_third_party_imports_are_few_and_lazy():
    def unwanted(path):
        own_torch = room_of(module_of(path)) in {"bench", "checkpoint"}
        for name, inside in all_imports(path):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top in {"steptime", *ALLOWED} or name == "None":
                continue
            if top not in LAZY and not (own_torch and top in HEAVY):
                yield f"{top} is no dependency"
            elif not inside and not own_torch:
                yield f"{top} must be imported where it is used"

    assert offenders(unwanted) == {}


def test_importing_and_running_loads_neither_numpy_nor_torch():
    """One interpreter imports the package, then runs a plan that is tensor and pipeline parallel, and one with FSDP."""
    plans = [str(ROOT / "configs" / name) for name in ("llama3_70b.yaml", "llama3_8b_fsdp.yaml")]
    code = (
        "import sys, steptime\n"
        "heavy = {'numpy', 'torch', 'tabulate', 'pydantic_core', 'yaml'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
        "from steptime.commands.cli import main\n"
        f"for plan in {plans!r}: assert main([plan]) == 0\n"
        "assert not {'numpy', 'torch', 'tabulate', 'pydantic'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MFU") >= 2


def test_the_public_names_are_there():
    from steptime import Data, Estimate, Job, Machine, Model, Parallelism, Performance, estimate

    job = Job(
        model=Model(n_layers=2, hidden_sz=64, inter_sz=256, n_q_heads=4, vocab_sz=512),
        parallelism=Parallelism(tp=1, pp=1, dp=1),
        performance=Performance(software="torch"),
        data=Data(gbs=1, seqlen=32, microbatch_sz=1),
        hardware=Machine.load("h100"),
    )
    assert isinstance(estimate(job), Estimate)
    assert set(steptime.__all__) <= set(dir(steptime))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = steptime.no_such_name


# --- sizes and words ---


def test_files_and_functions_are_short():
    def long(path):
        if (length := len(TEXTS[path].splitlines())) > 300:
            yield f"{length} lines"
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > 45:
                    yield f"{node.name} has {length} lines"

    assert offenders(long) == {}


def undocumented(node: ast.AST, prefix: str = ""):
    """Public functions, classes and methods without a docstring; helpers inside functions speak through them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            if not ast.get_docstring(child):
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child, f"{child.name}.")


def test_everything_public_is_documented():
    def silent(path):
        if not ast.get_docstring(tree(path)):
            yield "the module"
        yield from undocumented(tree(path))

    assert offenders(silent) == {}


def test_no_leftovers():
    def leftovers(path):
        return re.findall(
            r"(?m)\b(?:TODO|FIXME|XXX|HACK|NotImplementedError|breakpoint|set_trace)\b|^\s*(?:import|from)\b.*\bpdb\b|\bpdb\.",
            TEXTS[path],
        )

    assert offenders(leftovers) == {}


def test_only_the_top_rooms_colour():
    def colours(path):
        if room_of(module_of(path)) not in {"report", "commands"}:
            words = [node.value for node in nodes(path) if isinstance(node, ast.Constant)]
            yield from (word for word in words if isinstance(word, str) and "\x1b" in word)

    assert offenders(colours) == {}


def test_only_the_top_rooms_print():
    def prints(path):
        if room_of(module_of(path)) not in {"report", "commands", "bench", "checkpoint"}:
            calls = (node for node in nodes(path) if isinstance(node, ast.Call))
            yield from (call.lineno for call in calls if ast.unparse(call.func) in {"print", "sys.stdout.write"})

    assert offenders(prints) == {}


def test_no_test_is_skipped_or_expected_to_fail():
    banned = re.compile(r"mark\.(skip|skipif|xfail)|pytest\.(skip|xfail|importorskip)\(")
    assert [
        p.name for p in sorted((ROOT / "tests").rglob("*.py")) if banned.search(p.read_text()) and p != Path(__file__)
    ] == []


def test_versions_agree():
    """pyproject.toml takes the version from the package; a citation says the same."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "steptime/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", steptime.__version__)
    cited = [yaml.safe_load(path.read_text())["version"] for path in ROOT.glob("CITATION.cff")]
    assert set(cited) <= {steptime.__version__}
    assert (PACKAGE / "py.typed").is_file()


# --- data ---


def bare_numbers(node, path=""):
    """Dotted paths of numbers that stand without a source of their own."""
    if isinstance(node, dict):
        if node.keys() == {"value", "source"}:
            assert str(node["source"]).strip(), path
            return
        for key, item in node.items():
            yield from bare_numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from bare_numbers(item, f"{path}.{i}")
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield path


def switch_of(key):
    """A figure's key in the list of sources: a release's figure has the source of its switch."""
    return key.rpartition(".")[2] if key.startswith("releases.") else key


def test_every_figure_names_its_source():
    """A source beside the figure, in the profile's own list, or for the whole file."""
    missing, recalled = {}, []
    for path in DATA:
        text = path.read_text(encoding="utf-8")
        document = yaml.load(text, yaml.CSafeLoader)
        sources = document.get("sources", document.get("provenance", {}))
        bare = set() if document.get("source") else set(bare_numbers(document))
        if unsaid := {key for key in bare if not str(sources.get(switch_of(key), "")).strip()}:
            missing[path.name] = unsaid
        if "recalled" in text.lower():
            recalled.append(path.name)
    assert (missing, recalled) == ({}, [])


def test_each_module_and_class_has_a_name_of_its_own():
    """A reader who searches for a name finds one thing."""
    modules = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    packages = {path.parent for path in FILES} - {PACKAGE}
    modules.update(path.name for path in packages if path / f"{path.name}.py" not in FILES)
    classes = Counter(node.name for path in FILES for node in tree(path).body if isinstance(node, ast.ClassDef))
    assert [name for counts in (modules, classes) for name, times in counts.items() if times > 1] == []
