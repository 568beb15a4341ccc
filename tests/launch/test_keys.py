"""Tables of keys: what a file's keys are sorted into, and how their values are read."""

import time

import pytest

from steptime.base.config import ConfigError
from steptime.launch.devices import data_parallel, devices_in, told_whole
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import KeyRule, KeyTable, load_table, read_keys, rule_of, speaks_of_cost, spelled
from steptime.launch.nemo.targets import simplify
from steptime.launch.python.config_functions import read_function

TABLE = KeyTable(
    "Frame 1.0",
    {
        "a.size": KeyRule("used", "data.gbs"),
        "a.kind": KeyRule("used", "model"),
        "a.part": KeyRule("used", "model", only_with="b.offload"),
        "a.*": KeyRule("irrelevant", "nothing"),
        "b.offload": KeyRule("unmodeled", "offloading", (False, "none")),
        "b.mode": KeyRule("unmodeled", "a mode", ("plain",)),
    },
    {"a.size": ("a.size", 4)},
    {},
    {"a.batch": "a.size", "old.": "b.", "old.a.": "a."},
    {},
)


def settings(**said):
    given = read_keys({key.replace("__", "."): value for key, value in said.items()}, TABLE)
    return JobKeys("job", TABLE, given)


def statuses(**said):
    return {flag.name: flag.status for flag in settings(**said).flags()}


def test_every_key_has_a_status():
    assert statuses(a__batch=2, a__other=1, b__offload=True, b__mode="plain") == {
        "a.batch": "used",
        "a.other": "irrelevant",
        "b.offload": "unmodeled",
        "b.mode": "irrelevant",
    }
    assert statuses()["a.size"] == "default"


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("b__offload", False, "irrelevant"),
        ("b__offload", None, "irrelevant"),  # unset, where false is off
        ("b__offload", "none", "irrelevant"),
        ("b__offload", 0, "unmodeled"),  # not the false of the table
        ("b__mode", None, "unmodeled"),  # unset is not "plain"
        ("old__a__size", 8, "used"),  # the longest beginning is taken
        ("old__offload", False, "irrelevant"),
    ],
)
def test_switched_off_keys_change_nothing(key, value, status):
    assert statuses(**{key: value})[key.replace("__", ".")] == status


def test_an_unknown_key_is_refused_where_its_name_speaks_of_cost():
    found = {
        flag.name: (flag.status, flag.note)
        for flag in settings(b__ofload=True, c__hidden_size=1, c__dir=2, d=0).flags()
    }
    assert found["b.ofload"] == ("unmodeled", "not an option of Frame 1.0; did you mean b.offload?")
    assert found["c.hidden_size"] == (
        "unmodeled",
        "not an option of Frame 1.0; its name suggests a cost",
    )
    assert found["c.dir"] == ("irrelevant", "not an option of Frame 1.0; its name suggests no cost")
    assert found["d"] == ("irrelevant", "off; not an option of Frame 1.0")
    notes = settings(c__dir=2).reading({}).config["notes"]
    assert notes == ["not options of Frame 1.0, assumed to have no cost: c.dir"]


def test_a_name_of_any_length_is_judged_at_once():
    """60,000 characters took 14 s: every rope_ was tried against all that follows."""
    start = time.process_time()
    assert speaks_of_cost("rope_" * 12_000)
    assert not speaks_of_cost("rope_theta_" * 12_000)
    assert time.process_time() - start < 1.0


def test_what_a_job_makes_of_its_keys_goes_over_the_table():
    found = settings(a__kind="x", b__offload=False)
    found.leave_out("a.kind", "why")
    found.without_effect("a.size", "unused")
    assert [(flag.name, flag.status) for flag in found.flags()] == [
        ("a.kind", "unmodeled"),
        ("b.offload", "irrelevant"),
    ]


def test_a_key_that_belongs_to_another_matters_where_that_is_on():
    assert statuses(a__part=1, b__offload=False)["a.part"] == "irrelevant"
    assert statuses(a__part=1, b__offload=True)["a.part"] == "used"


