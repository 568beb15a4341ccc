"""The arguments of every subcommand."""

from __future__ import annotations

from argparse import ArgumentParser, _ArgumentGroup
from collections.abc import Callable
from typing import Literal

from steptime.commands.argument_types import count, decoded, new_file, parts, positive_count, share, whole, words

PLAN = "a YAML or JSON file, or - for standard input"
LOG_KIND = "framework of the log: megatron, torchtitan, nemo"
WITH = "a file in another folder that PLAN sources or names; may be repeated"
LOG_UNMODELED = "ignore flags of the log that are not modeled"


def _sets(parser: ArgumentParser | _ArgumentGroup, about: str = "change a setting; may be repeated") -> None:
    parser.add_argument("--set", dest="sets", action="append", type=decoded, default=[], metavar="A.B=C", help=about)


def _config(parser: ArgumentParser, nargs: Literal["?"] | None = None) -> None:
    parser.add_argument("config", metavar="PLAN", nargs=nargs, help=PLAN)
    _sets(parser)


def _unmodeled(parser: ArgumentParser | _ArgumentGroup, about: str) -> None:
    parser.add_argument("--allow-unmodeled", "--allow-unmodelled", action="store_true", help=about)


def _plan_options(parser: ArgumentParser) -> None:
    """Options that make a plan without a file, or change one."""
    parser.add_argument("--model", metavar="NAME", help="model preset (3dtrn models)")
    parser.add_argument("--machine", metavar="NAME", help="machine (3dtrn machines)")
    parser.add_argument("--devices", type=whole, metavar="N", help="number of devices; data parallelism follows")


def _report(parser: ArgumentParser) -> None:
    _config(parser, nargs="?")
    _plan_options(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help='raw figures in SI units, schema "3dtrn/1"')
    form.add_argument("--brief", action="store_true", help="only the answer: time, memory, one line of assumptions")
    parser.add_argument("--assumed", action="store_true", help="list every assumption")
    _launch_files(parser)
    about = "your own measured step times: a YAML list of {config, step_s}"
    parser.add_argument("--calibrate", metavar="FILE", help=about)
    parser.add_argument("--check", action="store_true", help="exit 1 unless the job fits")
    about = "exit 1 if the MFU (causal attention halved) is below X: 0.4 or 40%%"
    parser.add_argument("--min-mfu", type=share, metavar="X", help=about)
    parser.add_argument("--html", metavar="FILE", help="write the report as an HTML page")
    parser.add_argument("--trace", metavar="FILE", help="one step as a trace for Perfetto; .json or .json.gz")
    parser.add_argument(
        "--trace-memory", metavar="FILE", help="memory over one step for pytorch.org/memory_viz; .pickle"
    )
    parser.add_argument("--plot", metavar="FILE", help="the report as a picture: .png, .svg or .pdf (extra plot)")
    parser.add_argument("--watch", action="store_true", help="print the report again when PLAN changes, until Ctrl-C")


def _launch_files(parser: ArgumentParser) -> None:
    """Reading a launch file, and writing one."""
    about = (
        "PLAN is a launch script, config or log of megatron, torchtitan, nemo, deepspeed, transformers, llamafactory, "
        "axolotl, swift, litgpt, nanotron, gpt-neox, maxtext, llm-foundry, olmo, primus, torchtune, automodel, levanter, "
        "openrlhf, verl; or auto"
    )
    parser.add_argument("--from", dest="kind", metavar="KIND", help=about)
    parser.add_argument(
        "--with", dest="added", action="append", default=[], metavar="FILE", help=f"with --from, {WITH}"
    )
    parser.add_argument("--save", type=new_file, metavar="PLAN.yaml", help="with --from, write the plan that was read")
    _unmodeled(parser, "with --from, ignore flags that affect cost but are not modeled")
    kinds = ("megatron", "bridge", "nemo", "torchtitan", "deepspeed")
    about = (
        "print the plan as a launch script or config of megatron, bridge (Megatron-Bridge), nemo, torchtitan or deepspeed, "
        "and list what it cannot express"
    )
    parser.add_argument("--export", metavar="KIND", choices=kinds, help=about)


