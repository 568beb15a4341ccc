"""Megatron's settings mean the same whoever says them: the command line, the dump of a log, Megatron-Core's config objects."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.keys import load_table
from steptime.launch.megatron.sources import from_arguments, read_megatron
from steptime.launch.nemo.formats import read_nemo
from steptime.launch.reading import to_job

SIZES = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 512, "micro_batch_size": 1}
SIZES |= {"global_batch_size": 64, "vocab_size": 50257, "bf16": True}
SECTIONS = {"micro_batch_size": "train", "global_batch_size": "train"}
DP = {"parallelism.dp": 4}


def of_flags(flags):
    """The reading of a command line."""
    words = [f"--{name.replace('_', '-')} {'' if value is True else value}" for name, value in SIZES.items()]
    return read_megatron("args.txt", f"{' '.join(words)} {flags}\n", {}, DP)


def of_dump(arguments):
    """The reading of the arguments that a log prints."""
    return from_arguments({name: str(value) for name, value in (SIZES | arguments).items()}, "log", sets=DP)


def of_fields(fields):
    """The reading of a whole ConfigContainer."""
    tree = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": {},
        "ddp": {},
        "optimizer": {},
        "train": {},
    }
    for name, value in SIZES.items():
        tree[SECTIONS.get(name, "model")][name] = value
    tree["ddp"]["grad_reduce_in_fp32"] = True  # as the parser has it with bf16
    for name, value in fields.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    return read_nemo("job.yaml", yaml.safe_dump(tree), {}, DP)


def found(reading, key):
    """The value of a dotted key of a reading's config; None where it is left to the job."""
    node = reading.config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


