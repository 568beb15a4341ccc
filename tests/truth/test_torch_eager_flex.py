"""Bytes that torch's FlexAttention moves without torch.compile, counted kernel by kernel on a CPU."""

import torch
from torch._higher_order_ops.flex_attention import create_fw_bw_graph, sdpa_dense, sdpa_dense_backward
from torch.nn.attention.flex_attention import _identity, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steptime.model.eager_flex import BACKWARD_SCORE_BYTES, FORWARD_SCORE_BYTES

HEADS, TOKENS = 4, 256
SCORES = HEADS * TOKENS * TOKENS


class Moved(TorchDispatchMode):
    """Bytes of tensors with all scores, read and written by kernels that are not views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        stored = {t.untyped_storage().data_ptr() for t in read}
        if not all(t.untyped_storage().data_ptr() in stored for t in made):
            self.bytes += sum(t.nbytes for t in read + made if t.numel() == SCORES and 0 not in t.stride())
        return out


def test_scores_in_memory():
    """What two of the dispatcher's kernels do inside is added.

    Log-sum-exp: besides the read for its maximum, a difference, an exponential and a sum, 20 bytes; safe softmax: besides the
    softmax, a comparison with minus infinity and a choice, 14.
    """
    q, k, v = (torch.randn(1, HEADS, TOKENS, width, dtype=torch.bfloat16) for width in (24, 24, 16))
    mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cpu").as_tuple()
    rest = (1.0, {}, (), ())
    with torch.no_grad(), Moved() as forward:
        out, lse = sdpa_dense(q, k, v, _identity, mask, *rest)[:2]
    one = (q.new_zeros((), requires_grad=True), *[q.new_zeros((), dtype=torch.int) for _ in range(4)])
    graphs = create_fw_bw_graph(_identity, one, ())
    with torch.no_grad(), Moved() as backward:
        sdpa_dense_backward(q, k, v, out, lse, torch.randn_like(out), None, *graphs, mask, *rest)
    assert forward.bytes / SCORES + 20.0 + 14.0 == FORWARD_SCORE_BYTES
    assert backward.bytes / SCORES == BACKWARD_SCORE_BYTES
