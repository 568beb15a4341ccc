"""`3dtrn CONFIG --calibrate FILE`: the factor by hand, where it acts, what is refused."""

import json
import runpy
from math import log
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steptime import Job, estimate
from steptime.answer.assumptions import assumptions
from steptime.answer.evidence import unjudged
from steptime.base.config import ConfigError
from steptime.commands import cli
from steptime.software.calibration import Calibration, factor_of, slowdown
from steptime.validation.calibrate import calibrated, runs

ROOT = Path(__file__).parents[1]
PLANS = ["llama3_70b", "llama3_8b_fsdp", "llama2_7b_1gpu", "gpt3_175b_a100", "llama3_70b_cross_dc"]
MEASURED = "tests/data/calibrate/measured.yaml"
SMALL = {
    "model": "llama3-8b",
    "parallelism": {"tp": 1, "pp": 1, "dp": 8},
    "data": {"gbs": 128, "seqlen": 8192, "microbatch_sz": 1},
    "hardware": "dgx-h100",
}


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def run(capsys):
    def call(*args):
        code = cli.main(list(map(str, args)))
        return (code, *capsys.readouterr())

    return call


def write(tmp_path, entries):
    path = tmp_path / "measured.yaml"
    path.write_text(entries if isinstance(entries, str) else yaml.safe_dump(entries), encoding="utf-8")
    return str(path)


# --- the factor ------------------------------------------------------------------------------------------------------------


def test_the_factor_by_hand():
    """One run that takes 1.2 x the estimate: 1.2 ** (1 / 1.25) = exp(0.182322 * 0.8) = 1.15704."""
    assert factor_of([1.2]).value == pytest.approx(1.15704, abs=1e-5)
    # two runs at 1.1 and 1.3: exp((0.0953102 + 0.2623643) / 2.25) = exp(0.1589664) = 1.17230
    assert factor_of([1.1, 1.3]).value == pytest.approx(1.17230, abs=1e-5)
    assert factor_of([1.0]) == (1.0, False)


def test_bounds_hold():
    assert factor_of([3.0]) == (1.5, True)
    assert factor_of([0.1, 0.2]) == (0.67, True)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20))
def test_the_factor_lies_between_one_and_the_runs(ratios):
    value = factor_of(ratios).value
    assert min(1.0, *ratios) - 1e-12 <= value <= max(1.0, *ratios) + 1e-12
    assert 0.67 <= value <= 1.5


@given(st.floats(0.8, 1.25), st.integers(1, 10))
def test_more_runs_are_believed_more(ratio, n):
    assert abs(factor_of([ratio] * (n + 1)).value - ratio) <= abs(factor_of([ratio] * n).value - ratio) + 1e-12


# --- where it acts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_every_second_of_the_step_scales(plan, factor):
    """All but the fixed start of a collective (8 to 25 us): at most 0.5 % of the step; parts sum to the step; memory stays."""
    plain = estimate(Job.load(f"configs/{plan}.yaml"))
    found = estimate(plain.job.replace(**{"performance.calibration": {"factor": factor}}))
    assert found.step_s == pytest.approx(factor * plain.step_s, rel=5e-3)
    assert sum(found.time.parts_s.values()) == pytest.approx(found.step_s, rel=1e-9)
    for part in ("gemm", "attention", "memory_bound", "optimizer"):
        if part in plain.time.parts_s:
            assert found.time.parts_s[part] == pytest.approx(factor * plain.time.parts_s[part], rel=1e-6)
    assert found.memory == plain.memory
    assert found.flops == plain.flops
    assert found.throughput.peak_flops_used == plain.throughput.peak_flops_used


@pytest.mark.parametrize("plan", PLANS)
def test_the_evidence_is_that_of_the_plan_without_it(plan):
    """The runs nearby are as near; the interval is as wide as before, in logarithms, around the calibrated step."""
    plain = estimate(Job.load(f"configs/{plan}.yaml"))
    found = estimate(plain.job.replace(**{"performance.calibration": {"factor": 1.3}}))
    assert found.time.basis == plain.time.basis
    assert log(found.time.step_s_p90 / found.time.step_s_p10) == pytest.approx(
        log(plain.time.step_s_p90 / plain.time.step_s_p10)
    )
    assert found.time.step_s_p10 * found.time.step_s_p90 == pytest.approx(found.step_s**2)


def test_a_run_calibrated_by_itself_comes_out_as_measured_but_for_the_shrinkage(tmp_path):
    job = Job.load(yaml.safe_dump(SMALL))
    plain = estimate(job).step_s
    path = write(tmp_path, [{"config": SMALL, "step_s": 1.1 * plain}])
    assert estimate(calibrated(job, path)).step_s == pytest.approx(1.1**0.8 * plain, rel=1e-3)


