"""Noise floor, ratios, regret, bands, mechanisms: hand-made rows whose answers stand in the comments."""

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from validation_rows import judged

from steptime.validation import bands, mechanisms, ratios, regret, yardsticks
from steptime.validation.ci_jobs import AllocatorMemory

KINDS = {kind.name: kind for kind in ratios.RATIO_KINDS}


# --- noise floor ---------------------------------------------------------------------------------------------------------


def test_pairs_within_a_release_and_across():
    """10 and 11 s in one release: 1 / 10.5. 12 s in the next: 2 / 11 and 1 / 11.5."""
    rows = [
        judged("a", 10.0),
        judged("b", 11.0),
        judged("c", 12.0, framework="NeMo 24.09"),
        judged("d", 99.0, tp=8),
    ]
    cells = yardsticks.cells_of(rows)
    assert [error for _, error in yardsticks.pairs(cells, same_release=True)] == pytest.approx([1 / 10.5])
    assert sorted(error for _, error in yardsticks.pairs(cells, same_release=False)) == pytest.approx(
        [1 / 11.5, 2 / 11]
    )


def test_other_settings_in_one_release_are_no_noise():
    rows = [judged("a", 10.0), judged("b", 11.0, overlap_notes="no TP overlap")]
    assert yardsticks.pairs(yardsticks.cells_of(rows), same_release=True) == []
    later = rows[1]._replace(row=judged("b", framework="NeMo 25", overlap_notes="no TP overlap").row)
    assert len(yardsticks.pairs(yardsticks.cells_of([rows[0], later]), same_release=False)) == 1


def test_a_row_by_the_median_of_other_releases():
    """12 s; other releases have 10, 11 and 15: median 11, 11 / 12 - 1. One's own release does not count."""
    rows = [
        judged("a", 12.0),
        judged("b", 12.5),
        *(judged(f"o{i}", s, framework=f"NeMo 25.0{i}") for i, s in enumerate((10.0, 11.0, 15.0))),
    ]
    found = {item.j.row.id: item.other_s for item in yardsticks.lookups(yardsticks.cells_of(rows))}
    assert found["a"] == found["b"] == 11.0
    assert found["o0"] == 12.25  # the median of 11, 12, 12.5 and 15


def test_noise_beside_the_estimate_on_the_same_rows():
    """Two releases, 10 and 12 s, estimated at 11: lookups err by .2 and 1/6, the estimate by .1 and 1/12."""
    rows = [judged("a", 10.0, 11.0), judged("b", 12.0, 11.0, framework="NeMo 25"), judged("c", 5.0, 9.0, tp=8)]
    found = yardsticks.noise(rows)
    assert found["other_release"]["rows"] == 1
    assert found["other_release"]["max"] == pytest.approx(2 / 11)
    assert found["lookup_on_test"]["mean"] == pytest.approx((0.2 + 1 / 6) / 2)
    assert found["estimate_on_test"]["mean"] == pytest.approx((0.1 + 1 / 12) / 2)
    assert found["same_release"]["max"] is None


def test_noise_of_mixtures_of_experts_stands_apart():
    """10 and 14 s in two releases: 4 / 12. Other trainers' do not count, and neither group is in the dense floor."""
    rows = [
        judged("a", 10.0, n_experts=8),
        judged("b", 14.0, n_experts=8, framework="NeMo 25"),
        judged("c", 10.0, n_experts=8, file="native"),
        judged("d", 19.0, n_experts=8, file="native", framework="NeMo 25"),
    ]
    found = yardsticks.noise(rows)
    assert found["moe_other_release"]["rows"] == 1
    assert found["moe_other_release"]["max"] == pytest.approx(1 / 3)
    assert found["other_release"]["rows"] == 0


def test_rows_that_do_not_count_make_no_noise():
    rows = [
        judged("a", 10.0, quality="C"),
        judged("b", 12.0, task="sft"),
        judged("c", None),
        judged("d", 9.0, n_experts=8),
    ]
    assert yardsticks.cells_of(rows) == {}
    assert len(yardsticks.cells_of(rows, dense=False)) == 1


# --- ratios --------------------------------------------------------------------------------------------------------------


