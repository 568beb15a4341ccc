"""The engine of benchmarks/fuzz.py: a case is a number, what is wrong with it is a text.

A door is a way into steptime. It draws a case from a number, and the engine runs it: the exit code is a documented one, what is
printed is lines or strict JSON, CPU time and memory are bounded, and an audit hook sees no exec, process, socket or foreign
library, and no file written but in the case's own folder.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MEGABYTES = 500
"""What one case may add to the memory of the process."""
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
HARMLESS = (
    "os.scandir",
    "os.listdir",
    "os.walk",
    "os.putenv",
    "os.unsetenv",
    "ctypes.addressof",
    "os.remove",
    "os.rename",
)
LIBRARIES = {"steptime", "numpy", "pydantic", "pydantic_core", "yaml", "tabulate", *sys.stdlib_module_names}
"""What may be imported late."""
MOST_LINE = 4000
"""Characters of a line that tells what is wrong."""
TOKENS = (
    b"cos\nsystem\n(S'true'\ntR", b"\x8c\x02os\x8c\x06system\x93", b"ctorch._utils\n_rebuild_tensor_v2\n", b"(lp0\n", b"\x85R.",
    b"9223372036854775808", b"-1", b"1e999", b"NaN", b"null", b"[[[[[[[[", b'"shape":[4294967296,4294967296]', b'"\\ud800"',
    b"\xff\xff\xff\xff", b"\xff" * 8, bytes(8), b"\x00\x00\x00\x80", b"../../x", b"\x1b[31m", b"GGUF", b"PK\x03\x04",
    b"PK\x05\x06", b"\x80\x04", b"\x93NUMPY", b"layers.999999999.", b".", b"0" * 5000,
)  # fmt: skip


class Case(NamedTuple):
    """One try."""

    run: Callable[[], int]
    """Returns an exit code; raises where something is wrong."""
    told: str
    """The command, in words."""
    json: bool = False
    """Whether what it prints is one JSON document."""


class Door(NamedTuple):
    """A way into steptime."""

    make: Callable[[random.Random, Path], Case]
    """Draws a case and writes its files in a folder."""
    warm: Callable[[Path], None]
    """Runs what is whole, so that all that readers import is there before cases are."""
    seconds: float = 5.0
    """The most CPU time of a case [s]."""
    whole: Mapping[str, bytes] = {}
    """Whole inputs of a door that reads one file, by name."""
    given: Callable[[random.Random, Path, str, bytes], Case] | None = None
    """The case of such an input, changed or not."""


class Hang(BaseException):
    """A case takes longer than any may."""


def damaged(data: bytes, draw: random.Random, pool: list[bytes], tokens: tuple[bytes, ...] = TOKENS) -> bytes:
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
            token = draw.choice(tokens)
            found[at : at + draw.choice((0, len(token)))] = token
        elif kind == 6 and draw.random() < 0.3:
            del found[at:]
        elif kind == 7:
            other = draw.choice(pool)
            start = draw.randrange(max(1, len(other)))
            found[at : at + draw.choice((0, 40))] = other[start : start + draw.choice((4, 40, 400))]
    return bytes(found)


class Watch:
    """Notes what Python itself reports of imports, processes and sockets while a case runs."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.on = False
        self.folder = ""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event.startswith(FORBIDDEN) and event not in HARMLESS and not _own(event, args):
            self.seen.append(f"{event} {str(args[0])[:80] if args else ''}")
        elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
            own = self.folder and str(args[0]).startswith(self.folder)
            if args[0] != os.devnull and not own:
                self.seen.append(f"open {args[0]} for writing")


def _own(event: str, args: tuple[Any, ...]) -> bool:
    """Whether it is an import of a library that steptime uses, or what runs in one: modules that are first needed by a case."""
    if event == "import" and str(args[0]).partition(".")[0] in LIBRARIES:
        return True
    frame = sys._getframe()  # noqa: SLF001
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back  # type: ignore[assignment]
    return event.startswith(("exec", "import", "marshal.")) and frame is not None


def tried(case: Case, seconds: float, watch: Watch) -> str | None:
    """What is wrong with the way through a case, in words; None when nothing is."""

    def alarm(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, alarm)
    signal.setitimer(signal.ITIMER_PROF, 8 * seconds)
    out, err, start = io.StringIO(), io.StringIO(), time.process_time()
    watch.seen.clear()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            watch.on = True
            code = case.run()
            watch.on = False
    except Hang:
        return "it hangs\n" + traceback.format_exc(limit=-4)
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        return traceback.format_exc(limit=-8)
    finally:
        watch.on = False
        signal.setitimer(signal.ITIMER_PROF, 0)
    spent = time.process_time() - start
    return _told(case, code, out.getvalue(), err.getvalue()) or (
        f"not only reads: {watch.seen[:3]}" if watch.seen else f"{spent:.1f} s of CPU" if spent > seconds else None
    )


def _told(case: Case, code: int, out: str, err: str) -> str | None:
    """What is wrong with an exit code and what was printed."""
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if case.json and out:
        try:
            document = json.loads(out, parse_constant=lambda word: (_ for _ in ()).throw(ValueError(f"{word} in JSON")))
        except ValueError as error:
            return f"not JSON: {error}"
        if isinstance(document, dict) and document.get("exit_code", code) != code:
            return f"exit code {code}, {document['exit_code']} in JSON"
    if code == 2 and not (err.strip() or out.strip()):
        return "exit code 2, and nothing is said"
    if "Traceback" in err:
        return err
    for line in (out + err).splitlines() if not case.json else err.splitlines():
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", line):
            return f"control characters in {line[:200]!r}"
        if len(line) > MOST_LINE and code == 2:
            return f"a line of {len(line):,} characters: {line[:200]!r}"
    return None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Nothing is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


class Run(NamedTuple):
    """Which cases."""

    first: int = 0
    cases: int = 1 << 30
    minutes: float = 1.0
    """CPU time [min]."""
    keep: Path | None = None
    """Where failing cases go."""


def run(name: str, door: Door, asked: Run) -> tuple[int, list[int]]:
    """(cases tried, numbers of those that fail); failures are printed."""
    watch, failed, tries = Watch(), [], 0
    for codec in (
        "utf-16-le",
        "utf-16-be",
        "utf-32-le",
        "utf-32-be",
        "raw-unicode-escape",
        "idna",
    ):  # imported when first used
        codecs.lookup(codec)
    with tempfile.TemporaryDirectory() as scratch:
        with silenced():
            door.warm(Path(scratch, "warm"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        end = time.process_time() + 60 * asked.minutes
        folder = Path(scratch, "case")
        watch.folder = str(folder)
        for number in range(asked.first, asked.first + asked.cases):
            if time.process_time() > end:
                break
            folder.mkdir()
            case = door.make(random.Random(f"{name} {number}"), folder)
            wrong = tried(case, door.seconds, watch)
            now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if wrong is None and now > peak + (MEGABYTES << 10):
                wrong, peak = f"{(now - peak) >> 10} MB", now
            if wrong is not None:
                failed.append(number)
                print(f"{name} {number}: {case.told.replace(str(folder), '.')}\n{wrong}", flush=True)
                if asked.keep is not None:
                    shutil.copytree(folder, asked.keep / f"{name}-{number}", dirs_exist_ok=True)
            shutil.rmtree(folder)
            tries += 1
    return tries, failed
