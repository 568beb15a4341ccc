"""Flags that a test of a script chooses, where the file alone does not decide the test."""

import pytest
from launch_readings import HARDWARE

from steptime.base.config import ConfigError
from steptime.launch.read import read

LAUNCH = (
    "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --vocab-file gpt2-vocab.json"
)


def read_of(folder, script, words=""):
    path = folder / "run.sh"
    path.write_text(f"#!/bin/bash\n{script}", encoding="utf-8")
    return read("megatron", f"{path} {words}".strip(), HARDWARE)


def problem_of(folder, script):
    with pytest.raises(ConfigError) as error:
        read_of(folder, script)
    (line,) = error.value.problems
    return line.rpartition("run.sh: ")[2]


def precision(found):
    return found.config["performance"]["precision"]


CHOICE = f'if [ "$PR" = fp8 ]; then P="--fp8-format hybrid --bf16"; else P="--bf16"; fi\n{LAUNCH} $P\n'


def test_flags_that_cost_and_hang_on_a_variable_are_asked_for(tmp_path, monkeypatch):
    """Both texts have --bf16, which a job read without them would lose; --fp8-format is in only one."""
    monkeypatch.delenv("PR", raising=False)
    why = "--fp8-format: $P depends on the test in line 2 ($PR has no value); write PR=... before the command"
    assert problem_of(tmp_path, CHOICE) == f"line 2: {why}"
    monkeypatch.setenv("PR", "fp8")
    assert precision(read_of(tmp_path, CHOICE)) == "fp8_delayed"


def test_flags_that_all_texts_have_are_read(tmp_path):
    """What a test of files chooses differs only in flags without a cost."""
    script = f'if [ -f x/latest ]; then P="--load x --bf16"; else P="--load y --finetune --bf16"; fi\n{LAUNCH} $P\n'
    assert precision(read_of(tmp_path, script)) == "bf16"


def test_texts_of_two_tests_are_put_together(tmp_path, monkeypatch):
    monkeypatch.delenv("PR", raising=False)
    script = 'if [ -f x ]; then P="--load x"; else P=""; fi\nif [ "$PR" = fp8 ]; then P="$P --fp8-format hybrid"; fi\n'
    assert problem_of(tmp_path, f"{script}{LAUNCH} --bf16 $P\n").startswith(
        "line 3: --fp8-format: $P depends on the test"
    )
    plain = script.replace("--fp8-format hybrid", "--finetune")
    assert precision(read_of(tmp_path, f"{plain}{LAUNCH} --bf16 $P\n")) == "bf16"


def test_a_script_without_arguments_is_run_without_them(tmp_path):
    """[ "" = fp8 ] is false."""
    script = CHOICE.replace("$PR", "$1")
    assert precision(read_of(tmp_path, script)) == "bf16"
    assert precision(read_of(tmp_path, script, "fp8")) == "fp8_delayed"


def test_an_argument_that_a_script_requires_is_asked_for(tmp_path):
    """bash stops at ${1:?...} where there is no $1."""
    script = f'SP=${{1:?1 or 0}}\nP=""\nif [ "$SP" = 1 ]; then P="--sequence-parallel"; fi\n{LAUNCH} --bf16 $P\n'
    why = (
        "$P depends on the test in line 4 ($1 has no value); pass script and arguments as one string: 'SCRIPT ARG ...'"
    )
    assert problem_of(tmp_path, script) == f"line 4: --sequence-parallel: {why}"
    assert read_of(tmp_path, script, "0").config["parallelism"]["sp"] is False


def test_values_within_one_quoted_command_line_stay_asked_for(tmp_path, monkeypatch):
    """A wrapper passes the whole line as one word, whose parts are each missing for their own reason."""
    monkeypatch.delenv("PR", raising=False)
    test = 'if [ "$PR" = fp8 ]; then P="--fp8-format hybrid"; else P=""; fi\n'
    flags = LAUNCH.split(".py ")[1].replace("size 1 ", "size $MBS ")
    run = 'torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py "$ALL"'
    script = f'{test}ALL="{flags} --bf16 $P"\n{run}\n'
    told = "$MBS, $PR have no value; write MBS=... PR=... before the command"
    assert problem_of(tmp_path, script).endswith(told)


def test_a_test_without_its_last_bracket_fails(tmp_path):
    """bash 5.2: `[ 1 -ge 1]` prints "[: missing `]'" and returns 2, so the other branch runs."""
    script = f'if [ "1" -ge 1{{}}]; then P="--bf16"; else P="--fp16"; fi\n{LAUNCH} $P\n'
    assert [precision(read_of(tmp_path, script.format(gap))) for gap in (" ", "")] == ["bf16", "fp16"]


def test_flags_added_by_an_undecided_test_leave_the_command_before_them(tmp_path, monkeypatch):
    """The launcher and the program are in the text to which the test adds a flag; one has no cost, the other has."""
    monkeypatch.delenv("VER", raising=False)
    script = f'CMD="{LAUNCH} --bf16"\nif [ "$VER" = 2 ]; then CMD="$CMD {{}}"; fi\n$CMD --seed 1\n'
    assert precision(read_of(tmp_path, script.format("--log-throughput"))) == "bf16"
    why = "--swiglu: $CMD depends on the test in line 3 ($VER has no value); write VER=... before the command"
    assert problem_of(tmp_path, script.format("--swiglu")) == f"line 3: {why}"


