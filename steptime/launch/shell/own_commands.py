"""Commands of the shell itself that change its variables: declarations, unset, set, shift, getopts, read, let."""

from __future__ import annotations

import re
import shlex

from steptime.launch.devices import OF_OPTIONS
from steptime.launch.shell.assignments import assign, copy_files, edit_file, formatted, let, read_names, write_file
from steptime.launch.shell.conditions import Outcome
from steptime.launch.shell.control_flow import ControlFlow, LeaveError, Left
from steptime.launch.shell.lexer import Token
from steptime.launch.shell.scope import Scope, Unknown, Value
from steptime.launch.shell.statements import ASSIGNMENT, Simple

_DECLARE = frozenset({"export", "local", "declare", "typeset", "readonly"})
_LEFT: dict[str, Left] = {"break": "break", "continue": "continue", "return": "return"}

_NO_OPTIONS = f"{OF_OPTIONS} are taken as not given; for others pass script and arguments as one string"


def own_command(walk: ControlFlow, first: str, rest: list[Value], node: Simple) -> Outcome | None:
    """Interpret one of the shell's own commands; None of any other.

    Raises:
        LeaveError: break, continue and return, where there is something to leave.
    """
    scope = walk.scope
    if first in {":", "true", "false"}:
        return "no" if first == "false" else "yes"
    if first in _LEFT and (walk.depth if first == "return" else walk.loops):
        raise LeaveError(_LEFT[first], rest[0].text if rest else "")
    if first == "getopts" and len(rest) >= 2:
        return _getopts(walk, rest[0].text, rest[1].text)
    if first in _DECLARE:
        _declare(walk, first, node)
    elif first == "unset":
        _unset(scope, rest, node.line)
    elif rest and (first in {"mapfile", "readarray"} or (first == "read" and node.body is not None)):
        read_names(walk.expand, node, [word.text for word in rest])
    elif first in {"cat", "sed", "echo"} and node.to is not None:
        write_file(walk.expand, node, walk.nearby)
    elif first == "printf" and len(rest) > 2 and rest[0].text == "-v":
        _printf(walk, [value.text for value in rest[1:]], node.line)
    elif first == "sed" and any(value.text == "-i" for value in rest):
        edit_file(walk.expand, node, walk.nearby)
    elif first == "cp" and rest and not rest[-1].text.startswith("-"):
        copy_files(scope, [value.text for value in rest], walk.nearby)
    elif first == "let":
        for value in rest:
            let(scope, value.text)
    elif first == "shift" and scope.positional:
        count = int(rest[0].text) if rest and rest[0].text.isdecimal() else 1
        scope.positional = scope.positional[count:]
    elif first == "set" and rest and rest[0].text == "--":
        scope.positional = rest[1:]
    else:
        return None
    return "ran"


def _unset(scope: Scope, words: list[Value], line: int) -> None:
    """Variables that are unset; with -n references, and not what they refer to."""
    references = bool(words) and words[0].text == "-n"
    for value in words[references:]:
        if references:
            scope.restore(value.text, (None, False, False, {value.text}))
        elif element := re.fullmatch(r"(\w+)\[.*\]", value.text):
            why = Unknown(f"line {line} unsets one of its elements")
            scope.put_array(element[1], [Value(scope.mark(f"${element[1]}", why), line)])
        else:
            scope.clear(value.text, line)


def _declare(walk: ControlFlow, first: str, node: Simple) -> None:
    """Assignments after export, local and similar; those of local and declare end with the function."""
    options = "".join(word.text for word in node.words[1:] if re.fullmatch(r"-[a-zA-Z]+", word.text))
    own = bool(walk.locals) and (first == "local" or (first in {"declare", "typeset"} and "g" not in options))
    for word in node.words[1:]:
        found = ASSIGNMENT.fullmatch(word.text)
        name = found[1] if found else word.text
        if own and name.isidentifier():
            walk.locals[-1].setdefault(name, walk.scope.kept(name))
            walk.scope.refer(name, {name})
            if found is None:
                walk.scope.restore(name, (None, False, False, {name}))
        if "i" in options and first != "export":
            walk.scope.integers.add(name)
        if found is not None and "n" in options and first != "export":
            walk.scope.refer(name, {name})
            target = walk.expand.text(found[4], word.line)
            if target.isidentifier() and target != name:
                walk.scope.restore(name, walk.scope.kept(target))
            else:
                walk.scope.put(name, walk.scope.mark(f"${name}", Unknown(f"${name} is a reference")), node.line)
        elif found is not None:
            assign(walk.expand, word)


def _printf(walk: ControlFlow, words: list[str], line: int) -> None:
    """The variable, or the element of an array, that `printf -v` sets."""
    scope, name, more = walk.scope, words[0], words[2:] if words[1] == "--" else words[1:]
    text = formatted(more[0], more[1:]) if more and scope.known(more[0]) else None
    if text is None:
        text = scope.mark(f"${name}", Unknown(f"${name} in line {line} is of a printf that is not read"))
    if ASSIGNMENT.fullmatch(f"{name}="):
        assign(walk.expand, Token(f"{name}={shlex.quote(text)}", line))


def _getopts(walk: ControlFlow, letters: str, name: str) -> Outcome:
    """The next option of the script's or function's arguments, in `name` and OPTARG; "no" after the last."""
    scope = walk.scope
    if scope.positional is None:
        walk.told += [] if _NO_OPTIONS in walk.told else [_NO_OPTIONS]
        return "no"
    said = scope.get("OPTIND")
    at = int(said.text) if said is not None and said.text.isdecimal() else 1
    word = scope.positional[at - 1].text if at <= len(scope.positional) else ""
    if not scope.known(word) or (re.fullmatch(r"-\w{2,}", word) and letters.partition(word[1])[2][:1] != ":"):
        walk.blame = Unknown(f"the option {scope.shown(word)} is not read")
        return "unknown"
    if not word.startswith("-") or word in {"-", "--"}:
        scope.put("OPTIND", str(at + (word == "--")), 0)
        return "no"
    letter, value = word[1], word[2:]
    takes = letters.partition(letter)[2][:1] == ":"
    if takes and not value:
        value, at = scope.positional[at].text if at < len(scope.positional) else "", at + 1
    scope.put(name, letter if letter in letters else "?", 0)
    scope.put("OPTARG", value, 0)
    scope.put("OPTIND", str(at + 1), 0)
    return "yes"
