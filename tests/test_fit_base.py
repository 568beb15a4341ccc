"""The factor of a base profile, which any trainer without a profile of its own has (benchmarks/fit_constants.py)."""

from __future__ import annotations

from math import log

import fit_constants
import pytest
from fit_constants import Run


def run(*names):
    return Run("id", None, 1.0, 1.0, names, guessed=False, model="m", release="r", nvidia=False)


def test_it_is_the_geometric_mean_of_the_trainers_that_extend_it():
    """FSDP 2 takes 1.02 times the kernels' time under accelerate, 1.10 under torchtitan: sqrt(1.02 * 1.10) = 1.0592 under others.

    A release of torchtitan has no vote of its own, nor has nanotron, which extends another profile.
    """
    x = {
        ("factor", "accelerate"): log(1.02),
        ("factor", "torchtitan"): log(1.10),
        ("factor", "torchtitan@0.1"): log(1.03),
        ("factor", "nanotron"): log(1.5),
    }
    found = fit_constants.constants(x).compute_factor
    assert found["fsdp2"] == pytest.approx(1.0592, abs=1e-4)
    assert found["torchtitan@0.1"] == pytest.approx(1.10 * 1.03)
    assert fit_constants.constants(x | {("factor", "fsdp2"): log(0.9)}).compute_factor["fsdp2"] == pytest.approx(0.9)


def test_a_mean_has_no_vote_in_another():
    """Nothing ran XLA's own profile: it is as paxml, which extends it, and FSDP 2, which it extends, is as accelerate alone."""
    found = fit_constants.constants({("factor", "accelerate"): log(1.02), ("factor", "paxml"): log(1.2)}).compute_factor
    assert {name: round(found[name], 4) for name in ("xla", "fsdp2")} == {"xla": 1.2, "fsdp2": 1.02}


def test_few_runs_of_a_base_profile_do_not_speak_for_it():
    """Two runs of one trainer are not all trainers; a trainer's own factor may stand on one run, held by its prior."""
    few = fit_constants.without_few([run(("factor", "fsdp2"))] * 2 + [run(("factor", "nanotron"))])
    assert [one.names for one in few] == [(), (), (("factor", "nanotron"),)]
    enough = fit_constants.without_few([run(("factor", "fsdp2"))] * fit_constants.FEWEST)
    assert {one.names for one in enough} == {(("factor", "fsdp2"),)}


def test_megatron_is_the_reference():
    assert not fit_constants.REFERENCE & fit_constants.base_profiles()
    assert {"fsdp2", "deepspeed", "torch"} <= fit_constants.base_profiles()
