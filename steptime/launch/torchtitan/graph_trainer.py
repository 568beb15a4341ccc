"""torchtitan's graphs: GraphTrainer's, which traces forward, loss and backward, SimpleFSDP's, and the trainer's CUDA graphs.

Sources: pytorch/torchtitan@b5bcd76c torchtitan/experiments/graph_trainer/: configs.py (GraphTrainerCompileConfig with its
defaults, to_graph_trainer_config), memory_policy.py, passes.py, cudagraph.py, llama3/parallelize.py; v0.2.2
torchtitan/experiments/simple_fsdp/: README.md, backend.py, simple_fsdp.py; CUDA graphs, on by default since 2026-08-13 (pull
request 3559): torchtitan/config/configs.py (TrainingConfig.disable_cuda_graphs), torchtitan/trainer.py (_validate_cuda_graphs;
train_step, which sets gradients to zero instead of freeing them).
"""

from __future__ import annotations

from typing import Any

from steptime.base.config import ConfigError, show
from steptime.base.words import REFUSED
from steptime.launch.job_keys import JobKeys
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.config_functions import CALLED, Tree, read_function
from steptime.launch.python.config_values import CLASS, merged

CONVERSION = "to_graph_trainer_config"
"""The function that makes GraphTrainer's config of a trainer's."""
SIMPLE = "simple_fsdp."
"""How model.name begins where SimpleFSDP shards a model of TOML files."""
_DEFAULTS = {"mode": "aot_fx_trace", "memory_policy": "default", "inductor_compilation": "regional"}
_POLICIES: dict[str, dict[str, Any]] = {
    "default": {"recompute": {"granularity": "selective", "modules": ["per_op_all"]}},
    "full": {"activation_checkpointing_type": "full"},
    "eager": {"activation_checkpointing_type": "per-op"},
    "sac_and_offload": {"recompute": {"granularity": "selective", "modules": ["per_op_all"]}},
}
"""compile.memory_policy -> what is recomputed; the default saves the output of every matrix multiply."""


class _Registries(NearbyFiles):
    """The modules of config functions alone: what other modules do with a config is not followed."""

    def __init__(self, nearby: NearbyFiles) -> None:
        self.inner = nearby

    def text(self, name: str) -> str | None:
        return self.inner.text(name) if name.endswith("config_registry.py") else None


def read_converted(path: str, text: str, name: str, nearby: NearbyFiles) -> tuple[str, Tree]:
    """The config of a function of GraphTrainer's registry: a trainer's config, converted, with what the function sets after that.

    Raises:
        ConfigError: as `read_function`; or the trainer's config is in a file that was not found.
    """
    name, tree = read_function(path, text, name, "Trainer.Config", f"^{CONVERSION}$", _Registries(nearby))
    base = next(iter(tree["_args_"])) if tree[CLASS] == CONVERSION else tree
    for config in (base, tree):
        if isinstance(config, dict) and CALLED in config:
            raise ConfigError(f"{path}: {name}: calls {config[CALLED][0]}, which is not read; give a log of the job")
    if base is tree:
        return name, tree
    if not isinstance(base, dict) or not str(base.get(CLASS)).endswith("Trainer.Config"):
        fix = "give it with --with, or a log of the job"
        what = "the config that it converts is in another config_registry.py, which was not found"
        raise ConfigError(f"{path}: {name}: {what}; {fix}")
    base = {key: value for key, value in base.items() if key != "compile"}
    over = {key: value for key, value in tree.items() if key not in {CLASS, "_args_"}}
    return name, merged(base, over) | {CLASS: "GraphTrainer.Config"}


def with_defaults(tree: Tree) -> Tree:
    """A config whose compile section is GraphTrainer's, with what its class has by default."""
    section = tree.get("compile")
    own = isinstance(section, dict) and str(section.get(CLASS)).startswith("GraphTrainerCompileConfig")
    return tree | {"compile": _DEFAULTS | section} if isinstance(section, dict) and own else tree


def is_traced(keys: JobKeys) -> bool:
    """Whether the job's step is one traced graph."""
    return str(keys.get("compile.mode")) == "aot_fx_trace"


def by_parameter(keys: JobKeys) -> bool:
    """Whether each parameter is gathered by itself, as SimpleFSDP does, GraphTrainer's too."""
    return is_traced(keys) or _is_simple(keys)


