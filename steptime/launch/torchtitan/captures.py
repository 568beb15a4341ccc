"""CUDA graphs of forward and backward in torchtitan's own trainer, on by default since 2026-08-13 (pull request 3559).

Source: pytorch/torchtitan@b5bcd76c torchtitan/config/configs.py (TrainingConfig.disable_cuda_graphs), torchtitan/trainer.py
(_validate_cuda_graphs; train_step, which sets gradients to zero instead of freeing them).
"""

from __future__ import annotations

from steptime.base.words import REFUSED
from steptime.launch.job_keys import JobKeys
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.torchtitan.graph_trainer import is_traced

KEY = "training.disable_cuda_graphs"
_CONFIGS = "torchtitan/config/configs.py"
_WAIT_FOR_NOTHING = {"minimal_async_ep", "hybridep"}
"""Back ends of expert parallelism that a graph can hold: their host waits for no counts (HybridEP with a capacity factor)."""


def in_release(text: str, nearby: NearbyFiles | None) -> bool:
    """Whether the trainer of a config function has CUDA graphs: its module names the switch, or the checkout's own configs do."""
    word = KEY.rpartition(".")[2]
    return word in text or word in ((nearby or NearbyFiles()).text(_CONFIGS) or "")


def captures(keys: JobKeys, pp: int, *, fsdp: bool = True) -> bool:
    """Whether forward and backward are one CUDA graph.

    GraphTrainer captures its own graph. Without FSDP a plan cannot say that whole gradients stay. Where torchtitan refuses the
    job (a pipeline, a dispatcher whose host waits for counts), it is counted without.
    """
    if keys.get(KEY) is None or keys.on(KEY):
        return False
    if is_traced(keys):
        keys.without_effect(KEY, "GraphTrainer captures its own graph")
        return False
    if not fsdp:
        keys.approximate(KEY, "CUDA graphs, which keep gradients from step to step: without FSDP counted without")
        return False
    if pp > 1:
        return _refused(keys, f"with pp {pp}")
    backend = str(keys.get("parallelism.expert_parallel_comm_backend")).lower()
    waits = backend not in _WAIT_FOR_NOTHING or (
        backend == "hybridep" and keys.get("model.non_blocking_capacity_factor") is None
    )
    if (keys.whole("parallelism.expert_parallel_degree") or 1) > 1 and waits:
        return _refused(keys, f"with dispatcher {backend}")
    return True


def _refused(keys: JobKeys, what: str) -> bool:
    """That torchtitan stops at the file, which is counted as it runs once that is mended."""
    keys.approximate(KEY, "counted without CUDA graphs, which torchtitan refuses here")
    line = f"{REFUSED}torchtitan: CUDA graphs {what}; set {KEY} to true, as is counted here"
    keys.notes += [line] if line not in keys.notes else []
    return False
