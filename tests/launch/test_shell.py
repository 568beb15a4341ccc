"""The shell reader against bash itself, and what it says of what it does not run."""

from __future__ import annotations

import re
import shlex
import subprocess
from contextlib import suppress

import pytest
from bash_words import bash, words
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.base.config import ConfigError
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.shell import control_flow
from steptime.launch.shell.arithmetic import arithmetic
from steptime.launch.shell.script import read_script

PUT = "put it in the same folder, or add --with FILE"
OPTIONS = """
set -- --tp 8 --name 'a b'
while [[ $# -gt 0 ]]; do
  case "$1" in
    --tp) TP=$2; shift 2 ;;
    --name) N=$2; shift; shift ;;
    *) shift ;;
  esac
done
torchrun t.py $TP "$N" $#
"""
SAME_AS_BASH = [
    "A=1\ntorchrun t.py --a $A --b \"$A x\" --c '$A'",
    "A='a b'\ntorchrun t.py $A \"$A\"",
    "A=( --x 1 # comment\n  --y 'a  b'\n)\nA+=( --z )\ntorchrun t.py ${A[@]} \"${A[@]}\"",
    'A=( "--split 99,1,0" )\ntorchrun t.py ${A[@]}',
    'A=()\ntorchrun t.py "${A[@]}" end',
    'A=(1 2 3)\ntorchrun t.py ${#A[@]} ${A[1]} ${A[-1]} "${A[*]}"',
    "torchrun t.py --a 1 \\\n  --b 2 \\\n  # gone\n",
    "A=8; B=$((A * 4 / 3)); C=$(( $A % 3 )); torchrun t.py $B $C $((-7 / 2)) $((-7 % 2)) $((2**5)) $((A>4?1:0))",
    "A+=1; A+=2; torchrun t.py $A",
    "A=32; B=$[$A/4/2]; torchrun t.py $B $[A-B]",
    "A=32; B=$[$A/(2*$A/8)]; torchrun t.py $B",
    'A=" --x 1 \\\n  --y 2 "\nA="$A --z"\nA+=" --w"\ntorchrun t.py $A',
    "torchrun t.py ${A:-x} ${A-y} ${A:=z} $A ${A:+plus} ${B:+none} ${B-}",
    'A=""\ntorchrun t.py ${A:-x} "${A-y}" ${A:+no} end',
    "torchrun t.py ${A:-${B:-'c d'}} \"${A:-e f}\"",
    'A=8\nif [ "$A" -gt 4 ]; then B=big; elif [ 1 = 1 ]; then B=mid; else B=small; fi\ntorchrun t.py $B',
    'A=x\nif [[ $A == "x" && ( 1 -eq 1 || 2 -eq 1 ) ]]; then B=yes; fi\ntorchrun t.py $B',
    'A=abc\nif [[ $A == a* ]]; then B=1; fi\nif [ ! "$A" = abd ]; then B+=2; fi\ntorchrun t.py $B',
    '[ -z "$N" ] && A=empty\n[ -n "$N" ] || A+=-still\ntorchrun t.py $A',
    '[ "$N" == "" ] && A=empty\nwhile [[ "$1" != "" ]]; do A=word; shift; done\ntorchrun t.py $A',
    "N=3\n[[ $N -le 2 ]] && A=no || A=yes\ntorchrun t.py $A",
    "for i in 1 2 'a b'; do A+=\" $i\"; done\ntorchrun t.py $A",
    "A=7b\ncase $A in 13b) L=40 ;; 7b|8b) L=32 ;; *) L=0 ;; esac\ntorchrun t.py $L",
    "A=70b\ncase $A in 13b) L=40 ;; *b) L=80 ;; esac\ntorchrun t.py $L",
    "f() { L=$1; local M=2; }\nf 9 8\ntorchrun t.py $L",
    "function g {\n  torchrun t.py $1 inside\n}\ng word",
    "cat <<EOF > /dev/null\ntorchrun other.py it's\nEOF\ntorchrun t.py after",
    "cat <<-'EOT' >/dev/null\n\t$(false) \"\n\tEOT\ntorchrun t.py after",
    "read -r -d '' A <<EOF || true\n--x 1\n--y 2\nEOF\ntorchrun t.py $A",
    "A=('1e-6 2 x' '3e-6 4 y z')\ni=1\nread L B M <<< \"${A[$i]}\"\ntorchrun t.py $L $B $M",
    "IFS=, read -r A B <<< 1,2,3\nread -ra C <<< 'x y z'\ntorchrun t.py $A $B ${C[1]}",
    "A=(1 2)\nB=(x y)\ni=3\ntorchrun t.py ${B[$(( i % ${#A[*]} ))]}",
    "source <(echo true) > /dev/null\nexec 2> >(cat)\ntorchrun t.py after",
    "A=$(echo one two)\ntorchrun t.py $A `echo three`",
    "A=/a/b/c.sh\ntorchrun t.py $(dirname $A) $(basename $A) ${A%/*} ${A##*/} ${A#/a} ${A%%b*} ${A/b/x} ${A//\\//}",
    "A=Abc\ntorchrun t.py ${A^^} ${A,,} ${A:1} ${A:0:2} ${#A}",
    'set -- one \'two three\'\ntorchrun t.py $1 "$2" $# "$@"',
    "while [ $# -gt 0 ]; do shift; done\ntorchrun t.py $#",
    OPTIONS,
    'i=0\nuntil [ $i -ge 3 ]; do i=$((i + 1)); A+=" $i"; done\ntorchrun t.py $A',
    "unset A\nA=1\nunset A\ntorchrun t.py x${A}y",
    "A=5\n((A += 2))\nlet B=A*2\n((A++))\nif (( A > 7 )); then C=more; fi\ntorchrun t.py $A $B $C",
    "export A=1 B='2 3'\ntorchrun t.py $A \"$B\"",
    'torchrun t.py a\\ b "c\\"d" \'e"f\' "g\'h" "\\$x" $\'i\'',
    "torchrun t.py a 2>&1 | cat",
    'torchrun t.py --a=1 --b="x y" > /dev/stdout 2> /dev/null',
    "X=1 torchrun t.py a",
    "true && { torchrun t.py grouped; }",
    "(cd / && torchrun t.py inside)",
    "if true; then if false; then :; else torchrun t.py nested; fi; fi",
    "A=1; B=A; torchrun t.py $((B + 1))",
    "A[0]=x; A[1]=y; torchrun t.py ${A[@]} ${A[0]}",
    "f() (\n L=inner\n torchrun t.py $1\n)\nf word",
    "torchrun t.py --a 1 `# a note` \\\n  --b 2",
    'A=$(cat <<EOF\n--x 1\n--y "two"\nEOF\n)\ntorchrun t.py $A',
    "A='--x 1'; eval \"torchrun t.py $A\"",
]


