"""Hugging Face's Trainer: peaks of published runs, and what its loss and its checkpoints hold, by hand."""

import pytest
from jobs import job
from own_rows import own

from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories
from steptime.validation.judgement import judge_all
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config

SHAPE = {"hidden_sz": 64, "inter_sz": 176, "n_q_heads": 4, "vocab_sz": 1000, "n_layers": 1}
FULL = {"software": "accelerate-ddp", "activation_checkpointing_type": "full"}


def memories(**performance):
    """The walks of a layer and the head of 16 tokens."""
    plan = job(model=SHAPE, performance=FULL | performance, dp=1, gbs=1, seqlen=16)
    return PartMemories(Assembly(plan))


def test_published_peaks_of_the_trainer():
    """27 runs on 1, 2 and 4 A100: of Llama 3 8B and Mistral 7B, with and without fused kernels and Liger's loss."""
    judged = judge_all(row for row in shipped() if row.group == "fms-accel")
    errors = [j.memory_error for j in judged if j.memory_error is not None]
    assert len(errors) == 27
    assert max(map(abs, errors)) < 0.0005


def test_the_in_place_loss_holds_two_fp32_copies_of_the_logits():
    """Backward ends with the gradient of the shifted copy and that of the whole, 4 bytes each of 16 * 1000 logits.

    Beside them: the norm's input and output, 2 bytes each of 16 * 64, its statistic of 4 bytes for each token, targets of 8.
    """
    head = memories(norm_impl="fused", loss_impl="in_place").head
    assert head.backward.op == "loss.shift"
    assert head.backward.bytes == 2 * 4 * 16 * 1000 + 2 * 2 * 16 * 64 + 4 * 16
    assert head.forward.bytes == head.backward.bytes


def test_a_reentrant_checkpoint_holds_the_output_and_its_gradient():
    """2 bytes each of 16 * 64; at the peak, in the MLP, the residual's gradient is the output's, so the output alone is more."""
    walks = [memories(norm_impl="fused", recompute_stops_early=early) for early in (False, True)]
    late, early = (walk.checkpointed(((walk.assembly.kinds[0], 1),)).backward for walk in walks)
    assert late.op == early.op == "mlp.act.mul"
    assert late.bytes - early.bytes == 2 * 16 * 64


@pytest.mark.parametrize(
    ("plugin", "loss"), [("none", "composite"), ("foak-fast-kernels", "in_place"), ("foak-fast-kernels-liger", "fused")]
)
def test_its_rows_name_the_loss(plugin, loss):
    row = own(
        framework="HF Trainer + accelerate FSDP1", zero_or_fsdp="fsdp1 full_shard", overlap_notes=f"plugin {plugin}"
    )
    assert to_config(row).config["performance"].get("loss_impl", "composite") == loss


@pytest.mark.parametrize(("model", "repeated"), [("Mistral-7B-v0.1", True), ("Llama3-8B", None)])
def test_mistral_repeated_keys_and_values(model, repeated):
    """transformers 4.45, MistralFlashAttention2.forward; LlamaFlashAttention2 does not."""
    row = own(
        framework="HF Trainer + accelerate FSDP1", source="foundation-model-stack/fms-acceleration", model_name=model
    )
    assert to_config(row).config["performance"].get("repeat_kv") is repeated
