"""Cost formulas in numpy columns equal their rows, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import rates
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.cost import compute
from steptime.cost.comm import network
from steptime.cost.compute import attention_pass, gemm_backward, gemm_pass, move_pass, shape_efficiency
from steptime.cost.overlap import hidden_s
from steptime.cost.parts import Context, part_time
from steptime.hardware.machine import Machine
from steptime.job.mesh import Group
from steptime.model.blocks import block_ops
from steptime.model.ops import Attention, Gemm, Param
from steptime.model.presets import load_model
from steptime.model.shard import Shard
from steptime.software.performance import load_software

RATES = replace(rates.RATES, sm_count=108.0)
WEIGHT = (Param("w", (2560, 950)),)
patient = settings(deadline=None, max_examples=40)
size = st.integers(1, 20000).map(float)
rate = st.floats(1e9, 1e15)


def rows_of(table):
    return [np.array(column) for column in zip(*table, strict=True)]


def equal(column, rows):
    """Every field of a column equals the same field of the rows, bit for bit."""
    for field, values in zip(column, zip(*rows, strict=True), strict=True):
        assert np.broadcast_to(field, len(rows)).tolist() == list(values)


@patient
@given(st.lists(st.tuples(size, size, size, rate), min_size=1, max_size=6))
def test_products_and_their_backward_in_columns(table):
    def both(m, n, k, speed):
        op = Gemm("g", m=m, n=n, k=k, params=WEIGHT)
        r = replace(RATES, gemm_flops=speed, bytes_per_s=speed / 100.0)
        passes = [gemm_pass(op, r, m, n, k, compute.gemm_traffic(op, r)[0].bytes), *gemm_backward(op, r)]
        return [field for done in passes for field in done] + [shape_efficiency(m, n, k, 1.0, 108.0)]

    equal(both(*rows_of(table)), [both(*row) for row in table])


@patient
@given(
    st.lists(st.tuples(st.integers(1, 8).map(float), size, st.integers(1, 64).map(float), rate), min_size=1, max_size=6)
)
def test_attention_moves_and_overlap_in_columns(table):
    def both(batch, seq, heads, speed):
        op = Attention("a", batch=batch, q_len=seq, kv_len=seq, n_q_heads=heads, n_kv_heads=1.0, d_qk=128.0, d_v=128.0)
        r = replace(RATES, bytes_per_s=speed)
        hidden = [hidden_s(seq, batch, share=share, pieces=heads) for share in (True, False, 0.5)]
        return [*attention_pass(op, r, op.full_flops, speed, 2.0), *move_pass(batch * seq, 2.0, r), *hidden]

    equal(both(*rows_of(table)), [both(*row) for row in table])


@settings(patient, max_examples=15)
@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([512.0, 2048.0]), st.sampled_from([1.0, 2.0, 4.0])),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["llama3-8b", "gpt2-xl", "qwen3-8b"]),
    st.sampled_from(["megatron-core", "megatron-2021"]),
    st.booleans(),
)
def test_a_block_in_columns_of_batch_sequence_and_tp(table, name, profile, sp):
    """The op list itself takes columns: one walk of a block prices every candidate layout."""
    model, software = load_model(name), load_software(profile)
    tiers = network(Machine.load("dgx-a100-80"))

    def seconds(batch, seq, tp):
        shard = Shard(batch, seq, seq, tp, sp=sp, vocab=51200.0, software=software)
        ops = block_ops(model, shard)
        sizes = tensor_bytes_of(ops, shard, model.hidden_sz)
        context = Context(RATES, software, {"tp": Group("tp", tp, 1)}, tiers, tp)
        timed = part_time(ops, sizes, context, [])
        return [
            x for work in timed[:2] for x in (work.gemm_s, work.attention_s, work.memory_s, work.flops, work.comm_s)
        ]

    equal(seconds(*rows_of(table)), [seconds(*row) for row in table])


@patient
@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([2.0, 4.0, 8.0, 32.0])), min_size=1, max_size=4
    ),
    st.sampled_from(["p2p", "all_gather", "a2a"]),
    st.sampled_from(["megatron-core", "fsdp2"]),
    st.sampled_from([True, False, 0.5]),
)
def test_a_block_in_columns_of_cp(table, how, profile, share):
    """Exchanges too: inside a node of 8 and between nodes."""
    model, software = load_model("llama3-8b"), load_software(profile)
    software = software.replace(overlap=software.overlap.model_copy(update={"cp": share}))
    tiers = network(Machine.load("dgx-a100-80"))

    def seconds(tp, cp):
        shard = Shard(
            1.0, 32768.0 / cp, 32768.0, tp, sp=True, vocab=51200.0, software=software, cp=cp, cp_comm_type=how
        )
        ops = block_ops(model, shard)
        sizes = tensor_bytes_of(ops, shard, model.hidden_sz)
        groups = {"tp": Group("tp", tp, 1), "cp": Group("cp", cp, tp)}
        timed = part_time(ops, sizes, Context(RATES, software, groups, tiers, tp), [])
        return [x for work in timed[:2] for x in (work.attention_s, work.flops, work.comm_s)]

    equal(seconds(*rows_of(table)), [seconds(*row) for row in table])


def tensor_bytes_of(ops, shard, hidden):
    """Sizes by name, left as columns."""
    sizes = {"x": shard.sequence_tokens * hidden * shard.itemsize}
    return sizes | {t.name: t.bytes for op in ops for t in op.made}
