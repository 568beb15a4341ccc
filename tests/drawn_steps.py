"""Drawn pipeline schedules for property tests: shapes, and seconds or bytes of every chunk and send."""

from __future__ import annotations

from hypothesis import strategies as st

from steptime.schedule import SCHEDULES

ONE_BACKWARD = tuple(name for name, schedule in SCHEDULES.items() if not schedule.split)

# Multiples of 1/8 add and multiply without rounding, so every comparison below can be exact.
eighths = st.integers(0, 64).map(lambda n: n / 8)


@st.composite
def shapes(draw, schedules=ONE_BACKWARD):
    """(schedule, pp, vpp, microbatches), small and mostly uneven."""
    return draw(st.sampled_from(schedules)), draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 11))


@st.composite
def timed(draw):
    """A shape with its own seconds for every chunk, send and direction."""
    shape = draw(shapes())
    _, pp, vpp, _ = shape
    table = st.lists(st.lists(eighths, min_size=vpp, max_size=vpp), min_size=pp, max_size=pp)
    sends = st.lists(eighths, min_size=pp, max_size=pp)
    return shape, draw(table), draw(table), draw(sends), draw(sends)


@st.composite
def long_steps(draw):
    """As `timed`, with enough micro-batches that the middle of the step repeats, whole groups or not; or groups of one's own."""
    schedule, pp, vpp = draw(st.sampled_from(ONE_BACKWARD)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    microbatches, group = draw(st.integers(1, 100)), draw(st.none() | st.integers(pp, 2 * pp))
    if group is not None and 0 < microbatches % group < pp:
        microbatches -= microbatches % group  # a short last group deadlocks
    usual = st.lists(st.lists(eighths, min_size=vpp, max_size=vpp), min_size=pp, max_size=pp)
    alike = st.tuples(eighths, eighths).map(lambda t: [[t[0]] * vpp] * (pp - 1) + [[t[0]] * (vpp - 1) + [t[0] + t[1]]])
    sends = st.lists(eighths, min_size=pp, max_size=pp) | st.just([0.0] * pp)
    table = usual | alike
    return (schedule, pp, vpp, microbatches or group), group, draw(table), draw(table), draw(sends), draw(sends)


def equal(value, pp, vpp):
    """One value for every chunk of every stage."""
    return [[value] * vpp for _ in range(pp)]


def text(actions):
    """Actions as words: kind, micro-batch, chunk."""
    return " ".join(f"{a.kind}{a.microbatch}{'abcd'[a.chunk]}" for a in actions)
