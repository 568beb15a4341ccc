"""A process that imports what is heavy once and then forks for every script that is asked of it: fork_server.py MODULE ...

A request is one line of JSON on standard input (`forked.py` writes it); its answer, one line, is the exit code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

SELDOM = (200_000, 100, 100)
"""Thresholds of the garbage collector in the processes of tests: nearly everything is freed when its last name goes."""
TIMED_OUT = 124
"""The exit code of processes that took too long, as timeout(1) has it."""


def become(request, rank_env, imported_env):
    """Be the script that was asked for, as far as it can tell; never returns. What the imports set stays set."""
    code = 1
    try:
        written = os.O_WRONLY | os.O_APPEND
        for number, flags in enumerate((os.O_RDONLY, written, written)):
            os.dup2(os.open(request["streams"][number], flags), number)
        os.environ.clear()
        os.environ.update(request["env"] | imported_env | rank_env)
        os.chdir(request["cwd"])
        sys.argv = [request["script"], *request["args"]]
        sys.path.insert(0, str(Path(request["script"]).parent))
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (a script may raise anything)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def serve(request, imported_env):
    """Run one process per rank; as under torchrun, one that fails ends the others. The first exit code that is not 0."""
    ranks = []
    for rank_env in request["ranks"]:
        if not (pid := os.fork()):
            become(request, rank_env, imported_env)
        ranks.append(pid)
    first, end = 0, time.monotonic() + request["timeout_s"]
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.remove(pid)
            if (code := os.waitstatus_to_exitcode(status)) and not first:
                first = code
                kill(ranks, signal.SIGTERM)
        elif time.monotonic() > end:
            first = TIMED_OUT
            kill(ranks, signal.SIGKILL)
        time.sleep(0.005)
    return first


def kill(ranks, signal_number):
    """Send a signal to processes that have not been waited for."""
    for pid in ranks:
        os.kill(pid, signal_number)


def main():
    """Answer until standard input ends."""
    gc.disable()
    env = dict(os.environ)
    for name in sys.argv[1:]:
        import_module(name)
    imported_env = dict(os.environ.items() - env.items())
    gc.freeze()  # no fork looks through what was imported, which would also copy its pages
    gc.set_threshold(*SELDOM)
    gc.enable()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        print(serve(json.loads(line), imported_env), file=answers, flush=True)


if __name__ == "__main__":
    main()
