"""Megatron-LM's arguments: each flag of the release's parser is known, with its default."""

from __future__ import annotations

import json

import pytest
from mcore_ask import megatron
from megatron_readings import FOLDER, TABLE

from steptime.launch.keys import load_table, spelled
from steptime.launch.megatron.parallelism_section import stages_of
from steptime.launch.megatron.releases import plain

LAYOUTS = ["Et*3|(tt|)*2tL", "E|(t|)*3,t|t||L", "Ettt|tttt*2|t*2,t|ttL"]
ASK = """
import dataclasses, json, sys
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

kinds = (TransformerConfig, MLATransformerConfig, ModelParallelConfig, OptimizerConfig, DistributedDataParallelConfig)
defaults = {}
for kind in (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig, TransformerConfig):
    for field in dataclasses.fields(kind):
        meta = field.metadata.get("argparse_meta", {})
        defaults[field.name] = str(meta.get("default", field.default))
layouts = {text: PipelineParallelLayerLayout.get_num_stages_from_str(text) for text in json.loads(sys.stdin.read())}
fields = sorted({field.name for kind in kinds for field in dataclasses.fields(kind)})
print(json.dumps({"fields": fields, "defaults": defaults, "layouts": layouts}))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """What the installed megatron-core says, asked in a process that has imported it for other tests too."""
    script = tmp_path_factory.mktemp("core") / "ask.py"
    script.write_text(ASK, encoding="utf-8")
    return json.loads(megatron(script, json.dumps(LAYOUTS)).splitlines()[-1])


def test_pipeline_layouts_are_those_of_megatron_core(core):
    assert {text: len(stages_of(text)) for text in LAYOUTS} == core["layouts"]


# --- the table ---


def test_every_flag_of_the_parser_is_known():
    negations, names, switches = (TABLE.raw[key] for key in ("negations", "flag_names", "switches"))
    recorded = (FOLDER.parent / "megatron_flags.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in recorded if not line.startswith("#")]
    assert len(rows) == 669
    for flag, argument, kind in rows:
        assert spelled(argument, TABLE) in TABLE.rules, f"{flag} is unknown"
        bare = flag[2:]
        if kind == "store_false":
            assert negations[bare] == argument
        else:
            assert names.get(bare, bare.replace("-", "_")) == argument
            assert (argument in switches) == (kind == "store_true")


def test_every_field_of_megatron_core_is_known(core):
    """The installed release's dataclasses: a field that a newer one adds fails here."""
    assert len(core["fields"]) > 300
    assert sorted(name for name in core["fields"] if spelled(name, TABLE) not in TABLE.rules) == []


def test_the_table_says_each_argument_once():
    raw = TABLE.raw
    places = [
        *raw["used"],
        *raw["approximated"],
        *raw["unmodeled"],
        *(name for names in raw["irrelevant"].values() for name in names),
    ]
    assert sorted({name for name in places if places.count(name) > 1}) == []
    assert sorted(set(places) & set(raw["renamed"])) == []
    assert {new for new in raw["renamed"].values() if new not in places} == set()


def test_defaults_are_those_of_megatron_core(core):
    """Where the parser makes its flags of TransformerConfig, the defaults are its own; a config object's always are."""
    own = core["defaults"]
    compared = {key: value for key, (_, value) in TABLE.defaults.items() if key in own}
    for name in (
        "gradient_accumulation_fusion",
        "overlap_p2p_comm",
        "masked_softmax_fusion",
        "apply_rope_fusion",
        "cp_comm_type",
        "kv_lora_rank",
        "optimizer_offload_fraction",
    ):
        compared.pop(name)  # flags of the parser itself
    assert len(compared) > 20
    assert {name: plain(own[name]) for name in compared} == {name: plain(str(said)) for name, said in compared.items()}
    fields = {name.rpartition(".")[2]: value for name, value in load_table("megatron_bridge").raw["defaults"].items()}
    for name in ("activation_func", "position_embedding_type", "share_embeddings_and_output_weights"):  # of GPTModel
        fields.pop(name)
    assert len(fields) > 20
    assert {name: plain(own[name]) for name in fields} == {name: plain(str(said)) for name, said in fields.items()}