@pytest.mark.parametrize("text", SAME_AS_BASH)
def test_words_are_those_that_bash_passes(text):
    assert words(text) == bash(text)


plain_text = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=12)


@settings(max_examples=30, deadline=None)
@given(st.lists(plain_text, max_size=4), st.sampled_from(['"${A[@]}"', "${A[@]/q/q}", '"${A[*]}"', "$A"]))
def test_quoted_arrays_arrive_as_bash_passes_them(items, use):
    """Any text in quotes; globs of unquoted words are bash's own, so there are none."""
    items = [re.sub(r"[*?[]", "", item) for item in items]
    text = f"A=( {' '.join(map(shlex.quote, items))} )\ntorchrun t.py {use}"
    if not items and use == "$A":
        return
    assert words(text) == bash(text)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20), max_size=6))
def test_shlex_quoted_words_survive(items):
    text = "torchrun t.py " + " ".join(map(shlex.quote, items))
    clean = [item.replace("\ue000", "").replace("\ue001", "") for item in items]
    assert words(text) == clean


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(list("ab1 $\"'`\\\n(){}[]<>|&;#=+-*/!:,@%^~?._if then fi do done")), max_size=60))
def test_any_text_is_read_or_refused_in_words(text):
    """No text makes it stop with anything but a ConfigError."""
    with suppress(ConfigError):
        assert read_script(text, "run.sh", {}).program


numbers = st.recursive(
    st.integers(0, 50).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "%", "<", "==", "&&", "||"]), inner).map(
        lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
    ),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None)
