"""`3dtrn serve`: the page's requests and what is refused, over a real socket on the loopback address."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import steptime
from steptime import Job, estimate
from steptime.answer.result import Estimate
from steptime.commands import cli
from steptime.commands.serve_command import START, opened
from steptime.launch.plan_yaml import mapping_yaml
from steptime.search.run import search
from steptime.serve import server, whatif
from steptime.serve.fields import FIELDS, choices
from steptime.serve.page import page

ROOT = Path(__file__).parents[1]
PLAN = mapping_yaml(START)


@pytest.fixture(scope="module")
def running():
    made = server.Server("127.0.0.1", 0, START, frozenset())
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def exchange(running, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(*running.server_address[:2], timeout=20)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    return answer, raw


def ask(running, **body):
    answer, raw = exchange(
        running, "POST", "/estimate", json.dumps({"yaml": PLAN} | body), Content_Type="application/json"
    )
    assert answer.status == 200
    return json.loads(raw, parse_constant=pytest.fail)


# --- what it answers -------------------------------------------------------------------------------------------------------


def test_the_best_layout_takes_the_place_of_the_plans():
    """It is the one that `search` finds, on as many devices, and a search of it finds itself."""
    asked = whatif.read_request({"yaml": PLAN, "best": True})
    found = whatif.answer(asked)
    best = Job.load(found["yaml"])
    given = Job.load(PLAN)
    assert best == search(given).best.job
    assert best.parallelism.devices == given.parallelism.devices == found["devices"]
    assert estimate(best).step_s < estimate(given).step_s
    again = whatif.answer(asked._replace(yaml=found["yaml"]))
    assert again["note"].endswith("the plan unchanged")
    assert "best of" in found["note"]
    assert "--set parallelism." in found["note"]


def test_no_layout_is_best_where_none_fits():
    crowded = whatif.read_request({"yaml": PLAN, "best": True, "set": {"model.preset": "llama3-405b"}, "devices": 8})
    found = whatif.answer(crowded)
    assert not found["ok"]
    assert "fits" in found["errors"][0]["line"] or "states" in found["errors"][0]["line"]


def test_the_page_is_there_and_asks_only_this_server(running):
    answer, raw = exchange(running, "GET", "/")
    text = raw.decode()
    assert answer.status == 200
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert "connect-src &#x27;self&#x27;" in text
    assert "http" not in text.replace("http-equiv", "").replace("http.server", "").partition("<script type")[0]


def test_the_answer_is_the_estimates(running):
    found, own = ask(running, full=True), estimate(Job.load(PLAN))
    assert found["ok"]
    assert found["devices"] == own.devices == 64
    assert yaml.safe_load(found["yaml"]) == START
    assert found["data"]["schedule"]["step_s"] == own.step_s
    assert found["values"]["parallelism.zero_level"] == {"said": None, "is": own.job.zero_level}
    assert 'id="plan"' in found["html"]


def test_the_quick_answer_is_the_first_part_of_the_whole(running):
    quick = ask(running)
    assert [name for name in ("answer", "memory", "step", "schedule") if f'id="{name}"' in quick["html"]] == [
        "answer", "memory", "step",
    ]  # fmt: skip
    assert quick["data"] == {}


def test_changes_are_made_in_the_plan(running):
    found = ask(running, set={"parallelism.tp": 8, "performance.precision": "fp8_delayed"}, devices=128)
    plan = yaml.safe_load(found["yaml"])
    assert plan["parallelism"] == {"tp": 8, "pp": 1}
    assert found["values"]["parallelism.dp"] == {"said": None, "is": 16}
    assert plan["performance"] == {"precision": "fp8_delayed"}
    assert found["devices"] == 128
    again = ask(running, yaml=found["yaml"], set={"parallelism.dp": 4})
    assert "devices" not in yaml.safe_load(again["yaml"])
    assert again["devices"] == 32
    back = ask(running, yaml=found["yaml"], set={"performance.precision": None})
    assert back["values"]["performance.precision"] == {"said": None, "is": "bf16"}


def test_a_machine_under_an_alias_is_chosen_in_its_field(running):
    """The field's choices are names; configs/deepseek_v3.yaml says hgx-h800."""
    found = ask(running, yaml=(ROOT / "configs" / "deepseek_v3.yaml").read_text())
    assert found["values"]["hardware.node_type"] == {"said": "h800-node", "is": "h800-node"}
    assert "h800-node" in choices("hardware.node_type")


def test_single_changes_are_told_as_such(running, monkeypatch):
    """The command line searches whole lists of changes; a page that answers at once tries one after the other."""
    monkeypatch.setattr(Estimate, "find_fixes", None)
    found = ask(running, yaml=(ROOT / "configs" / "deepseek_v3.yaml").read_text(), full=True)
    assert "To make it fit, cheapest first (one change at a time)" in found["html"]


