"""Ops with a state along the sequence, in chunks: Mamba-2's scan, and the kernels of linear attention."""

from __future__ import annotations

from dataclasses import dataclass, field

from steptime.base.num import Num
from steptime.model.ops import Op


@dataclass(slots=True, eq=False, repr=False)
class Scan(Op):
    """Mamba-2's causal convolution and state-space scan in chunks, as one op (Dao and Gu 2024, arXiv 2405.21060, section 6)."""

    tokens: Num = field(kw_only=True)
    n_heads: Num = field(kw_only=True)
    n_groups: Num = field(kw_only=True)
    head_dim: int = field(kw_only=True)
    state_dim: int = field(kw_only=True)
    chunk_sz: int = field(kw_only=True)
    itemsize: float = field(kw_only=True)
    forward_temp_bytes: Num = 0.0
    backward_temp_bytes: Num = 0.0

    @property
    def flops(self) -> Num:
        """Forward FLOPs.

        Per token, with C tokens in a chunk, N states and P values a head: C B^T within the chunk, causal, 2 C N / 2 a group; its
        product with x 2 C P / 2 a head; into and out of the states 2 N P a head each.
        """
        c, n, p = self.chunk_sz, self.state_dim, self.head_dim
        return self.tokens * (self.n_groups * c * n + self.n_heads * (c * p + 4.0 * n * p))

    @property
    def counted(self) -> Num:
        """Forward FLOPs per token that frameworks count: 7 d N, of the recurrence.

        NVIDIA/Megatron-LM megatron/training/training.py, num_floating_point_operations, mamba_layer_flops.
        """
        return 7.0 * self.n_heads * self.head_dim * self.state_dim

    @property
    def forward_bytes(self) -> Num:
        """Bytes that its memory-bound kernels move in forward.

        Those of the convolution; the states are read in fp32 and written in the compute dtype where they are passed from chunk
        to chunk; dt is read, and written twice in fp32.
        """
        states = (4.0 + self.itemsize) * self.n_heads * self.head_dim * self.state_dim / self.chunk_sz
        return self.conv_bytes + self.tokens * (states + (self.itemsize + 8.0) * self.n_heads)

    @property
    def conv_bytes(self) -> Num:
        """Bytes that the convolution moves in forward: it reads and writes x, B and C."""
        return 2.0 * self.itemsize * self.tokens * (self.n_heads * self.head_dim + 2.0 * self.n_groups * self.state_dim)


@dataclass(slots=True, eq=False, repr=False)
class Chunked(Op):
    """The kernels of linear attention in chunks, as one op (Yang et al. 2024, arXiv 2406.06484 and 2412.06464)."""

    tokens: Num = 0.0
    seq: Num = 0.0
    """Tokens of a sequence: its chunks follow one another."""
    n_heads: Num = 0.0
    d_k: int = field(kw_only=True)
    d_v: int = field(kw_only=True)
    chunk_sz: int = field(kw_only=True)
    delta: bool = False
    """Whether it is a delta rule: what the states already hold for a key is subtracted first."""
    slowness: float = 1.0
    """Time divided by that of Gated DeltaNet's kernels at the same FLOPs."""
    backward_times: float = 2.0
    """Backward time divided by forward's."""
    counted: Num = 0.0
    """Forward FLOPs per token that frameworks count, including the convolution's."""
    forward_temp_bytes: Num = 0.0
    backward_temp_bytes: Num = 0.0

    @property
    def flops(self) -> Num:
        """Forward FLOPs.

        Per token and head, with C tokens in a chunk: Q K^T and its product with V, 2 C (K + V); into and out of states, 4 K V;
        with the delta rule K K^T, the two products that make W and U, and W's with the states, 2 C (2 K + V) + 2 K V.
        """
        k, v, c = self.d_k, self.d_v, self.chunk_sz
        plain = 2.0 * c * (k + v) + 4.0 * k * v
        return self.tokens * self.n_heads * (plain + (2.0 * c * (2.0 * k + v) + 2.0 * k * v if self.delta else 0.0))
