"""Commands that change variables, interpreted without running them: assignments and let."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import PurePosixPath

from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.shell.conditions import Outcome
from steptime.launch.shell.expansion import Expander, quoted
from steptime.launch.shell.lexer import Lexer, Token
from steptime.launch.shell.scope import Scope, Unknown, Value, clean
from steptime.launch.shell.statements import ASSIGNMENT, Simple

LARGEST = 2_000_000
"""Maximum length of a variable's value."""


def assign(expand: Expander, word: Token) -> None:
    """NAME=value, NAME+=value, NAME=( ... ), NAME[i]=value."""
    found = ASSIGNMENT.fullmatch(word.text)
    assert found is not None
    name, index, plus, raw = found.groups()
    scope = expand.scope
    if raw.startswith("(") and raw.endswith(")"):
        inside = Lexer(raw[1:-1], expand.name, word.line, array=True).tokens()
        elements = [value for item in inside for value in expand.fields(item.text, item.line)]
        scope.put_array(name, [*(scope.values.get(name, []) if plus else []), *elements])
        return
    text = expand.text(raw, word.line)
    before = scope.get(name) if plus else None
    if index is not None:
        elements, others = list(scope.values.get(name, [])), name in scope.named
        at = scope.arithmetic(expand.text(index.strip("[]"), word.line), index)
        there = not others and at.isdecimal() and int(at) < len(elements)
        if there:
            elements[int(at)] = Value((elements[int(at)].text if plus else "") + text, word.line)
        scope.put_array(name, elements if there else [*elements, Value(text, word.line)])
        if others or not (there or at == str(len(elements))):
            scope.named |= scope.same.get(name, {name})
    elif plus and name in scope.arrays and before is not None:
        scope.put_array(name, [Value(before.text + text, before.line), *scope.values[name][1:]])
    else:
        old = before.text if before is not None else ""
        sums = name in scope.integers
        text = f"{old} + ({text})" if sums and old else old + text
        text = scope.arithmetic(text, f"${name}") if sums else text
        if len(text) > LARGEST:
            text = scope.mark(f"${name}", Unknown(f"${name} grows without limit"))
        scope.put(name, text, word.line)


def let(scope: Scope, text: str) -> Outcome:
    """One whole-number expression: an assignment, NAME++, or a value compared with zero."""
    if found := re.fullmatch(r"\s*([A-Za-z_]\w*)\s*([-+*/]?)=([^=].*)", text, re.DOTALL):
        name, operator, rest = found.groups()
        expression = f"{name} {operator} ({rest})" if operator else rest
        scope.put(name, scope.arithmetic(expression, f"(({text.strip()}))"), 0)
        return "yes"
    if found := re.fullmatch(r"\s*([A-Za-z_]\w*)(\+\+|--)\s*", text):
        scope.put(found[1], scope.arithmetic(f"{found[1]} {found[2][0]} 1", text.strip()), 0)
        return "yes"
    value = scope.arithmetic(text, text)
    return "unknown" if not scope.known(value) else "yes" if int(value) else "no"


_DIRECTIVE = re.compile(r"(%%|%0?\d{0,3}[sdq])")


def formatted(pattern: str, words: list[str]) -> str | None:
    """What printf prints: %s, %d and, of a plain word, %q, over and over while there are words; None of anything else.

    >>> formatted("%02d-%s ", ["3", "a", "4"])
    '03-a 04- '
    """
    pieces, text, rest = _DIRECTIVE.split(pattern), "", list(words)
    if any(set(piece) & {"%", "\\"} for piece in pieces[::2]):
        return None
    while True:
        for piece in pieces:
            if not _DIRECTIVE.fullmatch(piece) or piece == "%%":
                text += piece[:1] if piece == "%%" else piece
                continue
            word = rest.pop(0) if rest else "0" if piece[-1] == "d" else ""
            if not re.fullmatch({"s": r"(?s).*", "d": r"-?[1-9]\d*|0", "q": r"[\w@%+=:,./-]+"}[piece[-1]], word):
                return None
            text += piece.replace("q", "s") % (int(word) if piece[-1] == "d" else word)
        if not rest or len(pieces) == pieces.count("%%") * 2 + 1:
            return text


def read_names(expand: Expander, node: Simple, words: list[str]) -> None:
    """`read NAME ... <<< text`: the text's parts, the last name the rest; with -d the text as it is, with -a all parts.

    `mapfile NAME <<< text`, also called readarray: its lines.
    """
    scope = expand.scope
    body = "$(cat)" if node.body is None else node.body  # the lines of a file
    text = expand.text(body if body.startswith("$(") else quoted(body), node.line)
    separators = (expand.text(word.text[4:], node.line) for word in node.words if word.text.startswith("IFS="))
    separator = next(separators, None)
    names = [word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word)]
    in_array = any(re.fullmatch(r"-\w*a", word) for word in words)
    by_lines = node.words[0].text in {"mapfile", "readarray"}
    if ("-d" in words and not by_lines) or not names:
        scope.put(words[-1], text, node.line)
    elif not scope.known(text):
        cause = scope.cause(text, "")
        for name in names:
            scope.put(name, scope.mark(f"${name}", cause.part), node.line)
        if by_lines or in_array:
            scope.put_array(names[-1], [Value(text if cause.nodes else scope.mark(f"${names[-1]}", cause), node.line)])
    elif by_lines:
        scope.put_array(names[-1], [Value(part, node.line) for part in text.splitlines()])
    elif in_array:
        scope.put_array(names[0], [Value(part, node.line) for part in text.split(separator)])
    else:
        parts = text.split(separator, len(names) - 1)
        for name, part in zip_longest(names, parts, fillvalue=""):
            scope.put(name, part.strip(), node.line)


