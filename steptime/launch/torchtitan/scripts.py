"""What a script of torchtitan launches: a TOML config, or since 2026 a config function of a module."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.shell.processes import flags_of, split_words
from steptime.launch.shell.scope import argument_asked
from steptime.launch.shell.script import read_script

_TOML = re.compile(r"(?:--job\.config[-_]file[= ]|CONFIG_FILE=)[\"']?(?:\$\{CONFIG_FILE:-[\"']?)?([\w./-]+\.toml)")
_FUNCTION = re.compile(r"torchtitan\.train\b(?:\\\n|[^\n])*? --module[= ]")
_RUNS = re.compile(r"^[^#\n]*-m torchtitan\.train\b", re.MULTILINE)
_SHOWN = re.compile(r"\btorchrun\b[^\n]*--job\.config[-_]file[= ][\w./-]+\.toml(?:\"[^\"]*\"|'[^']*'|[^\n\"'])*")
"""The command line that a shell shows at the head of a log (set -x)."""
_STARTED = re.compile(r"^[^#\n]*(?<![\w.-])run_train\.sh\b", re.MULTILINE)
_RUN_TRAIN = """if [ -n "$CONFIG_FILE" ]; then
torchrun --nproc_per_node=${NGPU:-8} -m torchtitan.train --job.config_file ${CONFIG_FILE} "$@"
else
torchrun --nproc_per_node=${NGPU:-8} -m torchtitan.train --module ${MODULE:-llama3} --config ${CONFIG:-llama3_debugmodel} "$@"
fi
"""
"""What torchtitan's own run_train.sh launches (@b5bcd76c; with CONFIG_FILE, v0.2.2), where it is not in the folder."""
_REGISTRIES = ("torchtitan/models/{}/config_registry.py", "torchtitan/experiments/{}/config_registry.py")
"""Where torchtitan/config/manager.py looks for the config functions of a module."""


class Named(NamedTuple):
    """The config that a script names."""

    file: str
    text: str
    function: str
    """The config function; "" of a TOML file."""
    over: dict[str, Any]
    """Keys that the command line sets over it."""
    devices: int | None
    notes: tuple[str, ...] = ()
    """What the script's reader tells of it: that it launches several jobs."""


def is_steps_alone(text: str) -> bool:
    """Whether a text is a log of steps that does not print the job's config; a comment of a script or of a TOML is no step."""
    printed = re.search(r"Running with (?:args|configs): \{", text)
    return not printed and bool(re.search(r"^(?!\s*#).*\bstep:\s*\d+\s", text, re.MULTILINE))


def named_by(path: str, text: str, env: dict[str, str], nearby: NearbyFiles) -> Named | None:
    """The config that a script names, or the command at the head of a log; None where the text is no script of torchtitan.

    Raises:
        ConfigError: that config is not there, or the script cannot be read.
    """
    if is_steps_alone(text) and (shown := _SHOWN.search(text)):
        text = shown[0]
    if not re.match(r"#!|\s*(?:export )?\w+=|torchrun|srun|(?:(?:ba)?sh |\./)\S*run_train\.sh", text):
        return None
    words = [env[str(i)] for i in range(1, 100) if str(i) in env]
    text = re.sub(r'"?\$@"?', lambda _: " ".join(words), text)
    named, function = _TOML.search(text), _FUNCTION.search(text) or _STARTED.search(text)
    inside = nearby.needed(named[1], f"{path}: reads") if named is not None else ""
    in_variable = re.search(r"--job\.config[-_]file[= ][\"']?[\w./-]*\$", text)  # "./train_configs/${NAME}.toml"
    if named is None and function is None and not in_variable and _RUNS.search(text) and "[titan]" not in text:
        fix = f"give script and arguments in one string: '{path.rpartition('/')[2]} --job.config_file JOB.toml'"
        raise ConfigError(f"{path}: names no config; {fix}")
    if named is None and function is None and not in_variable:
        return None
    if _STARTED.search(text) and nearby.text("run_train.sh") is None:
        nearby.written["run_train.sh"] = _RUN_TRAIN
    script = read_script(text, path, env, nearby)
    said = dict(flags_of([word.text for word in split_words(script.arguments)]))
    over = dict(_switched(key, value) for key, value in said.items() if "." in key)
    if named is not None:
        return Named(named[1], inside, "", over, script.devices, tuple(script.notes))
    file = said.get("job.config_file", said.get("job.config-file"))
    if asked := argument_asked(str(file)):
        raise ConfigError(f"{path}: {asked}")
    if file is not None:  # that run_train.sh takes by default, or that a variable names
        return Named(file, nearby.needed(file, f"{path}: reads"), "", over, script.devices, tuple(script.notes))
    return _of_module(path, nearby, said, over, script.devices)._replace(notes=tuple(script.notes))


def _switched(key: str, value: Any) -> tuple[str, Any]:
    """A flag as its key and value; tyro, which reads torchtitan's flags, switches a boolean off by no- before its name.

    >>> _switched("compile.no_enable_passes", True), _switched("compile.enable", True)
    (('compile.enable_passes', False), ('compile.enable', True))
    """
    section, _, name = key.rpartition(".")
    off = value is True and name.startswith("no_")
    return (f"{section}.{name.removeprefix('no_')}", False) if off else (key, value)


def _of_module(
    path: str, nearby: NearbyFiles, said: dict[str, Any], over: dict[str, Any], devices: int | None
) -> Named:
    """The config function of a module, by the flags that name both.

    Raises:
        ConfigError: the module's config functions are not there.
    """
    module, name = (str(said.get(key, "")) for key in ("module", "config"))
    files = [file.format(module.replace(".", "/")) for file in _REGISTRIES]
    for file in files:
        if (there := nearby.path(file)) is not None:
            return Named(str(there), nearby.text(file) or "", name, over, devices)
    what = f"launches config function {name} of {module}; give that module's config_registry.py"
    file = files["." in module]
    raise ConfigError(f"{path}: {what}: add --with {file}, or read the function alone: --from torchtitan {file}:{name}")
