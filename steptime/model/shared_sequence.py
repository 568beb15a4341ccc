"""One rank's share of attention where several ranks share a sequence, and the calls between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from steptime.base.num import Num
from steptime.model.ops import Attention, Axis, Comm, Tensor
from steptime.model.sublayers import FP32

if TYPE_CHECKING:
    from steptime.model.shard import Shard

Names = tuple[str, str, str]


class Local(NamedTuple):
    """One rank's share of attention: heads, tokens, and its input and output tensors."""

    shard: Shard
    n_q: Num
    n_kv: Num
    d: int
    """Width of a head of queries and keys."""
    d_v: int
    """Width of a head of values and outputs."""
    drops: bool = False
    """Whether dropout follows the softmax."""

    @property
    def q(self) -> Num:
        """Elements of the query."""
        return self.shard.tokens * self.n_q * self.d

    @property
    def k(self) -> Num:
        """Elements of the keys."""
        return self.shard.tokens * self.n_kv * self.d

    @property
    def v(self) -> Num:
        """Elements of the values."""
        return self.shard.tokens * self.n_kv * self.d_v

    @property
    def kv(self) -> Num:
        """Elements of keys and values together."""
        return self.k + self.v

    @property
    def q_bytes(self) -> Num:
        """Bytes of the query."""
        return self.q * self.shard.itemsize

    @property
    def kv_bytes(self) -> Num:
        """Bytes of keys and values together."""
        return self.kv * self.shard.itemsize

    @property
    def out(self) -> Tensor:
        """The output, for this rank's tokens."""
        elements = self.shard.tokens * self.n_q * self.d_v
        return Tensor("attn.core.out", elements, self.shard.itemsize)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the scores, fp32."""
        return Tensor("attn.core.lse", self.shard.tokens * self.n_q, FP32)

    def kernel(self, inputs: Names, out: Tensor, saves: tuple[str, ...], **work: Any) -> Attention:
        """The flash kernel calls of this rank, its queries against all keys; `work` overrides or adds fields of the op."""
        shape: dict[str, Any] = {
            "batch": self.shard.batch,
            "q_len": self.shard.seq,
            "kv_len": self.shard.kv_seq,
            "n_q_heads": self.n_q,
            "n_kv_heads": self.n_kv,
            "d_qk": self.d,
            "d_v": self.d_v,
            "itemsize": self.shard.itemsize,
            "drops": self.drops,
            "stats": (self.lse,),
        }
        return Attention("attn.core", inputs, (out,), saves, role="core_attn", **(shape | work))


def exchange(name: str, *, axis: Axis = "cp", **call: Any) -> Comm:
    """Calls over the cp ranks outside of the dataflow: their buffers are counted as temporaries of the kernel."""
    return Comm(f"attn.core.{name}", axis=axis, role="core_attn", **call)
