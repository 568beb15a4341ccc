"""Directories of many ranks: Megatron, DeepSpeed, FSDP2 and torch.distributed.checkpoint, Megatron-Core's own writer."""

import argparse
import pickle
import textwrap

import forked
import pytest
import torch
from bench.launch import fork

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


def deepspeed(folder, stage, ranks=2):
    """One tag as DeepSpeed's engine writes it; structures from its checkpoint constants."""
    tag = folder / "global_step10"
    tag.mkdir()
    (folder / "latest").write_text("global_step10")
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


def run_ranks(code, folder):
    """A script on two ranks, told the folder that they write to."""
    script = folder / "ranks.py"
    script.write_text(code)
    done = fork(script, folder, ranks=[{"RANK": str(rank)} for rank in range(2)])
    assert done.returncode == 0, done.stderr
    script.unlink()


FSDP2 = textwrap.dedent(
    """
    import os, sys, warnings, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.checkpoint.state_dict import get_state_dict
    warnings.simplefilter("ignore")
    rank, folder = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 3))
    for layer in model: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 9)).sum().backward(); optimizer.step()
    states, optim = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optim": optim}, checkpoint_id=f"{folder}/dcp")
    torch.save({"model": model.state_dict()}, f"{folder}/model_world_size_2_rank_{rank}.pt")
    dist.barrier()
    os._exit(0)  # no teardown in which one rank could outlive the other
    """
)


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory):
    """A model saved by two gloo ranks, as one distributed checkpoint and as one file per rank."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_ranks(FSDP2, folder)
    return folder


NUMEL = 9 * 5 + 5 + 5 * 3 + 3


def test_fsdp2_distributed_checkpoint(fsdp2, summarize):
    summary = summarize(fsdp2 / "dcp")
    assert {t.name: t.shape for t in summary.model} == {
        "0.weight": (5, 9),
        "0.bias": (5,),
        "1.weight": (3, 5),
        "1.bias": (3,),
    }
    assert (summary.params, summary.exit_code, summary.complete) == (NUMEL, 0, True)
    assert summary.by_role["optimizer"]["kind"] == "adam"
    assert [row["name"] for row in summary.sections[0].ranks] == ["rank 0", "rank 1"]
    with (fsdp2 / "dcp/.metadata").open("rb") as file:
        metadata = pickle.load(file)
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if hasattr(v, "size")}
    assert len(tensors) == len(summary.tensors)
    assert sum(v.size.numel() for v in tensors.values()) == sum(t.numel for t in summary.tensors)


SHARDED = textwrap.dedent(
    """
    import os, sys, warnings, torch, torch.distributed as dist
    warnings.simplefilter("ignore")
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    rank, folder = int(os.environ["RANK"]), sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    torch.save({"w": sharded_tensor.zeros(spec, 5, 4)}, f"{folder}/model.rank_{rank}.pth")
    dist.barrier()
    os._exit(0)  # no teardown in which one rank could outlive the other
    """
)


def test_sharded_tensors_of_two_ranks(make, summarize):
    run_ranks(SHARDED, make.folder)
    (make.folder / "rendezvous").unlink(missing_ok=True)
    summary = summarize(make.folder)
    assert (summary.params, summary.exit_code) == (20, 0)
    assert [(t.shape, t.whole, t.offsets) for t in summary.tensors] == [
        ((3, 4), (5, 4), (0, 0)), ((2, 4), (5, 4), (3, 0)),
    ]  # fmt: skip


def test_fsdp2_rank_files_hold_dtensors(fsdp2, summarize):
    import shutil

    folder = fsdp2 / "ranks"
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        shutil.copy(fsdp2 / f"model_world_size_2_rank_{rank}.pt", folder)
    summary = summarize(folder)
    assert (summary.params, summary.exit_code) == (NUMEL, 0)
    weight = next(t for t in summary.tensors if t.name == "0.weight")
    assert (weight.shape, weight.whole, weight.note) == ((3, 9), (5, 9), "DTensor Shard(0)")
    (folder / "model_world_size_2_rank_1.pt").unlink()
    missing = summarize(folder)
    assert [p.code for p in missing.all_problems] == ["MISSING_RANK"]


def test_unfinished_and_damaged_distributed_checkpoints(fsdp2, summarize, codes, make):
    import shutil

    shutil.copytree(fsdp2 / "dcp", make.folder / "a")
    data = make.folder / "a/__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    assert codes(summarize(make.folder / "a")) == {"SHORT_FILE"}
    data.unlink()
    summary = summarize(make.folder / "a")
    assert (summary.exit_code, codes(summary), summary.params) == (1, {"MISSING_FILE"}, NUMEL)
    (make.folder / "a/.metadata").unlink()
    summary = summarize(make.folder / "a")
    assert (summary.exit_code, codes(summary)) == (2, {"MISSING_METADATA"})
    assert "incomplete save: .metadata is missing" in summary.all_problems[0].message


def test_metadata_that_runs_code_is_named(make, summarize, codes):
    class Evil:
        def __reduce__(self):
            return __import__("os").system, ("echo owned > /tmp/should_not_exist",)

    make.write(".metadata", pickle.dumps({"state_dict_metadata": {}, "x": Evil()}))
    make.write("__0_0.distcp", b"x")
    summary = summarize(make.folder)
    assert summary.exit_code == 1
    assert "DANGEROUS_PICKLE" in codes(summary)


MCORE = textwrap.dedent(
    """
    def main():  # Megatron starts a process, which imports this file
        import os, sys, argparse, torch, torch.distributed as dist
        folder = sys.argv[1]
        dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1)
        torch.cuda.current_device = lambda: "cpu"
        torch.cuda.synchronize = lambda *a, **k: None
        from megatron.core import dist_checkpointing, parallel_state
        parallel_state.initialize_model_parallel()
        ShardedTensor = dist_checkpointing.ShardedTensor
        state = {"args": argparse.Namespace(hidden_size=8, num_layers=2, tensor_model_parallel_size=1), "iteration": 30}
        for layer in range(2):
            key = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
            state[key] = ShardedTensor.from_rank_offsets(key, torch.ones(4, 8))
        key = "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"
        state[key] = ShardedTensor.from_rank_offsets(key, torch.ones(4, 8))
        os.makedirs(folder)
        dist_checkpointing.save(state, folder)
        dist.barrier()
        os._exit(0)  # no teardown in which one rank could outlive the other

    if __name__ == "__main__":
        main()
    """
)


def test_megatron_core_writer(make, summarize, tmp_path):
    folder, script = make.folder / "iter_0000030", tmp_path / "mcore.py"
    script.write_text(MCORE)
    done = forked.run(forked.server("mcore_imports"), script, folder)
    assert done.returncode == 0, done.stderr
    summary = summarize(make.folder)
    assert summary.sections[0].format == "Megatron dist_checkpointing (torch_dist)"
    assert (summary.params, summary.step, summary.exit_code) == (64, 30, 0)
    assert summary.sections[0].facts["args"]["hidden_size"] == 8
    assert summary.by_role["optimizer"]["bytes"] == 128


def test_accelerate_and_trainer_directory(fsdp2, make, summarize):
    import shutil

    folder = make.folder / "checkpoint-20"
    shutil.copytree(fsdp2 / "dcp", folder / "pytorch_model_fsdp_0")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    torch.save({"python": (3, (1, 2), None), "cpu": torch.zeros(4)}, folder / "rng_state_0.pth")
    make.write("checkpoint-20/trainer_state.json", b"{}")
    summary = summarize(make.folder)
    assert (summary.params, summary.step, summary.exit_code) == (NUMEL, 20, 0)
    assert summary.by_role["other"]["bytes"] == 16


def test_one_megatron_rank_is_a_slice_of_the_model_its_arguments_describe(make, summarize):
    make.megatron(make.folder)
    path = make.folder / "iter_0005000" / "mp_rank_00_000" / "model_optim_rng.pt"
    summary = summarize(path)
    assert (summary.exit_code, summary.all_problems) == (0, [])
    found = {key: summary.architecture[key]["value"] for key in ("n_layers", "inter_sz", "vocab_sz", "n_q_heads")}
    assert found == {"n_layers": 4, "inter_sz": 160, "vocab_sz": 512, "n_q_heads": 8}
    assert summary.sections[0].notes == [
        "one rank of TP 2 x PP 2: shapes are slices; the directory above has the whole model"
    ]


def test_a_data_file_speaks_for_its_directory(fsdp2, summarize):
    whole = summarize(fsdp2 / "dcp")
    for data in (fsdp2 / "dcp").glob("*.distcp"):
        assert (summarize(data).id, summarize(data).params) == (whole.id, whole.params)


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
