"""`3dtrn serve`: the command, and what the page's requests get, over a real socket on the loopback address."""

from __future__ import annotations

import http.client
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jobs import OF_EVERY_KIND
from served import PLAN, ask, exchange, serving
from work import python_calls

from steptime import Job, estimate
from steptime.answer.result import Estimate
from steptime.base.config import ConfigError
from steptime.commands import cli
from steptime.commands.serve_command import START, opened
from steptime.launch.plan_yaml import mapping_yaml
from steptime.search.run import search
from steptime.serve import whatif
from steptime.serve.fields import FIELDS, choices
from steptime.serve.what_if_page import page

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def running():
    with serving() as made:
        yield made


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
    assert "To make it fit, fastest first (one change at a time)" in found["html"]


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


@pytest.mark.parametrize(
    ("plan", "full", "most"),
    [
        pytest.param("llama3_70b", False, 25_000, id="the answer, memory and step of a 70 B plan"),
        pytest.param("megatron_1t", True, 220_000, id="the whole page of a plan of 131,072 actions"),
    ],
)
def test_an_update_does_as_much_as_takes_150_ms(plan, full, most, monkeypatch):
    """Of a change seen before: 14,000 and 148,000 calls, which take 10 and 115 to 160 ms on an idle core."""
    monkeypatch.setattr(Estimate, "find_fixes", None)  # as in the page's own process
    text = (ROOT / "configs" / f"{plan}.yaml").read_text()
    changed, given = (whatif.PageRequest(text, {"data.microbatch_sz": size}, None, "", full=full) for size in (2, 1))
    for asked in (changed, given):
        assert whatif.answer(asked)["ok"]
    found, calls = python_calls(lambda: whatif.answer(changed))
    assert found["values"]["data.microbatch_sz"] == {"said": 2, "is": 2}
    assert bool(found["data"]) == full
    assert 1_000 < calls < most


def test_every_choice_is_one_that_a_plan_takes(monkeypatch):
    """What is said of the plan itself, before it is estimated."""

    def read(job):
        raise ConfigError("a plan")

    monkeypatch.setattr(whatif, "estimate", read)
    taken = 0
    for field in FIELDS:
        if field.kind == "choice" and field.path != "model.preset":
            for word in choices(field.path):
                asked = whatif.PageRequest(PLAN, {field.path: yaml.safe_load(word)}, None, "", full=False)
                lines = [error["line"] for error in whatif.answer(asked)["errors"]]
                taken += lines == ["a plan"]
                assert not [line for line in lines if "expected" in line or "unknown" in line], lines
    assert taken > 50


# --- the command -----------------------------------------------------------------------------------------------------------


def test_the_command_listens_on_loopback_and_ends_quietly():
    """Ctrl-C is heard also where the tests run in the background of a script, whose children ignore it."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from steptime.commands.cli import main; sys.exit(main(['serve', '--port', '0']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    line = process.stdout.readline()
    port = int(line.split(":")[-1].partition("/")[0])
    assert line == f"serving at http://127.0.0.1:{port}/ (Ctrl-C stops it)\n"
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


@pytest.mark.parametrize("name", OF_EVERY_KIND)
def test_shipped_plans_of_every_kind_open(name):
    start, files = opened(str(ROOT / "configs" / f"{name}.yaml"), [])
    assert "<form" not in page(start)
    found = whatif.answer(whatif.PageRequest(mapping_yaml(start), {}, None, "", full=False), files)
    assert found["ok"] or "this page" in found["errors"][0]["line"]