@pytest.mark.parametrize(
    ("body", "path", "words"),
    [
        ({"set": {"parallelism.tp": 3}}, "parallelism.tp", "must divide n_q_heads 32"),
        ({"set": {"parallelism.tp": 8}, "devices": 60}, "devices", "60"),
        ({"yaml": "model: ["}, "", "plan: line"),
        ({"yaml": ""}, "", "plan: empty"),
        ({"set": {"data.gbs": 3_200_000}}, "data.gbs", "too many for this page"),
        ({"yaml": PLAN.replace("llama3-8b", "lama3-8b")}, "", "lama3-8b"),
        ({"full": True, "pinned": "model: 3"}, "", "model"),
    ],
)
def test_what_is_wrong_stands_at_its_field(running, body, path, words):
    found = ask(running, **body)
    assert not found["ok"]
    assert any(words in error["line"] and (not path or error["path"].startswith(path)) for error in found["errors"])


def test_the_pinned_plan_is_compared_setting_by_setting(running):
    found = ask(running, full=True, pinned=PLAN, set={"data.microbatch_sz": 2})
    assert "data.microbatch_sz" in found["compare"]
    assert "pinned" in found["compare"]


def test_an_update_takes_less_than_150_ms(running):
    """The answer, memory and step of a 70 B plan, the best of five: other tests share the machine."""
    text = (ROOT / "configs" / "llama3_70b.yaml").read_text()
    took = []
    for size in (1, 2, 1, 2, 1):
        began = time.perf_counter()
        assert ask(running, yaml=text, set={"data.microbatch_sz": size})["ok"]
        took.append(time.perf_counter() - began)
    assert min(took) < 0.150


def test_a_whole_report_takes_less_than_250_ms_beside_other_work():
    """CPU time of the page of a plan of 131,072 actions, the best of three, with the orders of both micro-batches known.

    On an idle core it takes 115 to 140 ms; what shares the core's caches lengthens it."""
    text = (ROOT / "configs" / "megatron_1t.yaml").read_text()
    took = []
    for size in (1, 2, 1, 2, 1, 2, 1):
        began = time.process_time()
        found = whatif.answer(whatif.PageRequest(text, {"data.microbatch_sz": size}, None, "", full=True))
        took.append(time.process_time() - began)
        assert found["ok"]
        assert found["data"]["schedule"]["microbatches"] == 512 // size
    assert min(took[2::2]) < 0.250


def test_every_choice_is_one_that_a_plan_takes():
    for field in FIELDS:
        if field.kind == "choice" and field.path != "model.preset":
            for word in choices(field.path):
                asked = whatif.PageRequest(PLAN, {field.path: yaml.safe_load(word)}, None, "", full=False)
                lines = [error["line"] for error in whatif.answer(asked).get("errors", [])]
                assert not [line for line in lines if "expected" in line or "unknown" in line], lines


# --- what it refuses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "headers"),
    [
        (421, "GET", "/", None, {"Host": "attacker.example:80"}),
        (421, "POST", "/estimate", "{}", {"Host": "127.0.0.1.nip.io", "Content_Type": "application/json"}),
        (403, "POST", "/estimate", "{}", {"Origin": "http://attacker.example", "Content_Type": "application/json"}),
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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
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


def test_an_estimate_that_takes_too_long_is_ended():
    def slow():
        while True:
            sum(range(1000))

    began = time.monotonic()
    with pytest.raises(server.OverTimeError), server.deadline(0.2):
        slow()
    assert time.monotonic() - began < 5.0
    with server.deadline(0.5):
        pass
    time.sleep(0.6)  # nothing comes after the block


def test_a_silent_connection_is_closed(running, monkeypatch):
    monkeypatch.setattr(server.Handler, "timeout", 0.2)
    with socket.create_connection(running.server_address[:2], timeout=5) as quiet:
        quiet.sendall(b"GET / HTTP/1.1\r\n")
        assert quiet.recv(100) == b""


def cut_after(running, sent, every_s):
    """Seconds until the server ends a connection that sends these bytes one at a time."""
    began = time.monotonic()
    with socket.create_connection(running.server_address[:2], timeout=every_s) as slow:
        for i in range(len(sent)):
            try:
                slow.sendall(sent[i : i + 1])
                if slow.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    return time.monotonic() - began


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 1000,
        b"GET / HTTP/1.1\r\nA: " + b"a" * 1000,
        b"POST /estimate HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{{{{{",
    ],
)
def test_a_request_that_trickles_in_is_cut_off(running, monkeypatch, sent):
    """Each byte comes in time; the whole does not. 1,000 bytes would take 50 s."""
    monkeypatch.setattr(server, "ARRIVAL_SECONDS", 0.5)
    if b"%d" in sent:
        head = sent % running.server_address[1]
        began = time.monotonic()
        with socket.create_connection(running.server_address[:2], timeout=20) as slow:
            slow.sendall(head)
            assert slow.recv(100) == b""
        assert 0.4 < time.monotonic() - began < 9.0
    else:
        assert 0.4 < cut_after(running, sent, 0.05) < 9.0