@given(numbers)
def test_arithmetic_is_that_of_bash(text):
    done = subprocess.run(["bash", "-c", f"echo $(({text}))"], capture_output=True, text=True, check=False, timeout=20)
    expected = int(done.stdout) if done.returncode == 0 else None
    assert arithmetic(text, {}.get) == expected


def test_arithmetic_has_bounds():
    assert arithmetic("9**99", {}.get) is None
    assert arithmetic("1 << 200", {}.get) is None
    assert arithmetic("1 +", {}.get) is None
    assert arithmetic("(" * 5000 + "1", {}.get) is None


# --- the launch command ---


OFTEN = "how often it runs is not known"


def launch(text, **env):
    return read_script(text, "run.sh", env)


@pytest.mark.parametrize(
    ("text", "launchers", "nodes", "per_node", "devices", "program"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 4 a/train.py --x", ["torchrun"], 4, 8, 32, "a/train.py"),
        ("torchrun --nproc-per-node=4 train.py", ["torchrun"], 1, 4, 4, "train.py"),
        ("torchrun --standalone --nproc_per_node=gpu train.py", ["torchrun"], 1, None, None, "train.py"),
        ("torchrun --nnodes=1:4 --nproc_per_node=8 train.py", ["torchrun"], 4, 8, 32, "train.py"),
        ("python -m torch.distributed.launch --nproc_per_node 2 --nnodes 3 train.py", ["torchrun"], 3, 2, 6, "train.py"),
        ("exec hyperpodrun --nnodes=3 --nproc-per-node=2 --tee=3 train.py", ["torchrun"], 3, 2, 6, "train.py"),
        ("python3 -u -m torch.distributed.run --nproc_per_node 2 -m pkg.train --x", ["torchrun"], 1, 2, 2, "pkg.train"),
        ("torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file x.toml", ["torchrun"], 1, 8, 8, "torchtitan.train"),
        ("srun -N 2 --ntasks-per-node=8 python train.py", ["srun"], 2, 8, 16, "train.py"),
        ("srun -N2 -n16 python train.py", ["srun"], 2, 8, 16, "train.py"),
        ("#SBATCH --nodes=3 --ntasks-per-node=4\nsrun -l python train.py", ["srun"], 3, 4, 12, "train.py"),
        ("#SBATCH -N 3\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 train.py",
         ["srun", "torchrun"], 3, 8, 24, "train.py"),
        ("#SBATCH --nodes=3\nsrun bash -c 'torchrun --nnodes $SLURM_JOB_NUM_NODES --nproc_per_node 8 train.py'",
         ["srun", "torchrun"], 3, 8, 24, "train.py"),
        ("#SBATCH --gpus-per-node=h100:8\nsrun torchrun --nnodes 2 --nproc_per_node $SLURM_GPUS_PER_NODE train.py",
         ["srun", "torchrun"], 2, 8, 16, "train.py"),
        ("mpirun -np 16 --npernode 8 python train.py", ["mpirun"], 2, 8, 16, "train.py"),
        ("deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed", ["deepspeed"], 2, 8, 16, "train.py"),
        ("accelerate launch --num_processes 16 --num_machines 2 train.py", ["accelerate"], 2, 8, 16, "train.py"),
        ("export CUDA_VISIBLE_DEVICES=0,1\npython train.py --x", [], 1, 2, 2, "train.py"),
        # accelerate commands/launch.py, deepspeed launcher/runner.py and torch distributed/run.py count the visible ones
        ("CUDA_VISIBLE_DEVICES=0,1,2 accelerate launch train.py", ["accelerate"], None, 3, None, "train.py"),
        ("CUDA_VISIBLE_DEVICES=0,1,2 deepspeed train.py", ["deepspeed"], 1, 3, 3, "train.py"),
        ("CUDA_VISIBLE_DEVICES=4 torchrun --nproc_per_node gpu train.py", ["torchrun"], 1, 1, 1, "train.py"),
        ("numactl -m 0 nsys profile -o out torchrun --nproc_per_node 8 train.py", ["torchrun"], 1, 8, 8, "train.py"),
        ("python tool.py -x\npip install train.py\ntorchrun --nproc_per_node 8 train.py", ["torchrun"], 1, 8, 8, "train.py"),
        ("python prepare.py\npython train.py", [], None, None, None, "train.py"),
    ],
)  # fmt: skip
def test_launchers_say_how_many_devices(text, launchers, nodes, per_node, devices, program):
    found = launch(text)
    assert (found.launchers, found.program) == (launchers, program)
    assert (found.nodes, found.devices_per_node, found.devices) == (nodes, per_node, devices)


