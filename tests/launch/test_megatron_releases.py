"""Megatron-LM's settings that depend on its release, programs that only run a model, and nodes that hold fewer processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_readings import problems, reading, script

from steptime import estimate
from steptime.launch.interpolate import resolve
from steptime.launch.megatron.sources import read_megatron
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.reading import to_job
from steptime.launch.shell.script import read_script
from steptime.report.estimate_text import report


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        # --data-impl is of releases to 23.06, --recompute-granularity from 23.04: their default is --transformer-impl local,
        # whose attention has all scores without --use-flash-attn (NVIDIA/Megatron-LM at v23.06, megatron/arguments.py and
        # megatron/model/transformer.py)
        (("--data-impl mmap", "--recompute-granularity selective"), "unfused"),
        (("--data-impl mmap", "--recompute-granularity selective", "--use-flash-attn"), "flash"),
        (("--data-impl mmap", "--recompute-granularity selective", "--transformer-impl transformer_engine"), "flash"),
        # --data-impl ended with core 0.4; --mock-data and --retro-workdir are both of core 0.5 alone, whose default is local too
        # (megatron/arguments.py at core_v0.5.0); that of core 0.6, which --qk-layernorm is of at least, is transformer_engine
        (("--mock-data", "--retro-workdir x"), "unfused"),
        (("--qk-layernorm",), "flash"),
        # these first two are both of core 0.7 alone, whose models are the legacy ones without --use-mcore-models and read
        # --use-flash-attn; --use-legacy-models is of core 0.8 (megatron/training/arguments.py)
        (
            ("--straggler-ctrlr-port 1", "--one-logger-entity x", "--transformer-impl local", "--use-flash-attn"),
            "flash",
        ),
        # --attention-backend is of core 0.11 and later, whose own layers ignore --use-flash-attn (core gpt_layer_specs.py)
        (("--attention-backend auto", "--transformer-impl local", "--use-flash-attn"), "unfused"),
        (("--attention-backend auto", "--transformer-impl local", "--use-flash-attn", "--use-legacy-models"), "flash"),
        (("--attention-backend flash", "--transformer-impl local"), "unfused"),
        # MindSpeed puts its own kernel there (Ascend/MindSpeed-LLM fusion_attention_feature.py)
        (("--transformer-impl local", "--use-flash-attn", "--use-fused-rmsnorm"), "flash"),
        (("--attention-backend auto",), "flash"),
    ],
)
def test_attention_is_that_of_the_release(flags, attention):
    assert reading(*flags).config["performance"]["attention_impl"] == attention


def test_recompute_activations_sets_the_granularity():
    """megatron/arguments.py, validate_args: `if args.recompute_activations: args.recompute_granularity = 'selective'`."""
    found = reading("--recompute-activations", "--recompute-granularity full")
    assert found.config["performance"]["recompute"] == {"granularity": "selective", "modules": ["core_attn"]}
    assert next(flag.status for flag in found.flags if flag.name == "--recompute-granularity") == "irrelevant"


@pytest.mark.parametrize(("mode", "left_out"), [(0, False), (1, True), (2, False), (3, False), (4, True)])
def test_causal_masks_of_mindspeed_are_those_that_are_counted(mode, left_out):
    """npu_fusion_attention's sparse_mode: 0 the given mask, 1 all scores, 2 and 3 causal, 4 a band."""
    flags = {flag.name: flag.status for flag in reading(f"--sparse-mode {mode}").flags}
    assert (flags["--sparse-mode"] == "unmodeled") is left_out


RUNS = """
import torch
from megatron.training import get_model
from transformers import AutoTokenizer

def train_valid_test_datasets_provider(counts):
    return None

with torch.no_grad():
    model = get_model(None)
    AutoTokenizer.from_pretrained("gpt2")
"""


@pytest.mark.parametrize(
    ("program", "refused"),
    [
        (RUNS, True),
        (
            RUNS + "from megatron.training import pretrain\npretrain(train_valid_test_datasets_provider, get_model)\n",
            False,
        ),
        (RUNS + "loss.backward()\n", False),
        (RUNS.replace("with torch.no_grad():", "if True:"), False),
        (RUNS.replace("megatron.training", "mine"), False),
    ],
)
def test_a_program_that_calls_nothing_that_trains_is_refused(tmp_path: Path, program, refused):
    (tmp_path / "job.py").write_text(program)
    text = script().replace("pretrain_gpt.py", "job.py")
    if refused:
        line = "run.sh: line 1 runs job.py, which does not train"
        assert problems(read_megatron, "run.sh", text, {}, nearby=NearbyFiles(tmp_path)) == [line]
    else:
        assert read_megatron("run.sh", text, {}, nearby=NearbyFiles(tmp_path)).config["model"]["n_layers"] == 8


