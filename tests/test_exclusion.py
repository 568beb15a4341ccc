"""Which judged rows of the shipped collection stand apart, by what their source says."""

import pytest
from own_rows import BASE, SHIPPED

from steptime.validation.exclusion import exclusion, refuse_not_judged
from steptime.validation.measurements import MeasuredRow, SkipRowError


@pytest.mark.parametrize(
    ("notes", "stands_apart"),
    [
        ("packed documents", True),
        ("SFT on Packed documents; compile=off", True),
        ("packed doc mask", False),
        ("", False),
    ],
)
def test_packed_documents_stand_apart(notes, stands_apart):
    """A published row alone: a user's own counts."""
    cells = BASE | {"overlap_notes": notes, "recompute": "none", "vocab": "32000", "quality": "A"}
    reason = exclusion(MeasuredRow(cells, "native", 2), [])
    assert (reason is not None and reason.startswith("packed documents")) == stands_apart
    assert exclusion(MeasuredRow(cells, "", 2), []) is None


def test_other_vendors_kernels_stand_apart():
    """By what the source says, whatever its time was; a user's own row counts."""
    cells = BASE | {
        "recompute": "none",
        "vocab": "32000",
        "quality": "A",
        "gpu": "ascend-910b",
        "framework": "MindSpeed-LLM 1.0.RC3",
    }
    assert (exclusion(MeasuredRow(cells, "native", 2), []) or "").startswith("MindSpeed on Ascend")
    assert exclusion(MeasuredRow(cells, "", 2), []) is None


def test_packed_documents_of_the_shipped_rows():
    """The nine runs of ms-swift whose source says so, and no others."""
    packed = [row for row in SHIPPED.values() if (exclusion(row, []) or "").startswith("packed documents")]
    assert {row.group for row in packed} == {"ms-swift"}
    assert len(packed) == 9


@pytest.mark.parametrize(
    ("cells", "cause"),
    [
        (
            {"recompute": "mixed ilp: keep 13.8 recompute 72.3 offload 13.9 %"},
            "not stated: which tensors its solver keeps",
        ),
        ({"recompute": "selective (graph remat; op list not stated)"}, "not stated: which operations"),
        ({"zero_or_fsdp": "zero3 + Adam states offloaded during step"}, "not modeled yet: optimizer states"),
        ({"note": "so how fp32 was run is not visible"}, "not stated: how fp32 was run"),
    ],
)
def test_a_row_that_is_not_judged_says_why(cells, cause):
    """A published row alone: a user's own gets the message about its key."""
    with pytest.raises(SkipRowError, match=f"^{cause}"):
        refuse_not_judged(MeasuredRow(BASE | cells, "native", 2))
    refuse_not_judged(MeasuredRow(BASE | cells, "", 2))
