"""Damaged and random input at the doors of `3dtrn`: the first cases of benchmarks/fuzz.py, and inputs that it found."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from steptime import Job, estimate
from steptime.base.config import ConfigError
from steptime.commands import cli
from steptime.report.table import printable

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "fuzz.py"
DOORS = ("plans", "server", "files", "machines", "tables", "configs", "launches", "logs")


def test_the_first_cases_of_every_door():
    """Without files of compiled modules, whose writing a case would be blamed for."""
    argv = [sys.executable, "-B", "-W", "ignore", PROGRAM, *DOORS, "--cases", "3"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    told = [f"{door}: 3 cases" in done.stdout for door in DOORS]
    assert (done.returncode, all(told)) == (0, True), done.stdout + done.stderr


WRONG = {
    "lambda: __import__('os').system('true')": "not only reads: [\"os.system b'true'\"]",
    "lambda: [][1]": "IndexError",
    "lambda: 3": "exit code 3",
    "lambda: 2": "nothing is said",
    "lambda: print('{\"a\": NaN}') or 0": "NaN in JSON",
    "lambda: print('{\"a\": 1}') or 0": "None",
    "lambda: [0 for _ in iter(int, 1)]": "it hangs",
}
"""What a case does, and what is said of it."""


def test_the_engine_sees_what_is_wrong():
    """In a process of its own, since nothing takes an audit hook away again."""
    code = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import fuzzing as f; watch = f.Watch();"
    code += f"said = [f.tried(f.Case(run, 'x', json=True), 0.05, watch) for run in ({', '.join(WRONG)})];"
    code += "print(*map(repr, said), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line, words in zip(done.stdout.splitlines(), WRONG.values(), strict=True):
        assert words in ast.literal_eval(line) if words != "None" else line == words


FOUND = {
    "primus.yaml": "modules: 3\nwork_group: x\nworkspace: y\nexp_name: z\n",
    "overrides.yaml": "modules: {pre_trainer: {framework: megatron, model: llama3.1_8B.yaml, overrides: 7}}\n",
    "digits.toml": f"[job]\na = {'9' * 5000}\n",
}
"""Inputs that ended in a traceback."""


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("kind", ["primus", "axolotl", "torchtitan", "auto"])
def test_launch_files_that_were_found_are_one_line(tmp_path, capsys, name, kind):
    file = tmp_path / name
    file.write_text(FOUND[name])
    assert cli.main([str(file), "--from", kind]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == {("axolotl", "primus.yaml"): 4, ("axolotl", "overrides.yaml"): 5}.get((kind, name), 1)
    if len(lines) > 1:  # the last problems are what the file leaves open, one line each; the whole command follows
        assert lines.pop().startswith("to go on: 3dtrn ")
        assert [line.removeprefix(f"{file}: ").partition(";")[0] for line in lines[-3:]] == [
            "model unknown", "number of devices unknown", "machine unknown",
        ]  # fmt: skip
    assert all(line.startswith(f"{file}: ") for line in lines)


def test_another_kind_of_model_is_told_where_its_flag_is_let_pass(tmp_path, capsys):
    """--allow-unmodeled left nothing to say of a script of reinforcement learning that lacks its sizes, too."""
    file = tmp_path / "run.sh"
    file.write_text("torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers x --num-rollout 5\n")
    assert cli.main([str(file), "--from", "megatron", "--allow-unmodeled"]) == 2
    assert capsys.readouterr().err == f"{file}: --num-rollout 5: reinforcement learning; not modeled\n"


def test_no_text_of_an_input_commands_the_terminal(tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    file.write_text('model: "a\\e[2Jb\\x7f"\nparallelism: {"\\e]0;x\\a": 1}\n')
    assert cli.main([str(file)]) == 2
    err = capsys.readouterr().err
    assert not set(err) & {"\x1b", "\x7f", "\x07"}
    assert printable("\x1b[1;31mred\x1b[0m\t\n") == "\x1b[1;31mred\x1b[0m\t\n"


CODES = "\x1b[8mhidden\x1b[0m\x1b]0;title\x07"
"""Conceals text and renames the terminal's window."""


