"""Memory of a job's parts with its recomputation, and of the chunks that contain them, for one micro-batch."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import cached_property, reduce
from typing import TYPE_CHECKING

from steptime.base.num import Num, is_column, maximum, where
from steptime.job.assembly import Assembly, Chunk, Runs, take
from steptime.job.job import Job
from steptime.job.parts import Part
from steptime.memory.chunked_loss import in_chunks, standing_bytes
from steptime.memory.forward_walk import walk_forward
from steptime.memory.ledger import NO_BYTES, PartMemory, Peak, in_allocator
from steptime.memory.op_walk import Autograd, chunk_peaks, kept_by_part, walk_part

if TYPE_CHECKING:
    from steptime.memory.split_backward import SplitMemory


class PartMemories:
    """Memory of each part of a job with its recomputation; each is walked once."""

    def __init__(self, assembly: Assembly, *, weight_grads_stay: bool = False) -> None:
        """`weight_grads_stay`: gradients of a part's parameters are held until its backward ends."""
        self.assembly = assembly
        job, software = assembly.job, assembly.job.software
        itemsize = software.itemsize if weight_grads_stay else weight_grad_itemsize(job)
        self.autograd = Autograd(
            job.parallelism.tp,
            assembly.experts,
            itemsize,
            weight_grads_stay,
            software.activations.recompute_stops_early,
            software.activations.comm_buffer,
            software.kernels.compile != "none",
        )
        self.recompute = job.recompute
        self.tied = job.model.tie_embeddings
        self.embedding = self.walk(assembly.embedding)
        self.head = self.walk(assembly.head, assembly.head_modules)
        self._start()

    def _start(self) -> None:
        """Start without any assembled part."""
        self._chunks: dict[tuple[object, ...], PartMemory] = {}
        self._split: dict[Part, SplitMemory] = {}
        self._groups: dict[Runs, PartMemory] = {}

    @cached_property
    def plain(self) -> dict[Part, PartMemory]:
        """A layer of each kind, nothing recomputed."""
        return {part: self.walk(part) for part in self.assembly.kinds}

    @cached_property
    def selective(self) -> dict[Part, PartMemory]:
        """A layer of each kind with the named modules recomputed."""
        modules = self.recompute.modules
        return {part: self.walk(part, modules) for part in self.assembly.kinds} if modules else self.plain

    def walk(self, part: Part, modules: AbstractSet[str | float] = frozenset()) -> PartMemory:
        """One part's walk; the gradient of a tied head's weight is made with the embedding's."""
        found = self.walked(part, modules)
        if part is not self.assembly.head:
            return found
        mine = [p.elements for p in self.assembly.local_head_params if not (self.tied and p.param.vocab)]
        found = found._replace(n_params=sum(mine))
        return with_more(found, 0.0, self.chunks_hold(part)) if in_chunks(self.assembly.job) else found

    def chunks_hold(self, head: Part) -> Num:
        """Bytes that a loss in chunks holds besides, the head's own gradient included where it comes into being, unsharded."""
        job = self.assembly.job
        if not self.autograd.weight_grads_stay or job.zero_level >= 2:
            return standing_bytes(head)
        weight = next((p.elements for p in head.registered_params if p.param.vocab), 0.0)
        return standing_bytes(head) + weight * job.software.bytes_of(job.software.states.main_grad_dtype)

    def walked(self, part: Part, modules: AbstractSet[str | float], *, reentrant: bool = False) -> PartMemory:
        """The walk of a part's ops, made once for all jobs that share the part."""
        autograd = self.autograd_of(part)
        if reentrant:
            autograd = autograd._replace(reentrant=True)
        if is_column(autograd.tp) or is_column(autograd.experts):  # no keys of a mapping
            return walk(part, modules, autograd)
        key = (frozenset(modules), autograd)
        if key not in part.walks:
            part.walks[key] = walk(part, modules, autograd)
        found: PartMemory = part.walks[key]
        return found

    def autograd_of(self, part: Part) -> Autograd:
        """The framework's backward, with those modules of the part that are offloaded to host memory."""
        offload = self.assembly.offload_modules(part)
        return self.woven._replace(offload=offload) if offload else self.woven

    @cached_property
    def woven(self) -> Autograd:
        """The framework's backward, where it overlaps the forward of another micro-batch."""
        job = self.assembly.job
        woven = bool(job.software.overlap.ep) and job.model.moe is not None and not job.single_microbatch
        return self.autograd._replace(woven=True) if woven else self.autograd

    def split(self, chunk: Chunk) -> SplitMemory:
        """One chunk of one micro-batch whose backward is split."""
        from steptime.memory.split_backward import chunk_split

        assembly = self.assembly
        parts = [(1, assembly.embedding, self.embedding)] if chunk.embedding else []
        parts += [(count, part, self.plain[part]) for part, count in chunk.runs]
        parts += [(1, assembly.head, self.head)] if chunk.head else []
        return chunk_split([(count, memory, self.split_part(part)) for count, part, memory in parts])

    def split_part(self, part: Part) -> SplitMemory:
        """One part of one micro-batch whose backward is split; walked once."""
        if part not in self._split:
            from steptime.memory.split_backward import walk_split

            self._split[part] = walk_split(part.ops, part.x, part.out, self.autograd)
        return self._split[part]

    def checkpointed(self, layers: Runs) -> PartMemory:
        """A group of layers of which only the first one's input is kept, run again before its backward.

        While a layer's backward runs, the layers before it hold all they save; forward holds one layer at a time.
        """
        if layers not in self._groups:
            x = layers[0][0].x.bytes
            forward = replay = backward = NO_BYTES
            below: Num = 0.0 if input_kept(layers[0][0]) else x
            n_params = sum([count * part.n_params for part, count in layers])
            for part, count in layers:
                forward = forward.worse(self.passing(part))
                plain = self.plain[part]
                below = below + (count - 1) * plain.saved
                replay = replay.worse(Peak(below + plain.forward.bytes + x, plain.forward.op))
                recomputed = self.recomputed_backward(part)
                backward = backward.worse(Peak(below + recomputed.bytes, recomputed.op))
                below = below + plain.saved
            self._groups[layers] = PartMemory(1.0 * x, forward, replay.worse(backward), n_params)
        return self._groups[layers]

    def recomputed_backward(self, part: Part) -> Peak:
        """The peak of the backward of a layer that ran again; its output, which nothing saves, is freed before."""
        return self.reentrant(part) if self.assembly.job.software.activations.reentrant else self.plain[part].backward

    def reentrant(self, part: Part) -> Peak:
        """The same with its output, which a reentrant checkpoint holds (torch/utils/checkpoint.py, CheckpointFunction)."""
        found = self.walked(part, frozenset(), reentrant=True).backward
        return Peak(found.bytes + part.sizes[part.out], found.op)

    def passing(self, part: Part) -> Peak:
        """The peak of a forward of which only the input is kept."""
        return passing(part)

    def layers(self, chunk: Chunk) -> list[tuple[int, Runs, PartMemory]]:
        """The layers of a chunk in depth order: how often a group of layers is repeated, the group (of one), its memory."""
        if self.recompute.granularity != "full":
            return [(count, ((part, 1),), self.selective[part]) for part, count in chunk.runs]
        size = self.recompute.n_layers[chunk.depth]
        if self.recompute.method == "every":
            single = [group for times, group in groups_of(chunk.runs, 1) for _ in range(times)]
            chosen = [(group, i % size == size - 1) for i, group in enumerate(single)]
            return [(1, of, self.checkpointed(of) if replays else self.plain[of[0][0]]) for of, replays in chosen]
        if self.recompute.method == "block":
            first, rest = take(chunk.runs, size)
            ones = groups_of(first, 1)
            plain = [(count, ((part, 1),), self.plain[part]) for part, count in rest]
            return [*((times, group, self.checkpointed(group)) for times, group in ones), *plain]
        return [(times, group, self.checkpointed(group)) for times, group in groups_of(chunk.runs, size)]

    def resident(self, chunk: Chunk) -> list[tuple[int, Runs, PartMemory]]:
        """The layers of a chunk as in `layers`, without what saved-tensor hooks offload to host memory."""
        performance = self.assembly.job.performance
        share = float(performance.activation_offload or 0.0)
        if share == 0.0:
            return self.layers(chunk)
        neighbor = 0.0 if self.assembly.job.software.overlap.offload is False else share
        return [(count, group, hooked(memory, share, neighbor)) for count, group, memory in self.layers(chunk)]

    def chunk(self, chunk: Chunk) -> PartMemory:
        """One chunk of one micro-batch; walked once for all chunks that hold the same parts."""
        sizes = self.recompute.n_layers
        key = (chunk.runs, chunk.embedding, chunk.head, sizes[chunk.depth] if sizes else 0)
        if key not in self._chunks:
            self._chunks[key] = chunk_peaks(self.parts(chunk))
        return self._chunks[key]

    def parts(self, chunk: Chunk) -> list[tuple[int, PartMemory]]:
        """The parts of a chunk in depth order, with the layer of the next backward that has come back from the host.

        The backward of a part that sends something has counted that.
        """
        found = self.alone(chunk)
        if not self.assembly.job.performance.offload_modules:
            return found
        most = reduce(maximum, [self.selective[part].ahead for part in self.assembly.kinds])
        sends = [(n, part, part.ahead > 0.0) for n, part in found]
        return [(n, with_more(part, where(sent, part.ahead, most), where(sent, 0.0, most))) for n, part, sent in sends]

    def alone(self, chunk: Chunk) -> list[tuple[int, PartMemory]]:
        """The parts of a chunk in depth order, equal neighbors joined.

        The gradient of a tied head's weight, or of the embedding in multi-token prediction, is held in autograd until the
        embedding's own is computed, during the backward of every layer between them; then both exist together with their sum.
        """
        parts = [(count, memory) for count, _, memory in self.resident(chunk)]
        embedding = self.embedding
        model = self.assembly.job.model
        if chunk.embedding and chunk.head and (model.tie_embeddings or model.mtp) and model.lora is None:
            parts = [(count, with_more(part, 0.0, self.waiting_gradient)) for count, part in parts]
            embedding = with_more(embedding, 0.0, 2.0 * self.waiting_gradient)
        if chunk.embedding:
            parts = [(1, embedding), *parts]
        return [*parts, (1, self.head)] if chunk.head else parts

    @property
    def waiting_gradient(self) -> Num:
        """Bytes of the embedding's gradient before it is accumulated; looked up for multi-token prediction it is dense."""
        job, itemsize = self.assembly.job, self.autograd.weight_grad_itemsize
        table = next((p.elements for p in self.assembly.embedding.registered_params if p.param.vocab), 0.0)
        return (max(itemsize, job.software.itemsize) if job.model.mtp else itemsize) * table


