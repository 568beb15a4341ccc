"""Directories of many ranks: Megatron's and DeepSpeed's."""

import argparse
import pickle

import pytest
import torch

HIDDEN, FFN, VOCAB = 64, 160, 512


def whole_model(layers, tied=False):
    per_layer = HIDDEN * HIDDEN + (HIDDEN + 32) * HIDDEN + 2 * HIDDEN + 3 * FFN * HIDDEN
    return layers * per_layer + HIDDEN + VOCAB * HIDDEN * (1 if tied else 2)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_megatron_ranks_add_up_to_the_model(make, summarize, tied, vpp):
    make.megatron(make.folder, tied=tied, vpp=vpp)
    summary = summarize(make.folder)
    layers = 4 * vpp
    assert (summary.exit_code, summary.complete, summary.step) == (0, True, 5000)
    assert summary.params == whole_model(layers, tied)
    assert summary.architecture["n_layers"]["value"] == layers
    assert summary.architecture["n_q_heads"]["value"] == 8
    assert summary.architecture["tie_embeddings"]["value"] is tied
    section = summary.sections[0]
    assert (section.parallelism["tp"], section.parallelism["pp"], section.parallelism["agrees_with_args"]) == (
        2,
        2,
        True,
    )
    assert [row["name"] for row in section.ranks] == ["stage 0 x2", "stage 1 x2"]
    stored = sum(t.numel for t in summary.model)
    replicated = layers * 2 * HIDDEN + HIDDEN
    copy = VOCAB * HIDDEN if tied else 0
    assert stored == summary.params + replicated + copy
    assert summary.by_role["master"]["bytes"] == 4 * stored
    assert summary.by_role["optimizer"]["bytes"] == 8 * stored


def test_virtual_stages_interleave_layers(make, summarize):
    """Chunk 0 of both stages holds layers 0-1 and 2-3, chunk 1 layers 4-5 and 6-7."""
    make.megatron(make.folder, vpp=2)
    summary = summarize(make.folder)
    stage = {t.name: t.rank["pp"] for t in summary.model if "linear_proj" in t.name}
    assert [stage[f"decoder.layers.{n}.self_attention.linear_proj.weight"] for n in range(8)] == [
        0,
        0,
        1,
        1,
        0,
        0,
        1,
        1,
    ]


def test_megatron_with_one_rank_missing(make, summarize, codes):
    make.megatron(make.folder)
    for file in (make.folder / "iter_0005000/mp_rank_01_001").iterdir():
        file.unlink()
    (make.folder / "iter_0005000/mp_rank_01_001").rmdir()
    summary = summarize(make.folder)
    assert (summary.exit_code, codes(summary), summary.complete) == (1, {"MISSING_RANK"}, False)
    problem = summary.all_problems[0]
    assert problem.file == "iter_0005000/mp_rank_01_001"
    assert "3 of 4 ranks present (TP 2 x PP 2 x EP 1)" in problem.message


def test_megatron_first_stage_missing_keeps_layer_numbers(make, summarize):
    make.megatron(make.folder)
    for tp in range(2):
        rank = make.folder / f"iter_0005000/mp_rank_{tp:02d}_000"
        for file in rank.iterdir():
            file.unlink()
        rank.rmdir()
    names = {t.name for t in summarize(make.folder).model}
    assert "decoder.layers.3.mlp.linear_fc2.weight" in names
    assert "decoder.layers.1.mlp.linear_fc2.weight" not in names


def test_lone_second_number_is_the_expert_rank_without_pipeline(make, summarize):
    for ep in range(2):
        state = {
            f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight": torch.zeros(6, 4) for i in range(2)
        }
        state["decoder.layers.0.mlp.router.weight"] = torch.zeros(4, 4)
        args = argparse.Namespace(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=2
        )
        rank = make.folder / f"mp_rank_00_{ep:03d}"
        rank.mkdir()
        torch.save(
            {"model": state, "args": args, "iteration": 1, "checkpoint_version": 3.0}, rank / "model_optim_rng.pt"
        )
    summary = summarize(make.folder)
    assert {t.name.split(".")[6] for t in summary.model if "experts" in t.name} == {"0", "1", "2", "3"}
    assert summary.params == 4 * 24 + 16
    assert (summary.sections[0].parallelism["ep"], summary.exit_code) == (2, 0)


