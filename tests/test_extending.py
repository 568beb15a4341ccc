"""docs/extending.md, done: each addition it names is made in a copy of the package, and the estimate follows.

Machines and models have tests of their own (test_docs.py, test_presets.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steptime import Job, estimate

PACKAGE = Path(__file__).parents[1] / "steptime"
PLAN = {
    "model": {"n_layers": 4, "hidden_sz": 1024, "inter_sz": 4096, "n_q_heads": 16, "vocab_sz": 32000},
    "parallelism": {"tp": 2, "pp": 2, "dp": 2},
    "data": {"gbs": 16, "seqlen": 2048, "microbatch_sz": 1},
    "hardware": "dgx-h100",
}


@pytest.fixture
def package(tmp_path):
    """A copy of the package, to be added to."""
    folder = tmp_path / "steptime"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("measurements*"))  # what is compiled stays so
    return folder


def add(path, before, text):
    """Put lines before the only place that has these words."""
    old = path.read_text(encoding="utf-8")
    assert old.count(before) == 1, before
    path.write_text(old.replace(before, text + before), encoding="utf-8")


def figures(package, plan=None, program="found = estimate(Job.load(json.dumps(plan))); made = found.to_dict()"):
    """What the copy says of a plan, as JSON."""
    lines = ["import json, sys", "from steptime import Job, estimate", "plan = json.load(sys.stdin)", program,
             "json.dump(made, sys.stdout)"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        input=json.dumps(plan or PLAN), env=os.environ | {"PYTHONPATH": str(package.parent)},
        capture_output=True, text=True, cwd=package.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def as_shipped(plan=None):
    """What this package says of a plan, as JSON."""
    return json.loads(json.dumps(estimate(Job.load(json.dumps(plan or PLAN))).to_dict()))


def test_a_layer_kind(package):
    """A layer whose gated MLP is twice as wide: its parameters, FLOPs and bytes follow from its ops.

    Two such layers have 2 x 3 x 1,024 x 4,096 parameters more.
    """
    blocks = package / "model" / "blocks.py"
    function = (
        "def wide_ops(model: Model, shard: Shard) -> list[Op]:\n"
        '    """Attention, then a wide MLP."""\n'
        "    wide = model.model_copy(update={'inter_sz': 2 * model.inter_sz})\n"
        "    return [*attention_ops(model, shard), *mlp_ops(wide, shard)]\n\n\n"
    )
    add(blocks, "LAYERS: dict", function)
    add(blocks, '    "moe": moe_layer_ops,', '    "wide": wide_ops,\n')
    add(package / "model" / "model.py", '"mamba", "attention", "mlp", "experts"]', '"wide", ')
    runs = [{"kind": "dense", "repeat": 2}, {"kind": "wide", "repeat": 2}]
    plain = as_shipped()
    made = figures(package, PLAN | {"model": PLAN["model"] | {"layers": runs}})
    assert made["params"]["total"] - plain["params"]["total"] == 2 * 3 * 1024 * 4096
    assert made["flops"]["model_per_step"] > plain["flops"]["model_per_step"]
    assert made["memory"]["peak_allocated_bytes"] > plain["memory"]["peak_allocated_bytes"]


def test_an_algorithm_of_a_collective(package):
    """A reduce-scatter that sends a tenth of the bytes in one hop: being the faster one, it is taken."""
    row = 'Algorithm("direct", _one_hop, 1.0, lambda *_: 0.1, 0.0), '
    add(
        package / "cost" / "comm.py",
        'Algorithm("ring", _ring_hops, 1.0, _all_but_own, RING_S),),\n    "all_reduce"',
        row,
    )
    plain, made = as_shipped(), figures(package)

    def seconds(found):
        return sum(c["time_s"] * c["count_per_step"] for c in found["collectives"] if c["kind"] == "reduce_scatter")

    assert 0.0 < seconds(made) < seconds(plain)
    assert made["time"]["step_s"] < plain["time"]["step_s"]


def test_a_pipeline_schedule(package):
    """All forwards, then all backwards, by another name: the figures of gpipe."""
    add(
        package / "schedule" / "orders.py",
        '    "gpipe": Schedule(',
        '    "afab": Schedule(_all_forward_all_backward, looped),\n',
    )
    add(package / "job" / "mesh.py", '"gpipe", "1f1b", "interleaved"', '"afab", ')
    add(package / "software" / "frameworks.py", '"gpipe", "1f1b", "interleaved")', '"afab", ')
    layout = PLAN["parallelism"]
    one = as_shipped(PLAN | {"parallelism": layout | {"schedule": "gpipe"}})
    other = figures(package, PLAN | {"parallelism": layout | {"schedule": "afab"}})
    assert other["pipeline"]["schedule"] == "afab"
    assert other["pipeline"]["in_flight"] == one["pipeline"]["in_flight"] == [8, 8]
    assert other["time"]["step_s"] == one["time"]["step_s"]


def test_a_framework(package, tmp_path):
    """A table of keys and a profile: its files are read, and its defaults hold."""
    (package / "data" / "launch" / "toytrain.yaml").write_text(
        "source: made for a test\nframework: toytrain\nmarks: '^toytrain:'\nsoftware: {default: toytrain}\nused:\n"
        "  toytrain.layers: model.n_layers\n  toytrain.width: model.hidden_sz\n  toytrain.mlp: model.inter_sz\n"
        "  toytrain.heads: model.n_q_heads\n  toytrain.vocab: model.vocab_sz\n  toytrain.tp: parallelism.tp\n"
        "  toytrain.dp: parallelism.dp\n  toytrain.length: data.seqlen\n  toytrain.batch: data.gbs\n"
        "  toytrain.micro: data.microbatch_sz\n",
        encoding="utf-8",
    )
    (package / "data" / "software" / "toytrain.yaml").write_text(
        "name: toytrain\nextends: megatron-core\ndescription: a test's\nattention_impl: unfused\n"
        "sources: {attention_impl: made for a test}\n",
        encoding="utf-8",
    )
    add(package / "launch" / "kinds.py", ')  # fmt: skip\n"""Kinds that are translated', '    "toytrain",\n')
    file = tmp_path / "run.yaml"
    file.write_text(
        "toytrain:\n  layers: 4\n  width: 1024\n  mlp: 4096\n  heads: 16\n  vocab: 32000\n  tp: 2\n  dp: 4\n"
        "  length: 2048\n  batch: 16\n  micro: 1\n",
        encoding="utf-8",
    )
    program = (
        "from steptime.launch.read import read\n"
        f"found = read('toytrain', {str(file)!r}, {{'hardware': 'dgx-h100', 'parallelism.pp': 1}})\n"
        "made = found.config"
    )
    made = figures(package, program=program)
    assert made["model"]["n_layers"] == 4
    assert made["parallelism"]["tp"] == 2
