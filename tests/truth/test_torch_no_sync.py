"""FSDP 1 and 2 whose last micro-batch alone reduces gradients, under a fake process group: collectives and peaks of a step.

Zero tolerance.
"""

from __future__ import annotations

import pytest
from test_torch_fsdp import issued, stated
from torch_blocks import Kernels
from torch_fsdp import Fsdp
from torch_jobs import Layout, covering, held, torch_job

from steptime.answer.result import estimate
from steptime.model.model import Model

SHAPES = {
    "wide mlp": Model(n_layers=3, hidden_sz=64, inter_sz=512, n_q_heads=8, n_kv_heads=8, head_dim=8, vocab_sz=80),
    "large vocabulary": Model(n_layers=1, hidden_sz=32, inter_sz=64, n_q_heads=4, vocab_sz=1000),
    "padded": Model(n_layers=2, hidden_sz=60, inter_sz=150, n_q_heads=4, n_kv_heads=2, head_dim=16, vocab_sz=251),
}
OPTIONS = {
    "default": Fsdp(no_sync=True),
    "no reshard": Fsdp(no_sync=True, reshard_blocks=False),
    "as AutoModel has it": Fsdp(no_sync=True, params="bf16", reshard_blocks=False, reshard_after_backward=False),
    "as accelerate has it": Fsdp(no_sync=True, reduce="bf16"),
    "bf16 parameters": Fsdp(no_sync=True, params="bf16", reduce="bf16"),
    "FSDP 1": Fsdp(no_sync=True, version=1, reduce="bf16"),
    "FSDP 1, fp32 reduction": Fsdp(no_sync=True, version=1),
    "SHARD_GRAD_OP": Fsdp(no_sync=True, version=1, reduce="bf16", reshard_blocks=False),
}
MORE = {
    "one group": Layout(8, fsdp=Fsdp(no_sync=True, wrap="model")),
    "one group, bf16": Layout(8, fsdp=Fsdp(no_sync=True, wrap="model", reduce="bf16")),
    "2 replicas": Layout(8, replicas=2, fsdp=Fsdp(no_sync=True)),
    "2 replicas, bf16": Layout(8, replicas=2, fsdp=Fsdp(no_sync=True, reduce="bf16")),
}
KERNELS = {"none": Kernels(), "full": Kernels(recompute="full")}


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_collectives(option, micro_batches):
    """Of three micro-batches the first, one between, and the last."""
    layout = Layout(8, micro_batches=micro_batches, fsdp=OPTIONS[option])
    assert issued(SHAPES["padded"], Kernels(), layout) == stated(SHAPES["padded"], Kernels(), layout)


LENGTHS = {"8": (1, 8), "two of 8": (2, 8), "three of 32": (3, 32), "three of 128": (3, 128)}


@pytest.mark.parametrize(
    ("shape", "option", "recompute", "length"),
    covering(("wide mlp", "large vocabulary"), OPTIONS, KERNELS, LENGTHS),
)
def test_peak(shape, option, recompute, length):
    """Short sequences peak in the sums of gradients or the optimizer, long ones in a block or the loss. Any two names meet."""
    micro_batches, seqlen = LENGTHS[length]
    kernels, layout = KERNELS[recompute], Layout(8, micro_batches=micro_batches, fsdp=OPTIONS[option])
    torch_holds = held(SHAPES[shape], kernels, seqlen, layout)
    ours = estimate(torch_job(SHAPES[shape], kernels, seqlen, layout)).memory.stages[0]
    assert (ours.allocated_bytes, ours.optimizer_bytes) == (torch_holds.peak, torch_holds.optimizer), torch_holds.op


@pytest.mark.parametrize(
    ("shape", "layout", "length"), covering(("wide mlp", "large vocabulary"), MORE, ("two of 8", "three of 32"))
)
def test_peak_of_other_layouts(shape, layout, length):
    """Any two names meet."""
    micro_batches, seqlen = LENGTHS[length]
    layout = MORE[layout]._replace(micro_batches=micro_batches)
    torch_holds = held(SHAPES[shape], Kernels(), seqlen, layout)
    ours = estimate(torch_job(SHAPES[shape], Kernels(), seqlen, layout)).memory.stages[0]
    assert ours.allocated_bytes == torch_holds.peak, torch_holds.op


@pytest.mark.parametrize(
    ("shape", "option"), covering(("wide mlp", "large vocabulary"), ("default", "as accelerate has it", "FSDP 1"))
)
def test_peak_of_a_tied_head(shape, option):
    """Its gradient waits in autograd for the embedding's, even where others are added to their sums at once.

    The first shape peaks in a layer's backward, the second one where those two gradients lie beside their sum.
    """
    model = SHAPES[shape].model_copy(update={"tie_embeddings": True})
    seqlen, layout = {"wide mlp": 128, "large vocabulary": 8}[shape], Layout(8, micro_batches=3, fsdp=OPTIONS[option])
    torch_holds = held(model, KERNELS["full"], seqlen, layout)
    ours = estimate(torch_job(model, KERNELS["full"], seqlen, layout)).memory.stages[0]
    assert ours.allocated_bytes == torch_holds.peak, torch_holds.op
