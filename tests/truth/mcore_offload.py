"""Megatron-Core's own manager of offloaded activations on a CPU: what it sends, what stays, what comes back in which backward.

Streams and events stand still, copies to the host are clones, and every tensor counts as one of the device; queues, hooks and
groups are Megatron's.
"""

from __future__ import annotations

import contextlib
import types

import jobs
import mcore_imports  # noqa: F401  Megatron is imported without CUDA
import pytest
import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as theirs

from steptime.job.assembly import Assembly
from steptime.model.offload import groups
from steptime.model.segments import find_segments

MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
Interface = theirs.FineGrainedActivationOffloadingInterface
LAYERS = 2


class Still:
    """A stream, an event or a pool that does nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None


@pytest.fixture
def log(monkeypatch):
    """What happens, in order: (kept | back | late, chunk, module)."""
    seen = []
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Still)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Still())
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for name, stub in (
        ("is_graph_capturing", bool),
        ("print_offload_summary_table", Still),
    ):
        monkeypatch.setattr(theirs, name, stub)
    engine = types.ModuleType("megatron.core.extensions.transformer_engine")
    engine.cpu_offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    monkeypatch.setitem(__import__("sys").modules, engine.__name__, engine)
    chunk = theirs.ChunkOffloadHandler
    own = {name: getattr(chunk, name) for name in ("bulk_reload_group", "tensor_pop", "should_bulk_offload")}

    def push(self, tensor):
        tag = (self._offloaded_group_index, self._tensor_count_current_group)
        self._tensor_count_current_group += 1
        self.offload_groups[self._offloaded_group_index - 1].push_tensor(tag, tensor)
        return tag

    def back(self):
        seen.append(("back", self.place, self._groups_to_reload[-1]._name))
        own["bulk_reload_group"](self)

    def pop(self, tag):
        group = self.offload_groups[tag[0] - 1]
        if isinstance(group._tensors.get(tag), tuple):
            seen.append(("late", self.place, group._name))
        return own["tensor_pop"](self, tag)

    def sends(self):
        sent = own["should_bulk_offload"](self)
        if not sent:
            seen.append(("kept", self.place, self._groups_to_offload[-1]._name))
        return sent

    patches = {
        "tensor_push": push, "bulk_reload_group": back, "tensor_pop": pop, "should_bulk_offload": sends,
        "tensor_need_offloading_checker": lambda *_: True, "reload": lambda _, state, **__: state[1].clone(),
        "offload": lambda _, tensor, *__, **___: ("cpu", tensor.clone(), False),
    }  # fmt: skip
    for name, patch in patches.items():
        monkeypatch.setattr(chunk, name, patch)
    theirs.PipelineOffloadManager.reset_instance()
    yield seen
    theirs.PipelineOffloadManager.reset_instance()


def module(name, x):
    with Interface(True, x, name) as inner:
        y = inner * inner
    return Interface.group_commit(y, name=name, forced_released_tensors=[])


def layer(x):
    """Groups as TransformerLayer opens and commits them: the norms' after the residual, the activation's after its product."""
    with Interface(True, x, "attn_norm") as inner:
        normed = inner * inner
    y = module("attn_proj", module("core_attn", module("qkv_linear", normed)))
    x = Interface.group_commit(x + y, name="attn_norm", forced_released_tensors=[])
    with Interface(True, x, "mlp_norm") as inner:
        normed = inner * inner
    up = module("expert_fc1", normed)
    with Interface(True, up, "moe_act") as inner:
        act = inner * inner
    down = Interface.group_commit(2.0 * act, name="moe_act", forced_released_tensors=[])
    return Interface.group_commit(x + down, name="mlp_norm", forced_released_tensors=[])


def forward(chunk, vpp, microbatch):
    Interface.init_chunk_handler(vpp, chunk, 1)
    manager = theirs.PipelineOffloadManager.get_instance()
    if manager._is_warmup:
        manager._cur_forward_chunk.place = (chunk, microbatch)
    x = torch.full((2, 2), 0.1, requires_grad=True)
    for _ in range(LAYERS):
        x = layer(x)
    return x


def run(order, vpp):
    for _ in range(2):  # the first step warms up and sends all
        held = {}
        for kind, chunk, microbatch in order:
            if kind == "F":
                held[chunk, microbatch] = forward(chunk, vpp, microbatch)
            else:
                held.pop((chunk, microbatch)).sum().backward()
        Interface.reset()


def test_a_layer_comes_back_while_the_one_before_it_in_backward_runs(log):
    """Two chunks, two micro-batches of each in flight: nothing is late, and the order is that of `groups`."""
    warm = [("F", c, m) for c in (0, 1) for m in (0, 1)]
    run([*warm, *(("B", c, m) for c in (1, 0) for m in (0, 1))], vpp=2)
    seen = log[len(log) - log[::-1].index(("kept", (1, 0), "qkv_linear")) - 1 :]
    assert not [event for event in seen if event[0] == "late"]
    assert {event[1] for event in seen if event[0] == "kept"} == {(1, 0)}  # the last layer of what runs backward first
    back = [name for kind, _, name in seen if kind == "back"]
    assert len(back) == (4 * LAYERS - 1) * len(MODULES)
    assert [back[i : i + 7] for i in range(0, len(back), 7)] == [ours()] * (4 * LAYERS - 1)


def ours():
    """The order in which the groups of a layer of Mixtral come back."""
    model = {"preset": "mixtral-8x7b", "n_layers": 1}
    part = Assembly(jobs.job(model, performance={"offload_modules": list(MODULES)})).kinds[0]
    return [
        group.module.name
        for group in groups(part.ops, part.x, find_segments(part.ops, frozenset()), frozenset(MODULES))
    ]
