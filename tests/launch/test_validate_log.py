"""`3dtrn validate --log`: the plan out of a log, measured vs. predicted, and a row of a CSV that reads straight back."""

from __future__ import annotations

import gzip
import io
import json

import pytest
from launch_logs import END, LOGS, MEGATRON, document, dump, head, iteration, memory, run, write

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.commands import cli
from steptime.job.job import Job
from steptime.launch.logs.job_log import read_log
from steptime.report.progress import ProgressLine
from steptime.validation.conventions import conventions, counted
from steptime.validation.logged import compare, read_run

MIB = 2.0**20
H100 = "--set", "hardware.node_type=dgx-h100"
TOKENS, LAYERS, HIDDEN, FFN, HEADS, KV, HEAD_DIM, VOCAB, SEQ = 128 * 8192, 32, 4096, 14336, 32, 8, 128, 128256, 8192


# --- the log alone ---


def test_logs_of_two_frameworks_are_no_one_job(capsys):
    logs = [str(LOGS / f"{name}-llama3-8b.log") for name in ("megatron", "torchtitan")]
    assert cli.main(["validate", "--log", *logs, "--set", "hardware.node_type=h100"]) == 2
    said = capsys.readouterr().err
    assert said == f"{logs[1]}: is a torchtitan log, {logs[0]} is not: logs of two jobs; give the logs of one job\n"


