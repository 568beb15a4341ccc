"""`sustained_flops` has one meaning in every accelerator file: the median rate of GEMMs of at least 512 GFLOP, clocks settled.

Each figure names the kind of its source in one word, `basis`, and follows from the source by the one rule of that word
(docs/machines.md, Sustained rates).
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest
import yaml

FILES = sorted((Path(__file__).parents[1] / "steptime" / "data" / "accelerators").glob("*.yaml"))
LARGE = 512e9
POWER_LIMITED = {"b200-sxm-180", "b300-sxm-270", "gb200-186", "mi355x"}
"""Parts that sustain 0.75 of their best shape; all others 0.85."""
PEAK_SHARES = {"0.7", "0.85", "0.9"}
"""Shares of the peak where nothing was measured: A10G and Trainium, TPUs and RTX 4090, H20."""
SHAPE = r"(\d+\^3|\d+ x \d+ x \d+)"


def number(entry):
    """TFLOP/s of an entry."""
    return float(re.fullmatch(r"([\d.]+) TFLOP/s", entry["value"])[1])


def document(path):
    return yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)


PARTS = {path.stem: document(path) for path in FILES}


def gflop(shape):
    """GFLOP of a product, "8192^3" or "m x n x k"."""
    sides = [int(shape.partition("^")[0])] * 3 if "^" in shape else [int(side) for side in shape.split(" x ")]
    return 2e-9 * sides[0] * sides[1] * sides[2]


def of_products(part, dtype, source):
    """The median of the products that a source lists, or the median that it states."""
    if found := re.search(r"median over the \d+ shapes of at least 512 GFLOP .*: (0\.\d+) of the dense peak", source):
        return float(found[1]) * number(part["peak_flops"][dtype])
    if found := re.match(r"median over \d+ shapes of at least 8 TFLOP, random data.*: ([\d.]+) TF \(", source):
        return float(found[1])
    if found := re.match(rf"middle of ([\d.]+) to ([\d.]+) TF at {SHAPE}", source):
        assert gflop(found[3]) * 1e9 >= LARGE
        return (float(found[1]) + float(found[2])) / 2.0
    if found := re.match(r"([\d.]+) TF on the 6 devices of a busy Aurora node, shape not stated", source):
        return float(found[1]) / 6.0
    listed = re.findall(rf"([\d.]+)(?: TF)? at {SHAPE}", source)
    assert all(gflop(shape) * 1e9 >= LARGE for _, shape in listed), source
    return median(float(rate) for rate, _ in listed)


def of_best(part, dtype, source):
    """A fixed share of the best shape that a search found, which the file states too."""
    found = re.match(r"assumed: (0\.\d+) of the best shape ([\d.]+) TF", source)
    assert found[1] == ("0.75" if part["name"] in POWER_LIMITED else "0.85"), source
    stated = part["best_flops"]
    assert float(found[2]) == number(stated.get(dtype, stated["bf16"]))
    return float(found[1]) * float(found[2])


def of_dtype(part, dtype, source):
    """The share of peak of another dtype of the part."""
    other = re.fullmatch(r"assumed: the (bf16|fp16) share of peak", source)[1]
    return rate(part, other) / number(part["peak_flops"][other]) * number(part["peak_flops"][dtype])


def of_part(part, dtype, source):
    """The share of peak of a like part in that dtype; or its rate times the ratio of what one source timed on both."""
    if found := re.match(r"assumed: ([\w-]+) times ([\d.]+)/([\d.]+), the best shapes of both", source):
        other = PARTS[found[1]]
        assert other["sustained_flops"][dtype]["basis"] == "products"
        assert [float(found[2]), float(found[3])] == [number(p["best_flops"]["bf16"]) for p in (part, other)]
        return rate(other, dtype) * float(found[2]) / float(found[3])
    if found := re.match(r"assumed: ([\w-]+) times ([\d.]+)/([\d.]+), the medians of both over shapes", source):
        assert PARTS[found[1]]["sustained_flops"][dtype]["basis"] == "products"
        return rate(PARTS[found[1]], dtype) * float(found[2]) / float(found[3])
    other = PARTS[re.fullmatch(r"assumed: the share of peak of ([\w-]+)", source)[1]]
    assert other["sustained_flops"][dtype]["basis"] != "part"
    return rate(other, dtype) / number(other["peak_flops"][dtype]) * number(part["peak_flops"][dtype])


def of_peak(part, dtype, source):
    """A fixed share of the peak, where nothing was measured."""
    share = re.match(r"assumed: (0\.\d+) of (?:the )?peak", source)[1]
    assert share in PEAK_SHARES
    return float(share) * number(part["peak_flops"][dtype])


RULES = {"products": of_products, "best": of_best, "dtype": of_dtype, "part": of_part, "peak": of_peak}


def rate(part, dtype):
    return number(part["sustained_flops"][dtype])


@pytest.mark.parametrize("name", PARTS)
def test_a_sustained_rate_follows_from_its_basis(name):
    part = PARTS[name]
    for dtype, entry in part.get("sustained_flops", {}).items():
        wanted = RULES[entry["basis"]](part, dtype, entry["source"])
        assert number(entry) == pytest.approx(wanted, rel=3e-3), (name, dtype, entry)
        assert number(entry) <= number(part["peak_flops"][dtype])
        assert entry["source"].startswith("assumed: ") is (entry["basis"] != "products")


def test_small_products_do_not_count():
    """A source that times products too small to fill the device is refused: 2 * 4096**3 is 137 GFLOP."""
    with pytest.raises(AssertionError):
        of_products({}, "fp8", "1216.9 TF at 4096^3, 1290.1 at 8192^3")
    assert of_products({}, "fp8", "1290.1 TF at 8192^3, 1351.4 at 6144 x 12288 x 12288, 1382.2 at 32768^3") == 1351.4


def test_parts_of_one_chip_sustain_one_rate():
    """A100 at 40 and 80 GB, A800 and V100's share in the same test; H100, H200 and H800 in bf16."""
    assert len({rate(PARTS[name], "bf16") for name in ("a100-sxm4-40", "a100-sxm4-80", "a800-sxm4-80")}) == 1
    assert len({rate(PARTS[name], "bf16") for name in ("h100-sxm5-80", "h200-sxm5-141", "h800-sxm5-80")}) == 1


