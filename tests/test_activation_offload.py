"""Activations that torch's saved-tensor hooks send to host memory: bytes and seconds worked out by hand, and who says so."""

import jobs
import numpy as np
import pytest
from launch_readings import HARDWARE
from own_rows import own

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.fsdp.pipeline_memory import stage_chunks
from steptime.job.assembly import Assembly
from steptime.launch.read import read
from steptime.memory.part_memories import PartMemories
from steptime.search.screen import Screen
from steptime.search.space import Axes, Counts
from steptime.validation import row_native
from steptime.validation.row_plan import to_config

MIB, LINK, LAYERS = 2.0**20, 55.6e9, 32
X = 4096 * 4096 * 2
"""Bytes of a layer's input: 4096 tokens of h 4096 in bf16."""
FULL = {"activation_checkpointing_type": "full"}


def offloading_job(offload, performance=None, **parallelism):
    said = {"activation_offload": offload} if offload is not None else {}
    return jobs.job(
        "llama3-8b", software="fsdp2", gbs=8, performance=said | (performance or {}), fsdp={}, **{"dp": 8} | parallelism
    )


def copies(found):
    """Seconds of copies of a step: exposed, and hidden."""
    return found.time.parts_s.get("host_comm", 0.0), found.time.hidden_s.get("host_comm", 0.0)


@pytest.mark.parametrize("share", [True, 0.25])
def test_a_share_of_what_a_layer_keeps_leaves_and_is_back_in_its_backward(share):
    """Both peaks count the layer itself, and a neighbor on its way."""
    (_, _, plain), (_, _, left) = (
        PartMemories(assembly).resident(assembly.chunks[0])[0]
        for assembly in (Assembly(offloading_job(None)), Assembly(offloading_job(share)))
    )
    away = float(share) * plain.saved
    assert left.saved == plain.saved - away
    assert (left.forward.bytes, left.backward.bytes) == (plain.forward.bytes + away, plain.backward.bytes + away)


def test_copies_in_the_stream_of_compute_leave_no_neighbor_and_hide_nowhere():
    """save_on_cpu: the step is longer by both copies of all layers."""
    blocking = offloading_job(True, {"overlap": {"offload": False}})
    assembly = Assembly(blocking)
    (_, _, plain), (_, _, left) = (
        PartMemories(of).resident(of.chunks[0])[0] for of in (Assembly(offloading_job(None)), assembly)
    )
    assert (left.saved, left.backward) == (0.0, plain.backward)
    found = estimate(blocking)
    assert copies(found) == (pytest.approx(2 * LAYERS * plain.saved / LINK), 0.0)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_under_a_pipeline_a_stage_keeps_its_output_and_the_rest_of_its_layers(share):
    """Layers 16 to 31, on the last stage: the input of the first lies in the pipeline's buffer, so it is kept by none of them.

    Each layer keeps P bytes: (16 P - X) (1 - share) and what the head keeps; with all of it sent 80 MiB too little were counted.
    """
    plan = offloading_job(share, dp=4, pp=2) if share else offloading_job(None, dp=4, pp=2)
    _, last = stage_chunks(Assembly(plan))
    assembly = Assembly(offloading_job(None, dp=4, pp=2))
    memories = PartMemories(assembly, weight_grads_stay=True)
    ((count, _, plain),) = memories.resident(assembly.stages[1][0])
    kept = memories.head.saved + assembly.head.sizes["head.logits"]
    assert last[0].saved == pytest.approx((count * plain.saved - X) * (1.0 - share) + kept)


def test_with_full_recomputation_the_input_of_each_layer_goes():
    """32 MiB a layer each way, 0.6 ms, under its forward and backward."""
    found, plain = estimate(offloading_job(True, FULL)), estimate(offloading_job(None, FULL))
    assert copies(found) == (0.0, pytest.approx(2 * LAYERS * X / LINK))
    assert found.step_s == pytest.approx(plain.step_s)
    kept = [PartMemories(one.assembly).chunk(one.assembly.chunks[0]).saved for one in (plain, found)]
    assert kept[0] - kept[1] == LAYERS * X
    assert found.memory.peak_allocated_bytes < plain.memory.peak_allocated_bytes


