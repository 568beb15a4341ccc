"""Damaged and rearranged checkpoints through the whole command: no traceback, no hang, nothing executed, bounded memory.

    python benchmarks/fuzz_checkpoint.py [--first N] [--cases N] [--minutes M] [--seeds FOLDER ...] [--keep FOLDER]

A case is a number: it draws a checkpoint of `seeds` (or of FOLDER), what is done to its bytes and files, and the options
of the command. An audit hook sees every import, exec, process and socket; a reader that had to run what a file says would
raise one. --minutes is CPU time; a failing case is printed with its number and kept in --keep. Needs the test extra.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from checkpoint_seeds import Files, seeds

from steptime.checkpoint import summarize_checkpoint
from steptime.commands.summarize_ckpt import main as summarize_ckpt

SECONDS, MEGABYTES = 5.0, 500
FORBIDDEN = (
    "exec",
    "import",
    "os.",
    "subprocess.",
    "socket.",
    "ctypes.",
    "pickle.find_class",
    "marshal.",
    "code.",
    "pty.",
)
HARMLESS = ("os.scandir", "os.listdir", "os.walk", "os.putenv", "os.unsetenv")
OPTIONS = (
    [], ["--json"], ["--json=full"], ["--tensors"], ["--depth", "9"], ["--all"], ["--emit-config", os.devnull], ["--id"],
    ["--diff"],
)  # fmt: skip
TOKENS = (
    b"cos\nsystem\n(S'true'\ntR", b"\x8c\x02os\x8c\x06system\x93", b"ctorch._utils\n_rebuild_tensor_v2\n", b"(lp0\n", b"\x85R.",
    b"9223372036854775808", b"-1", b"1e999", b"NaN", b"null", b"[[[[[[[[", b'"shape":[4294967296,4294967296]', b'"\\ud800"',
    b"\xff\xff\xff\xff", b"\xff" * 8, bytes(8), b"\x00\x00\x00\x80", b"../../x", b"\x1b[31m", b"GGUF", b"PK\x03\x04",
    b"PK\x05\x06", b"\x80\x04", b"\x93NUMPY", b"layers.999999999.", b".", b"0" * 5000,
)  # fmt: skip


class Hang(BaseException):
    """A case ran longer than any may."""


def files_of(folder: Path, most: int = 300_000) -> Files:
    """The files of a folder by their path in it; long ones are cut, which is one more way to be damaged."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes()[:most] for path in paths}


def damaged(data: bytes, draw: random.Random, pool: list[bytes]) -> bytes:
    """A few bytes changed, cut, repeated or brought in from elsewhere; most of it near the beginning or the end."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        reach = min(len(found), draw.choice((64, 512, 8192, len(found) or 1)))
        at = draw.randrange(reach) if reach else 0
        at = len(found) - 1 - at if found and draw.random() < 0.3 else at
        kind = draw.randrange(8)
        if kind < 2 and found:
            found[at] = draw.randrange(256)
        elif kind == 2:
            found[at : at + 1] = bytes([draw.choice((0, 255, 128, 127, 57))]) * draw.choice((1, 4, 8))
        elif kind == 3:
            del found[at : at + draw.choice((1, 8, 200))]
        elif kind == 4 and found:
            start = draw.randrange(len(found))
            found[at:at] = found[start : start + draw.choice((1, 16, 300))]
        elif kind == 5:
            token = draw.choice(TOKENS)
            found[at : at + draw.choice((0, len(token)))] = token
        elif kind == 6 and draw.random() < 0.3:
            del found[at:]
        elif kind == 7:
            other = draw.choice(pool)
            start = draw.randrange(max(1, len(other)))
            found[at : at + draw.choice((0, 40))] = other[start : start + draw.choice((4, 40, 400))]
    return bytes(found)


def rearranged(files: Files, draw: random.Random, pool: list[bytes]) -> Files:
    """A file less, one more under another number, or one in place of another."""
    found = dict(files)
    name = draw.choice(sorted(found))
    kind = draw.randrange(5)
    if kind == 0 and len(found) > 1:
        del found[name]
    elif kind == 1:
        number = draw.choice(("0", "1", "7", "00000", "99999999", "20000000"))
        found[re.sub(r"\d+", lambda old: number if draw.random() < 0.5 else old[0], name)] = found[name]
    elif kind == 2:
        found[name] = draw.choice(pool)
    elif kind == 3:
        found[f"{draw.choice(('x', 'model', 'iter_0000009', 'zero'))}/{name}"] = found[name]
    else:
        found[name + draw.choice((".tmp", ".index.json", ".pt", "-00001-of-00002.safetensors"))] = found[name]
    return found


def case(number: int, known: dict[str, Files], folder: Path) -> tuple[str, list[str]]:
    """Write the case below `folder`; (path to give, options)."""
    draw = random.Random(number)
    files = known[draw.choice(sorted(known))]
    pool = [data for other in known.values() for data in other.values()]
    if draw.random() < 0.3:
        files = rearranged(files, draw, pool)
    hurt = draw.sample(sorted(files), min(len(files), draw.choice((1, 1, 1, 2))))
    for name, data in files.items():
        path = folder / name
        with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(damaged(data, draw, pool) if name in hurt else data)
    alone = len(files) == 1 and draw.random() < 0.8
    path = str(folder / next(iter(files))) if alone else str(folder)
    options = list(draw.choice(OPTIONS))
    return path, options + ([str(folder)] if options == ["--diff"] else [])


class Watch:
    """Notes what Python itself reports of imports, processes and sockets while a case runs."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event.startswith(FORBIDDEN) and event not in HARMLESS:
            self.seen.append(f"{event} {str(args[0])[:80] if args else ''}")
        elif (
            self.on
            and event == "open"
            and isinstance(args[1], str)
            and set(args[1]) & set("wax+")
            and args[0] != os.devnull
        ):
            self.seen.append(f"open {args[0]} for writing")


