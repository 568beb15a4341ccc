"""The base class of everything read from a config file, and the wording of its problems.

Each is one line, `path: what is wrong (got VALUE); what to write instead`; `ConfigError` holds all of them, with their data.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple, Never, TypeVar, get_args

from pydantic_core import ValidationError

from steptime.base.core_schemas import BeforeValidator
from steptime.base.declared import Settings, validator
from steptime.base.units import spelled_out

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class ConfigProblem(NamedTuple):
    """One problem of bad input."""

    line: str
    """The line shown to the user."""
    path: str = ""
    """The dotted key where it occurs, if known."""
    unknown: bool = False
    """Whether the key does not exist and must be renamed or removed, regardless of its value."""
    meant: str = ""
    """For an unknown key: the key that was probably meant."""
    by_rule: bool = False
    """Whether a rule over several sections found it; each section was valid by itself."""
    keys_only: str = ""
    """The line without a command line's words, for Python; "" where it has none."""


class ConfigError(ValueError):
    """Bad input: one line per problem in `problems`, and the same with their locations in `details`."""

    def __init__(self, problems: str | ConfigProblem | Iterable[str | ConfigProblem]) -> None:
        found = [problems] if isinstance(problems, str | ConfigProblem) else problems
        self.details = [ConfigProblem(problem) if isinstance(problem, str) else problem for problem in found]
        self.problems = [problem.line for problem in self.details]
        super().__init__("\n".join(self.problems))


class MisplacedBool(str):
    """A bool where a number is expected: text that no number parser accepts."""

    __slots__ = ()


class Wording(NamedTuple):
    """What the error lines of a class say of its keys."""

    not_modeled: Mapping[str, str] = {}
    """Keys ("path") and values ("path=word") that are known but not modeled, with their message."""
    natural_names: Mapping[str, str] = {}
    """Keys of other frameworks -> the dotted key with the same meaning."""
    missing: Mapping[str, str] = {}
    """Required keys -> what to give where they are missing; "": any other."""
    fixes: Mapping[str, str] = {}
    """Keys with a value of the wrong type ("path=value") -> what to write; "": where a mapping is expected."""


class Config(Settings):
    """A frozen model in which an unknown key is an error.

    Numbers may be written as text ("1e12" is a string to PyYAML); a bool is not a number.

    Raises:
        ConfigError: if keys are unknown, missing or wrong; one line for each.
    """

    wording: ClassVar[Wording] = Wording()
    draw: ClassVar[Callable[[Any], str | None]] = lambda _: None  # as HTML, where report.notebook is loaded

    def _repr_html_(self) -> str | None:
        return type(self).draw(self)

    def __init__(self, *plan: Never, **data: Any) -> None:
        if plan:
            name = type(self).__name__
            load = f"; {name}.load reads a file" if callable(getattr(type(self), "load", None)) else ""
            raise TypeError(f"{name}() takes keywords only{load}")
        try:
            validator(type(self)).validate_python(data, self_instance=self)
        except ValidationError as error:
            raise ConfigError(describe(error, type(self), data)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        of = type(self).__name__
        copy = f"{of.lower()}.replace" if callable(getattr(type(self), "replace", None)) else of
        raise ConfigError(f"{of}.{name}: cannot be assigned to; make a new one with {copy}({name}=...)")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    @classmethod
    def _read_scalars(cls, data: Any) -> Any:
        if type(data) is not dict:
            return data
        changed: dict[str, float | MisplacedBool] = {}
        for key, value in data.items():
            if value is True or value is False:
                if key in _numeric_fields(cls):
                    changed[key] = MisplacedBool(str(value).lower())
            elif type(value) is str and _NUMBER.fullmatch(value) and key not in _text_fields(cls):
                changed[key] = float(value)
        return data | changed if changed else data


C = TypeVar("C", bound=Config)


def build(cls: type[C], data: Any, at: str = "") -> C:
    """`data` (a mapping or an instance) as a `cls`; `at` is its dotted path, for messages.

    Raises:
        ConfigError: with one line per problem.
    """
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error, cls, data, at)) from None