def test_lines_are_where_the_words_stand():
    found = launch('A=( --a 1\n  --b 2 )\nB=" --c 3"\ntorchrun t.py ${A[@]} \\\n  $B --d\n')
    assert [(word.text, word.line) for word in found.arguments] == [
        ("--a", 1), ("1", 1), ("--b", 2), ("2", 2), ("--c", 3), ("3", 3), ("--d", 5),
    ]  # fmt: skip
    assert found.line == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("torchrun t.py --a $X", "$X has no value"),
        ("A=$X\ntorchrun t.py --a ${A}", "$X has no value"),
        ("torchrun t.py --a $((X * 2))", "$X has no value"),
        ("source venv/bin/activate\nA=(1 2)\nread B C <<< ${A[$X]}\ntorchrun t.py --b $B", "$X has no value"),
        ("torchrun t.py --a $(nvidia-smi -L | wc)", "$(nvidia-smi -L | wc) in line 1 is a command, and commands are not run"),
        ("N=`nproc`\ntorchrun t.py --a $((N))", "$(nproc) in line 1 is a command, and commands are not run"),
        ("if [ -f x ]; then A=1; else A=2; fi\ntorchrun t.py --a $A", "$A depends on the test in line 1 (it tests files)"),
        ("if grep -q x y; then A=1; fi\ntorchrun t.py --a $A", "$A depends on the test in line 1 (it runs a command)"),
        ("[ $N -gt 1 ] && A=1\ntorchrun t.py --a $A", "$A depends on the test in line 1 ($N has no value)"),
        ("if (( N > 1 )); then A=1; fi\ntorchrun t.py --a $A", "$A depends on the test in line 1 (its value is unknown)"),
        ('A=$2\nif [ "$A" = 7b ]; then B=1; fi\ntorchrun t.py --b $B', "$B depends on the test in line 2 ($2 has no value)"),
        ('if [ "$M" = 7b ]; then A=1; fi\ntorchrun t.py --a $A', "$A depends on the test in line 1 ($M has no value)"),
        ("for f in $(ls); do A=$f; done\ntorchrun t.py --a $A", f"$A depends on the loop in line 1 ({OFTEN})"),
        ("while read l; do A=$l; done\ntorchrun t.py --a $A", f"$A depends on the loop in line 1 ({OFTEN})"),
        ("case $M in a) A=1 ;; b) A=2 ;; esac\ntorchrun t.py --a $A", "$A depends on the case in line 1 ($M has no value)"),
        ("source env.sh\ntorchrun t.py --a $X",
         f"$X has no value (line 1 sources env.sh, which was not found; {PUT})"),
        ("torchrun t.py --a $1", "$1 has no value"),
        ("while true; do A+=x; done\ntorchrun t.py --a $A", f"$A depends on the loop in line 1 ({OFTEN})"),
    ],
)  # fmt: skip
def test_what_has_no_value_says_why(text, why):
    found = launch(text)
    assert [unknown.why for unknown in found.arguments[1].unresolved] == [why]


def test_a_variable_that_every_branch_sets_alike_is_known():
    assert words("if [ -f x ]; then A=1; B=2; else A=1; fi\ntorchrun t.py $A") == ["1"]


def test_words_after_the_name_are_numbered():
    text = 'A=$1\nshift_me=$#\nfor w in "$@"; do B+=" $w"; done\ntorchrun t.py $A ${2} ${3:-none} $# $B'
    assert words(text, **{"1": "x", "2": "y z"}) == ["x", "y", "z", "none", "2", "x", "y", "z"]