@pytest.mark.parametrize("color", ["always", "never"])
def test_no_cell_of_a_table_commands_the_terminal(tmp_path, capsys, color):
    """What is printed has the codes of its own layout and none of the cells'."""
    head, *rows = (ROOT / "tests" / "data" / "validate" / "own.csv").read_text().splitlines()
    at = head.split(",").index("recompute")
    cells = [row.split(",") for row in rows]
    cells[0][0] += CODES  # its id
    cells[1][at] = CODES
    file = tmp_path / "runs.csv"
    file.write_text("\n".join([head, *map(",".join, cells)]) + "\n")
    assert cli.main(["validate", "--measurements", str(file), "--worst", "5", "--color", color]) == 0
    told = capsys.readouterr()
    assert "run-1?[8mhidden" in told.out
    assert "\x1b[8m" not in told.out
    assert ("\x1b[1m" in told.out) == (color == "always")
    assert not {"\x07", "\x1b"} & set(told.err)
    assert not {"\x07"} & set(told.out)


@pytest.mark.parametrize("options", [[], ["--brief"], ["--assumed"], ["--json"], ["--export", "megatron"]])
def test_no_text_of_a_plan_colors_its_report(tmp_path, capsys, options):
    file = tmp_path / "plan.yaml"
    file.write_text((ROOT / "configs" / "llama3_8b.yaml").read_text() + 'notes: ["a \\e[8mhidden\\e[0m note"]\n')
    assert cli.main([str(file), "--color", "always", *options]) == 0
    told = capsys.readouterr()
    assert "\x1b[8m" not in told.out + told.err


@pytest.mark.parametrize("word", ["V", "781.679", "-1", "1e999"])
def test_a_cell_that_is_no_number_is_its_rows_problem(tmp_path, capsys, word):
    """The rows that the spread of measurements is taken from are read again, their cells of any kind."""
    head, *rows = (ROOT / "tests" / "data" / "validate" / "own.csv").read_text().splitlines()
    cells = rows[0].split(",")
    cells[head.split(",").index("pp")] = word
    file = tmp_path / "runs.csv"
    file.write_text("\n".join([head, ",".join(cells), rows[1]]) + "\n")
    assert cli.main(["validate", "--measurements", str(file)]) == 0
    assert f"(got '{word}')" in capsys.readouterr().err


def test_one_stage_has_no_split_backward_to_draw(tmp_path, capsys):
    """A page of FSDP on one stage with a zero-bubble schedule had no bytes for the weights' gradients."""
    plan = (ROOT / "configs" / "llama3_8b_fsdp.yaml").read_text()
    file = tmp_path / "plan.yaml"
    file.write_text(plan)
    line = "parallelism.schedule: zero_bubble needs pp of 2 or more (got 1)"
    assert cli.main([str(file), "--set", "parallelism.schedule=zero_bubble", "--html", str(tmp_path / "a.html")]) == 2
    assert line in capsys.readouterr().err


def plan_of(**model):
    return {
        "model": {"preset": "llama3-8b", **model},
        "parallelism": {"tp": 1, "pp": 1, "dp": 8},
        "data": {"gbs": 32, "seqlen": 4096, "microbatch_sz": 1},
        "hardware": "dgx-h100",
    }


@pytest.mark.parametrize("size", [2**62, 10**6])
@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("attention", "q_lora_rank"),
        ("attention", "v_head_dim"),
        ("mamba", "n_heads"),
        ("mamba", "conv_width"),
        ("linear_attention", "key_head_dim"),
        ("linear_attention", "value_head_dim"),
        ("linear_attention", "conv_width"),
    ],
)
def test_sizes_beyond_all_models_are_refused(section, key, size):
    """They ended in a KeyError where seconds and bytes exceed a float's whole numbers, or in an MFU of 133."""
    with pytest.raises(
        ConfigError, match=rf"^model\.{section}\.{key}: must be at most [\d,]+ \(got {size}|about 1e18\)"
    ):
        Job.load(plan_of(**{section: {"kind": "mla", key: size} if section == "attention" else {key: size}}))


