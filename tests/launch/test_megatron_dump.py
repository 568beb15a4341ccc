"""The arguments that Megatron-LM's logs print, read as plans."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron_readings import H100, TABLE, dump, problems

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.launch.kinds import kind_of
from steptime.launch.logs.printed_config import read_dump
from steptime.launch.megatron.releases import plain
from steptime.launch.megatron.sources import from_arguments, read_megatron
from steptime.launch.plan_yaml import plan_yaml
from steptime.launch.reading import to_job


@pytest.mark.parametrize(
    "prefix", ["0: ", "[default0]:", "[rank0]: ", "2025-11-21T10:00:00 ", "\x1b[32m0:\x1b[0m ", "  7|gpu-3| "]
)
def test_prefixes_of_ranks_are_taken_off(prefix):
    expected = read_dump(dump())
    assert read_dump(prefix + line for line in dump()) == expected


def test_lines_of_other_ranks_are_passed_over():
    lines, noise = (
        dump(),
        ["[rank3]: NCCL INFO Channel 00/02 : 0 1", "1: using fused kernels ....... yes", "", "WARNING: x"],
    )
    order = random.Random(0)
    mixed = [part for line in lines for part in (line, *order.choices(noise, k=order.randrange(3)))]
    assert read_dump(mixed) == read_dump(lines)
    assert len(read_dump(lines)) == sum(line.startswith("  ") for line in lines)


def test_words_of_deepspeeds_report_of_ops_after_a_value_are_no_part_of_it():
    """deepspeed/env_report.py prints them in colors; another process may do so before the end of a line of the dump."""
    lines = dump()
    mixed = [
        line + random.Random(i).choice(["", "\x1b[93m[NO]\x1b[0m", "\x1b[92m[OKAY]\x1b[0m", "..........." * (i < 20)])
        for i, line in enumerate(lines)
    ]
    assert "\x1b" in "".join(mixed[1:-1])
    assert read_dump(mixed) == read_dump(lines)


def test_names_longer_than_the_dots_are_read():
    """48 columns: a longer name has none."""
    found = read_dump(dump())
    assert max(map(len, found)) > 48
    assert found["tensor_model_parallel_size"] == "8"
    assert found["cp_comm_type"] == "['p2p']"


def test_it_reads_no_further_than_the_end():
    def lines():
        for line in dump():
            yield line
            if "end of arguments" in line:
                break
        raise AssertionError("read on")

    assert read_dump(lines())["num_layers"] == "80"


@pytest.mark.parametrize("keep", [5, 40, 300])
def test_a_dump_cut_in_the_middle_is_one_line(keep):
    text = "\n".join(dump()[:keep])
    assert problems(read_megatron, "log.txt", text) == [
        f"log.txt: the dump of arguments is truncated after line {keep}: no 'end of arguments' line"
    ]


def test_a_log_without_a_dump_is_one_line():
    assert problems(read_dump, ["iteration 1"]) == [
        "no dump of arguments ('------ arguments ------') in it; not a Megatron-LM log"
    ]


def test_a_dump_that_contradicts_itself():
    arguments = read_dump(dump()) | {"world_size": "48"}
    assert problems(from_arguments, arguments, "log") == ["log: world size 48 is not a multiple of tp 8 x pp 4 = 32"]
    arguments = read_dump(dump()) | {"data_parallel_size": "4"}
    assert problems(from_arguments, arguments, "log") == [
        "log: data_parallel_size 4 contradicts world size 64, from which 2 follows"
    ]
    assert problems(from_arguments, read_dump(dump()), "log", world_size=128) == [
        "log: world_size 64 contradicts the launch command, which starts 128 processes"
    ]


def test_unknown_arguments_of_a_dump_matter_when_they_are_on():
    arguments = read_dump(dump()) | {
        "new_feature": "False",
        "newer_feature": "3",
        "newer_hidden_size": "3",
        "inference_new_thing": "7",
    }
    found = from_arguments(arguments, "log")
    assert [(flag.name, flag.status) for flag in found.flags if flag.name.startswith(("new", "inference_new"))] == [
        ("new_feature", "irrelevant"), ("newer_feature", "irrelevant"), ("newer_hidden_size", "unmodeled"),
        ("inference_new_thing", "irrelevant"),
    ]  # fmt: skip


def test_ways_of_fp8_matter_with_fp8():
    """ROCm's Megatron-LM prints them in every dump."""
    ways = {"fp8_weight_cache": "False", "fp8_reduce_amax": "True"}
    for fp8, status in (("None", "irrelevant"), ("hybrid", "unmodeled")):
        flags = from_arguments(read_dump(dump()) | ways | {"fp8": fp8}, "log").flags
        found = {flag.name: flag.status for flag in flags if flag.name in ways}
        assert found == {"fp8_weight_cache": status, "fp8_reduce_amax": "irrelevant"}


