"""What a pipeline stage runs: actions, and the placement of model chunks."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

ActionKind: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward, backward, and the two halves of a split backward: gradients of the inputs (I), and later those of the weights (W).

torch/distributed/pipelining/schedules.py, _ComputationType. The output of a B is sent when all of it has run.
"""


class Action(NamedTuple):
    """One pass of one micro-batch through one of a stage's model chunks."""

    kind: ActionKind
    microbatch: int
    chunk: int
    """Virtual chunk of that stage, 0 to vpp - 1."""


class Place(NamedTuple):
    """A model chunk by the stage that holds it and its index there."""

    stage: int
    chunk: int


Orders: TypeAlias = tuple[tuple[Action, ...], ...]


def in_groups(vpp: int, microbatches: int, group: int) -> list[tuple[int, int]]:
    """Micro-batch and chunk of each forward of a looped stage: a group of micro-batches through one chunk after the other.

    megatron/core/pipeline_parallel/schedules.py (0.16.1): get_schedule_table, :798.

    >>> in_groups(2, 3, 2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group, microbatches))
    ]


def looped(pp: int, vpp: int) -> tuple[Place, ...]:
    """Consecutive model chunks on consecutive stages, the first stage after the last (Narayanan et al. 2021, figure 4)."""
    return tuple(Place(stage, chunk) for chunk in range(vpp) for stage in range(pp))


def v_shaped(pp: int, vpp: int) -> tuple[Place, ...]:  # noqa: ARG001
    """Two chunks per stage, down the stages and up again: the first stage holds the first and the last.

    Qi et al. 2023 (arXiv 2401.10241), section 6.
    """
    return tuple(Place(stage, 0) for stage in range(pp)) + tuple(Place(stage, 1) for stage in reversed(range(pp)))