def test_the_environment_fills_in():
    assert launch("N=$((M * 2)) O=1\ntorchrun t.py $N ${O:-3} $HOME", M="4", O="2", HOME="/").environment == {"M": "4"}
    assert words("torchrun t.py ${N:-8} $M", M="x y") == ["8", "x", "y"]
    assert words("torchrun t.py ${N:-8}", N="4") == ["4"]
    assert words('if [ "$M" = 7b ]; then A=1; fi\ntorchrun t.py $A', M="7b") == ["1"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo hello", "run.sh: no launch command (torchrun, python -m torch.distributed.run, srun, mpirun, deepspeed ...)"),
        ("sbatch job.sh", "run.sh: no launch command (torchrun, python, srun ...); line 1 runs job.sh: give that script"),
        ("torchrun main.py --a 1\ntorchrun other.py --a 2",
         ("run.sh: 2 launch commands (lines 1, 2), cannot determine which one trains; "
          "write LAUNCH_LINE=N before the command, N one of these")),
        ("if [ -f x ]; then torchrun main.py; fi",
         ("run.sh: line 1: whether it runs depends on the test in line 1 (it tests files); "
          "put the flags in a file (args.txt)")),
        ("if [ $RANK -eq 3 ]; then torchrun train.py; fi",
         ("run.sh: line 1: whether it runs depends on the test in line 1 ($RANK has no value); "
          "write RANK=... before the command")),
        ("torchrun --nnodes $N --nproc_per_node 8 train.py",
         "run.sh: line 1: --nnodes: $N has no value; write N=... before the command, or add --set parallelism.dp=N"),
    ],
)  # fmt: skip
def test_a_script_without_one_launch_command(text, problem):
    try:
        problems = [f"run.sh: {line}" for line in launch(text).unclear]
    except ConfigError as error:
        problems = list(error.problems)
    assert problems == [problem]


def test_the_only_training_is_taken_to_run_where_that_depends_on_files():
    found = launch("if [ -d ckpt ]; then torchrun train.py --a 1; fi")
    assert [word.text for word in found.arguments] == ["--a", "1"]
    assert found.notes[:1] == ("line 1 is assumed to run: it depends on the test in line 1 (it tests files)",)


def test_of_the_jobs_of_a_loop_the_first_is_read_and_told():
    found = launch("for lr in 1 2 4; do\n  torchrun train.py --lr $lr\ndone")
    assert [word.text for word in found.arguments] == ["--lr", "1"]
    assert "line 2 launches 3 jobs, of which only the first is read" in found.notes


def test_a_script_that_is_written_and_submitted_is_read():
    """Its values that only the job knows stay open; those of the script that writes it are filled in."""
    found = launch(
        "L=4\ncat > $DIR/job.sbatch <<EOM\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n"
        "srun python train.py --num-layers $L --save \\$SLURM_JOBID\nEOM\nsbatch $DIR/job.sbatch"
    )
    assert [word.text for word in found.arguments][:2] == ["--num-layers", "4"]
    assert (found.nodes, found.devices_per_node) == (2, 8)


def test_torchrun_starts_one_process_unless_it_is_told():
    found = launch("torchrun --nnodes 2 train.py")
    assert (found.nodes, found.devices_per_node, found.devices) == (2, 1, 2)
    by = "torchrun, one process per node without --nproc-per-node"
    assert found.notes == (f"number of devices not set, 2 assumed: {by}; else add --set parallelism.dp=N",)
    assert launch("torchrun $ARGS train.py").devices is None


