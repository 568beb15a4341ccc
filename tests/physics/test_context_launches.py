"""What the host launches for attention over ranks that share a sequence, counted on TransformerEngine's functions."""

from __future__ import annotations

import jobs
import pytest

from steptime.answer.result import estimate
from steptime.model.context_launches import gather_launches, heads_launches, ring_launches
from steptime.software.performance import load_software

MODEL = {
    "n_layers": 4, "hidden_sz": 1024, "inter_sz": 4096, "n_q_heads": 8, "n_kv_heads": 4, "head_dim": 128,
    "vocab_sz": 32000,
}  # fmt: skip


def layer(cp, how="p2p", batch=1, **performance):
    """Launches of a layer, forward and backward."""
    layout = {"cp": cp, "cp_comm_type": how, "dp": 1}
    layout |= {"cp_a2a": 2} if how == "a2a+p2p" else {}
    of = jobs.job(MODEL, seqlen=4096, microbatch_sz=batch, software="megatron-core", performance=performance, **layout)
    times = estimate(of).timing.parts.layer
    return times.forward.kernels, times.backward.kernels


def added(cp, how, batch=1, **performance):
    """Launches that context parallelism adds to those of a layer."""
    alone, shared = layer(1, batch=batch, **performance), layer(cp, how, batch, **performance)
    return tuple(there - here for there, here in zip(shared, alone, strict=True))


@pytest.mark.parametrize(("cp", "forward", "backward"), [(2, 8, 10), (4, 19, 22), (8, 39, 42)])
def test_a_ring(cp, forward, backward):
    """AttnFuncWithCPAndKVP2P (TransformerEngine v2.7 context_parallel.py), counted line by line.

    Forward over 2 ranks: torch.cat of keys and values; 2 attention calls; one batch_isend_irecv; torch.clone of the log-sum-exp
    and one correction; two corrections of outputs: 1 + 2 + 1 + 2 + 2 = 8. Over 8, whose isend and irecv are two calls: 1 + 8 +
    7 * 2 + 1 + 7 + 8 = 39. Backward over 2: half of the log-sum-exp made contiguous, keys and values copied into the buffer; 2
    attention calls, 2 gradients of the query and 2 of keys and values copied or added; 2 exchanges: 2 + 6 + 2 = 10. Over 8: 2 +
    24 + 8 * 2 = 42. The layer alone has one kernel in each direction.
    """
    ahead, back = ring_launches(cp)
    assert (ahead + (cp - 1), back + cp) == (forward, backward)
    assert added(cp, "p2p") == (forward - 1, backward - 1)


def test_whole_keys_and_values():
    """AttnFuncWithCPAndKVAllGather with the sequence first, as cuDNN's kernel has it.

    Forward: cu_seqlens_q // (2 * cp_size), two all-gathers, the chunks' indices, two index_select, then for each of two chunks
    the kernel and a copy of its output: 1 + 2 + 1 + 2 + 4 = 10, whatever the ranks. Backward: two gradients zeroed, two
    all-gathers, indices and two index_select; for each chunk the kernel, the query's gradient copied, two gradients added;
    indices, two index_select, two reduce-scatters: 2 + 5 + 8 + 3 + 2 = 20, but
    the second pair of all-gathers is not counted: 18.
    """
    assert added(4, "all_gather") == added(2, "all_gather") == (10 - 1, 20 - 2 - 1)
    assert gather_launches(1, flash=False) == (10 - 2 - 1, 20 - 4)


@pytest.mark.parametrize(("batch", "more"), [(1, (0, 0)), (2, (8, 14))])
def test_flash_attention_puts_the_batch_first(batch, more):
    """FlashAttention's operands have the batch first: x.movedim(...).contiguous() is a copy then, but for a single sequence.

    Forward: keys and values; query, keys and values of two chunks: 2 + 6 = 8 more. Backward: query, keys, values and the output's
    gradient of two chunks, the chunks' two gradients, the two whole gradients: 8 + 4 + 2 = 14 more. No offsets are divided: one
    less forward. torch.empty(8, 1, 4).movedim(0, 1).is_contiguous() holds, and with 2 in the middle it does not.
    """
    ahead, back = added(4, "all_gather")
    flash = added(4, "all_gather", batch, attention_backend="flash")
    assert flash == (ahead - 1 + more[0], back + more[1])


def test_heads_for_tokens():
    """AttnFuncWithCPAndQKVOA2A: the chunks' indices before and after, and for each of query, keys, values and output a copy of
    its heads, the all-to-all, and chunks in order: 2 + 4 * 3 = 14; the same for the gradients.
    """
    assert added(4, "a2a") == (14, 14)
    assert heads_launches(indices=False) == (8, 8)


def test_a_ring_of_groups_that_exchange_heads():
    """Over 2 x 2 ranks: the ring's 8 and 10, the exchange of heads' 14 and, backward, the output's 3 more: 22 and 27."""
    assert added(4, "a2a+p2p") == (22 - 1, 27 - 1)


def test_a_short_sequence_waits_for_launches():
    """1,024 tokens over 8 ranks: a layer takes its launches' time, 105 us each, forward and backward."""
    layout = {"cp": 8, "cp_comm_type": "p2p", "dp": 1}
    found = estimate(jobs.job(MODEL, seqlen=1024, software="megatron-core", **layout))
    each = load_software("megatron-core").timing.host_kernel_s
    forward, backward, _ = found.timing.parts.layer
    assert forward.seconds == pytest.approx(forward.kernels * each)
    assert backward.seconds == pytest.approx(backward.kernels * each)
