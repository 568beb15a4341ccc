"""Hosts of measured rows: how processes were started decides what a launch takes."""

from __future__ import annotations

import pytest
from own_rows import BASE

from steptime.validation import row_machine
from steptime.validation.measurements import MeasuredRow


@pytest.mark.parametrize(
    ("framework", "factor"), [("Pai-Megatron-Patch@2b201af (Megatron-Core)", 1.524), ("NeMo", None)]
)
def test_hosts_whose_processes_are_bound_to_no_cores(framework, factor):
    """Pai-Megatron-Patch starts its processes with torchrun alone; the row says that a factor on its hosts was assumed.

    160 us a launch, as on p6-b300, over Megatron-Core's 105: 1.524.
    """
    row = MeasuredRow(BASE | {"gpu": "H800-80GB-SXM", "framework": framework}, "other", 2)
    found = row_machine.hardware_of(row)
    assert found.section.get("overrides", {}).get("host_factor") == factor
    assert any("host_factor" in text for text in found.assumed) == (factor is not None)


def test_bridge_by_torchrun_takes_longer_than_its_profile():
    """AWS' runs of Megatron-Bridge on p5: 2.286 * 105 / 80 = 3.000 times the 80 us of a profile whose processes are bound."""
    said = {
        "gpu": "H100-80GB-SXM",
        "machine": "p5.48xlarge",
        "framework": "Megatron-Bridge 0.4.2",
        "source_group": "aws-mbridge",
    }
    found = row_machine.hardware_of(MeasuredRow(BASE | said | {"id": "aws-mbridge-n001"}, "native", 2))
    assert found.section == {"node_type": "aws-p5.48xlarge", "overrides": {"host_factor": 3.0}}
    assert any("torchrun" in text for text in found.assumed)