def test_weak_scaling_by_hand():
    """64 to 128 devices, two sequences each: measured 10 to 11, predicted 8 to 8.4. (8.4 / 8) / (11 / 10) - 1."""
    rows = [
        judged("b", 11.0, 8.4, n_gpus=128, global_batch_size=256),
        judged("a", 10.0, 8.0),
        judged("c", 10.0, 8.0, n_gpus=128),
        judged("d", 50.0, 8.0, n_gpus=256, global_batch_size=512, framework="NeMo 25"),
        judged("e", 50.0, 8.0, n_gpus=256, global_batch_size=512, micro_batch_size=2),
    ]
    found = ratios.ratio_errors(rows, KINDS["weak_scaling"])
    assert [error for _, error in found] == pytest.approx([1.05 / 1.1 - 1.0])


def test_strong_scaling_by_hand():
    """64 to 128 devices, the same batch: measured 10 to 6, predicted 9 to 5.4: no error, as both are a tenth too fast."""
    rows = [judged("a", 10.0, 9.0), judged("b", 6.0, 5.4, n_gpus=128), judged("c", 6.0, 6.0, n_gpus=128, vpp=2)]
    found = ratios.ratio_errors(rows, KINDS["strong_scaling"])
    assert [error for _, error in found] == pytest.approx([0.0])


def test_layouts_by_hand():
    """tp 4 to tp 8: measured 10 to 12, predicted 10 to 15: 1.25. An empty vpp is 1, so `c` is no other layout than `a`."""
    rows = [judged("a", 10.0, 10.0), judged("b", 12.0, 15.0, tp=8), judged("c", 10.0, 10.0, vpp=1)]
    found = ratios.ratio_errors(rows, KINDS["layout"])
    assert sorted(error for _, error in found) == pytest.approx([1 / 1.25 - 1.0, 0.25])
    recomputed = judged("d", 12.0, 15.0, tp=8, recompute="full")
    assert ratios.ratio_errors([rows[0], recomputed], KINDS["layout"]) == []


def test_a_series_has_one_vote_and_test_pairs_are_of_two_test_rows():
    """Series one: tp 1, 2, 4 with ratios right (3 pairs); series two: one pair .2 off. Mean of two series: .1."""
    first = [judged(f"a{tp}", 10.0, 10.0, tp=tp) for tp in (1, 2, 4)]
    second = [judged("b1", 10.0, 10.0, hidden=1), judged("b2", 10.0, 12.0, hidden=1, tp=8, split="fit")]
    found = ratios.ratios([*first, *second])["layout"]["headline"]
    assert (found["all"]["rows"], found["all"]["cells"]) == (4, 2)
    assert found["all"]["mean"] == pytest.approx(0.1)
    assert (found["test"]["rows"], found["test"]["mean"]) == (3, 0.0)


def test_a_common_factor_leaves_ratios_alone():
    rows = [judged("a", 10.0, 9.0), judged("b", 12.0, 13.0, tp=8)]
    slow = [j._replace(predicted_step_s=7.0 * j.predicted_step_s) for j in rows]
    before, after = (ratios.ratio_errors(some, KINDS["layout"]) for some in (rows, slow))
    assert [error for _, error in after] == pytest.approx([error for _, error in before])


# --- regret --------------------------------------------------------------------------------------------------------------


def test_kendall_tau_by_hand():
    """1 2 3 4 against 1 3 2 4: five pairs agree, one does not: 4 / 6. With ties, 1 1 2 against 1 2 3: 2 / sqrt(2 * 3)."""
    assert regret.kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert regret.kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(6))
    assert regret.kendall_tau([1, 1], [1, 2]) is None
    assert regret.kendall_tau([], []) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_kendall_tau_is_a_correlation(pairs):
    a, b = zip(*pairs, strict=True)
    tau = regret.kendall_tau(a, b)
    if tau is None:
        assert len(set(a)) == 1 or len(set(b)) == 1
        return
    assert -1.0 - 1e-12 <= tau <= 1.0 + 1e-12
    assert regret.kendall_tau(b, a) == pytest.approx(tau)
    assert regret.kendall_tau(a, [-x for x in b]) == pytest.approx(-tau)
    assert regret.kendall_tau([3 * x + 1 for x in a], b) == pytest.approx(tau)


def test_kendall_tau_without_ties_counts_inversions():
    for order in permutations(range(5)):
        inversions = sum(order[i] > order[j] for i in range(5) for j in range(i + 1, 5))
        assert regret.kendall_tau(range(5), order) == pytest.approx(1 - 2 * inversions / 10)


