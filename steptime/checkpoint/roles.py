"""Which part of a training state a tensor belongs to, from the keys above it: model, master copy, optimizer or other.

Key names: Megatron-LM `megatron/training/checkpointing.py`, DeepSpeed `deepspeed/checkpoint/constants.py`,
Lightning checkpoint contents (its documentation), torch optimizers' state names.
"""

from __future__ import annotations

MODEL_KEYS = frozenset(
    {"model", "state_dict", "model_state_dict", "module", "net", "network", "model_state", "weights", "params",
     "model_weights", "generator", "discriminator", "student", "encoder", "decoder", "policy", "actor", "critic", "value",
     "vae", "unet", "text_encoder", "netG", "netD", "G", "D", "backbone", "head", "llm", "projector"}
)  # fmt: skip
STATE_KEYS = frozenset(
    {"rng", "rng_state", "rng_states", "rng_tracker_states", "cuda_rng_state", "torch_rng_state", "random", "random_state",
     "random_states", "numpy_rng_state", "lr_scheduler", "lr_schedulers", "scheduler", "scheduler_state_dict", "lr_sched",
     "opt_param_scheduler", "scaler", "grad_scaler", "amp_scaler", "amp", "sampler", "dataloader", "dataloaders", "loops",
     "callbacks", "train_state", "rerun_state_machine", "rerun_state_machine_state", "extra_state"}
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
OTHER_FILES = ("scheduler", "random_states", "training_args", "scaler", "trainer_state", "extra_state", "dataloader")
ADAM_NAMES = {"exp_avg", "exp_avg_sq"}


def is_model_key(key: str) -> bool:
    """Whether a top-level key holds a model's weights; Megatron numbers virtual pipeline chunks model0, model1, ..."""
    return key in MODEL_KEYS or (key.startswith("model") and key[5:].isdigit())


def is_optimizer_key(key: str) -> bool:
    """Whether a key holds optimizer state."""
    return key == "opt" or key.lower().startswith(OPTIMIZER_KEYS)


def optimizer_role(path: list[str]) -> str:
    """Master for full-precision copies of the weights inside an optimizer's state, else "optimizer"."""
    return "master" if not MASTER_KEYS.isdisjoint(path) and path[-1] not in STATE_NAMES else "optimizer"


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
