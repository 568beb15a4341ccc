"""The summary of a checkpoint as text and for notebooks: answer first, then modules, ranks, roles, architecture, problems.

Every name from a file is escaped before it is laid out. Nothing here imports pydantic, so that the command starts fast.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from steptime.base.words import counted
from steptime.checkpoint.api import Summary, summarize_checkpoint
from steptime.checkpoint.dtypes import short
from steptime.checkpoint.escape import escaped
from steptime.checkpoint.inventory import Inventory, StoredModel
from steptime.checkpoint.jsonable import pickles
from steptime.checkpoint.pickles.known_globals import PRESENT
from steptime.checkpoint.quantized import Row
from steptime.report.checkpoint_modules import modules
from steptime.report.format import BINARY, COUNT, Unit, bytes_in, quantity, unit_for
from steptime.report.html import html
from steptime.report.table import ASCII, PLAIN, Fact, FactList, ReportSection, Style, Table, to_text, wrapped

__all__ = ["Summary", "report", "summarize_checkpoint", "summary_html"]

MAX_PROBLEMS = 12
MAX_GLOBALS = 8
MAX_RANKS = 16
MAX_SECTIONS = 12
MAX_KIND = 45
MAX_KEYS = 12
_LONG = 120  # characters of a value; longer ones are templates, licenses, records of every tensor

Units = tuple[Unit, ...]


def report(summary: Inventory, depth: int = 1, units: Units = BINARY, style: Style = PLAIN) -> str:
    """The whole report in the width of `style`; "" where nothing could be read. Without Unicode, names are not converted."""
    if not summary.sections:
        return ""
    first, *rest = _headline(summary, units, style)
    lines = [first, *(line for text in rest for line in wrapped(text, style.width, "  "))]
    text = "\n".join([*lines, "", to_text(sections(summary, depth, units), style._replace(ascii=False))])
    return text.translate(ASCII) if style.ascii else text


def sections(summary: Inventory, depth: int, units: Units) -> list[ReportSection]:
    """Sections of the report under its headline."""
    found = [
        modules(summary, depth, units),
        ranks(summary, units),
        roles(summary, units),
        files(summary, units),
        adapter(summary),
        metadata(summary),
        architecture(summary),
        pickle(summary),
        problems(summary),
    ]
    return [section for section in found if section is not None]


def summary_html(summary: Summary) -> str:
    """A heading, the module tree and the problems: a notebook's `_repr_html_`."""
    state = "complete" if summary.complete else "incomplete"
    name = summary.counted[0].format if summary.counted else "no file could be read"
    head = f"<p><b>{escape(escaped(summary.path))}</b>: {escape(name)}, {summary.restored.params:,} parameters, {state}</p>"
    tree = modules(summary, 1, BINARY, most=40)
    return "".join([head, html(tree) if tree else "", html(problems(summary)) if summary.all_problems else ""])


def _headline(summary: Inventory, units: Units, style: Style) -> list[str]:
    main, totals = summary.counted[0], summary.totals
    part = bool(main.facts.get("part"))
    state = "part of a set" if part else "complete" if summary.complete else style.paint("INCOMPLETE", "bad")
    count = len(summary.all_problems)
    state += style.paint(f", {counted(count, 'problem')} (below)", "bad") if count else ""
    container = "" if main.container == "single file" else f", {main.container}"
    others = len(summary.counted) - 1
    container += f" and {counted(others, 'other set')} of files" if others else ""
    kind = f"{main.format}{container}" + (f", step {summary.step}" if summary.step is not None else "")
    io, size = summary.io, totals["logical_bytes"]
    headers = f"{_size(io.bytes_read, units)} " if io.bytes_read else ""  # tensorstore does not tell
    read = f"read {headers}in {io.seconds * 1e3:.0f} ms"
    n_files = sum(len(section.files) for section in summary.sections)
    params, rows = summary.restored.params, summary.restored.rows
    short_params = f" ({quantity(params, COUNT)})" if params > 1023 else ""
    short_size = f" ({_size(size, units)})" if size > 1023 else ""
    lines = [
        style.paint(escaped(summary.path), "head"),
        *([f"{kind}, {state}"] if len(kind) < MAX_KIND else [kind, f"  {state}"]),
        f"{counted(totals['tensors'], 'tensor')} in {counted(n_files, 'file')}; {read}, no tensor data, no code run",
        f"parameters {params:,}{short_params}   bytes {size:,}{short_size}",
    ]
    if totals["buffers"]:
        lines.append(f"  of these {totals['buffers']:,} in buffers, which are not trained")
    if rows:
        inside = f" (in {summary.params:,} stored elements)" if params != summary.params else ""
        lines.append(f"  quantized{inside}: {'; '.join(map(_quantized, rows[:4]))}")
    if totals["logical_params"] != totals["params"] or totals["stored_params"] != totals["params"]:
        logical, stored = totals["logical_params"], totals["stored_params"]
        lines.append(f"  unique {totals['params']:,}   in whole tensors {logical:,}   stored {stored:,}")
    if totals["stored_bytes"] != size:
        lines.append(f"  storages have {totals['stored_bytes']:,} bytes, tensors name {size:,}")
    every = sum(row["bytes"] for row in summary.by_dtype) or 1
    parts = [f"{short(row['dtype'])} {row['bytes'] / every:.1%}" for row in summary.by_dtype]
    return [*lines, f"dtypes by bytes: {_shown(_listed(parts, 6), 400)}"] if parts else lines