def test_a_long_name_is_cut():
    with pytest.raises(ConfigError, match=r"^model\.preset: unknown model 'x{57}\.\.\.' \(3dtrn models lists them\)$"):
        Job.load(plan_of(preset="x" * 5000))


def test_rows_that_experts_drop_are_no_work():
    """Forward and backward are 6 FLOPs a weight; a dropped row saves three products of 4096 x 14336 in each of 32 layers."""
    experts = {"n_experts": 8, "expert_inter_sz": 14336, "experts_per_token": 2}
    whole, half, hardly = (
        estimate(Job.load(plan_of(moe=experts | {"capacity_factor": factor}))) for factor in (1.0, 0.5, 0.001)
    )
    tokens, layers = 32 * 4096, 32
    dropped = 6.0 * tokens * layers * 3 * 4096 * 14336  # one of each token's two rows
    assert whole.flops.model_per_step - half.flops.model_per_step == pytest.approx(dropped)
    assert hardly.throughput.mfu <= hardly.throughput.hfu < half.throughput.mfu


def test_a_stage_without_layers_has_no_adapters_to_update():
    """The embedding is frozen: the first of two stages trains nothing, and the optimizer runs on the second."""
    found = estimate(
        Job(
            model={"preset": "gpt3-1.3b", "lora": {"rank": 4}},
            parallelism={"tp": 1, "pp": 2, "dp": 4, "layers_per_stage": [0, 24]},
            data={"gbs": 8, "seqlen": 2048, "microbatch_sz": 1},
            performance={"software": "torch"},
            hardware="h100",
        )
    )
    assert [stage.optimizer_bytes > 0.0 for stage in found.memory.stages] == [False, True]
    assert found.time.parts_s["optimizer"] > 0.0


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("job.slurm", "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=%s\nsrun python pretrain_gpt.py\n", 2),
        ("job.json", '{"train_batch_size": 8, "zero_optimization": {"stage": %s}}', 1),
        ("job.log", "step: 1  loss: 1\nBuilding 2-D device mesh with ['dp', 'tp'], [%s, 2]\n", 2),
    ],
)
def test_a_number_that_python_does_not_read_is_one_line(tmp_path, capsys, name, text, line):
    file = tmp_path / name
    file.write_text(text % ("9" * 5000))
    assert cli.main([str(file), "--from", "auto"]) == 2
    told = f"{file}: line {line}: a number of 4,300 digits or more; the file seems to be damaged\n"
    assert capsys.readouterr().err == told


def test_numbers_of_a_log_are_numbers_of_a_run(capsys, tmp_path):
    """A vocabulary of 5,000 digits is none; a superscript is a digit to Python, and no number."""
    (tmp_path / "log.txt").write_text(f" > padded vocab (size: {'9' * 5000}) with 1 dummy tokens (new size: 8)\n")
    (tmp_path / "job.sh").write_text("torchrun --nproc_per_node=\u00b2 pretrain_gpt.py --num-layers 2\n")
    for words in (["validate", "--log", str(tmp_path / "log.txt")], [str(tmp_path / "job.sh"), "--from", "megatron"]):
        assert cli.main(words) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["hardware.node_type=dgx-h{}", "hardware.overrides.accelerator.memory_bytes=8 G{}"])
def test_a_long_word_is_cut(setting, capsys):
    assert cli.main(["--model", "llama3-8b", "--devices", "8", "--set", setting.format("9" * 5000)]) == 2
    assert all(len(line) < 300 for line in capsys.readouterr().err.splitlines())


def test_a_key_with_a_line_break_is_one_line():
    with pytest.raises(ConfigError) as error:
        Job.load(plan_of() | {"data": {"gbs\n1": 32}})
    assert all("\n" not in line for line in error.value.problems)


def test_an_endless_capacity_is_refused():
    """It ended in an OverflowError."""
    experts = {"n_experts": 8, "expert_inter_sz": 14336, "experts_per_token": 2}
    with pytest.raises(ConfigError, match=r"^model\.moe\.capacity_factor: must be at most 100,?000 \(got inf\)"):
        Job.load(plan_of(moe=experts | {"capacity_factor": float("inf")}))
