"""How nanotron distributes layers over the stages of a pipeline, worked out by hand from its build_model; its measured rows."""

import pytest
from launch_readings import DATA, HARDWARE

from steptime.job.layer_counts import balanced_by_cost
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.validation.measurements import shipped
from steptime.validation.row_plan import to_config


def with_stages(folder, pp, sets):
    """The layers of each stage in the job of a nanotron file with `pp` stages and half of the devices of each."""
    text = (DATA / "trainers" / "nanotron.yaml").read_text(encoding="utf-8")
    (folder / "job.yaml").write_text(text.replace("pp: 1,", f"pp: {pp},"), encoding="utf-8")
    return to_job(read("auto", str(folder / "job.yaml"), HARDWARE | sets), HARDWARE | sets).layers_per_chunk


def test_a_stage_ends_with_the_block_that_exceeds_its_share():
    """16 layers of 67.1 M weights and a head of 268.4 M, which are 4 layers: 20 in all, 10 to each of two stages.

    After the tenth layer the sum equals the share and does not exceed it, so the first stage takes an eleventh. Over four stages
    the shares end at 5, 10, 15 and 20 layers, and the stages after layers 6, 11 and 16: the last has the head alone.
    """
    layer, head = 4.0 * 2048**2 + 3.0 * 2048 * 8192, 2048.0 * 131072
    assert head == 4 * layer
    assert balanced_by_cost(16, layer, head, 2) == [11, 5]
    assert balanced_by_cost(16, layer, head, 4) == [6, 5, 5, 0]


def test_a_file_of_nanotron_has_its_stages(tmp_path):
    """128,256 rows of 2,048 are 262.7 M weights, 3.914 layers: shares of 9.957, so the first stage ends with the tenth layer."""
    assert with_stages(tmp_path, 2, {}) == [10, 6]


def test_stages_set_beside_a_file_of_nanotron(tmp_path):
    """Four stages: shares of 4.979, which layers 5, 10 and 15 exceed."""
    assert with_stages(tmp_path, 2, {"parallelism.pp": "4"}) == [5, 5, 5, 1]


def test_a_model_set_beside_a_file_of_nanotron_has_even_stages(tmp_path):
    """32 layers of Llama 3 8B, whose sizes the file does not have, over two stages."""
    assert with_stages(tmp_path, 2, {"model": "llama3-8b"}) == [16, 16]


@pytest.mark.parametrize(("name", "counts"), [("nanotron-018", [16, 12]), ("nanotron-020", [21, 20, 20, 19])])
def test_measured_rows_of_nanotron_have_its_stages(name, counts):
    """28 layers of width 3,072 and 8,192: 4 * 9.437 M + 75.50 M = 113.2 M, a head of 402.7 M (3.556): shares of 15.778 layers.

    80 layers of width 8,192 and 28,672: 268.4 M + 704.6 M = 973.1 M, a head of 1,073.7 M (1.103): shares of 20.276, 40.55 and
    60.83 layers, exceeded by layers 21, 41 and 61.
    """
    row = next(row for row in shipped() if row.id == name)
    assert to_config(row).config["parallelism"]["layers_per_stage"] == counts


def test_measured_rows_of_nanotron_ran_on_aws():
    """The only network named EFA is AWS', and its instance with eight H100 is p5.48xlarge; a user's own row keeps its machine."""
    row = next(row for row in shipped() if row.id == "nanotron-018")
    mapped = to_config(row)
    assert mapped.config["hardware"] == {"node_type": "aws-p5.48xlarge", "overrides": {"host_factor": 1.0}}
    assert any(text.startswith("machine: aws-p5.48xlarge, from its network") for text in mapped.assumed)
    assert to_config(row._replace(file="")).config["hardware"] == {"node_type": "dgx-h100"}
