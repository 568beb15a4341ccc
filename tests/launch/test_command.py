"""`3dtrn --from` as a user runs it: every kind, the saved plan, what is no launch file, and where the flags went."""

from __future__ import annotations

import gzip
import json

import pytest
from launch_logs import MEGATRON
from launch_readings import DATA

from steptime.commands import cli
from steptime.job.job import Job
from steptime.launch.read import MAX_BYTES, read
from steptime.report.table import WIDTH

H100 = "--set", "hardware.node_type=dgx-h100"
DEEPSPEED = "--set", "model=llama3-8b", "--set", "data.seqlen=4096"
KINDS = {
    "megatron": (DATA / "megatron" / "gpt3_175b.sh", ()),
    "torchtitan": (f"{DATA / 'torchtitan' / 'config_registry.py'}:llama3_8b", ("--set", "parallelism.dp=8")),
    "nemo": (DATA / "nemo" / "llama3_70b_container.yaml", ("--set", "parallelism.dp=4")),
    "deepspeed": (DATA / "deepspeed" / "zero3_bf16.json", DEEPSPEED),
}
FILES = {
    "megatron": DATA / "megatron" / "gpt3_175b.sh",
    "torchtitan": DATA / "torchtitan" / "llama3_8b.toml",
    "nemo": DATA / "nemo" / "llama3_70b_container.yaml",
    "deepspeed": DATA / "deepspeed" / "zero3_bf16.json",
}


def run(capsys, *args):
    code = cli.main([*map(str, args)])
    return (code, *capsys.readouterr())