def _quantized(row: Row) -> str:
    """Method, bits and group of one kind of quantized weights."""
    bits = f", {row.bits} bits" if row.bits else ""
    group = f", groups of {row.group_size}" if row.group_size else ""
    what = f", {counted(row.params, 'parameter')}" if row.tensors else ": unknown packing, counted in stored elements"
    return escaped(f"{row.method}{bits}{group}{what}", 160)


def _shown(text: str, limit: int) -> str:
    """Text from a file, with names that fill a line cut in the middle."""
    return re.sub(r"\S{61,}", lambda word: f"{word[0][:28]}...{word[0][-28:]}", escaped(text, limit))


def _listed(words: list[str], most: int) -> str:
    """The first `most` words, and the number of further ones."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def _size(nbytes: int, units: Units) -> str:
    unit = unit_for(nbytes, units)
    return f"{bytes_in(nbytes, unit)} {unit.name}"


def ranks(summary: Inventory, units: Units) -> Table | None:
    """One row per kind of rank, under the recorded degrees of parallelism."""
    main = summary.counted[0]
    title = "ranks"
    if main.parallelism:
        known = [f"{k.upper()} {v}" for k, v in main.parallelism.items() if type(v) is int]
        source = main.parallelism.get("source")
        title = f"parallelism {' x '.join(known) or 'not recorded'}" + (f" (from {source})" if source else "")
    elif not main.ranks:
        return None
    rows = [
        [
            escaped(str(row["name"]), 60),
            f"{row['tensors']:,}",
            f"{row['params']:,}",
            *(_size(row[f"{what}_bytes"], units) for what in ("model", "optimizer")),
        ]
        for row in _merged(main.ranks)
    ]
    more = [f"{len(rows) - MAX_RANKS} more: --json lists all"] if len(rows) > MAX_RANKS else []
    header = ["rank", "tensors", "params", "weights", "optimizer"] if rows else []
    return Table(title, header, rows[:MAX_RANKS], more)


def _merged(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbors with equal figures as one row, "rank 0 .. rank 63"."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        same = rows and all(rows[-1][key] == value for key, value in rank.items() if key != "name")
        if same:
            rows[-1]["name"] = f"{rows[-1]['name'].partition(' .. ')[0]} .. {rank['name']}"
        else:
            rows.append(dict(rank))
    return rows


def roles(summary: Inventory, units: Units) -> Table | None:
    """Bytes by role, when there is more than weights."""
    by = summary.by_role
    found = [("weights", "", by["model"]["bytes"])]
    found += [("master copy", "", by["master"]["bytes"])] if by["master"] else []
    states = escaped(", ".join(by["optimizer"]["states"][:4]), 30)
    found += [("optimizer", states, by["optimizer"]["bytes"])] if by["optimizer"]["bytes"] else []
    found += [("other", "", by["other"]["bytes"])] if by["other"]["bytes"] else []
    if len(found) == 1:
        return None
    total = sum(nbytes for *_, nbytes in found)
    params = summary.restored.params
    per = f"{total / params:.2f} B per parameter" if params else ""
    rows = [[name, note, f"{nbytes:,}", _size(nbytes, units)] for name, note, nbytes in found]
    return Table(
        "by role", ["", "", "bytes", ""], [*rows, [], ["total", per, f"{total:,}", _size(total, units)]], left=2
    )


def files(summary: Inventory, units: Units) -> Table | None:
    """The sets of files, when there are several; notes; other saves in one line."""
    several = len(summary.sections) > 1
    rows = []
    for section in summary.sections[:MAX_SECTIONS] if several else []:
        same = f"  also present as {section.same_as}" if section.same_as else ""
        size = f"{counted(len(section.files), 'file')}, {_size(section.nbytes, units)}"
        rows.append([_shown(f"{section.path or '.'}: {section.format}, {size}{same}", 300)])
    if len(summary.sections) > MAX_SECTIONS:
        rows.append([f"and {len(summary.sections) - MAX_SECTIONS} more (--json lists all)"])
    notes = [note for section in summary.sections for note in section.notes]
    rows += [[f"note: {_shown(note, 300)}"] for note in notes[:6]]
    if summary.others:
        rows.append([f"other saves here (--all reads them): {_shown(', '.join(summary.others), 400)}"])
    return Table(f"{len(summary.sections)} sets of files" if several else "files", [], rows) if rows else None


def architecture(summary: Inventory) -> Table | None:
    """What was inferred, and its origin in a word."""
    found = summary.architecture
    if summary.models:
        rows = [[_shown(_model(model), 300)] for model in summary.models[:MAX_SECTIONS]]
        return Table(f"{len(summary.models)} models: give the path of one to see its architecture", [], rows)
    if not found:
        return None
    known: list[str] = []
    for key, entry in found.items():
        if entry["value"] is None or key in ("q_rows", "kv_rows", "max_positions"):
            continue
        source = entry["from"] if entry["from"] in ("config.json", "args", "GGUF key-values") else ""
        known.append(f"{key} {_value(entry['value'])}" + (f" ({source})" if source else ""))
    rows = [[_shown("  ".join(known), 2000)]]
    head = found.get("head_dim")
    if head is not None and head["value"] is None:
        rows.append([_shown(f"n_q_heads not known: {head['from']}", 600)])
    return Table("architecture (from names and shapes unless noted)", [], rows)


def _model(model: StoredModel) -> str:
    """Where one of several models is, and how it differs from the others."""
    fields = ("n_layers", "hidden_sz", "vocab_sz")
    known = [f"{key} {model.architecture[key]['value']}" for key in fields if key in model.architecture]
    return f"{model.path}: parameters {model.params:,}  {'  '.join(known)}"


def adapter(summary: Inventory) -> FactList | None:
    """What is adapted, by how much, and the base, which is not included."""
    found = summary.adapter
    if found is None:
        return None
    rank = found["rank"] if found["rank"] is not None else ", ".join(map(str, found["ranks"]))
    rows = {"rank": rank, "alpha": found["alpha"], "targets": _listed(found["targets"], 16), "base": found["base"]}
    facts = [Fact(key, [_shown(str(value), 400)]) for key, value in rows.items() if value not in (None, "")]
    return FactList(f"adapter: {escaped(found['kind'], 40)}, base model not included", facts)


def metadata(summary: Inventory) -> FactList | None:
    """What the file says about itself: safetensors' metadata or GGUF's key-values, those of one short line."""
    main = summary.counted[0]
    said = main.facts.get("metadata") or main.facts.get("gguf")
    if not isinstance(said, dict) or not said:
        return None
    names = {tensor.name for tensor in summary.restored.tensors}  # torchao stores a record of each tensor there
    lines = [(key, str(value)) for key, value in said.items() if not isinstance(value, list) and key not in names]
    facts = [Fact(_shown(key, 60), [_shown(text, _LONG)]) for key, text in lines if len(text) <= _LONG][:MAX_KEYS]
    more = len(said) - len(facts)
    facts += [Fact("and", [f"{more} more (--json shows them)"])] if more else []
    return FactList("GGUF key-values" if "gguf" in main.facts else "metadata", facts)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {v}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def pickle(summary: Inventory) -> Table | None:
    """The names that the checkpoint's pickles import, and whether torch would load it without them."""
    facts = pickles(summary)
    accepts = facts["weights_only_loadable"]
    needs = [name for name in facts["needs"] if accepts is not None or name.partition(".")[0] not in PRESENT]
    reasons = [_shown(reason, 80) for reason in facts["refused_because"] if reason not in needs]
    rows = []
    if needs:
        rows.append([f"needs these classes: {_listed([_shown(name, 80) for name in needs], MAX_GLOBALS)}"])
    if accepts is not None:
        why = ", ".join(["these classes"] * bool(needs) + ([_listed(reasons, 3)] if reasons else []))
        rows.append([f"torch.load(weights_only=True) would {'accept it' if accepts else f'refuse {why}'}"])
    return Table("pickle: no code from this checkpoint was executed", [], rows) if rows else None


def problems(summary: Inventory) -> FactList:
    """Every problem (the first twelve), or that there is none."""
    found = summary.all_problems
    facts = []
    for item in found[:MAX_PROBLEMS]:
        where = f"{escaped(item.file, 120)}: " if item.file else ""
        text = _shown(f"{where}{item.message}", 600)
        facts.append(Fact(item.severity, [text], "bad" if item.severity == "error" else "warn"))
    if len(found) > MAX_PROBLEMS:
        facts.append(Fact("and", [f"{len(found) - MAX_PROBLEMS} more (--json lists all)"]))
    return FactList(counted(len(found), "problem") if found else "no problems found", facts)


Summary.draw = staticmethod(summary_html)
