"""What torch's pipelining of 2024 leaves in memory after the actions that needed it (`pipeline_keeps`).

Each stage appends what every micro-batch's forward returns to a list that the next step clears (torch 2.6,
torch/distributed/pipelining/stage.py, forward_one_chunk and clear_runtime_states). The last micro-batch calls each group's
post_backward but not the callback that ends a backward, so the context keeps the input of the last reduction until the chunk's
next one (backward_maybe_with_nosync, run_post_backward; distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward).
"""

from __future__ import annotations

from steptime.base.num import Num, maximum
from steptime.fsdp.pipeline_chunks import ShardedChunk


def last_reduction(chunk: ShardedChunk) -> Num:
    """Bytes of the input of a chunk's last reduction, in the dtype of the reduction."""
    return (chunk.layers[-1].buffers if chunk.layers else chunk.root).reduce_input


def outputs(chunk: ShardedChunk, microbatches: Num, waiting: Num) -> Num:
    """Bytes of the outputs of micro-batches whose backward has begun.

    `waiting`: micro-batches whose output counts with what they keep for backward. All forwards of the step are taken to have
    run, as they have at the worst moment: the last backward before which a stage holds the most micro-batches.
    """
    return maximum(0.0, microbatches - waiting) * chunk.output
