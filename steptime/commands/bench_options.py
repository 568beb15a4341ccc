"""The arguments of `3dtrn bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.commands.argument_types import count, parts, words

if TYPE_CHECKING:
    from argparse import ArgumentParser


def add(made: ArgumentParser) -> None:
    """The benchmark, its launch scripts, and its log readers."""
    made.add_argument(
        "words",
        metavar="PLAN",
        nargs="+",
        help="plan to run, or: startup LOG... | memory CSV... | scaling RESULTS.json...",
    )
    made.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="change a setting; may be repeated"
    )
    made.add_argument("--out", metavar="DIR", help="output folder (default: steptime-bench)")
    made.add_argument("--device", choices=("cpu", "cuda", "mps"), help="default: first available of cuda, mps, cpu")
    made.add_argument(
        "--only", type=parts, default=parts(""), metavar="PARTS", help="from sweeps,block,step,exact (default: all)"
    )
    made.add_argument(
        "--layouts",
        type=words,
        default=[],
        metavar="L,...",
        help="from ddp,fsdp2,tp,pp over all ranks (default: the plan's own)",
    )
    made.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="time budget of all sweeps together (default: 30)"
    )
    made.add_argument("--steps", type=count, default=10, metavar="N", help="timed steps per layout (default: 10)")
    made.add_argument(
        "--seed", type=count, default=0, metavar="N", help="random seed for weights and tokens (default: 0)"
    )
    made.add_argument("--trace", action="store_true", help="write a profiler trace of each rank")
    made.add_argument("--emit", choices=("slurm", "torchrun"), help="print the launch script of PLAN, run nothing")
    made.add_argument("--log", metavar="LOG", help="memory: count samples between this log's first and last step")
    made.add_argument("--from", dest="start", metavar="TIME", help="memory: count samples from this time")
    made.add_argument("--to", dest="stop", metavar="TIME", help="memory: count samples up to this time")
    made.add_argument(
        "--baseline", type=count, default=1, metavar="N", help="scaling: speedup relative to N processes (default: 1)"
    )
    made.add_argument("--json", action="store_true", help="print JSON in SI units")
    usual = {name: made.get_default(name) for name in ("out", "device", "seconds", "steps", "seed", "only")}
    made.set_defaults(usual=usual)
