"""The stopwatch: counts of calls on each kind of device; seconds only by their order."""

from __future__ import annotations

import pytest
import torch

from steptime.bench.runs import clock

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


class Event:
    """Says that 30 ms passed between any two."""

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        assert isinstance(end, Event)
        return 30.0


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    leads = []
    monkeypatch.setattr(clock, "_lead", lambda device, seconds: lambda: leads.append(seconds))
    monkeypatch.setattr(clock, "_batch", lambda run, device: (10, 1e-5))
    return leads


def test_summary_is_nearest_rank():
    """Of 1..10 the 9th is the 90th percentile, the median 5.5."""
    assert clock.summary([float(i) for i in range(10, 0, -1)]) == clock.Timing(1.0, 5.5, 9.0, 10)
    with pytest.raises(ValueError, match="no samples"):
        clock.summary([])


def test_a_sample_on_a_cpu_is_one_call():
    calls = []
    found = clock.measure(lambda: calls.append("run"), CPU, seconds=0.0, least=4, before=lambda: calls.append("before"))
    assert found.reps == 4
    assert calls == ["before", "run"] * (4 + 2)  # two to warm up


def test_repetitions_end():
    assert clock.measure(lambda: None, CPU, seconds=60.0, most=7).reps == 7


def test_on_cuda_a_sample_is_a_batch_between_events(fake_cuda):
    calls = []
    found = clock.measure(lambda: calls.append(1), CUDA, seconds=0.0, least=3)
    assert found == pytest.approx(clock.Timing(3e-3, 3e-3, 3e-3, 3))  # 30 ms over 10 calls
    assert len(calls) == (3 + 1) * 11  # three samples and a warm-up: one call ahead of the first event, ten between
    assert fake_cuda == [pytest.approx(12e-5)] * 4  # work queued ahead for as long as the host needs


def test_with_something_to_do_before_a_sample_is_one_call_on_cuda_too(fake_cuda):
    calls = []
    clock.measure(lambda: calls.append(1), CUDA, seconds=0.0, least=3, before=lambda: None)
    assert len(calls) == 5
    assert fake_cuda == []


def test_on_mps_a_sample_is_a_batch_by_the_clock(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(1))
    monkeypatch.setattr(clock, "_batch", lambda run, device: (5, 1e-5))
    calls = []
    clock.measure(lambda: calls.append(1), MPS, seconds=0.0, least=2)
    assert len(calls) == (2 + 2) * 5
    assert len(waited) == (2 + 2) * 2


def test_batches_are_long_enough_and_not_too_long():
    calls, launch = clock._batch(lambda: None, CPU)
    assert calls == clock.BATCH_CALLS
    assert launch > 0


def test_interleaved_takes_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    found = clock.interleaved(runs, CPU, rounds=3)
    assert order == ["a"] * 2 + ["b"] * 2 + ["a", "b"] * 3
    assert list(found) == ["a", "b"]
    assert all(t.reps == 3 and 0 < t.min_s <= t.median_s <= t.p90_s for t in found.values())


def test_short_work_has_several_turns_of_a_round_while_there_is_time(monkeypatch):
    """b takes a quarter of a's 4 s: three of its samples, the most that is allowed, to one of a's."""
    monkeypatch.setattr(clock, "sampler", lambda run, device, warm: run)
    runs = {"a": lambda: 4.0, "b": lambda: 1.0}
    found = clock.interleaved(runs, CPU, rounds=5, turns=3)
    assert (found["a"].reps, found["b"].reps) == (5, 1 + 4 * 3)
    late = clock.interleaved(runs, CPU, rounds=5, turns=3, seconds=-1.0)
    assert late["a"].reps == late["b"].reps == clock.LEAST_ROUNDS
    assert clock.interleaved({}, CPU) == {}
