"""`sustained_flops` has one meaning in every accelerator file: GEMMs of at least 512 GFLOP, clocks and power settled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

FILES = sorted((Path(__file__).parents[1] / "steptime" / "data" / "accelerators").glob("*.yaml"))
RATE = re.compile(r"([\d.]+) TFLOP/s")

MEASURED = re.compile(
    r"at least 512 GFLOP|asymptote of A100 GEMM timings|\d+\^3|TF on the 6 devices of a busy|for the three shapes"
)
"""A measurement of large products, or the one node of Aurora that was measured as a whole."""
SAME = re.compile(r"^(as|assumed: as|assumed: same die as) ")
SHARES = {"0.75", "0.85"}
"""Share of the best shape that long products sustain: 0.75 on power-limited parts (Blackwell, MI355X), 0.85 elsewhere."""


def figures(path):
    """(dtype, TFLOP/s, source) of every sustained rate of a file, and its peaks."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))

    def rate(entry):
        return float(RATE.fullmatch(entry["value"])[1])

    peaks = {dtype: rate(entry) for dtype, entry in document["peak_flops"].items()}
    found = document.get("sustained_flops", {})
    return [(dtype, rate(entry), entry["source"]) for dtype, entry in found.items()], peaks


def share_of(peaks, rows, dtype):
    return next(value for name, value, _ in rows if name == dtype) / peaks[dtype]


def is_what_it_says(dtype, value, source, rows, peaks):
    """Whether a figure follows from its source by the one meaning of the key."""
    if found := re.search(r"(0\.\d+) of the best shape ([\d.]+) TF", source):
        return found[1] in SHARES and value == pytest.approx(float(found[1]) * float(found[2]), rel=2e-3)
    if found := re.match(r"assumed: the (bf16|fp16) share of peak", source):
        return value == pytest.approx(share_of(peaks, rows, found[1]) * peaks[dtype], rel=3e-3)
    if found := re.match(r"assumed: ([\d.]+)/([\d.]+), the .* share of peak", source):
        return value == pytest.approx(float(found[1]) / float(found[2]) * peaks[dtype], rel=3e-3)
    if found := re.match(r"assumed: ([\d.]+) of (?:the )?peak", source):
        return value == pytest.approx(float(found[1]) * peaks[dtype], rel=1e-2)
    if found := re.search(r"([\d.]+) of (?:the dense )?peak,? (?:median )?over", source):
        return MEASURED.search(source) and value == pytest.approx(float(found[1]) * peaks[dtype], rel=2e-3)
    return bool(MEASURED.search(source) or SAME.match(source) or source.startswith("assumed: long GEMMs sustain"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sustained_rate_is_that_of_long_products(path):
    rows, peaks = figures(path)
    for dtype, value, source in rows:
        assert is_what_it_says(dtype, value, source, rows, peaks), (path.stem, dtype, value, source)
        assert value <= peaks[dtype] * (1.0 + 1e-9), (path.stem, dtype)


def test_a_median_of_all_shapes_would_not_pass():
    """What B200's figure was: products too small to fill the device count as much as long ones."""
    said = "median of 514 GEMM shapes of Llama and DeepSeek layers: 0.485 of the dense peak"
    assert not is_what_it_says("bf16", 1091.0, said, [("bf16", 1091.0, said)], {"bf16": 2250.0})


def test_fp4_has_one_peak():
    """NVFP4 is the format of the tensor cores' fp4 products, no rate of its own; B200 has 0.9 of GB200's in every dtype."""
    peaks = {path.stem: figures(path)[1] for path in FILES}
    assert not [name for name, own in peaks.items() if "nvfp4" in own]
    for dtype in ("fp4", "fp8", "bf16"):
        assert peaks["b200-sxm-180"][dtype] == 0.9 * peaks["gb200-186"][dtype]
