"""The header of a results file: where, with what and as whom a measurement was made. Nothing here fails for want of a tool.

Only variables that are named here, or whose prefix is, are read from the environment: no tokens, no keys.
"""

from __future__ import annotations

import getpass
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import steptime
from steptime.bench.device import cpu_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.bench.world import World

SLURM = (
    *(
        "SLURM_JOB_ID",
        "SLURM_JOB_NAME",
        "SLURM_JOB_PARTITION",
        "SLURM_CLUSTER_NAME",
        "SLURM_STEP_ID",
        "SLURM_ARRAY_TASK_ID",
    ),
    *("SLURM_NNODES", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_TASKS_PER_NODE"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_CPU_BIND", "SLURM_MEM_PER_NODE"),
    *(
        "SLURM_GPUS",
        "SLURM_GPUS_ON_NODE",
        "SLURM_GPUS_PER_NODE",
        "SLURM_GPUS_PER_TASK",
        "SLURM_STEP_GPUS",
        "SLURM_JOB_GPUS",
    ),
    *("SLURM_DISTRIBUTION", "SLURM_TOPOLOGY_ADDR", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
)
CHANGES_RESULTS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LD_PRELOAD", "MALLOC_CONF", "PYTHONHASHSEED"),
)
PREFIXES = ("NCCL_", "RCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_", "UCX_", "FI_")
"""Settings of libraries that move or compute."""
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSW", "CREDENTIAL")
ML_PACKAGES = (
    *("torch", "torchvision", "torchao", "torchtitan", "triton", "numpy", "flash_attn", "transformer_engine", "apex"),
    *("megatron", "deepspeed", "transformers", "accelerate", "xformers", "liger_kernel", "mpi4py", "psutil", "jax"),
)
PATIENCE_S = 20.0
"""How long a tool may take to answer [s]."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DISTRIBUTIONS = {"megatron": "megatron-core", "flash_attn": "flash-attn", "transformer_engine": "transformer-engine"}


def diagnostics(
    world: World | None, config: Mapping[str, Any] | None = None, seed: int | None = None
) -> dict[str, Any]:
    """The header as plain data for JSON; memory in bytes, the date in UTC (ISO 8601). What cannot be known is None.

    Args:
        world: this process among all, or None before it is known.
        config: the resolved config, to be echoed.
        seed: what the random number generators were seeded with.
    """
    cwd = _or_none(os.getcwd)  # a folder may be gone
    return {
        "argv": list(sys.argv),
        "cwd": cwd,
        "host": _or_none(socket.gethostname),
        "user": _or_none(getpass.getuser),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _commit(Path(cwd)) if cwd else None,
        "steptime": {"version": steptime.__version__, "git": _own_commit()},
        "python": {"version": platform.python_version(), "prefix": sys.prefix},
        "platform": platform.platform(),
        "world": None if world is None else _world(world),
        **_torch(),
        "nvidia_smi": _lines("nvidia-smi", "-L"),
        "driver": _driver(),
        "cpu": _cpu(),
        "memory_bytes": _memory_bytes(),
        "slurm": {name: os.environ[name] for name in SLURM if name in os.environ},
        "environment": _settings(os.environ),
        "packages": _packages(),
        "seed": seed,
        "config": None if config is None else dict(config),
    }


def text(header: Mapping[str, Any]) -> str:
    """The header for people and logs: one line per fact, what is unknown or empty left out."""
    shown = {key: value for key, value in header.items() if key not in {"config", "argv", "world"}}
    shown["argv"] = " ".join(header["argv"])
    shown["world"] = (header["world"] or {}).get("line")
    return "".join(f"{key.replace('_', ' ')}: {words}\n" for key, value in shown.items() if (words := _words(value)))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words}" for key, item in value.items() if (words := _words(item)))
    if isinstance(value, list):
        return "; ".join(map(_words, value))
    return "" if value is None else str(value)


def _or_none(ask: Callable[[], Any]) -> Any:
    """What `ask` says; None where the system will not say."""
    try:
        return ask()
    except (OSError, KeyError, ImportError, ValueError, RuntimeError, subprocess.SubprocessError):
        return None


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd=cwd)  # noqa: S603
    return done.stdout.strip()


def _lines(*command: str) -> list[str]:
    found = _or_none(lambda: _run(*command))
    return found.splitlines() if found else []


def _commit(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that a folder is in, and whether it has changes; None outside one."""
    head = _or_none(lambda: _run("git", "rev-parse", "HEAD", cwd=folder))
    if not head:
        return None
    changes = _or_none(lambda: _run("git", "status", "--porcelain", "--untracked-files=no", cwd=folder))
    return {"commit": head, "dirty": None if changes is None else bool(changes)}


def _own_commit() -> dict[str, Any] | None:
    """Of the package, where it is a checkout: installed into some other repository's tree it has none."""
    root = Path(steptime.__file__).parents[1]
    return _commit(root) if (root / ".git").exists() else None


def _world(world: World) -> dict[str, Any]:
    fields = world._asdict()
    return fields | {"device": str(world.device), "line": world.line}


def _torch() -> dict[str, Any]:
    """Versions of torch and of what it was built with, its threads and its GPUs (names, bytes)."""
    import torch
    from torch.cuda import nccl as library

    cuda = torch.cuda.is_available()
    nccl = _or_none(library.version) if cuda else None
    visible = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    return {
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": _or_none(torch.backends.cudnn.version),
            "nccl": ".".join(map(str, nccl)) if nccl else None,
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.total_memory, "multiprocessors": gpu.multi_processor_count}
            for gpu in visible
        ],
    }


def _driver() -> str | None:
    """Of the GPU: the kernel module's own line, else nvidia-smi's."""
    line = _or_none(partial(DRIVER_FILE.read_text, encoding="utf-8"))
    if line:
        return str(line).splitlines()[0].removeprefix("NVRM version:").strip()
    found = _lines("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found[0] if found else None


def _cpu() -> dict[str, Any]:
    """Model, logical cores, and those that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return {
        "model": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity else os.cpu_count(),
    }


def _memory_bytes() -> int | None:
    """The host's."""

    def ask() -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    found: int | None = _or_none(ask) or _or_none(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return found


def _settings(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that change results; a name that may hold a secret is left out whatever its prefix."""
    wanted = (name for name in sorted(env) if name in CHANGES_RESULTS or name.startswith(PREFIXES))
    return {name: env[name] for name in wanted if not any(word in name for word in _SECRET)}


def _packages() -> dict[str, str]:
    """Versions of machine-learning packages that this process has imported."""
    loaded = [name for name in ML_PACKAGES if name in sys.modules]
    found = {name: _or_none(partial(metadata.version, _DISTRIBUTIONS.get(name, name))) for name in loaded}
    return {name: version for name, version in found.items() if version}