@cache
def _numeric_fields(cls: type[Settings]) -> frozenset[str]:
    """Fields that accept a number but not a bool (pydantic would read true as 1)."""
    own_reader = {
        k for k, f in cls.model_fields.items() if any(isinstance(item, BeforeValidator) for item in f.metadata)
    }
    kinds = {key: {*_leaves(field.annotation)} for key, field in cls.model_fields.items() if key not in own_reader}
    return frozenset(key for key, of in kinds.items() if of & {int, float} and bool not in of)


@cache
def _text_fields(cls: type[Settings]) -> frozenset[str]:
    return frozenset(name for name, field in cls.model_fields.items() if str in _leaves(field.annotation))


def _leaves(annotation: Any) -> Iterator[Any]:
    """The plain types in an annotation; for a Literal, the types of its values."""
    if isinstance(annotation, type) or not get_args(annotation):
        yield annotation if isinstance(annotation, type) else type(annotation)
        return
    for part in get_args(annotation):
        yield from _leaves(part)


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    "too_short": "at least one entry",
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), "a mapping"),
}
_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least"),
    "greater_than": ("gt", "must be greater than"),
    "less_than_equal": ("le", "must be at most"),
    "less_than": ("lt", "must be less than"),
    "multiple_of": ("multiple_of", "must be a multiple of"),
}


def show(value: Any) -> str:
    """A value as shown in an error line: short, whatever it is."""
    if value is None or isinstance(value, bool | MisplacedBool):
        return "nothing" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**15 else f"about 1e{len(str(abs(value))) - 1}"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    many = isinstance(value, list | tuple)
    return f"a list of {len(value)}" if many else "a mapping" if isinstance(value, dict) else type(value).__name__


def closest(word: object, words: Iterable[str]) -> str:
    """The closest known word, ignoring case, or one that begins with it; "" where there is none."""
    from difflib import get_close_matches

    folded, start = {name.lower(): name for name in sorted(words)}, str(word).lower()
    longer = [name for name in folded if len(start) > 3 and name.startswith(start)]
    return next((folded[name] for name in get_close_matches(start, folded, n=1, cutoff=0.65) or longer), "")


def near(word: object, words: Iterable[str]) -> str:
    """The end of an error line: the closest word, else all valid words, else nothing.

    >>> near("tpp", ["tp", "pp", "dp"]), near("x", ["tp", "dp"])
    ("; did you mean 'tp'?", '; valid: dp, tp')
    """
    if meant := closest(word, known := sorted(words)):
        return f"; did you mean {meant!r}?"
    return f"; valid: {', '.join(known)}" if known else ""


def describe(error: ValidationError, cls: type[Config], data: Any, at: str = "") -> list[ConfigProblem]:
    """The problems of a validation of `data` as `cls`; `at` is the dotted path of `data`."""
    groups: dict[str, list[tuple[Any, list[type[Settings]]]]] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue  # follows from another problem
        path, owners = _locate(cls, data, item["loc"])
        groups.setdefault(".".join(part for part in (at, path) if part), []).append((item, owners))
    found: list[ConfigProblem] = []
    for path, items in groups.items():
        if path and any(other.startswith((path + "[", path + ".")) for other in groups):
            continue  # one arm of a union; the arm that matches better reports its inner problem
        found += _problems(path, items, cls)
    spelled = {".".join([*p.path.split(".")[:-1], p.meant]) for p in found if p.meant}  # a key that only looks missing
    return [p for p in found if p.path not in spelled or not p.line.startswith(f"{p.path}: required key is missing")]