def test_tokens_per_s_say_the_same_as_seconds(tmp_path):
    """128 x 8192 tokens over 8 devices at 10,000 tokens/s each take 13.1072 s."""
    one = runs(write(tmp_path, [{"config": SMALL, "tokens_per_s_per_device": 10_000}]))
    other = runs(write(tmp_path, [{"config": SMALL, "step_s": "13.1072 s"}]))
    assert one[0].ratio == pytest.approx(other[0].ratio, rel=1e-12)


def test_runs_elsewhere_do_not_count(tmp_path):
    """fp16 rows and rows on another accelerator leave the factor alone."""
    other = SMALL | {"hardware": "dgx-a100-80"}
    half = SMALL | {"performance": {"precision": "fp16"}}
    entries = [{"config": config, "step_s": 30} for config in (other, half)]
    job, entry = Job.load(yaml.safe_dump(SMALL)), {"config": SMALL, "step_s": 14}
    assert calibrated(job, write(tmp_path, [entry])) == calibrated(job, write(tmp_path, [*entries, entry]))


@pytest.mark.parametrize(
    "own",
    [
        {"performance": {"cpu_offload": {"optimizer": 1.0}}},
        {"model": {"preset": "llama3-8b", "linear_attention": {}}, "performance": {"software": "megatron-core"}},
    ],
)
def test_runs_of_a_kind_that_few_published_are_evidence_for_it(tmp_path, own):
    """The host's optimizer, or linear attention: extrapolated, unless one of the team's own runs had it."""
    job = Job.load(yaml.safe_dump(SMALL | own))
    plain = estimate(job).time.basis
    [line] = unjudged(job).values()
    assert line in plain.extrapolation
    without, with_it = (
        estimate(calibrated(job, write(tmp_path, [{"config": config, "step_s": 14}]))).time.basis
        for config in (SMALL, SMALL | own)
    )
    assert without == plain
    assert with_it.extrapolation == [other for other in plain.extrapolation if other != line]
    assert (with_it.evidence == "extrapolated") == bool(with_it.extrapolation)


def test_it_survives_the_echo_and_a_change():
    job = calibrated(Job.load("configs/llama3_70b.yaml"), MEASURED)
    again = Job.load(json.dumps(job.to_config()))
    assert again == job
    assert slowdown(again.performance.calibration) == slowdown(job.performance.calibration) != 1.0
    assert slowdown(job.replace(**{"parallelism.dp": 16, "data.gbs": 1024}).performance.calibration) == slowdown(
        job.performance.calibration
    )


def test_without_it_nothing_is_said():
    job = Job.load("configs/llama3_70b.yaml")
    assert slowdown(job.performance.calibration) == 1.0
    assert "calibration" not in job.to_config()["performance"]
    assert not [line for line in assumptions(job) if "calibrat" in line]


# --- the command line ------------------------------------------------------------------------------------------------------


def test_it_is_said_in_text_and_json(run):
    code, out, err = run("configs/llama3_70b.yaml", "--calibrate", MEASURED)
    text = " ".join(out.split())
    assert (code, err) == (0, "")
    assert f"from 2 runs of {MEASURED}" in text
    assert "shrunk by 2 / (2 + 0.25)" in text
    document = json.loads(run("configs/llama3_70b.yaml", "--json", "--calibrate", MEASURED)[1])
    section = document["config"]["performance"]["calibration"]
    assert section["source"] == MEASURED
    assert len(section["ratios"]) == 2
    assert section["factor"] == factor_of(section["ratios"]).value
    assert any(line.startswith("calibrated: ") for line in document["assumptions"])
    plain = json.loads(run("configs/llama3_70b.yaml", "--json")[1])
    assert document["time"]["step_s"] / plain["time"]["step_s"] == pytest.approx(section["factor"], rel=3e-3)


def test_a_factor_at_its_bound_is_called_so(run, tmp_path):
    path = write(tmp_path, [{"config": SMALL, "step_s": 1000}])
    text = " ".join(run("configs/llama3_70b.yaml", "--calibrate", path)[1].split())
    assert "link times x 1.500" in text
    assert "more than the allowed calibration range (0.67 to 1.5)" in text


def test_a_factor_of_ones_own_is_bounded_and_said():
    assert Calibration(factor=1.1).words == [
        "calibrated: modeled kernel and link times x 1.100, set in the plan",
        "calibrated: the 80 % interval keeps its width and is centered on the calibrated step",
    ]
    with pytest.raises(ConfigError, match=r"factor: must be at most 1\.5 \(got 2\)"):
        Calibration(factor=2.0)


