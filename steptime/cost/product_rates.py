"""Rates of products by their recipe: those of torchao's grouped experts differ from those of all other projections."""

from steptime.cost.rates import Rates
from steptime.model.ops import Gemm


def asymptote_of(op: Gemm, r: Rates) -> float:
    """Rate of a long product of an op's operands."""
    if op.recipe is None:
        return r.gemm_flops
    return r.experts_flops if op.recipe.of_experts else r.recipe_flops


def grouped_rate(op: Gemm, r: Rates) -> float:
    """Rate of a grouped product divided by that of a long one; torchao's have an asymptote of their own."""
    return r.grouped_share if op.grouped and not (op.recipe and op.recipe.of_experts) else 1.0


def wgrad_share(op: Gemm, usual: float) -> float:
    """Rate of the product for a weight's gradient divided by that of the others: `usual` of most."""
    own = op.recipe.wgrad_rate if op.recipe else None
    return (usual if op.params else 1.0) if own is None else own
