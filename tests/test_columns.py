"""Cost formulas in numpy columns equal their rows, bit for bit."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import rates
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.cost import compute
from steptime.cost.compute import attention_pass, gemm_backward, gemm_pass, move_pass, shape_efficiency
from steptime.cost.network import network
from steptime.cost.overlap import hidden_s, in_pieces_s
from steptime.cost.part_seconds import Context, part_time
from steptime.hardware.machine import Machine
from steptime.job.mesh import Group
from steptime.model.blocks import block_ops, embedding_ops, head_ops
from steptime.model.ops import Attention, Gemm, Op, Param
from steptime.model.presets import load_model
from steptime.model.shard import Shard
from steptime.software.performance import load_software

RATES = rates.RATES._replace(sm_count=108.0, recipe_flops=2.0 * rates.RATES.gemm_flops)
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
        r = RATES._replace(gemm_flops=speed, bytes_per_s=speed / 100.0)
        passes = [gemm_pass(op, r, m, n, k, sum(compute.gemm_traffic(op, r)[0])), *gemm_backward(op, r)]
        return [field for done in passes for field in done] + [shape_efficiency(m, n, k, 1.0, 108.0)]

    equal(both(*rows_of(table)), [both(*row) for row in table])


@patient
@given(
    st.lists(st.tuples(st.integers(1, 8).map(float), size, st.integers(1, 64).map(float), rate), min_size=1, max_size=6)
)
def test_attention_moves_and_overlap_in_columns(table):
    def both(batch, seq, heads, speed):
        op = Attention("a", batch=batch, q_len=seq, kv_len=seq, n_q_heads=heads, n_kv_heads=1.0, d_qk=128.0, d_v=128.0)
        r = RATES._replace(bytes_per_s=speed)
        hidden = [hidden_s(seq, in_pieces_s(seq, batch, heads), share) for share in (True, False, 0.5)]
        return [*attention_pass(op, r, op.full_flops, speed, 2.0), *move_pass(batch * seq, 2.0, r), *hidden]

    equal(both(*rows_of(table)), [both(*row) for row in table])


# --- op lists: what a block, the embedding and the head are made of, and what they take ---

TPS = st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
TIERS = network(Machine.load("dgx-a100-80"))
PARTS = (embedding_ops, block_ops, head_ops)


def at(column, i):
    """Row `i` of anything that holds columns."""
    if isinstance(column, np.ndarray):
        return column[i].item()
    if isinstance(column, tuple | list):
        rows = [at(field, i) for field in column]
        return type(column)(*rows) if hasattr(column, "_fields") else type(column)(rows)
    if isinstance(column, Op):
        return type(column)(**{field.name: at(getattr(column, field.name), i) for field in fields(column)})
    return column


def shard_of(software, sp, how="p2p"):
    def build(batch, seq, tp, cp):
        of = {"cp": cp, "cp_comm_type": how, "cp_a2a": 2}
        return Shard(batch, seq / cp, seq, tp, sp=sp, vocab=51200.0, software=software, **of)

    return build


def seconds(ops, model, shard):
    """Both directions of a part, in every field of `Work` and every collective."""
    sizes = tensor_bytes_of(ops, shard, model.hidden_sz)
    groups = {"tp": Group("tp", shard.tp, 1), "cp": Group("cp", shard.cp, shard.tp)}
    groups |= {"cp_a2a": Group("cp_a2a", 2, shard.tp), "cp_p2p": Group("cp_p2p", shard.cp / 2, shard.tp * 2)}
    found = []
    for work in part_time(ops, sizes, Context(RATES, shard.software, groups, TIERS, shard.tp), [])[:2]:
        found += [work.gemm_s, work.attention_s, work.memory_s, work.launch_s, work.kernels, work.flops, work.comm_s]
    return found


def tensor_bytes_of(ops, shard, hidden):
    """Sizes by name, left as columns."""
    sizes = {"x": shard.sequence_tokens * hidden * shard.itemsize, "ids": 0.0}
    return sizes | {t.name: t.bytes for op in ops for t in op.allocates}


def alike(model, table):
    """Rows by what decides which ops there are."""
    lots = {}
    for row in table:
        *_, tp, cp = row
        choices = (tp == 1, cp == 1, tp == model.n_kv_heads, tp > model.n_kv_heads)
        lots.setdefault(choices, []).append(row)
    return list(lots.values())


def check(model, build, table):
    """Op lists, sizes of tensors, and seconds of a column's rows are those of the rows alone, bit for bit."""

    def parts(*row):
        shard = build(*row)
        lists = [part(model, shard) for part in PARTS]
        return lists, [seconds(ops, model, shard) for ops in lists]

    for rows in alike(model, table):
        lists, times = parts(*rows_of(rows))
        for i, row in enumerate(rows):
            alone, alone_s = parts(*row)
            assert at(lists, i) == alone
            assert at([[np.broadcast_to(x, len(rows)) for x in each] for each in times], i) == alone_s


