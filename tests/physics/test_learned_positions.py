"""Rows of a learned position table: counted where they are said, and never left out unsaid."""

from __future__ import annotations

import pytest

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.model.blocks import n_params
from steptime.model.model import Model

GPT = {
    "n_layers": 2,
    "hidden_sz": 64,
    "inter_sz": 256,
    "n_q_heads": 4,
    "vocab_sz": 1024,
    "glu": False,
    "norm": "layernorm",
    "bias": True,
    "learned_positions": True,
}
WITHOUT = 231_168
"""Embedding and head 2 x 1024 x 64 = 131,072; final norm 128; two layers of 49,984: norms 2 x 128, q, k, v and output projection
4 x (64 x 64 + 64) = 16,640, MLP 64 x 256 + 256 + 256 x 64 + 64 = 33,088."""


def test_a_table_that_says_its_rows_is_counted():
    """512 x 64 = 32,768 more, however long a sequence is."""
    model = Model(**GPT, max_positions=512)
    assert n_params(model) == n_params(model, seqlen=128) == WITHOUT + 32_768


def test_a_table_that_does_not_has_those_of_a_sequence_or_is_refused():
    """128 x 64 = 8,192 more for sequences of 128 tokens; without either the count would be short by the whole table."""
    model = Model(**GPT)
    assert n_params(model, seqlen=128) == WITHOUT + 8_192
    with pytest.raises(ValueError, match=r"model\.max_positions: required"):
        n_params(model)
    assert n_params(model.model_copy(update={"learned_positions": False})) == WITHOUT


def test_a_job_says_which_it_took():
    data, layout = {"gbs": 1, "seqlen": 128, "microbatch_sz": 1}, {"tp": 1, "pp": 1, "dp": 1}
    unsaid, said = (
        estimate(Job(model=GPT | more, parallelism=layout, data=data, hardware="dgx-h100"))
        for more in ({}, {"max_positions": 512})
    )
    assert (unsaid.params.total, said.params.total) == (WITHOUT + 8_192, WITHOUT + 32_768)
    line = "model.max_positions is not set: 128 learned positions, as many as data.seqlen"
    assert line in unsaid.assumptions
    assert line not in said.assumptions
