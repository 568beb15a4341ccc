"""One device's share of one micro-batch: everything that a block needs to state its work."""

from __future__ import annotations

from functools import cached_property

from steptime.base.num import Num, ceil, is_column, same
from steptime.base.records import ByFields, record
from steptime.software.performance import Software


@record
class Shard(ByFields):
    """Tokens, tensor parallelism and implementation choices of one device.

    `batch` sequences of which this device holds `seq` tokens each (s/cp) and attends to `kv_seq`. `vocab` is the padded
    vocabulary, whole. `cp` ranks share a sequence and exchange as `cp_comm_type` says, `cp_a2a` of them by all-to-all inside a
    ring. Experts lie on `ep` ranks, each split over `etp`. `sp`: norms, dropouts and residuals hold 1/tp of the tokens
    (Korthikanti et al. 2022, section 4.2.2). Numbers may be columns whose rows have the same ops (`num.same`), such as those of
    tp 2 and 4 but not of tp 1.
    """

    batch: Num
    seq: Num
    kv_seq: Num
    tp: Num
    sp: bool
    vocab: Num
    software: Software
    cp: Num = 1
    cp_comm_type: str = "p2p"
    cp_a2a: Num = 1
    ep: Num = 1
    etp: Num = 1

    @cached_property
    def tokens(self) -> Num:
        """T: tokens that the projections of this device see."""
        return 1.0 * self.batch * self.seq

    @cached_property
    def sequence_tokens(self) -> Num:
        """Tokens in the sequence-parallel region: T/tp with sp, else T."""
        return self.tokens / self.tp if self.sp and self.split else self.tokens

    @cached_property
    def split(self) -> bool:
        """Whether tensor parallelism communicates at all."""
        return same(self.tp != 1)

    @property
    def context_split(self) -> bool:
        """Whether a sequence lies on several devices."""
        return same(self.cp != 1)

    @property
    def columns(self) -> bool:
        """Whether any of its numbers is a column."""
        numbers = (self.batch, self.seq, self.kv_seq, self.tp, self.vocab, self.cp, self.cp_a2a, self.ep, self.etp)
        return any(map(is_column, numbers))

    @property
    def itemsize(self) -> float:
        """Bytes per activation element."""
        return self.software.itemsize


def padded_vocab(vocab_sz: int, tp: Num, multiple: int) -> Num:
    """Vocabulary padded to a multiple of `multiple` * tp.

    Source: megatron/training/tokenizer/tokenizer.py, _vocab_size_with_padding (make-vocab-size-divisible-by, 128).

    >>> padded_vocab(50257, 8, 128)
    51200
    """
    unit = multiple * tp
    return ceil(vocab_sz / unit) * unit
