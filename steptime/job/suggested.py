"""A setting of a plan suggested for an unknown key, with a value that it takes."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

from steptime.base.config import closest
from steptime.base.declared import Settings
from steptime.job.names import FIXES


def suggested(path: str, value: str, option: str = "--set ") -> str:
    """A setting with a valid value for the key that was meant, or what the key takes; `option` stands before the setting.

    >>> suggested("performance.optimizer", "adam"), suggested("parallelism.tp", "8")
    ('did you mean --set performance.optimizer=adamw?', 'did you mean --set parallelism.tp=8?')
    >>> suggested("performance.compile", "jit")
    'did you mean --set performance.compile=VALUE, one of none, blocks, all?'
    """
    if fix := FIXES.get(f"{path}={value}"):
        return f"the key is {path}{fix}"
    words = _words(path)
    if not words or value in words:
        return f"did you mean {option}{path}={value}?"
    if meant := closest(value, words):
        return f"did you mean {option}{path}={meant}?"
    return f"did you mean {option}{path}=VALUE, one of {', '.join(words)}?"


def _words(path: str) -> list[str]:
    """The words that the key at a dotted path takes, where it takes nothing else."""
    from steptime.job.mesh import Parallelism
    from steptime.model.model import Model
    from steptime.software.performance import Performance

    section, _, key = path.partition(".")
    classes: dict[str, type[Settings]] = {"parallelism": Parallelism, "model": Model, "performance": Performance}
    owner = classes.get(section)
    if owner is None or key not in owner.model_fields:
        return []
    kinds = [arg for arg in _arguments(owner.model_fields[key].annotation) if arg is not type(None)]
    return [word for word in kinds if isinstance(word, str)] if all(isinstance(kind, str) for kind in kinds) else []


def _arguments(annotation: Any) -> list[Any]:
    """The words and types of an annotation, without what reads them."""
    inside = get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]
    return [leaf for part in inside for leaf in _arguments(part)] if inside else [annotation]
