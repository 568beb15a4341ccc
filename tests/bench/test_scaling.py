"""The scaling table: throughput, speed-up and efficiency against the baseline, and what cannot be compared."""

import json
from pathlib import Path

import pytest

from steptime.base.config import ConfigError
from steptime.bench.run_logs.scaling_runs import _at, read_runs, series
from steptime.bench.runs.clock import Timing
from steptime.bench.runs.step import StepRow
from steptime.job.job import Job
from steptime.report.bench_logs import scaling_command
from steptime.report.table import Style, layout

CONFIG = {
    "model": {"n_layers": 2, "hidden_sz": 64, "source": "by hand"},
    "data": {"gbs": 4, "seqlen": 128},
    "performance": {"precision": "fp32"},
}


def step(ranks, median_s, tokens, name=None, **other):
    return {
        "layout": name or ("single" if ranks == 1 else "ddp"),
        "ranks": ranks,
        "tokens_per_step": tokens,
        "config": CONFIG,
        "min_s": 0.9 * median_s,
        "median_s": median_s,
        "p90_s": 1.2 * median_s,
        "reps": 10,
        "allocated_peak_bytes": [2**30, 2**30 + ranks][:ranks],
        "reserved_peak_bytes": [None] * ranks,
        "predicted_step_s": median_s,
    } | other


@pytest.fixture
def results(tmp_path):
    """Writes one results.json per list of steps and gives their paths."""

    def write(*files, schema="3dtrn-bench/1"):
        paths = []
        for i, steps in enumerate(files):
            path = tmp_path / f"results{i}.json"
            path.write_text(json.dumps({"schema": schema, "steps": steps}))
            paths.append(str(path))
        return paths

    return write


def problems(paths, **options):
    with pytest.raises(ConfigError) as error:
        scaling_command(paths, **options)
    return error.value.problems


def test_estimates_for_different_machines_are_told(results):
    def on(machine):
        return CONFIG | {"hardware": {"node_type": machine}}

    paths = results([step(1, 1.0, 512, config=on("h100"))], [step(2, 1.25, 1024, config=on("a100"))])
    (section,) = scaling_command(paths)[1]
    assert "the estimates are for different machines (not comparable): a100, h100" in " ".join(section.notes)
    same = results([step(1, 1.0, 512, config=on("h100"))], [step(2, 1.25, 1024, config=on("h100"))])
    assert "different machines" not in " ".join(scaling_command(same)[1][0].notes)