def _problems(path: str, items: list[tuple[Any, list[type[Settings]]]], cls: type[Config]) -> list[ConfigProblem]:
    """Problems that pydantic finds at one path; a ConfigError raised by a validator keeps its own problems."""
    first, owners = items[0]
    got, kind = first["input"], first["type"]
    not_modeled, natural_names, missing, fixes = cls.wording
    if path in not_modeled:
        return [ConfigProblem(f"{path}: {not_modeled[path]}", path, unknown=True)]
    if (word := f"{path}={got}") in not_modeled:
        return [ConfigProblem(f"{path}: {not_modeled[word]} (got {show(got)})", path)]
    if kind in {"extra_forbidden", "invalid_key"}:
        known = {name for owner in owners for name in owner.model_fields}
        section, _, key = path.rpartition(".")
        meant = natural_names.get(key.lower().replace("-", "_"), "")
        at, _, name = meant.rpartition(".")
        if meant and at != section:
            return [ConfigProblem(f"{path}: unknown key (got {show(got)}); did you mean {meant}?", path, unknown=True)]
        hint = "; a comma separates keys, write numbers without it (1024)" if key.isdigit() else near(key, known)
        line = f"{path}: unknown key (got {show(got)}){f'; did you mean {name!r}?' if meant else hint}"
        return [ConfigProblem(line, path, unknown=True, meant=name or closest(key, known))]
    if kind == "missing":
        return [ConfigProblem(f"{path}: required key is missing{missing.get(path, missing.get('', ''))}", path)]
    if kind == "value_error":
        cause = first["ctx"]["error"]
        if isinstance(cause, ConfigError):
            return cause.details
        line = f"{path}: {cause}" if path or not isinstance(got, dict) else str(cause)
        return [ConfigProblem(line if isinstance(got, dict) else f"{line} (got {show(got)})", path)]
    line = f"{path}: {_wrong(items)}"
    usual = fixes.get("", "").format(path=path) if "expected a mapping (got" in line else ""
    return [ConfigProblem(line + fixes.get(f"{path}={got if isinstance(got, str) else show(got)}", usual), path)]


def _wrong(items: list[tuple[Any, list[type[Settings]]]]) -> str:
    """The message for a value with no expected type, bound or word; several items are the arms of a union."""
    first = items[0][0]
    got, kind = first["input"], first["type"]
    if kind in _BOUNDS:
        key, phrase = _BOUNDS[kind]
        return f"{phrase} {show(first['ctx'][key])} (got {show(got)})"
    expected, words = list[str](), list[str]()
    for item, _ in items:
        if item["type"] == "literal_error":
            found = re.findall(r"'([^']*)'|(-?[0-9]+)", item["ctx"]["expected"])  # text in pydantic
            words += [word or number for word, number in found]
        elif item["type"] not in _EXPECTED:
            return f"{item['msg']} (got {show(got)})"
        elif _EXPECTED[item["type"]] not in expected:
            expected.append(_EXPECTED[item["type"]])
    if words:
        expected.append(("one of " if len(words) > 1 else "") + ", ".join(words))
    meant = closest(got, words) if isinstance(got, str) else ""
    hint = f"; did you mean {meant!r}?" if meant else spelled_out(got, expected)
    return f"expected {' or '.join(expected)} (got {show(got)}){hint}"


def _locate(cls: type[Settings], data: Any, loc: tuple[int | str, ...]) -> tuple[str, list[type[Settings]]]:
    """The dotted path of a pydantic location (names of union arms left out), and the classes that own its last key."""
    owners: list[type[Settings]] = [cls]
    path, last_owners = "", owners
    for item in loc:
        fields = [owner.model_fields[str(item)] for owner in owners if item in owner.model_fields]
        inside = isinstance(data, dict) and item in data
        if isinstance(item, int) and not inside:
            path += f"[{item}]"
            data = data[item] if isinstance(data, list | tuple) and item < len(data) else None
        elif fields or inside or item == loc[-1] == "[key]":
            path += "." * bool(path) + str(item).replace("\n", "\\n")
            data = data[item] if inside else getattr(data, str(item), None)
            last_owners = owners
            owners = [leaf for field in fields for leaf in _leaves(field.annotation) if issubclass(leaf, Settings)]
    return path, last_owners