def test_more_connections_than_there_is_room_for_are_closed(monkeypatch):
    """What has room goes on, and ended connections make room."""
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    made = server.Server("127.0.0.1", 0, START, frozenset())
    threading.Thread(target=made.serve_forever, daemon=True).start()
    kept = [socket.create_connection(made.server_address[:2], timeout=5) for _ in range(2)]
    with socket.create_connection(made.server_address[:2], timeout=5) as third:
        assert third.recv(100) == b""
    kept[0].sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % made.server_address[1])
    assert kept[0].recv(100).startswith(b"HTTP/1.1 200 ")
    for one in kept:
        one.close()
    end = time.monotonic() + 10.0
    while made.room._value < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert exchange(made, "GET", "/")[0].status == 200
    made.shutdown()
    made.server_close()


def test_an_answer_that_nobody_reads_holds_no_slot(running, monkeypatch):
    free, reply = [], server.Handler.reply
    monkeypatch.setattr(server.Handler, "reply", lambda own, *a: (free.append(running.slots._value), reply(own, *a)))
    assert ask(running)["ok"]
    assert free == [server.AT_ONCE]


def test_a_page_costs_nothing_however_often_it_is_asked_for(running, monkeypatch):
    """Any page may name it as a picture; it was made once."""
    monkeypatch.setattr(server, "page", pytest.fail)
    assert exchange(running, "GET", "/?" + "a" * 1000)[0].status == 200


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
        (f"127.0.0.2:{port}", f"http://127.0.0.2:{port}", 421),
        (f"0.0.0.0:{port}", f"http://0.0.0.0:{port}", 421),
        (f"127.0.0.1:{port}.attacker.example", None, 421),
        (f"attacker.example@127.0.0.1:{port}", None, 421),
        ("127.0.0.1", None, 421),
        ("", None, 421),
    ):
        headers = {"Host": host, "Content_Type": "application/json"} | ({"Origin": origin} if origin else {})
        assert exchange(running, "POST", "/estimate", json.dumps({"yaml": PLAN}), **headers)[0].status == status, host


@pytest.mark.parametrize(
    ("listens", "host", "accepted"),
    [
        ("0.0.0.0", "10.1.2.3", True),
        ("0.0.0.0", "[fe80::1]", True),
        ("0.0.0.0", "localhost", True),
        ("0.0.0.0", "attacker.example", False),
        ("0.0.0.0", "10.1.2.3.nip.io", False),
        ("0.0.0.0", "fe80::1", False),
        ("0.0.0.0", "[10.1.2.3]", False),
        ("127.0.0.1", "10.1.2.3", False),
        ("127.0.0.1", "0.0.0.0", False),
    ],
)
def test_a_server_of_all_addresses_answers_to_any_in_digits(listens, host, accepted):
    """A name may be pointed anywhere by whom it belongs to; an address in digits is what it is."""
    made = server.Server(listens, 0, START, frozenset())
    try:
        assert made.accepts(f"{host}:{made.server_address[1]}") == accepted
        assert not made.accepts(f"{host}:1")
    finally:
        made.server_close()


# --- the command -----------------------------------------------------------------------------------------------------------


def test_the_command_listens_on_loopback_and_ends_quietly():
    code = "import sys; from steptime.commands.cli import main; sys.exit(main(['serve', '--port', '0']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    line = process.stdout.readline()
    port = int(line.split(":")[-1].partition("/")[0])
    assert line == f"what if: http://127.0.0.1:{port}/ (Ctrl-C ends it)\n"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    connection.close()
    process.send_signal(2)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out.strip(), err) == (0, "", "")


def test_a_port_in_use_is_told(running, capsys):
    port = running.server_address[1]
    assert cli.main(["serve", "--port", str(port), "--host", "127.0.0.1"]) == 2
    assert f"--port {port}: cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert cli.main(["serve", "--port", "99999"]) == 2
    assert capsys.readouterr().err == "--port: must be from 0 to 65535 (got 99999); --port 0 takes a free one\n"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_shipped_plan_opens(name):
    start, files = opened(str(ROOT / "configs" / name), [])
    assert "<form" not in page(start)
    found = whatif.answer(whatif.PageRequest(mapping_yaml(start), {}, None, "", full=False), files)
    assert found["ok"] or "this page" in found["errors"][0]["line"]
