"""Which part of a training state a tensor belongs to, from the keys above it: model, master copy, optimizer or other."""

from __future__ import annotations

from steptime.checkpoint.name_tables import table, words

_TABLES = {key: words(names) for key, names in table("names")["state"].items()}
MODEL_KEYS, STATE_KEYS, EMA_KEYS = (frozenset(_TABLES[key]) for key in ("model", "run", "ema"))
OPTIMIZER_KEYS, OTHER_FILES = _TABLES["optimizer"], _TABLES["files"]
MASTER_KEYS = frozenset(_TABLES["master"])
STATE_NAMES = frozenset(_TABLES["moments"])
ADAM_NAMES = ({"exp_avg", "exp_avg_sq"}, {"mu", "nu"})  # torch's and optax's


def is_model_key(key: str) -> bool:
    """Whether a top-level key holds a model's weights; Megatron numbers virtual pipeline chunks model0, model1, ..."""
    return key in MODEL_KEYS or (key.startswith("model") and key[5:].isdigit())


def is_optimizer_key(key: str) -> bool:
    """Whether a key holds optimizer state."""
    return key == "opt" or key.lower().startswith(OPTIMIZER_KEYS)


def optimizer_role(path: list[str]) -> str:
    """Master for full-precision copies of the weights inside an optimizer's state, else "optimizer"."""
    return "master" if not MASTER_KEYS.isdisjoint(path) and path[-1] not in STATE_NAMES else "optimizer"


def state_name(name: str) -> str:
    """What an optimizer's tensor is called: mu of 0.mu.kernel, exp_avg of w.exp_avg, the last part of every other name."""
    parts = name.split(".")
    return next((part for part in reversed(parts) if part in STATE_NAMES), parts[-1])


def below_wrapper(paths: list[list[str]]) -> list[list[str]]:
    """`paths` without a first key around a model and its optimizer: torch's tutorial saves {"app": {"model", "optim"}}."""
    tops = {path[0] for path in paths if not is_state_key(path[0])}
    below = {path[1] for path in paths if len(path) > 2 and path[0] in tops}
    if len(tops) != 1 or not (any(map(is_model_key, below)) and any(map(is_optimizer_key, below))):
        return paths
    return [path[1:] if path[0] in tops and len(path) > 1 else path for path in paths]


def role_and_name(path: list[str], tops: set[str], file_role: str = "") -> tuple[str, str]:
    """(role, name) of the tensor at `path` in a file whose top-level keys with tensors below are `tops`.

    The key of a model container is not part of the name, so that the same model has the same names in every format.
    """
    name = ".".join(path)
    if file_role:
        return (optimizer_role(path) if file_role == "optimizer" else file_role), name
    top = path[0]
    if is_state_key(top):
        return "other", name
    if len(path) == 1:
        return "", name
    if is_optimizer_key(top):
        return optimizer_role(path), name
    models = {key for key in tops if is_model_key(key)}
    if is_model_key(top):
        start = 2 if len(path) > 2 and path[1] == "module" else 1
        together = any(key in MODEL_KEYS for key in models - {top})  # a generator and a discriminator keep their names
        return "model", name if together else ".".join(path[start:])
    if top in EMA_KEYS:
        return ("other", name) if models else ("model", ".".join(path[1:]))
    return ("other" if models else ""), name


def is_state_key(key: str) -> bool:
    """Whether a key holds the state of a run that is neither weights nor optimizer: random generators, schedules, loops."""
    return key in STATE_KEYS or "rng_state" in key


def of_file(file: str) -> str:
    """The role of everything in a file, where its name says it."""
    base = file.rsplit("/", 1)[-1].lower()
    if base.startswith(("optimizer", "optim_", "optim.", "distrib_optim")) or "optim_states" in base:
        return "optimizer"
    if base.startswith(OTHER_FILES) or "rng_state" in base:
        return "other"
    return ""