def _is_simple(keys: JobKeys) -> bool:
    return str(keys.get("model.name")).startswith(SIMPLE)


def fuses(keys: JobKeys) -> bool:
    """Whether inductor fuses the kernels of a layer: in GraphTrainer only where it compiles the whole graph."""
    if is_traced(keys):
        return str(keys.get("compile.inductor_compilation")) == "full"
    eager = _is_simple(keys) and str(keys.get("compile.backend") or "inductor") != "inductor"
    return keys.on("compile.enable") and not eager


def simple_of(keys: JobKeys) -> dict[str, Any]:
    """SimpleFSDP's graph under torch.compile: its loss, and gathers that are waited for where no pass moved them."""
    if not (_is_simple(keys) and keys.on("compile.enable")):
        return {}
    keys.becomes("compile.backend", "performance.compile")
    moved = keys.get("compile.graph_passes") or keys.get("compile.model_backend_override")
    return ({} if fuses(keys) else {"loss_impl": "traced"}) | ({} if moved else {"overlap": {"dp": False}})


def graph_of(keys: JobKeys, *, experts: bool) -> dict[str, Any]:
    """Recomputation, kernels and CUDA graphs of a traced graph.

    A graph with experts is not captured: grouped GEMMs and the counts of tokens are read by the host (cudagraph.py,
    is_cudagraphable). Without passes there is no CUDA graph, and each gather is waited for where it stands.
    """
    key = "compile.memory_policy"
    policy = str(keys.get(key) or "default")
    if policy not in _POLICIES:
        keys.fail(key, f"expected one of {', '.join(_POLICIES)} (got {show(policy)})")
    if policy == "sac_and_offload":
        keys.leave_out(key, "activations offloaded to host memory within a budget; counted as kept on the device")
    keys.without_effect("activation_checkpoint.mode", "GraphTrainer recomputes by compile.memory_policy")
    keys.without_effect("activation_checkpoint.selective_ac_option", "GraphTrainer recomputes by compile.memory_policy")
    keys.without_effect("activation_checkpoint.early_stop", "a graph recomputes only what backward reads")
    found = _POLICIES.get(policy, {}) | {"recompute_stops_early": True}
    found |= {"compile": "all"} if fuses(keys) else {"loss_impl": "traced"}
    passes = keys.on("compile.enable_passes", default=True)
    found |= {} if fuses(keys) else {"step_graph": "simplified" if passes else "traced"}
    if passes and not experts and "cudagraph_pass" not in keys.words("compile.disable_passes"):
        found["cuda_graphs"] = True
    return found if passes else found | {"overlap": {"dp": False}}


NO_CAPTURES = "training.disable_cuda_graphs"
_CONFIGS = "torchtitan/config/configs.py"
_WAIT_FOR_NOTHING = {"minimal_async_ep", "hybridep"}
"""Back ends of expert parallelism that a graph can hold: their host waits for no counts (HybridEP with a capacity factor)."""


def in_release(text: str, nearby: NearbyFiles) -> bool:
    """Whether the trainer of a config function has CUDA graphs: its module names the switch, or the checkout's own configs do."""
    word = NO_CAPTURES.rpartition(".")[2]
    return word in text or word in (nearby.text(_CONFIGS) or "")


def captures(keys: JobKeys, pp: int, *, fsdp: bool = True) -> bool:
    """Whether forward and backward are one CUDA graph.

    GraphTrainer captures its own graph. Without FSDP a plan cannot say that whole gradients stay. Where torchtitan refuses the
    job (a pipeline, a dispatcher whose host waits for counts), it is counted without.
    """
    if keys.get(NO_CAPTURES) is None or keys.on(NO_CAPTURES):
        return False
    if is_traced(keys):
        keys.without_effect(NO_CAPTURES, "GraphTrainer captures its own graph")
        return False
    if not fsdp:
        kept = "CUDA graphs, which keep gradients from step to step: without FSDP counted without"
        keys.approximate(NO_CAPTURES, kept)
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
    keys.approximate(NO_CAPTURES, "counted without CUDA graphs, which torchtitan refuses here")
    line = f"{REFUSED}torchtitan: CUDA graphs {what}; set {NO_CAPTURES} to true, as is counted here"
    keys.notes += [line] if line not in keys.notes else []
    return False
