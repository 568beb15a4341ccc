"""What else has to be asked for where the flags of a script have no values."""

from __future__ import annotations

import re

from steptime.launch.devices import states_devices, told
from steptime.launch.job_keys import JobKeys
from steptime.launch.megatron.model_section import TOKENIZERS, vocabulary
from steptime.launch.shell.script import Script

_FIX = re.compile(r"pass script and arguments|\b\w+=\.\.\.")
"""A user's fix: one for missing values serves for devices of the same source too."""


def also_unknown(keys: JobKeys, script: Script | None, problems: list[str]) -> list[str]:
    """The facts that a job lacks besides the missing values of these problems, so that all are asked for at once."""
    found: list[str] = []
    devices = script.unclear[0] if script is not None and script.unclear and not states_devices(keys.sets) else ""
    if devices and not set(_FIX.findall(devices)) & set(_FIX.findall(" ".join(problems))):
        found.append(devices)
    named = any("vocab" in problem or "tokenizer" in problem for problem in problems)
    named = named or any("$" in str(keys.get(key)) for key in TOKENIZERS)  # of which the same variable may be a part
    if not named and told(keys.sets, "model") is None and vocabulary(keys) is None:
        found.append("vocabulary size unknown; add --set model.vocab_sz=N")
    return found
