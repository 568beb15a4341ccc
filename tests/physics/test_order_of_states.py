"""In which order Megatron makes the tensors of a stage's states, each by its bytes (the allocator's blocks depend on it).

Hidden 4, MLP 8, one head, a vocabulary of 16 padded to 128. Elements in registered order: embedding 512; of a layer norm 4,
output projection 16, q, k and v 48, norm 4, gate and up 64, down 32; final norm 4, head 512.
"""

from __future__ import annotations

from typing import Any

import pytest
from physics_jobs import job

from steptime.job.assembly import Assembly
from steptime.job.local_params import Pieces
from steptime.memory import allocator_blocks
from steptime.memory.allocator_blocks import shards, states_rest
from steptime.memory.states import stage_states

SMALL = {"n_layers": 1, "hidden_sz": 4, "inter_sz": 8, "n_q_heads": 1, "vocab_sz": 16}
LAYER = [4, 16, 48, 4, 64, 32]
EVERY = [512, *LAYER, 4, 512]


class Recorder:
    """Stands for the allocator: a tensor made by its bytes, one freed by their negative. It takes none below 100 B."""

    def __init__(self) -> None:
        """Nothing made yet."""
        self.rest: list[float] = []

    def allocate(self, size: float) -> float | None:
        """Note a tensor."""
        self.rest.append(size)
        return size if size >= 100 else None

    def release(self, block: float) -> None:
        """Note that it is freed."""
        self.rest.append(-block)


def made(monkeypatch: pytest.MonkeyPatch, stage: int = 0, model: dict[str, Any] | None = None, **said: Any) -> Any:
    """What a stage's states make and free, in order."""
    monkeypatch.setattr(allocator_blocks, "LargeBlocks", Recorder)
    assembly = Assembly(job(model=SMALL | (model or {}), **said))
    return states_rest(assembly, assembly.stages[stage], stage_states(assembly)[stage])


def bf16(elements: list[int]) -> list[int]:
    """Each parameter's bytes."""
    return [2 * n for n in elements]


def freed(elements: list[int]) -> list[int]:
    """The same for those that the allocator has taken."""
    return [-2 * n for n in elements if 2 * n >= 100]


def mains(elements: list[int]) -> list[int]:
    """A copy in bf16, the main weight in fp32, then the copy goes (optimizer/optimizer.py:674)."""
    return [size for n in elements for size in (2 * n, 4 * n, *freed([n]))]


def moments(elements: list[int]) -> list[int]:
    """Both of a tensor, then those of the next (fused_adam.py, initialize_state)."""
    return [4 * n for n in elements for _ in range(2)]


def test_states_that_nothing_shards(monkeypatch):
    """1,196 elements in all, whose gradients are one fp32 buffer of 4,784 B; the parameters stay where they are."""
    found = made(monkeypatch, dp=2, zero_level=0)
    assert sum(EVERY) == 1_196
    assert found == [*bf16(EVERY), 4_784, *mains(EVERY), *moments(EVERY)]


def test_equal_layers_follow_one_another(monkeypatch):
    found = made(monkeypatch, model={"n_layers": 2}, dp=2, zero_level=0)
    every = [512, *LAYER, *LAYER, 4, 512]
    assert found == [*bf16(every), 4 * sum(every), *mains(every), *moments(every)]


HERE = [48, 16, 4, 512]
"""Of two ranks the last has 768 to 1,535. From the end, each at a multiple of 64: head 0, norm 512, down 576, gate and up 640,
norm 704, q, k and v 768, projection 832, norm 896, embedding 960 to 1,471, padded to a multiple of 128: 1,536 in all."""


def test_the_distributed_optimizer_takes_parameters_over(monkeypatch):
    """Its buffers of 1,536 elements in bf16 and in fp32 come before the parameters go."""
    found = made(monkeypatch, dp=2, zero_level=1)
    assert found == [*bf16(EVERY), 3_072, 6_144, *freed(EVERY), *mains(HERE), *moments(HERE)]


