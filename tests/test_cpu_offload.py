"""States in the host's memory: bytes and seconds worked out by hand, readers and writers."""

from __future__ import annotations

import jobs
import pytest
import search_jobs as search

from steptime.answer.result import estimate
from steptime.commands.cli import main
from steptime.job.assembly import Assembly
from steptime.launch.read import read
from steptime.memory.on_host import OnHost
from steptime.memory.on_host import on_host as bytes_on_host
from steptime.memory.states import stage_states

# Llama-3 8B on 8 devices: each updates an eighth of 8,030,261,248 parameters
N = 8030261248 / 8
SCRIPT = """\
export OMP_NUM_THREADS=4
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --ffn-hidden-size 14336 --swiglu --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 \\
  --global-batch-size 64 --bf16 --vocab-size 32000 --tokenizer-type NullTokenizer --use-distributed-optimizer \\
"""
AWARE = "--optimizer-cpu-offload --use-precision-aware-optimizer"


def on_host(changes=None, **said):
    performance = {"cpu_offload": {"optimizer": 1.0} | said} if said is not None else {}
    return jobs.job("llama3-8b", dp=8, performance=performance | (changes or {}))


def held(job):
    (found,) = stage_states(Assembly(job))
    return found


def test_what_leaves_the_device_and_what_the_host_holds():
    """12 bytes a parameter leave (master and two moments in fp32), 16 arrive: the host has a gradient too."""
    plain, half, all_of = (held(on_host(optimizer=share)) for share in (0.0, 0.5, 1.0))
    assert plain.optimizer_bytes == pytest.approx(12 * N, rel=1e-6)
    assert (half.optimizer_bytes, all_of.optimizer_bytes) == (plain.optimizer_bytes / 2, 0.0)
    assert plain.host_bytes == 0.0
    assert (half.host_bytes, all_of.host_bytes) == pytest.approx((8 * N, 16 * N), rel=1e-6)
    assert (all_of.params_bytes, all_of.gradients_bytes) == (plain.params_bytes, plain.gradients_bytes)


def test_masters_that_stay():
    """Without the precision-aware optimizer 8 bytes leave: 15.3 GB of Qwen3-30B-A3B at tp 2, pp 2, ep 4 and 16 H100.

    Source: Megatron-Bridge docs/training/cpu-offloading.md: "3.8 GB saved per 25%", "up to 15.3 GB at 100%".
    """
    layout = {"tp": 2, "pp": 2, "dp": 4, "ep": 4, "sp": True}
    plan = {"model": "qwen3-30b-a3b", "parallelism": layout, "hardware": "dgx-h100"}
    plan["data"] = {"gbs": 32, "seqlen": 4096, "microbatch_sz": 1}
    bytes_of = {
        share: estimate(plan | {"performance": {"cpu_offload": {"optimizer": share, "keep_masters": True}}})
        .memory.stages[0].optimizer_bytes
        for share in (0.0, 0.25, 1.0)
    }  # fmt: skip
    assert (bytes_of[0.0] - bytes_of[0.25]) / 1e9 == pytest.approx(3.8, abs=0.05)
    assert (bytes_of[0.0] - bytes_of[1.0]) / 1e9 == pytest.approx(15.3, abs=0.05)


def test_seconds_in_turn():
    """Of 1.0038e9 parameters: 4 B down and up at 55.6 GB/s, 28 B at one thread's 12 GB/s; coming up 6 B are cast at 2.97 TB/s.

    0.07221 s down, 2.3422 s on the host, 0.07221 + 0.00203 s up.
    """
    host = estimate(on_host()).timing.optimizer.host
    legs = host.down_s, host.update_s, host.up_s
    assert legs == pytest.approx((4 * N / 55.6e9, 28 * N / 12e9, 4 * N / 55.6e9 + 6 * N / (0.887 * 3350e9)), rel=1e-6)
    assert legs == pytest.approx((0.07221, 2.3422, 0.07424), rel=1e-3)
    assert host.copied_s == pytest.approx(legs[0] + legs[2])
    assert host.waited_s == legs[1]


def test_threads_up_to_the_nodes_rate():
    """Four threads are four times as fast; sixteen share the node's 491.5 GB/s among 8 devices, 61.4 GB/s each."""
    seconds = [estimate(on_host(threads=n)).timing.optimizer.host.update_s for n in (4, 16)]
    assert seconds == pytest.approx([28 * N / 48e9, 28 * N / (491.5e9 / 8)], rel=1e-6)


