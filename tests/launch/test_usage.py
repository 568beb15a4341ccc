"""Scripts that take arguments, read with those of an example in their comments."""

from time import process_time

import pytest
from launch_readings import HARDWARE

from steptime import estimate
from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.launch.shell.usage import examples_of, most_words
from steptime.report.estimate_text import report

BODY = """SIZE=$1
if [ $SIZE = 7B ]; then
LAYERS=32
else
LAYERS=40
fi
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers $LAYERS --hidden-size 4096 --num-attention-heads 32 \\
  --seq-length $3 --max-position-embeddings $3 --micro-batch-size $2 --global-batch-size 16 --bf16 --vocab-file gpt2-vocab.json
"""


def job_of(folder, comments, words=""):
    path = folder / "run_gpt.sh"
    path.write_text(f"#!/bin/bash\n{comments}{BODY}", encoding="utf-8")
    return to_job(read("megatron", f"{path} {words}".strip(), HARDWARE), HARDWARE)


def test_the_example_in_a_comment_gives_the_arguments(tmp_path):
    job = job_of(tmp_path, "# sh run_gpt.sh 7B 2 4096\n# sh run_gpt.sh 13B 1 4096\n")
    assert (job.model.n_layers, job.data.microbatch_sz, job.data.seqlen) == (32, 2, 4096)
    told = "no arguments given: those of the example in line 2 taken (7B 2 4096); for others pass script and arguments"
    assert any(note.startswith(told) for note in job.notes)
    assert "those of the example in line 2" in "\n".join(report(estimate(job)).splitlines()[:4])


def test_arguments_that_the_user_gives_go_before_the_example(tmp_path):
    job = job_of(tmp_path, "# sh run_gpt.sh 7B 2 4096\n", "13B 1 2048")
    assert (job.model.n_layers, job.data.seqlen) == (40, 2048)
    assert not any("example" in note for note in job.notes)


@pytest.mark.parametrize(
    "comment", ["# usage: run_gpt.sh <size> 2 4096\n", "# other.sh 7B 2 4096\n", "# run_gpt.sh 7B 2\n"]
)
def test_a_comment_that_is_no_whole_example_is_none(tmp_path, comment):
    with pytest.raises(ConfigError) as error:
        job_of(tmp_path, comment)
    assert "pass script and arguments as one string" in str(error.value)


def test_what_an_example_is():
    text = "# bash jobs/run.sh 7B 16\n#./run.sh --size 7B\n# my_run.sh 1\n# run.sh SIZE 2B\n# run.sh the size 'of\n"
    assert [found.words for found in examples_of(text, "run.sh")] == [["7B", "16"], ["--size", "7B"]]


OPTIONS = 'L="" T=""\nwhile getopts "l:t:" o; do case $o in l) L=$OPTARG;; t) T=$OPTARG;; esac; done\n'


@pytest.mark.parametrize(
    ("head", "fix"),
    [
        (OPTIONS, "pass script and arguments as one string: 'SCRIPT ARG ...'"),
        ("L=${1:-}\nT=${2:-}\n", "pass script and arguments as one string: 'SCRIPT ARG ...'"),
        ("L=\nT=\n", "write the value into the script"),
    ],
)
@pytest.mark.parametrize("quote", ["", '"'])
def test_flags_without_a_value_are_one_line(tmp_path, head, fix, quote):
    path = tmp_path / "run_gpt.sh"
    flags = f"--num-layers {quote}$L{quote} --tensor-model-parallel-size {quote}$T{quote}\n"
    body = (
        BODY.replace("--num-layers $LAYERS ", "")
        .replace("$3", "1024")
        .replace("$2", "1")
        .replace("--bf16", flags.strip())
    )
    path.write_text(head + body[body.index("torchrun") :], encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read("megatron", str(path), HARDWARE)
    (line,) = error.value.problems
    assert line.endswith(f"--num-layers, --tensor-model-parallel-size: missing value; {fix}")


@pytest.mark.parametrize(
    "comment",
    [
        "# run.sh takes 2 arguments: a size and a batch",
        "# run.sh 7B 16",
        "# bash run.sh 7B 16 (default)",
        "# bash run.sh 7B 16 > log.txt",
    ],
)
def test_a_sentence_is_no_example(comment):
    assert examples_of(comment, "run.sh") == []


@pytest.mark.parametrize(
    "comment", ["# Usage: run.sh 7B 16", "# $ ./run.sh 7B 16 &", "# e.g. sbatch jobs/run.sh 7B 16; tail -f log"]
)
def test_an_example_ends_with_its_command(comment):
    assert [found.words for found in examples_of(comment, "run.sh")] == [["7B", "16"]]


@pytest.mark.parametrize("line", ["#" * 1_000_000, "# bash run.sh " + "'1 '" * 250_000, ("#" * 400 + "\n") * 2500])
def test_comments_are_read_in_linear_time(line):
    start = process_time()
    assert examples_of(line, "run.sh") == []
    assert process_time() - start < 2.0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("if [ $# -lt 4 ]; then exit 1; fi\nrun $1", 4),
        ('[[ "$#" -ne 2 ]] && exit 1', 2),
        ("if (( $# != 9 )); then exit 2; fi\nPORT=$8", 9),
        ('f() { echo "$5"; }\nA="${3:?missing}" B=${4:-8} C=${12}\n', 12),
        ("awk '{print $9}' f; run $10 ${2%.sh}", 2),  # $10 is ${1}0
        ("x: 'open", 0),
    ],
)
def test_how_many_arguments_a_script_takes(text, count):
    assert most_words(text) == count
