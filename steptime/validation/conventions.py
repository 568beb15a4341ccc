"""How a log counts FLOPs: known conventions compared with the log's figure, so that TFLOP/s are comparable."""

from __future__ import annotations

from typing import NamedTuple

from steptime.answer.flops import FORWARD_AND_BACKWARD, attention_flops_per_token, linear_flops_per_token
from steptime.job.assembly import Assembly
from steptime.model.shard import padded_vocab

TOLERANCE = 0.01
"""A convention within this relative difference reproduces the log's figure."""
MEGATRON_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this and tp (--make-vocab-size-divisible-by)."""


class Convention(NamedTuple):
    """One way to count FLOPs, and its result."""

    name: str
    flops_per_step: float
    """FLOPs per step of the whole job."""


class ComparedFlops(NamedTuple):
    """A log's FLOPs per step compared with the conventions."""

    logged_flops_per_step: float
    """FLOPs per step of the whole job, from the log's TFLOP/s and step time."""
    matches: list[Convention]
    """Those within 1 %, nearest first."""
    known: list[Convention]


def conventions(assembly: Assembly) -> list[Convention]:
    """The conventions in use, ours first.

    Sources: Megatron-LM megatron/training/training.py, num_floating_point_operations (causal attention halved since 2025, in
    full before; its first form of 2023 took every MLP as ungated and four times as wide); torchtitan
    torchtitan/models/utils.py; Narayanan et al. 2021, equation 3, which Megatron-DeepSpeed prints: 4 passes of every layer
    under full recomputation, else 3.
    """
    job = assembly.job
    model, tokens = job.model, float(job.data.gbs) * job.data.seqlen
    attention = attention_flops_per_token(assembly)
    h = model.hidden_sz
    logits = 2.0 * model.vocab_sz * h
    padded = 2.0 * padded_vocab(model.vocab_sz, job.parallelism.tp, MEGATRON_MULTIPLE) * h
    layers = linear_flops_per_token(assembly) - logits
    heads = model.n_q_heads + 2 * model.n_kv_heads
    plain = model.n_layers * (2.0 * h * model.head_dim * (heads + model.n_q_heads) + 16.0 * h * h)
    eq3 = model.n_layers * 24.0 * h * h + attention
    pass_s = FORWARD_AND_BACKWARD * tokens
    return [
        Convention("causal attention halved, vocabulary unpadded", pass_s * (layers + attention / 2.0 + logits)),
        Convention("causal attention halved, vocabulary padded", pass_s * (layers + attention / 2.0 + padded)),
        Convention("attention in full, vocabulary unpadded", pass_s * (layers + attention + logits)),
        Convention("attention in full, vocabulary padded", pass_s * (layers + attention + padded)),
        Convention(
            "attention in full, MLP ungated of 4 hidden (Megatron-LM of 2023)", pass_s * (plain + attention + padded)
        ),
        Convention("Narayanan et al. 2021, eq. 3: full recomputation counted", tokens * (4.0 * eq3 + 3.0 * padded)),
        Convention(
            "Narayanan et al. 2021, eq. 3 with 3 passes in place of 4", 0.75 * tokens * (4.0 * eq3 + 3.0 * padded)
        ),
    ]


def counted(assembly: Assembly, logged_flops_per_step: float) -> ComparedFlops:
    """The conventions that reproduce a log's FLOPs per step within 1 %, nearest first; ties in listed order."""
    known = conventions(assembly)

    def off(convention: Convention) -> float:
        return round(abs(convention.flops_per_step / logged_flops_per_step - 1.0), 4)

    return ComparedFlops(logged_flops_per_step, sorted((c for c in known if off(c) <= TOLERANCE), key=off), known)