def test_a_part_of_the_same_chip_with_more_power_is_not_slower():
    """MI325X is MI300X's chip at 1,000 W instead of 750, so it sustains more: mamf-finder's best shapes are 784.9 and 668.4
    TFLOP/s, a ratio of 1.174. AMD's training container v25.2 reports 526.13 and 426.79 TFLOP/s for Llama 3.1 70B in bf16 (1.233)
    and 643.01 and 542.94 for 8B (1.184), with a larger batch on the larger memory."""
    ratio = rate(PARTS["mi325x"], "bf16") / rate(PARTS["mi300x"], "bf16")
    assert ratio == pytest.approx(784.9 / 668.4, rel=1e-3)
    assert ratio == pytest.approx(1.184, rel=0.02)
    assert number(PARTS["mi325x"]["peak_flops"]["bf16"]) == number(PARTS["mi300x"]["peak_flops"]["bf16"])


def test_no_other_key_has_a_basis():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert text.count("basis: ") == len(PARTS[path.stem].get("sustained_flops", {}))


def test_fp4_has_one_peak():
    """NVFP4 is the format of the tensor cores' fp4 products, no rate of its own; B200 has 0.9 of GB200's in every dtype."""
    assert not [name for name, part in PARTS.items() if "nvfp4" in part["peak_flops"]]
    for dtype in ("fp4", "fp8", "bf16"):
        b200, gb200 = (number(PARTS[name]["peak_flops"][dtype]) for name in ("b200-sxm-180", "gb200-186"))
        assert b200 == 0.9 * gb200