def test_the_vocabulary_is_asked_for_together_with_the_values_that_are_missing(tmp_path):
    """A tokenizer of one's own; one whose path has the missing variable may be known with it."""
    script = LAUNCH.replace("--seq-length 1024", "--seq-length $LENGTH").replace("--vocab-file gpt2-vocab.json", "{}")
    told = "line 2: --seq-length: $LENGTH has no value; write LENGTH=... before the command"

    def problems(tokenizer):
        with pytest.raises(ConfigError) as error:
            read_of(
                tmp_path, script.format(f"--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {tokenizer}")
            )
        return [line.partition("run.sh: ")[2] for line in error.value.problems]

    assert problems("/data/own.model") == [told, "vocabulary size unknown; add --set model.vocab_sz=N"]
    assert problems("$BASE/own.model") == [told]


def test_sizes_of_a_file_that_is_an_argument_are_asked_for_as_that(tmp_path):
    script = f'source "${{1}}"\n{LAUNCH}\n'.replace("--num-layers 4", "--num-layers $DEPTH")
    assert problem_of(tmp_path, script) == (
        "line 3: --num-layers: $DEPTH has no value, and the script sources $1; pass script and arguments as one string: "
        "'SCRIPT ARG ...'"
    )
    (tmp_path / "small.sh").write_text("DEPTH=6\n", encoding="utf-8")
    assert read_of(tmp_path, script, "small.sh").config["model"]["n_layers"] == 6


def test_devices_are_asked_for_too_where_the_missing_values_do_not_tell_them(tmp_path):
    script = LAUNCH.replace("--seq-length 1024", "--seq-length $1").replace("--nnodes 1", "--nnodes {}")

    def problems(nodes):
        with pytest.raises(ConfigError) as error:
            read_of(tmp_path, script.format(nodes))
        return [line.partition("run.sh: ")[2] for line in error.value.problems]

    assert problems("$2") == [
        "line 2: --seq-length: $1 has no value; pass script and arguments as one string: 'SCRIPT ARG ...'"
    ]
    assert [line.partition(": ")[2].partition(":")[0] for line in problems("$(wc -l < $HOSTS)")] == [
        "--seq-length",
        "--nnodes",
    ]


def test_flags_of_experts_that_a_job_has_none_of_are_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("BALANCE", raising=False)
    test = 'if [ "$BALANCE" = bias ]; then MORE="$MORE --moe-router-enable-expert-bias"; fi\n'
    script = f"MORE=\n{test}{LAUNCH} --bf16 $MORE\n"
    assert precision(read_of(tmp_path, script)) == "bf16"
    unknown = script.replace("--moe-router-enable-expert-bias", "--moe-use-upcycling")
    assert precision(read_of(tmp_path, unknown)) == "bf16"
    assert "--moe-router-enable-expert-bias: $MORE" in problem_of(
        tmp_path, script.replace("bf16", "bf16 --num-experts 8")
    )


def test_words_added_to_an_array_by_a_test_of_files_leave_those_before_them(tmp_path, monkeypatch):
    """Also where a value before them has the same beginning, and where no command launches the flags."""
    monkeypatch.delenv("OUT", raising=False)
    flags = LAUNCH.split(".py ")[1]
    test = "if [ -e $OUT/latest ]; then ALL+=(--load $OUT); else ALL+=(--load base {}); fi\n"
    script = (
        f"ALL=({flags})\n{test}ALL+=(--bf16)\ntorchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${{{{ALL[@]}}}}\n"
    )
    assert precision(read_of(tmp_path, script.format("--finetune"))) == "bf16"
    assert "--swiglu: $ALL depends on the test in line 3" in problem_of(tmp_path, script.format("--swiglu"))
    alone = script.rpartition("torchrun")[0].format("--finetune")
    starts = "TORCH=(--nproc_per_node 4 --nnodes 2 --master_port 6000)\n"
    job = read_of(tmp_path, f"{alone}{starts}")
    assert job.config["parallelism"]["dp"] == 8
    assert "dp" not in read_of(tmp_path, alone).config["parallelism"]


@pytest.mark.parametrize(("more", "asked"), [("--load x", ""), ("--fp8-format hybrid", "--fp8-format")])
def test_a_command_in_an_array_to_which_a_test_adds_words(tmp_path, more, asked):
    """bash appends the words to the elements that are there, whatever the test decides: the program is known."""
    script = f'CMD=({LAUNCH} --bf16)\nif [ -f x/latest ]; then CMD+=({more}); fi\n"${{CMD[@]}}"\n'
    if asked:
        assert problem_of(tmp_path, script).startswith(f"line 3: {asked}: $CMD depends on the test in line 3")
    else:
        assert precision(read_of(tmp_path, script)) == "bf16"


def test_a_test_of_an_array_may_add_sharding_of_a_fork(tmp_path):
    """MindSpeed's --layerzero shards every layer; what an array's element by name holds is not known."""
    script = f'declare -A ON\nON["zero"]=true\nif ${{ON["zero"]}}; then P="--layerzero"; fi\n{LAUNCH} $P\n'
    assert problem_of(tmp_path, script).startswith("line 4: --layerzero: $P depends on the test in line 4")


def test_nodes_that_a_test_adds_to_a_launcher_are_asked_for(tmp_path):
    """The job has one node or two: the launcher's default of one does not stand for both."""
    program = LAUNCH.partition("--nnodes 1 ")
    script = f"CMD=({program[0]})\nif [ -f x/hosts ]; then CMD+=(--nnodes 2); else CMD+=(--standalone); fi\n"
    found = read_of(tmp_path, f'{script}CMD+=({program[2]} --bf16)\n"${{CMD[@]}}"\n')
    assert (found.left_open or {})["parallelism.dp"].startswith(
        "number of devices unknown: $CMD depends on the test in line 3"
    )
