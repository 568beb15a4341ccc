"""Where commands of a script end, and whose its variables are: each script passes the words that bash passes."""

from __future__ import annotations

import pytest
from bash_words import bash, words

from steptime.base.config import ConfigError
from steptime.launch.shell.assignments import formatted
from steptime.launch.shell.script import read_script

LOOPS = [
    "for i in 1 2 4 8; do TP=$i; if [ $i -eq 4 ]; then break; fi; done; torchrun t.py $TP",
    "A=; for i in 1 2 3; do if [ $i -eq 2 ]; then continue; fi; A+=$i; done; torchrun t.py $A",
    "i=0; while true; do i=$((i + 1)); if [ $i -ge 3 ]; then break; fi; done; torchrun t.py $i",
    "i=0; while [ $i -lt 9 ]; do i=$((i + 1)); [ $i -eq 4 ] && break; done; torchrun t.py $i",
    'for i in 1 2 3; do for j in 1 2 3; do [ $j = 2 ] && break 2; X="$i$j"; done; done; torchrun t.py $X',
    "for i in 1 2 3; do case $i in 2) break ;; esac; X=$i; done; torchrun t.py $X",
    "X=; for ((i = 0; i < 3; i++)); do X=$X.$i; done; torchrun t.py $X",
    "X=; for i in {1..3} $(seq 4 5); do X=$X$i; done; torchrun t.py $X",
    "set -- -t 4 -p2 r; while getopts t:p: o; do case $o in t) T=$OPTARG ;; p) P=$OPTARG ;; esac; done\ntorchrun t.py $T $P",
]
REFERENCES = [
    "A=3; declare -n R=A; R=5; torchrun t.py $A $R",
    "f() { local -n out=$1; out+=(--b 2); }\nARR=(--a 1); f ARR; torchrun t.py ${ARR[@]}",
    "A=(1 2); declare -n R=A; R[1]=5; R+=(7); torchrun t.py ${A[@]} ${#R[@]}",
    "A=1; B=2; for v in A B; do declare -n R=$v; R=9; done; torchrun t.py $A $B",
    "g() { local -n o=$1; o=$((o+1)); }; f() { local -n o=$1; g B; o=$((o*10)); }; A=1; B=2; f A; torchrun t.py $A $B",
    "f() { declare -n r=A; r=6; }; A=5; f; r=1; torchrun t.py $A $r",
    "declare -n R=A; A=1; unset -n R; R=2; torchrun t.py $A $R",
    "declare -n R=A; R=(3 4); unset R; torchrun t.py x${A[@]}",
]
PRINTED = [
    "A=7; printf -v A[0] '%s' 3; printf -v 'A[1]' '%d' 4; torchrun t.py ${A[@]}",
    'set_to() { printf -v "$1" \'%s\' "$2"; }; set_to TP 8; torchrun t.py $TP',
    "printf -v A '%02d-%s|' 3 a 4; printf -v B -- 'x%%%3s' 2; torchrun t.py $A \"$B\"",
    "printf -v A '%q' a/b; read B C <<< '$A 5'; torchrun t.py $A $B $C",
]
FUNCTIONS = [
    "f() { X=1; return; X=2; }\nf; torchrun t.py $X",
    'f() { if [ "$1" = a ]; then X=1; return 0; fi; X=2; }\nf a; torchrun t.py $X',
    "f() { for i in 1 2 3; do [ $i = 2 ] && return; X=$i; done; X=9; }; f; torchrun t.py $X",
    "f() { return 1; }; A=1; f || A=2; torchrun t.py $A",
    'f() { [ "$1" = x ] && return 1; return 0; }; if f y; then A=2; fi; torchrun t.py $A',
    "f() { local TP=4; Y=$TP; }\nTP=2; f; torchrun t.py $TP $Y",
    "f() { local TP; TP=4; declare PP=3; export CP=5; }\nTP=2; PP=1; CP=1; f; torchrun t.py $TP $PP $CP",
    "g() { local X=2; h; }; h() { Y=$X; X=5; }; X=1; g; torchrun t.py $X $Y",
    'f() { local A=(--num-layers 2 -n x); local C="torchrun t.py ${A[@]}"; $C; }; f',
    "get() { if [ $1 = 7b ]; then echo 32; return; fi; echo --l 40; }; torchrun t.py $(get 7b) $(get x)",
]
SUBSHELLS = [
    "X=4 & torchrun t.py ${X:-2}",
    "f() { X=9; }; X=1; f & { Y=2; } & wait; torchrun t.py $X ${Y:-3}",
    "TP=2; (TP=8; cd /); torchrun t.py $TP",
    "TP=2; bash -c 'TP=8; cd /'; torchrun t.py $TP",
    "f() (TP=4); TP=2; f; torchrun t.py $TP",
    "f() { TP=8; }; TP=2; f | cat; TP=4 | cat; torchrun t.py $TP",
    "TP=2; if true; then TP=4; fi | cat; torchrun t.py $TP",
    "A=1; (exit 1) || A=2; torchrun t.py $A",
]
TESTS = [
    "if [ -n $X ]; then A=1; else A=0; fi; torchrun t.py $A",
    "X=; if [ -n $X ]; then A=1; else A=0; fi; torchrun t.py $A",
    "X=; if [ $X != y ]; then A=1; else A=0; fi; torchrun t.py $A",
    "X=; if [ $X -eq 0 ]; then A=1; else A=0; fi; torchrun t.py $A",
    'X="a b"; if [ $X = "a b" ]; then A=1; else A=0; fi; torchrun t.py $A',
    'if [ "x$X" = "x" ]; then A=1; else A=0; fi; torchrun t.py $A',
    'X="*"; if [[ a == "$X" ]]; then A=1; else A=2; fi; torchrun t.py $A',
    'X="*"; case a in "$X") A=1 ;; $X) A=2 ;; esac; torchrun t.py $A',
    "X=ab; case $X in [^a]*) A=1 ;; *) A=2 ;; esac; torchrun t.py $A",
    "if [[ 7b =~ ^(7b|8b)$ ]]; then A=1; else A=2; fi; torchrun t.py $A",
    "X=5; if ! [ $X -eq 4 ] && ! false; then A=1; fi; torchrun t.py $A",
    "X=8; torchrun t.py $([ $X -gt 7 ] && echo --sp) $(if [ $X = 1 ]; then echo --no; fi) end",
]
WORDS = [
    "A=(1 2 3); torchrun t.py ${A[@]:1:2} ${A[@]:1} ${A[@]: -1}",
    "A=(1 2 3); A[1]=9; A[2]+=x; A[3]=4; torchrun t.py ${A[1]} ${A[@]} ${#A[@]}",
    'set -- 1 2 3; torchrun t.py ${@:2} "${@:1:1}"',
    "B=1; torchrun t.py ${B:+--x $B} ${C:+--y $C} ${C:---z 2} end",
    'B=1; torchrun t.py ${B:+"--x $B"} "${B:+--q $B}" "${C:+--no}" end',
    'torchrun t.py {a,b}c --x={1,2} "{q,r}" {single}',
    "IFS=,; X=1,2; torchrun t.py $X; unset IFS",
    "X=$'a\\tb'; torchrun t.py \"$X\"",
    "A=aXb; torchrun t.py ${A/#a/Z} ${A/%b/Z} ${A/#X/Z}",
    "X=TP; TP=8; torchrun t.py ${!X} $(basename /a/b.sh .sh)",
    "declare -i X=3+4; X=X+1; torchrun t.py $X",
    "A=010; torchrun t.py $((A + 1)) $((0x10)) $((10#08 + 1))",
    "export CUDA_VISIBLE_DEVICES=4,5; N=$(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l); torchrun t.py $N",
    "G=0,1,2; torchrun t.py $(echo $G | awk -F',' '{print NF}')",
    'A=(1 2); unset A; torchrun t.py ${#A[@]} "${A[@]}" end',
]  # fmt: skip


