"""A loss in chunks inside a pipeline's last stage: when the head is gathered, and its gradient reduced.

torchtitan hands its loss to the schedule, which calls it at the end of each forward of the last stage (torch 2.13
distributed/pipelining/schedules.py, _maybe_compute_loss). There ChunkedLossWrapper gathers the head, runs it forward and backward
chunk by chunk, reduces its gradient with the last chunk and frees it (pytorch/torchtitan@b5bcd76c torchtitan/components/loss.py).
The final norm is in the head's group: its forward gathers the group where the backward before has not left it gathered, its
backward gathers it again, and after the last micro-batch what is left of the norm's gradient is reduced. So m micro-batches
gather the head's group 2 m + 1 times and reduce it m times (`tests/truth/test_torch_pipeline_loss.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from steptime.base.num import Num, maximum, minimum
from steptime.cost.overlap import hidden_s
from steptime.fsdp.groups import options
from steptime.memory.chunked_loss import in_chunks

if TYPE_CHECKING:
    from steptime.fsdp.seconds import CommSeconds
    from steptime.job.assembly import Assembly, Chunk
    from steptime.schedule.sharded import ShardedStep


class Turn(NamedTuple):
    """What the loss adds to one action of its chunk."""

    gathers: int = 0
    """Gathers of the head's group besides those of `ShardedStep`."""
    reductions: int = 0


def by_micro_batch(assembly: Assembly, chunk: Chunk) -> bool:
    """Whether a pipeline's chunk gathers and reduces its head with each micro-batch: it is wrapped, the loss in chunks."""
    said, default = options(assembly), assembly.job.software.layout.fsdp_ends
    wrapped = said.wrap == "block" and (said.ends or default) != "root"
    return chunk.head and not chunk.embedding and wrapped and in_chunks(assembly.job)


def turns(steps: Sequence[ShardedStep], of: Collection[int]) -> list[Turn]:
    """The same for each of a stage's actions; `of`: the chunks with such a head.

    A forward frees the group after its loss, a backward leaves it gathered.
    """
    freed, found = set[int](), list[Turn]()
    for step in steps:
        kind, _, chunk = step.action
        if chunk not in of or kind == "W":
            found.append(Turn())
            continue
        regathers = int(chunk in freed)
        if kind == "F":
            freed.add(chunk)
            found.append(Turn(regathers + 1, 1))
        else:
            freed.discard(chunk)
            found.append(Turn(regathers))
    return found


def reduction_left_s(head: CommSeconds, layers: Sequence[CommSeconds], share: bool | float | None, slowed: Num) -> Num:
    """Seconds of the reduction of one micro-batch that the compute of the chunk's `layers` before the next one does not hide."""
    compute = sum([of.compute_s for of in layers])
    at_once = minimum(head.reduce_s, compute)
    return maximum(0.0, head.reduce_s - hidden_s(head.reduce_s, at_once, share, slowed))