def test_seconds_of_the_pipeline_of_tensors():
    """291 tensors over 8 ranks are 36.4 a device: 2.3422 s on the host, and the copies of one in 36.4, 0.1465 / 36.4 s.

    Of a layer's 9 tensors of the usual block, Megatron fuses q, k, v and gate, up: 6; 32 layers, embedding, norm and head: 195;
    195 / 8 = 24.4 tensors, 0.14645 / 24.4 = 6.0 ms.
    """
    found = estimate(on_host(overlap=True))
    host = found.timing.optimizer.host
    assert host.waited_s == host.update_s
    assert host.copied_s == pytest.approx((host.down_s + host.up_s) * 8 / 195)
    assert host.hidden_s == pytest.approx((host.down_s + host.up_s) * (1 - 8 / 195))
    assert sum(found.time.parts_s.values()) == pytest.approx(found.step_s)


def test_a_device_that_updates_longer_hides_the_host():
    """A thousandth of the parameters on the host: 2.3 ms there, beside the 11 ms of the device's own update."""
    host = estimate(on_host(optimizer=0.001)).timing.optimizer.host
    assert 0.0 < host.update_s < 0.01
    assert host.waited_s == 0.0


def test_a_host_that_is_too_small():
    """128.5 GB of states on a node with 100 GB do not fit, however much room the devices have."""
    job = on_host().replace(**{"hardware.overrides": {"host.memory_bytes": "100 GB"}})
    memory = estimate(job).memory
    assert memory.host_bytes == pytest.approx(8 * 16 * N, rel=1e-6)
    assert memory.verdict == "does_not_fit"
    assert memory.least_bytes < memory.capacity_bytes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (f"{AWARE} --use-torch-optimizer-for-cpu-offload", {"optimizer": 1.0, "threads": 4}),
        (
            f"{AWARE} --optimizer-offload-fraction 0.25 --overlap-cpu-optimizer-d2h-h2d",
            {"optimizer": 0.25, "overlap": True, "threads": 4},
        ),
        ("--optimizer-cpu-offload", {"optimizer": 1.0, "keep_masters": True, "threads": 4}),
    ],
)
def test_megatrons_flags(tmp_path, flags, said):
    """--optimizer-offload-fraction is 1 by default; the hybrid optimizer's masters and moments are fp32."""
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT + f"  {flags}\n")
    performance = read("megatron", str(path)).config["performance"]
    assert performance["cpu_offload"] == said
    assert "master_dtype" not in performance


def test_written_and_read_again(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: llama3-8b\nparallelism: {tp: 1, pp: 1, dp: 8}\nhardware: dgx-h100\n"
        "data: {gbs: 64, seqlen: 4096, microbatch_sz: 1}\n"
        "performance: {cpu_offload: {optimizer: 0.5, overlap: true, threads: 6}}\n"
    )
    assert main([str(path), "--export", "megatron"]) == 0
    script = tmp_path / "run.sh"
    script.write_text(capsys.readouterr().out)
    assert read("megatron", str(script)).config["performance"]["cpu_offload"] == {
        "optimizer": 0.5, "overlap": True, "threads": 6,
    }  # fmt: skip


def test_the_report_says_where_they_are(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: llama3-8b\nparallelism: {tp: 1, pp: 1, dp: 8}\nhardware: dgx-h100\n"
        "data: {gbs: 64, seqlen: 4096, microbatch_sz: 1}\nperformance: {cpu_offload: {optimizer: 1}}\n"
    )
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "optimizer on the host" in out
    assert "copies to and from the host" in out
    assert "states on the host, a node 119.66" in " ".join(out.split())  # GiB: 16 B of 8.03e9 parameters
    assert main(["explain", str(path), "host_optimizer"]) == 0
    assert "16 B stored and 28 B read and written per parameter" in capsys.readouterr().out


