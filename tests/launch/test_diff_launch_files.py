"""`3dtrn diff` of launch files: what differs in their plans, what that costs, and what is in no plan."""

from __future__ import annotations

import json

import pytest
from launch_logs import head, iteration, write

from steptime.commands import cli

FLAGS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--vocab-size 32000 --tokenizer-type NullTokenizer --bf16 --micro-batch-size 1 --use-distributed-optimizer "
)
TOML = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\nlocal_batch_size = {batch}\n'


@pytest.fixture
def diff(capsys, tmp_path):
    """`3dtrn diff` of files in a folder: (exit code, stdout, stderr)."""

    def call(*args):
        words = [str(tmp_path / arg) if (tmp_path / str(arg)).exists() else str(arg) for arg in args]
        code = cli.main(["diff", *words])
        return (code, *(text.replace(f"{tmp_path}/", "") for text in capsys.readouterr()))

    return call


@pytest.fixture
def script(tmp_path):
    """Writes a script of one node."""

    def made(name, more):
        command = f"torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py {FLAGS}{more}\n"
        (tmp_path / name).write_text(command)

    return made


def test_two_scripts(diff, script):
    """tp 1 to 2 halves dp; the costs table has the two degrees as one difference, and the batch as another."""
    script("a.sh", "--global-batch-size 32")
    script("b.sh", "--global-batch-size 64 --tensor-model-parallel-size 2")
    code, out, err = diff("a.sh", "b.sh", "--machine", "h100")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["parallelism.tp", "1", "2"] in rows
    assert ["parallelism.dp", "8", "4"] in rows
    assert ["data.gbs", "32", "64"] in rows
    assert "modeled cost of each difference" in out
    assert ["gbs", "32", "to", "64"] in [row[:4] for row in rows]
    assert ["tp", "1", "to", "2"] in [row[:4] for row in rows]
    assert ["with", "dp", "8", "to", "4"] in rows


def test_flags_that_no_plan_has(diff, script):
    """Each is refused by its file's name; left out, the difference is told."""
    script("a.sh", "--global-batch-size 32 --own-attention-window 12")
    script("b.sh", "--global-batch-size 32 --own-attention-window 24")
    code, out, err = diff("a.sh", "b.sh", "--machine", "h100")
    assert (code, out) == (2, "")
    assert [line.partition(":")[0] for line in err.splitlines()] == ["a.sh", "b.sh"]
    code, out, err = diff("a.sh", "b.sh", "--machine", "h100", "--allow-unmodeled")
    assert (code, err) == (0, "")
    assert "no setting differs\n  in no plan, but different: --own-attention-window (a.sh 12, b.sh 24)\n" in out
    assert "modeled cost" not in out


def test_a_script_and_a_plan_on_the_plans_machine(diff, script, tmp_path, capsys):
    """The script names no machine: it is compared on the plan's, which is told."""
    script("a.sh", "--global-batch-size 32 --own-attention-window 12")
    plan = tmp_path / "plan.yaml"
    options = "--machine", "a100", "--allow-unmodeled", "--set", "data.gbs=64", "--save", str(plan)
    assert cli.main(["--from", "megatron", str(tmp_path / "a.sh"), *options]) == 0
    capsys.readouterr()
    code, out, err = diff("plan.yaml", "a.sh", "--allow-unmodeled")
    assert (code, err) == (0, "")
    assert "a.sh: hardware: dgx-a100-80, taken from the plan" in out
    assert "in no plan: --own-attention-window (a.sh 12)" in out
    assert [line.split() for line in out.splitlines()][1:3] == [["plan", "a.sh"], ["data.gbs", "64", "32"]]
    table = json.loads(diff("plan.yaml", "a.sh", "--allow-unmodeled", "--machine", "h100", "--json")[1])
    assert "taken from the plan" not in json.dumps(table)


def test_files_of_two_frameworks_and_three_of_one(diff, script, tmp_path):
    """A TOML has no devices: --devices gives them to each file, else it is told what was assumed."""
    for batch in (1, 2, 4):
        (tmp_path / f"{batch}.toml").write_text(TOML.format(batch=batch))
    script("a.sh", "--global-batch-size 32")
    code, out, err = diff("a.sh", "1.toml", "--machine", "h100", "--devices", "8")
    assert (code, err) == (0, "")
    assert "model.n_layers" in out
    code, out, err = diff("1.toml", "2.toml", "4.toml", "--machine", "h100", "--devices", "8")
    assert (code, err) == (0, "")
    assert ["data.gbs", "8", "16", "32"] in [line.split() for line in out.splitlines()]
    assert "1.toml: number of devices not set, 8 assumed" in diff("a.sh", "1.toml", "--machine", "h100")[1]
    assert "A: number of devices not set, 8 assumed" in diff("1.toml", "2.toml", "4.toml", "--machine", "h100")[1]


