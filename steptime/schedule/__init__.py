"""Pipeline schedules: the order of each stage, its walk in time, its memory, and the closed form."""

from steptime.schedule.actions import Action, Orders, Place
from steptime.schedule.live import SplitBytes, StagePeak, in_flight, peaks
from steptime.schedule.orders import (
    SCHEDULES,
    Schedule,
    bubble_fraction,
    default_group,
    order,
    placement,
)
from steptime.schedule.walk import ActionSpan, StageTimes, Walk, walk

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionSpan",
    "Orders",
    "Place",
    "Schedule",
    "SplitBytes",
    "StagePeak",
    "StageTimes",
    "Walk",
    "bubble_fraction",
    "default_group",
    "in_flight",
    "order",
    "peaks",
    "placement",
    "walk",
]