def walk(part: Part, modules: AbstractSet[str | float], autograd: Autograd) -> PartMemory:
    """The walk of a part's ops; its backward overlaps another micro-batch's forward where the schedule alternates them."""
    sizes = in_allocator(part.ops, part.sizes)
    if autograd.woven:
        from steptime.memory.woven import walk_woven

        saved = kept_by_part(part.ops, part.x, modules, autograd, sizes)
        found = walk_woven(part.ops, part.x, part.out, saved, autograd)
    else:
        found = walk_part(part.ops, part.x, part.out, modules, autograd, sizes)
    return found._replace(n_params=part.n_params)


def passing(part: Part) -> Peak:
    """The peak of a part's forward of which only the input is kept."""
    return walk_forward(part.ops, in_allocator(part.ops, part.sizes), [part.x.name], part.x.name, part.out)


def groups_of(runs: Runs, size: int) -> list[tuple[int, Runs]]:
    """Layers in groups of `size` in depth order, the last one possibly smaller; equal neighboring groups with their count."""
    found: list[tuple[int, Runs]] = []
    while runs:
        part, count = runs[0]
        if count >= size:  # whole groups of one kind at once
            times = count // size
            group: Runs = ((part, size),)
            runs = take(runs, times * size)[1]
        else:
            times, (group, runs) = 1, take(runs, size)
        if found and found[-1][1] == group:
            times += found.pop()[0]
        found.append((times, group))
    return found