def test_a_launch_file_and_a_log(diff, script, tmp_path):
    """The measured step stands under the log."""
    script("a.sh", "--global-batch-size 32")
    write(tmp_path / "b.log", [*head(), *(iteration(n, 14000.0) for n in range(1, 31))])
    code, out, err = diff("a.sh", "b.log", "--machine", "h100")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split() == ["measured", "-", "14.00", "s"]


def test_what_both_files_leave_open_is_asked_for_in_one_round(diff, script, tmp_path):
    script("a.sh", "--global-batch-size 32")
    (tmp_path / "b.toml").write_text(TOML.format(batch=1))
    code, out, err = diff("a.sh", "b.toml")
    assert (code, out) == (2, "")
    *asked, again = err.splitlines()
    assert [line.partition(":")[0] for line in asked] == ["a.sh", "b.toml"]
    assert again == "to go on: 3dtrn diff a.sh b.toml --set hardware.node_type=NAME"
    code, out, err = diff("a.sh", "b.toml", "--machine", "h100", "--devices", "16", "--set", "parallelism.dp=8")
    assert (code, out) == (2, "")
    assert "--devices: 16, but --set parallelism.dp=8 makes 8 devices" in err


def test_what_one_file_leaves_open_can_be_told_for_it_alone(diff, script, tmp_path, monkeypatch, capsys):
    """--set model.vocab_sz would change b.sh too, which has 32,001 (NullTokenizer adds one); a plan of a.sh leaves it."""
    monkeypatch.chdir(tmp_path)
    script("a.sh", "--global-batch-size 32")
    script("b.sh", "--global-batch-size 32")
    (tmp_path / "a.sh").write_text((tmp_path / "a.sh").read_text().replace("--vocab-size 32000", ""))
    *_, again, alone = diff("a.sh", "b.sh", "--machine", "h100")[2].splitlines()
    assert again == "to go on: 3dtrn diff a.sh b.sh --machine h100 --set model.vocab_sz=N"
    command = "3dtrn --from auto a.sh --machine h100 --set model.vocab_sz=N --save a.yaml"
    said = f"(--set model.vocab_sz=N changes all files; for a.sh alone: {command}, then compare a.yaml)"
    assert alone == said
    assert cli.main(command.replace("=N", "=50000").split()[1:]) == 0
    capsys.readouterr()
    assert ["model.vocab_sz", "50000", "32001"] in [
        line.split() for line in diff("a.yaml", "b.sh", "--machine", "h100")[1].splitlines()
    ]


def test_a_file_that_cannot_be_read_may_name_the_machine(diff, script, tmp_path):
    """A problem is told once, and the machine is asked for where every file was read."""
    script("a.sh", "--global-batch-size 32")
    (tmp_path / "plan.yaml").write_text("model: llama3-8b\ndevices: 8\nhardware: h100\ndepth: 1\n")
    (tmp_path / "folder").mkdir()
    assert "machine unknown" not in diff("plan.yaml", "a.sh")[2]
    assert diff("none.yaml", "none.yaml") == (2, "", "none.yaml: no such file\n")
    assert diff("folder", "a.sh") == (2, "", "folder: is a directory; give a plan, a launch file or a training log\n")
    assert diff("a.sh", "a.sh")[2].count("a.sh: machine unknown") == 1


def test_files_that_are_neither(diff, tmp_path):
    """A damaged plan has its own problems; a TOML of nothing known is named."""
    (tmp_path / "plan.yaml").write_text("model: llama3-8b\ndevices: 8\ndata: {gbs: 8}\nhardware: h100\ndepth: 1\n")
    (tmp_path / "run.toml").write_text("[run]\n")
    code, out, err = diff("plan.yaml", "run.toml")
    assert (code, out) == (2, "")
    assert "plan.yaml: depth: unknown key" in err
    assert "run.toml: a TOML file, not a plan" in err


def test_each_script_is_given_its_own_arguments(diff, script):
    """Only b.sh reads a second one; the command to go on names both files as they were given."""
    script("a.sh", "--global-batch-size $1")
    script("b.sh", "--global-batch-size $1 --tensor-model-parallel-size $2")
    script("c.sh", "--global-batch-size 32")
    for first, again in (("a.sh", "'a.sh ARG1' 'b.sh ARG1 ARG2'"), ("c.sh", "c.sh 'b.sh ARG1 ARG2'")):
        code, out, err = diff(first, "b.sh", "--machine", "h100")
        assert (code, out) == (2, "")
        assert err.splitlines()[-1] == f"to go on: 3dtrn diff {again} --machine h100"


def test_the_interaction_is_explained_only_where_the_table_has_it(diff, script):
    """A batch of 2 is not of 8 replicas with 2 each: it has no effect by itself, so all together has no interaction."""
    script("a.sh", "--global-batch-size 32 --micro-batch-size 2")
    for batch, has in ((64, True), (2, False)):
        script("b.sh", f"--global-batch-size {batch} --micro-batch-size 1 --tensor-model-parallel-size 4")
        code, out, _ = diff("a.sh", "b.sh", "--machine", "h100")
        assert code == 0
        assert ("cannot run by itself" in out) is not has
        assert out.count("interaction") == (2 if has else 0)