@pytest.mark.parametrize("text", [*LOOPS, *REFERENCES, *PRINTED, *FUNCTIONS, *SUBSHELLS, *TESTS, *WORDS])
def test_words_are_those_that_bash_passes(text):
    assert words(text) == bash(text)


def test_python_counts_the_visible_devices():
    count = "python -c \"import os; print(os.environ['CUDA_VISIBLE_DEVICES'].count(',' ) + 1)\""
    text = f"export CUDA_VISIBLE_DEVICES=4,5,6\nN=`{count}`\ntorchrun --nproc_per_node $N t.py"
    assert read_script(text, "run.sh", {}).devices == 3


def test_an_undecided_test_that_leaves_a_loop_leaves_its_variables_open():
    """`break` where a program says so: the last value is not known."""
    text = "for i in 1 2 4; do TP=$i; if some_program; then break; fi; done\ntorchrun t.py $TP"
    (word,) = read_script(text, "run.sh", {}).arguments
    assert word.unresolved
    text = "f() { TP=1; if some_program; then return; fi; TP=2; }\nf\ntorchrun t.py $TP"
    (word,) = read_script(text, "run.sh", {}).arguments
    assert word.unresolved


def test_a_subshell_that_launches_keeps_its_variables():
    found = read_script("(export NNODES=2; torchrun --nnodes $NNODES --nproc_per_node 4 t.py)", "run.sh", {})
    assert (found.nodes, found.variables["NNODES"]) == (2, "2")