def test_no_run_in_this_place_is_an_error_that_says_which_there_are(run):
    code, out, err = run("configs/gpt2_1gpu.yaml", "--calibrate", MEASURED)
    assert (code, out) == (2, "")
    assert err.startswith(f"{MEASURED}: no run on ")
    assert "h100-sxm5-80 bf16 (2)" in err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected a list of {config, step_s} (got nothing)"),
        ("[]", "expected a list of {config, step_s} (got a list of 0)"),
        ("a: 1", "expected a list of {config, step_s} (got a mapping)"),
        ("- [", "line 2, column 1: "),
        ("- 3", "[0]: expected a mapping (got 3)"),
        ("- {config: x.yaml}", "[0].step_s: set either step_s or tokens_per_s_per_device"),
        ("- {config: x.yaml, step_s: 1, tokens_per_s_per_device: 2}", "[0].step_s: set either"),
        ("- {config: x.yaml, step_s: 1}", "x.yaml: no such file"),
        ("- {confg: x.yaml, step_s: 1}", "[0].confg: unknown key (got 'x.yaml'); did you mean 'config'?"),
        ("- {config: {model: llama3-8c}, step_s: 1}", "[0].config: model.preset: "),
        ("- {config: {}, step_s: 0}", "[0].step_s: must be greater than 0 (got 0)"),
        ("- {config: {}, step_s: 3 GB}", "[0].step_s: unknown unit 'GB'"),
        ("- {config: {}, step_s: .nan}", "[0].step_s: "),
        ("- {config: {}, step_s: true}", "[0].step_s: "),
    ],
)
def test_a_bad_file_is_lines_not_a_traceback(text, problem, run, tmp_path):
    path = write(tmp_path, text)
    code, out, err = run("configs/llama3_70b.yaml", "--calibrate", path)
    assert (code, out) == (2, "")
    assert problem in err
    assert all(line.startswith(path) for line in err.splitlines())


def test_all_problems_of_a_file_are_told_at_once(run, tmp_path):
    path = write(tmp_path, "- {config: a.yaml, step_s: 1}\n- {config: b.yaml, step_s: 1}")
    err = run("configs/llama3_70b.yaml", "--calibrate", path)[2]
    assert ["a.yaml" in err, "b.yaml" in err, len(err.splitlines())] == [True, True, 2]


def test_a_missing_file_standard_input_and_a_calibrated_config_are_refused(run, tmp_path):
    assert run("configs/llama3_70b.yaml", "--calibrate", "no.yaml")[2] == "no.yaml: no such file\n"
    assert run("configs/llama3_70b.yaml", "--calibrate", "-")[2].startswith("--calibrate -: not supported")
    twice = SMALL | {"performance": {"calibration": {"factor": 1.1}}}
    err = run("configs/llama3_70b.yaml", "--calibrate", write(tmp_path, [{"config": twice, "step_s": 9}]))[2]
    assert "performance.calibration: remove it" in err
    code, out, err = run(
        "configs/llama3_70b.yaml", "--set", "performance.calibration.factor=1.1", "--calibrate", MEASURED
    )
    assert (code, out) == (2, "")
    assert err == "--calibrate: the plan already has performance.calibration; use only one of them\n"


# --- the benchmark ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(ROOT / "benchmarks" / "calibrate.py"))


def test_siblings_are_other_cells_of_the_family(bench):
    """Two cells that take 1.1 and 1.2 x their estimates of 10 s, a twin of the first cell, and a stranger."""

    def case(family, cell, measured_s):
        return bench["Case"]("fit", "NeMo", (family,), (cell,), measured_s, 10.0, 5.0)

    rows = [case("a", "1", 11.0), case("a", "2", 12.0), case("a", "1", 11.0), case("b", "3", 20.0)]
    found = bench["errors"](rows, bench["WHOLE"], 0.0, single=True)
    # row 1 by row 2: 12 / 11 - 1; row 2 by rows 1 and 3: 1 - 11 / 12; the stranger has no sibling
    assert found == pytest.approx([1 / 11, 1 / 12, 1 / 11])
    assert bench["errors"](rows, bench["WHOLE"], None, single=False) == pytest.approx([1 / 11, 1 / 6, 1 / 11])


def test_compute_alone_scales_compute_alone(bench):
    """Of 10 s, 5 s are compute: a run of 11 s asks for 1.2 on these."""
    ratio, step = bench["COMPUTE_ONLY"]
    case = bench["Case"]("fit", "NeMo", ("a",), ("1",), 11.0, 10.0, 5.0)
    assert ratio(case) == pytest.approx(1.2)
    assert step(case, 1.2) == pytest.approx(11.0)


def test_figures_of_a_slice(bench):
    assert bench["figures"]([0.01, 0.02, 0.03]) == "3 | 2.00 | 2.00 | 3.00"
    assert bench["figures"]([]) == "0 | - | - | -"