def tried(path: str, options: list[str], watch: Watch) -> str | None:
    """What is wrong with the command's way through a case, in words; None when nothing is."""

    def alarm(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(60)  # wall time; the limit is on CPU time
    out, start = io.StringIO(), time.process_time()
    watch.seen.clear()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            watch.on = True
            code = summarize_ckpt([path, *options])
            watch.on = False
    except Hang:
        return "it hangs\n" + traceback.format_exc(limit=-4)
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        return traceback.format_exc(limit=-6)
    finally:
        watch.on = False
        signal.alarm(0)
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if options[:1] in (["--json"], ["--json=full"]):
        document = json.loads(out.getvalue(), parse_constant=lambda word: sys.exit(f"{word} in JSON"))
        if document["exit_code"] != code:
            return f"exit code {code}, {document['exit_code']} in JSON"
    if watch.seen:
        return f"not only reads: {watch.seen[:3]}"
    spent = time.process_time() - start
    return f"{spent:.1f} s of CPU" if spent > SECONDS else None


def run(
    first: int, cases: int, minutes: float, known: dict[str, Files], keep: Path | None = None
) -> tuple[int, list[int]]:
    """(cases tried, numbers of those that fail); failures are printed."""
    watch, failed, tries = Watch(), [], 0
    for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "raw-unicode-escape"):  # of json and of pickles
        codecs.lookup(name)
    with tempfile.TemporaryDirectory() as scratch:
        for number, files in enumerate(known.values()):  # whole ones first: what readers import is imported now
            for name, data in files.items():
                path = Path(scratch, str(number), name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            summarize_checkpoint(Path(scratch, str(number)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        end = time.process_time() + 60 * minutes
        for number in range(first, first + cases):
            if time.process_time() > end:
                break
            folder = Path(scratch, "case")
            path, options = case(number, known, folder)
            wrong = tried(path, options, watch)
            now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if wrong is None and now > peak + (MEGABYTES << 10):
                wrong = f"{(now - peak) >> 10} MB"
                peak = now
            if wrong is not None:
                failed.append(number)
                print(f"case {number}: {Path(path).name} {' '.join(options)}\n{wrong}", flush=True)
                if keep is not None:
                    shutil.copytree(folder, keep / str(number), dirs_exist_ok=True)
            shutil.rmtree(folder)
            tries += 1
            if tries % 10_000 == 0:
                print(f"{tries:,} cases, {len(failed)} fail, {time.process_time() / 60:.1f} min of CPU", flush=True)
    return tries, failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Damaged checkpoints through summarize-ckpt.")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=1 << 30, help="how many")
    parser.add_argument("--minutes", type=float, default=1.0, help="CPU time")
    parser.add_argument(
        "--seeds", type=Path, nargs="*", default=[], help="folders of checkpoints, one in each sub-folder"
    )
    parser.add_argument("--keep", type=Path, help="where failing cases are kept")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    known = seeds()
    for folder in options.seeds:
        known |= {str(one): files for one in sorted(folder.iterdir()) if one.is_dir() and (files := files_of(one))}
    tries, failed = run(options.first, options.cases, options.minutes, known, options.keep)
    spent = f"{time.process_time() / 60:.1f} min of CPU"
    print(f"{tries:,} cases of {len(known)} checkpoints, {spent}: {len(failed)} fail {failed[:20]}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
