"""The door of the what-if page: bytes of requests as a connection brings them, and plans and changes in them."""

from __future__ import annotations

import io
import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from fuzz_files import ODD, changed, files
from fuzz_plans import no_number, plan
from fuzzing import Case, Door, damaged

from steptime.commands.serve_command import START
from steptime.launch.plan_yaml import mapping_yaml
from steptime.serve.fields import FIELDS, choices
from steptime.serve.server import Handler, Server

ROOT = Path(__file__).parents[1]
import_module("numpy")  # a request's search imports it, which looks functions up in the interpreter
TOKENS = (
    b"\r\n", b"\r\n\r\n", b": ", b"Host: a\r\n", b"Origin: http://a\r\n", b"Content-Length: 9999999999\r\n", b"GET ", b"HTTP/0.9",
    b"Transfer-Encoding: chunked\r\n", b"HTTP/9.9", b"//", b"..", b"%00", b"\x00", b"\xff", b"{", b"}", b'"', b"[" * 5000,
    b"9" * 400, b"9" * 5000, b"null", b"1e999",
    b"NaN", b"-1", b"/etc/passwd", b"Expect: 100-continue\r\n", b"\\ud800",
)  # fmt: skip


def _no_number(word: str) -> None:
    raise AssertionError(f"{word} in JSON")


STRICT = json.JSONDecoder(parse_constant=_no_number)


class Line:
    """A connection that has brought its bytes already."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.sent = raw, io.BytesIO()

    def makefile(self, mode: str, *_: Any) -> Any:
        """Its two ends."""
        return io.BytesIO(self.raw) if "r" in mode else self.sent

    def sendall(self, data: bytes) -> None:
        """Keep what is answered."""
        self.sent.write(data)

    def settimeout(self, seconds: float) -> None:
        """It never waits."""

    def shutdown(self, how: int) -> None:
        """Its bytes have come already."""


def body(draw: random.Random) -> Any:
    """What the page may ask, or nearly."""
    text = yaml.safe_dump(plan(draw), sort_keys=False) if draw.random() < 0.5 else mapping_yaml(START)
    made: dict[str, Any] = {"yaml": text, "full": draw.random() < 0.5}
    if draw.random() < 0.7:
        some = draw.sample(FIELDS, draw.choice((1, 2, 4)))
        made["set"] = {
            f.path: draw.choice(choices(f.path)) if f.kind == "choice" else draw.choice((1, 2, 4, 8, 3, 64))
            for f in some
        }
    if draw.random() < 0.3:
        made["devices"] = draw.choice((1, 2, 8, 64, 1000, 0, -1, 10**9))
    if draw.random() < 0.2:
        made["pinned"] = yaml.safe_dump(plan(draw))
    if draw.random() < 0.3:
        made = changed(made, draw, [{"set": {f.path: draw.choice(ODD) for f in FIELDS}}])
    return made


def door() -> Door:
    """Requests to one server."""
    server: list[Server] = []
    texts = list(files(ROOT / "configs", suffixes=(".yaml",)).values())

    def make(draw: random.Random, folder: Path) -> Case:
        try:
            sent = json.dumps(body(draw)).encode("utf-8", "surrogatepass")
        except ValueError:
            sent = b"{}"
        if draw.random() < 0.3:
            sent = damaged(sent, draw, texts, TOKENS)
        raw = posted(server[0], sent)
        if draw.random() < 0.2:
            raw = damaged(raw, draw, texts, TOKENS)
        (folder / "request").write_bytes(raw)
        return Case(lambda: asked(server[0], raw), "serve")

    def warm(folder: Path) -> None:
        del folder
        server.append(Server("127.0.0.1", 0, START, frozenset()))
        for full in (True, False):
            sent = json.dumps({"yaml": mapping_yaml(START), "full": full, "pinned": mapping_yaml(START)})
            asked(server[0], posted(server[0], sent.encode()))

    return Door(make, warm, 12.0)


def posted(server: Server, body: bytes) -> bytes:
    """A request as the page makes it."""
    host = server.url.split("/")[2]
    lines = (
        "POST /estimate HTTP/1.1", f"Host: {host}", "Content-Type: application/json", f"Content-Length: {len(body)}",
        "Connection: close", "", "",
    )  # fmt: skip
    return "\r\n".join(lines).encode() + body


def asked(server: Server, raw: bytes) -> int:
    """Let the server answer; what it says is HTTP and strict JSON, its page has no number that is none."""
    line = Line(raw)
    Handler(line, ("127.0.0.1", 1), server)  # type: ignore[arg-type]  all of a socket that it uses
    sent = line.sent.getvalue()
    for part in sent.split(b"HTTP/1.1 ")[1:]:
        status, _, rest = part.partition(b" ")
        assert status[:1] in b"1245", part[:80]
        if b"application/json" in rest:
            found, _ = STRICT.raw_decode(rest.partition(b"\r\n\r\n")[2].decode())
            assert found["ok"] or all("\n" not in one["line"] and one["line"] for one in found["errors"]), found
            assert not no_number(found.get("html", "")), no_number(found["html"])
    return 0
