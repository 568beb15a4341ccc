"""torchtitan's releases, and the config functions and flavors that its scripts name."""

import pytest
from launch_readings import DATA, HARDWARE
from test_torchtitan import MINIMAL, REGISTRY, minimal

from steptime.base.config import ConfigError
from steptime.launch.read import read as launch_file
from steptime.launch.reading import to_job
from steptime.launch.torchtitan.job_config import read_torchtitan


def test_a_compiled_loss_is_counted_from_release_02_on():
    """compile of release 0.1 stands in [training]; what its runs reserve is that of a loss op by op."""
    texts = minimal(("[training]", "compile = true")), MINIMAL + "[compile]\nenable = true\n"
    assert [read_torchtitan("job.toml", text).config["performance"]["compile"] for text in texts] == ["blocks", "all"]


def test_a_script_that_names_a_config_function_reads_it_from_its_module(tmp_path):
    """torchtitan's run_train.sh of 2026: --module llama3 --config llama3_8b_tp is that function of models/llama3."""
    script = (
        "#!/bin/bash\nNGPU=${NGPU:-8}\nMODULE=${MODULE:-llama3}\nCONFIG=${CONFIG:-llama3_8b_tp}\ntorchrun --nnodes=8 "
    )
    script += '--nproc_per_node=${NGPU} -m torchtitan.train --module ${MODULE} --config ${CONFIG} "$@"\n'
    run = tmp_path / "run_train.sh"
    run.write_text(script)
    with pytest.raises(ConfigError) as error:
        launch_file("auto", str(run), HARDWARE)
    file = "torchtitan/models/llama3/config_registry.py"
    assert str(error.value).endswith(
        "launches config function llama3_8b_tp of llama3; give that module's config_registry.py: "
        f"add --with {file}, or read the function alone: --from torchtitan {file}:llama3_8b_tp"
    )
    added = tmp_path / "elsewhere" / "config_registry.py"
    added.parent.mkdir()
    added.write_text((DATA / REGISTRY).read_text(encoding="utf-8"), encoding="utf-8")
    assert launch_file("auto", str(run), HARDWARE, added=[str(added)]).config["parallelism"]["tp"] > 1
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text((DATA / REGISTRY).read_text(encoding="utf-8"), encoding="utf-8")
    found = to_job(launch_file("auto", str(run), HARDWARE), HARDWARE)
    alone = to_job(launch_file("torchtitan", f"{DATA / REGISTRY}:llama3_8b_tp", HARDWARE), HARDWARE)
    assert (found.model, found.data.seqlen, found.parallelism.tp) == (
        alone.model,
        alone.data.seqlen,
        alone.parallelism.tp,
    )
    assert found.parallelism.devices == 64


def registry(folder, text, module):
    """A script and a module of torchtitan with the config function llama3_8b."""
    there = folder / "torchtitan" / module
    there.mkdir(parents=True)
    (there / "config_registry.py").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("script", "dp"),
    [
        ("NGPU=16 MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --parallelism.tensor_parallel_degree 4\n", 4),
        ("export NGPU=16 CONFIG=llama3_8b\nbash ./run_train.sh --parallelism.tensor_parallel_degree 4\n", 4),
        ("CONFIG=llama3_8b ./run_train.sh --parallelism.tensor_parallel_degree 4\n", 2),
    ],
)
@pytest.mark.parametrize("nearby", [True, False])
def test_a_job_is_started_by_torchtitans_own_script(tmp_path, script, dp, nearby):
    """README.md of torchtitan: variables before ./run_train.sh, flags behind it; its 8 processes unless NGPU says another number.

    Over 16 (8) processes and tp 4, dp is 4 (2), whether run_train.sh lies in the folder or not.
    """
    registry(tmp_path, (DATA / REGISTRY).read_text(encoding="utf-8"), "models/llama3")
    if nearby:
        (tmp_path / "run_train.sh").write_text(
            "#!/usr/bin/bash\nset -ex\nNGPU=${NGPU:-8}\nMODULE=${MODULE:-llama3}\nCONFIG=${CONFIG:-llama3_debugmodel}\n"
            'torchrun --nproc_per_node=${NGPU} -m torchtitan.train --module ${MODULE} --config ${CONFIG} "$@"\n'
        )
    (tmp_path / "job.sh").write_text(script)
    layouts = [
        to_job(launch_file(kind, str(tmp_path / "job.sh"), HARDWARE), HARDWARE).parallelism
        for kind in ("torchtitan", "auto")
    ]
    assert [(layout.tp, layout.dp) for layout in layouts] == [(4, dp)] * 2