def refused(capsys, *args):
    """The lines of a command that is refused."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    return err.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_plan_gives_the_report_of_its_source(capsys, tmp_path, kind):
    path, sets = KINDS[kind]
    plan = tmp_path / "plan.yaml"
    command = ("--from", kind, path, *H100, *sets, "--allow-unmodeled")
    code, out, _ = run(capsys, *command, "--save", plan, "--json")
    assert code == 0
    found = json.loads(out)
    assert found.pop("launch")["flags"]
    code, out, err = run(capsys, plan, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == found


def test_what_the_user_sets_reaches_the_reader():
    """A ds_config.json names neither model nor sequence: both come from --set, and dp from the batch: 256 / (2 * 2)."""
    found = read("deepspeed", str(FILES["deepspeed"]), {"model": "llama3-8b", "data.seqlen": 4096})
    assert found.config["model"] == "llama3-8b"
    assert found.config["data"] == {"gbs": 256, "seqlen": 4096, "microbatch_sz": 2}
    assert found.config["parallelism"]["dp"] == 64


@pytest.mark.parametrize("other", FILES)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_another_framework_is_told_by_its_name(capsys, kind, other):
    if kind != other:
        assert refused(capsys, "--from", kind, FILES[other]) == [
            f"{FILES[other]}: is a file of {other}; try --from {other}"
        ]


def test_the_kind_that_is_suggested_reads_the_file(capsys, tmp_path):
    """ms-swift with DeepSpeed has marks of both; its table reads it."""
    script = tmp_path / "run.sh"
    command = "swift sft --model Qwen/Qwen2.5-7B-Instruct --max_length 2048 --per_device_train_batch_size 1"
    script.write_text(f"NPROC_PER_NODE=8 {command} --train_type full --deepspeed zero3\n")
    assert refused(capsys, "--from", "megatron", script) == [f"{script}: is a file of swift; try --from swift"]
    code, _, err = run(capsys, "--from", "swift", script, "--set", "hardware.node_type=h100")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_launch_file_is_one_line(capsys, tmp_path, kind):
    what = "expected a launch script, config or log"
    for name, content, problem in (
        ("empty", b"", f"is empty; {what}"),
        ("noise", bytes(range(256)) * 40, f"is not a text file; {what}"),
        ("cut.gz", gzip.compress(MEGATRON.read_bytes())[:2000], "damaged gzip file"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert refused(capsys, "--from", kind, path) == [f"{path}: {problem}"]
    assert refused(capsys, "--from", kind, tmp_path) == [f"{tmp_path}: is a directory; give a file"]
    assert refused(capsys, "--from", kind, tmp_path / "x.sh") == [f"{tmp_path / 'x.sh'}: no such file"]


def test_what_is_nested_too_deep_is_one_line(capsys, tmp_path):
    for kind, content in (("megatron", "x=${a:-" * 20_000), ("torchtitan", "[a]\nb = " + "[" * 20_000)):
        path = tmp_path / kind
        path.write_text(content)
        assert refused(capsys, "--from", kind, path) == [f"{path}: is nested too deep to be read"]


def test_a_model_name_longer_than_any_file_name_is_one_line(capsys, tmp_path):
    path = tmp_path / "axolotl.yaml"
    path.write_text(f"base_model: {'a' * 5000}\nmicro_batch_size: 1\nsequence_len: 4096\nadapter: null\n")
    assert any("is not among the presets" in line for line in refused(capsys, "--from", "auto", path))


def test_an_empty_mapping_in_the_place_of_a_word_is_no_traceback(capsys, tmp_path):
    path = tmp_path / "bridge.yaml"
    text = (DATA / "nemo" / "llama3_70b_container.yaml").read_text()
    path.write_text(text.replace("position_embedding_type: rope", "position_embedding_type: {}"))
    assert run(capsys, "--from", "auto", path, "--allow-unmodeled", *H100)[0] in {0, 2}


def test_a_plan_is_not_written_over_nor_where_it_cannot_be(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("mine")
    command = ("--from", "megatron", FILES["megatron"], *H100, "--allow-unmodeled", "--save")
    assert refused(capsys, *command, plan) == [f"--save {plan}: file exists; remove it or use another name"]
    assert plan.read_text() == "mine"
    nowhere = tmp_path / "no" / "plan.yaml"
    assert refused(capsys, *command, nowhere) == [f"--save {nowhere}: folder {nowhere.parent} does not exist"]


@pytest.mark.parametrize("name", ["megatron-llama3-8b.log", "torchtitan-llama3-8b.log"])
def test_a_config_that_is_printed_late_in_a_long_log_is_found(capsys, tmp_path, name):
    text = (DATA / "logs" / name).read_bytes()
    line = b"INFO: nothing to see here" + b"." * 230 + b"\n"
    late = tmp_path / "late.log"
    late.write_bytes(line * (MAX_BYTES // len(line) + 1) + text)
    kind = name.partition("-")[0]
    assert read(kind, str(late)).config == read(kind, str(DATA / "logs" / name)).config
    assert run(capsys, "validate", "--log", late, *H100)[0] == 0


def test_a_packed_log_is_the_log(tmp_path):
    packed = tmp_path / "log.gz"
    packed.write_bytes(gzip.compress(MEGATRON.read_bytes()))
    assert read("megatron", str(packed)).config == read("megatron", str(MEGATRON)).config


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_fits_the_page_and_cuts_no_name_of_a_flag(capsys, kind):
    path, sets = KINDS[kind]
    command = ("--from", kind, path, *H100, *sets, "--allow-unmodeled")
    _, out, _ = run(capsys, *command, "--json")
    flags = json.loads(out)["launch"]["flags"]
    _, out, _ = run(capsys, *command)
    flags_part = out[out.index("\nread from") :]
    assert not [flag["name"] for flag in flags if flag["name"] not in flags_part]
    assert max(len(row) for row in flags_part.splitlines()[2:]) <= WIDTH


def test_unmodeled_flags_are_told_one_by_one_and_noted_when_allowed(capsys, tmp_path):
    script = tmp_path / "run.sh"
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --bf16"
    script.write_text(
        f"torchrun --nproc-per-node 2 pretrain_gpt.py {flags} --vocab-size 512 --optimizer soap --bogus-heads 1\n"
    )
    command = ("--from", "megatron", script, *H100)
    lines = refused(capsys, *command)
    assert [line.partition(": ")[2].partition(":")[0] for line in lines] == ["--optimizer soap", "--bogus-heads 1"]
    assert all(line.endswith("not modeled; --allow-unmodeled ignores it") for line in lines)
    _, out, _ = run(capsys, *command, "--allow-unmodeled", "--json")
    notes = [note for note in json.loads(out)["assumptions"] if note.startswith("ignored (not modeled)")]
    assert [note.split(": ")[1] for note in notes] == ["--optimizer soap", "--bogus-heads 1"]
    assert Job.load(json.dumps(json.loads(out)["config"])).notes


def test_the_user_tells_the_nodes_that_a_script_leaves_to_be_edited(capsys, tmp_path):
    """tp 2 x pp 2 on a script's one node of 2: refused; with dp 4 it is a job of 16."""
    script = tmp_path / "run.sh"
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --bf16"
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --vocab-size 512"
    script.write_text(
        f"torchrun --nnodes 1 --nproc-per-node 2 pretrain_gpt.py {flags} {layout} --global-batch-size 8\n"
    )
    command = ("--from", "megatron", script, *H100)
    fix = "for other nodes add --devices N"
    world = f"{script}: world size 2 is not a multiple of tp 2 x pp 2 = 4 (4, 8, 12 ... are); {fix}"
    go_on = f"to go on: 3dtrn {' '.join(map(str, command))} --devices N"
    assert refused(capsys, *command) == [world, go_on]
    given = f"{script}: world size 6 is not a multiple of tp 2 x pp 2 = 4 (4, 8, 12 ... are); {fix}"
    assert refused(capsys, *command, "--devices", "6") == [given, go_on]
    code, out, _ = run(capsys, *command, "--set", "parallelism.dp=4", "--json")
    assert (code, json.loads(out)["devices"]) == (0, 16)


