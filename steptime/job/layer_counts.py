"""Layers of each model chunk of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steptime.job.facts import Facts


def balanced_by_cost(layers: int, layer: float, head: float, stages: int) -> list[int]:
    """Layers of each stage as nanotron places its blocks: the next one begins once the cost so far exceeds its share.

    huggingface/nanotron@2411b022 src/nanotron/models/base.py, build_model; the costs are weights, embedding and norm have none
    (models/llama.py, get_block_compute_costs).
    """
    every = layers * layer + head
    counts, stage = [0] * stages, 0
    for at in range(1, layers + 1):
        counts[stage] += 1
        if at * layer > every * ((stage + 1) / stages):
            stage += 1
    return counts


def layers_per_chunk(facts: Facts) -> list[int]:
    """Layers of each of the pp*vpp chunks of one job, in depth order.

    `auto` spreads the remainder over the chunks after the first, the last one last: the first has most activations in flight, the
    last has the head. A depth of multi-token prediction counts as one of the last chunk's layers. Embedding and loss, where they
    count, take one layer off the first and last chunk (megatron/core/transformer/transformer_block.py, get_num_layers_to_build).
    """
    if facts.stage_counts:
        return list(facts.stage_counts)
    chunks = int(facts.chunks)
    ahead = min(facts.mtp, int(facts.units) // chunks - 1) if facts.layers_per_stage == "auto" and chunks > 1 else 0
    even, extra = divmod(int(facts.units) + ahead, chunks)
    counts = [even] * chunks
    for chunk in [*range(1, chunks - 1), 0, chunks - 1][:extra]:
        counts[chunk] += 1
    counts[-1] -= ahead
    for end in (0, -1) if facts.ends_count else ():
        counts[end] -= 1
    return counts
