"""Options of `3dtrn` for reading a launch file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add(made: argparse.ArgumentParser) -> None:
    """--from and its related options."""
    made.add_argument(
        "--from",
        dest="kind",
        metavar="KIND",
        help="PLAN is a launch script, config or log of megatron, torchtitan, nemo, deepspeed, transformers, llamafactory, "
        "axolotl, swift, nanotron, gpt-neox, maxtext, olmo, primus, torchtune, automodel, levanter, openrlhf; or auto",
    )
    made.add_argument(
        "--with",
        dest="added",
        action="append",
        default=[],
        metavar="FILE",
        help="with --from, a file in another folder that PLAN sources or names; may be repeated",
    )
    made.add_argument("--save", metavar="PLAN.yaml", help="with --from, write the plan that was read")
    made.add_argument(
        "--allow-unmodeled",
        "--allow-unmodelled",
        action="store_true",
        help="with --from, ignore flags that affect cost but are not modeled",
    )
    made.add_argument(
        "--export",
        metavar="KIND",
        choices=("megatron", "bridge", "nemo", "torchtitan", "deepspeed"),
        help="print the plan as a launch script or config of megatron, bridge (Megatron-Bridge), nemo, torchtitan or deepspeed, "
        "and list what it cannot express",
    )
