"""Tables of keys: what a file's keys are sorted into, and how their values are read."""

import pytest

from steptime.base.config import ConfigError
from steptime.launch.devices import data_parallel, devices_in, told_whole
from steptime.launch.keys import Entry, Table, Values, entry_of, load_table, remark, sort_keys, spelled
from steptime.launch.pyconfig import read_function
from steptime.launch.targets import simplify

TABLE = Table(
    "Frame 1.0",
    {
        "a.size": Entry("used", "data.gbs"),
        "a.kind": Entry("used", "model"),
        "a.*": Entry("irrelevant", "nothing"),
        "b.offload": Entry("unmodelled", "offloading", (False, "none")),
        "b.mode": Entry("unmodelled", "a mode", ("plain",)),
    },
    {"a.size": 4},
    {"a.batch": "a.size", "old.": "b.", "old.a.": "a."},
    {},
)


def sort(**said):
    return sort_keys({key.replace("__", "."): value for key, value in said.items()}, TABLE, "job")


def statuses(**said):
    return {flag.name: flag.status for flag in sort(**said)[1]}


def test_every_key_has_a_status():
    assert statuses(a__batch=2, a__other=1, b__offload=True, b__mode="plain") == {
        "a.batch": "used",
        "a.other": "irrelevant",
        "b.offload": "unmodelled",
        "b.mode": "irrelevant",
    }
    assert statuses()["a.size"] == "default"


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("b__offload", False, "irrelevant"),
        ("b__offload", None, "irrelevant"),  # unset, where false is off
        ("b__offload", "none", "irrelevant"),
        ("b__offload", 0, "unmodelled"),  # not the false of the table
        ("b__mode", None, "unmodelled"),  # unset is not "plain"
        ("old__a__size", 8, "used"),  # the longest beginning is taken
        ("old__offload", False, "irrelevant"),
    ],
)
def test_switched_off_keys_change_nothing(key, value, status):
    assert statuses(**{key: value})[key.replace("__", ".")] == status


def test_unknown_keys_are_told_together():
    with pytest.raises(ConfigError) as error:
        sort(b__ofload=True, c=1)
    assert error.value.problems == [
        "job: b.ofload: unknown key of Frame 1.0 (got true); did you mean 'b.offload'?",
        "job: c: unknown key of Frame 1.0 (got 1); remove it",
    ]
    flags = sort_keys({"c": None, "d.e": []}, TABLE, "job", dump=True)[1]
    assert [flag.status for flag in flags[:2]] == ["irrelevant", "irrelevant"]


def test_remarks_go_over_the_table():
    flags = sort(a__kind="x", b__offload=False)[1]
    changed = remark(flags, {"a.kind": ("unmodelled", "why"), "a.size": ("irrelevant", "unused")}, TABLE)
    assert [(flag.name, flag.status) for flag in changed] == [("a.kind", "unmodelled"), ("b.offload", "irrelevant")]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (True, "expected a whole number of at least 1 (got true)"),
        (0, "expected a whole number of at least 1 (got 0)"),
        ("many", "expected a whole number of at least 1 (got 'many')"),
        (10**13, "must be at most 1,000,000,000,000 (got 10000000000000)"),
        (None, "missing, and required"),
    ],
)
def test_whole_numbers(value, line):
    with pytest.raises(ConfigError) as error:
        Values("job", {"k": value}).whole("k")
    assert error.value.problems == [f"job: k: {line}"]
    assert Values("job", {"k": "12"}).whole("k") == Values("job", {"k": 12.0}).whole("k") == 12


def test_words_and_switches():
    values = Values("job", {"k": "Adam", "yes": "True", "no": False})
    assert values.word("k", {"adam": 1}) == 1
    assert values.yes("yes")
    assert not values.yes("no")
    assert values.yes("unsaid", default=True)
    with pytest.raises(ConfigError, match="expected true or false"):
        values.yes("k")


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
    assert data_parallel("job", 4, 16, None, "tp") == 4
    assert data_parallel("job", 4, 16, {"parallelism.dp": 7}, "tp") == 7
    with pytest.raises(ConfigError, match="18 devices do not divide by tp = 4"):
        data_parallel("job", 4, 18, None, "tp")
    with pytest.raises(ConfigError, match=r"--set parallelism\.dp: expected a whole number"):
        told_whole({"parallelism.dp": "x"}, "parallelism.dp")


def test_functions_that_call_each_other_for_ever():
    with pytest.raises(ConfigError, match="calls itself"):
        read_function("a.py", "def f() -> Trainer.Config:\n    return f()\n", "f", "Trainer.Config")
    with pytest.raises(ConfigError, match="returns no config"):
        read_function("a.py", "def f():\n    return 3\n", "f", "Trainer.Config")
    with pytest.raises(ConfigError, match=r"no function that returns Trainer\.Config"):
        read_function("a.py", "x = 1\n", "", "Trainer.Config")


def test_classes_become_names():
    node = {"_target_": "a.C", "_partial_": True, "x": [{"_target_": "b.f", "_call_": False}], "y": {"z": 1}}
    assert simplify(node) == {"x": ["b.f"], "y": {"z": 1}}


@pytest.mark.parametrize("name", ["torchtitan", "nemo1", "nemo2", "megatron_bridge", "deepspeed"])
def test_tables_are_sound(name):
    table = load_table(name)
    assert table.framework
    assert table.raw["source"]
    for key in table.defaults:
        assert table.entries[key].status == "used"
    for entry in table.entries.values():
        assert entry.note
    assert entry_of(spelled("no.such.key", table), table) is None