def test_the_last_word_on_a_key_counts_and_nothing_is_no_word():
    found = settings(a__batch=2, a__size=3)
    assert found.count("a.size") == 3
    assert found.flags()[0].note == "a.size overrides it"
    assert settings(a__batch=2, a__size=None).count("a.size") == 2


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (True, "expected a whole number of at least 1 (got true)"),
        (0, "expected a whole number of at least 1 (got 0)"),
        ("many", "expected a whole number of at least 1 (got 'many')"),
        (10**13, "must be at most 1,000,000,000,000 (got 10000000000000)"),
        (None, "required key is missing"),
    ],
)
def test_whole_numbers(value, line):
    found = settings(a__kind=value)
    found.count("a.kind")
    assert found.problems == [f"job: a.kind: {line}"]
    assert settings(a__kind="12").count("a.kind") == settings(a__kind=12.0).count("a.kind") == 12
    assert settings().whole("a.kind") is None


def test_words_and_switches():
    found = settings(a__kind="Adam", a__size="torch.float32", b__mode="True", b__offload=False)
    assert found.word("a.kind", {"adam": 1}) == 1
    assert found.word("a.size", {"float32": 2}) == 2
    assert found.meaning("a.size", {"bf16": 1}) is None
    assert found.on("b.mode")
    assert not found.on("b.offload")
    assert found.on("a.part", default=True)
    assert found.problems == []
    assert not found.on("a.kind")
    assert found.word("a.kind", {"sgd": 1}) == 1
    with pytest.raises(ConfigError) as error:
        found.reading({})
    assert error.value.problems == [
        "job: a.kind: expected true or false (got 'Adam')",
        "job: a.kind: expected one of sgd (got 'Adam')",
        "job: b.mode True: a mode; not modeled; --allow-unmodeled ignores it",
    ]


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("srun --nodes=4 --ntasks-per-node=8 python x.py", 32),
        ("torchrun --nnodes 2 --nproc-per-node 4 x.py", 8),
        ("+ NGPU=8", 8),
        ("WORLD_SIZE=64", 64),
        ("world size: 16", 16),
        ("log_world_size_to_tensorboard: false", None),
        ("", None),
    ],
)
def test_devices_of_a_launcher(text, devices):
    assert devices_in(text) == devices
    assert devices_in(text, {"WORLD_SIZE": "3"}) == (devices or 3)


def test_data_parallel_ranks():
    found = settings()
    assert data_parallel(found, {"tp": 4}, 16) == 4
    assert data_parallel(found, {"tp": 4}, None) is None
    assert data_parallel(JobKeys("job", TABLE, [], sets={"parallelism.dp": 7}), {"tp": 4}, 16) == 7
    assert data_parallel(found, {"tp": 2, "pp": 2}, 18, "; fix") == 4
    assert found.problems == ["job: world size 18 is not a multiple of tp 2 x pp 2 = 4 (4, 8, 12 ... are); fix"]
    with pytest.raises(ConfigError, match=r"--set parallelism\.dp: expected a whole number"):
        told_whole({"parallelism.dp": "x"}, "parallelism.dp")


def test_functions_that_call_each_other_for_ever():
    with pytest.raises(ConfigError, match="is recursive"):
        read_function("a.py", "def f() -> Trainer.Config:\n    return f()\n", "f", "Trainer.Config")
    with pytest.raises(ConfigError, match="does not return a config"):
        read_function("a.py", "def f():\n    return 3\n", "f", "Trainer.Config")
    with pytest.raises(ConfigError, match=r"no function that returns Trainer\.Config"):
        read_function("a.py", "x = 1\n", "", "Trainer.Config")


def test_classes_become_names():
    node = {"_target_": "a.C", "_partial_": True, "x": [{"_target_": "b.f", "_call_": False}], "y": {"z": 1}}
    assert simplify(node) == {"x": ["b.f"], "y": {"z": 1}}


@pytest.mark.parametrize("name", ["torchtitan", "nemo1", "nemo2", "megatron", "megatron_bridge", "deepspeed"])
def test_tables_are_sound(name):
    table = load_table(name)
    assert table.framework
    assert table.raw["source"]
    for key in table.defaults:
        assert table.rules[key].status == "used"
    for rule in table.rules.values():
        assert rule.note
        assert not rule.only_with or rule.only_with in table.rules
    for old in table.renamed:
        assert old.endswith(".") or rule_of(spelled(old, table), table), old
    assert rule_of(spelled("no.such.key", table), table) is None
