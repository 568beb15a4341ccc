"""torch's pipelining as of 2.6: exchanges in time steps, and reductions before the last gradient is sent."""

from __future__ import annotations

from steptime.fsdp.pipeline_seconds import reductions
from steptime.fsdp.seconds import CommSeconds, exposed_s
from steptime.schedule import walk

FORWARD, BACKWARD = [[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2


def test_a_stage_waits_for_those_it_exchanges_with():
    """Two stages of two chunks, two micro-batches, forwards of 1 s and backwards of 2 s (schedules.py, _step_microbatches).

    Steps 0 to 3 end at 1, 2, 3 and 4 s: stage 0 runs its four forwards, the last of which stage 1 receives in step 3, in which it
    runs nothing. So its first forward of the last chunk runs from 4 to 5 s, although the input was there at 3, and the backward
    until 7. In step 7 stage 0 is done at 9 and waits for stage 1, which began a second later, until 10. Steps 9, 11 and 13 take
    2 s each: 16 s. Where an action starts as soon as its input has arrived the step takes 15 s.
    """
    assert walk("interleaved", 2, 2, 2, FORWARD, BACKWARD, [0.0, 0.0], exchange="time_steps").makespan_s == 16.0
    assert walk("interleaved", 2, 2, 2, FORWARD, BACKWARD, [0.0, 0.0]).makespan_s == 15.0


def test_an_exchange_delays_both_sides():
    """The same with sends of 1 s: steps 0 to 3, 5, 7, 9 and 11 exchange, one second more each, 16 + 8 s.

    Steps 0 to 3 end at 2, 4, 6 and 8 s. Stage 1 runs step 4 until 9, and 5, exchange included, until 12, where stage 0 begins its
    first backward; it runs step 6 until 13 and 7 until 15, which both end at 16. Steps 9, 11 and 13 begin at 16, 19 and 22.
    """
    stepped = walk("interleaved", 2, 2, 2, FORWARD, BACKWARD, [1.0, 1.0], exchange="time_steps")
    assert stepped.makespan_s == 24.0
    first, second = (times.starts_s for times in stepped.times())
    assert first == [0.0, 2.0, 4.0, 6.0, 12.0, 16.0, 19.0, 22.0]
    assert second[2] == 8.0  # the first forward of the last chunk, after step 3


def test_long_steps_are_walked_through_their_repeats():
    """64 micro-batches: the shortened walk ends when the whole one does, whose last action starts 2 s before it."""
    stepped = walk("interleaved", 2, 2, 64, FORWARD, BACKWARD, [0.0, 0.0], exchange="time_steps")
    assert stepped.makespan_s == stepped.times()[0].starts_s[-1] + 2.0


def test_the_last_reduction_is_not_waited_for():
    """Three groups, each copied in 1 s, once the one before it is reduced, and reduced in 4: 3 * 5 s, and 2 * 5 + 1 without."""
    every = [CommSeconds(0.0, 1.0, 4.0)] * 3
    assert exposed_s(reductions(every, last_waits=True), 0) == 15.0
    assert exposed_s(reductions(every, last_waits=False), 0) == 11.0
