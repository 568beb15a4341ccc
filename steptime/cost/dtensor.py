"""Copies that torch's DTensor adds to tensor parallelism over the sequence, to order the pieces of a collective.

NCCL joins along the first dimension; the sequence is the second. torch 2.13 distributed/_functional_collectives.py,
all_gather_single: received chunks are concatenated along the sequence, unless there is a single sequence;
reduce_scatter_single: chunks along the sequence are concatenated first.
"""

from __future__ import annotations

from steptime.software.performance import EAGER_TORCH, Software


def copies(software: Software, kind: str) -> bool:
    """Whether a collective of several sequences is copied by a separate kernel: eager torch's, gathered or scattered."""
    eager = software.family in EAGER_TORCH and software.kernels.compile == "none"
    return eager and kind in {"all_gather", "reduce_scatter"}