def test_options_that_are_not_given_are_not_set():
    """Where the script is given no words, getopts finds none, which a note says; `run.sh -z` has one."""
    text = "DS=0\nwhile getopts dz o; do case $o in z) DS=1 ;; esac; done\n"
    text += 'if [ $DS -eq 1 ]; then A="--deepspeed"; else A="--pipeline-model-parallel-size 4"; fi\ntorchrun t.py $A'
    found = read_script(text, "run.sh", {})
    assert [word.text for word in found.arguments] == ["--pipeline-model-parallel-size", "4"]
    assert any("options (getopts) are taken as not given" in note for note in found.notes)
    assert words(text, **{"1": "-z"}) == ["--deepspeed"]


def test_an_end_by_the_script_s_own_values_is_told():
    """bash exits with 1 on line 2; where an unset variable leads there, or after the launch, nothing is told."""
    check = "V=${V:-3}\nif [ $V = 2 ]; then L=32; H=64; else exit 1; fi\n"
    found = read_script(f"{check}torchrun t.py $L $H", "run.sh", {})
    ends = "line 2 ends the script: exit 1"
    assert [word.unresolved[0].told("") for word in found.arguments] == [
        f"${name} has no value ({ends}); write {name}=... before the command" for name in "LH"
    ]
    assert f"{ends}; what follows is read all the same" in found.notes
    unsure = 'if [ -z "$HERE" ]; then exit 1; fi\ntorchrun t.py\nif [ 1 = 1 ]; then exit 1; fi'
    for text, env in ((f"{check}torchrun t.py $L $H", {"V": "2"}), (unsure, {})):
        assert not any("ends the script" in note for note in read_script(text, "run.sh", env).notes)


def test_the_length_of_an_array_with_another_that_is_not_set_is_open():
    """bash makes no word of "${A[@]}" then; a file that sources the script may have set it."""
    (word, *_) = read_script('B=("${A[@]}" x)\ntorchrun t.py ${#B[@]}', "run.sh", {}).arguments
    assert word.unresolved


def test_variables_are_those_that_the_first_command_sees():
    """A function that starts the program twice, the second time with a variable of its own in a child shell."""
    run = 'run() { bash -c "$1 torchrun train.py"; }; A=1\n'
    script = read_script(f'{run}run ""\nA=3\nrun "export B=2;"\n', "x.sh")
    assert {name: script.variables.get(name) for name in "AB"} == {"A": "1", "B": None}
    assert read_script(f'{run}run "export B=2;"\nB=5\n', "x.sh").variables["B"] == "2"


def test_a_printf_that_is_not_read_leaves_its_variable_open():
    """%x is none of the formats that are read."""
    (word,) = read_script("A=7; printf -v A '%x' 255\ntorchrun t.py $A", "run.sh", {}).arguments
    assert word.unresolved[0].why == "$A in line 1 is of a printf that is not read"


def test_words_that_an_undecided_test_adds_to_an_array_stand_after_the_others():
    """The flag may be there or not; of elements that no test adds nothing is open."""
    text = 'CMD=(torchrun --nproc_per_node 2 t.py --x 1)\nif [[ -f "$NOT_HERE" ]]; then CMD+=(--eval_file e); fi\n"${CMD[@]}"'
    found = read_script(text, "run.sh", {})
    first, second, last = found.arguments
    assert (found.program, found.devices, first.text, second.text) == ("t.py", 2, "--x", "1")
    assert last.unresolved
    several = text.replace("+=(--eval_file e)", "=(other)")  # in place of the array
    with pytest.raises(ConfigError, match="no launch command"):
        read_script(several, "run.sh", {})


def test_a_command_that_tmux_runs():
    text = 'N=4\ntmux new-session -d -s job "\n  source venv/bin/activate\n  torchrun --nproc_per_node $N t.py --x 1\n"'
    found = read_script(text, "run.sh", {})
    assert (found.program, found.devices, [word.text for word in found.arguments]) == ("t.py", 4, ["--x", "1"])


def test_a_width_beyond_any_job_is_not_printed():
    assert formatted("%099999999999d", ["3"]) is None


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("while true; do X=$X-x; done", 1),
        ("L=2\nuntil false; do sleep 1; done", 2),
        ("for ((;;)); do nvidia-smi; done", 1),
        ("while true; do sleep 1; done &", 0),  # in the background
        ("while :; do if nc -z $HOST 1; then break; fi; done", 0),
        ("while true; do case $1 in -h) shift;; *) break;; esac; done", 0),
        ("for ((i = 0; i < 1000; i++)); do X=$i; done", 0),  # which ends
        ("[ -f x ] && while true; do sleep 1; done", 0),  # which may not run
    ],
)
def test_a_loop_that_nothing_ends_is_told(before, line):
    """bash never gets to the launch after it."""
    told = [
        note for note in read_script(f"{before}\ntorchrun t.py", "run.sh", {}).notes if "the end of the loop" in note
    ]
    assert told == [f"the end of the loop in line {line} is not known; what follows is read all the same"][: bool(line)]
    assert not any("the end" in note for note in read_script("while :; do torchrun t.py; done", "run.sh", {}).notes)
