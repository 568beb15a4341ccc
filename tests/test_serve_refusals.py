"""What `3dtrn serve` refuses: requests of other pages, paths, malformed ones, files that a plan names."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import PLAN, ask, exchange, serving

import steptime
from steptime.commands.serve_command import START, opened
from steptime.launch.plan_yaml import mapping_yaml
from steptime.serve import server, whatif
from steptime.serve.fields import FIELDS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def running():
    with serving() as made:
        yield made


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "headers"),
    [
        (421, "GET", "/", None, {"Host": "attacker.example:80"}),
        (403, "GET", "/", None, {"Origin": "null"}),
        (404, "GET", "/etc/passwd", None, {}),
        (404, "GET", "/../../etc/passwd", None, {}),
        (404, "GET", "//etc/passwd", None, {}),
        (404, "POST", "/", "{}", {"Content_Type": "application/json"}),
        (415, "POST", "/estimate", "{}", {"Content_Type": "text/plain"}),
        (411, "POST", "/estimate", None, {"Content_Type": "application/json", "Transfer_Encoding": "chunked"}),
        (411, "POST", "/estimate", None, {"Content_Type": "application/json", "Content_Length": "-1"}),
        (413, "POST", "/estimate", None, {"Content_Type": "application/json", "Content_Length": "99999999999"}),
        (413, "POST", "/estimate", None, {"Content_Type": "application/json", "Content_Length": "9" * 5000}),
        (400, "POST", "/estimate", "no json", {"Content_Type": "application/json"}),
        (400, "POST", "/estimate", "[" * 100_000, {"Content_Type": "application/json"}),
        (400, "POST", "/estimate", "[]", {"Content_Type": "application/json"}),
        (400, "POST", "/estimate", '{"yaml": 1}', {"Content_Type": "application/json"}),
        (400, "POST", "/estimate", '{"yaml": "", "set": {"model.hf": "/etc/passwd"}}', {"Content_Type": "application/json"}),
        (501, "PUT", "/estimate", "{}", {}),
    ],
)  # fmt: skip
def test_what_is_no_request_of_the_page_is_refused(running, status, method, path, body, headers):
    answer, raw = exchange(running, method, path, body, **headers)
    assert answer.status == status
    assert b"Traceback" not in raw


HOSTILE = [
    {"model": {"hf": "/etc/passwd"}},
    {"model": {"hf": "config.json"}},
    {"model": {"preset": "../../../../etc/passwd"}},
    {"model": "../machines/dgx-h100"},
    {"hardware": "/etc/passwd"},
    {"hardware": {"node_type": "../../../../tmp/machine.yaml"}},
    {"hardware": {"node_type": "machine.yaml"}},
    {"hardware": {"node_type": "dgx-h100", "overrides": {"accelerator": "../machines/dgx-h100"}}},
    {"hardware": {"node_type": {"name": "x", "accelerator": "/etc/passwd"}}},
    {"performance": {"software": "../models/llama3-8b"}},
    {"performance": {"software": "nemo@../../x"}},
    {"performance": {"calibration": "/etc/passwd"}},
]

opened_files: list[str] = []
watching = threading.Event()


def watch(event, args):
    if event == "open" and watching.is_set() and isinstance(args[0], str | bytes):
        opened_files.append(str(args[0]))


sys.addaudithook(watch)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(HOSTILE), st.sampled_from(["", "/etc/hostname", "../x.yaml", "a.json", "-"]))
def test_no_file_but_the_packages_own_is_opened_for_a_plan(running, hostile, path):
    """Every file that Python opens while a request is answered lies in the package."""
    plan = START | hostile
    if path and isinstance(plan["hardware"], dict) and "overrides" not in plan["hardware"]:
        plan = plan | {"hardware": {"node_type": path}}
    opened_files.clear()
    watching.set()
    try:
        found = ask(running, yaml=mapping_yaml(plan), full=True)
    finally:
        watching.clear()
    assert not found["ok"]
    own = (str(Path(steptime.__file__).parent), sys.prefix, sys.base_prefix)
    assert [name for name in opened_files if not name.startswith(own) and not name.isdecimal()] == []


def test_a_machine_file_of_the_command_line_stays_usable(tmp_path):
    """The plan that it was started with may name a machine file; a page may not name another."""
    machine = tmp_path / "mine.yaml"
    machine.write_text((ROOT / "steptime/data/machines/dgx-h100.yaml").read_text())
    other = tmp_path / "other.yaml"
    other.write_text(machine.read_text())
    (tmp_path / "plan.yaml").write_text(mapping_yaml(START | {"hardware": {"node_type": "mine.yaml"}}))
    start, files = opened(str(tmp_path / "plan.yaml"), [])
    asked = whatif.PageRequest(mapping_yaml(start), {}, None, "", full=False)
    assert whatif.answer(asked, files)["ok"]
    moved = asked._replace(yaml=asked.yaml.replace("mine.yaml", "other.yaml"))
    assert "the page cannot read machine files" in whatif.answer(moved, files)["errors"][0]["line"]


TEXT = st.text(max_size=200) | st.text("{}[]:,-&*!|>'\"%@`\n ab01.", max_size=80)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    TEXT,
    st.dictionaries(
        st.sampled_from([f.path for f in FIELDS]), st.none() | st.integers() | st.floats() | TEXT, max_size=3
    ),
)
def test_any_text_gets_an_answer(text, changes):
    for plan in (text, PLAN, PLAN + text):
        body = {"yaml": plan, "set": changes, "full": True}
        try:
            asked = whatif.read_request(body)
        except ValueError:
            continue
        json.dumps(whatif.answer(asked), allow_nan=False)


def test_nothing_of_a_request_is_repeated(running):
    for line in (
        b"GET / HTTP/1.1 <script>",
        b"<script> / HTTP/1.1",
        b"GET / HTTP/<script>",
        b"GET " + b"<script>" * 9000,
    ):
        with socket.create_connection(running.server_address[:2], timeout=5) as one:
            one.sendall(line + b"\r\nHost: a\r\n\r\n")
            with one.makefile("rb") as answer:
                raw = answer.read()
        assert b"script" not in raw
        assert b"nosniff" in raw or raw.startswith(b"{")


def test_only_its_own_page_may_ask_in_whatever_way_the_address_is_written(running):
    port = running.server_address[1]
    for host, origin, status in (
        (f"localhost:{port}", f"http://localhost:{port}", 200),
        (f"LOCALHOST:{port}", f"http://localhost:{port}", 200),
        (f"127.0.0.1:{port}", f"http://localhost:{port}", 403),  # another origin
        (f"127.0.0.1:{port}", f"https://127.0.0.1:{port}", 403),
        (f"127.0.0.1:{port}", "http://127.0.0.1:1", 403),
        (f"127.0.0.1:{port}", "http://attacker.example", 403),
        (f"127.0.0.2:{port}", f"http://127.0.0.2:{port}", 421),
        (f"0.0.0.0:{port}", f"http://0.0.0.0:{port}", 421),
        (f"127.0.0.1.nip.io:{port}", None, 421),
        (f"127.0.0.1:{port}.attacker.example", None, 421),
        (f"attacker.example@127.0.0.1:{port}", None, 421),
        ("127.0.0.1", None, 421),
        ("", None, 421),
    ):
        headers = {"Host": host, "Content_Type": "application/json"} | ({"Origin": origin} if origin else {})
        assert exchange(running, "POST", "/estimate", json.dumps({"yaml": PLAN}), **headers)[0].status == status, host


@pytest.mark.parametrize(
    ("host", "accepted"),
    [
        ("10.1.2.3", True),
        ("[fe80::1]", True),
        ("localhost", True),
        ("attacker.example", False),
        ("10.1.2.3.nip.io", False),
        ("fe80::1", False),
        ("[10.1.2.3]", False),
    ],
)
def test_a_server_of_all_addresses_answers_to_any_in_digits(host, accepted):
    """A name may be pointed anywhere by whom it belongs to; an address in digits is what it is."""
    made = server.Server("0.0.0.0", 0, START, frozenset())
    try:
        assert made.accepts(f"{host}:{made.server_address[1]}") == accepted
        assert not made.accepts(f"{host}:1")
    finally:
        made.server_close()
