"""NeMo 2.0's own recipes by name: programs that change one, and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import asked, written

PROGRAM = """\
    import nemo_run as run
    from nemo.collections import llm

    def configure(nodes: int = 2, gpus: int = 8):
        recipe = llm.llama3_8b.pretrain_recipe(name="own", num_nodes=nodes, num_gpus_per_node=gpus)
        recipe.trainer.strategy.pipeline_model_parallel_size = 2
        recipe.data = OwnData(paths=["x"], seq_length=4096, micro_batch_size=1, global_batch_size=64)
        return recipe

    def executor(devices: int = 8):
        return run.LocalExecutor(ntasks_per_node=devices)
"""


def test_a_program_over_a_recipe(tmp_path: Path) -> None:
    """llama3_8b: tp 1, cp 2; 16 devices over pp 2 and cp 2 are 4 data-parallel ranks."""
    plan = written(tmp_path, "own.py", PROGRAM).config
    assert plan["model"]["n_layers"] == 32
    assert {key: plan["parallelism"].get(key) for key in ("tp", "pp", "cp", "dp")} == {
        "tp": 1,
        "pp": 2,
        "cp": 2,
        "dp": 4,
    }
    assert plan["data"] == {"gbs": 64, "microbatch_sz": 1, "seqlen": 4096}


def test_nemos_command_line(tmp_path: Path) -> None:
    """llama3_70b: tp 4, pp 4 of 5 chunks, cp 2; 8 nodes of 8 devices over 32 are 2 ranks; then cp 1: 4 ranks."""
    script = (
        "#!/bin/bash\nnemo llm pretrain --factory \"llama3_70b(num_nodes=8, name='x')\" data.global_batch_size=64\n"
    )
    plan = written(tmp_path, "run.sh", script).config
    assert {key: plan["parallelism"][key] for key in ("tp", "pp", "vpp", "cp", "dp")} == {
        "tp": 4, "pp": 4, "vpp": 5, "cp": 2, "dp": 2,
    }  # fmt: skip
    assert plan["data"] == {"gbs": 64, "microbatch_sz": 1, "seqlen": 8192}
    one = written(tmp_path, "run.sh", script.strip() + " trainer.strategy.context_parallel_size=1\n").config
    assert one["parallelism"]["dp"] == 4


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("llama3_8b", "own_8b", "recipe own_8b is not known"),
        ("num_nodes=nodes", "performance_mode=True", "performance_mode of recipe llama3_8b is not known"),
    ],
)
def test_what_is_not_known_of_a_recipe_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    (line,) = asked(tmp_path, "own.py", PROGRAM.replace(old, new))
    assert line.startswith(told)
    assert line.endswith("give the log that prints the job's config")
