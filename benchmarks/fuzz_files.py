"""Doors of text files through `3dtrn`: plans, machines, tables of runs, Hugging Face configs, launch files, logs, calibrations.

A file is a whole one (the repository's configs, data and test inputs) with a few values or bytes changed, and is then given to a
command that reads it. A plan that is accepted keeps what fuzz_plans.py asks of every answer.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from fuzz_plans import sound
from fuzzing import Case, Door, damaged

import steptime
from steptime.commands.cli import main as command
from steptime.model.hf_families import FAMILIES

ROOT = Path(__file__).parents[1]
DATA = Path(steptime.__file__).parent / "data"
LAUNCH = ROOT / "tests" / "data" / "launch"
TOKENS = (
    b"1e999", b"-1", b"0", b".nan", b".inf", b"9" * 40, b"9" * 5000, b"0x10", b"1_000", b"null", b"true", b"''", b"[]", b"{}",
    b"&a [*a, *a]", b"*a", b"<<: *a\n", b"!!python/object/apply:os.system ['true']", b"!!binary aGk=", b"? ", b"- ", b": ",
    b"\t", b"\n\n", b"\r", b"#", b"'", b'"', b"[" * 60, b"{" * 60, b"$(touch x)", b"`touch x`", b"${A:-${B}}", b"$((1<<99))",
    b"\\\n", b"<<EOF\n", b"../../etc/passwd", b"/dev/zero", b"\xff\xfe", b"\x00", b"\x1b[31m", b"\xe2\x80\xae", b"\xc2\x85",
    b"--", b"--tensor-model-parallel-size", b"@", b"%", b"%(a)s", b"{{ a }}", b"<>", b"\xef\xbb\xbf", b"1e-320", b"1 GB/s",
    b"auto",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    0, 1, 2, 3, 7, 8, 16, 64, 128, 4096, -1, 10**6, 10**9, 2**63, 10**30, 0.5, 1.5, -0.0, 1e-9, 1e30, 1e300, 1e-300, float("nan"),
    float("inf"), True, False, None, "", "auto", "none", "x", "1", "8 GB", "\x1b[31m", "../../etc/passwd", [], {}, [1], {"a": 1},
    [[[[]]]], "\ud800", "a" * 3000,
)  # fmt: skip


def spots(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values of a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(path for key, one in inner for path in spots(one, (*at, key)))]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(document: Any, draw: random.Random, others: list[Any]) -> Any:
    """A few values of a document changed, taken out, renamed, or brought in from another one."""
    found = json.loads(json.dumps(document, default=str))
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        paths = spots(found)
        if not paths:
            return deepcopy(draw.choice(ODD))
        *parents, last = draw.choice(paths)
        node, kind, value = at(found, tuple(parents)), draw.randrange(8), at(found, (*parents, last))
        if kind < 3:
            node[last] = deepcopy(draw.choice(ODD))
        elif kind < 5 and isinstance(value, int | float) and not isinstance(value, bool):
            node[last] = draw.choice(
                (value + 1, value - 1, value * 2, value / 2, value // 2, -value, value * 1000, value / 1000)
            )
        elif kind == 5:
            del node[last]
        elif kind == 6:
            other = draw.choice(others)
            node[last] = deepcopy(at(other, draw.choice(spots(other) or [()])))
        elif isinstance(node, dict):
            other = draw.choice(others)
            name = draw.choice([str(path[-1]) for path in spots(other)] or ["x"])
            node[name] = deepcopy(draw.choice((value, draw.choice(ODD))))
    return found


def text_of(document: Any, draw: random.Random) -> bytes:
    """As YAML or JSON; what neither can write is text."""
    try:
        made = json.dumps(document) if draw.random() < 0.3 else yaml.safe_dump(document, sort_keys=False)
        return made.encode("utf-8", "surrogatepass")
    except (ValueError, yaml.YAMLError):
        return repr(document).encode("utf-8", "surrogatepass")


def hurt(data: bytes, draw: random.Random, known: Mapping[str, bytes]) -> bytes:
    """A whole file with values or bytes changed."""
    name = draw.choice(sorted(known))
    if draw.random() < 0.6:
        document, other = parsed(data), parsed(known[name])
        if isinstance(document, dict | list):
            return text_of(changed(document, draw, [other] if isinstance(other, dict | list) else [document]), draw)
    return damaged(data, draw, list(known.values()), TOKENS)


@cache
def parsed(data: bytes) -> Any:
    try:
        return yaml.load(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError):
        return None


def files(*folders: Path, suffixes: tuple[str, ...] = ("",), most: int = 60_000) -> dict[str, bytes]:
    found = sorted(
        path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name.endswith(suffixes)
    )
    return {str(path): path.read_bytes()[:most] for path in found if path.name != "README.md"}


def door(known: dict[str, bytes], argv: Callable[[random.Random, str, Path], list[str]], seconds: float = 10.0) -> Door:
    """`argv`: the command for a file of a name, and of a folder to write more into."""

    def case(draw: random.Random, folder: Path, name: str, data: bytes) -> Case:
        file = folder / f"input{Path(name).suffix}"
        file.write_bytes(data)
        words = argv(draw, str(file), folder)
        code = lambda: command(words) if words[0] else sound(str(file))  # noqa: E731
        return Case(code, f"3dtrn {' '.join(words)} ({name})", json="--json" in words)

    def make(draw: random.Random, folder: Path) -> Case:
        name = draw.choice(sorted(known))
        return case(draw, folder, name, hurt(known[name], draw, known))

    def warm(folder: Path) -> None:
        folder.mkdir()
        for name in sorted(known)[::4][:10]:
            case(random.Random(name), folder, name, known[name]).run()

    return Door(make, warm, seconds, known, case)


def plans() -> Door:
    forms = (["--json"], ["--json"], [], ["--brief"], ["--assumed"], ["--check"], ["--export", "megatron"], ["--export", "nemo"],
             ["--export", "torchtitan"], ["--export", "deepspeed"], ["--export", "bridge"])  # fmt: skip

    def argv(draw: random.Random, file: str, folder: Path) -> list[str]:
        del folder
        if draw.random() < 0.3:
            return ["", file]  # its answer, held to what every answer keeps
        if draw.random() < 0.15:
            return [
                "explain",
                file,
                draw.choice(("step", "memory", "optimizer", "bubble", "attention", "tp_comm", "interval", "x")),
            ]
        if draw.random() < 0.1:
            return ["diff", file, draw.choice(sorted(whole)), *draw.choice(([], ["--json"]))]
        sets = [
            draw.choice(
                (
                    "data.gbs=1",
                    "parallelism.tp=0",
                    "model=llama3-8b",
                    "a.b.c=1",
                    "=",
                    "model.moe=",
                    "data=[",
                    "run.tokens=1e12",
                )
            )
        ]
        return [file, *draw.choice(forms), *(["--set", sets[0]] if draw.random() < 0.2 else [])]

    whole = files(ROOT / "configs", ROOT / "tests" / "data" / "dlcalc", suffixes=(".yaml",))
    return door(whole, argv)


def machines() -> Door:
    known = {}
    for path in sorted((DATA / "machines").glob("*.yaml")):
        machine = yaml.safe_load(path.read_text())
        known[path.name] = yaml.safe_dump(machine, sort_keys=False).encode()
        if not isinstance(machine["accelerator"], str):
            continue
        device = yaml.safe_load((DATA / "accelerators" / f"{machine['accelerator']}.yaml").read_text())
        known[f"{path.name}+"] = yaml.safe_dump(
            machine | {"name": "mine", "aliases": [], "accelerator": device}
        ).encode()

    def argv(draw: random.Random, file: str, folder: Path) -> list[str]:
        if draw.random() < 0.2:
            return ["show", file, *draw.choice(([], ["--json"]))]
        plan = draw.choice(("llama3_8b.yaml", "llama3_8b_fsdp.yaml", "mixtral_8x7b.yaml", "gpt2_1gpu.yaml"))
        mine = yaml.safe_load((ROOT / "configs" / plan).read_text()) | {"hardware": {"node_type": file}}
        path = folder / "plan.yaml"
        path.write_text(yaml.safe_dump(mine))
        return ["", str(path)] if draw.random() < 0.3 else [str(path), *draw.choice((["--json"], [], ["--brief"]))]

    return door(known, argv)


def tables() -> Door:
    known = {"own.csv": (ROOT / "tests" / "data" / "validate" / "own.csv").read_bytes()}
    for path in sorted((DATA / "measurements").glob("*.csv.gz")):
        head, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        known |= {
            f"{path.name}-{i}.csv": "\n".join([head, *lines[i : i + 3]]).encode()
            for i in range(0, len(lines), max(1, len(lines) // 40))
        }

    def argv(draw: random.Random, file: str, folder: Path) -> list[str]:
        del folder
        return [
            "validate",
            "--measurements",
            file,
            *draw.choice(([], ["--json"], ["--worst", "2"], ["--split", "all"])),
        ]

    return door(known, argv, seconds=20.0)


def configs() -> Door:
    sizes = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2816,
             "num_attention_heads": 16,
             "vocab_size": 32000,
             "n_layer": 4, "n_embd": 1024, "n_head": 16, "n_positions": 1024, "ffn_dim": 2816, "num_key_value_heads": 4,
             "max_position_embeddings": 4096, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
             "n_routed_experts": 8,
             "moe_intermediate_size": 512, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
             "v_head_dim": 32, "sliding_window": 128, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
             "layer_types": ["full_attention"] * 4, "text_config": {},
             "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
    known = {}
    for kind in FAMILIES:
        known[f"{kind}.json"] = json.dumps({"model_type": kind, **sizes}).encode()
        known[f"{kind}-text.json"] = json.dumps(
            {"model_type": kind, "text_config": {"model_type": kind, **sizes}}
        ).encode()

    def argv(draw: random.Random, file: str, folder: Path) -> list[str]:
        layout = {"tp": draw.choice((1, 2)), "pp": draw.choice((1, 2)), "dp": 4, "ep": draw.choice((1, 1, 2))}
        made = {
            "model": {"hf": file},
            "parallelism": layout,
            "data": {"gbs": 8, "seqlen": 1024, "microbatch_sz": 1},
            "hardware": "dgx-h100",
        }
        path = folder / "plan.yaml"
        path.write_text(yaml.safe_dump(made))
        return ["", str(path)] if draw.random() < 0.4 else [str(path), *draw.choice((["--json"], []))]

    return door(known, argv)


LAUNCHERS = ("megatron", "torchtitan", "nemo", "deepspeed", "transformers", "llamafactory", "axolotl", "swift", "nanotron",
             "gpt-neox", "maxtext", "olmo", "primus")  # fmt: skip


def launches(folders: list[Path]) -> Door:
    def argv(draw: random.Random, file: str, folder: Path) -> list[str]:
        kind = "auto" if draw.random() < 0.7 else draw.choice(LAUNCHERS)
        more = [["--allow-unmodeled"], [], ["--set", "hardware=dgx-h100"], ["--set", "model=llama3-8b", "--set", "devices=64"],
                ["--json"], ["--save", str(folder / "plan.yaml")]]  # fmt: skip
        return [file, "--from", kind, *(word for _ in range(2) for word in draw.choice(more))]

    return door(files(LAUNCH, *folders), argv)


def logs() -> Door:
    known = files(LAUNCH / "logs") | {name: data for name, data in files(LAUNCH).items() if "log" in Path(name).name}

    def argv(draw: random.Random, file: str, folder: Path) -> list[str]:
        if draw.random() < 0.2:
            return ["diff", file, draw.choice(sorted(known))]
        if draw.random() < 0.2:
            return [file, "--from", draw.choice(("auto", "megatron", "torchtitan", "nemo"))]
        more = [[], ["--json"], ["--save-csv", str(folder / "rows.csv")], ["--allow-unmodeled"], ["--set", "hardware=dgx-h100"],
                ["--plan", str(ROOT / "configs" / "llama3_8b.yaml")]]  # fmt: skip
        return ["validate", "--log", file, *draw.choice(more)]

    return door(known, argv)


def calibrations() -> Door:
    known = files(ROOT / "tests" / "data" / "calibrate", suffixes=(".yaml",))

    def argv(draw: random.Random, file: str, folder: Path) -> list[str]:
        del draw, folder
        return [str(ROOT / "configs" / "llama3_8b.yaml"), "--calibrate", file]

    return door(known, argv, seconds=20.0)
