"""What torch holds between the gradients of the inputs and those of the weights of one layer, storage by storage.

torch's own stage_backward_input and stage_backward_weight (torch/distributed/pipelining/_backward.py) run on a layer of
`torch_blocks`. Zero tolerance for what is held. The peak of the first half may be larger by one of two tensors: a norm's weight
gradient, which the fused norm of `torch_blocks` makes at once where aten's kernel leaves it out, or the gradient of up's input,
which autograd makes before it comes to a composite gate's activation.
"""

from __future__ import annotations

import pytest
import torch
from live_bytes import LiveBytes
from test_torch_peaks import SHAPES
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch_blocks import Kernels
from torch_jobs import Layout, torch_job
from torch_ours import built

from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories
from steptime.model.model import Model

KINDS = {
    "llama": {},
    "qk norm": {"qk_norm": True},
    "relu mlp": {"glu": False, "activation": "relu", "norm": "layernorm"},
}
KERNELS = {
    "flash": Kernels(),
    "fused activation": Kernels(activation="fused"),
    "unfused": Kernels(attention="unfused"),
    "fp32": Kernels(precision="fp32"),
}


def torch_holds(model: Model, kernels: Kernels, seqlen: int) -> tuple[int, int, int]:
    """Bytes alive after the inputs' gradients, their peak, and the peak of the weights' gradients; no weight, no table."""
    whole = built(model, kernels, seqlen)
    block, weights = whole.blocks[0], list(whole.blocks[0].parameters())
    tables = [t for t in (whole.cos, whole.sin, whole.mask) if t is not None]
    known = sum(t.untyped_storage().nbytes() for t in [*weights, *tables])
    with LiveBytes([*weights, *tables]) as live:
        x = torch.randn(1, seqlen, model.hidden_sz, dtype=kernels.dtype).requires_grad_()
        y = block(x, whole.cos, whole.sin, whole.mask)
        grad = torch.ones_like(y)
        live.forget()
        outputs, grads = [y], [grad]
        del y, grad
        groups = stage_backward_input(outputs, grads, [x], iter(weights))[1]
        during = live.peak.total - outputs[0].untyped_storage().nbytes()  # the stage's output is counted apart
        outputs.clear()
        grads.clear()
        x.grad = None
        live.look("kept")
        live.forget()
        live.look("kept")
        kept = live.peak.total
        del x
        stage_backward_weight(iter(weights), groups)
        after = live.peak.total
    return kept - known, during - known, after - known


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["wide mlp", "gqa"])
def test_one_layer(shape, kind, kernels):
    model = Model(**SHAPES[shape], **KINDS[kind])
    kept, during, after = torch_holds(model, kernels, 64)
    memories = PartMemories(Assembly(torch_job(model, kernels, 64, Layout(micro_batches=2))))
    (layer,) = memories.plain
    split = memories.split_part(layer)
    assert split.kept == kept
    x = 64 * model.hidden_sz * kernels.dtype.itemsize
    assert during - split.inputs.bytes in {0, x // 64, x}
    assert after <= split.kept + split.weights