TP = "--parallelism.tensor_parallel_degree 4"


@pytest.mark.parametrize(
    "started",
    [
        f'env NGPU=16 \\\n  MODULE=llama3 CONFIG="${{config}}" ./run_train.sh {TP}',
        f'NGPU=16 CONFIG="$config" ./run_train.sh {TP}',
        f"torchrun --nproc_per_node=16 -m torchtitan.train \\\n {TP} --module=llama3 --config $config",
    ],
)
def test_of_the_jobs_of_a_loop_the_first_is_read_and_told(tmp_path, started):
    registry(tmp_path, (DATA / REGISTRY).read_text(encoding="utf-8"), "models/llama3")
    loop = f"#!/bin/bash\nfor config in llama3_8b llama3_70b; do\n  {started}\ndone\n"
    (tmp_path / "job.sh").write_text(loop)
    job = to_job(launch_file("auto", str(tmp_path / "job.sh"), HARDWARE), HARDWARE)
    assert (job.model.n_layers, job.parallelism.tp, job.parallelism.dp) == (32, 4, 4)
    assert [note for note in job.notes if note.endswith("launches 2 jobs, of which only the first is read")]


@pytest.mark.parametrize("start", ['NGPU=4 CONFIG_FILE="job.toml" ./run_train.sh', "NGPU=4 ./run_train.sh"])
def test_flags_behind_torchtitans_own_script_are_those_of_its_toml(tmp_path, start):
    """v0.2.2 run_train.sh: --job.config_file ${CONFIG_FILE} $overrides; tp 2 of 4 processes leaves dp 2."""
    (tmp_path / "job.toml").write_text(MINIMAL)
    (tmp_path / "run_train.sh").write_text(
        "NGPU=${NGPU:-8}\nCONFIG_FILE=${CONFIG_FILE:-job.toml}\n"
        'torchrun --nproc_per_node=${NGPU} -m torchtitan.train --job.config_file ${CONFIG_FILE} "$@"\n'
    )
    flags = "--parallelism.data_parallel_shard_degree -1 --parallelism.tensor_parallel_degree 2"
    (tmp_path / "job.sh").write_text(f"{start} {flags}\n")
    layout = to_job(launch_file("torchtitan", str(tmp_path / "job.sh"), HARDWARE), HARDWARE).parallelism
    assert (layout.tp, layout.dp) == (2, 2)


def test_a_flag_with_no_before_its_name_is_off(tmp_path):
    """experiments/graph_trainer/README.md: --compile.no-enable_passes; tyro's spelling of a boolean that is false."""
    text = (DATA / REGISTRY).read_text(encoding="utf-8")
    registry(tmp_path, text, "models/llama3")
    compiled = []
    for flag in ("--compile.enable", "--compile.no-enable"):
        script = f"torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b {flag}\n"
        (tmp_path / "job.sh").write_text(script)
        job = to_job(launch_file("torchtitan", str(tmp_path / "job.sh"), HARDWARE), HARDWARE)
        compiled.append(job.software.kernels.compile)
    assert compiled == ["all", "none"]


