"""Zero-bubble schedules: the gradients of the weights fill the time in which a stage would otherwise wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from steptime.schedule.actions import Action, ActionKind, Orders, in_groups


def zero_bubble(pp: int, vpp: int, microbatches: int, group: int) -> Orders:
    """1F1B with delayed weights' gradients: with one chunk per stage ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 3).

    Stage r runs the weights' gradients r micro-batches after the inputs', so that no stage holds more than the first of 1F1B.
    torch/distributed/pipelining/schedules.py (2.13), ScheduleInterleavedZeroBubble: the warm-up grows by one forward a stage.
    """
    table = in_groups(vpp, microbatches, group)
    forwards = [Action("F", microbatch, chunk) for microbatch, chunk in table]
    orders = []
    for stage in range(pp):
        warmup = min((vpp - 1) * group + pp - 1 - stage, len(table))
        actions = forwards[:warmup]
        backwards = [Action("I", microbatch, vpp - 1 - chunk) for microbatch, chunk in table]
        late = deque(action._replace(kind="W") for action in backwards)
        for at, backward in enumerate(backwards):
            actions += [*forwards[warmup + at : warmup + at + 1], backward]
            if at >= stage:
                actions.append(late.popleft())
        orders.append((*actions, *late))
    return tuple(orders)


@dataclass
class _Stage:
    """One stage's order under construction: forwards and backwards count the micro-batches of each of the two chunks."""

    actions: list[Action] = field(default_factory=list)
    next: dict[tuple[str, int], int] = field(default_factory=dict)
    owed: deque[Action] = field(default_factory=deque)
    """Weights' gradients that have not run yet."""

    def run(self, kind: ActionKind, chunk: int) -> None:
        """The next micro-batch of a kind and chunk; after an I its W is pending."""
        direction = "F" if kind == "F" else "B"
        microbatch = self.next.get((direction, chunk), 0)
        self.next[direction, chunk] = microbatch + 1
        self.actions.append(Action(kind, microbatch, chunk))
        if kind == "I":
            self.owed.append(Action("W", microbatch, chunk))

    def halves(self, chunk: int) -> None:
        """Both halves of a backward, one after the other: the gradient for the previous stage is sent in between."""
        self.run("I", chunk)
        self.actions.append(self.owed.pop())

    def weights(self) -> None:
        """Run the oldest pending weights' gradients, if any."""
        if self.owed:
            self.actions.append(self.owed.popleft())


def zb_v(pp: int, vpp: int, microbatches: int, group: int) -> Orders:  # noqa: ARG001
    """ZB-V: two chunks per stage in a V, so that the loss's backward starts where the last forward ended.

    Qi et al. 2023 (arXiv 2401.10241), section 6; torch/distributed/pipelining/schedules.py (2.13), ScheduleZBVZeroBubble, which
    makes the order of at least 2 pp - 1 micro-batches and leaves out those that do not exist.
    """
    count = max(2 * pp - 1, microbatches)
    orders = []
    for rank in range(pp):
        stage = _Stage()
        for _ in range(2 * (pp - rank) - 1):
            stage.run("F", 0)
        for _ in range(rank):
            stage.run("F", 1)
            stage.run("F", 0)
        for _ in range(pp - rank):
            stage.run("F", 1)
            stage.halves(1)
        while (forward := stage.next["F", 0]) < count or stage.next["F", 1] < forward:
            if forward < count:
                stage.run("F", 0)
            stage.halves(0)
            stage.run("F", 1)
            stage.halves(1)
        for _ in range(rank):
            stage.run("I", 0)
            stage.run("I", 1)
        down = [stage.owed.popleft() for _ in range(len(stage.owed))]
        owed = {chunk: deque(action for action in down if action.chunk == chunk) for chunk in (0, 1)}
        for _ in range(pp - rank):
            stage.run("I", 0)
            owed[0].append(stage.owed.pop())
            stage.actions.append(owed[0].popleft())
        stage.actions += [*owed[1], *owed[0]]
        orders.append(tuple(action for action in stage.actions if action.microbatch < microbatches))
    return tuple(orders)


def dualpipe_v(pp: int, vpp: int, microbatches: int, group: int) -> Orders:  # noqa: ARG001
    """DualPipe folded into a V: forwards of one chunk alternate with backwards of the other.

    DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1, figure 5; torch/distributed/pipelining/schedules.py (2.13),
    ScheduleDualPipeV. The two of a pair run one after the other here, as in torch where nothing overlaps them; both are sent on
    afterwards.

    Raises:
        ValueError: fewer micro-batches than model chunks.
    """
    if microbatches < 2 * pp:
        raise ValueError(f"dualpipev needs at least 2 * pp = {2 * pp} micro-batches (got {microbatches})")
    return tuple(_dualpipe_v_stage(pp, rank, microbatches) for rank in range(pp))


def _dualpipe_v_stage(pp: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """The eight steps of one stage, as torch numbers them."""
    stage, behind = _Stage(), pp - 1 - rank
    for _ in range(2 * behind):
        stage.run("F", 0)
    for _ in range(rank + 1):
        stage.run("F", 0)
        stage.run("F", 1)
    for _ in range(behind):
        stage.run("I", 1)
        stage.weights()
        stage.run("F", 1)
    for _ in range(microbatches - 2 * pp + rank + 1):
        for forward, backward in ((0, 1), (1, 0)):
            stage.run("F", forward)
            stage.run("B", backward)
    for _ in range(behind):
        stage.run("B", 1)
        stage.run("F", 1)
        stage.run("B", 0)
    half, split = (rank + 1) // 2, False
    for at in range(rank + 1):
        for chunk in (1, 0):
            split = split or (at == half and chunk == rank % 2)
            stage.run("I" if split else "B", chunk)
    for _ in range(behind):
        stage.weights()
        stage.run("I", 0)
    for _ in range(rank + 1):
        stage.weights()
    return tuple(stage.actions)
