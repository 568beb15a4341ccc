"""The what-if page: a form of settings, the plan as YAML, and room for the report."""

from __future__ import annotations

from typing import Any

from steptime.launch.plan_yaml import mapping_yaml
from steptime.report.page.markup import Html, el, join
from steptime.report.page.whole_page import document
from steptime.serve.fields import FIELDS, Field, choices


def page(start: dict[str, Any]) -> str:
    """The HTML document, opened with a plan."""
    body = join(
        el("aside", form(), aria_label="the plan"),
        el("div", el("div", "", id="problems", role="alert"), el("section", id="compare", hidden="", aria_label="comparison"),
           el("main", id="report", aria_busy="true"), class_="out"),
    )  # fmt: skip
    shell = el("div", body, class_="whatif")
    return document("steptime: what if", shell, {"start": mapping_yaml(start)}, script="serve.js", connects=True)


def form() -> Html:
    """Buttons, settings, YAML; the answer in one line stays in sight below them."""
    keep = el(
        "label", el("input", type="checkbox", id="keep", checked=""), " keep the number of devices", class_="check"
    )
    devices = row("devices", "devices", join(slider("devices", 14), number("devices")))
    buttons = [
        ("best", "best layout", "the fastest layout of these devices that fits, found by a search"),
        ("pin", "pin", "keep this plan for comparison"),
        ("unpin", "unpin", "end the comparison"),
        ("link", "copy link", "a link to this plan"),
        ("save", "save YAML", "the plan as a file"),
        ("open", "open YAML", "one of your plans"),
    ]
    tools = [el("button", text, type="button", id=name, title=title) for name, text, title in buttons]
    choose = el("input", type="file", id="file", accept=".yaml,.yml,.json", hidden="", aria_label="plan to open")
    plan = el("textarea", id="yaml", rows=22, spellcheck="false", aria_label="the plan as YAML")
    return join(
        el("h1", "What if"), el("div", *tools, choose, class_="tools"), devices, keep, *(field(each) for each in FIELDS),
        el("h2", "the plan", id="plan-label"), plan,
        el("p", "", id="status", class_="note", role="status"),
    )  # fmt: skip


def field(of: Field) -> Html:
    """One setting with its label and space for its problem."""
    if of.kind == "choice":
        options = [] if of.required else [el("option", "default", value="")]
        if of.path in {"model.preset", "hardware.node_type"}:
            options.append(el("option", "as in the YAML", value=""))
        options += [el("option", word, value=word) for word in choices(of.path)]
        kept = "" if of.required else None
        return row(of.path, of.label, el("select", *options, id=f"f-{of.path}", data_path=of.path, data_required=kept))
    return row(of.path, of.label, join(slider(of.path, of.most) if of.kind == "power" else None, number(of.path)))


def row(path: str, label: str, control: Html) -> Html:
    """A label, its control, and the line below it."""
    wrong = el("p", "", class_="wrong", id=f"e-{path}", data_wrong=path)
    return el("div", el("label", label, for_=f"f-{path}"), el("span", control, class_="control"), wrong, class_="field")


def slider(path: str, most: int) -> Html:
    """Powers of two from 1 on."""
    return el("input", type="range", min=0, max=most, step=1, data_slider=path, aria_label=f"{path}, a power of two")


def number(path: str) -> Html:
    """A whole number."""
    return el("input", type="number", min=0, step=1, id=f"f-{path}", data_path=path, aria_describedby=f"e-{path}")
