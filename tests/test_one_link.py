"""DeepSpeed's ZeRO-3 between nodes is priced at one network link of a node, and says so."""

from __future__ import annotations

import re

import pytest

from steptime.answer.assumptions import assumptions, linked_ranks
from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.report.explain import explain

SAID = "one network link per node"


def zero3(devices: int = 16, software: str = "deepspeed") -> Job:
    config = {
        "model": "llama3-8b",
        "devices": devices,
        "parallelism": {"tp": 1, "pp": 1, "zero_level": 3},
        "performance": {"software": software},
        "data": {"gbs": 128, "seqlen": 4096, "microbatch_sz": 2},
        "hardware": {"node_type": "h100"},
    }
    return Job.load(config)


def test_the_page_of_a_collective_and_the_assumptions_name_the_link_and_its_source():
    """One link of 400 Gbit/s, of which a ring reaches 370/400 (data/machines: S72583): 50 GB/s x 0.925 = 46.25 GB/s.

    8 ranks of a node share it: with 8 links the bus bandwidth would be 370 GB/s.
    """
    job = zero3()
    assert linked_ranks(job) == 8
    (line,) = [line for line in assumptions(job) if line.startswith(SAID)]
    assert "all 8 ranks" in line
    assert "Narayanan et al. 2021, table 2" in line
    (page, *_) = explain(estimate(job), "block parameters")
    facts = {fact.label or "rate": " ".join(fact.lines) for fact in page.facts}
    assert facts["links"] == line
    assert float(re.search(r"bus bandwidth ([\d.]+) GB/s", facts["rate"])[1]) == pytest.approx(46.25, rel=0.01)


@pytest.mark.parametrize("job", [zero3(8), zero3(software="fsdp2")], ids=["one node", "all links"])
def test_a_job_on_all_links_or_on_one_node_says_nothing(job):
    assert linked_ranks(job) == 1
    assert not [line for line in assumptions(job) if line.startswith(SAID)]
    for name in ("dp_comm", "block parameters"):
        try:
            pages = explain(estimate(job), name)
        except LookupError:
            continue
        assert SAID not in str(pages)