@pytest.mark.parametrize(
    ("command", "devices", "by"),
    [
        ("torchrun --nproc-per-node 8 train.py", 8, "torchrun, one node without --nnodes"),
        ("torchrun train.py", 1, "torchrun, one process on one node without --nproc-per-node and --nnodes"),
        ("torchrun --standalone --nproc-per-node 8 train.py", 8, ""),
        ("torchrun --nnodes 1 --nproc-per-node 8 train.py", 8, ""),
        ("srun -N 2 torchrun --nproc-per-node 8 train.py", 16, ""),
        ("deepspeed --num_gpus 8 train.py", 8, "deepspeed, one node without a hostfile"),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py", 16, ""),
        ("deepspeed --include worker-0:0,1 train.py", 2, ""),
        ("export NPROC_PER_NODE=8\nswift sft --model x", 8, "one node, since NNODES is not set"),
        ("export NPROC_PER_NODE=8 NNODES=1\nswift sft --model x", 8, ""),
        (
            "GPUS_PER_NODE=4\nNNODES=2\npython train.py",
            8,
            "GPUS_PER_NODE and NNODES of the script, whose command starts one process",
        ),
        (
            "NPROC_PER_NODE=4\nGPUS_PER_NODE=4\nNNODES=2\npython train.py",
            8,
            "NPROC_PER_NODE and NNODES of the script, whose command starts one process",
        ),
        ("WORLD_SIZE=2\nRANK=0\npython train.py", 2, "WORLD_SIZE of the script, whose command starts one process"),
        ("CUDA_VISIBLE_DEVICES=0 python train.py", 1, ""),
        (
            "#SBATCH --nodes=1 --gres=gpu:4\npython train.py",
            4,
            "the Slurm options of the script, whose command starts one process",
        ),
    ],
)
def test_a_default_of_the_launcher_is_told_as_an_assumed_number_of_devices(command, devices, by):
    """Nothing is told where the command states nodes and processes."""
    found = launch(command)
    assert found.devices == devices
    line = f"number of devices not set, {devices} assumed: {by}; else add --set parallelism.dp=N"
    assert found.notes == ((line,) if by else ())


def test_a_script_that_mpirun_starts_is_read(tmp_path):
    """As llm-jp's sbatch.sh: Slurm says 8(x4), of which cut takes the 8."""
    (tmp_path / "train.sh").write_text("python pretrain_gpt.py --tp $TP\n")
    text = "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\nTP=2\nP=$(echo $SLURM_TASKS_PER_NODE | cut -d '(' -f 1)\n"
    found = read_script(
        text + "mpirun -np $((4 * $P)) --npernode $P bash jobs/train.sh\n", "sbatch.sh", {}, NearbyFiles(tmp_path)
    )
    assert (found.launchers, found.devices, found.devices_per_node) == (["mpirun"], 32, 8)
    assert [word.text for word in found.arguments] == ["--tp", "2"]


def test_sums_of_other_commands():
    """expr and bc count in whole numbers: 32 / 4 / 2 is 4."""
    assert words('D=/a/b\ntorchrun t.py $(readlink -f "${D}") $(realpath $D/c)') == ["/a/b", "/a/b/c"]
    assert words('N=4\ntorchrun t.py $(expr 32 / $N / 2) $(echo "$N * 2" | bc) `expr $N + 1`') == ["4", "8", "5"]
    assert words("torchrun t.py $(expr 7 / 2)") == ["3"]
    assert words("torchrun t.py $(which swift) $(command -v tune)") == ["swift", "tune"]


@pytest.mark.parametrize(
    "text", ['A="b\ntorchrun t.py', "if true; then\ntorchrun t.py", "A=$(b", "fi", "case $x in a)"]
)
def test_a_broken_script_is_refused_in_one_line(text):
    with pytest.raises(ConfigError) as caught:
        read_script(text, "run.sh", {})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("run.sh: line 1: ")


def test_nothing_is_executed(tmp_path):
    """Redirections, substitutions and commands leave no trace."""
    script = f"touch {tmp_path}/a; $(touch {tmp_path}/b); echo x > {tmp_path}/c; `touch {tmp_path}/d`\ntorchrun t.py"
    launch(script)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; f; }\nf\ntorchrun t.py",
        "A=x\n" + "A=$A$A\n" * 40 + "torchrun t.py $A",
        "for a in 1 2 3 4 5 6 7 8 9 0; do\n" * 6 + ":\n" + "done\n" * 6 + "torchrun t.py",
        "eval 'eval \"eval torchrun t.py\"'",
        "bash -c 'bash -c \"torchrun t.py\"'",
    ],
)
def test_scripts_that_grow_come_to_an_end(text, monkeypatch):
    """After a tenth of the commands that a script may run; test_words_of_clusters.py runs all of them."""
    monkeypatch.setattr(control_flow, "_MOST_COMMANDS", control_flow._MOST_COMMANDS // 10)
    with suppress(ConfigError):
        assert launch(text).program == "t.py"