def test_buckets_are_cut_where_they_are_not_yet(monkeypatch):
    """States without buckets have those of the layout."""
    monkeypatch.setattr(allocator_blocks, "LargeBlocks", Recorder)
    assembly = Assembly(job(model=SMALL, dp=2, zero_level=1))
    [states] = stage_states(assembly)
    whole, bare = (states_rest(assembly, assembly.stages[0], of) for of in (states, states._replace(buckets=[])))
    assert whole == bare


def test_sixteen_more_bits_instead_of_main_weights(monkeypatch):
    """Neither copies nor main weights; after both moments of a tensor its 2 B an element."""
    found = made(monkeypatch, dp=2, zero_level=1, performance={"master_dtype": "remainder"})
    assert found[: -3 * 4] == [*bf16(EVERY), 3_072, 6_144, *freed(EVERY)]
    assert found[-3 * 4 :] == [size for n in HERE for size in (4 * n, 4 * n, 2 * n)]


def test_lion_has_one_moment(monkeypatch):
    found = made(monkeypatch, dp=2, zero_level=1, performance={"optimizer": "lion"})
    assert found[-4:] == [4 * n for n in HERE]
    assert found[: -4 - len(mains(HERE))] == [*bf16(EVERY), 3_072, 6_144, *freed(EVERY)]


def test_gradients_in_bf16_are_copied_after_main_weights(monkeypatch):
    """1,536 elements in bf16 twice; before the moments an fp32 copy of every tensor's gradient."""
    found = made(monkeypatch, dp=2, zero_level=1, performance={"main_grad_dtype": "bf16"})
    copies = [4 * n for n in HERE]
    assert found == [*bf16(EVERY), 3_072, 3_072, *freed(EVERY), *mains(HERE), *copies, *moments(HERE)]


CHUNKS = {"n_layers": 4}, {"pp": 2, "vpp": 2, "microbatches": 2, "zero_level": 1}


def test_chunks_have_buffers_of_their_own(monkeypatch):
    """Of four layers stage 0 has the embedding and the first, and the third. All parameters come first, then a chunk's buffers
    before the next chunk's. Backward, at multiples of 64: down, gate and up, norm, q, k and v, projection, norm in 64 each, 384
    in all; before the embedding's 512, 896.
    """
    model, layout = CHUNKS
    found = made(monkeypatch, model=model, **layout)
    back = LAYER[::-1]
    own = [*back, 512, *back]
    assert found == [
        *bf16([512, *LAYER]), *bf16(LAYER),
        2 * 896, 4 * 896, *freed([512, *LAYER]),
        2 * 384, 4 * 384, *freed(LAYER),
        *mains(own), *moments(own),
    ]  # fmt: skip


MOE = {"moe": {"n_experts": 2, "expert_inter_sz": 8, "experts_per_token": 1}}


def test_experts_come_after_dense_parameters(monkeypatch):
    """Two experts on two ranks: one here, its gate and up of 64 and down of 32 elements in a buffer of their own of 128, which
    one rank has whole. The router has 8. Dense, from the end: head 0, norm 512, router 576, norm 640, q, k and v 704, projection
    768, norm 832, embedding 896 to 1,407, of which the last rank has all from 704 on.
    """
    found = made(monkeypatch, model=MOE, dp=2, ep=2, zero_level=1)
    every = [512, 4, 16, 48, 4, 8, 64, 32, 4, 512]
    own = [48, 16, 4, 512, 32, 64]
    buffers = [2 * 1_408, 4 * 1_408, 2 * 128, 4 * 128]
    assert found == [*bf16(every), *buffers, *freed(every), *mains(own), *moments(own)]


@pytest.mark.parametrize(
    ("pieces", "buckets", "ranks", "last"),
    [
        ([128, 64], [128, 128], 1, [128, 64]),  # the first fills its bucket, the second begins the next
        ([64, 64], [128], 2, [64]),  # the first ends where the last rank's part begins
        ([65], [128], 2, [1]),
    ],
)
def test_tensors_at_the_ends_of_parts(pieces, buckets, ranks, last):
    """distrib_optimizer.py: a rank updates what of a tensor lies in its part of the bucket, be it one element."""
    assert shards([Pieces(n, 1) for n in pieces], buckets, ranks) == last
