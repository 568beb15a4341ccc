"""The command of a job's YAML (SkyPilot, Kubernetes, Beaker, dstack), as the script that it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import parse

_LAUNCHES = re.compile(
    r"\b(?:torchrun|accelerate launch|deepspeed|mpirun|srun|torch\.distributed\.(?:run|launch))[\s,\"'\]]"
)
_ROOTS = ("run", "spec", "tasks", "commands", "template")
"""Top-level keys under which such files have their commands."""


def command_in(path: str, text: str) -> str:
    """The command of a job's YAML behind its variables, on the lines where it stands; any other text unchanged.

    Of SkyPilot num_nodes and the count of resources.accelerators are the variables that it sets for the command
    (skypilot docs/source/running-jobs/environment-variables.rst), of Kubeflow the replicas and nprocPerNode of a PyTorchJob
    (kubeflow/training-operator pkg/controller.v1/pytorch/envvar.go, setPodEnv); an elastic job has at most maxReplicas nodes,
    by default those of its workers (elastic.go, generateEnvNNodes; pytorch_defaults.go, setElasticPolicy). nprocPerNode auto,
    its default (pytorch_types.go, DefaultNprocPerNode), is torchrun's: a process for each device that the pod has.
    """
    if not path.endswith((".yaml", ".yml")) or not _LAUNCHES.search(text):
        return text
    try:
        tree = parse(text, path, repeats=True)
        found = [command for root in _ROOTS for command in _commands(tree.get(root))] if isinstance(tree, dict) else []
        values = (dict(_variables(tree)) | _of_skypilot(tree) | _of_kubeflow(tree)) if found else {}
    except (ConfigError, RecursionError):  # the reader of its kind tells
        return text
    if len(set(found)) != 1:
        return text
    begin = next(word for word in found[0].split("\n") if word.strip()).strip()
    line = next((i for i, said in enumerate(text.split("\n")) if begin in said), 1)
    exports = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())
    return "\n".join(["#!/bin/bash", exports, *[""] * (line - 2), found[0].strip("\n"), ""])


def _commands(tree: Any) -> Iterator[str]:
    """Strings that launch something, and lists of words that do."""
    if isinstance(tree, str):
        if _LAUNCHES.search(f"{tree} "):
            yield tree
        return
    if isinstance(tree, dict) and isinstance(tree.get("command"), list) and isinstance(tree.get("args"), list):
        rest = {key: value for key, value in tree.items() if key not in {"command", "args"}}
        tree = {**rest, "command": [*tree["command"], *tree["args"]]}  # as Kubernetes runs them
    inside = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    words = [word for word in inside if isinstance(word, str)] if isinstance(tree, list) else []
    alone = [word for word in words if _LAUNCHES.search(f"{word} ")]
    if words and len(words) > 1 and any(" " not in word.strip() for word in alone):
        yield " ".join(shlex.quote(str(word)) for word in inside)
        return
    for item in inside:
        yield from _commands(item)


def _variables(tree: Any) -> Iterator[tuple[str, str]]:
    """Variables by name: of a mapping envs, env or environment, or of a list of names and values."""
    if isinstance(tree, list):
        for item in tree:
            yield from _variables(item)
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        if key in {"envs", "env", "envVars", "environment"}:
            listed = value if isinstance(value, list) else []
            pairs = list(value.items()) if isinstance(value, dict) else []
            pairs += [(item.get("name"), item.get("value")) for item in listed if isinstance(item, dict)]
            known = (pair for pair in pairs if re.fullmatch(r"\w+", str(pair[0])) and pair[1] is not None)
            yield from ((str(name), str(said)) for name, said in known)
        else:
            yield from _variables(value)


def _of_skypilot(tree: dict[str, Any]) -> dict[str, str]:
    resources = tree.get("resources")
    asked = resources.get("accelerators") if isinstance(resources, dict) else None
    name, _, said = asked.partition(":") if isinstance(asked, str) else ("", "", "")
    count = next(iter(asked.values()), None) if isinstance(asked, dict) else said or (1 if name else None)
    found = {"SKYPILOT_NUM_NODES": str(tree.get("num_nodes", 1)), "SKYPILOT_NUM_GPUS_PER_NODE": str(count)}
    return {name: value for name, value in found.items() if "run" in tree and value.isdecimal()}


def _of_kubeflow(tree: dict[str, Any]) -> dict[str, str]:
    spec = tree.get("spec")
    if tree.get("kind") != "PyTorchJob" or not isinstance(spec, dict):
        return {}
    kinds, policy = spec.get("pytorchReplicaSpecs"), spec.get("elasticPolicy")
    kinds = kinds if isinstance(kinds, dict) else {}
    counts = {name: kind.get("replicas", 1) for name, kind in kinds.items() if isinstance(kind, dict)}
    nodes = sum(count for count in counts.values() if type(count) is int)
    if isinstance(policy, dict):
        most = next((policy[key] for key in ("maxReplicas", "minReplicas") if key in policy), counts.get("Worker"))
        nodes = min(nodes, most) if type(most) is int else 0
    each = spec.get("nprocPerNode", policy.get("nProcPerNode") if isinstance(policy, dict) else None)
    each = _devices_of_pod(kinds) if each in (None, "auto", "gpu") else each
    found = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(each)}
    return {name: value for name, value in found.items() if value.isdecimal() and value != "0"}


def _devices_of_pod(tree: Any) -> Any:
    """The devices that the first container with a limit on them may use: nvidia.com/gpu, amd.com/gpu; None without one."""
    if isinstance(tree, dict):
        limits = tree.get("limits")
        if isinstance(limits, dict) and (counts := [limits[key] for key in limits if str(key).endswith(".com/gpu")]):
            return counts[0]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return next((found for each in inside if (found := _devices_of_pod(each)) is not None), None)