COLUMNS = {
    "half, tensor by tensor": {"optimizer": 0.5, "overlap": True},
    "masters too": {"optimizer": 0.75, "keep_masters": True},
    "all": {"optimizer": 1.0, "threads": 4},
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_the_rows(name):
    """The search's memory bit for bit that of an estimate, its step within what the pipeline's closed form leaves."""
    job = search.plan(performance={"cpu_offload": COLUMNS[name]}, hidden_sz=2048)
    for block, choice, row in search.sampled(search.blocks_of(job, 16), 12):
        found = estimate(job.replace(**block.changes(choice, row)))
        assert block.allocated_bytes[choice, row] == found.memory.peak_allocated_bytes + sum(
            found.memory.overhead_bytes
        )
        if found.memory.fits:
            error = abs(block.step_s[choice, row] / found.step_s - 1.0)
            assert error < (1e-9 if block.stages.pp == 1 else 0.05)


# --- FSDP ---------------------------------------------------------------------------------------------------------------


def sharded(changes=None, micro_batches=1, **fsdp):
    performance = {"software": "torchtitan", "cpu_offload": {"params": True}} | (changes or {})
    parallelism = {"dp": 8, "fsdp": {"reshard_after_forward": True} | fsdp}
    return jobs.job("llama3-8b", gbs=8 * micro_batches, performance=performance, **parallelism)


def test_fsdp_puts_everything_on_the_host():
    """fp32 shards, gradients and two moments: 16 bytes of an eighth of 8.03e9 parameters for each of 8 devices."""
    found = estimate(sharded())
    (row,) = found.memory.stages
    assert (row.params_bytes, row.gradients_bytes, row.optimizer_bytes) == (0.0, 0.0, 0.0)
    assert found.memory.host_bytes == 16 * 8030261248
    plain = estimate(sharded({"cpu_offload": {}}))
    left = plain.memory.stages[0].persisting_bytes - row.persisting_bytes
    assert left == 16 * N


def test_seconds_of_fsdps_update():
    """AdamW moves 28 bytes of each on the host, clipping 12: 1.0038e9 x 40 B / 12 GB/s = 3.346 s; no copies follow."""
    host = estimate(sharded()).timing.optimizer.host
    assert (host.down_s, host.up_s) == (0.0, 0.0)
    assert host.waited_s == pytest.approx(40 * N / 12e9, rel=1e-2)


def test_further_micro_batches_are_added_by_the_host():
    """Of three micro-batches two wait for their gradients, 4 B at 55.6 GB/s, and for the sums, 12 B at 12 GB/s."""
    one, three = (estimate(sharded(micro_batches=n)).timing.optimizer.host for n in (1, 3))
    assert three.down_s == pytest.approx(2 * 4 * N / 55.6e9)
    assert three.update_s - one.update_s == pytest.approx(2 * 12 * N / 12e9)


def test_copies_of_shards_beside_the_collectives():
    """A block's shard of 218,112,000 / 8 parameters in fp32 goes up in 1.961 ms before its all-gather, and down as long."""
    here, there = (estimate(sharded(changes)).timing.fsdp for changes in ({"cpu_offload": {}}, {}))
    assert here is not None
    assert there is not None
    gathered = there.forward.network_s - here.forward.network_s
    reduced = there.backward.network_s - here.backward.network_s
    assert gathered == pytest.approx(4 * N / 55.6e9)
    root = 4 * (2 * 128256 * 4096 + 4096) / 8 / 55.6e9  # the root is gathered once
    assert reduced == pytest.approx(2 * 4 * N / 55.6e9 - root)


TRAINER = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nmax_seq_length: 4096\nnum_processes: 8\nbf16: true\n"
PLUGIN = "fsdp: full_shard\nfsdp_config: {fsdp_offload_params: true, fsdp_version: 2}\n"


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("torchtitan", "a.toml", "[model]\nname='llama3'\nflavor='8B'\n[training]\nenable_cpu_offload=true\n"),
        ("transformers", "a.yaml", TRAINER + PLUGIN),
        ("transformers", "b.yaml", TRAINER + "fsdp: full_shard auto_wrap offload\n"),
    ],
)
def test_launch_files_of_fsdp(tmp_path, kind, name, text):
    """torchtitan's enable_cpu_offload, accelerate's fsdp_offload_params, and the word in the Trainer's fsdp."""
    path = tmp_path / name
    path.write_text(text)
    assert read(kind, str(path)).config["performance"]["cpu_offload"] == {"params": True}


def test_torchtitans_key_is_written(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: llama3-8b\nparallelism: {tp: 1, pp: 1, dp: 8, fsdp: {}}\nhardware: dgx-h100\n"
        "data: {gbs: 8, seqlen: 4096, microbatch_sz: 1}\nperformance: {software: torchtitan, cpu_offload: {params: true}}\n"
    )
    assert main([str(path), "--export", "torchtitan"]) == 0
    assert "enable_cpu_offload = true" in capsys.readouterr().out


