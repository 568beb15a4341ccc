"""Heads of latent attention in eager torch: what is concatenated forward and backward, as torch runs it on a CPU.

torch concatenates with vector loads only where all parts are contiguous (aten/src/ATen/native/cuda/Shape.cu, cat_out_cuda).
"""

import torch
from physics_jobs import job
from torch.utils._python_dispatch import TorchDispatchMode

from steptime.job.assembly import Assembly
from steptime.model.latent_heads import JOINED

TOKENS, HEADS, NOPE, ROPE, VALUE = 8, 2, 16, 8, 16
MLA = {
    "kind": "mla", "kv_lora_rank": 32, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
}  # fmt: skip


class Joined(TorchDispatchMode):
    """Elements of concatenations of which a part is not contiguous, and of all others."""

    def __init__(self):
        super().__init__()
        self.strided, self.contiguous = 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.__name__.startswith("cat"):
            if all(part.is_contiguous() for part in args[0]):
                self.contiguous += out.numel()
            else:
                self.strided += out.numel()
        return out


def heads(q, kv, k_pe):
    """pytorch/torchtitan@b5bcd76c torchtitan/models/deepseek_v3/model.py, Attention.forward, without the rotation."""
    q_nope, q_pe = torch.split(q, [NOPE, ROPE], dim=-1)
    q = torch.cat([q_nope, q_pe.clone()], dim=-1)
    k_nope, v = torch.split(kv, [NOPE, VALUE], dim=-1)
    k = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, HEADS, -1)], dim=-1)
    return q, k, v


def test_elements_joined():
    """Forward q and k, backward the gradients of q and of keys and values: all with a slice or a broadcast among their parts."""
    q, kv, k_pe = (
        torch.randn(1, TOKENS, *rest, requires_grad=True)
        for rest in ((HEADS, NOPE + ROPE), (HEADS, NOPE + VALUE), (ROPE,))
    )
    with Joined() as forward:
        made = heads(q, kv, k_pe)
    gradients = [torch.randn(t.shape) for t in made]
    with Joined() as backward:
        torch.autograd.backward(made, gradients)
    performance = {"rope_impl": "composite"}
    ops = (
        Assembly(job("fsdp2", dp=2, model={"attention": MLA, "n_q_heads": HEADS}, performance=performance)).kinds[0].ops
    )
    [ours] = [op for op in ops if op.name == "attn.join"]
    assert (forward.contiguous, backward.contiguous) == (0, 0)
    assert ours.forward_by_element.elements == JOINED * forward.strided
    assert ours.backward_by_element.elements == JOINED * backward.strided