def input_kept(part: Part) -> bool:
    """Whether a part keeps its own input (a composite norm keeps an fp32 copy instead)."""
    return any(part.x.name in op.saves for op in part.ops)


def weight_grad_itemsize(job: Job) -> float:
    """Bytes per element of a weight gradient besides the one that it is added to; 0 where it is that one.

    Megatron without fusion frees it in the parameter's hook; torch's first micro-batch keeps it as the gradient.
    """
    software = job.software
    if software.states.grad_accumulation_fusion:
        return software.itemsize if software.states.dummy_wgrads == "freed" else 0.0
    own = (
        software.bytes_of(software.states.main_grad_dtype) == software.itemsize
        and not software.states.gradients_persist
    )
    return 0.0 if own and job.single_microbatch else software.itemsize


def hooked(of: PartMemory, share: float, neighbor: float) -> PartMemory:
    """A layer that sends a `share` of what it keeps to the host once its forward is done, and has all of it back in its backward.

    `neighbor`: the share of an equal neighbor that is still, or already, on the device: of the layer before in forward, of the
    next one to run in backward. torchtune's hooks hold up to five tensors that are on their way
    (torchtune/training/_activation_offloading.py, max_fwd_stash_size); one layer each way is assumed.
    """
    forward, backward = (peak._replace(bytes=peak.bytes + neighbor * of.saved) for peak in (of.forward, of.backward))
    return of._replace(saved=(1.0 - share) * of.saved, forward=forward, backward=backward)


def with_more(part: PartMemory, forward: Num, backward: Num) -> PartMemory:
    """A part whose passes run while `bytes_` of other tensors are held."""
    return part._replace(
        forward=Peak(part.forward.bytes + forward, part.forward.op),
        backward=Peak(part.backward.bytes + backward, part.backward.op),
    )
