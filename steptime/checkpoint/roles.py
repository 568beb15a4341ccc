"""Which part of a training state a tensor belongs to, from the keys above it: model, master copy, optimizer or other.

Key names: Megatron-LM `megatron/training/checkpointing.py`, DeepSpeed `deepspeed/checkpoint/constants.py`,
Lightning checkpoint contents (its documentation), torch optimizers' state names.
"""

from __future__ import annotations

MODEL_KEYS = frozenset(
    {"model", "state_dict", "model_state_dict", "module", "net", "network", "model_state", "weights", "params",
     "model_weights", "generator", "student", "encoder", "policy", "actor"}
)  # fmt: skip
EMA_KEYS = frozenset(
    {"ema", "model_ema", "ema_model", "ema_state_dict", "params_ema", "state_dict_ema", "shadow", "teacher"}
)
OPTIMIZER_KEYS = ("optim", "opt_state", "optimizer")
MASTER_KEYS = frozenset(
    {"fp32_from_fp16_params", "fp32_from_fp16", "fp32_groups_flat", "fp32_flat_groups", "fp32_params", "main_params",
     "single_partition_of_fp32_groups", "master_params", "master_param", "fp32_param", "param", "fp32", "master_weights"}
)  # fmt: skip
STATE_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "grad_avg", "sum",
     "exp_inf", "mu_product", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_slow", "mu", "nu", "count", "step",
     "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "prev", "step_size"}
)  # fmt: skip
ADAM_NAMES = {"exp_avg", "exp_avg_sq"}


def is_model_key(key: str) -> bool:
    """Whether a top-level key holds a model's weights; Megatron numbers virtual pipeline chunks model0, model1, ..."""
    return key in MODEL_KEYS or (key.startswith("model") and key[5:].isdigit())


def is_optimizer_key(key: str) -> bool:
    """Whether a key holds optimizer state."""
    return key.lower().startswith(OPTIMIZER_KEYS)


def optimizer_role(path: list[str]) -> str:
    """Master for full-precision copies of the weights inside an optimizer's state, else "optimizer"."""
    return "master" if not MASTER_KEYS.isdisjoint(path) and path[-1] not in STATE_NAMES else "optimizer"


def role_and_name(path: list[str], tops: set[str], file_role: str = "") -> tuple[str, str]:
    """(role, name) of the tensor at `path` in a file whose top-level keys with tensors below are `tops`.

    The key of a model container is not part of the name, so that the same model has the same names in every format.
    """
    name = ".".join(path)
    if file_role:
        return (optimizer_role(path) if file_role == "optimizer" else file_role), name
    if len(path) == 1:
        return ("other" if any(map(is_model_key, tops - {path[0]})) and _is_state(path[0]) else ""), name
    top = path[0]
    if is_optimizer_key(top):
        return optimizer_role(path), name
    if is_model_key(top):
        below = path[2:] if len(path) > 2 and path[1] == "module" else path[1:]
        return "model", ".".join(below)
    if top in EMA_KEYS:
        return ("other", name) if any(map(is_model_key, tops)) else ("model", ".".join(path[1:]))
    return ("other" if any(map(is_model_key, tops)) else ""), name


def _is_state(key: str) -> bool:
    return "rng" in key or "random" in key or "scheduler" in key


def of_file(file: str) -> str:
    """The role of everything in a file, where its name says it."""
    base = file.rsplit("/", 1)[-1].lower()
    if base.startswith(("optimizer", "optim_", "optim.", "distrib_optim")) or "optim_states" in base:
        return "optimizer"
    if base.startswith(("scheduler", "rng_state", "random_states", "training_args", "scaler", "trainer_state")):
        return "other"
    return ""