def test_variables_before_a_script_end_with_it(tmp_path):
    """NGPU=16 before one command does not hold for the next: 8 processes."""
    registry(tmp_path, (DATA / REGISTRY).read_text(encoding="utf-8"), "models/llama3")
    (tmp_path / "setup.sh").write_text("echo $NGPU\n")
    text = "NGPU=16 bash setup.sh\n"
    text += "torchrun --nproc_per_node=${NGPU:-8} -m torchtitan.train --module llama3 --config llama3_8b\n"
    (tmp_path / "job.sh").write_text(text)
    assert to_job(launch_file("auto", str(tmp_path / "job.sh"), HARDWARE), HARDWARE).parallelism.devices == 8


def test_the_module_of_a_function_names_its_model(tmp_path):
    """The registry of graph_trainer.llama3 is that of llama3, whatever the function's name begins with."""
    text = (DATA / REGISTRY).read_text(encoding="utf-8").replace("llama3_8b()", "graph_trainer_8b()")
    registry(tmp_path, text, "experiments/graph_trainer/llama3")
    script = "torchrun --nproc_per_node=8 -m torchtitan.train --module graph_trainer.llama3 --config graph_trainer_8b\n"
    (tmp_path / "job.sh").write_text(script)
    assert to_job(launch_file("torchtitan", str(tmp_path / "job.sh"), HARDWARE), HARDWARE).model.hidden_sz == 4096


OF_A_FORK = """llama2_configs = {"5B": ModelArgs(dim=512, n_layers=2, n_heads=4)}
llama3_configs = {
    "5B": TransformerModelArgs(
        dim=3072, n_layers=40, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=3 / 2, multiple_of=1024, rope_theta=500000
    ),
    "shared": TransformerModelArgs(dim=3072, n_layers=40, n_heads=24, share_layers=2),
}
"""


@pytest.mark.parametrize(("flavor", "width"), [("5B", 12288), ("shared", None), ("6B", None)])
def test_a_flavor_of_a_fork_is_in_the_registry_that_the_config_lies_in(tmp_path, flavor, width):
    """2/3 of 4 x 3072 is 8192, times 3/2 is 12288, a multiple of 1024; Llama 2's flavor of that name is another one."""
    folder = tmp_path / "torchtitan/models/llama3"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text(OF_A_FORK)
    (folder / "model/args.py").write_text("class TransformerModelArgs:\n    vocab_size: int = 128256\n")
    (tmp_path / "jobs").mkdir()
    path = tmp_path / "jobs/job.toml"
    path.write_text(
        f'[model]\nname = "llama3"\nflavor = "{flavor}"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n[parallelism]\n'
    )
    sets = HARDWARE | {"parallelism.dp": 8}
    if width is None:
        with pytest.raises(ConfigError, match=f"unknown flavor of llama3 \\(got '{flavor}'\\)"):
            launch_file("torchtitan", str(path), sets)
    else:
        model = to_job(launch_file("torchtitan", str(path), sets), sets).model
        assert (model.n_layers, model.hidden_sz, model.inter_sz, model.vocab_sz) == (40, 3072, width, 128256)


def test_a_config_whose_name_a_variable_completes(tmp_path):
    script = '#!/bin/bash\nNAME=small\nCONFIG_FILE=${CONFIG_FILE:-"./train_configs/${NAME}.toml"}\n'
    script += "srun torchrun --nnodes 2 --nproc_per_node 4 train.py --job.config_file ${CONFIG_FILE}\n"
    (tmp_path / "run.sh").write_text(script)
    with pytest.raises(ConfigError, match=r"reads \./train_configs/small\.toml, which was not found"):
        launch_file("auto", str(tmp_path / "run.sh"), HARDWARE)
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "small.toml").write_text(MINIMAL)
    alone = to_job(launch_file("auto", str(tmp_path / "train_configs" / "small.toml"), HARDWARE), HARDWARE)
    assert to_job(launch_file("auto", str(tmp_path / "run.sh"), HARDWARE), HARDWARE).data == alone.data