@pytest.mark.parametrize("sharded", [False, True])
def test_a_search_has_the_step_and_the_memory_of_an_estimate(sharded):
    """Every layout of eight devices without a pipeline, under each recomputation: its columns beside an estimate of its own."""
    usual = jobs.job("llama3.2-1b", software="torch", performance={"activation_offload": 0.75}, dp=8)
    plan = usual.replace(**{"performance.software": "fsdp2", "parallelism.fsdp": {}}) if sharded else usual
    compared = 0
    for _, block in Screen(plan, Axes({"pp": (1,), "cp": (1,), "tp": (1, 2)}), Counts()).blocks(8, 8):
        for choice, row in zip(*np.nonzero(block.fits), strict=True):
            found = estimate(plan.replace(**block.changes(int(choice), int(row))))
            assert block.step_s[choice, row] == pytest.approx(found.step_s, rel=1e-9)
            assert block.reserved_bytes[choice, row] == found.memory.peak_reserved_bytes + sum(
                found.memory.overhead_bytes
            )
            compared += 1
            if compared > 30:
                return
    assert compared


@pytest.mark.parametrize(
    ("offload", "more", "said"),
    [
        (1.5, {}, "must be true, false, or a fraction from 0 to 1 (got 1.5)"),
        (True, {"software": "megatron-core"}, "needs torch's saved-tensor hooks (got software megatron-core)"),
        (True, {"cuda_graphs": True}, "not modeled yet with cuda_graphs"),
        (
            True,
            {"recompute": {"granularity": "full", "method": "block", "n_layers": 4}},
            "not modeled yet with full recomputation of some layers",
        ),
    ],
)
def test_problems(offload, more, said):
    with pytest.raises(ConfigError) as error:
        jobs.job("llama3-8b", performance={"software": "torch", "activation_offload": offload} | more)
    assert [line for line in error.value.problems if line.startswith("performance.activation_offload") and said in line]


def test_a_machine_that_does_not_say_its_link():
    with pytest.raises(ConfigError, match="host_bytes_per_s"):
        jobs.job("llama3-8b", software="torch", performance={"activation_offload": True}, hardware="mi300x-node")


TRAINER = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
per_device_train_batch_size: 1
max_length: 4096
bf16: true
gradient_checkpointing: true
"""


@pytest.mark.parametrize(
    ("more", "offload"),
    [("activation_offloading: true", True), ("gradient_checkpointing_kwargs: {offload: true}", True), ("", None)],
)
def test_said_to_hugging_face(tmp_path, more, offload):
    """TRL's switch, and transformers' own beside gradient checkpointing."""
    path = tmp_path / "sft.yaml"
    path.write_text(f"{TRAINER}{more}\n")
    assert read("transformers", str(path), HARDWARE).config["performance"].get("activation_offload") is offload


PLANNED = {"recompute": "none", "zero_or_fsdp": "zero3 + activation CPU offload (planned)"}


RECIPE = """# tune run --nproc_per_node 2 full_finetune_distributed
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
batch_size: 1
optimizer: {_component_: torch.optim.AdamW}
enable_activation_checkpointing: True
enable_activation_offloading: True
"""


@pytest.mark.parametrize(("streams", "overlap"), [("", None), ("activation_offloading_use_streams: False", False)])
def test_said_to_torchtune(tmp_path, streams, overlap):
    """Hooks with a stream of their own, unless it is said (torchtune/training/_activation_offloading.py)."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{RECIPE}{streams}\n")
    performance = read("auto", str(path), HARDWARE).config["performance"]
    assert performance["activation_offload"] is True
    assert performance.get("overlap", {}).get("offload") is overlap


@pytest.mark.parametrize(
    ("cells", "offload", "overlap"),
    [
        ({"recompute": "full, checkpoints offloaded to CPU"}, 1.0, None),
        ({"recompute": "none + activation CPU offload", "overlap_notes": "activation offload to CPU (H2D exposed)"}, 1.0, 0.5),
        (PLANNED | {"note": "GB moved per GPU: 11.7 of 22.0; "}, 11.7 / 22.0, None),
        (PLANNED | {"note": "GB moved per GPU: 0; "}, None, None),
        ({"recompute": "full"}, None, None),
    ],
)  # fmt: skip
def test_words_of_rows(cells, offload, overlap):
    row = own(
        framework="DeepSpeed ZeRO-3" if "zero_or_fsdp" in cells else "torchtitan",
        gpu="H200",
        **{"zero_or_fsdp": "fsdp2"} | cells,
    )
    section = to_config(row).config["performance"]
    assert section.get("activation_offload") == (pytest.approx(offload) if offload else None)
    assert section.get("overlap", {}).get("offload") == overlap


def test_a_mix_of_recomputation_and_offload_is_no_share():
    """What an optimizer chose tensor by tensor stays a word that no plan expresses."""
    said = "mixed ilp: keep 13.8 recompute 72.3 offload 13.9 %"
    assert row_native.recomputed_besides(said) == (said, True)
