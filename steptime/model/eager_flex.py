"""FlexAttention without torch.compile: all scores in fp32, in memory, one torch kernel after another.

Source: torch/_higher_order_ops/flex_attention.py (torch 2.13), sdpa_dense and sdpa_dense_backward. It keeps for backward what the
compiled kernel keeps. Letters: w bytes of an fp32 score, of which a kernel reads or writes all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steptime.base.num import Num

FORWARD_SCORE_BYTES = 84.0
"""Bytes moved per score, forward: product 4, scale 8, mask 8, log-sum-exp 24 (maximum 4, difference 8, exponential 8, sum 4),
rows without a key 6, maximum 4, safe softmax 22 (softmax 8, comparison 6, choice 8), cast to the compute dtype 6, product with
the values 2. The mask, alike for all heads, is left out."""
BACKWARD_SCORE_BYTES = 106.0
"""The same backward: scores again 20; difference to the log-sum-exp 8, exponential 8, rows without a key 8; cast 6 and product 2
for the values' gradient; product 4, two differences 16, product 12, scale 8, cast 6, mask 4; 4 for the products of queries and
keys."""
KERNELS = 20.0
"""Kernels besides the products: 18 forward, 22 backward with the copies of gradients, in the mean."""
FORWARD_TEMP_BYTES, BACKWARD_TEMP_BYTES = 13.0, 26.0
"""Most bytes per score that exist at once, in torch's profile of memory on a CPU: forward three fp32 tensors and a comparison."""


def eager_flex(scores: Num) -> dict[str, Any]:
    """Fields of the attention op for so many scores, batch x heads x queries x keys: all are computed; the mask saves nothing."""
    return {
        "causal_share": 1.0,
        "reach": 0.0,
        "merge_forward_bytes": FORWARD_SCORE_BYTES * scores,
        "merge_backward_bytes": BACKWARD_SCORE_BYTES * scores,
        "merge_kernels": KERNELS,
        "forward_temp_bytes": FORWARD_TEMP_BYTES * scores,
        "backward_temp_bytes": BACKWARD_TEMP_BYTES * scores,
    }