def test_a_log_states_its_vocabulary():
    arguments = read_dump(dump())
    assert from_arguments(arguments, "log", vocab_size=12345).config["model"]["vocab_sz"] == 12345


@pytest.mark.parametrize(
    ("text", "value"),
    [("torch.bfloat16", "bf16"), ("torch.float32", "fp32"), ("AttnBackend.auto", "auto"), ("<AttnBackend.flash: 1>", "flash"),
     ("None", None), ("'x'", "x"), ("1.5", "1.5"), ("a/b.c", "a/b.c")],
)  # fmt: skip
def test_values_lose_the_clothes_of_python(text, value):
    assert plain(text) == value


SAID = st.one_of(
    st.integers(-2, 64).map(str),
    st.sampled_from(
        ["none", "full", "selective", "bf16", "rope", "1.5", "E|t*3|L", "((t|)*99)*99L", "a b", "'", "p2p a2a", "e4m3"]
    ),
    st.text(st.characters(codec="utf-8"), max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(key for key, rule in TABLE.rules.items() if rule.status != "irrelevant")),
        SAID,
        max_size=6,
    ),
    st.booleans(),
)
@example(changes={"apply_residual_connection_post_layernorm": "0\x850"}, of_a_log=True)
def test_any_arguments_are_a_job_or_words(changes, of_a_log):
    """Whatever an argument says: a plan, or lines that say what is wrong."""
    usual = read_dump(dump()) if of_a_log else {"num_layers": "8", "hidden_size": "512", "num_attention_heads": "8"}
    told = []
    try:
        job = to_job(from_arguments(usual | changes, "log"), H100, allow_unmodeled=True)
    except ConfigError as error:
        told = error.problems
    else:
        assert Job.load(plan_yaml(job)) == job
    assert all(line.startswith("log: ") and "\n" not in line for line in told)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.log", "`torch_dtype` is deprecated!\nloading"),
        ("job.out", "it's loading"),
        ("job", " iteration        5/     100 | consumed samples: 40 | elapsed time per iteration (ms): 1234.5 |\n"),
    ],
)
def test_a_log_without_its_arguments_is_told_as_a_log(name, text):
    """Not as a shell script with an open quote."""
    with pytest.raises(ConfigError) as error:
        read_megatron(name, text)
    missing = "a log without its dump of arguments (a line 'arguments' between dashes)"
    assert error.value.problems == [f"{name}: {missing}; give the log from its beginning, or the launch script"]


@pytest.mark.parametrize("before", ["", "+ ", "++ "])
def test_a_log_without_its_arguments_is_read_by_the_command_that_it_prints(before):
    """A script's `set -x`, or its `echo` of the command, above lines that are no shell."""
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
    more = "--micro-batch-size 1 --global-batch-size 16 --bf16 --tokenizer-type NullTokenizer --vocab-size 999"
    log = (
        f"it's starting\n{before}torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {flags} {more}\nit's loading\n"
    )
    plan = read_megatron("job.log", log).config
    assert (plan["model"]["n_layers"], plan["parallelism"]["dp"], plan["data"]["gbs"]) == (4, 16, 16)


