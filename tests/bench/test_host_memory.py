"""Memory of this process and its children: what each allocates is seen."""

import json
import subprocess
import sys
import time

import pytest

from steptime.bench.host_memory import MaxRss, Sampler, max_rss, rss_bytes
from steptime.bench.samples import MIB, Tally
from steptime.report.bench_logs import host_memory
from steptime.report.table import Style, layout

HELD = 96 * 2**20
LEAST = 0.9 * HELD
"""Pages that were free already may hold a little of it."""

CHILD = f"held = b'x' * {HELD}; print('ready', flush=True); input()"


@pytest.fixture
def child():
    """A process that holds `HELD` bytes until it is told to end."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        if process.poll() is None:
            process.communicate("\n")


def test_what_the_parent_allocates_is_seen():
    with Sampler(interval_s=3600) as sampler:
        before = sampler.sample()
        held = b"x" * HELD
        during = sampler.sample()
        assert during - before > LEAST
        del held
    row = sampler.row()
    assert row.peak_bytes == during
    assert row.samples == 4  # at entry, two by hand, at exit
    assert row.average_bytes < row.peak_bytes < row.total_bytes
    assert row.mode_bytes % MIB == 0
    assert max_rss().own_bytes > 0.98 * during  # the kernel's counters lag by a few pages a thread


def test_what_a_child_allocates_is_seen_and_gone_with_it(child):
    with Sampler(interval_s=3600) as sampler:
        during = sampler.sample()
        child.communicate("\n")
        after = sampler.sample()
    assert during - after > LEAST
    assert sampler.row().peak_bytes >= during
    assert max_rss().largest_child_bytes > LEAST


def test_a_thread_samples_by_itself():
    with Sampler(interval_s=0.001) as sampler:
        for _ in range(10_000):
            if sampler.row().samples >= 5:
                break
            time.sleep(0.001)
    row = sampler.row()
    assert row.samples >= 5
    assert row.interval_s > 0
    assert row.first <= row.last


def test_the_thread_ends_with_the_block_even_when_the_block_fails():
    sampler = Sampler(interval_s=0.001)
    with pytest.raises(RuntimeError, match="work"), sampler:
        raise RuntimeError("work")
    samples = sampler.row().samples
    assert samples >= 2
    assert rss_bytes() > 0
    assert sampler.row().samples == samples


def test_the_report():
    """300, 100 and 100 MiB: peak 300, average 167, mode 100."""
    tally = Tally("host")
    for mib in (300, 100, 100):
        tally.add(mib * MIB)
    document, facts = host_memory(tally.row(), MaxRss(int(256 * MIB), int(64 * MIB)))
    text = "\n".join(layout(facts, Style()))
    assert "peak 300 MiB, average 167 MiB, mode 100 MiB (3 samples)" in text
    assert "at most 256 MiB" in text
    assert "at most 64.0 MiB" in text
    assert json.loads(json.dumps(document))["largest_child_bytes"] == 64 * MIB
