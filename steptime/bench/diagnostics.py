"""The header of a results file: where, with what and by whom a measurement was made. A missing tool is never an error.

Of the environment only variables that are named here, or whose prefix is, are read: no tokens, no keys.
"""

from __future__ import annotations

import getpass
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import steptime
from steptime.bench.device import cpu_name
from steptime.bench.world import World

CHANGES_RESULTS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LD_PRELOAD", "MALLOC_CONF", "PYTHONHASHSEED"),
)
LIBRARIES = ("NCCL_", "RCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_", "UCX_", "FI_")
"""Prefixes of the settings of libraries that compute or communicate."""
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSW", "CREDENTIAL", "JWT")
PACKAGES = (
    *("torch", "torchvision", "torchao", "torchtitan", "triton", "numpy", "flash_attn", "transformer_engine", "apex"),
    *("megatron.core", "deepspeed", "transformers", "accelerate", "xformers", "liger_kernel", "mpi4py", "psutil"),
    "jax",
)
TIMEOUT_S = 20.0
"""Time limit for a tool's answer [s]."""


def diagnostics(
    world: World | None, config: Mapping[str, Any] | None = None, seed: int | None = None
) -> dict[str, Any]:
    """The header as plain data for JSON; memory in bytes, the date in UTC (ISO 8601). Unknown values are None.

    It repeats the resolved config, and the seed of the random number generators.
    """
    import psutil

    cwd = _or_none(os.getcwd)  # a folder may be gone
    own = Path(steptime.__file__).parents[1]  # a checkout, or installed into some other repository's tree
    return {
        "argv": list(sys.argv),
        "cwd": cwd,
        "host": _or_none(socket.gethostname),
        "user": _or_none(getpass.getuser),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _commit(Path(cwd)) if cwd else None,
        "steptime": {"version": steptime.__version__, "git": _commit(own) if (own / ".git").exists() else None},
        "python": {"version": platform.python_version(), "prefix": sys.prefix},
        "platform": platform.platform(),
        "world": world and world._asdict() | {"device": str(world.device), "line": world.line},
        **_torch(),
        "cpu": {
            "model": cpu_name(),
            "cores": os.cpu_count(),
            "usable_cores": len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count(),
        },
        "memory_bytes": int(psutil.virtual_memory().total),
        "slurm": _settings(lambda name: name.startswith("SLURM_")),
        "environment": _settings(lambda name: name in CHANGES_RESULTS or name.startswith(LIBRARIES)),
        "packages": {
            name: str(version)
            for name in PACKAGES
            if (version := getattr(sys.modules.get(name), "__version__", None)) is not None
        },
        "seed": seed,
        "config": None if config is None else dict(config),
    }


def text(header: Mapping[str, Any]) -> str:
    """The header for people and logs: one line per fact; unknown or empty facts are left out."""
    shown = {key: value for key, value in header.items() if key not in {"config", "argv", "world"}}
    shown["argv"] = " ".join(header["argv"])
    shown["world"] = (header["world"] or {}).get("line")
    return "\n".join(f"{key.replace('_', ' ')}: {words}" for key, value in shown.items() if (words := _words(value)))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words}" for key, item in value.items() if (words := _words(item)))
    if isinstance(value, list):
        return "; ".join(map(_words, value))
    return "" if value is None else str(value)


def _or_none(ask: Callable[[], Any]) -> Any:
    """The result of `ask`; None where the system gives none."""
    try:
        return ask()
    except (OSError, KeyError, ImportError, ValueError, RuntimeError):
        return None


def _run(command: str, cwd: Path | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of a tool; 127 where it does not exist or does not answer in time."""
    try:
        done = subprocess.run(  # noqa: S603
            shlex.split(command), capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=cwd
        )
    except (OSError, subprocess.SubprocessError):
        return 127, "", ""
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def _commit(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that a folder is in, and whether it has changes; None outside one."""
    code, head, _ = _run("git rev-parse HEAD", folder)
    if code:
        return None
    code, changes, _ = _run("git status --porcelain --untracked-files=no", folder)
    return {"commit": head, "dirty": None if code else bool(changes)}


def _torch() -> dict[str, Any]:
    """Versions of torch and of what it was built with, its threads, its GPUs (names, bytes) and their driver."""
    import torch
    from torch.cuda import nccl
    from torch.utils import collect_env

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    nccl_version = (_or_none(nccl.version) if gpus else None) or ()
    listed = collect_env.get_gpu_info(_run)  # type: ignore[no-untyped-call]
    return {
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": _or_none(torch.backends.cudnn.version),
            "nccl": ".".join(map(str, nccl_version)) or None,
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.total_memory, "multiprocessors": gpu.multi_processor_count}
            for gpu in gpus
        ],
        "nvidia_smi": listed.splitlines() if listed else [],
        "driver": collect_env.get_nvidia_driver_version(_run),  # type: ignore[no-untyped-call]
    }


def _settings(wanted: Callable[[str], bool]) -> dict[str, str]:
    """Variables of the environment; names that may hold a secret are left out."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if wanted(name) and not any(word in name for word in _SECRET)
    }
