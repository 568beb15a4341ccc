"""torchtitan's batch: in sequences, or since 2026-08-20 (73aed7f6) in tokens.

In tokens, a micro-batch is what one forward of a data-parallel rank reads. A rank sends `num_pp_microbatches` of them through the
pipeline at a time (1 without a pipeline), and a step repeats that until it has read `num_tokens_per_train_step`.

Sources: pytorch/torchtitan@b5bcd76c torchtitan/trainer.py (Trainer.__init__, train_step), torchtitan/config/configs.py
(TrainingConfig, ParallelismConfig), torchtitan/models/common/config_utils.py (get_attention_config); torch 2.13.0
distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import KeyTable, load_table, named_defaults

_P = "parallelism."
LOCAL, GLOBAL, LENGTH = "training.local_batch_size", "training.global_batch_size", "training.seq_len"
STEPS = "training.gradient_accumulation_steps"
TOKENS, STEP_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
PASSES, SCHEDULE = f"{_P}num_pp_microbatches", f"{_P}pipeline_parallel_schedule"
_STAGE_EACH = {"1f1b": 1, "dualpipev": 2}
"""Schedules that torch refuses with fewer micro-batches than stages -> stages per rank (Schedule1F1B, ScheduleDualPipeV)."""


class Batch(NamedTuple):
    """The batch of a step, in sequences."""

    gbs: int
    length: int
    micro: int
    at_once: int
    """Of all ranks between two accumulations of gradients."""
    key: str
    """The key of the global batch."""

    @property
    def section(self) -> dict[str, int]:
        """The section data of a config."""
        return {"gbs": self.gbs, "seqlen": self.length, "microbatch_sz": self.micro}


def is_in_tokens(said: Mapping[str, Any]) -> bool:
    """Whether a job has keys that came with batches in tokens; max_context_length came with them."""
    return not said.keys().isdisjoint({TOKENS, STEP_TOKENS, PASSES, "training.max_context_length"})


def by_tokens(table: KeyTable) -> KeyTable:
    """The table with the defaults of batches in tokens instead of those in sequences."""
    entry = table.raw["in_tokens"]
    kept = {key: value for key, value in table.defaults.items() if key not in entry["replaces"]}
    return table._replace(framework=entry["framework"], defaults=kept | named_defaults(entry["defaults"], table))


def batch_of(keys: JobKeys, dp: int, pp: int) -> Batch:
    """The batch of `dp` ranks, which a pipeline of `pp` stages may split."""
    return _of_tokens(keys, dp, pp) if keys.get(TOKENS) is not None else _of_sequences(keys, dp, pp)


def _of_sequences(keys: JobKeys, dp: int, pp: int) -> Batch:
    local = keys.count(LOCAL)
    gbs, micro, at_once = keys.count(GLOBAL, least=-1), local, local * dp
    if pp > 1:
        parts = keys.whole(f"{_P}pipeline_parallel_microbatches")
        micro = local // parts if parts else keys.count(f"{_P}pipeline_parallel_microbatch_size")
        if micro < 1 or local % micro:
            keys.fail(LOCAL, f"must be a multiple of the micro-batch {micro} (got {local})")
        else:
            key, each = (f"{_P}pipeline_parallel_microbatches", 1) if parts else (LOCAL, micro)
            _enough(keys, key, local // micro, pp, each)
    steps = keys.whole(STEPS) or 1
    if gbs >= 1 and STEPS in keys.values and gbs != at_once * steps and "parallelism.dp" not in keys.left_open:
        keys.fail(STEPS, f"{steps} x {at_once} sequences are not {GLOBAL} {gbs}; give one of the two")
    gbs = at_once * steps if gbs < 1 else gbs
    if gbs % at_once and "parallelism.dp" not in keys.left_open:
        parts_of = f"local_batch_size * data-parallel ranks = {local} * {dp}"
        keys.fail(GLOBAL, f"must be a multiple of {parts_of} (got {gbs})")
    return Batch(gbs, keys.count(LENGTH), micro, at_once, GLOBAL)


def _of_tokens(keys: JobKeys, dp: int, pp: int) -> Batch:
    for old, new in load_table("torchtitan").raw["in_tokens"]["replaces"].items():
        if old in keys.values:
            keys.fail(old, f"{new} replaces it in the releases whose other keys this job has; give that")
    tokens, step = keys.count(TOKENS), keys.count(STEP_TOKENS, least=-1)
    valid = keys.whole(PASSES) if pp > 1 else 1
    passes = valid or 1
    length = _length(keys, tokens)
    micro, at_once = max(tokens // length, 1), tokens * passes * dp
    if step == 0:
        keys.fail(STEP_TOKENS, "must be -1, or at least 1 (got 0)")
    step = at_once if step < 1 else step
    if step % at_once and "parallelism.dp" not in keys.left_open:
        name = TOKENS.partition(".")[2]
        parts_of = f"{name} * micro-batches in the pipeline * data-parallel ranks = {tokens} * {passes} * {dp}"
        keys.fail(STEP_TOKENS, f"must be a multiple of {parts_of} = {at_once} (got {step})")
    if pp > 1 and valid:
        _enough(keys, PASSES, valid, pp)
    return Batch(max(step // length, 1), length, micro, micro * passes * dp, STEP_TOKENS)


def _enough(keys: JobKeys, key: str, n_microbatches: int, pp: int, each: int = 1) -> None:
    """Refuse fewer micro-batches at a time than the stages of a schedule that torch stops at; `each` counts in the key."""
    stages = _STAGE_EACH.get((keys.meaning(SCHEDULE) or ("", 0))[0], 0) * pp
    if n_microbatches < stages:
        kind = keys.get(SCHEDULE)
        fewer = f"schedule {kind} needs a micro-batch for each of its {stages} stages (got {n_microbatches})"
        keys.fail(key, f"{fewer}; give {stages * each} or more, or another schedule")


def _length(keys: JobKeys, tokens: int) -> int:
    """The longest sequence that attends to itself within a micro-batch, which is cut from documents put one after another."""
    longest = keys.count(LENGTH)
    if keys.get("model.attn_backend") == "sdpa":
        keys.fail("model.attn_backend", "torchtitan refuses sdpa since 2026-06-09; give flex, flex_flash or varlen")
    if tokens < longest:
        keys.becomes(LENGTH, f"data.seqlen {tokens}: a micro-batch has no more tokens")
        return tokens
    if tokens % longest:
        unequal = f"{tokens} tokens are not whole sequences of {keys.name(LENGTH)} {longest}"
        keys.fail(TOKENS, f"{unequal}, and sequences of unequal length are not counted; give a multiple of it")
    return longest


def passes_of(keys: JobKeys, batch: Batch, pp: int, *, fsdp: bool) -> dict[str, int]:
    """How often the pipeline runs in a step: once for each accumulation of gradients (trainer.py, train_step)."""
    if pp == 1 or batch.gbs <= batch.at_once or batch.gbs % batch.at_once:
        return {}
    if fsdp:
        return {"pipeline_passes": batch.gbs // batch.at_once}
    keys.leave_out(batch.key, "the pipeline drains after every local batch; counted as one pass")
    return {}