def test_a_log_behind_a_container_runtimes_prefix_is_the_log(tmp_path):
    """kubectl logs and containerd write a time, a stream and a mark before every line."""
    prefixed = tmp_path / "pod.log"
    lines = MEGATRON.read_text().splitlines()
    prefixed.write_text("".join(f"2025-05-27T15:23:07.123456789Z stdout F {line}\n" for line in lines))
    assert read("megatron", str(prefixed)).config == read("megatron", str(MEGATRON)).config


SIZES = "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
COMMAND = f"pretrain_gpt.py {SIZES} --vocab-size 32000 --micro-batch-size 1 --global-batch-size 8 --bf16"


def test_leaving_out_is_not_offered_where_it_would_not_do(capsys, tmp_path):
    """BERT under tp 3 on 8 devices cannot be read without the flag either; on 8 devices under tp 2 it can."""
    path = tmp_path / "bert.sh"
    bert = COMMAND.replace("gpt", "bert")
    path.write_text(f"torchrun --nnodes 1 --nproc_per_node 8 {bert} --tensor-model-parallel-size 3\n", encoding="utf-8")
    for more in ((), ("--allow-unmodeled",)):
        (line,) = refused(capsys, "--from", "auto", path, *H100, *more)
        assert line.endswith("pretrain_bert.py: BERT, another kind of model; not modeled")
    path.write_text(path.read_text(encoding="utf-8").replace("parallel-size 3", "parallel-size 2"), encoding="utf-8")
    line, *_ = refused(capsys, "--from", "auto", path, *H100)
    assert line.endswith("another kind of model; not modeled; --allow-unmodeled ignores it")
    assert run(capsys, "--from", "auto", path, *H100, "--allow-unmodeled")[0] == 0


def test_nodes_of_the_command_are_not_told_where_settings_make_others(capsys, tmp_path):
    """pp 8 on 8 devices, set to 4: 4 devices, which are not the file's 8."""
    path = tmp_path / "run.sh"
    command = f"torchrun --nnodes 1 --nproc_per_node 8 {COMMAND} --pipeline-model-parallel-size"
    path.write_text(f"{command} 8\n", encoding="utf-8")
    _, out, _ = run(capsys, "--from", "auto", path, *H100, "--set", "parallelism.pp=4", "--assumed")
    assert "number of devices set to 4, while the file starts 8" in out
    assert "launched on" not in out
    path.write_text(f"{command} 4\n", encoding="utf-8")
    _, out, _ = run(capsys, "--from", "auto", path, *H100, "--assumed")
    assert "launched on 1 node with 8 processes\n" in out


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "a: [1\n", "line 2, column 1"),
        ("a.json", '{"a": [1,2', "line 2, column 1"),
        ("a.toml", "[model\n", "not valid TOML"),
        ("a.yaml", "a: 1\n", "unknown framework"),
    ],
)
def test_a_damaged_config_is_told_as_one(capsys, tmp_path, name, text, why):
    (tmp_path / name).write_text(text, encoding="utf-8")
    (line,) = refused(capsys, "--from", "auto", tmp_path / name)
    assert why in line


def test_words_after_a_script_belong_into_one_string_with_it(capsys):
    (line,) = refused(capsys, "--from", "auto", "run.sh", "8B", "16")
    assert (
        line == "3dtrn: one file at a time, not also 8B 16; a script and its arguments are one string: 'SCRIPT ARG ...'"
    )


def test_a_count_of_the_nodes_devices_is_asked_for_by_the_machine(capsys, tmp_path):
    """tp is what nvidia-smi counts: 8 on a dgx-h100."""
    path = tmp_path / "run.sh"
    start = f"torchrun --nnodes 1 --nproc_per_node $N {COMMAND} --tensor-model-parallel-size $N"
    path.write_text(f"N=$(nvidia-smi -L | wc -l)\n{start}\n", encoding="utf-8")
    *asked, again = refused(capsys, "--from", "auto", path)
    why = (
        "number of devices unknown, which $(nvidia-smi -L | wc -l) in line 1 counts; add --set hardware.node_type=NAME"
    )
    assert all(line.endswith(why) for line in asked)
    assert again == f"to go on: 3dtrn --from auto {path} --set hardware.node_type=NAME"
    code, out, _ = run(capsys, "--from", "auto", path, *H100)
    assert (code, out.splitlines()[1].split()[:6]) == (0, ["tp", "8", "pp", "1", "dp", "1"])


def test_the_command_to_go_on_has_no_secrets(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_1")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setenv("LAYERS", "4")
    path = tmp_path / "run.sh"
    start = f"torchrun --nnodes 1 --nproc_per_node $N {COMMAND} --num-layers $LAYERS"
    path.write_text(f"export HF_TOKEN=$HF_TOKEN WANDB_API_KEY=${{WANDB_API_KEY}}\n{start}\n", encoding="utf-8")
    assert refused(capsys, "--from", "auto", path)[-1].startswith("to go on: LAYERS=4 N=... 3dtrn ")
