"""The tables of docs/notation.md: what one block, the embedding and the head do, op by op, as formulas.

The op lists are built once with letters in place of numbers; nothing here knows a formula of the model. Needs sympy, which the
`test` extra has.

    python docs/block_table.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from steptime.model.blocks import block_ops, embedding_ops, head_ops
from steptime.model.model import Model
from steptime.model.ops import Attention, Comm, Gemm, Op, Tensor
from steptime.model.shard import Shard
from steptime.software.performance import Performance, Software, resolve

LETTERS = {"T": 8192, "s": 4096, "h": 8192, "i": 28672, "n": 64, "k": 8, "d": 128, "V": 128256, "t": 2}
"""Letters with the numbers that stand for them wherever the op lists compare: no branch depends on them otherwise."""
SYMBOLS = {name: sympy.Symbol(name, positive=True) for name in LETTERS}


@dataclass(frozen=True)
class Letter:
    """A number that remembers its formula: arithmetic goes by both, comparison by the number."""

    value: float
    formula: sympy.Expr

    def _with(self, other: Any, operation: Callable[[Any, Any], Any]) -> Letter:
        value, formula = (other.value, other.formula) if isinstance(other, Letter) else (other, sympy.nsimplify(other))
        return Letter(operation(self.value, value), operation(self.formula, formula))

    def __add__(self, other: Any) -> Letter:
        return self._with(other, lambda a, b: a + b)

    def __mul__(self, other: Any) -> Letter:
        return self._with(other, lambda a, b: a * b)

    def __truediv__(self, other: Any) -> Letter:
        return self._with(other, lambda a, b: a / b)

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return float(self) == float(other)

    def __lt__(self, other: Any) -> bool:
        return float(self) < float(other)

    def __le__(self, other: Any) -> bool:
        return float(self) <= float(other)

    def __gt__(self, other: Any) -> bool:
        return float(self) > float(other)

    def __ge__(self, other: Any) -> bool:
        return float(self) >= float(other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)


def formula(number: Any) -> sympy.Expr:
    """The formula of a number."""
    return number.formula if isinstance(number, Letter) else sympy.nsimplify(number)


def letter(name: str) -> Any:
    """A letter as the op lists take it."""
    return Letter(LETTERS[name], SYMBOLS[name])


def model(**changes: Any) -> Model:
    """A dense decoder in letters (unchecked: pydantic would ask for integers)."""
    said = {
        "hidden_sz": letter("h"),
        "inter_sz": letter("i"),
        "n_q_heads": letter("n"),
        "n_kv_heads": letter("k"),
        "head_dim": letter("d"),
        "vocab_sz": letter("V"),
        "glu": True,
        "rotary_embeds": True,
        "bias": False,
        "qkv_bias": False,
        "norm_bias": False,
        "activation": "silu",
    }
    return Model.model_construct(**(said | changes))


def shard(software: Software, *, sp: bool) -> Shard:
    """One device's share, in letters."""
    return Shard(
        batch=letter("T") / letter("s"),
        seq=letter("s"),
        kv_seq=letter("s"),
        tp=letter("t"),
        sp=sp,
        vocab=letter("V"),
        software=software,
    )


# --- columns -------------------------------------------------------------------------------------------------------------


def flops(op: Op) -> sympy.Expr:
    """Forward FLOPs of an op on one device, causal attention counted half."""
    if isinstance(op, Attention):
        return formula(op.full_flops) * sympy.nsimplify(op.causal_share)
    return formula(op.flops) if isinstance(op, Gemm) else sympy.Integer(0)


def parameters(op: Op) -> sympy.Expr:
    """Parameters of an op on one device."""
    return sum(
        (formula(p.elements) / (SYMBOLS["t"] if p.split_dim is not None else 1) for p in op.params), sympy.Integer(0)
    )


def sizes(ops: Iterable[Op], x: Tensor) -> dict[str, sympy.Expr]:
    """Bytes of every tensor by name."""
    return {
        t.name: formula(t.elements) * sympy.nsimplify(t.itemsize) for t in (x, *(t for op in ops for t in op.allocates))
    }