def test_a_log_with_a_dump_is_megatrons_whatever_other_lines_it_has(tmp_path):
    """DeepSpeed's engine prints its config, in which words of other frameworks occur."""
    path = tmp_path / "output.txt"
    path.write_text(
        "\n".join(["ninja [OKAY]", *dump(), "train_type: x", "swift sft", '{"zero_optimization": {}}', "}"])
    )
    assert kind_of(str(path), path.read_text()) == "megatron"


DEEPSPEED = """\
------------------------ arguments ------------------------
  bf16 ............................................ False
  deepspeed ....................................... True
  deepspeed_config ................................ ds.json
  fp16 ............................................ True
  global_batch_size ............................... 64
  hidden_size ..................................... 1024
  max_position_embeddings ......................... 512
  micro_batch_size ................................ 1
  num_attention_heads ............................. 8
  num_layers ...................................... 8
  padded_vocab_size ............................... 50304
  seq_length ...................................... 512
  vocab_size ...................................... 50257
  world_size ...................................... 8
  zero_stage ...................................... {}
-------------------- end of arguments ---------------------
{}"""
ENGINE = "[2022-09-18 23:39:55,069] [INFO] [config.py:991:print]   zero_optimization_stage ...... {}\n"


def level_of(text: str) -> object:
    return read_megatron("x.log", text, sets=H100).config["parallelism"].get("zero_level")


def test_the_stage_of_deepspeeds_engine_goes_before_the_dumps():
    """Megatron-DeepSpeed's --zero-stage has 1.0 where it is not given, and does not change what the ds_config says."""
    assert level_of(DEEPSPEED.format("1.0", ENGINE.format(0))) == 0
    assert level_of(DEEPSPEED.format("1", ENGINE.format(2))) == 2
    assert level_of(DEEPSPEED.format("1", "")) == 1


def test_a_dump_without_a_stage_is_asked_for_it():
    told = problems(lambda: to_job(read_megatron("x.log", DEEPSPEED.format("1.0", ""), sets=H100), H100))
    why = "--zero-stage is not given, and the log does not print DeepSpeed's config"
    assert told == [f"x.log: ZeRO stage unknown: {why}; add --set parallelism.zero_level=N"]
    sets = H100 | {"parallelism.zero_level": 2}
    assert to_job(read_megatron("x.log", DEEPSPEED.format("1.0", ""), sets=sets), sets).parallelism.zero_level == 2


def test_a_log_of_several_jobs_says_that_the_first_is_read():
    """Of a restart with other paths, or one step further, nothing is noted; a dump that is cut counts for nothing."""
    first = DEEPSPEED.format("1", ENGINE.format(1))
    again = first.replace("ds.json", "other.json")
    other = first.replace("world_size ...................................... 8", "world_size " + "." * 38 + " 4")
    assert "world_size " + "." * 38 + " 4" in other

    def notes(*texts):
        return read_megatron("x.log", "".join(texts), sets=H100).config.get("notes", [])

    assert notes(first, again, first[:400]) == notes(first)
    found = "the log is of several jobs, which differ in world_size; the first is read"
    assert notes(first, again, other) == [found, *notes(first)]


def test_a_forks_arguments_of_what_the_dump_says_is_off_do_nothing():
    own = "  moe_capacity_bins_alignment ..................... 64\n  fp8_coverage .................................... mlp\n"
    names = ("moe_capacity_bins_alignment", "fp8_coverage")

    def statuses(off: str):
        text = DEEPSPEED.format("1", "").replace("  fp16 ", f"{off}{own}  fp16 ", 1)
        found = {flag.name: (flag.status, flag.note) for flag in read_megatron("x.log", text, sets=H100).flags}
        return [found[name] for name in names]

    off = "  fp8 " + "." * 45 + " None\n  num_experts " + "." * 37 + " None\n"
    assert statuses(off) == [("irrelevant", "only with num_experts"), ("irrelevant", "only with fp8")]
    assert [status for status, _ in statuses("")] == ["unmodeled"] * 2  # the dump does not say
    own, names = "  moe_num_experts " + "." * 33 + " 64\n", ("moe_num_experts",)  # in place of Megatron's
    assert [status for status, _ in statuses(off)] == ["unmodeled"]