def write_file(expand: Expander, node: Simple, nearby: NearbyFiles) -> None:
    """`cat > FILE <<EOF`, `sed s/A/B/ TEMPLATE > FILE`: a script, or a config where every value in its text is known.

    `echo "$SCRIPT" > FILE` writes a text of several lines; a line may be the first of those that are added later.
    """
    text = expand.text(quoted(node.body), node.line) if node.body is not None else _filled_in(expand, node, nearby)
    if text is None or node.to is None:
        return
    name = expand.text(node.to.text, node.line)
    last = PurePosixPath(expand.scope.shown(name)).name
    if expand.scope.known(text) or last.endswith((".sh", ".sbatch", ".slurm")) or text.startswith("#!"):
        nearby.written[last] = text


def _filled_in(expand: Expander, node: Simple, nearby: NearbyFiles) -> str | None:
    """A template with each word that sed replaces; None where it is not found, or sed does anything else."""
    words = [expand.text(word.text, node.line) for word in node.words[1:] if word.text not in {"-e", "-E", "-r", "-i"}]
    if node.words[0].text == "echo":
        return written if "\n" in (written := " ".join(words)) else None
    replaced = [found for word in words if (found := re.fullmatch(r"s([/#|,])(\w+)\1(.*)\1g?", word, re.DOTALL))]
    files = [word for word in words if not re.match(r"s([/#|,]).*\1", word)]
    if len(files) != 1 or len(replaced) != len(words) - 1 or (text := nearby.text(files[0])) is None:
        return None
    text = clean(text) if text not in nearby.written.values() else text
    for found in replaced:
        text = text.replace(found[2], re.sub(r"\\(.)", r"\1", found[3]))
    return text


def edit_file(expand: Expander, node: Simple, nearby: NearbyFiles) -> None:
    """`sed -i s/A/B/ FILE`: each word that sed replaces; after any other edit a file that the script wrote is not known."""
    text = _filled_in(expand, node, nearby)
    for word in node.words[1:]:
        name = PurePosixPath(expand.scope.shown(expand.text(word.text, node.line))).name
        if text is None:
            nearby.written.pop(name, None)
        elif nearby.text(name) is not None:
            nearby.written[name] = text


def copy_files(scope: Scope, names: list[str], nearby: NearbyFiles) -> None:
    """`cp FILE ... TO`: the copy of a file, by its name in a folder; one that is not found makes its copy unknown."""
    *files, to = [name for name in names if not name.startswith("-")]
    inside = len(files) > 1 or to.endswith(("/", "."))
    for file in files:
        name, text = PurePosixPath(scope.shown(file if inside else to)).name, nearby.text(file)
        if text is None or not name:
            nearby.written.pop(name, None)
        else:
            nearby.written[name] = text if text in nearby.written.values() else clean(text)


def given_script(expand: Expander, node: Simple, nearby: NearbyFiles, words: list[Value]) -> list[Value]:
    """The arguments of a command that gets its script from a here-document, the name of a file with its text among them.

    Of sbatch (`sbatch -N 2 <<EOF`) the last, of a shell (`bash -s 8 <<EOF`) the first; a shell with a script reads other input
    from it. Arguments of other commands are unchanged.
    """
    first = node.words[0].text if node.words else ""
    if node.body is None or node.to is not None or first not in {"sbatch", "bash", "sh", "zsh"}:
        return words
    told = next((i for i, word in enumerate(words) if word.text == "-s"), len(words))
    if first != "sbatch" and not all(word.text.startswith("-") for word in words[:told]):
        return words
    script = Value(f"here-document-{node.line}.sh", node.line)
    nearby.written[script.text] = expand.text(quoted(node.body), node.line)
    return [*words, script] if first == "sbatch" else [script, *words[told + 1 :]]


def text_to_read(words: list[str]) -> tuple[int, str]:
    """Position of eval or `bash -c` among the words of a command, and the text that it is given; "" where there is none.

    >>> text_to_read(["tmux", "new-session", "-d", "-s", "job", "python train.py --x 1"])
    (0, 'python train.py --x 1')
    """
    if words[0] == "eval":
        return 0, " ".join(words[1:])
    if words[0] == "tmux" and words[1:2] in (["new-session"], ["new"], ["new-window"]) and re.search(r"\s", words[-1]):
        return 0, words[-1]
    for at, word in enumerate(words[:-2]):
        last = next((i for i in range(at + 1, len(words) - 1) if not re.fullmatch(r"-[abd-z]+", words[i])), at + 1)
        if re.fullmatch(r"(.*/)?(ba|z)?sh", word) and re.fullmatch(r"-[a-z]*c", words[last]):
            return at, words[last + 1]
    return 0, ""
