"""Model states and overhead of one device, to the byte."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.fsdp.sharded_states import states as sharded_states
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.memory.allocator_blocks import further_ends, replayed
from steptime.memory.block_rests import block_rest_bytes
from steptime.memory.buckets import Pieces, run_buckets
from steptime.memory.states import Bucket, chunk_buckets, gradient_sets, stage_states

PARAMS = 590_464


def states(software: str, **said) -> tuple[float, float, float]:
    stage = estimate(job(software, **said)).memory.stages[0]
    return stage.params_bytes, stage.gradients_bytes, stage.optimizer_bytes


@pytest.mark.parametrize(
    ("level", "dp", "shards"),
    [
        (1, 3, (590_464, 590_464, 196_822)),  # 590,464 / 3 = 196,821.33
        (2, 3, (590_464, 196_822, 196_822)),
        (1, 5, (590_464, 590_464, 118_093)),  # 118,092.8
        (1, 2, (590_464, 590_464, 295_232)),
        (0, 3, (590_464, 590_464, 590_464)),
    ],
)
def test_a_shard_is_rounded_up(level, dp, shards):
    """DeepSpeed pads its flat buffer to a multiple of the ranks: bf16 parameters and gradients, 12 bytes of fp32 states."""
    found = states("deepspeed", zero_level=level, dp=dp, microbatches=2)
    params, gradients, owned = shards
    assert found == (2 * params, 2 * gradients, 12 * owned)


def test_a_shard_of_gradients_is_there_from_the_start():
    """Of a single micro-batch ZeRO-1's whole gradients appear in backward, none at the loss, where 4096 tokens peak; ZeRO-2's
    halves lie in a partition of their own.
    """
    whole, halves = (states("deepspeed", zero_level=level, dp=2, seqlen=4096) for level in (1, 2))
    assert whole[1] == 0
    assert halves[1] == 2 * 295_232


def test_megatrons_buffers_are_padded_and_cut_evenly():
    """Buckets end at a multiple of lcm(3, 128) = 384, and the distributed optimizer holds parameters in a buffer of that length.

    590,464 = 1,537.67 * 384, so one bucket of 1,538 * 384 = 590,592 elements, a third of which is 196,864.
    """
    found = states("megatron-core", dp=3, n_param_buckets=1)
    assert found == (2 * 590_592, 4 * 590_592, 12 * 196_864)


def test_torchs_reducer_holds_copies():
    """Buckets lie beside the gradients (DistributedDataParallel, gradient_as_bucket_view False): 2 + 2 bytes; alone, none."""
    assert states("torch", dp=2, microbatches=2)[1] == 4 * PARAMS
    assert states("torch", dp=1, microbatches=2)[1] == 2 * PARAMS


@pytest.mark.parametrize(
    ("layout", "communicators"),
    [
        ({}, 0),
        ({"tp": 2}, 1),
        ({"dp": 2}, 1),
        ({"pp": 2}, 1),
        ({"pp": 2, "model": {"tie_embeddings": True}}, 2),  # and the first and last stage's group
        ({"tp": 2, "model": {"tie_embeddings": True}}, 1),
        ({"cp": 2}, 2),  # the ring, and gradients over dp*cp
        ({"cp": 2, "dp": 2}, 2),
        ({"tp": 2, "pp": 2, "dp": 2, "cp": 2, "model": {"tie_embeddings": True}}, 5),
        # experts' exchange, and gradients over dp
        ({"dp": 2, "ep": 2, "model": {"moe": {"n_experts": 2, "experts_per_token": 1, "expert_inter_sz": 64}}}, 2),
    ],
)
def test_a_communicator_for_every_group_in_use(layout, communicators):
    """A quarter of a GiB each (assumed; NVIDIA/nccl#964 reports 544 to 688 MB with every protocol buffered), beside 0.5 GiB of
    context."""
    model = {"n_q_heads": 2} | layout.get("model", {})
    found = estimate(job(**(layout | {"model": model}))).memory.overhead_bytes
    assert found.communicators == communicators * 2**28
    assert found.context == 2**29


def buckets(**layout) -> float:
    """Reductions of a step of eight layers of 16,779,264 parameters and two tables of 131,072."""
    model = {"n_layers": 8, "hidden_sz": 1024, "inter_sz": 4096, "n_q_heads": 8, "vocab_sz": 128}
    rows = estimate(job(model=model, **layout)).collectives
    return sum(row.count_per_step for row in rows if row.name == "gradients")


@pytest.mark.parametrize(
    ("layout", "count"),
    [({"dp": 8}, 4), ({"dp": 40}, 4), ({"dp": 64}, 3), ({"dp": 32, "cp": 2}, 3), ({"dp": 64, "zero_level": 0}, 3)],
)
def test_buckets_grow_with_the_ranks(layout, count):
    """megatron/core/distributed/distributed_data_parallel.py:65, max(40e6, 1e6 * ranks); a bucket closes with the parameter that
    fills it. In backward order a layer has down 4,194,304, gate and up 8,388,608, a norm 1,024, qkv 3,145,728, projection
    1,048,576 and a norm.

    40e6: the head and two layers are 33.7e6, of the sixth layer down and gate and up fill 46.3e6. Its rest and two layers 37.8e6,
    down 41.9e6. The rest of that, a layer 29.4e6, and gate and up of the first 42.0e6. The rest: four buckets.
    64e6: the head and three layers are 50.5e6, of the fifth all but the projection 66.2e6. That and three layers 51.4e6, of the
    first 63.97e6 up to its norm, so qkv too. The rest: three.
    """
    assert buckets(**layout) == count


def test_reserved_memory_is_a_fifth_more_than_what_comes_and_goes():
    """States and buffers that stay lie in large blocks; the rest fragments by a fifth (runs on B200, MooreThreads/SimuMax)."""
    (stage,) = estimate(job(seqlen=512)).memory.stages
    fixed = stage.params_bytes + stage.gradients_bytes + stage.optimizer_bytes
    fixed += stage.buffers_bytes
    moving = stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes
    assert stage.buffers_bytes > 0
    assert moving > 0
    assert stage.reserved_bytes == pytest.approx(fixed + 1.2 * moving)


def test_fsdp_pads_rows_to_the_ranks():
    """A vocabulary of 1002 in halves has 501 rows a rank, 504 over four shards: twice 504 * 128, and the norm's 128."""
    layout = {"model": {"vocab_sz": 1002, "n_q_heads": 2}, "tp": 2, "dp": 4, "fsdp": {}}
    rows = {row.name: row.bytes for row in estimate(job("fsdp2", **layout)).collectives}
    assert rows["root parameters"] == 2 * (2 * 504 * 128 + 128)


def test_buckets_of_whole_gradients_have_no_padding():
    """3 and 4 elements, which nothing shards, follow one another; a bucket ends where it reaches its size."""
    assert run_buckets([([Pieces(3, 1), Pieces(4, 1)], 1)], 2, None, sharded=False) == [7]
    assert run_buckets([([Pieces(3, 1), Pieces(4, 1)], 1)], 2, 3, sharded=False) == [3, 4]
    assert run_buckets([([Pieces(1, 1)], 1)], 2, None, sharded=False) == [1]


def test_an_embedding_that_two_stages_hold_has_a_bucket_of_its_own():
    """131,072 elements, so that both ends cut it alike (param_and_grad_buffer.py, _does_param_require_new_bucket). The rest in
    one: two layers of 164,096, and on the last stage, before them in backward, the final norm's 128.
    """
    assembly = Assembly(job(model={"tie_embeddings": True, "n_layers": 4}, pp=2, dp=2, microbatches=2))
    found = [[of.elements for of in chunk_buckets(assembly, chunk)] for chunk in assembly.chunks]
    assert found == [[328_192, 131_072], [131_072, 328_320]]


def test_ends_of_blocks_of_each_tensor():
    """ZeRO 0, 23,552 words of 128 values: in fp32 11.5 MiB, whose block is 12, for the master and both moments, 1.5 MiB in
    all; in bf16 5.75 MiB, which share a block. Embedding and head: 3 MiB. A layer's tensors are below 10 MiB, and the flat
    gradients, 24.25 MiB, leave a rest that is cut off.
    """
    on = machine(compute_capability=9.0)
    assembly = Assembly(job(on=on, model={"vocab_sz": 23_552}, zero_level=0))
    assert block_rest_bytes(assembly, assembly.stages[0], []) == 3 * 2**20


def test_ends_of_blocks_of_flat_buffers():
    """ZeRO 1. Buckets of 2 and 0.875 Mi elements are 11.5 MiB of fp32 gradients, whose block is 12, and 5.75 of bf16 parameters,
    which share one. Those of experts, of 5.875 Mi elements: 23.5 of 24, and 11.75 of 12.
    """
    assembly = Assembly(job(on=machine(compute_capability=9.0), dp=2, zero_level=1))
    mib = 2**20
    dense = [Bucket(2 * mib, "dense"), Bucket(7 * mib // 8, "dense")]
    assert block_rest_bytes(assembly, assembly.stages[0], [dense]) == 0.5 * mib
    both = [*dense, Bucket(47 * mib // 8, "expert")]
    assert block_rest_bytes(assembly, assembly.stages[0], [both]) == (0.5 + 0.5 + 0.25) * mib


def test_ends_of_blocks_of_parameters_in_bf16():
    """ZeRO 0, 47,104 words of 128 values: 11.5 of 12 MiB in bf16; 23 of 24 in fp32, the master and both moments: 3.5 MiB, twice.
    All 12,386,944 elements have 49,547,776 B of gradients, of 48 MiB.
    """
    assembly = Assembly(job(on=machine(compute_capability=9.0), model={"vocab_sz": 47_104}, zero_level=0))
    rest = 48 * 2**20 - 49_547_776
    assert block_rest_bytes(assembly, assembly.stages[0], []) == 7 * 2**20 + rest


def test_ends_of_blocks_of_two_chunks():
    """The embedding and the first layer: 3.5 MiB as above, and 24,773,632 B of gradients of 24 MiB. The third has no end."""
    layout = {"pp": 2, "vpp": 2, "microbatches": 2, "zero_level": 0}
    assembly = Assembly(job(on=machine(compute_capability=9.0), model={"vocab_sz": 47_104, "n_layers": 4}, **layout))
    rest = 24 * 2**20 - 24_773_632
    assert block_rest_bytes(assembly, assembly.stages[0], []) == 3.5 * 2**20 + rest


def test_ends_of_blocks_of_experts():
    """Gate and up of an expert, 2 * 11,776 * 128 elements, are 11.5 of 12 MiB in fp32, three times; two experts in each of two
    layers. All others are shorter than 10 MiB; the gradients' 70.5 MiB leave more than 1 of 72.
    """
    moe = {"n_experts": 2, "expert_inter_sz": 11_776, "experts_per_token": 1}
    assembly = Assembly(job(on=machine(compute_capability=9.0), model={"moe": moe}, zero_level=0))
    assert block_rest_bytes(assembly, assembly.stages[0], []) == 2 * 2 * 3 * 0.5 * 2**20


LEAVES_ENDS = {"vocab_sz": 26_880}
"""7,209,600 elements, which is a multiple of 128: in fp32 28,838,400 B of 28 MiB, in bf16 14,419,200 of 14."""


@pytest.mark.parametrize(
    ("capability", "software", "performance", "bytes_"),
    [
        (9.0, "megatron-core", {}, 42 * 2**20 - 28_838_400 - 14_419_200),
        (9.0, "megatron-core", {"expandable_segments": True}, 0),
        (None, "megatron-core", {}, 0),
        (9.0, "nanotron", {}, 0),  # its buffers are not padded
        (9.0, "torch", {}, 0),
    ],
)
def test_whose_blocks_have_ends(capability, software, performance, bytes_):
    """Buckets that are not cut yet are those of the layout."""
    on = machine(compute_capability=capability)
    assembly = Assembly(job(software, on=on, model=LEAVES_ENDS, performance=performance, dp=2, zero_level=1))
    assert block_rest_bytes(assembly, assembly.stages[0], []) == bytes_


@pytest.mark.parametrize(
    ("runs", "sharded", "expected"),
    [
        # 0 to 1,000, 1,024 to 1,124; 1,152 to 2,152, 2,176 to 2,276; 2,304 to 3,304, a bucket of 3,328. Then 0 to 100; 128 to
        # 1,128, 1,152 to 1,252; 1,280 to 2,280, 2,304 to 2,404, one of 2,432
        ([([Pieces(1_000, 1), Pieces(100, 1)], 5)], True, [3_328, 2_432]),
        ([([Pieces(1_000, 1), Pieces(100, 1)], 5)], False, [1_000 * 3 + 200, 1_000 * 2 + 300]),
        # eight of 1,000 at multiples of 1,024: three close a bucket of 3,048, rounded to 3,072
        ([([Pieces(1_000, 8)], 1)], True, [3_072, 3_072, 2_048]),
        # each copy of a tied table has one of its own
        ([([Pieces(100, 1), Pieces(300, 2, alone=True), Pieces(70, 1)], 1)], True, [128, 384, 384, 128]),
        ([([Pieces(100, 1), Pieces(300, 2, alone=True), Pieces(70, 1)], 1)], False, [770]),
    ],
)
def test_tensors_laid_into_buckets(runs, sharded, expected):
    """dp 2, buckets of 2,500 elements: one closes with the tensor that fills it. Sharded, tensors start at multiples of 64 and
    buckets end at multiples of 128 (megatron/core/distributed/param_and_grad_buffer.py:627-742).
    """
    assert run_buckets(runs, 2, 2_500, sharded=sharded) == expected


HALF, QUARTER = 295_232, 147_616
AWAY, LORA = {"performance": {"cpu_offload": {"params": True}}}, {"model": {"lora": {"rank": 4}}}
ZERO, HPZ = {"zero_level": 3, "dp": 4}, {"zero_plus_plus": {"hpz_partition_size": 2}}
HOST = Machine(
    **machine(host_bytes_per_s=1.0).model_dump(exclude={"host"}), host={"memory_bytes": 1e15, "memory_bytes_per_s": 1.0}
)


@pytest.mark.parametrize(
    ("software", "layout", "expected"),
    [
        # fp32 parameters, gradients and two moments of a half
        ("fsdp2", {"fsdp": {}}, (4 * HALF, 4 * HALF, 8 * HALF, HALF, 0)),
        ("fsdp2", {"fsdp": {}} | AWAY, (0, 0, 0, 0, 16 * HALF)),
        # of 17,408 elements of adapters; half of what is frozen, in bf16
        ("fsdp2", {"fsdp": {}} | LORA, (4 * 8_704 + 2 * HALF, 4 * 8_704, 8 * 8_704, 8_704, 0)),
        ("fsdp2", {"fsdp": {}} | AWAY | LORA, (0, 0, 0, 0, 16 * 8_704 + 2 * HALF)),
        # bf16 parameters and gradients of a quarter, masters and moments; hpZ: bf16 parameters of a half besides
        ("deepspeed", ZERO, (2 * QUARTER, 2 * QUARTER, 12 * QUARTER, QUARTER, 0)),
        ("deepspeed", ZERO | HPZ, (2 * QUARTER + 2 * HALF, 2 * QUARTER, 12 * QUARTER, QUARTER, 0)),
        # ZeRO-Offload: parameters stay; masters, gradients, moments, and bf16 sums of gradients are the host's
        (
            "deepspeed",
            ZERO | {"performance": {"cpu_offload": {"optimizer": 1.0}}},
            (2 * QUARTER, 0, 0, 0, 18 * QUARTER),
        ),
    ],
)
def test_shards_of_what_is_trained_and_of_what_is_frozen(software, layout, expected):
    """Parameters, gradients, moments and masters on the device, how many it updates, and bytes in its host's memory."""
    plan = job(software, on=HOST, **({"dp": 2, "microbatches": 2} | layout))
    [found] = sharded_states(Assembly(plan))
    assert found[:3] == expected[:3]
    assert (found.owned, found.host_bytes, found.buckets) == (*expected[3:], [])


@pytest.mark.parametrize(
    ("level", "master", "bytes_"),
    [
        # gradients take 9,701,888 of the 16 MiB left, a copy 2 MiB, the first main weight all of the 4,978,176 behind it; the
        # copy goes, the second copy takes its place, and all else divides a new block of 20 MiB
        (0, "fp32", 4_978_176 - 4 * 2**20),
        # parameters' buffer 4,850,944, in units of 512 256 more; gradients; 2,224,128 are left. The old parameters go: 4 MiB. Of
        # the last rank's half the embedding's copy takes the 2,224,128 and goes, its main weight the 4 MiB, moments new memory
        (1, "fp32", 256),
        # no copy; a moment takes the 4 MiB, the other new memory, and 2 B an element of remainders all of the 2,224,128
        (1, "remainder", 256 + 2_224_128 - 2 * 2**20),
    ],
)
def test_ends_of_blocks_as_states_are_made_one_by_one(level, master, bytes_):
    """Of a vocabulary of 8,192 embedding and head have 2 MiB in bf16 and 4 MiB in fp32; the other tensors, below 1 MiB, are in
    another pool. All 2,425,472 elements have one flat buffer. A block of 20 MiB is cut, but for ends up to 1 MiB.
    """
    said = {"performance": {"master_dtype": master}, "model": {"vocab_sz": 8_192}}
    assembly = Assembly(job(on=machine(compute_capability=9.0), dp=2, microbatches=2, zero_level=level, **said))
    found = further_ends(assembly, 0, stage_states(assembly)[0])
    assert (found.bytes, found.stays, found.at_peak) == (bytes_, True, False)


@pytest.mark.parametrize(
    ("capability", "software", "performance", "level", "known"),
    [
        (9.0, "megatron-core", {}, 1, True),
        (None, "megatron-core", {}, 1, False),
        (9.0, "megatron-core", {"expandable_segments": True}, 1, False),
        (9.0, "megatron-core", {}, 2, False),
        (9.0, "torch", {}, 0, False),
        (9.0, "nanotron", {}, 1, False),  # gradients stay, in buffers that are not padded
        (9.0, "megatron-core", {"optimizer": "muon"}, 0, False),  # states that depend on a tensor's shape
    ],
)
def test_where_the_blocks_of_states_are_known(capability, software, performance, level, known):
    """torch's allocator on NVIDIA's devices, with blocks of fixed size, and Megatron's flat buffers of ZeRO 0 or 1."""
    plan = job(software, on=machine(compute_capability=capability), performance=performance, dp=2, zero_level=level)
    assert replayed(plan) == known


@pytest.mark.parametrize(("layout", "sets"), [({}, 1), ({"dp": 2}, 2), ({"cp": 2}, 2)])
def test_gradients_in_buckets_of_a_reducer(layout, sets):
    """torch's DistributedDataParallel has buckets of its own over all ranks that sum gradients, those of one sequence too."""
    assert gradient_sets(job("torch", **layout)) == sets


def test_parameters_that_are_on_the_host():
    """FSDP 2's CPUOffloadPolicy: neither the shard of parameters nor gradients and moments are on the device."""
    host = {"memory_bytes": 1e15, "memory_bytes_per_s": 1.0, "core_bytes_per_s": 1.0}
    on = Machine(**machine(host_bytes_per_s=1.0).model_dump(exclude={"host"}), host=host)
    offload = {"optimizer": 1.0, "params": True}
    [found] = sharded_states(Assembly(job("fsdp2", on=on, dp=2, performance={"cpu_offload": offload})))
    assert (found.params_bytes, found.gradients_bytes, found.optimizer_bytes) == (0, 0, 0)


@pytest.mark.parametrize(("how", "temporaries"), [("for_loop", 2 * 4 * 131_072 // 2), ("foreach", 0), ("fused", 0)])
def test_a_loop_over_shards_of_tensors(how, temporaries):
    """The largest is the embedding, 131,072 elements over two ranks: two fp32 copies of its shard. foreach copies all moments."""
    [found] = sharded_states(Assembly(job("fsdp2", dp=2, performance={"optimizer_impl": how})))
    assert found.update_bytes == temporaries