def sweep(*, verdicts=None, out=()):
    """Ten layouts, measured 10, 11 .. 19 s; predicted alike but that the third is predicted fastest."""
    verdicts = verdicts or {}
    rows = []
    for i in range(10):
        predicted = 1.0 if i == 2 else 10.0 + i
        measured = None if i in out else 10.0 + i
        made = judged(f"r{i}", measured, predicted, micro_batch_size=i + 1, verdict=verdicts.get(i, "fits"))
        rows.append(made._replace(row=made.row._replace(file="out_of_memory")) if i in out else made)
    return rows


def test_regret_by_hand():
    """The pick takes 12 s, the best 10: .2. Two of 45 pairs are the wrong way round: (43 - 2) / 45."""
    (found,) = regret.sweeps(sweep())
    assert (found.layouts, found.ran, found.pick) == (10, 10, "r2")
    assert found.regret == pytest.approx(0.2)
    assert found.tau == pytest.approx(41 / 45)
    assert not found.first
    assert found.in_three  # r2, then r0 and r1
    assert (found.tied, found.best_tied) == (0, False)


def test_layouts_that_measured_pairs_do_not_tell_apart_are_tied(monkeypatch):
    """Within ln 1.10, the pick's 10 s are tied with 10.5 and 11 s, not with 12 s."""
    monkeypatch.setattr(regret, "layouts_within", lambda: math.log(1.10) + 1e-9)
    layouts = [
        regret.SweepLayout("r2", 10.0, 12.0, "fits"),
        regret.SweepLayout("r0", 10.5, 10.0, "fits"),
        regret.SweepLayout("r1", 11.0, 11.0, "fits"),
        regret.SweepLayout("r3", 12.0, 13.0, "fits"),
    ]
    found = regret._sweep(sweep()[0], layouts)
    assert (found.tied, found.best_tied, found.first) == (2, True, False)


def test_a_pick_that_does_not_fit_is_no_pick():
    """r2 is called too large and r0 tight: the pick is r1, 11 s."""
    (found,) = regret.sweeps(sweep(verdicts={2: "does_not_fit", 0: "tight"}))
    assert (found.pick, found.regret) == ("r1", pytest.approx(0.1))
    assert not found.in_three


def test_tight_layouts_are_picked_where_none_is_called_fits():
    calls = dict.fromkeys(range(10), "does_not_fit") | {5: "tight", 7: "tight"}
    (found,) = regret.sweeps(sweep(verdicts=calls))
    assert (found.pick, found.regret) == ("r5", pytest.approx(0.5))
    (none,) = regret.sweeps(sweep(verdicts=dict.fromkeys(range(10), "does_not_fit")))
    assert (none.pick, none.regret, none.out_of_memory) == ("", None, False)


def test_a_pick_that_ran_out_of_memory_has_no_regret_but_is_counted():
    (found,) = regret.sweeps(sweep(out={2}))
    assert (found.out_of_memory, found.regret, found.ran) == (True, None, 9)
    figures = regret.figures([found])
    assert (figures["picks_out_of_memory"], figures["median"]) == (1, None)
    assert figures["worst_sweeps"][0]["pick"] == "r2"


def test_runs_of_one_layout_are_one_layout():
    """r2 again at 14 s: its median is 13. Nine layouts are too few for a sweep."""
    again = judged("again", 14.0, 1.0, micro_batch_size=3)
    (found,) = regret.sweeps([*sweep(), again])
    assert (found.layouts, found.regret) == (10, pytest.approx(0.3))
    assert regret.sweeps(sweep()[:9]) == []
    assert regret.sweeps([*sweep()[:9], again]) == []


def test_jobs_are_kept_apart():
    other = [j._replace(row=j.row._replace(cells=j.row.cells | {"seq_len": "8192"})) for j in sweep()]
    found = regret.regret([*sweep(), *other])["headline"]
    assert (found["sweeps"], found["median"], found["worst"]) == (2, pytest.approx(0.2), pytest.approx(0.2))


# --- fits or not ---------------------------------------------------------------------------------------------------------


def run(occupancy, *, out=False, source="hagemann"):
    file = "out_of_memory" if out else "other"
    return judged(f"{source}{occupancy}{out}", file=file, occupancy=occupancy, source_group=source)


