"""Figures of a trainer's job, by the keys of its files that give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from steptime.base.config import show
from steptime.job.layer_counts import balanced_by_cost
from steptime.job.limits import BOUNDS
from steptime.launch.devices import told
from steptime.launch.job_keys import JobKeys
from steptime.launch.reading import OTHER_MODEL
from steptime.model.presets import load_model

WHOLE = frozenset({"full", "freeze_none"})
"""Words of a method that trains every weight."""
_OFF = frozenset({"false", "none", "null", "", "0", "auto", "no", "[]", "{}"})
_SPARSE = frozenset({"local", "sparse_fixed", "sparse_variable", "bslongformer", "bigbird"})
_ATTENTION = frozenset({"global", "flash"}) | _SPARSE
"""Words of GPT-NeoX's attention_config for sparse attention, and for attention at all; its others, and those of forks, are
layers of another kind (megatron/neox_arguments/neox_args.py, ATTENTION_TYPE_CHOICES: gmlp, amlp, mamba, rwkv)."""


def size_of(value: Any, default: Any) -> Any:
    """A whole number, `default` where it is not one: the value stays in the config, whose own check reports it."""
    return int(value) if re.fullmatch(r"-?\d{1,18}", str(value)) else default


class Figures:
    """Values of the keys of a file from which a plan is derived (names that begin with @)."""

    def __init__(self, keys: JobKeys) -> None:
        """None yet."""
        self.keys = keys
        self.figures: dict[str, str] = {}
        """@figure -> the key that gives it."""
        self.deepcompile = False
        """Whether a ds_config turns DeepCompile on."""

    def get(self, figure: str) -> Any:
        """The value of a figure's key; None where it is not set."""
        return self.keys.get(self.figures[figure]) if figure in self.figures else None

    def on(self, figure: str) -> bool:
        """Whether a figure's switch is on."""
        value = self.get(figure)
        return (value is not None and str(value).lower() not in _OFF) or self.backend() == figure

    def backend(self) -> str:
        """The figure that a word for what runs the steps switches on (accelerate's distributed_type)."""
        key = self.figures.get("@distributed")
        return str(self.keys.word(key)) if key is not None else ""

    def whole(self, figure: str) -> int | None:
        """A figure's whole number; None where it is not given, or set to auto or -1."""
        left = figure not in self.figures or str(self.get(figure)) in {"auto", "-1"}
        return None if left else self.keys.whole(self.figures[figure])

    def states(self, figure: str) -> bool:
        """Whether the file gives a figure itself: a default of steps is none where a program divides its batch by the devices."""
        return self.figures.get(figure) in self.keys.values

    def tell_share(self, name: str, batch: int | None) -> None:
        """Note that a program's own `name` for a batch is read as that of a device, where none of all devices is known."""
        if name in {"batch_size", "train_batch_size"} and not batch and told(self.keys.sets, "data.gbs") is None:
            fix = "for the global batch add --set data.gbs=N"
            self.keys.notes.append(f"{name} read as the batch of each device; {fix}")

    def shares(self, degrees: Mapping[str, int]) -> tuple[int | None, int | None]:
        """Sequences of a micro-batch, and micro-batches of a step.

        Of the devices that hold the model once they are together, where the trainer states those of one device
        (`batch_of_a_device`): MaxText's global batch is num_devices * per_device_batch_size, which may be a fraction
        (MaxText/pyconfig.py, calculate_global_batch_sizes), and goes through a pipeline as one micro-batch for each stage.
        """
        if "@micro" not in self.figures or not self.keys.table.raw.get("batch_of_a_device"):
            return self.whole("@micro"), self.whole("@steps")
        key, (tp, pp, cp) = self.figures["@micro"], (degrees[axis] for axis in ("tp", "pp", "cp"))
        micro = self.keys.number(key) * tp * cp
        if not micro.is_integer() or micro < 1:
            alone = "each device, since no tensor or context parallelism shares one"
            group = f"the {tp * cp} devices that share a sequence" if tp * cp > 1 else alone
            raise self.keys.error(key, f"must be a whole number of sequences on {group} (got {micro:g})")
        return int(micro), (self.whole("@steps") or 1) * pp

    def accumulated(self, micro: int | None, steps: int | None, devices: int) -> int:
        """Micro-batches of a step: as many as make the trainer's own batch (`least_batch`) where the file does not set them."""
        least: int | None = self.keys.table.raw.get("least_batch")
        if least is None or micro is None or self.states("@steps") or self.whole("@batch"):
            return steps or 1
        key = next(key for key, rule in self.keys.table.rules.items() if rule.note == "@steps")
        found = max(1, ceil(least / (micro * devices)))
        self.keys.put(key, found)
        if told(self.keys.sets, "data.gbs") is None:
            whose = f"{self.keys.table.framework}'s batch of {least} or more"
            self.keys.notes.append(f"{self.keys.name(key)} not set, {found} assumed: {whose}")
        return found

    def listed(self) -> int | None:
        """Devices by the keys of nodes and of the processes on each."""
        per_node = self.whole("@per_node")
        return (self.whole("@nodes") or 1) * per_node if per_node else None

    def sharers(self) -> int | None:
        """Devices that share the batch, where the file states the part of one."""
        batch, part = self.whole("@batch"), self.whole("@device_batch")
        return batch // part if batch and part and batch % part == 0 else None

    def pure(self) -> bool:
        """Whether weights, gradients and states are bf16: a switch, or a trainer's only way, or word (its table's `pure`)."""
        word = self.keys.table.raw.get("pure")
        return self.on("@pure_bf16") or bool(word and ("bf16" if word is True else word) in str(self.get("@half")))

    def masters(self) -> dict[str, str]:
        """Dtypes of a trainer that has a word for pure bf16, without that word: fp32; pure fp16 is left out."""
        if str(self.get("@half")).startswith("16-true"):
            self.keys.leave_out(self.figures["@half"], "weights, gradients and moments in fp16")
        named = isinstance(self.keys.table.raw.get("pure"), str)
        return dict.fromkeys(("param_dtype", "main_grad_dtype", "moment_dtype"), "fp32") if named else {}

    def frozen_in(self, usual: Mapping[str, Any]) -> Any:
        """Dtype of the weights under adapters: that of `masters`, else the trainer's default."""
        return usual.get("base") if self.pure() else self.masters().get("param_dtype", usual.get("base"))

    def mlp_width(self, model: dict[str, Any]) -> int:
        """Width of the MLP, of each half of a gated one; 0 where it is not given."""
        raw, hidden = self.keys.table.raw, size_of(model.get("hidden_sz"), 0)
        apart = raw.get("gated_apart") or {}
        if apart and self.keys.get(apart["key"]) in apart["words"]:  # a module of its own, with a rule of its own
            up, down = apart["of_hidden"]
            multiple = apart["multiple"]
            return self.whole("@mlp") or -(-(hidden * up // down) // multiple) * multiple
        width = self.whole("@mlp") or (self.whole("@mlp_ratio") or 0) * hidden
        if not width:
            return 0
        up, down = raw["gated_mlp"] if model.get("glu") else (1, 1)
        multiple = self.whole("@mlp_multiple") or 1
        return -(-(width * up // down) // multiple) * multiple

    def optimizer(self) -> str | None:
        """The optimizer where it is not Adam; with a note where its states are not modeled."""
        said = str(self.get("@optimizer") or "adam").lower().rpartition(".")[2]
        if said.startswith("paged"):
            self.keys.approximate(self.figures["@optimizer"], "states paged to the host: counted on the device")
            said = said.removeprefix("paged").lstrip("_")
        if re.match(r"adamw?_?(bnb_|torch_)?8bit", said):
            return "adamw_8bit"
        if said == "adafactor" and not self.on("@deepspeed") and not self.on("@fsdp"):
            return said
        named = re.sub(r"[^a-z]", "", said.removeprefix("decoupled_"))  # composer/optim: Adam's, another rule of decay
        if not named.startswith(("adam", "fusedadam")):
            self.keys.leave_out(self.figures["@optimizer"], "states of an optimizer other than Adam; counted as Adam's")
        elif "4bit" in said:
            self.keys.leave_out(self.figures["@optimizer"], "quantized states; counted as fp32")
        return None

    def switch(self) -> str:
        """The figure that switches adapters on: a method, else only a rank."""
        return "@adapter" if "@adapter" in self.figures else "@adapter_rank"

    def adapted(self) -> bool:
        """Whether the files train adapters, or weights in part another way."""
        return self.on(self.switch()) and str(self.get(self.switch())).lower() not in WHOLE

    def weights_of(self) -> str:
        """The dtype of loaded weights: the key's, else the model's own where neither bf16 nor fp16 is on; "" if not said.

        The table's `own_dtype` is of a trainer that does so, `frozen_own_dtype` of one that does so for frozen weights alone.
        """
        weights = str(self.get("@weights") or "").lower().removeprefix("auto")
        if weights or self.on("@bf16") or self.on("@fp16") or self.get("@bf16") == "auto":
            return weights
        raw = self.keys.table.raw
        if own := raw.get("own_dtype") or (raw.get("frozen_own_dtype") if self.adapted() else None):
            self.keys.notes.append(f"dtype not set, {own} assumed: the model's own")
        return str(own or "")

    def halves(self, word: str) -> tuple[bool, bool]:
        """Whether bf16 and fp16 are on, by their switches or by the word of a key of precision or dtype."""
        fp16 = self.on("@fp16") or "fp16" in word or "float16" in word.replace("bfloat16", "") or word[:3] == "16-"
        # Axolotl's "auto" is bf16 wherever the device has it, but for fp16 (utils/config, normalize_config)
        auto = self.get("@bf16") == "auto" and not self.on("@fp16")
        bf16 = self.on("@bf16") or auto or "bf16" in word or "bfloat16" in word
        if "fp8" in str(self.get("@half")).lower():  # accelerate's own fp8, over bf16; llm-foundry's amp_fp8
            self.keys.leave_out(self.figures["@half"], "projections in fp8: those in bf16 are counted")
            bf16 = True
        return bf16, fp16

    def put_performance(self, config: dict[str, Any]) -> None:
        """Put the attention kernel, and recomputation given as a share of the layers, as a word or by groups of layers."""
        keys, performance = self.keys, config["performance"]
        performance |= self.attention()
        if self.on("@wrapped_checkpointing"):  # of the modules that FSDP wraps; Trainer's own is gradient_checkpointing
            performance.setdefault("activation_checkpointing_type", "full")
        if self.on("@checkpointing") and (layers := self.whole("@checkpointed_layers") or 1) > 1:
            del performance["activation_checkpointing_type"]
            performance["recompute"] = {"granularity": "full", "method": "uniform", "n_layers": layers}
        # torchtune: without the switch alone, and where both are set nothing is
        if mode := self.get("@layers_checkpointed"):
            performance.pop("activation_checkpointing_type", None)
            each = (self.whole("@each_nth") or 1) if mode == "selective" else 1
            nth = {"recompute": {"granularity": "full", "method": "every", "n_layers": each}}
            if mode not in ("full", "selective"):
                keys.fail(self.figures["@layers_checkpointed"], f"expected full or selective (got {show(mode)})")
            replays = not self.on("@checkpointing")
            performance |= {} if not replays else nth if each > 1 else {"activation_checkpointing_type": "full"}
        if (by := self.figures.get("@replayed")) is not None:
            share = keys.word(by)
            count = 0 if isinstance(share, str) else max(1, round(share * size_of(config["model"].get("n_layers"), 1)))
            block = {"granularity": "full", "method": "block", "n_layers": count}
            performance |= {"recompute": block} if count else {"activation_checkpointing_type": share}
        kind = "activation_checkpointing_type"
        if (why := keys.table.raw.get("replayed_apart")) and performance.get(kind) == "full":
            keys.approximate(next(key for key, rule in keys.table.rules.items() if rule.note.endswith(kind)), why)

    def attention(self) -> dict[str, Any]:
        """The attention kernel that the words for the layers name (GPT-NeoX's attention_config), or a switch."""
        keys, by = self.keys, self.figures.get("@attention")
        kinds = set(re.findall(r"[a-z_]+", str(self.get("@attention")).lower())) - {"all", "none"}
        if by is not None and (other := sorted(kinds - _ATTENTION)):
            keys.leave_out(by, f"{other[0]} layers, {OTHER_MODEL}")
        elif by is not None and kinds & _SPARSE:
            keys.approximate(by, "full causal attention is counted")
        elif by is not None and len(kinds) > 1:
            keys.approximate(by, "layers of several attention kernels: unfused attention is counted in all")
        return {"attention_impl": "flash"} if kinds == {"flash"} or self.on("@flash") else {}

    def put_chunks(self, config: dict[str, Any]) -> None:
        """The stages of a pipeline from layers per chunk, at most one apart.

        Source: NeMo AutoModel components/distributed/pipelining/functional.py, calculate_virtual_stages.
        """
        pp, each = size_of(config["parallelism"]["pp"], 1), self.whole("@layers_per_chunk")
        if pp > 1:
            self.put_passes(config)
        if self.keys.table.framework == "nanotron":
            self.put_nanotron_stages(config, pp)
        preset = config["model"].get("preset") if isinstance(config["model"], dict) else config["model"]
        if pp == 1 or each is None or preset is None:
            return
        layers = load_model(str(preset)).n_layers
        chunks = -(-layers // each)
        chunks += pp - chunks % pp if chunks % pp and self.get("@chunks_rounded") == "up" else -(chunks % pp)
        counts = [layers // chunks + (i < layers % chunks) for i in range(chunks)]
        config["parallelism"] |= {"vpp": chunks // pp} | ({"layers_per_stage": counts} if layers % chunks else {})

    def put_passes(self, config: dict[str, Any]) -> None:
        """How often the pipeline runs in a step: for each local batch (NeMo AutoModel recipes/llm/benchmark.py, ga_steps)."""
        if self.whole("@micro_of_stage") is None or "dp" not in config["parallelism"] or "gbs" not in config["data"]:
            return
        local = size_of(self.get("@micro"), 1) * size_of(config["parallelism"]["dp"], 1)
        passes, rest = divmod(size_of(config["data"]["gbs"], 0), local)
        if passes > 1 and not rest:
            config["parallelism"]["pipeline_passes"] = passes

    def put_nanotron_stages(self, config: dict[str, Any], pp: int) -> None:
        """The stages of nanotron where they are not even; none where other sizes than its file's are set beside it."""
        sets, model = self.keys.sets or {}, config["model"]
        pp = size_of(told(sets, "parallelism.pp"), pp)
        if told(sets, "parallelism.vpp") is not None or any(key.partition(".")[0] == "model" for key in sets):
            return
        sizes = [size_of(model.get(key), 0) for key in ("n_layers", "hidden_sz", "inter_sz", "vocab_sz")]
        if all(sizes) and 1 < pp <= sizes[0] <= BOUNDS["n_layers"][1]:
            layers, hidden, width, vocabulary = sizes
            layer = 4.0 * hidden**2 + 3.0 * hidden * width
            counts = balanced_by_cost(layers, layer, 1.0 * hidden * vocabulary, pp)
            config["parallelism"] |= {"layers_per_stage": counts} if len(set(counts)) > 1 else {}
