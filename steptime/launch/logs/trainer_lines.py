"""Lines of Hugging Face's Trainer and of Lightning: progress bars, and what the Trainer sums up at the end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from steptime.launch.logs.entries import Iteration, RunLength, WholeRun

_BARS = re.compile(
    r"^(Epoch[^%]*?|[^\w%]*)\d+%\|[^|]*\|\s*(\d{1,15})/\d+ \[[\d:]+<[^,\]]*,\s*(\d{1,9}\.?\d{0,9})(s/it|it/s)"
)
"""tqdm's bar (tqdm/std.py, format_meter) as the Trainer of transformers shows it, without a title, and Lightning by epoch."""
_WHOLE = re.compile(
    r"'train_runtime': '?(\d{1,9}\.?\d{0,9})'?,(.{0,120}?)'train_steps_per_second': '?(\d{1,9}\.?\d{0,9})\b", re.DOTALL
)
"""huggingface/transformers src/transformers/trainer_utils.py, speed_metrics: seconds of the run and the run's steps over them,
rounded to 3 digits; also what release 5 prints as text."""
_SAMPLES = re.compile(r"'train_samples_per_second': '?(\d{1,9}\.?\d{0,9})\b")
_ROW = re.compile(
    r"\btrain_(?:runtime += +(?:(\d{1,4}) days?, )?(\d{1,2}):(\d\d):(\d\d\.\d{1,2})|"
    r"(steps|samples)_per_second += +(\d{1,9}\.?\d{0,9}))\s*$"
)
"""src/transformers/trainer_pt_utils.py, metrics_format and log_metrics: rows of "***** train metrics *****", sorted by name."""
_LENGTH = re.compile(r"\bTotal optimization steps = (\d[\d,]{0,14})|\bContinuing training from global step (\d{1,15})")
"""src/transformers/trainer.py, _inner_training_loop: the steps of the run, and those before its last start."""


def bars(text: str) -> Iterator[Iteration]:
    """Iterations of progress bars."""
    for found in (_BARS.match(part) for part in text.split("\r")):
        if found and (rate := float(found[3])):
            framework = "Lightning" if found[1].startswith("Epoch") else "Hugging Face Trainer"
            yield Iteration(framework, int(found[2]), rate if found[4] == "s/it" else 1.0 / rate)


def whole_run(text: str) -> Iterator[WholeRun]:
    """The time of a whole run, its steps a second and its samples a second."""
    for found in _WHOLE.finditer(text):
        if (seconds := float(found[1])) and (rate := float(found[3])):
            samples = _SAMPLES.search(found[2])
            yield WholeRun(seconds, rate, float(samples[1]) if samples else 0.0)


def whole_run_row(text: str) -> Iterator[WholeRun]:
    """One figure of the same from a row of the table, the others 0."""
    if found := _ROW.search(text):
        days, hours, minutes, seconds = (float(part or 0) for part in found.groups()[:4])
        steps, samples = (float(found[6]) if found[5] == rate else 0.0 for rate in ("steps", "samples"))
        yield WholeRun(((24.0 * days + hours) * 60.0 + minutes) * 60.0 + seconds, steps, samples)


def run_length(text: str) -> Iterator[RunLength]:
    """The steps of a run, and those before it was continued."""
    for found in _LENGTH.finditer(text):
        yield RunLength(int((found[1] or "0").replace(",", "")), int(found[2] or 0))
