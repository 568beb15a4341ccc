"""How the stages of a pipeline exchange what they make: as each is ready, or held up by other exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.schedule.graph import Graph
    from steptime.schedule.sharded import Around

Exchange: TypeAlias = Literal["free", "time_steps", "one_stream"]
"""An action starts when its stage is free and its input has come; or in time steps (`schedule.time_steps`), or with one stream
for all sends and receives of a stage (`schedule.one_stream`)."""


MODELED: dict[Exchange, set[str]] = {
    "free": set(),
    "time_steps": {"1f1b", "interleaved"},
    "one_stream": {"gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"},
}
"""Schedules for which exchanges that hold each other up are modeled."""


def exchange_of(said: Exchange, schedule: str, vpp: int) -> Exchange:
    """How the stages of a schedule exchange: as `said` where they have several chunks and it is modeled, else freely."""
    return said if vpp > 1 and schedule in MODELED[said] else "free"


def exchanged_run(
    exchange: Exchange,
    found: Graph,
    what: tuple[int, int, int, int | None],
    costs: Sequence[Num],
    sends: Sequence[Num],
    extra: Mapping[int, Around],
) -> tuple[list[Num], list[Num]]:
    """When each action starts, and when its stage continues.

    `what`: stages, chunks, micro-batches and their group. `extra`: FSDP's additions by the number of the action; in time steps
    nothing is fetched ahead, and reductions precede what the stage sends.
    """
    if exchange == "one_stream":
        from steptime.schedule.one_stream import one_stream_run

        return one_stream_run(found, costs, sends, extra)
    from steptime.schedule.time_steps import step_numbers, stepped_run

    added = {number: of.added_s + of.after_s for number, of in extra.items()}
    return stepped_run(found, step_numbers(*what), costs, sends, added)
