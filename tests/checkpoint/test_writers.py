"""Directories that torch.distributed.checkpoint, FSDP2 and Megatron-Core wrote themselves, on ranks of this machine."""

import argparse
import pickle
import textwrap

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
from bench.launch import fork


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
    """Rank 0 has the first half of the rows, rounded up: (3 x 9 + 3) + (2 x 5 + 2) = 42, rank 1 18 + 2 + 5 + 1 = 26.

    Adam: two numbers per parameter, and four steps.
    """
    summary = summarize(fsdp2 / "dcp")
    assert {t.name: t.shape for t in summary.model} == {
        "0.weight": (5, 9),
        "0.bias": (5,),
        "1.weight": (3, 5),
        "1.bias": (3,),
    }
    assert (summary.params, summary.exit_code, summary.complete) == (NUMEL, 0, True)
    assert summary.by_role["optimizer"]["kind"] == "adam"
    rows = summary.sections[0].ranks
    assert [(row["name"], row["params"], row["model_bytes"]) for row in rows] == [
        ("rank 0", 42, 168),
        ("rank 1", 26, 104),
    ]
    assert sum(row["optimizer_bytes"] for row in rows) == summary.by_role["optimizer"]["bytes"] == 4 * (2 * NUMEL + 4)
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_arguments_inside_a_data_file(make, summarize, codes):
    """Newer Megatron-Core has no common.pt: the common state is an object in a data file, a torch file of its own."""
    args = argparse.Namespace(tensor_model_parallel_size=2, hidden_size=8)
    common = argparse.Namespace(args=args, iteration=7)
    dcp.save({"model": {"w": torch.ones(4, 8)}, "common_state": common}, checkpoint_id=make.folder)
    make.write("metadata.json", b'{"sharded_backend": "torch_dist"}')
    summary = summarize(make.folder)
    assert (summary.params, summary.step, codes(summary)) == (32, 7, set())
    assert summary.sections[0].parallelism == {"tp": 2, "source": "args"}
    assert summary.sections[0].facts["args"]["hidden_size"] == 8


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


def test_a_data_file_speaks_for_its_directory(fsdp2, summarize):
    whole = summarize(fsdp2 / "dcp")
    for data in (fsdp2 / "dcp").glob("*.distcp"):
        assert (summarize(data).id, summarize(data).params) == (whole.id, whole.params)
