"""How fast headers are read: sizes of real models as sparse files, each case timed in a process of its own.

    python benchmarks/checkpoint.py [FOLDER]

Writes the files below FOLDER (a temporary directory by default; a few MB on disk, terabytes in name), prints one line per
case: wall time of the first and the best call in process, CPU time, peak memory, and the target. Needs torch to write.
"""

import argparse
import contextlib
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
State = dict[str, Any]

PROBE = """
import gc, json, re, sys, time
from steptime.base.collector import without_collector
from steptime.report.checkpoint_summary import report, summarize_checkpoint
times, cpu = [], []
for _ in range(int(sys.argv[2])):
    wall, busy = time.perf_counter(), time.process_time()
    with without_collector():  # as the command
        summary = summarize_checkpoint(sys.argv[1])
        report(summary)
    cpu.append(time.process_time() - busy)
    times.append(time.perf_counter() - wall)
summary.params
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps({"first": times[0], "best": min(times), "cpu": min(cpu), "peak_mb": peak / 1024, "tensors": len(summary.tensors),
  "bytes": summary.totals["logical_bytes"], "codes": sorted({p.code for p in summary.all_problems})}))
"""


def llama_shapes(layers: int, hidden: int, inter: int, vocab: int, kv: int) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (vocab, hidden)
    for n in range(layers):
        p = f"model.layers.{n}."
        yield f"{p}self_attn.q_proj.weight", (hidden, hidden)
        yield f"{p}self_attn.k_proj.weight", (kv, hidden)
        yield f"{p}self_attn.v_proj.weight", (kv, hidden)
        yield f"{p}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{p}mlp.gate_proj.weight", (inter, hidden)
        yield f"{p}mlp.up_proj.weight", (inter, hidden)
        yield f"{p}mlp.down_proj.weight", (hidden, inter)
        yield f"{p}input_layernorm.weight", (hidden,)
        yield f"{p}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


SMALL = dict(llama_shapes(16, 2048, 5632, 32000, 512))  # 0.85 billion parameters, 1.7 GB in bf16
LARGE = dict(llama_shapes(126, 16384, 53248, 128256, 1024))  # Llama 3.1 405B


def size_of(shape: Shape) -> int:
    total = 2
    for n in shape:
        total *= n
    return total


