"""Print docs/config.md: every key of a plan, from the classes and data/keys.yaml."""

from collections.abc import Iterable

from steptime.report.plan_keys import Key, keys


def markdown(keys: Iterable[Key]) -> str:
    """docs/config.md: a table for each section."""
    out = [
        "# Plan keys",
        "",
        "Every key of a plan. `3dtrn explain --key KEY` prints the same text, `3dtrn schema` has it for editors.",
        "This page is generated: `python docs/config_table.py > docs/config.md`.",
    ]
    section = None
    for key in keys:
        top = key.path.partition(".")[0]
        if top != section:
            section = top
            out += [
                "",
                f"## {top}",
                "",
                "| key | takes | unit | default | meaning | example |",
                "|---|---|---|---|---|---|",
            ]
        cells = [f"`{key.path}`", key.kind, key.unit, key.default, key.means, f"`{key.example}`" if key.example else ""]
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    print(markdown(keys()), end="")