def test_columns_of_fsdp_are_the_rows():
    job = sharded(micro_batches=4).replace(model=search.MODEL)
    for block, choice, row in search.sampled(search.blocks_of(job, 16), 12):
        found = estimate(job.replace(**block.changes(choice, row)))
        assert block.allocated_bytes[choice, row] == found.memory.peak_allocated_bytes + sum(
            found.memory.overhead_bytes
        )
        if found.memory.fits:
            assert block.step_s[choice, row] == pytest.approx(found.step_s, rel=1e-9)


# --- DeepSpeed ----------------------------------------------------------------------------------------------------------


def offloaded(micro_batches=1, **said):
    performance = {"software": "deepspeed", "cpu_offload": {"optimizer": 1.0} | said}
    return jobs.job("llama3-8b", dp=8, zero_level=3, gbs=8 * micro_batches, performance=performance)


def test_what_zero_offload_holds():
    """The host has 4 + 4 + 8 of fp32 and 2 of bf16 gradients; with offload_param 2 more, which leave the device."""
    states, both = (estimate(offloaded(params=params)) for params in (False, True))
    (row,), (bare,) = states.memory.stages, both.memory.stages
    assert (row.params_bytes, row.gradients_bytes, row.optimizer_bytes) == (pytest.approx(2 * N), 0.0, 0.0)
    assert (bare.params_bytes, bare.optimizer_bytes) == (0.0, 0.0)
    assert (states.memory.host_bytes, both.memory.host_bytes) == pytest.approx((18 * 8 * N, 20 * 8 * N))


def test_seconds_of_zero_offload():
    """Scaled 8, updated 28, cast 6: 42 B at 12 GB/s; up come 2 B at 55.6 GB/s after it."""
    host = estimate(offloaded()).timing.optimizer.host
    assert (host.down_s, host.up_s) == pytest.approx((0.0, 2 * N / 55.6e9))
    assert host.waited_s == pytest.approx(42 * N / 12e9)


def test_gradients_of_zero_offload_go_down_in_backward():
    """2 B down and 2 B up in each micro-batch, and 4 B of fp32 down after the last: in each of two 6 B at 55.6 GB/s."""
    there = estimate(offloaded(micro_batches=2)).timing.fsdp
    here = estimate(offloaded(micro_batches=2, optimizer=0.0)).timing.fsdp
    assert there is not None
    assert here is not None
    assert there.backward.network_s - here.backward.network_s == pytest.approx(6 * N / 55.6e9)


def test_deepspeeds_config_is_written(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: llama3-8b\nparallelism: {tp: 1, pp: 1, dp: 8, zero_level: 3}\nhardware: dgx-h100\n"
        "data: {gbs: 8, seqlen: 4096, microbatch_sz: 1}\n"
        "performance: {software: deepspeed, cpu_offload: {optimizer: 0.5, params: true}}\n"
    )
    assert main([str(path), "--export", "deepspeed"]) == 0
    file = tmp_path / "ds.json"
    file.write_text(capsys.readouterr().out)
    sets = {"model": "llama3-8b", "data.seqlen": 4096, "parallelism.dp": 8}
    said = read("deepspeed", str(file), sets).config["performance"]["cpu_offload"]
    assert said == {"optimizer": 0.5, "params": True}


def test_adamw_op_by_op_on_the_host():
    """accelerate's is not fused: 20 accesses of 4 bytes, 4 of them of the parameter, 14 of the moments, 2 of the gradient."""
    clipped = 12.0
    assert bytes_on_host(sharded({"software": "accelerate"})).touched == 20 * 4.0 + clipped


def test_bytes_of_each_framework():
    """What is not named is not moved. Megatron: 16 held, 28 touched, 4 down, 4 up, cast from 4 to 2, and with all masters on the
    host 4 read once more. FSDP in fp32: 16 held, 28 and 12 touched; 4 up and 4 down beside the collectives, 12 to add. ZeRO: 18
    held, 42 touched, 2 up; a micro-batch's 2 go down and come up, and of two 4 / 2 of fp32; with parameters 20 held and the 2
    gathered.
    """
    assert bytes_on_host(on_host()) == OnHost(16, 28, down=4, up=4, cast=6, read_on_device=4)
    assert bytes_on_host(on_host(keep_masters=True)).read_on_device == 0
    assert bytes_on_host(sharded()) == OnHost(16, 28 + 12, gathered=4, reduced=4, added=12)
    assert bytes_on_host(offloaded(2)) == OnHost(18, 42, up=2, reduced=4 + 4 / 2)
    assert bytes_on_host(offloaded(2, params=True)) == OnHost(20, 42, gathered=2, reduced=4 + 4 / 2)
