"""A server of the what-if page on a free port, and requests to it."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import contextmanager

import pytest

from steptime.commands.serve_command import START
from steptime.launch.plan_yaml import mapping_yaml
from steptime.serve import server

PLAN = mapping_yaml(START)


@contextmanager
def serving():
    """The server in a thread of its own."""
    made = server.Server("127.0.0.1", 0, START, frozenset())
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()  # seconds until it sees its end
    yield made
    made.shutdown()
    made.server_close()


def exchange(running, method, path, body=None, **headers):
    """The answer to one request, and its bytes."""
    connection = http.client.HTTPConnection(*running.server_address[:2], timeout=20)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    return answer, raw


def ask(running, **body):
    """What the page is told of the plan of `body`, `PLAN` where it names none."""
    answer, raw = exchange(
        running, "POST", "/estimate", json.dumps({"yaml": PLAN} | body), Content_Type="application/json"
    )
    assert answer.status == 200
    return json.loads(raw, parse_constant=pytest.fail)
