"""Memory of this process and its children: what each allocates is seen."""

import subprocess
import sys
import time

import psutil
import pytest

from steptime.bench.host_memory import max_rss_bytes, rss_bytes, sampled
from steptime.bench.run_logs.samples import MIB

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
    before = rss_bytes()
    with sampled(interval_s=3600) as tally:
        held = b"x" * HELD
        during, own = rss_bytes(), psutil.Process().memory_info().rss  # other children of this process may live beside
    del held
    assert during - before > LEAST
    row = tally.row()
    assert row.samples == 2  # at entry, at exit
    assert row.peak_bytes - before > LEAST
    assert row.average_bytes < row.peak_bytes < row.total_bytes
    assert row.mode_bytes % MIB == 0
    assert max_rss_bytes() > 0.98 * own  # the kernel's counters lag by a few pages a thread


def test_what_a_child_allocates_is_seen_and_gone_with_it(child):
    with sampled(interval_s=3600) as tally:
        during = rss_bytes()
        child.communicate("\n")
        after = rss_bytes()
    assert during - after > LEAST
    assert tally.row().peak_bytes - after > LEAST


def test_a_thread_samples_by_itself():
    with sampled(interval_s=0.001) as tally:
        for _ in range(10_000):
            if tally.samples >= 5:
                break
            time.sleep(0.001)
    row = tally.row()
    assert row.samples >= 5
    assert row.interval_s > 0
    assert row.first <= row.last


def test_the_thread_ends_with_the_block_even_when_the_block_fails():
    with pytest.raises(RuntimeError, match="work"), sampled(interval_s=0.001) as tally:
        raise RuntimeError("work")
    samples = tally.samples
    assert samples >= 2
    time.sleep(0.02)
    assert tally.samples == samples