def _search(parser: ArgumentParser) -> None:
    about = "a YAML or JSON file, or -; parallelism may be left out"
    parser.add_argument("config", metavar="PLAN", nargs="?", help=about)
    parser.add_argument("--model", metavar="NAME", help="model preset (3dtrn models); PLAN is then optional")
    _sets(parser)
    about = "number of devices; LOW:HIGH doubles (default: the plan's)"
    parser.add_argument("--devices", metavar="N|LOW:HIGH", help=about)
    parser.add_argument(
        "--gbs", metavar="N|LOW:HIGH", help="sequences per step; LOW:HIGH doubles (default: the plan's)"
    )
    parser.add_argument("--fix", action="append", default=[], metavar="K=V", help="fix an axis or a setting: tp=8")
    about = "try these values: performance.precision=bf16,mxfp8"
    parser.add_argument("--over", action="append", default=[], metavar="K=A,B", help=about)
    parser.add_argument("--machine", type=words, default=[], metavar="A,B", help="try these machines")
    parser.add_argument("--objective", choices=("step", "cost", "energy", "memory"), default="step", help="what counts")
    about = "number of layouts to show (default: 5)"
    parser.add_argument("--top", type=positive_count, default=5, metavar="N", help=about)
    parser.add_argument("--pareto", action="store_true", help="show only the Pareto front of memory and the objective")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="layouts with their plans, in SI units")
    form.add_argument("--csv", action="store_true", help="print the best layouts as CSV")
    parser.add_argument("--plot", metavar="FILE", help="draw memory against step time; .png, .svg or .pdf")
    parser.add_argument("--html", metavar="FILE", help="write the result as an HTML page")
    parser.add_argument("--save", type=new_file, metavar="BEST.yaml", help="write the best plan to FILE")


