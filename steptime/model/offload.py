"""Fine-grained activation offload of Megatron-Core: tensors that modules of a layer keep for backward are moved to host memory.

Source: megatron/core/pipeline_parallel/fine_grained_activation_offload.py (megatron-core 0.16.1); who opens and commits a group:
transformer_layer.py, attention.py, multi_latent_attention.py and moe/experts.py of megatron/core/transformer.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from steptime.base.num import Num, same
from steptime.model.ops import Gemm, Op, Tensor
from steptime.model.segments import Segment, depths, kept_names, runs, saved_by

LEAST_ELEMENTS = 2.0**20
"""Tensors with fewer elements are not moved (min_offloaded_tensor_size, 1024 * 1024)."""


class Module(NamedTuple):
    """The ops of one module, and the op after which their kept tensors are sent."""

    name: str
    ops: range
    commit: int


class Copy(NamedTuple):
    """A tensor saved by one op: a storage that two ops save is sent twice, and two copies come back (tensor_push)."""

    name: str
    freed: int
    """The op after whose backward the returned copy is freed."""
    moved: bool
    """Whether the tensor leaves the device: not where another op keeps it, nor where a replay makes it again anyway."""


class OffloadGroup(NamedTuple):
    """Tensors that one module sends; `next_at`: the op before whose backward the previous layer's group starts to come back."""

    module: Module
    copies: list[Copy]
    next_at: int


def modules_of(ops: list[Op]) -> list[Module]:
    """The modules of a layer, or of each layer of multi-token prediction."""
    stretches = depths(ops) or [range(len(ops))]
    return [module for stretch in stretches for module in of_layer(ops, stretch)]


def of_layer(ops: list[Op], stretch: range) -> list[Module]:
    """The modules of one layer in the order in which they begin."""

    def of(role: str) -> list[range]:
        return [run for run in runs(ops, {role}) if run.start in stretch]

    cores, norms, found = of("core_attn"), of("norm"), list[Module]()
    core = cores[0] if cores else range(stretch.start, stretch.start)
    before = [norm for norm in norms if norm.start < core.start]
    after = [norm for norm in norms if norm.start >= core.stop]
    for norm in before[:1]:
        found.append(Module("attn_norm", norm, after[0].start - 1 if after else stretch[-1]))
        found.append(Module("qkv_linear", range(norm.stop, core.start), core.start - 1))
    found += [Module(name, run, run[-1]) for name in ("core_attn", "attn_proj") for run in of(name)[:1]]
    found += [Module("mlp_norm", norm, stretch[-1]) for norm in after[:1]]
    products = [i for i in stretch if isinstance(ops[i], Gemm) and ops[i].role == "moe"]
    if len(products) > 1:
        up, down = products[0], products[-1]
        found += [Module("expert_fc1", range(up, up + 1), up), Module("moe_act", range(up + 1, down), down)]
    return found


def groups(ops: list[Op], x: Tensor, segments: list[Segment], names: AbstractSet[str]) -> list[OffloadGroup]:
    """What the named modules of a part send in forward; a tensor leaves the device where no other op keeps it too.

    Hooks send what an op saves, discarded outputs included: their copies come back in addition to the recomputed tensors
    (on_save_for_backward; random.py, CheckpointWithoutOutput).

    Of the layer before a group comes back whenever the backward of a module is done (on_group_start_backward), the one that was
    sent last first: all of a layer is there before its backward begins, as the chunk that runs backward first sends none of its
    last layer (post_warmup_callback).
    """
    if not names:
        return []
    chosen = [module for module in modules_of(ops) if module.name in names]
    home = {i: module for module in chosen for i in module.ops}
    elements = {tensor.name: tensor.elements for tensor in (x, *(t for op in ops for t in op.allocates))}
    copies: dict[int, list[Copy]] = {module.ops.start: [] for module in chosen}
    kept = set(kept_names(ops, segments))
    for name, savers in saved_by(ops, segments).items():
        sent = [i for i in savers if i in home and same(large(ops[i], elements[name]))] if name in elements else []
        moved = name in kept and len(sent) == len(savers)
        for i in sent:
            copies[home[i].ops.start].append(Copy(name, i, moved))
    done = sorted((module.ops.start - 1 for module in chosen), reverse=True)
    sent_last_first = sorted(chosen, key=lambda module: -module.commit)
    return [
        OffloadGroup(module, copies[module.ops.start], at) for module, at in zip(sent_last_first, done, strict=True)
    ]


def large_tensors(ops: list[Op], x: Tensor, names: AbstractSet[str]) -> list[Num]:
    """Which tensors that the named modules read or save are large enough to be sent: what decides the groups of a column."""
    elements = {tensor.name: tensor.elements for tensor in (x, *(t for op in ops for t in op.allocates))}
    read = [
        (ops[i], name) for one in modules_of(ops) if one.name in names for i in one.ops for name in tensors_of(ops[i])
    ]
    return [large(op, elements[name]) for op, name in read if name in elements]


def tensors_of(op: Op) -> dict[str, None]:
    """The tensors that an op may save."""
    return dict.fromkeys((*op.inputs, *op.saves, *(t.name for t in op.outputs)))


def large(op: Op, elements: Num) -> Num:
    """Whether what an op saves is large enough to be sent.

    Grouped products save the rows of each expert by themselves, views of one storage (TransformerEngine
    pytorch/module/grouped_linear.py, torch.split): all of it stays on the device if one expert has too few rows; one always has
    less than the mean.
    """
    if isinstance(op, Gemm) and op.grouped and not same(op.count == 1.0):
        return elements / op.count > LEAST_ELEMENTS
    return elements >= LEAST_ELEMENTS


def copied_bytes(found: Sequence[OffloadGroup], sizes: dict[str, Num]) -> Num:
    """Bytes that a part sends in forward and receives in backward."""
    return 1.0 * sum([sizes[copy.name] for group in found for copy in group.copies])


def moved_names(found: Sequence[OffloadGroup]) -> set[str]:
    """The tensors that leave the device."""
    return {copy.name for group in found for copy in group.copies if copy.moved}
