"""The worst moment of a walk over FSDP's allocations, and the most that each of its memory pools holds.

The allocator gives a cached block only to the stream that allocated it (torch 2.13, c10/cuda/CUDACachingAllocator.cpp,
get_free_block). FSDP2 allocates what an all-gather sends and returns on a stream of its own, and what a reduce-scatter returns,
which becomes the gradients, on another (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather and
foreach_reduce); all else is the computing stream's.
"""

from __future__ import annotations

from steptime.base.num import Num, maximum, new_row
from steptime.memory.stages import PeakMoment


class Moments:
    """The worst moment so far."""

    def __init__(self, grads_not_yet_allocated: Num) -> None:
        """`grads_not_yet_allocated`: bytes of sharded gradients that are still to be allocated."""
        self.to_come = grads_not_yet_allocated
        self.standing_transient: Num = 0.0
        """Bytes that all moments hold besides, among the transients."""
        self.standing: Num = 0.0
        """Bytes that an all-gather has returned and that stay while others come and go."""
        self.most: Num = 0.0
        """Most activations and transients of any moment in the computing stream's memory."""
        self.gathered: Num = 0.0
        """Most bytes that all-gathers have returned and not freed."""
        self.sent: Num = 0.0
        """Most bytes that an all-gather sends."""
        self.worst = PeakMoment(0.0, 0.0, "", grads_not_yet_allocated)

    def mark(
        self, saved: Num, transient: Num, op: str, gathered: Num = 0.0, *, reduced: Num = 0.0, gap: Num = 0.0
    ) -> None:
        """Record a moment that holds `saved` bytes for backward and `transient` other bytes.

        Of these, all-gathers returned `gathered` and a reduction returned `reduced`. `gap`: bytes between them that no tensor
        fits into.
        """
        self.most = maximum(self.most, saved + self.standing_transient + transient - gathered - reduced + gap)
        self.gathered = maximum(self.gathered, gathered + self.standing)
        added = self.standing_transient + transient + self.standing
        self.worst = self.worst.worse(new_row(PeakMoment, (saved, added, op, self.to_come, 0.0, 0.0)))

    def send(self, bytes_: Num) -> None:
        """Record the input of an all-gather, which is allocated before its output and freed before the next group's."""
        self.sent = maximum(self.sent, bytes_)

    def allocated(self, gradients: Num) -> None:
        """Record that sharded gradients exist from now on."""
        self.to_come = maximum(0.0, self.to_come - gradients)

    @property
    def found(self) -> PeakMoment:
        """The worst moment, with what the pools hold.

        The input of the largest group leaves a gap that its output, and the next group's, do not fit into.
        """
        return self.worst._replace(most_bytes=self.most, gathers_bytes=self.gathered + self.sent)