def _sensitivity(parser: ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--json", action="store_true", help="rows in SI units")
    parser.add_argument("--plot", metavar="FILE", help="bar chart; .png, .svg or .pdf")


def _scale(parser: ArgumentParser) -> None:
    _config(parser)
    parser.add_argument("--json", action="store_true", help="rows in SI units")
    parser.add_argument("--plot", metavar="FILE", help="efficiency over devices: .png, .svg or .pdf (extra plot)")
    parser.add_argument("--best", action="store_true", help="search the best layout of each size")
    about = "with --best, the sizes; LOW:HIGH doubles (default: 1 to 8 x the plan's)"
    parser.add_argument("--devices", metavar="LOW:HIGH", help=about)


def _diff(parser: ArgumentParser) -> None:
    about = "two or more plans or launch files (- for standard input), or a training log and one other file"
    parser.add_argument("files", metavar="FILE", nargs="*", help=about)
    _sets(parser, "change a setting in all plans")
    _plan_options(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the comparison as an HTML page")
    parser.add_argument(
        "--from", dest="kind", metavar="KIND", help="framework of launch files and logs, if not detected"
    )
    parser.add_argument("--with", dest="added", action="append", default=[], metavar="FILE", help=WITH)
    _unmodeled(parser, "ignore flags of launch files and logs that are not modeled")


def _explain(parser: ArgumentParser) -> None:
    about = "a YAML or JSON file, - for standard input, or the id of a measured row"
    parser.add_argument("config", metavar="PLAN", nargs="?", help=about)
    about = "a matrix multiply, a collective or a total; omit to list all"
    parser.add_argument("name", metavar="NAME", nargs="?", help=about)
    _sets(parser, "change a setting of the plan")
    about = "look up the row in this file, not in the included ones"
    parser.add_argument("--measurements", metavar="FILE.csv", help=about)
    parser.add_argument("--yaml", action="store_true", help="for a row, print only its plan")
    about = "torch.profiler traces, one per rank: measured vs. predicted"
    parser.add_argument("--trace", metavar="FILE", nargs="+", help=about)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--key", metavar="A.B", help="explain a key of a plan; no PLAN needed")


def _serve(parser: ArgumentParser) -> None:
    parser.add_argument("config", metavar="PLAN", nargs="?", help="plan to start from; a YAML or JSON file")
    _sets(parser, "change a setting of PLAN")
    about = "port to listen on; 0 picks a free one (default: 8765)"
    parser.add_argument("--port", type=whole, default=8765, metavar="N", help=about)
    about = "address to listen on (default: loopback only)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=about)


def _bench(parser: ArgumentParser) -> None:
    about = "plan to run, or: startup LOG... | memory CSV... | scaling RESULTS.json..."
    parser.add_argument("words", metavar="PLAN", nargs="+", help=about)
    _sets(parser)
    parser.add_argument("--out", metavar="DIR", help="output folder (default: steptime-bench)")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), help="default: first available of cuda, mps, cpu")
    about = "from sweeps,block,step,exact (default: all)"
    parser.add_argument("--only", type=parts, default=parts(""), metavar="PARTS", help=about)
    about = "from ddp,fsdp2,tp,pp over all ranks (default: the plan's own)"
    parser.add_argument("--layouts", type=words, default=[], metavar="L,...", help=about)
    about = "time budget of all sweeps together (default: 30)"
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help=about)
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="timed steps per layout (default: 10)")
    about = "random seed for weights and tokens (default: 0)"
    parser.add_argument("--seed", type=count, default=0, metavar="N", help=about)
    parser.add_argument("--trace", action="store_true", help="write a profiler trace of each rank")
    parser.add_argument("--emit", choices=("slurm", "torchrun"), help="print the launch script of PLAN, run nothing")
    parser.add_argument("--log", metavar="LOG", help="memory: count samples between this log's first and last step")
    parser.add_argument("--from", dest="start", metavar="TIME", help="memory: count samples from this time")
    parser.add_argument("--to", dest="stop", metavar="TIME", help="memory: count samples up to this time")
    about = "scaling: speedup relative to N processes (default: 1)"
    parser.add_argument("--baseline", type=count, default=1, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON in SI units")
    usual = {name: parser.get_default(name) for name in ("out", "device", "seconds", "steps", "seed", "only")}
    parser.set_defaults(usual=usual)


def _validate(parser: ArgumentParser) -> None:
    parser.add_argument("--measurements", metavar="FILE.csv", help="your own measured runs (default: included ones)")
    parser.add_argument("--source", metavar="S", help="only rows whose source is S or whose id contains S")
    parser.add_argument("--gpu", metavar="G", help="only rows whose gpu contains G")
    about = "rows used for fitting constants, or held-out rows"
    parser.add_argument("--split", default="all", metavar="fit|test|all", help=about)
    about = "use the framework release of each row, or only the framework name (default: known)"
    parser.add_argument("--profile", choices=("known", "unknown"), default="known", help=about)
    parser.add_argument("--worst", type=count, default=10, metavar="N", help="largest errors to list (default: 10)")
    parser.add_argument("--json", action="store_true", help="print the summary and every row as JSON")
    parser.add_argument("--plot", metavar="FILE", help="plot predicted against measured; .png, .svg or .pdf")
    logs = parser.add_argument_group("validate a training log: its own plan, measured vs. predicted")
    about = "logs of one job (nodes, restarts), plain or gzip"
    logs.add_argument("--log", nargs="+", action="extend", metavar="FILE", help=about)
    _sets(logs, "change a setting in the log's plan")
    logs.add_argument("--machine", metavar="NAME", help="machine, if the log does not name it (3dtrn machines)")
    logs.add_argument("--devices", type=whole, metavar="N", help="number of devices, if no file states it")
    logs.add_argument("--from", dest="kind", metavar="KIND", help=LOG_KIND)
    about = "a plan, config or launch script of the job, for a log that prints none"
    logs.add_argument("--plan", metavar="FILE", help=about)
    logs.add_argument("--save-csv", type=new_file, metavar="OUT.csv", help="append the run as a row for --measurements")
    _unmodeled(logs, LOG_UNMODELED)


def _init(parser: ArgumentParser) -> None:
    about = "file to write, or - (default: plan.yaml)"
    parser.add_argument("path", metavar="FILE", nargs="?", default="plan.yaml", help=about)
    _plan_options(parser)


def _list(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="raw figures in SI units")


def _show(parser: ArgumentParser) -> None:
    _list(parser)
    parser.add_argument("name", metavar="NAME", help="a machine, model, accelerator or software profile")


ADD: dict[str, Callable[[ArgumentParser], None]] = {
    "": _report,
    "search": _search,
    "sensitivity": _sensitivity,
    "scale": _scale,
    "diff": _diff,
    "explain": _explain,
    "serve": _serve,
    "bench": _bench,
    "validate": _validate,
    "init": _init,
    "machines": _list,
    "models": _list,
    "show": _show,
}
"""By subcommand, the function that adds its arguments to its parser; schema has none."""
