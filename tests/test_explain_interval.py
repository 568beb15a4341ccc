"""`3dtrn explain PLAN interval`: the printed factors give the printed ends, and these the interval of the report."""

from __future__ import annotations

import re
from math import exp, hypot

import pytest

from steptime import Job, estimate
from steptime.answer.interval import memory_interval, step_interval
from steptime.commands.cli import main
from steptime.report.explain import explain, names

PLANS = {
    "near": {"performance": {"software": "torchtitan"}, "hardware": "dgx-h100"},
    "far": {"performance": {"software": "torchtitan"}, "hardware": "dgx-b300"},
    "never measured": {"performance": {"software": "megatron-core-fsdp2"}, "hardware": "mi355x-node"},
}


def answer(name):
    data = {"gbs": 128, "seqlen": 8192, "microbatch_sz": 1}
    return estimate(Job(model="llama3-8b", parallelism={"tp": 1, "pp": 1, "dp": 64}, data=data, **PLANS[name]))


def facts(found, name):
    """The lines of each label; those of a second kind under the same label with a 2."""
    (shown,) = explain(found, name)
    said = {}
    for fact in shown.facts:
        said[f"{fact.label} 2" if fact.label in said else fact.label] = fact.lines
    return shown.title, said


@pytest.mark.parametrize("plan", ["near", "far"])
@pytest.mark.parametrize(("name", "interval"), [("interval", step_interval), ("memory_interval", memory_interval)])
def test_the_printed_figures_give_the_interval(plan, name, interval):
    """factor x scale on either side, less and plus the margins in squares, are the ends; times the estimate, p10 and p90."""
    found = answer(plan)
    title, said = facts(found, name)
    span = interval(found.job)
    below, slow_below, low, above, slow_above, high = map(float, re.findall(r"[+-]?\d+\.\d+", said["ends"][0])[:6])
    assert low == pytest.approx(below * slow_below, abs=2e-4)
    assert high == pytest.approx(above * slow_above, abs=2e-4)
    margin = 0.0
    if said["margin"] != ["0: inside of what was measured"]:
        margin = float(said["margin"][-1].split()[-1])
        parts = [float(re.search(r"= ([0-9.]+)", line)[1]) for line in said["margin"][:-1]]
        assert margin == pytest.approx(hypot(*parts), abs=2e-4)
    assert len(said["margin"]) == (len(span.beyond) + 1 if span.beyond else 1)
    assert all(any(axis.text in line for line in said["margin"]) for axis in span.beyond)
    own, share, other, rest = re.match(r"\((\S+) x (\S+) \+ (\S+) x (\S+)\)", said["scale"][0]).groups()
    errors = [float(word) for word in re.findall(r"0\.\d{4}", said["mean error"][0])]
    assert (float(share), float(rest)) == tuple(errors)
    grown = re.search(r"\(1 \+ (\S+) x (\S+), ", said["scale"][0])
    per = 1.0 + float(grown[1]) * float(grown[2]) if grown else 1.0
    assert per * (float(own) * errors[0] + float(other) * errors[1]) == pytest.approx(slow_below, abs=2e-4)
    assert per * (float(own) * errors[1] + float(other) * errors[0]) == pytest.approx(slow_above, abs=2e-4)
    if "moved apart" not in said["ends"][0]:
        assert (low - margin, high + margin) == pytest.approx((span.low, span.high), abs=3e-4)
    of = found.time.step_s if name == "interval" else found.memory.peak_reserved_bytes
    ends = (found.time.step_s_p10, found.time.step_s_p90) if name == "interval" else None
    ends = ends or (found.memory.peak_reserved_bytes_p10, found.memory.peak_reserved_bytes_p90)
    assert (of * exp(span.low), of * exp(span.high)) == pytest.approx(ends)
    assert f"low {span.low:+.4f}, high {span.high:+.4f}" in said["width"][0]
    assert title.startswith("80 % interval of ")
    unit, digits = (1.0, 3) if name == "interval" else (2.0**30, 1)
    shown = [float(word) for word in re.findall(r"\d+\.\d+", said["interval"][0])]
    assert shown == pytest.approx([of / unit, *(end / unit for end in ends)], abs=0.6 * 10.0**-digits)


def test_the_weights_are_of_one_whole():
    """Two shares of 100 %; no run listed has more than its cell, and the nearest run of the report is among them."""
    found = answer("near")
    _, said = facts(found, "interval")
    near, groups = (float(share) for share in re.findall(r"([\d.]+) %", said["weight"][0]))
    assert near + groups == pytest.approx(100.0, abs=0.11)
    shares = [float(re.search(r"([\d.]+) % of the weight", line)[1]) for line in said["runs"][1:]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) < 100.0
    assert any(line.startswith(found.time.basis.nearest[0]["id"] + ":") for line in said["runs"])
    assert f"; {found.time.basis.n} within distance 1" in said["runs"][0]


def test_a_kind_that_was_not_measured_shows_both():
    """The interval holds that of the nearest measured kind and its own: both are written out."""
    found = answer("never measured")
    _, said = facts(found, "interval")
    span = step_interval(found.job)
    (low, high), (own_low, own_high) = (
        (float(words[2]), float(words[5]))
        for words in (re.findall(r"[+-]?\d+\.\d+", said[key][0]) for key in ("ends", "ends 2"))
    )
    assert said["kind"][0].startswith("the nearest that was measured: h100")
    assert said["kind 2"][0].startswith("the plan's own, which was not measured")
    margin = float(said["margin"][-1].split()[-1])
    assert span.low == pytest.approx(min(low, own_low) - margin, abs=3e-4)
    assert span.high == pytest.approx(max(high, own_high) + margin, abs=3e-4)


def test_it_is_listed_and_printed(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text("model: llama3-8b\nparallelism: {tp: 8, pp: 1, dp: 8}\ndata: {gbs: 64, seqlen: 8192, microbatch_sz: 1}\n"
                    "hardware: dgx-h100\n")  # fmt: skip
    assert {"interval", "memory_interval"} <= set(names(answer("near")))
    assert main(["explain", str(path), "interval"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("80 % interval of the step\n  interval ")
    assert max(map(len, out.splitlines())) <= 80
