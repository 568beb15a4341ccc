"""Linear attention of few heads is bound by its chunks, one after another: 40 us per 1,024 tokens, 8 or 16 heads alike."""

from __future__ import annotations

import pytest
import rates

from steptime.cost import compute
from steptime.model.scans import Chunked

FREE = 1e30
KERNEL_S = 2e-6
RATES = rates.RATES._replace(bytes_per_s=FREE, move_kernel_s=KERNEL_S, chunk_flops=FREE)


def op(tokens: float, sequence: float, slowness: float = 1.0, backward_times: float = 2.0) -> Chunked:
    return Chunked(
        "",
        tokens=tokens,
        seq=sequence,
        n_heads=8,
        d_k=128,
        d_v=128,
        chunk_sz=64,
        delta=True,
        slowness=slowness,
        backward_times=backward_times,
    )


@pytest.mark.parametrize(("tokens", "published_ms"), [(2048, 0.096), (4096, 0.174), (8192, 0.330)])
def test_forward_beside_published_times(tokens, published_ms):
    """Gated DeltaNet, 8 to 16 heads, on B200 (flashinfer-ai/flashinfer#3167): 40 us * tokens / 1,024, and six kernels of 2 us."""
    found = compute.forward(op(tokens, tokens), RATES, {})
    assert found.compute_s == pytest.approx(40e-6 * tokens / 1024)
    assert found.time_s == pytest.approx(40e-6 * tokens / 1024 + 6 * KERNEL_S)
    assert found.time_s * 1e3 == pytest.approx(published_ms, rel=0.05)


def test_sequences_of_a_batch_run_side_by_side():
    """Two sequences of 4,096 tokens: 160 us, of kernels half as fast 320 us; backward, three times that."""
    both = op(8192, 4096, slowness=2.0, backward_times=3.0)
    assert compute.forward(both, RATES, {}).compute_s == pytest.approx(320e-6)
    assert compute.backward(both, RATES, {})[0].compute_s == pytest.approx(960e-6)


def test_a_profiles_factor_slows_chunks_too():
    """At 1.25 times the seconds of a kernel: 4,096 tokens in turn take 160 us * 1.25, and FLOPs at a rate of 1 FLOP/s / 1.25."""
    slow = RATES._replace(slowness=1.25)
    assert compute.forward(op(4096, 4096), slow, {}).compute_s == pytest.approx(200e-6)
    arithmetic = slow._replace(chunk_flops=1 / 1.25)
    assert compute.forward(op(4096, 4096), arithmetic, {}).compute_s == pytest.approx(1.25 * op(4096, 4096).flops)