def test_bands_by_hand():
    """.85 to 1.15: of three that ran, .9 and 1.0 are called right; of two that ran out, 1.1 is: (2/3 + 1/2) / 2."""
    runs = [run(0.5), run(0.9), run(1.0), run(1.04), run(0.97, out=True), run(1.1, out=True), run(2.0, out=True)]
    found = bands.figures(runs)
    assert [band["ran"] + band["ran_out"] for band in found["bands"]] == [1, 1, 3, 1, 1]
    assert found["close"]["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["bands"][1]["balanced_accuracy"] is None
    assert found["bands"][2]["balanced_accuracy"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["bands"][4]["high"] is None
    assert found["false_fits"]["rows"] == 1
    assert found["false_fits"]["of_all"] == pytest.approx(1 / 7)
    assert found["false_fits"]["of_ran_out"] == pytest.approx(1 / 3)
    assert found["false_fits"]["of_called_fits"] == pytest.approx(1 / 4)


def test_the_largest_source_and_the_others():
    """Runs of a source without any that ran out of memory say nothing."""
    runs = [run(0.5), run(1.5, out=True), run(0.6, source="x"), run(1.2, out=True, source="x"), run(0.7, source="y")]
    found = bands.fits_by_band(runs)
    assert [found[who]["all"]["ran"] + found[who]["all"]["ran_out"] for who in ("all", "hagemann", "others")] == [
        4,
        2,
        2,
    ]


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans()), max_size=20))
def test_bands_hold_every_run_once(drawn):
    runs = [run(ratio, out=out) for ratio, out in drawn]
    found = bands.figures(runs)
    for key in ("ran", "ran_right", "ran_out", "ran_out_right"):
        assert sum(band[key] for band in found["bands"]) == found["all"][key]
    assert found["all"]["ran"] + found["all"]["ran_out"] == len(runs)


# --- memory by mechanism -------------------------------------------------------------------------------------------------


def remembered(name, error, metric, parallelism, performance=None, **cells):
    more = {
        "measured_bytes": 1.0,
        "predicted_bytes": 1.0 + error,
        "metric": metric,
        "config": {"parallelism": parallelism, "performance": performance or {}},
    }
    return judged(name, model_name=name, more=more, **cells)


def test_mechanisms_by_hand():
    rows = [
        remembered("a", 0.1, "allocated", {"tp": 2, "pp": 2, "dp": 4, "vpp": 2, "zero_level": 1}),
        remembered(
            "b", -0.3, "allocated", {"tp": 1, "pp": 2, "dp": 1, "zero_level": 1}, {"recompute": {"granularity": "full"}}
        ),
        remembered("c", 0.5, "nvidia-smi", {"tp": 1, "pp": 1, "dp": 8, "fsdp": {}}, n_experts=8),
        remembered("d", 0.7, "allocated", {"tp": 1, "pp": 1, "cp": 2}, file="megatron_ci")._replace(
            allocator=AllocatorMemory(None, None, "")
        ),
        remembered("e", -0.2, "allocated", {"tp": 1, "pp": 1}, file="megatron_ci")._replace(
            allocator=AllocatorMemory(None, None, ""), config={"model": {"moe": {"n_experts": 8}}}
        ),
        judged("no memory", 1.0, 1.0),
    ]
    found = mechanisms.memory_by_mechanism(rows)
    assert found["mixture of experts"]["ci"]["rows"] == 1  # named by the job's config, no column of the row
    assert found["mixture of experts"]["ci"]["mean"] == pytest.approx(0.2)
    assert found["pipeline, interleaved"]["allocated"]["mean"] == pytest.approx(0.1)
    assert found["pipeline, not interleaved"]["allocated"]["bias"] == pytest.approx(-0.3)
    assert found["recompute full"]["allocated"]["rows"] == found["ZeRO 1"]["allocated"]["rows"] == 1
    assert found["recompute none"]["allocated"]["rows"] == found["recompute none"]["otherwise"]["rows"] == 1
    assert found["FSDP"]["otherwise"]["mean"] == found["mixture of experts"]["otherwise"]["mean"] == pytest.approx(0.5)
    assert found["context parallel"]["ci"]["mean"] == pytest.approx(0.7)
    assert found["context parallel"]["allocated"]["rows"] == found["fp8"]["allocated"]["rows"] == 0
    assert found["fp8"]["allocated"]["mean"] is None


def test_no_run_is_printed_as_unproved():
    from steptime.report import analyses

    found = mechanisms.memory_by_mechanism([remembered("a", 0.1, "allocated", {"tp": 2})])
    (table,) = analyses.mechanisms({"memory_by_mechanism": found})
    lines = {row[0]: row for row in table.rows}
    assert lines["context parallel"][1:3] == ["0", "not verified"]
    assert lines["tensor parallel"][1:3] == ["1", "10.0 %"]
