"""Which judged rows of the shipped collection stand apart, by what their source says."""

import pytest
from own_rows import BASE, SHIPPED

from steptime.validation.exclusion import exclusion
from steptime.validation.measurements import MeasuredRow


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
