"""`3dtrn serve`: loads the initial plan, runs the server, and ends it."""

from __future__ import annotations

from argparse import Namespace
from errno import EADDRNOTAVAIL
from socket import gaierror
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping, read_source
from steptime.commands.console import Printer, load
from steptime.job.edit import apply_settings
from steptime.serve.server import Server

START: dict[str, Any] = {
    "model": {"preset": "llama3-8b"},
    "parallelism": {"tp": 2, "pp": 1, "dp": 32},
    "data": {"gbs": 256, "seqlen": 8192, "microbatch_sz": 1},
    "hardware": {"node_type": "dgx-h100"},
}
"""The plan that the page opens with when none is given."""


def serve(options: Namespace, out: Printer) -> int:
    """Serve until interrupted.

    Raises:
        ConfigError: the plan is not valid, or the address cannot be listened on.
    """
    start, files = opened(options.config, options.sets)
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port: must be from 0 to 65535 (got {options.port}); --port 0 takes a free one")
    try:
        server = Server(options.host, options.port, start, files)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        if isinstance(error, gaierror | UnicodeError) or getattr(error, "errno", 0) == EADDRNOTAVAIL:
            line = f"--host {options.host}: not an address of this machine ({why}); without --host: 127.0.0.1"
        else:
            line = f"--port {options.port}: cannot listen on {options.host} ({why}); --port 0 takes a free one"
        raise ConfigError(line) from None
    out.text(f"serving at {server.url} (Ctrl-C stops it)\n")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        out.text("\n")
    finally:
        server.server_close()
    return 0


def opened(source: str | None, sets: list[str]) -> tuple[dict[str, Any], frozenset[str]]:
    """The plan as written, with the content of the files that it reads, and the machine file that it names.

    Raises:
        ConfigError: as `load`.
    """
    if source is None:
        data = {section: dict(said) for section, said in START.items()}
        if problems := apply_settings(data, sets):
            raise ConfigError(problems)
        return data, frozenset()
    job = load(source, sets)
    if source == "-":
        return job.model_dump(exclude_unset=True, exclude_none=True), frozenset()
    data = parse_mapping(*read_source(source))
    apply_settings(data, sets)
    if isinstance(data.get("model"), dict) and "hf" in data["model"]:
        data["model"] = job.model.model_dump(exclude_unset=True, exclude_none=True)
    named = job.hardware.node_type
    if isinstance(data.get("hardware"), str):
        data["hardware"] = {"node_type": data["hardware"]}
    if isinstance(named, str):
        data["hardware"]["node_type"] = named
    return data, frozenset({named} if isinstance(named, str) else set())
