"""The rules: each with a job that breaks it, and each over columns."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.base.config import ConfigError
from steptime.job.job import Job, facts
from steptime.job.limits import BOUNDS, MODELED, NOT_MODELED, SANE
from steptime.job.rules import LAYOUT_RULES, RULES, problems
from steptime.search.grid import checked
from steptime.search.space import Counts
from steptime.software.frameworks import FRAMEWORKS
from steptime.software.performance import load_software
from steptime.software.profiles import profile_names

BASE = Job(
    model={"n_layers": 80, "hidden_sz": 8192, "inter_sz": 28672, "n_q_heads": 64, "n_kv_heads": 8, "vocab_sz": 128256},
    parallelism={"tp": 8, "pp": 2, "dp": 64},
    data={"gbs": 2048, "seqlen": 2048, "microbatch_sz": 1},
    hardware="dgx-h100",
)
CASES = yaml.load((Path(__file__).parent / "data" / "broken_rules.yaml").read_text(), yaml.CSafeLoader)
MOE = CASES["moe"]
BROKEN, ONLY_IN_A_FILE = CASES["broken"], CASES["only_in_a_file"]


@pytest.mark.parametrize("case", (BROKEN | ONLY_IN_A_FILE).values(), ids=[*BROKEN, *ONLY_IN_A_FILE])
def test_a_broken_rule_gives_its_line(case):
    with pytest.raises(ConfigError) as error:
        BASE.replace(**case["changes"])
    assert error.value.problems == [case["line"]]


def test_every_line_has_a_path_and_a_fix():
    """`path: what is wrong (got VALUE); what to write instead`."""
    lines = [case["line"] for case in (BROKEN | ONLY_IN_A_FILE).values()]
    assert [line for line in lines if not re.fullmatch(r"[a-z_.0-9]+: .+; .+", line)] == []


def test_a_recipe_of_torchao_names_the_frameworks_that_have_it():
    with pytest.raises(
        ConfigError, match="nvfp4_torchao is not modeled for deepspeed; use software fsdp2 or automodel"
    ):
        BASE.replace(**{"performance.software": "deepspeed", "performance.precision": "nvfp4_torchao"})


def test_every_rule_has_a_job_that_breaks_it():
    bounds = {f"{name} is out of range" for name in BOUNDS}
    assert {rule.name for rule in RULES} == bounds | BROKEN.keys() | ONLY_IN_A_FILE.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name):
    path, limit = BOUNDS[name]
    absurd = facts(BASE)._replace(**{name: int(limit) + 1})
    assert problems(absurd)[0].line == f"{path}: must be at most {limit:,} (got {int(limit) + 1}); lower it"
    assert not any(
        rule.name == f"{name} is out of range" for rule in SANE if not rule.holds(facts(BASE)._replace(**{name: limit}))
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism.tp": 64, "parallelism.dp": 8},  # key-value heads are copied
        {"parallelism.tp": 1, "parallelism.sp": True},  # no effect, and dlcalc's files say so
        {"parallelism.pp": 3, "parallelism.layers_per_stage": "auto"},
        {"parallelism.vpp": 2, "parallelism.schedule": "interleaved"},
        {"parallelism.pp": 1, "parallelism.zero_level": 3},
        {"parallelism.pp": 1, "parallelism.fsdp": {}, "parallelism.zero_level": 3},
        {"parallelism.pp": 1, "parallelism.fsdp": {"reshard_after_forward": False}, "parallelism.zero_level": 2},
        {
            "performance.software": "torch",
            "parallelism.pp": 4,
            "parallelism.vpp": 2,
            "data.gbs": 64 * 10,
        },  # two rounds of five
        {"performance.recompute": {"granularity": "full", "method": "block", "n_layers": [3, 0]}},
        {"performance.master_dtype": "remainder"},
        {"hardware.node_type": "v100", "performance.precision": "fp16"},
        {"parallelism.cp": 2},
        {"parallelism.cp": 2, "model.attention.kind": "mla", "model.n_kv_heads": 64},
        {"model.moe": MOE, "parallelism.zero_level": 2, "parallelism.pp": 1},
        {"model.moe": MOE, "parallelism.zero_level": 3, "parallelism.pp": 1, "parallelism.ep": 8},
        {"parallelism.cp": 2, "parallelism.cp_comm_type": "all_gather", "model.attention.window": 4096},
        {"parallelism.cp": 4, "parallelism.cp_comm_type": "a2a", "parallelism.tp": 2},
        {"parallelism.cp": 4, "parallelism.cp_comm_type": "a2a+p2p", "parallelism.cp_a2a": 2, "parallelism.tp": 4},
        {
            "parallelism.cp": 3,
            "performance.software": "deepspeed",
            "parallelism.pp": 1,
            "parallelism.tp": 1,
            "model.n_q_heads": 66,
            "model.n_kv_heads": 6,
            "model.head_dim": 128,
            "data.seqlen": 2049,
        },  # one chunk a rank
        # Megatron's copies of the distributed optimizer cut dp*cp, torchtitan's dp alone
        {"parallelism.cp": 3, "data.seqlen": 6144, "parallelism.replicas": 3},
    ],
)
def test_allowed(changes):
    BASE.replace(**changes)


def test_what_is_absurd_or_not_modeled_is_told_alone():
    with pytest.raises(ConfigError) as error:
        BASE.replace(**{"model.attention.kind": "mla", "performance.software": "torch", "parallelism.tp": 7})
    assert [line.partition(":")[0] for line in error.value.problems] == ["model.attention.kind"]


def test_frameworks_are_the_profiles():
    """One for each profile that extends no other; Megatron-DeepSpeed, AutoModel, Megatron-LM under FSDP2 run less than those."""
    assert FRAMEWORKS.keys() - {"megatron-deepspeed", "automodel", "megatron-core-fsdp2"} == {
        load_software(name).family for name in profile_names()
    }
    assert "megatron-deepspeed" in profile_names()


def test_words_not_modeled_are_paths_of_a_config():
    sections = {"model", "parallelism", "performance", "data", "hardware"}
    assert all(key.partition(".")[0] in sections for key in NOT_MODELED)


columns = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4, 7, 8, 16, 64]),  # tp
        st.sampled_from([1, 2, 3, 4, 5, 8]),  # pp
        st.sampled_from([1, 2, 3, 8, 64]),  # dp
        st.sampled_from([1, 2, 4, 5]),  # vpp
        st.sampled_from([1, 2, 3]),  # microbatch_sz
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(columns, st.sampled_from([1920, 2048, 960]))
def test_columns_of_rules_equal_their_rows(rows, gbs):
    base = facts(BASE)._replace(gbs=float(gbs))
    names = ("tp", "pp", "dp", "vpp", "microbatch_sz")
    table = base._replace(**dict(zip(names, np.array(rows, dtype=float).T, strict=True)))
    one_by_one = [not problems(base._replace(**dict(zip(names, row, strict=True)))) for row in rows]
    assert checked([table], np.ones(len(rows), dtype=bool), Counts(), 1).tolist() == one_by_one
    for rule in [*SANE, *MODELED, *LAYOUT_RULES]:
        holds = np.broadcast_to(rule.holds(table), len(rows)).tolist()
        assert holds == [
            bool(rule.holds(base._replace(**dict(zip(names, map(float, row), strict=True))))) for row in rows
        ]
