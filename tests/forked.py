"""Scripts in processes of their own that start at once: forks of a server which has imported what is heavy (`fork_server.py`)."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SERVER = TESTS / "fork_server.py"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "MV2_", "TORCHELASTIC_")


class Done(NamedTuple):
    """What became of a script; of several ranks, all that they wrote."""

    returncode: int
    stdout: str
    stderr: str


def clean(env=None):
    """This process's environment without what a launcher may have left in it, with `env` over it."""
    base = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    return base | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {})


@cache
def server(*modules):
    """The server that has imported `modules`; it lives as long as this process."""
    folders = os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "truth")))
    command = [sys.executable, "-W", "error::FutureWarning", str(SERVER), *modules]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean({"PYTHONPATH": folders})
    )

    def stop():
        process.stdin.close()
        process.stdout.close()
        process.wait()

    atexit.register(stop)
    return process


def run(process, script, *args, ranks=({},), stdin="", env=None, timeout_s=300.0):
    """The script as forks of a `server`, one for each mapping of `ranks`, over `env`."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        for path, text in zip(streams, (stdin, "", ""), strict=True):
            path.write_text(text, encoding="utf-8")
        request = {
            "script": str(script),
            "args": list(map(str, args)),
            "ranks": list(ranks),
            "env": clean(env),
            "cwd": str(ROOT),
            "streams": list(map(str, streams)),
            "timeout_s": timeout_s,
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        code = process.stdout.readline()
        assert code, "the fork server is gone"
        return Done(int(code), *(path.read_text(encoding="utf-8") for path in streams[1:]))