def test_a_megatron_log_alone_gives_plan_prediction_measurement_and_difference(capsys):
    found = document(capsys, "--log", MEGATRON, *H100)
    plan = Job(
        model={
            "n_layers": LAYERS,
            "hidden_sz": HIDDEN,
            "inter_sz": FFN,
            "n_q_heads": HEADS,
            "n_kv_heads": KV,
            "vocab_sz": VOCAB,
        },
        parallelism={"tp": 2, "pp": 2, "dp": 2, "sp": True, "zero_level": 1},
        data={"gbs": 128, "seqlen": 8192, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    assert found["predicted"]["step_s"] == pytest.approx(estimate(plan).step_s, rel=1e-12)
    assert found["measured"]["step_s"] == pytest.approx(14.52)
    assert found["step_time_error"] == pytest.approx(estimate(plan).step_s / 14.52 - 1)
    assert found["measured"]["tokens_per_s"] == pytest.approx(TOKENS / 14.52)
    assert {row["rank"]: row["stage"] for row in found["memory"]} == {0: 0, 1: 0, 4: 1, 5: 1}
    assert found["memory"][2]["allocated_bytes"] == 35800.25 * MIB
    stages = estimate(plan).memory.stages
    assert found["memory"][2]["predicted_allocated_bytes"] == pytest.approx(stages[1].allocated_bytes)
    assert found["memory"][0]["reserved_error"] == pytest.approx(stages[0].reserved_bytes / (43980 * MIB) - 1)
    assert all(row["logged"] == row["predicted"] for row in found["parameters"])
    assert len(found["parameters"]) == 4
    assert Job.load(json.dumps(found["config"])) == Job.load(json.dumps(estimate(plan).to_dict()["config"]))


def test_the_text_answers_first(capsys):
    code, out, err = run(capsys, "--log", MEGATRON, *H100)
    assert (code, err) == (0, "")
    blocks = out.split("\n\n")
    assert blocks[0].startswith("unnamed model, 8.03 B parameters")
    assert blocks[1].startswith("measured and predicted")
    assert "14.52 s" in blocks[1]
    assert "25 of 30 lines (iterations 4 to 30, global batch 128)" in out
    assert "95 % interval 14.51 s to 14.53 s (order statistics)" in out
    assert "left out: 3 warm-up, 2 next to an evaluation or a checkpoint" in out
    assert "causal attention halved" in blocks[1]
    assert "    node_type: dgx-h100" in out
    assert all(len(line) <= 80 for line in out.splitlines() if str(MEGATRON) not in line)


def test_the_log_may_name_its_accelerator(capsys, tmp_path):
    named = write(
        tmp_path / "x.log", ["GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", *MEGATRON.read_text().splitlines()]
    )
    found = document(capsys, "--log", named)
    assert found["config"]["hardware"]["node_type"] == "dgx-h100"
    assert any("NVIDIA H100 80GB HBM3" in note for note in found["notes"])


def test_settings_go_over_the_logs_plan(capsys):
    found = document(capsys, "--log", MEGATRON, *H100, "--set", "performance.overlap.dp=false")
    assert found["config"]["performance"]["overlap"]["dp"] is False


def test_gzip_and_node_files(capsys, tmp_path):
    """Node 0 prints the arguments and its memory, node 1 the iterations: neither is a whole log."""
    lines = MEGATRON.read_text().splitlines()
    cut = lines.index("training ...")
    first = write(tmp_path / "node0.log", lines[:cut])
    (tmp_path / "node1.log.gz").write_bytes(gzip.compress("\n".join(lines[cut:]).encode()))
    whole, parts = (
        document(capsys, "--log", *files, *H100) for files in ([MEGATRON], [first, tmp_path / "node1.log.gz"])
    )
    assert whole.pop("files") != parts.pop("files")
    assert whole == parts


@pytest.mark.parametrize("prefix", ["[default0]:", "12: ", "[rank0]: ", "2025-11-20T14:55:23+08:00 ", "[1,0]<stdout>:"])
def test_prefixes_and_other_ranks_in_the_dump(capsys, tmp_path, prefix):
    """Every line with a launcher's prefix and colors, and another rank's warning after every fifth line of the dump."""
    dressed = []
    for i, line in enumerate(MEGATRON.read_text().splitlines()):
        dressed.append(f"\x1b[36m{prefix}\x1b[0m{line}")
        if i % 5 == 0:
            dressed.append("[default3]:WARNING: one_logger package is required ... to enable e2e metrics tracking")
    plain = document(capsys, "--log", MEGATRON, *H100)
    found = document(capsys, "--log", write(tmp_path / "x.log", dressed), *H100)
    assert plain.pop("files") != found.pop("files")
    assert found == plain


def test_ramped_batch_is_that_of_the_lines_used(capsys, tmp_path):
    """The arguments say 128, the log ends at 64: the estimate is of 64."""
    path = write(
        tmp_path / "x.log",
        [
            *head(rampup_batch_size="[32, 32, 10000]"),
            *(iteration(n, 7000.0, batch=32 if n < 9 else 64) for n in range(1, 31)),
        ],
    )
    found = document(capsys, "--log", path, *H100)
    assert found["config"]["data"]["gbs"] == 64
    assert found["measured"]["left_out"] == {"warm-up": 3, "before the final batch": 5}
    assert any("data.gbs: 64" in note for note in found["notes"])


def test_a_batch_that_the_plan_cannot_have_is_told_with_both_numbers(capsys, tmp_path):
    """100 sequences on 8 ranks: log and plan are of two jobs, and neither is wrong by itself."""
    log = write(tmp_path / "x.log", [iteration(n, 7000.0, batch=100) for n in range(1, 31)])
    plan = write(tmp_path / "p.yaml", ["{model: llama3-8b, devices: 8, parallelism: {tp: 1, pp: 1}, hardware: h100,",
                                       " data: {gbs: 64, seqlen: 2048, microbatch_sz: 1}}"])  # fmt: skip
    assert cli.main(["validate", "--log", str(log), "--plan", str(plan)]) == 2
    assert capsys.readouterr().err == (
        f"{log}: data.gbs: 100 in the lines used, not 64 ({plan}), which another job has: data.gbs: must be a multiple of "
        "dp*microbatch_sz = 8 (got 100); nearest: 96 or 104\n"
    )


def test_ranks_and_stages_by_either_order(tmp_path):
    """8 ranks, tp 2, pp 2, dp 2: by tp-cp-ep-dp-pp ranks 4 to 7 are stage 1, by tp-cp-ep-pp-dp ranks 2, 3, 6 and 7."""
    for flag, stages in ((False, [0, 0, 0, 0, 1, 1, 1, 1]), (True, [0, 0, 1, 1, 0, 0, 1, 1])):
        lines = [
            *head(use_tp_pp_dp_mapping=flag),
            iteration(1, 1.0),
            *(memory(rank, 1000.0, 1100.0) for rank in range(8)),
        ]
        found = compare(read_run([write(tmp_path / f"{flag}.log", lines)], H100[1:], allow_unmodeled=True))
        assert [row.stage for row in found.memory] == stages


def test_many_ranks_are_shown_by_stage(capsys, tmp_path):
    lines = [*head(world_size=64, data_parallel_size=16), *(iteration(n, 2000.0) for n in range(1, 31))]
    lines += [memory(rank, 30000.0 + rank, 33000.0) for rank in range(64)]
    code, out, _ = run(capsys, "--log", write(tmp_path / "x.log", lines), *H100)
    assert code == 0
    table = out[out.index("peak memory by rank") :].splitlines()[:5]
    assert [line.split()[:2] for line in table[2:4]] == [["31", "0"], ["63", "1"]]
    assert "64 ranks report" in table[4]


def test_progress_on_a_terminal_alone(monkeypatch):
    """One line that is overwritten and wiped; a file or pipe gets nothing."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("steptime.report.progress.PATIENCE_S", -1.0)
    monkeypatch.setattr("steptime.report.progress.EVERY_S", -1.0)
    for stream, expected in (
        (Terminal(), "\rx.log: 50 % read\rx.log: 100 % read\r" + " " * 17 + "\r"),
        (io.StringIO(), ""),
    ):
        with ProgressLine(stream) as progress:
            progress.told("x.log", 0.5)
            progress.told("x.log", 1.2)
        assert stream.getvalue() == expected


# --- FLOPs ---


def test_conventions_by_hand(tmp_path):
    """Llama 3 8B by the formulas written out; a vocabulary of 50,257 padded to 50,432 at tp 2 (a multiple of 256)."""
    job = read_run([str(MEGATRON)], [H100[1], "model.vocab_sz=50257"]).job
    known = {c.name: c.flops_per_step for c in conventions(estimate(job).assembly)}
    qkv, out, mlp = HIDDEN * HEAD_DIM * (HEADS + 2 * KV), HEADS * HEAD_DIM * HIDDEN, 3 * HIDDEN * FFN
    core = HEADS * HEAD_DIM * SEQ * 2  # QK^T and (QK^T)V
    for share, words in ((0.5, "causal attention halved"), (1.0, "attention in full")):
        for vocab, padding in ((50257, "unpadded"), (50432, "padded")):
            expected = 6 * TOKENS * (LAYERS * (qkv + core * share + out + mlp) + HIDDEN * vocab)
            assert known[f"{words}, vocabulary {padding}"] == pytest.approx(expected, rel=1e-12)
    early = (
        60 * TOKENS * LAYERS * HIDDEN**2 * (1 + KV / (5 * HEADS) + SEQ / (5 * HIDDEN) + 50432 / (10 * LAYERS * HIDDEN))
    )  # Megatron-LM of 2023
    assert known["attention in full, MLP ungated of 4 hidden (Megatron-LM of 2023)"] == pytest.approx(early, rel=1e-12)
    eq3 = 96 * TOKENS * LAYERS * HIDDEN**2 * (1 + SEQ / (6 * HIDDEN) + 50432 / (16 * LAYERS * HIDDEN))
    assert known["Narayanan et al. 2021, eq. 3: full recomputation counted"] == pytest.approx(eq3, rel=1e-12)


def test_the_logs_convention_is_named_or_said_to_match_none(capsys, tmp_path):
    """At 8 devices and 14.52 s: attention in full gives 6.0726e16 / 14.52 / 8 = 522.8 TFLOP/s; 700 is no count at all."""
    for rate, words in ((464.6, "causal attention halved"), (522.8, "attention in full")):
        path = write(tmp_path / f"{rate}.log", [*head(), *(iteration(n, 14520.0, tflops=rate) for n in range(1, 31))])
        assert document(capsys, "--log", path, *H100)["flops_convention"]["matches"][0].startswith(words)
    odd = write(tmp_path / "odd.log", [*head(), *(iteration(n, 14520.0, tflops=700.0) for n in range(1, 31))])
    _, out, _ = run(capsys, "--log", odd, *H100)
    assert "match no known convention: 1.016e+04 TFLOP per device and step, ours 6,746" in " ".join(out.split())
    assert document(capsys, "--log", odd, *H100)["flops_convention"]["matches"] == []


def test_ties_go_to_the_convention_named_first():
    """Where padding adds nothing, the unpadded name stands: both give the same figure."""
    assembly = estimate(read_run([str(MEGATRON)], H100[1:]).job).assembly
    found = counted(assembly, conventions(assembly)[0].flops_per_step)
    assert [c.name for c in found.matches] == [
        "causal attention halved, vocabulary unpadded",
        "causal attention halved, vocabulary padded",
    ]


# --- bad input ---


def bad(name, lines, message, *, files=1):
    return pytest.param(lines, message, files, id=name)


BODY = [iteration(n, 1000.0) for n in range(1, 31)]
BAD = [
    bad("no iterations", head(), "no iterations logged"),
    bad("no dump", BODY, "no argument dump"),
    bad("dump cut", ["x", "y", *dump()[:40], *BODY], "the dump of arguments is truncated after line 42"),
    bad("dump cut by the end", dump()[:40], "the dump of arguments is truncated after line 40"),
    bad("dump cut by another", [*dump()[:40], "x", *dump()[:50], *BODY], "the dump of arguments is truncated"),
    bad("not a log", ["a: 1", "b: 2"], "no iterations logged"),
    bad("world size", [*head(world_size=7), *BODY], "7"),
    bad("no layers", [*head(num_layers=None, encoder_num_layers=None), *BODY], "num_layers"),
]


@pytest.mark.parametrize(("lines", "message", "files"), BAD)
def test_one_clear_line_and_exit_2(capsys, tmp_path, lines, message, files):
    path = write(tmp_path / "x.log", lines)
    code, out, err = run(capsys, "--log", path, *H100)
    assert (code, out) == (2, "")
    assert err.startswith(f"{path}: ")
    assert message in err
    assert len(err.splitlines()) == files


def test_contradictory_logs_name_the_first_difference(capsys, tmp_path):
    """A restart may load and save elsewhere, and go on from where it was; another layout is another job."""
    a = write(tmp_path / "a.log", [*head(), *BODY])
    again = write(tmp_path / "b.log", [*head(load="/ckpt", consumed_train_samples=3840, seed=7), iteration(31, 1000.0)])
    other = write(tmp_path / "c.log", [*head(micro_batch_size=2), iteration(31, 1000.0)])
    assert run(capsys, "--log", a, again, *H100)[0] == 0
    code, out, err = run(capsys, "--log", a, other, *H100)
    assert (code, out) == (2, "")
    assert err == f"{other}: different job than {a}: data.microbatch_sz is 2, not 1; give the logs of one job\n"
    both = write(tmp_path / "d.log", [*head(), *BODY, *head(micro_batch_size=2), iteration(31, 1000.0)])
    err = run(capsys, "--log", both, *H100)[2]
    line = len([*head(), *BODY]) + next(i for i, text in enumerate(head(), 1) if " arguments ---" in text)
    assert err.startswith(f"{both}: line {line}: different job than {both}: data.microbatch_sz is 2, not 1")


def test_an_end_mark_elsewhere_completes_nothing(capsys, tmp_path):
    path = write(tmp_path / "x.log", [END, *BODY])
    assert "no argument dump" in run(capsys, "--log", path, *H100)[2]


def test_no_accelerator_and_a_flag_that_is_not_modeled(capsys, tmp_path):
    code, _, err = run(capsys, "--log", MEGATRON)
    assert code == 2
    assert "add --set hardware.node_type=NAME" in err
    path = write(tmp_path / "z.log", [*head(cpu_offloading=True), *BODY])
    assert [line.rpartition("; ")[2].split()[0] for line in run(capsys, "--log", path)[2].splitlines()] == [
        "add",
        "--allow-unmodeled",
    ]
    path = write(tmp_path / "y.log", [*head(cpu_offloading=True), *BODY])
    code, _, err = run(capsys, "--log", path, *H100)
    assert code == 2
    assert "--allow-unmodeled" in err
    found = document(capsys, "--log", path, *H100, "--allow-unmodeled")
    assert any("cpu_offloading" in text for text in found["assumptions"])


def test_options_that_do_not_go_together(capsys):
    assert "only with --log" in run(capsys, "--save-csv", "x.csv")[2]
    code, _, err = run(capsys, "--log", MEGATRON, "--measurements", "x.csv")
    assert code == 2
    assert "--measurements: only for rows" in err
    assert "unknown kind" in run(capsys, "--log", MEGATRON, *H100, "--from", "jax")[2]
    assert "expected a.b=value" in run(capsys, "--log", MEGATRON, "--set", "x")[2]


# --- other frameworks ---


def test_a_torchtitan_log(capsys):
    """8 devices, 8,192 tokens each and step: at 6,000 tokens/s per device a step takes 1.3653 s. 57.9 GFLOP a token is the
    full count of Llama 3 8B at 8,192: 6 x 7.505 G parameters beside the embedding, and 12 x 32 x 4096 x 8192 of attention."""
    found = document(capsys, "--log", LOGS / "torchtitan-llama3-8b.log", "--allow-unmodeled")
    assert found["measured"]["step_s"] == pytest.approx(8192 / 6000)
    assert found["measured"]["interval"] == 10
    assert found["config"]["parallelism"]["dp"] == 8
    assert found["config"]["hardware"]["node_type"] == "dgx-h100"
    assert found["flops_convention"]["matches"][0].startswith("attention in full")
    assert [row["reserved_bytes"] for row in found["memory"]] == [48.0 * 2**30, 48.5 * 2**30]
    assert {row["stage"] for row in found["memory"]} == {0}


def test_a_plan_of_other_devices_than_the_logs_is_told(capsys, tmp_path):
    """The log's mesh is dp_shard 8: a plan of 16 devices is another job, one of 8 is not."""
    log = str(LOGS / "torchtitan-llama3-8b.log")
    for devices, told in ((16, 1), (8, 0)):
        path = tmp_path / f"{devices}.yaml"
        path.write_text(
            f"model: llama3-8b\ndevices: {devices}\nhardware: dgx-h100\nparallelism: {{tp: 1, pp: 1, fsdp: {{}}}}\n"
            f"performance: {{software: torchtitan}}\ndata: {{gbs: {devices}, seqlen: 8192, microbatch_sz: 1}}\n"
        )
        found = document(capsys, "--log", log, "--plan", str(path))
        words = "the plan has 16 devices, the log's job ran on 8: these are two jobs"
        assert sum(note.startswith(words) for note in found["notes"]) == told
        # 6,000 tokens/s on each of the log's 8 devices, whatever the plan has
        assert found["measured"]["tokens_per_s_per_device"] * 8 == pytest.approx(found["measured"]["tokens_per_s"])
        assert found["measured"]["step_s"] == pytest.approx(devices * 8192 / 8 / 6000)
        assert cli.main(["validate", "--log", log, "--plan", str(path)]) == 0
        out = capsys.readouterr().out
        assert out.count("the plan has 16 devices") == told
        assert f"torchtitan-llama3-8b.log (with a plan, {path})".replace(" ", "") in "".join(out.split())


def test_a_world_size_into_which_another_process_printed(tmp_path):
    """The log's 8 devices are then not known, as without the line."""
    text = "\n".join(line for line in MEGATRON.read_text().splitlines() if "using world size" not in line)
    (line,) = (line for line in text.splitlines() if "world_size ..." in line)
    for said, devices in ((line, 8), (f"{line}WARNING", 0)):
        (path := tmp_path / "run.log").write_text(text.replace(line, said))
        assert read_log([str(path)]).job_devices == devices


def test_a_megatron_bridge_log(capsys):
    """It logs one iteration, of 4.6478 s, as Megatron-LM does, and prints a config of its own; the TFLOP/s of that release were
    wrong by orders of magnitude."""
    log = LOGS.parent / "nemo" / "llama32_1b.log"
    found = document(capsys, "--log", log, *H100, "--allow-unmodeled")
    assert found["measured"]["step_s"] == pytest.approx(4.6478)
    assert found["config"]["model"]["n_layers"] == 16
    assert found["flops_convention"]["matches"] == []
    assert "only the last line is used" in found["notes"][-1]


def test_a_megatron_log_with_the_wrong_kind_says_so():
    with pytest.raises(ConfigError):
        read_run([str(MEGATRON)], H100[1:], kind="torchtitan")


def test_one_line_used_is_one_iteration(capsys, tmp_path):
    """The first two of three are warm-up."""
    log = write(tmp_path / "a.log", [*head(), *(iteration(n, 14520.0) for n in (1, 2, 3))])
    assert "1 of 3 lines (iteration 3, global batch 128)" in run(capsys, "--log", log, *H100)[1]
