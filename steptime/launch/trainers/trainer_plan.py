"""Trainers whose files are translated by a table of keys only: Hugging Face Trainer, what is built on it, nanotron, GPT-NeoX ...

A table's `used` says which key of a plan each becomes; names that begin with @ are figures from which the plan is derived, listed
under `figures` in data/launch/key_words.yaml.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import scalar
from steptime.job.edit import put
from steptime.launch.devices import SET_DEVICES, data_parallel, on_node, stated, still_true, told
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import load_table, read_keys, speaks_of_cost
from steptime.launch.named_models import begins, not_modeled, of_overrides, preset_of
from steptime.launch.nearby_files import PART_OF_A_JOB, NearbyFiles, is_readable
from steptime.launch.python.program_calls import left_to_code, passed_in
from steptime.launch.python.program_setup import set_up_in
from steptime.launch.reading import OTHER_MODEL, Env, LaunchFlag, Reading, Sets
from steptime.launch.trainers.adapters import put_adapters, switched
from steptime.launch.trainers.figures import Figures, size_of
from steptime.launch.trainers.key_spellings import defaults_with, plainly, renamed_with
from steptime.launch.trainers.olmo_core import program_of
from steptime.launch.trainers.trainer_files import Said, own_defaults, said_in
from steptime.launch.trainers.trainer_kernels import kind_of_model, put_kernels, put_model_kernels
from steptime.launch.trainers.trainer_sharding import put_bf16_optimizer, put_fsdp, put_uneven_stages, put_zero
from steptime.launch.trainers.trl_defaults import of_unknown_trl
from steptime.launch.vocabulary import SIZES, entries_of, of_same_sizes


def read_trainer(
    kind: str, path: str, text: str, env: Env = None, sets: Sets = None, nearby: NearbyFiles | None = None
) -> Reading:
    """A config (YAML, JSON, TOML) or a launch script of the framework whose table is data/launch/KIND.yaml, as a config.

    `sets`: dotted keys that the user sets; settings that no file gives (model, parallelism.dp, data.seqlen) are requested by
    name.

    Raises:
        ConfigError: one line per problem: no such file, keys that change cost and are not modeled, contradictory sizes.
    """
    nearby = nearby or NearbyFiles()
    program = program_of(path, text, dict(env or {}), sets, nearby) if kind == "olmo" else None
    table = load_table("olmo_core" if program else kind.replace("-", "_"))
    found = program or said_in(path, text, table, dict(env or {}), nearby)
    given = switched(renamed_with(read_keys(plainly(found.keys, table), table), table, found.code), table)
    own = own_defaults(found, table, nearby)
    defaults = defaults_with(given, table) | own
    keys = JobKeys(path, table, given, defaults=defaults, defaults_of=found.program if own else "", sets=sets)
    keys.nearby, keys.notes = nearby, [*keys.notes, *still_true(found.notes, sets)]
    keys.launcher = None if "devices" in found.unclear else keys.launcher
    keys.without_value = {item.key: found.unclear[item.name] for item in given if item.name in found.unclear}
    if why := found.unclear.get("sharding"):
        keys.left_open["parallelism.zero_level"] = why
    said = {*(item.key for item in given), *found.keys}
    keys.left_open |= of_unknown_trl(found.code, found.program, nearby, {*said, *own, *passed_in(found.code)})
    keys.left_open |= left_to_code(found.code, found.program, found.defaults, said, found.keys)
    texts = {**found.defaults, **found.keys, **{item.name: item.value for item in given}}
    values = {key: scalar(value) if isinstance(value, str) else value for key, value in texts.items()}
    for why in set_up_in(found.code, said, set(own), values):
        keys.assumed_flags.append(LaunchFlag(found.program, "", "unmodeled", why))
    return _Plan(keys, found).reading()


_AXES = ("@dp_shard", "@dp_replicate", "@dp_dcn", "@dp_dcn_shard")
"""Degrees whose product is the data-parallel ranks."""


class _Plan(Figures):
    """The plan of one job: what the table puts into it directly, and what is derived."""

    def __init__(self, keys: JobKeys, found: Said) -> None:
        super().__init__(keys)
        self.devices, self.open_devices = stated(found.devices, found.notes, keys.sets), found.unclear.get("devices")
        self.config: dict[str, Any] = {"model": {}, "parallelism": {"tp": 1, "pp": 1}, "performance": {}, "data": {}}
        own = [*(keys.table.raw.get("renamed_with") or {}).values(), keys.table.raw.get("own_arguments") or []]
        sections = tuple(keys.table.raw.get("own_sections") or ())
        own_names = {name for names in own for name in names}
        named = (item.name for item in keys.given if item.name in own_names or item.name.startswith(sections))
        self.own_names = next(named, keys.table.raw.get("own_program", ""))
        """A name that the trainer does not have: the program has its own arguments and defaults."""
        self.words = found.unclear.get("$@", "")
        self.hybrid = False  # whether each node holds all parameters and only its devices share them
        for path, value in defaults_with(keys.given, keys.table, "plan_with").items():
            put(self.config, path, value)
        for key, rule in keys.table.rules.items():
            unsaid = key not in keys.values and rule.only_with and keys.get(rule.only_with) is None
            zero = rule.note in {"parallelism.tp", "parallelism.pp", "data.seqlen"} and keys.get(key) == 0
            none = zero or keys.get(key) == {}
            if rule.status != "used" or keys.get(key) is None or unsaid or none:
                continue
            if rule.note.startswith("@"):
                self.figures[rule.note] = key
            elif key in keys.without_value:
                keys.ask(rule.note, keys.without_value[key].partition("; ")[0])
                keys.put(key, None)
            else:
                value = keys.word(key, rule.words) if rule.words else keys.get(key)
                put(self.config, rule.note, scalar(value) if isinstance(value, str) else value)
                words = (keys.table.raw.get("approximated_words") or {}).get(key, {})
                if why := words.get(str(keys.get(key)), words.get("other")):
                    keys.approximate(key, why)
        launches = {"distributed_type", "compute_environment"} & {item.name for item in keys.given}
        self.alone = "an accelerate config" if launches and not found.program and self.get("@model") is None else ""
        """What the file is, if it is only how a job is launched."""

    def reading(self) -> Reading:
        """The plan with what became of every key."""
        keys, config = self.keys, self.config
        config["performance"] = {"software": self._software()} | self._precision() | config["performance"]
        put_bf16_optimizer(self, config)
        put_uneven_stages(self, config)
        if self.on("@checkpointing") and (self._sharded() or not keys.table.raw.get("replays_sharded")):
            config["performance"].setdefault("activation_checkpointing_type", "full")
        if (word := str(self.get("@checkpointing"))) == "offload":  # Axolotl, utils/schemas/validation.py
            config["performance"]["activation_offload"] = True
        elif word == "offload_disk":
            keys.leave_out(self.figures["@checkpointing"], "activations on disk")
        self.put_performance(config)
        put_kernels(self, config)
        if optimizer := self.optimizer():
            config["performance"]["optimizer"] = optimizer
        if "torch_fused" in str(self.get("@optimizer")).lower() and not self.on("@deepspeed"):
            config["performance"]["optimizer_impl"] = "fused"
        if config["model"].get("parallel_residual") and config["parallelism"]["tp"] != 1:
            by = next(key for key, rule in keys.table.rules.items() if rule.note == "model.parallel_residual")
            keys.approximate(by, "attention parallel to the MLP with tp: counted one after the other")
            config["model"] |= {"parallel_residual": False, "shared_norm": False}
        if width := self.mlp_width(config["model"]):
            config["model"]["inter_sz"] = width
        self._model()
        if "num_experts" in keys.table.rules and keys.get("num_experts") in (None, 1, "1"):
            keys.put("num_experts", "several" if config["model"] and kind_of_model(config["model"])[1] else None)
        put_model_kernels(self, config)
        if isinstance(config["model"], dict) and config["model"].get("learned_positions"):
            config["model"].setdefault("max_positions", config["data"].get("seqlen"))
        put_adapters(self, config)
        self._batch()
        self.put_chunks(config)
        length = next((key for key, rule in keys.table.rules.items() if rule.note == "data.seqlen"), "")
        if length in keys.defaults.keys() - keys.values.keys() and "data.seqlen" not in keys.left_open:
            whose = keys.defaults_of.get(length, keys.table.framework)
            keys.notes.append(f"sequence length not set, {keys.get(length)} assumed: the default of {whose}")
        if "seqlen" not in config["data"]:
            keys.ask("data.seqlen", f"{self.alone} has no sequence length" if self.alone else "sequence length unknown")
        for path in {"performance.precision", "data.gbs", "data.microbatch_sz", "data.seqlen"} & keys.left_open.keys():
            config[path.partition(".")[0]].pop(path.partition(".")[2], None)
        return keys.reading({section: value for section, value in config.items() if value != {}})

    def _software(self) -> str:
        """The profile, and how parameters are sharded, by what runs the steps."""
        profiles = self.keys.table.raw["software"]
        staged = "deepspeed" in profiles and self.keys.get("zero_stage") is not None
        if self.on("@deepspeed") or (staged and not self._sharded()):
            put_zero(self, self.config)
            return str(profiles["deepspeed"])
        if self._sharded():
            self.hybrid = put_fsdp(self, self.config, self._precision()["precision"])
            return str(profiles["fsdp"])
        return str(profiles["default"])

    def _sharded(self) -> bool:
        """Whether FSDP runs the steps: a recipe of one device has none."""
        raw, devices = self.keys.table.raw, told(self.keys.sets, "parallelism.dp") or self.devices or self.listed()
        return self.on("@fsdp") and "fsdp" in raw["software"] and not (devices == 1 and raw.get("pure"))

    def _precision(self) -> dict[str, Any]:
        weights = self.weights_of()
        word = f"{self.get('@half') or ''} {weights}".lower()
        bf16, fp16 = self.halves(word)
        if self.on("@fp8"):
            self.keys.approximate(self.figures["@fp8"], "torchao's float8 projections: counted as bf16")
        if self.pure() and not self.on("@deepspeed"):  # whose masters are fp32 all the same
            pure = dict.fromkeys(("precision", "param_dtype", "main_grad_dtype", "moment_dtype"), "bf16")
            # TransformerEngine pytorch/optimizers/fused_adam.py, exp_avg_dtype
            return pure | ({"moment_dtype": "fp32"} if "transformer_engine" in str(self.get("@optimizer")) else {})
        if self.own_names and not (bf16 or fp16 or word.strip() or self.on("@fp8")):
            why = f"precision unknown ({self.own_names} is not an argument of {self.keys.table.framework})"
            self.keys.ask("performance.precision", why, "NAME")
        elif self.alone and not (bf16 or fp16) and self.get("@half") in (None, False, "no"):
            why = f"{self.alone} without mixed_precision leaves the precision to its program"
            self.keys.ask("performance.precision", why, "bf16")
        half = {"precision": "bf16" if bf16 or self.on("@fp8") else "fp16" if fp16 else "fp32"} | self.masters()
        kept = self.on("@deepspeed") or self._sharded()
        said = self.keys.table.raw.get("autocast") if weights in {"", "float32"} and not kept else None
        if said and not self.adapted() and (bf16 or fp16):
            by = next(figure for figure in ("@bf16", "@fp16", "@half") if self.on(figure) or self.get(figure) == "auto")
            self.keys.approximate(self.figures[by], said)
            return half | dict.fromkeys(("param_dtype", "main_grad_dtype", "moment_dtype"), "fp32")
        return half

    def _model(self) -> None:
        keys, config = self.keys, self.config
        if (user := told(keys.sets, "model")) is not None:
            config["model"] = user
            return
        name = str(self.get("@model") or "")
        if keys.table.raw.get("name_before_sizes") and name not in {"", "default"}:
            config["model"] = {}
        if config["model"].keys() >= {"n_layers", "hidden_sz"}:
            if "inter_sz" not in config["model"] and not config["model"].get("glu", True):
                config["model"]["inter_sz"] = 4 * size_of(config["model"]["hidden_sz"], 0)
            if "vocab_sz" not in config["model"] and (entries := self._entries()) is not None:
                config["model"]["vocab_sz"] = entries
            elif "vocab_sz" not in config["model"]:
                keys.ask("model.vocab_sz", "vocabulary size unknown")
            return
        if (preset := preset_of(name)) is not None:
            if any(speaks_of_cost(change.partition("=")[0]) for change in str(self.get("@overrides") or "").split(",")):
                keys.leave_out(self.figures["@overrides"], "settings that differ from the named model's")
            config["model"] = {"preset": preset} | config["model"]
            return
        if changes := str(self.get("@overrides") or ""):
            config["model"] = of_overrides(str(self.get("@model_type")), changes, self._entries())
            if config["model"]:
                return
        found = Path(name) / "config.json"
        if name and is_readable(found):
            config["model"] = {"hf": str(found)} | config["model"]
            return
        if why := not_modeled(name):
            keys.leave_out(self.figures["@model"], f"{OTHER_MODEL}: {why}")
        what = f"model {name!r} is not among the presets{begins(name)}" if name else f"model unknown{self.words}"
        if self.alone and (script := keys.nearby.script_of(keys.source)):
            raise ConfigError(f"{keys.source}: {PART_OF_A_JOB.format(self.alone, script)}")
        what = f"{self.alone} names no model" if self.alone else what
        if self.figures.get("@model") in keys.without_value and re.fullmatch(r"\$\{?\w+\}?", name):
            what = f"model {name} has no value"
        keys.left_open["model"] = f"{what}; add --set model=NAME (3dtrn models), or --set model.hf=CONFIG.json"

    def _entries(self) -> int | None:
        """Entries of the tokenizer that the keys name, with a note on whose they are."""
        kind, files = self.get("@tokenizer"), [str(name) for name in [self.get("@vocabulary")] if name]
        found = entries_of(str(kind or ""), files, self.keys.nearby) if kind or files else None
        model = self.config["model"]
        if found is None and (heads := model.get("n_q_heads")):
            sizes = {"n_kv_heads": heads} | {key: model.get(key) for key in SIZES if key in model}
            found = of_same_sizes(sizes, files, "/".join(self.keys.source.split("/")[-2:]))
        if found is not None:
            self.keys.notes.append(f"vocabulary not set, {found[1]} assumed: {found[0]}")
        return found[0] if found else None

    def _batch(self) -> None:
        """Data-parallel ranks, and the batch that they share."""
        keys, data, layout = self.keys, self.config["data"], self.config["parallelism"]
        degrees = {axis: size_of(layout.get(axis), 1) for axis in ("tp", "pp", "cp")}
        nodes, per_node = self.whole("@nodes") or 1, self.whole("@per_node")
        if per_node is None and self.get("@nodes") is not None and keys.table.raw.get("whole_nodes"):
            per_node = on_node(keys.sets)
        devices = self.devices or self.whole("@devices") or (nodes * per_node if per_node else None) or self.sharers()
        axes = {name: size_of(self.get(name), 0) for name in _AXES if self.get(name) is not None}
        whole = len(axes) > 1 or not keys.table.raw.get("one_degree_of_two")  # else the devices give the other one
        product = prod(axes.values()) if axes and min(axes.values()) > 0 and whole else None
        dp = layout.get("dp") or product or data_parallel(keys, degrees, devices)
        (micro, steps), batch = self.shares(degrees), self.whole("@batch")
        micro = (self.whole("@micro_of_stage") if degrees["pp"] > 1 else None) or micro
        if dp is None and batch and micro and steps and self.states("@steps") and batch % (micro * steps) == 0:
            dp = batch // (micro * steps)
        if (tokens := self.whole("@tokens_batch")) and isinstance(data.get("seqlen"), int):
            batch = tokens // data["seqlen"]
        if dp is None:
            keys.left_open["parallelism.dp"] = self.open_devices or f"number of devices unknown; {SET_DEVICES}"
        else:
            layout["dp"] = dp
            inside = per_node or on_node(keys.sets) or dp
            if self.hybrid and dp > inside and dp % inside == 0:
                layout["replicas"] = dp // inside
            replicas = prod(axes.get(name, 1) for name in ("@dp_replicate", "@dp_dcn"))
            replicas = replicas if whole or "@dp_shard" not in axes else max(1, dp // axes["@dp_shard"])
            if (self._sharded() or product) and 1 < replicas <= dp:
                layout["replicas"] = replicas
            self.tell_share(self.own_names, batch)
            steps = self.accumulated(micro, steps, dp * prod(degrees.values()))
            gbs = batch or (micro * steps * dp if micro else None)
            data |= {"gbs": gbs} if gbs else {}
            looked_for = str(self.get("@micro")) == "auto"  # at run time: llm-foundry
            micro = micro or (gbs // (dp * steps) if gbs and not looked_for else None)
        data |= {"microbatch_sz": micro} if micro else {}
        for key in ("gbs", "microbatch_sz"):
            if key not in data and "parallelism.dp" not in keys.left_open:
                keys.ask(f"data.{key}", "batch unknown")
        if dp is not None and "parallelism.dp" not in keys.left_open and devices is not None:
            keys.assumed_flags.append(LaunchFlag("devices", str(devices), "used", "parallelism.dp"))