def test_tracker_to_an_absent_iteration(make, summarize, codes):
    make.megatron(make.folder)
    (make.folder / "latest_checkpointed_iteration.txt").write_text("6000")
    summary = summarize(make.folder)
    assert (summary.exit_code, codes(summary)) == (1, {"MISSING_ITERATION"})


def test_several_iterations(make, summarize):
    for step in (10, 9, 200):
        make.write(
            f"step-{step}/model.safetensors",
            make.raw_safetensors(
                {"w": {"dtype": "F32", "shape": [step], "data_offsets": [0, 4 * step]}}, bytes(4 * step)
            ),
        )
    summary = summarize(make.folder)
    assert (summary.params, summary.step, summary.others) == (200, 200, ["step-9", "step-10"])
    assert len(summarize(make.folder, everything=True).sections) == 3


def deepspeed(folder, stage, ranks=2, name="global_step10"):
    """One tag, called `name`, as DeepSpeed's engine writes it; structures from its checkpoint constants."""
    tag = folder / name
    tag.mkdir()
    (folder / "latest").write_text(name)
    shapes = [{"a.weight": torch.Size([4, 6]), "b.bias": torch.Size([5])}]
    numel = 29
    full = {"a.weight": torch.zeros(4, 6).bfloat16(), "b.bias": torch.zeros(5).bfloat16()}
    empty = {name: torch.zeros(0).bfloat16() for name in full}
    for rank in range(ranks):
        share = -(-numel // ranks)
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        optimizer = {
            "zero_stage": stage, "partition_count": ranks, "ds_version": "0.15", key: [torch.zeros(share)],
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(share), "exp_avg_sq": torch.zeros(share)}}},
        }  # fmt: skip
        name = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.15"}, name)
        if stage == 3:
            name = tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save({"module": empty, "param_shapes": shapes, "global_steps": 10, "dp_world_size": ranks}, name)
    if stage < 3:
        name = tag / "mp_rank_00_model_states.pt"
        torch.save({"module": full, "param_shapes": shapes, "global_steps": 10, "dp_world_size": ranks}, name)
    return tag


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(make, summarize, stage):
    deepspeed(make.folder, stage)
    summary = summarize(make.folder)
    assert (summary.params, summary.step, summary.exit_code) == (29, 10, 0)
    assert summary.sections[0].format == f"DeepSpeed ZeRO-{stage}"
    assert {t.name: t.shape for t in summary.model} == {"a.weight": (4, 6), "b.bias": (5,)}
    assert summary.by_role["master"]["bytes"] == 2 * 15 * 4
    assert summary.by_role["optimizer"]["bytes"] == 2 * 2 * 15 * 4


def test_deepspeed_with_a_tag_of_its_own(make, summarize, codes):
    """`save_checkpoint(folder, tag="best")`: no number in the name; the format is words, the same in each run."""
    deepspeed(make.folder, 2, name="best")
    first, second = (summarize(make.folder) for _ in range(2))
    assert (first.params, first.step, codes(first)) == (29, 10, set())
    assert first.sections[0].format == second.sections[0].format == "DeepSpeed ZeRO-2"