@settings(patient, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([512.0, 2048.0]), TPS, st.just(1.0)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["llama3-8b", "llama2-7b", "gpt2-xl", "qwen3-8b"]),
    st.sampled_from(["megatron-core", "megatron-2021", "fsdp2", "bloom"]),
    st.sampled_from(["flash", "unfused"]),
    st.booleans(),
    st.sampled_from(["bf16", "fp8_delayed", "mxfp8"]),
)
def test_columns_of_batch_sequence_and_tp(table, name, profile, attention, sp, precision):
    """One walk prices every candidate whose ops are alike: with one rank, up to 8 key-value heads, one each, and beyond."""
    software = load_software(profile).replace(attention_impl=attention, precision=precision)
    check(load_model(name), shard_of(software, sp), table)


@settings(patient, max_examples=30)
@given(
    st.lists(
        st.tuples(st.just(1.0), st.just(32768.0), TPS, st.sampled_from([1.0, 2.0, 4.0, 8.0, 32.0])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"]),
    st.sampled_from(["megatron-core", "fsdp2"]),
    st.sampled_from([True, False, 0.5]),
    st.booleans(),
)
def test_columns_of_cp(table, how, profile, share, sp):
    """Exchanges too: inside a node of 8 and between nodes, and a sequence that lies on one device."""
    software = load_software(profile)
    software = software.replace(overlap=software.overlap.model_copy(update={"cp": share}))
    check(load_model("llama3-8b"), shard_of(software, sp, how), table)


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_llama3_beyond_its_key_value_heads(attention):
    """Llama 3 8B has 8 key-value heads: at tp 16 and 32 every rank gathers the whole projection, 8192 x 6144 x 2 = 100,663,296 B.

    At tp 8 a rank has a single key-value head, whose queries lie together and need no copy where the projection is read in place.
    """
    software = load_software("megatron-core").replace(attention_impl=attention)
    model, build = load_model("llama3-8b"), shard_of(software, sp=True)
    for tps, spread, copied in (((2.0, 4.0), 0, True), ((8.0, 8.0), 0, False), ((16.0, 32.0), 1, False)):
        table = [(1.0, 8192.0, tp, 1.0) for tp in tps]
        check(model, build, table)
        ops = {op.name: op for op in block_ops(model, build(*rows_of(table)))}
        assert [np.unique(op.bytes) for name, op in ops.items() if name == "attn.spread"] == [100_663_296.0] * spread
        assert ("attn.q_copy" in ops) == (copied and attention == "unfused")


@pytest.mark.parametrize("tps", [(1.0, 2.0), (4.0, 16.0)])
def test_rows_of_different_ops_in_one_list_are_refused(tps):
    model, build = load_model("llama3-8b"), shard_of(load_software("megatron-core"), sp=True)
    with pytest.raises(ValueError, match="rows of a column need different ops"):
        block_ops(model, build(1.0, 8192.0, np.array(tps), 1.0))