def sparse_safetensors(path: Path, shapes: Shapes) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at := at + size_of(shape)]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def sparse_shards(folder: Path, shapes: Shapes, count: int) -> None:
    folder.mkdir()
    names, total, weight_map = list(shapes), 0, {}
    size = -(-len(names) // count)
    files = [names[n : n + size] for n in range(0, len(names), size)]
    while len(files) < count:  # split the largest until there are enough
        files.sort(key=len)
        last = files.pop()
        files += [last[: len(last) // 2], last[len(last) // 2 :]]
    for number, own in enumerate(files, 1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        sparse_safetensors(folder / file, {name: shapes[name] for name in own})
        weight_map |= dict.fromkeys(own, file)
        total += sum(size_of(shapes[name]) for name in own)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@contextlib.contextmanager
def fake() -> Iterator[ModuleType]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        yield torch


def sparse_pt(path: Path, shapes: Shapes, wrap: Callable[[State], State] = lambda state: state) -> None:
    with fake() as torch:
        state = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        torch.save(wrap(state), path)


def megatron(folder: Path) -> None:
    """TP 8 x PP 9, 253 tensors of a rank, each file 54 GB: written once, hard-linked 72 times as the ranks."""
    hidden, inter, layers = 16384, 53248, 27
    shapes = {"embedding.word_embeddings.weight": (16032, hidden)}
    for n in range(layers):
        p = f"decoder.layers.{n}."
        shapes[f"{p}self_attention.linear_proj.weight"] = (hidden, hidden // 8)
        shapes[f"{p}self_attention.linear_qkv.weight"] = (18432 // 8, hidden)
        shapes[f"{p}self_attention.linear_qkv.layer_norm_weight"] = (hidden,)
        shapes[f"{p}mlp.linear_fc1.weight"] = (2 * inter // 8, hidden)
        shapes[f"{p}mlp.linear_fc1.layer_norm_weight"] = (hidden,)
        shapes[f"{p}mlp.linear_fc2.weight"] = (hidden, inter // 8)
    states = {
        f"{n}.{state}": shape
        for n, shape in enumerate(sorted(shapes.values(), key=size_of)[-45:])
        for state in ("exp_avg", "exp_avg_sq")
    }
    args = argparse.Namespace(tensor_model_parallel_size=8, pipeline_model_parallel_size=9, num_layers=9 * layers)

    def wrap(state: State) -> State:
        model = {name: state[name] for name in shapes}
        optimizer = {name: state[name] for name in states}
        return {"args": args, "iteration": 7, "checkpoint_version": 3.0, "model": model, "optimizer": optimizer}

    first = folder / "one.pt"
    folder.mkdir()
    sparse_pt(first, shapes | states, wrap)
    for tp in range(8):
        for pp in range(9):
            rank = folder / f"iter_0000007/mp_rank_{tp:02d}_{pp:03d}"
            rank.mkdir(parents=True)
            os.link(first, rank / "model_optim_rng.pt")
    first.unlink()


def dcp_metadata(folder: Path) -> None:
    """3,400 tensors over 64 ranks: 217,600 chunks, 31 MB."""
    import torch
    from torch.distributed.checkpoint import metadata as md
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors, storage = {}, {}
    for number in range(3400):
        name = f"model.layers.{number // 10}.self_attn.w{number % 10}.weight"
        chunks = [md.ChunkStorageMetadata(torch.Size((r * 64, 0)), torch.Size((64, 4096))) for r in range(64)]
        properties = md.TensorProperties(dtype=torch.bfloat16)
        tensors[name] = md.TensorStorageMetadata(properties, torch.Size((4096, 4096)), chunks)
        for rank, chunk in enumerate(chunks):
            storage[md.MetadataIndex(name, chunk.offsets, rank)] = _StorageInfo(
                f"__{rank}_0.distcp", number * 524288, 524288
            )
    folder.mkdir()
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(md.Metadata(tensors, {name: (name,) for name in tensors}, storage), file)
    for rank in range(64):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(3400 * 524288)


def million(path: Path) -> None:
    """100,000 layers of ten matrices 2 x 2, a header of 99 MB."""
    sparse_safetensors(path, {f"layers.{n // 10}.w{n % 10}.weight": (2, 2) for n in range(1_000_000)})


def experts(folder: Path) -> None:
    """61 layers of 5,464 experts with three matrices 2 x 2 each, in 20 shards with an index."""
    names = (f"model.layers.{n // 5464}.mlp.experts.{n % 5464}" for n in range(61 * 5464))
    shapes = {f"{name}.{part}_proj.weight": (2, 2) for name in names for part in ("gate", "up", "down")}
    sparse_shards(folder, shapes, 20)


def small_files(folder: Path, count: int) -> None:
    """Files of two tensors each, all with the same names."""
    folder.mkdir()
    for number in range(count):
        sparse_safetensors(folder / f"part{number}.safetensors", {"a.weight": (2,), "b.weight": (2,)})


def rank_name(folder: Path) -> None:
    """One file that calls itself the rank 20,000,000."""
    folder.mkdir()
    sparse_pt(folder / "zero_pp_rank_20000000_mp_rank_00_model_states.pt", {"w": (2,)}, lambda state: {"module": state})


def run(path: Path, times: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(path), str(times)], capture_output=True, check=True, text=True
    )
    return json.loads(done.stdout)


def torch_pickle_load(path: Path) -> tuple[float, ...]:
    code = (
        "import pickle, sys, time, torch.distributed.checkpoint; w, t = time.perf_counter(), time.process_time();"
        "pickle.load(open(sys.argv[1], 'rb')); print(time.perf_counter() - w, time.process_time() - t)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(path)], capture_output=True, check=True, text=True
    )
    return tuple(map(float, done.stdout.split()))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        sparse_safetensors(folder / "small.safetensors", SMALL)
        sparse_pt(folder / "small.pt", SMALL)
        sparse_shards(folder / "shards", LARGE, 191)
        megatron(folder / "megatron")
        dcp_metadata(folder / "dcp")
        million(folder / "million.safetensors")
        experts(folder / "experts")
        small_files(folder / "files", 20_000)
        rank_name(folder / "rank")
        print(f"{'case':28}{'tensors':>9}{'GB':>9}{'first ms':>10}{'best ms':>9}{'CPU ms':>9}{'peak MB':>9}  target")
        for name, path, times, target in (
            ("safetensors", "small.safetensors", 20, "5 ms"),
            (".pt", "small.pt", 20, "5 ms"),
            ("191 shards", "shards", 20, "20 ms"),
            ("72 Megatron files", "megatron", 5, "1,500 ms, 60 MB"),
            ("DCP, 217,600 chunks", "dcp", 3, "torch's pickle.load"),
            ("a million tensors", "million.safetensors", 1, "10 s, 1 GB"),
            ("a million in shards", "experts", 1, "10 s, 1 GB"),
            ("20,000 files", "files", 1, "5 s, 500 MB"),
            ("rank 20,000,000 by name", "rank", 3, "5 s, 500 MB"),
        ):
            row = run(folder / path, times)
            ms = [f"{row[key] * 1e3:9.2f}" for key in ("first", "best", "cpu")]
            size = f"{row['bytes'] / 1e9:9.1f}"
            print(
                f"{name:28}{row['tensors']:9,}{size} {' '.join(ms)}{row['peak_mb']:9.1f}  {target} {' '.join(row['codes'])}"
            )
        loads = [torch_pickle_load(folder / "dcp/.metadata") for _ in range(3)]
        wall, cpu = min(loads)[0], min(load[1] for load in loads)
        print(f"{'pickle.load of the same':28}{'':18}{'':10} {wall * 1e3:9.2f}{cpu * 1e3:9.2f}")
        for name, path, options in (
            ("command, start to end", "small.safetensors", ()),
            ("command, a million --json", "million.safetensors", ("--json",)),
            ("command, shards --json", "experts", ("--json",)),
            ("command, a million =full", "million.safetensors", ("--json=full",)),
        ):
            print(f"{name:28}{'':18}{'':10} {command(folder / path, *options)}")


def command(path: Path, *options: str) -> str:
    """Wall [ms], CPU time [ms] and peak memory [MB] of the command in a process of its own."""
    code = (
        "import re, sys; from steptime.commands.summarize_ckpt import main; main(sys.argv[1:]);"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-c", code, str(path), *options]
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{(time.perf_counter() - start) * 1e3:9.2f}{cpu * 1e3:9.2f}{int(done.stderr) / 1024:9.1f}"


if __name__ == "__main__":
    main()
