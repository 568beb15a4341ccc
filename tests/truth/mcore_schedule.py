"""Run Megatron-Core's own pipeline functions with an empty model and note which forward and backward each rank runs.

In: [[pp, vpp, microbatches, group or null], ...] as JSON on stdin. Out, for each: the order of every rank as [kind, microbatch,
chunk] lists, and what get_pp_rank_microbatches and get_schedule_table say.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from unittest import mock

import mcore_imports  # noqa: F401  (Megatron itself)
import torch
from megatron.core import ModelParallelConfig
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules

zeros = torch.zeros


def zeros_anywhere(*args, device=None, **keywords):
    """torch.zeros on the CPU whatever device is asked for."""
    return zeros(*args, **keywords)


class Communicator:
    """Receives nothing, from nobody: only the group's size and rank are real."""

    def __init__(self, config, pp, rank, vpp):
        self.config = config
        self.pp_group = SimpleNamespace(size=lambda: pp, rank=lambda: rank)
        self.virtual_pipeline_model_parallel_size = vpp if vpp > 1 else None

    def _one(self, *_, **__):
        return None

    def _two(self, *_, **__):
        return None, None

    recv_forward = recv_backward = send_forward = send_backward = send_forward_recv_backward = _one
    send_backward_recv_forward = _one
    send_forward_backward_recv_forward_backward = _two

    def send_forward_recv_forward(self, *_, overlap_p2p_comm=False, **__):
        return (None, {}) if overlap_p2p_comm else None

    send_backward_recv_backward = send_forward_recv_forward


class Chunk(torch.nn.Module):
    """An empty model chunk."""

    def __init__(self, config):
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder


def configured(pp, vpp, group):
    """Megatron's configuration; a group of None takes its default."""
    config = ModelParallelConfig(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        microbatch_group_size_per_vp_stage=group,
        pipeline_dtype=torch.bfloat16,
        deallocate_pipeline_outputs=False,
    )
    config.hidden_size, config.fine_grained_activation_offloading = 8, False  # TransformerConfig's
    return config


def run_rank(config, pp, vpp, microbatches, rank):
    """The actions that Megatron's function runs on one rank."""
    ran = []

    def forward_step(*_, current_microbatch=None, vp_stage=None, **__):
        ran.append(("F", current_microbatch, vp_stage or 0))
        return [("out", current_microbatch, vp_stage or 0)], 0

    def backward_step(input_tensor, output_tensor, *_):
        ((_, microbatch, chunk),) = output_tensor
        ran.append(("B", microbatch, chunk))

    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=one, cp=one, embd=one, pos_embd=one, pp=one, dp_cp=one)
    function = schedules.get_forward_backward_func(pp, vpp if vpp > 1 else None)
    with (
        mock.patch.object(schedules, "forward_step", forward_step),
        mock.patch.object(schedules, "backward_step", backward_step),
        mock.patch.object(schedules, "deallocate_output_tensor"),
        mock.patch.object(torch, "zeros", zeros_anywhere),
    ):
        function(
            forward_step_func=None,
            data_iterator=[None] * vpp,
            model=[Chunk(config) for _ in range(vpp)],
            num_microbatches=microbatches,
            seq_length=8,
            micro_batch_size=1,
            p2p_communicator=Communicator(config, pp, rank, vpp),
            pg_collection=groups,
        )
    return ran


def answer(pp, vpp, microbatches, group):
    """Everything about one cell; `refused` where Megatron will not run it."""
    config = configured(pp, vpp, group)
    group = config.microbatch_group_size_per_vp_stage
    counts = []
    for rank in range(pp):
        communicator = Communicator(config, pp, rank, vpp)
        total, _, warmup, rest = schedules.get_pp_rank_microbatches(
            microbatches, vpp, group, p2p_communicator=communicator
        )
        counts.append([total, warmup, rest])
    reply = {"counts": counts, "table": schedules.get_schedule_table(microbatches, vpp, group)}
    try:
        reply["orders"] = [run_rank(config, pp, vpp, microbatches, rank) for rank in range(pp)]
    except (ValueError, RuntimeError) as error:
        reply["refused"] = str(error)
    return reply


if __name__ == "__main__":
    json.dump([answer(*cell) for cell in json.load(sys.stdin)], sys.stdout)
