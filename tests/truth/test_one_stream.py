"""The order in which torch lists the sends and receives of interleaved 1F1B."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules

from steptime.schedule.graph import graph
from steptime.schedule.one_stream import listed


def torch_lists(pp: int, vpp: int, microbatches: int) -> list[list[str]]:
    """Forwards, backwards, sends and receives of every stage (2F0, 2SEND_F0 ...) as torch's runtime runs them."""
    group = microbatches // max(1, microbatches // pp)

    def of_stage(stage: int) -> list[object]:
        warmup = min((vpp - 1) * group + 2 * (pp - 1 - stage), vpp * microbatches)
        pairs = vpp * microbatches - warmup
        return schedules._get_1f1b_rank_ops(
            vpp,
            pp,
            warmup,
            pairs,
            warmup,
            stage,
            lambda at: (at // group) % vpp * pp + stage,
            lambda at: (vpp - 1 - (at - warmup) // group % vpp) * pp + stage,
        )

    actions = {
        stage: schedules._add_reduce_grad(schedules._add_unshard_reshard(of_stage(stage)), microbatches)
        for stage in range(pp)
    }
    found = schedules._add_send_recv(actions, stage_to_rank=lambda stage: stage % pp, num_stages=pp * vpp)
    return [
        [text for one in found[stage] if "SHARD" not in (text := str(one)) and "GRAD" not in text] for stage in found
    ]


def own_lists(pp: int, vpp: int, microbatches: int) -> list[list[str]]:
    """The same from the order of the actions."""
    found = graph("interleaved", pp, vpp, microbatches)
    action_of = {
        number: (stage, action)
        for stage, (actions, numbers) in enumerate(zip(found.orders, found.stages, strict=True))
        for action, number in zip(actions, numbers, strict=True)
    }
    to = {source: action_of[at] for at, (_, source, _, _) in enumerate(found.rows) if source}
    lists: list[list[str]] = [[] for _ in range(pp)]
    for number in listed(found):
        stage, (kind, microbatch, chunk) = action_of[number]
        lists[stage].append(f"{chunk * pp + stage}{kind}{microbatch}")
        if number in to:
            other, target = to[number]
            lists[stage].append(f"{chunk * pp + stage}SEND_{kind}{microbatch}")
            lists[other].append(f"{target.chunk * pp + other}RECV_{kind}{microbatch}")
    return lists


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(2, 2, 4), (3, 2, 3), (4, 2, 8), (8, 2, 16), (4, 3, 12), (4, 8, 8), (8, 4, 12)]
)
def test_sends_and_receives_are_listed_as_torch_does(pp, vpp, microbatches):
    """torch 2.13, _add_send_recv; its actions that gather and free parameters and reduce gradients left out."""
    assert own_lists(pp, vpp, microbatches) == torch_lists(pp, vpp, microbatches)