def test_weak_scaling(results):
    """Twice and four times the batch in 1.25 and 1.6 times the time: 2 / 1.25 = 1.6x of 2, 4 / 1.6 = 2.5x of 4."""
    paths = results([step(4, 1.6, 2048, predicted_step_s=1.25)], [step(1, 1.0, 512)], [step(2, 1.25, 1024)])
    document, sections = scaling_command(paths)
    found = document["scaling"][0]
    assert (found["layout"], found["kind"]) == ("ddp", "weak")
    assert [row["ranks"] for row in found["rows"]] == [1, 2, 4]
    assert [row["tokens_per_s"] for row in found["rows"]] == pytest.approx([512, 819.2, 1280])
    assert [row["speed_up"] for row in found["rows"]] == pytest.approx([1, 1.6, 2.5])
    assert [row["efficiency"] for row in found["rows"]] == pytest.approx([1, 0.8, 0.625])
    assert [row["predicted_efficiency"] for row in found["rows"]] == pytest.approx([1, 0.8, 0.8])  # 4 / 1.25 / 4
    assert found["rows"][1]["allocated_peak_bytes"] == 2**30 + 2
    text = "\n".join(layout(sections[0], Style()))
    for words in ("weak scaling, ddp", "1.00x", "100.0 %", "2.50x", "62.5 %", "80.0 %", "1.60", "1.44", "1.92", "1.25"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


def test_strong_scaling(results):
    """The same batch in 0.5 and 0.4 of the time."""
    paths = results([step(1, 1.0, 512)], [step(2, 0.5, 512)], [step(4, 0.4, 512)])
    found = scaling_command(paths)[0]["scaling"][0]
    assert found["kind"] == "strong"
    assert [row["speed_up"] for row in found["rows"]] == pytest.approx([1, 2, 2.5])
    assert [row["efficiency"] for row in found["rows"]] == pytest.approx([1, 1, 0.625])


def test_a_baseline_of_more_than_one_rank(results):
    """From 2 to 8 ranks: 3 times the throughput of 4 times the ranks."""
    paths = results([step(2, 1.0, 512)], [step(8, 1 / 3, 512)])
    document, sections = scaling_command(paths)
    assert [row["efficiency"] for row in document["scaling"][0]["rows"]] == pytest.approx([1, 0.75])
    assert "against 2 ranks (ddp); efficiency is speed-up over ranks / 2" in "\n".join(layout(sections[0], Style()))
    assert problems(paths, baseline=1) == [f"ddp: no baseline on 1 ranks; the smallest run has 2 ({paths[0]})"]


def test_layouts_are_series_of_their_own(results):
    paths = results([step(1, 1.0, 512)], [step(2, 0.6, 512), step(2, 0.8, 512, "tp")], [step(4, 0.4, 512)])
    found = {each.layout: each for each in series([run for path in paths for run in read_runs(path)])}
    assert {layout: [point.run.ranks for point in each.points] for layout, each in found.items()} == {
        "ddp": [1, 2, 4],
        "tp": [1, 2],
    }
    assert found["tp"].points[1].efficiency == pytest.approx(0.625)


def test_what_was_not_measured_stays_open(results):
    bare = {"allocated_peak_bytes": None, "reserved_peak_bytes": [], "predicted_step_s": None}
    document, sections = scaling_command(results([step(1, 1.0, 512, **bare)], [step(2, 0.5, 512, **bare)]))
    row = document["scaling"][0]["rows"][1]
    assert (
        row["allocated_peak_bytes"],
        row["reserved_peak_bytes"],
        row["predicted_efficiency"],
        row["memory_ratio"],
    ) == (None,) * 4
    assert json.dumps(document, allow_nan=False)
    assert " - " in "\n".join(layout(sections[0], Style()))


def test_an_estimate_may_be_missing_for_one_run(results):
    _, sections = scaling_command(results([step(1, 1.0, 512)], [step(2, 0.5, 512, predicted_step_s=None)]))
    rows = [line.split() for line in layout(sections[0], Style())]
    assert [row[-2] for row in rows if row[0] in {"1", "2"}] == ["1.00", "-"]


def test_a_missing_baseline(results):
    paths = results([step(4, 1.0, 512)])
    assert problems(paths) == [
        f"ddp: no baseline; the only run has 4 ranks ({paths[0]}); also give a run with fewer ranks"
    ]


def test_one_number_of_ranks_twice(results):
    paths = results([step(1, 1.0, 512)], [step(2, 1.0, 512)], [step(2, 0.9, 512)])
    assert problems(paths) == [f"ddp: 2 ranks appear twice ({paths[1]} and {paths[2]}); give one run per rank count"]


def test_different_models(results):
    other = {
        **CONFIG,
        "model": {"n_layers": 3, "hidden_sz": 64, "source": "elsewhere"},
        "performance": {"precision": "bf16"},
    }
    paths = results([step(1, 1.0, 512)], [step(2, 1.0, 512, config=other)])
    both = f"in {paths[0]}, {{}} in {paths[1]}; only the number of ranks may differ"
    assert problems(paths) == [
        f"ddp: model.n_layers differs: 2 {both.format(3)}",
        f"ddp: performance.precision differs: 'fp32' {both.format(repr('bf16'))}",
    ]


def test_batches_that_are_neither_weak_nor_strong(results):
    paths = results([step(1, 1.0, 512)], [step(2, 1.0, 1024)], [step(4, 1.0, 1024)])
    (line,) = problems(paths)
    assert line.startswith(
        "ddp: tokens per step are neither the same (strong scaling) nor proportional to the ranks (weak)"
    )
    assert line.endswith(": 512 on 1 ranks, 1,024 on 2 ranks, 1,024 on 4 ranks")


def test_the_names_are_those_of_the_benchmarks_rows():
    """What a results.json states of a step: the row, its timing in place, the resolved config and its estimate."""
    job = Job.load(str(Path(__file__).parents[2] / "configs" / "bench" / "cpu_tiny.yaml"))
    ours = {*step(1, 1.0, 512)} - {"config", "predicted_step_s"}
    assert ours <= {*StepRow._fields, *Timing._fields}
    assert all(_at(job.to_config(), path) for path in ("model.n_layers", "data.seqlen", "performance.precision"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranks": 0}, "steps[0].ranks: must be greater than 0 (got 0)"),
        ({"ranks": 1.5}, "steps[0].ranks: expected a whole number (got 1.5)"),
        ({"ranks": True}, "steps[0].ranks: expected a whole number (got true)"),
        ({"median_s": None}, "steps[0].median_s: expected a number (got nothing)"),
        ({"median_s": float("nan")}, "steps[0].median_s: expected a finite number (got nan)"),
        ({"predicted_step_s": "soon"}, "steps[0].predicted_step_s: expected a number (got 'soon')"),
        ({"allocated_peak_bytes": 5}, "steps[0].allocated_peak_bytes: expected a list (got 5)"),
        ({"reserved_peak_bytes": [-1]}, "steps[0].reserved_peak_bytes[0]: must be at least 0 (got -1)"),
        ({"config": None}, "steps[0].config: expected a mapping (got nothing)"),
        ({"layout": 3}, "steps[0].layout: expected text (got 3)"),
    ],
)
def test_wrong_keys_are_named_with_their_file(results, change, problem):
    paths = results([step(1, 1.0, 512) | change])
    assert problems(paths) == [f"{paths[0]}: {problem}"]


def test_files_that_are_no_results(results, tmp_path):
    assert problems(results([], schema="3dtrn/1"))[0].endswith(
        "schema: expected '3dtrn-bench/1' (got '3dtrn/1'); give results.json of `3dtrn bench`"
    )
    assert problems(results([]))[0].endswith("steps: expected measured steps (got none)")
    assert problems(results(["x"]))[0].endswith("steps[0]: expected a mapping (got 'x')")
    for text, words in (("[]", "schema: expected"), ("{", "not JSON"), ("[" * 100_000, "not JSON")):
        path = tmp_path / "bad.json"
        path.write_text(text)
        assert words in problems([str(path)])[0]
    assert len(problems([str(tmp_path / "a.json"), str(tmp_path / "b.json")])) == 2