def test_deepspeed_with_a_partition_missing(make, summarize, codes):
    tag = deepspeed(make.folder, 2, ranks=3)
    (tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    summary = summarize(make.folder)
    assert (summary.exit_code, codes(summary)) == (1, {"MISSING_RANK"})


def test_deepspeed_pipeline_layers(make, summarize):
    """Pipeline stages save each layer once, as a bare state dict, with its number in the file's name."""
    for layer in range(3):
        state = {"mlp.weight": torch.zeros(4, 5), "mlp.bias": torch.zeros(4)}
        torch.save(state, make.folder / f"layer_{layer:02d}-model_00-model_states.pt")
    torch.save({"module": None, "global_steps": 4, "dp_world_size": 1}, make.folder / "mp_rank_00_model_states.pt")
    summary = summarize(make.folder)
    assert (summary.params, summary.step, summary.exit_code) == (72, 4, 0)
    assert {t.name for t in summary.model} == {f"layers.{n}.mlp.{w}" for n in range(3) for w in ("weight", "bias")}


def test_deepspeed_universal(make, summarize, codes):
    for name, shape in {"a.weight": (4, 6), "b.bias": (5,)}.items():
        folder = make.folder / "global_step3_universal" / "zero" / name
        folder.mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.zeros(shape)}, folder / f"{state}.pt")
        torch.save(torch.tensor(3), folder / "step.pt")
    (make.folder / "latest_universal").write_text("global_step3_universal")
    summary = summarize(make.folder / "global_step3_universal")
    assert (summary.params, summary.exit_code) == (29, 0)
    assert {t.name for t in summary.model} == {"a.weight", "b.bias"}
    module = {"a.weight": torch.zeros(4, 6, dtype=torch.bfloat16), "b.bias": torch.zeros(5, dtype=torch.bfloat16)}
    states = {"module": module, "global_steps": 3, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    torch.save(states, make.folder / "global_step3_universal" / "mp_rank_00_model_states.pt")
    summary = summarize(make.folder / "global_step3_universal")
    assert (summary.params, summary.step, summary.exit_code, summary.complete) == (29, 3, 0, True)
    (make.folder / "global_step3_universal/zero/b.bias/fp32.pt").unlink()
    assert codes(summarize(make.folder / "global_step3_universal")) == {"MISSING_FILE"}


def test_metadata_that_runs_code_is_named(make, summarize, codes):
    class Evil:
        def __reduce__(self):
            return __import__("os").system, ("echo owned > /tmp/should_not_exist",)

    make.write(".metadata", pickle.dumps({"state_dict_metadata": {}, "x": Evil()}))
    make.write("__0_0.distcp", b"x")
    summary = summarize(make.folder)
    assert summary.exit_code == 1
    assert "DANGEROUS_PICKLE" in codes(summary)


def test_one_megatron_rank_is_a_slice_of_the_model_its_arguments_describe(make, summarize):
    make.megatron(make.folder)
    path = make.folder / "iter_0005000" / "mp_rank_00_000" / "model_optim_rng.pt"
    summary = summarize(path)
    assert (summary.exit_code, summary.all_problems) == (0, [])
    found = {key: summary.architecture[key]["value"] for key in ("n_layers", "inter_sz", "vocab_sz", "n_q_heads")}
    assert found == {"n_layers": 4, "inter_sz": 160, "vocab_sz": 512, "n_q_heads": 8}
    assert summary.sections[0].notes == [
        "one rank of TP 2 x PP 2: shapes are slices; give the parent directory for the whole model"
    ]


@pytest.mark.parametrize("left", [None, b"", b"garbage"])
def test_a_rank_without_a_readable_file_is_one_problem(make, summarize, left):
    make.megatron(make.folder)
    rank = make.folder / "iter_0005000" / "mp_rank_01_000"
    for file in rank.iterdir():
        file.unlink()
    if left is not None:
        (rank / "model_optim_rng.pt").write_bytes(left)
    summary = summarize(make.folder)
    assert (summary.exit_code, summary.complete) == (1, False)
    assert all("mp_rank_01_000" in (problem.file or "") for problem in summary.all_problems)
    assert len(summary.all_problems) <= 2


def test_ranks_without_their_file_beyond_the_tenth_are_counted(make, summarize):
    """Rank 0 has its file, 13 others have none: ten are named, three counted."""
    for rank in range(14):
        (make.folder / f"mp_rank_{rank:02d}").mkdir()
    torch.save({"model": {"w": torch.ones(2)}}, make.folder / "mp_rank_00/model_optim_rng.pt")
    missing = [p for p in summarize(make.folder).all_problems if p.code == "MISSING_FILE"]
    assert [p.file for p in missing] == [*(f"mp_rank_{rank:02d}" for rank in range(1, 11)), None]
    assert missing[-1].message == "3 more ranks: no model_optim_rng.pt"