def sends(op: Op) -> list[str]:
    """Collectives of an op, each with its direction."""
    if not isinstance(op, Comm):
        return []
    kinds = [("forward", op.kind), ("backward", "all_gather" if op.regather else None), ("backward", op.backward)]
    return [f"{way} {kind.replace('_', '-')}" for way, kind in kinds if kind]


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    op: str
    flops: sympy.Expr
    params: sympy.Expr
    saved: sympy.Expr
    sends: list[str]
    sent: sympy.Expr


def rows(ops: list[Op], x: Tensor) -> list[Row]:
    """A row per op. A tensor that several ops save is one storage: the first of them has it."""
    size, seen, found = sizes(ops, x), set[str](), list[Row]()
    for op in ops:
        fresh = [name for name in dict.fromkeys(op.saves) if name not in seen]
        seen |= set(fresh)
        saved = sum((size[name] for name in fresh), sympy.Integer(0))
        sent = formula(op.bytes) if isinstance(op, Comm) else sympy.Integer(0)
        found.append(Row(op.name, flops(op), parameters(op), saved, sends(op), sent))
    return found


# --- the page ------------------------------------------------------------------------------------------------------------


def write(expr: sympy.Expr) -> str:
    """A formula as the page has it: `2 T h (n + 2 k) d / t`; nothing for zero."""
    if expr == 0:
        return ""
    top, bottom = sympy.factor(expr).as_numer_denom()
    return " / ".join(filter(None, [_product(top) or "1", _product(bottom)]))


def _product(expr: sympy.Expr) -> str:
    def rank(factor: sympy.Expr) -> tuple[bool, int]:
        names = [list(LETTERS).index(str(s)) for s in factor.free_symbols]
        return isinstance(factor, sympy.Add), min(names, default=-1)

    factors = sorted((f for f in sympy.Mul.make_args(expr) if f != 1), key=rank)
    return " ".join(_sum(f) if isinstance(f, sympy.Add) else _power(f) for f in factors)


def _sum(expr: sympy.Expr) -> str:
    order = list(LETTERS)
    terms = sorted(
        expr.args, key=lambda term: (-len(term.free_symbols), sorted(order.index(str(s)) for s in term.free_symbols))
    )
    return f"({' + '.join(_product(term) or '1' for term in terms)})"


def _power(expr: sympy.Expr) -> str:
    return str(expr).replace("**2", "²").replace("**3", "³")


def table(found: list[Row]) -> str:
    """Rows as Markdown, with their sum."""
    lines = ["| op | forward FLOPs | parameters | saved bytes | communication |", "|---|---|---|---|---|"]
    for row in found:
        said = f"{', '.join(row.sends)}: {write(row.sent)}" if row.sends else ""
        lines.append(f"| {row.op} | {write(row.flops)} | {write(row.params)} | {write(row.saved)} | {said} |")
    sums = [write(sympy.expand(sum(getattr(row, column) for row in found))) for column in ("flops", "params", "saved")]
    lines.append(f"| **sum** | {' | '.join(sums)} | {sum(len(row.sends) for row in found)} calls |")
    return "\n".join(lines)


def parts() -> dict[str, tuple[list[Op], Tensor]]:
    """The tables of the page: title, op list, input."""
    llama = shard(resolve(Performance(software="megatron-core")), sp=True)
    old = shard(resolve(Performance(software="megatron-2021", precision="fp16")), sp=False)
    gpt = {"glu": False, "activation": "gelu", "rotary_embeds": False, "norm": "layernorm", "n_kv_heads": letter("n")}
    biases = {"bias": True, "qkv_bias": True, "norm_bias": True, "dropout": 0.1}

    def tokens(seen: Shard) -> Tensor:
        return Tensor("x", seen.sequence_tokens * letter("h"), 2.0)

    return {
        "A Llama block in Megatron-Core": (block_ops(model(), llama), tokens(llama)),
        "A GPT block in Megatron-LM of 2021": (block_ops(model(**gpt, **biases), old), tokens(old)),
        "The embedding in Megatron-Core": (embedding_ops(model(), llama), Tensor("ids", 0.0, 0.0)),
        "Final norm, head and loss in Megatron-Core": (head_ops(model(), llama), tokens(llama)),
    }


def main() -> None:
    """Print all tables."""
    for title, (ops, x) in parts().items():
        sys.stdout.write(f"### {title}\n\n{table(rows(ops, x))}\n\n")


if __name__ == "__main__":
    main()