ALIKE = [
    # a mask for each residual where the hidden states are dropped; none for attention's own in a fused kernel
    ("--hidden-dropout 0", {"hidden_dropout": 0.0}, {"model.hidden_dropout": 0.0}, "model.dropout", 0.0),
    ("--attention-dropout 0", {"attention_dropout": 0.0}, {"model.attention_dropout": 0.0}, "model.dropout", 0.1),
    ("--attention-dropout 0", {"attention_dropout": 0.0}, {"model.attention_dropout": 0.0}, "model.attention_dropout", 0.0),
    # core transformer_block.py, get_num_layers_to_build: (7 + 1) / 2 a stage, one less where the end is counted
    (
        "--num-layers 7 --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split",
        {"num_layers": 7, "pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True},
        {"model.num_layers": 7, "model.pipeline_model_parallel_size": 2, "model.account_for_embedding_in_pipeline_split": True},
        "parallelism.layers_per_stage", [3, 4],
    ),
    # the same with two chunks a stage: (8 + 2) / 2 = 5 ... is odd; 4 first and 4 last of 8 make 2 a chunk
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 4",
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 4},
        {"model.pipeline_model_parallel_size": 2, "model.virtual_pipeline_model_parallel_size": 2,
         "model.num_layers_in_first_pipeline_stage": 4},
        "parallelism.layers_per_stage", [2, 2, 2, 2],
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|tt*2|ttt|tL'",
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt*2|ttt|tL"},
        {"model.pipeline_model_parallel_size": 2, "model.pipeline_model_parallel_layout": "Et|tt*2|ttt|tL"},
        "parallelism.layers_per_stage", [1, 3, 3, 1],
    ),
    # 4 bytes of gradients are hidden and 2 of parameters are not: 4 / 6
    (
        "--use-distributed-optimizer --overlap-grad-reduce",
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
        {"ddp.use_distributed_optimizer": True, "ddp.overlap_grad_reduce": True},
        "performance.overlap.dp", 0.667,
    ),
    # schedules.py: sends are hidden with virtual stages alone
    (
        "--pipeline-model-parallel-size 2",
        {"pipeline_model_parallel_size": 2, "overlap_p2p_comm": True},
        {"model.pipeline_model_parallel_size": 2, "model.overlap_p2p_comm": True},
        "performance.overlap.pp", False,
    ),
    # optimizer_config.py, use_precision_aware_optimizer_no_fp8_or_ds_fp8: the whole master copy beside other recipes than delayed
    (
        "--use-distributed-optimizer --use-precision-aware-optimizer --fp8-format hybrid --fp8-recipe tensorwise",
        {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
        {"ddp.use_distributed_optimizer": True, "optimizer.use_precision_aware_optimizer": True, "model.fp8": "hybrid",
         "model.fp8_recipe": "tensorwise"},
        "performance.master_dtype", None,
    ),
    (
        "--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16",
        {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "main_grads_dtype": "torch.bfloat16"},
        {"ddp.use_distributed_optimizer": True, "optimizer.use_precision_aware_optimizer": True,
         "optimizer.main_grads_dtype": "torch.bfloat16"},
        "performance.main_grad_dtype", "bf16",
    ),
    # rope_utils.py: a factor on the tables is beyond the fused kernel
    (
        "--position-embedding-type yarn",
        {"position_embedding_type": "yarn", "apply_rope_fusion": True},
        {"model.position_embedding_type": "yarn", "model.apply_rope_fusion": True},
        "performance.rope_impl", "own_tables",
    ),
    ("--position-embedding-type yarn", {"position_embedding_type": "yarn"}, {"model.position_embedding_type": "yarn"},
     "model.rotary_embeds", True),
    # of the experts' modules a dense model has none
    (
        "--recompute-granularity selective --recompute-modules moe_act",
        {"recompute_granularity": "selective", "recompute_modules": "['moe_act']"},
        {"model.recompute_granularity": "selective", "model.recompute_modules": ["moe_act"]},
        "performance.activation_checkpointing_type", "none",
    ),
    # activations.py: the squared ReLU is compiled, whatever is said of the other activations
    ("--squared-relu", {"squared_relu": True}, {"model.activation_func": "megatron.core.activations.squared_relu"},
     "performance.activation_impl", "fused"),
    ("--squared-relu", {"squared_relu": True}, {"model.activation_func": "megatron.core.activations.squared_relu"},
     "model.activation", "relu2"),
    ("--fp4-format e2m1 --fp4-param", {"fp4": "e2m1", "fp4_param": True}, {"model.fp4": "e2m1", "model.fp4_param": True},
     "performance.fp8_params", True),
    ("--make-vocab-size-divisible-by 256", {"make_vocab_size_divisible_by": 256}, {"model.make_vocab_size_divisible_by": 256},
     "performance.vocab_multiple", 256),
    *(
        (
            f"--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy {strategy}",
            {"use_distributed_optimizer": True, "use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy},
            {"ddp.use_distributed_optimizer": True, "ddp.use_megatron_fsdp": True,
             "ddp.data_parallel_sharding_strategy": strategy},
            "parallelism.zero_level", level,
        )
        for level, strategy in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "arguments", "fields", "key", "value"), ALIKE)
def test_three_sources_are_one_plan(flags, arguments, fields, key, value):
    readings = of_flags(flags), of_dump(arguments), of_fields(fields)
    assert [found(reading, key) for reading in readings] == [value] * 3
    assert [reading.of("unmodeled") for reading in readings] == [[], [], []]
    machine = {"hardware.node_type": "dgx-b200"} if "fp4" in flags else HARDWARE
    for reading in readings:
        to_job(reading, machine)


LEFT_OUT = [
    ("--position-embedding-type mrope", {"position_embedding_type": "mrope"}, {"model.position_embedding_type": "mrope"},
     "position_embedding_type"),
    ("--num-experts 8 --moe-expert-rank-capacity-factor 1.5", {"num_experts": 8, "moe_expert_rank_capacity_factor": 1.5},
     {"model.num_moe_experts": 8, "model.moe_expert_rank_capacity_factor": 1.5}, "moe_expert_rank_capacity_factor"),
    ("--fp16-lm-cross-entropy", {"fp16_lm_cross_entropy": True}, {"model.fp16_lm_cross_entropy": True}, "fp16_lm_cross_entropy"),
    ("--no-clone-scatter-output-in-embedding", {"clone_scatter_output_in_embedding": False},
     {"model.clone_scatter_output_in_embedding": False}, "clone_scatter_output_in_embedding"),
    ("--tp-comm-overlap --no-tp-comm-overlap-ag", {"tp_comm_overlap": True, "tp_comm_overlap_ag": False},
     {"model.tp_comm_overlap": True, "model.tp_comm_overlap_ag": False}, "tp_comm_overlap_ag"),
    ("--distributed-backend gloo", {"distributed_backend": "gloo"}, {"dist.distributed_backend": "gloo"}, "distributed_backend"),
    ("--optimizer soap", {"optimizer": "soap"}, {"optimizer.optimizer": "soap"}, "optimizer"),
    ("--context-parallel-size 2 --cp-comm-type p2p a2a", {"context_parallel_size": 2, "cp_comm_type": "['p2p', 'a2a']"},
     {"model.context_parallel_size": 2, "model.cp_comm_type": ["p2p", "a2a"]}, "cp_comm_type"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "arguments", "fields", "key"), LEFT_OUT)
def test_three_sources_leave_the_same_out(flags, arguments, fields, key):
    notes = [
        [flag.note for flag in [*reading.of("unmodeled"), *reading.of("approximated")]]
        for reading in (of_flags(flags), of_dump(arguments), of_fields(fields))
    ]
    assert len(notes[0]) == 1, key
    assert notes[0] == notes[1] == notes[2]


WITHOUT_COST = [
    # what belongs to a switch that is off
    ("--no-tp-comm-overlap-ag", {"tp_comm_overlap_ag": False}, {"model.tp_comm_overlap_ag": False}),
    ("--fp8-recipe tensorwise", {"fp8_recipe": "tensorwise"}, {"model.fp8_recipe": "tensorwise"}),
    ("--sequence-parallel", {"sequence_parallel": True}, {"model.sequence_parallel": True}),
    # core transformer/moe/experts.py alone asks for it
    ("--use-fused-weighted-squared-relu", {"use_fused_weighted_squared_relu": True},
     {"model.use_fused_weighted_squared_relu": True}),
    # param_and_grad_buffer.py pads to 2**16 elements
    ("--ddp-pad-buckets-for-high-nccl-busbw", {"ddp_pad_buckets_for_high_nccl_busbw": True},
     {"ddp.pad_buckets_for_high_nccl_busbw": True}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "arguments", "fields"), WITHOUT_COST)
def test_three_sources_know_what_costs_nothing(flags, arguments, fields):
    for reading in (of_flags(flags), of_dump(arguments), of_fields(fields)):
        said = [
            flag for flag in reading.flags if flag.status in {"unmodeled", "irrelevant"} and "unset" not in flag.note
        ]
        assert [flag.status for flag in said] == ["irrelevant"], reading.source


def test_defaults_differ_where_the_parser_is_not_asked():
    """The parser adds up in fp32 with bf16 (arguments.py, validate_args) and rotates in a fused kernel; config objects do not."""
    rope = {"model.position_embedding_type": "rope", "ddp.grad_reduce_in_fp32": False}
    flags, fields = of_flags("--position-embedding-type rope").config, of_fields(rope).config
    assert (flags["performance"]["main_grad_dtype"], fields["performance"]["main_grad_dtype"]) == ("fp32", "bf16")
    assert (flags["performance"]["rope_impl"], fields["performance"]["rope_impl"]) == ("fused", "own_tables")
    # two thirds of 4 * 1024, down to a multiple of 64, is --swiglu's alone; a TransformerConfig has 4h
    gated = {"model.gated_linear_unit": True, "model.activation_func": "torch.nn.functional.silu"}
    assert of_flags("--swiglu").config["model"]["inter_sz"] == 2688
    assert of_fields(gated).config["model"]["inter_sz"] == 4096


def test_upper_sections_are_put_over_lower_ones_and_either_optimizer_word_counts():
    fields = {"mixed_precision.grad_reduce_in_fp32": False, "comm_overlap.overlap_grad_reduce": True,
              "ddp.overlap_grad_reduce": False, "optimizer.use_distributed_optimizer": True,
              "ddp.use_distributed_optimizer": False}  # fmt: skip
    reading = of_fields(fields)
    assert reading.config["performance"]["main_grad_dtype"] == "bf16"
    assert reading.config["parallelism"]["zero_level"] == 1
    assert reading.config["performance"]["overlap"]["dp"] == 0.5  # gradients of 2 bytes are hidden, parameters are not
    notes = {flag.name: flag.note for flag in reading.of("irrelevant")}
    assert notes["ddp.overlap_grad_reduce"] == "comm_overlap.overlap_grad_reduce overrides it"
    assert notes["ddp.use_distributed_optimizer"] == "optimizer.use_distributed_optimizer overrides it"


def test_problems_are_told_together_and_by_the_name_of_their_source():
    with pytest.raises(ConfigError) as caught:
        of_fields({"model.hidden_size": "wide", "model.fp16": True, "model.recompute_granularity": "some"})
    assert caught.value.problems == [
        "job.yaml: model.bf16 and model.fp16 are both set; use one",
        "job.yaml: model.recompute_granularity: expected full or selective (got 'some')",
        "job.yaml: model.hidden_size: expected a whole number of at least 1 (got 'wide')",
        "job.yaml: machine unknown; add --set hardware.node_type=NAME (3dtrn machines)",
    ]


def test_offloaded_layers_matter_where_offloading_is_on():
    """NeMo 1 says a number of layers though the switch is off."""
    off = of_fields({"model.cpu_offloading": False, "model.cpu_offloading_num_layers": 7})
    assert off.of("unmodeled") == []
    on = of_fields({"model.cpu_offloading": True, "model.cpu_offloading_num_layers": 7})
    assert [flag.name for flag in on.of("unmodeled")] == ["model.cpu_offloading", "model.cpu_offloading_num_layers"]


VALUES = st.one_of(
    st.integers(-2, 64),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.sampled_from(
        ["full", "selective", "torch.bfloat16", "rope", "E|t*3|L", "p2p", "AttnBackend(9)", "${x}", "'", [1], {"a": 1}]
    ),
    st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=6),
)


