"""Run on two ranks: every collective once with known numbers, then a short sweep; rank 0 prints JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from steptime.bench import timings
from steptime.bench.runs import collectives

CPU = torch.device("cpu")


def results(group):
    """What each rank finds: rank r hands in 1, 2, 3 ... 8, times 10^r."""
    found = {}
    for kind in collectives.KINDS:
        call = collectives.prepare(kind, 32, group, CPU, torch.float32)
        call.given.copy_(torch.arange(1, call.given.numel() + 1) * 10.0 ** dist.get_rank())
        call.run()
        found[kind] = call.result.tolist()
    return found


def main():
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    mine: list[object] = [None, None]
    dist.all_gather_object(mine, results(group))
    slowest = collectives.slowest([1.0 + dist.get_rank(), 5.0 - dist.get_rank()], group, CPU)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    collectives.LARGEST["cpu"] = 2**15
    found, notes = collectives.sweep(mesh, CPU, 0.05)
    real = dist.broadcast
    dist.broadcast = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no broadcast here\nat all"))
    _, refused = collectives.sweep(mesh, CPU, 0.0)
    dist.broadcast = real
    if dist.get_rank() == 0:
        said = {
            "results": mine, "slowest": slowest, "rows": [timings.to_dict(r) for r in found], "notes": notes,
            "refused": refused,
        }  # fmt: skip
        sys.stdout.write(json.dumps(said) + "\n")
    dist.destroy_process_group()


main()