def test_flags_of_a_search_that_has_no_launch_command_are_not_dropped():
    """A script that hands its flags to containers by ssh: what a loop over unknown words puts together is not known."""
    sizes = script().partition("pretrain_gpt.py ")[2].strip()
    loop = 'for tp in $(powers_of_two 8); do\n  SEARCH_ARGS="--tensor-model-parallel-size $tp"\ndone\n'
    text = f'GPT_ARGS="{sizes}"\n{loop}'
    why = "$SEARCH_ARGS depends on the loop in line 2 (how often it runs is not known)"
    line = f"run.sh: no launch command, and {why}; put the flags in a file (args.txt)"
    assert problems(read_megatron, "run.sh", text, {}) == [line]
    known = read_megatron("run.sh", text.replace("$(powers_of_two 8)", "2"), {})
    assert known.config["parallelism"]["tp"] == 2


def test_indices_of_an_array_are_numbers():
    """bash: ${!X[@]} of X=(a b c) is 0 1 2; of named elements ([k]=v) it is their names, which are not read."""
    loop = 'for i in "${!X[@]}"; do torchrun pretrain_gpt.py --num-layers ${X[$i]}; done\n'
    found = read_script(f"X=(12 24 36)\n{loop}", "run.sh", {})
    assert [word.text for word in found.arguments] == ["--num-layers", "12"]
    assert "launches 3 jobs" in " ".join(found.notes)
    named = read_script(f"declare -A X=([small]=12 [large]=24)\n{loop}", "run.sh", {})
    assert named.arguments[1].unresolved


@pytest.mark.parametrize(
    "lines",
    ["X=(12 24)\nX[7]=36\n", "declare -A X\nX[small]=12\n", 'X=(12)\nif [ "$Y" = 1 ]; then X[5]=24; fi\n'],
)
def test_indices_of_an_array_with_gaps_are_not_counted(lines):
    """bash: ${!X[@]} of the first is 0 1 7, of the second small, of the third 0 or 0 5."""
    found = read_script(
        lines + 'for i in "${!X[@]}"; do torchrun pretrain_gpt.py --num-layers $i; done\n', "run.sh", {}
    )
    assert found.arguments[1].unresolved


@pytest.mark.parametrize(("change", "known"), [("X=7", False), (":", True), ("unset X", True), ("X=7; unset X", True)])
def test_a_variable_that_one_branch_sets_again_is_not_known_to_be_unset(change, known):
    """bash: ${X:-4} is 7 where the test holds and X=7 follows, else 4."""
    lines = f'unset X\nif [ "$Y" = 1 ]; then {change}; fi\ntorchrun pretrain_gpt.py --num-layers ${{X:-4}}\n'
    word = read_script(lines, "run.sh", {}).arguments[1]
    assert (word.text == "4" and not word.unresolved) is known


def test_names_of_the_launchers_groups_are_the_top_of_a_config():
    """NVIDIA/NeMo-Framework-Launcher launcher_scripts/conf/peft/*.yaml name their own keys with `peft.`."""
    tree = {"model": {"length": "${peft.data.length}"}, "data": {"length": 4096}}
    assert resolve(tree)["model"]["length"] == 4096


@pytest.mark.parametrize(("machine", "above"), [("dgx-h100", True), ("dgx-h100:1", False)])
def test_nodes_with_fewer_processes_than_devices_are_told_below_the_first_lines(machine, above):
    """4 nodes with 1 process each are one node of a machine of 8 devices: the network between them is not the file's."""
    found = reading(launch="torchrun --nnodes 4 --nproc_per_node 1")
    node, _, devices = machine.partition(":")
    overrides = {"hardware.overrides.devices_per_node": int(devices)} if devices else {}
    job = to_job(found, {"hardware.node_type": node, **overrides})
    head = report(estimate(job)).split("\n\n")[0]
    assert ("launched on 4 nodes with 1 process each" in head) is above