COSTLY = sorted(f"model.{key}" for key, rule in load_table("megatron").rules.items() if rule.status != "irrelevant")


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(COSTLY), VALUES, max_size=6))
def test_any_fields_are_a_job_or_words(fields):
    """Whatever a field says: a plan, or lines that say what is wrong."""
    told = []
    try:
        to_job(of_fields(fields), HARDWARE, allow_unmodeled=True)
    except ConfigError as error:
        told = error.problems
    assert all(line.startswith("job.yaml: ") and "\n" not in line for line in told)


@pytest.mark.parametrize(
    ("said", "profile"),
    [
        ({}, "megatron-2021"),
        ({"use_contiguous_buffers_in_ddp": False}, "megatron-2021@2021-03"),
        ({"use_contiguous_buffers_in_ddp": True}, "megatron-2021"),
        ({"use_contiguous_buffers_in_ddp": False, "log_memory_to_tensorboard": False}, "megatron-2021"),
        ({"use_contiguous_buffers_in_ddp": False, "DDP_impl": "torch"}, "megatron-2021"),
    ],
)
def test_dumps_of_spring_2021_keep_gradients_twice(said, profile):
    """b4bc51b1 of March 2021 brought the first argument; 24b7c3c0 of July, two days before copies were freed, the second.

    Megatron's own data parallelism alone refers to gradients by main_grad.
    """
    reading = of_dump({"DDP_impl": "local", "checkpoint_activations": True, "bf16": False, "fp16": True} | said)
    assert reading.config["performance"]["software"] == profile
