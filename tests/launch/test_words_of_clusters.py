"""Words of batch systems, of forks and of ms-swift that decide the devices of a job, or cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_files_of_forks import GPT, SETS, asked, written

from steptime.commands.cli import main
from steptime.launch.read import read
from steptime.launch.reading import to_job
from steptime.launch.shell.slurm import headers_of, slurm_variables

SWIFT = "megatron sft --model Qwen/Qwen2.5-7B-Instruct --tensor_model_parallel_size 2 --max_length 1024"


@pytest.mark.parametrize("asked_for", ["node_f=4", "rt_F=4"])
def test_nodes_that_grid_engine_is_asked_for(tmp_path: Path, asked_for: str) -> None:
    """4 nodes of 4 processes: 16 devices over tp 2 and pp 2 are 4 data-parallel ranks."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    script = f"#!/bin/sh\n#$ -l {asked_for}\nmpirun -np $((NHOSTS * 4)) python pretrain_gpt.py {layout} {GPT}\n"
    assert written(tmp_path, "run.sh", script).config["parallelism"]["dp"] == 4


@pytest.mark.parametrize(
    ("nodes", "each", "told"),
    [
        ("4", "4", "line 4 starts 4 nodes, which the report counts; Slurm gives the job 2"),
        ("2", "8", "line 4 starts 8 processes on a node, which the report counts; Slurm gives the job 4 devices there"),
        ("$SLURM_NNODES", "4", ""),
    ],
)
def test_a_command_of_other_nodes_than_its_job_is_told(tmp_path: Path, nodes: str, each: str, told: str) -> None:
    """torchrun waits for as many nodes as it is told, and starts as many processes."""
    command = f"srun torchrun --nnodes {nodes} --nproc_per_node {each} pretrain_gpt.py {GPT}\n"
    text = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n{command}"
    plan = written(tmp_path, "run.sh", text).config
    assert [note for note in plan["notes"] if "Slurm gives" in note] == ([told] if told else [])
    assert plan["parallelism"]["dp"] == {"4": 16, "2": 16}.get(nodes, 8)


def test_ms_swifts_word_for_no_recomputation(tmp_path: Path) -> None:
    """Its default is selective; `none` is a word of its own (swift/megatron/arguments)."""
    script = f"#!/bin/bash\nNPROC_PER_NODE=8 {SWIFT} --recompute_granularity none\n"
    plan = written(tmp_path, "run.sh", script).config
    assert plan["performance"]["activation_checkpointing_type"] == "none"
    (line,) = asked(tmp_path, "run.sh", script.replace("granularity none", "granularity some"))
    assert line.startswith("--recompute_granularity: expected full or selective (got 'some')")


def test_what_forks_add_about_positions_and_saving_costs_nothing(tmp_path: Path) -> None:
    flags = (
        "--rope-original-max-positional-embeddings 8192 --use-gcp-dynamic-checkpointing --dynamic-checkpointing-min 5"
    )
    reading = written(tmp_path, "run.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {flags}\n")
    names = {flag.name for flag in reading.of("irrelevant")}
    assert {"--use-gcp-dynamic-checkpointing", "--rope-original-max-positional-embeddings"} <= names


def test_a_number_of_devices_that_the_file_contradicts_is_said(tmp_path: Path) -> None:
    """2 nodes of 8 processes, while 8 are set; a launcher's default is no statement of the file."""
    script = f"torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py {GPT}\n"
    note = "number of devices set to 8, while the file starts 16"
    told = written(tmp_path, "run.sh", script, devices=8)
    assert note in to_job(told, SETS | {"devices": 8}).notes
    same = to_job(written(tmp_path, "run.sh", script, devices=16), SETS | {"devices": 16})
    default = written(tmp_path, "run.sh", script.replace("--nnodes 2 ", ""), devices=16)
    for job in (same, to_job(default, SETS | {"devices": 16})):
        assert not [text for text in job.notes if text.startswith("number of devices")]


@pytest.mark.parametrize(
    ("sets", "devices"),
    [
        ({"parallelism.dp": 4}, 4),
        ({"parallelism.dp": 16}, None),
        ({"parallelism.tp": 2}, 32),  # dp stays 16
        ({"parallelism.tp": 2, "parallelism.dp": 8}, None),
        ({"parallelism": {"tp": 2, "pp": 1, "dp": 4}}, 8),
        ({"parallelism.dp": 1024, "data.gbs": 2048}, 1024),
    ],
)
def test_degrees_that_make_another_number_of_devices_are_said_too(tmp_path: Path, sets, devices) -> None:
    """2 nodes of 8 processes, and 1 device per rank of data parallelism; None: the settings make 16 as well."""
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py {GPT}\n", encoding="utf-8")
    job = to_job(read("megatron", str(path), SETS | sets), SETS | sets)
    said = [note for note in job.notes if note.startswith("number of devices")]
    assert said == ([] if devices is None else [f"number of devices set to {devices:,}, while the file starts 16"])
    assert job.parallelism.devices == (devices or 16)


def test_the_report_says_so_below_its_first_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py {GPT}\n", encoding="utf-8")
    main(["--from", "megatron", str(path), "--set", "hardware.node_type=dgx-h100", "--devices", "8"])
    out = capsys.readouterr().out
    assert out.splitlines()[2] == "number of devices set to 8, while the file starts 16"
    assert out.count("number of devices") == 1


def test_a_file_that_is_sourced_from_the_folder_above(tmp_path: Path) -> None:
    """NPROC_PER_NODE 4 of scripts/_common.sh: 4 devices over tp 2."""
    for folder in (".git", "scripts"):  # a checkout: outside of it nothing is read
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "_common.sh").write_text(': "${NPROC_PER_NODE:=4}"\n', encoding="utf-8")
    script = 'DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "${DIR}/../_common.sh"\n'
    script += f'NPROC_PER_NODE="${{NPROC_PER_NODE}}" {SWIFT}\n'
    assert written(tmp_path, "scripts/sft/run.sh", script).config["parallelism"]["dp"] == 2


@pytest.mark.parametrize(("megatron", "software"), [("true", "megatron-core"), ("false", "accelerate-ddp")])
def test_a_script_for_both_of_ms_swifts_launchers_is_of_the_one_that_runs(
    tmp_path: Path, megatron: str, software: str
) -> None:
    script = f"""\
        #!/bin/bash
        export NPROC_PER_NODE=8
        if [ "{megatron}" = "true" ]; then
            {SWIFT} --global_batch_size 16 --micro_batch_size 1
        else
            swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type full --torch_dtype bfloat16 --max_length 1024
        fi
    """
    assert written(tmp_path, "run.sh", script).config["performance"]["software"] == software


def test_nodes_that_a_script_counts_in_its_list(tmp_path: Path) -> None:
    """2 nodes of 8 processes by the header of PBS: 16 devices over tp 2; without it the user gives a number."""
    header = "#PBS -l select=2:system=polaris\n"
    script = "#!/bin/bash\n%sN=$(cat $PBS_NODEFILE | uniq | wc -l)\n"
    script += f"mpirun -np $((N * 8)) python pretrain_gpt.py --tensor-model-parallel-size 2 {GPT}\n"
    assert written(tmp_path, "run.sh", script % header).config["parallelism"]["dp"] == 8
    (line,) = asked(tmp_path, "run.sh", script % "")
    assert "number of nodes unknown, which $(cat $PBS_NODEFILE | uniq | wc -l) in line 2 counts" in line
    assert line.endswith("; add --set devices=N")
    nodes = {"hardware.nodes": 2}
    assert to_job(written(tmp_path, "run.sh", script % "", **nodes), SETS | nodes).parallelism.dp == 8


@pytest.mark.parametrize("words", ["--nrs 16 --tasks_per_rs 1 --gpu_per_rs 1 --rs_per_host 6", "-n 4 -a 4 -g 4 -r 1"])
def test_resource_sets_of_jsrun(tmp_path: Path, words: str) -> None:
    """16 sets of 1 task, or 4 of 4: 16 devices over tp 4, whatever devices are visible on each node."""
    script = f"export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5\njsrun {words} python pretrain_gpt.py "
    script += f"--tensor-model-parallel-size 4 {GPT}\n"
    assert written(tmp_path, "run.sh", script).config["parallelism"]["dp"] == 4


def test_processes_of_aprun(tmp_path: Path) -> None:
    """8 processes, 4 on each node, over tp 2."""
    script = f"aprun -n 8 -N 4 --cc depth ./rank.sh python3 pretrain_gpt.py --tensor-model-parallel-size 2 {GPT}\n"
    assert written(tmp_path, "run.sh", script).config["parallelism"]["dp"] == 4


@pytest.mark.parametrize(
    ("count", "processes"),
    [
        ("wc -l < ${PBS_NODEFILE}", "$N"),
        ("sort -u $PBS_NODEFILE | wc -l", "$((N * 4))"),
        ("uniq $PBS_NODEFILE | wc -l", "$((N * 4))"),
    ],
)
def test_a_node_has_a_line_for_each_of_its_processes_in_the_list_of_pbs(
    tmp_path: Path, count: str, processes: str
) -> None:
    """select=2 with mpiprocs=4 has 8 lines of 2 different ones: 8 devices over tp 2."""
    script = f"#!/bin/bash\n#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4\nN=$({count})\n"
    script += f"mpirun -np {processes} python pretrain_gpt.py --tensor-model-parallel-size 2 {GPT}\n"
    assert written(tmp_path, "run.sh", script).config["parallelism"]["dp"] == 4


def test_keys_that_yq_and_jq_print(tmp_path: Path) -> None:
    """yq '.a.b' FILE and jq -r .a FILE of a file that is there; of another one a command is asked for."""
    (tmp_path / "size.yaml").write_text("training:\n  num_layers: 14\n  lr: 1.0e-5\n", encoding="utf-8")
    (tmp_path / "batch.json").write_text('{"micro": "4"}', encoding="utf-8")
    script = "C=./size.yaml\nL=$(yq '.training.num_layers' $C)\nB=$(jq -r .micro batch.json)\n"
    script += f"torchrun --nproc_per_node 2 --nnodes 1 pretrain_gpt.py {GPT} --num-layers $L --micro-batch-size $B"
    job = to_job(written(tmp_path, "run.sh", script), SETS)
    assert (job.model.n_layers, job.data.microbatch_sz) == (14, 4)
    (tmp_path / "size.yaml").unlink()
    assert "$(yq '.training.num_layers' $C) in line 2 is a command" in asked(tmp_path, "run.sh", script)[0]


@pytest.mark.parametrize(
    "options",
    [
        "while getopts l:b: o; do case $o in l) L=$OPTARG ;; b) B=$OPTARG ;; esac; done\n",
        "while [ $# -gt 0 ]; do case $1 in -l) L=$2 ;; -b) B=$2 ;; esac; shift 2; done\n",
    ],
)
def test_sizes_that_the_arguments_give(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str) -> None:
    """0 layers are none: one line asks for the arguments, with which 3 layers and 6 sequences are read."""
    script = f"L=0\nB=0\n{options}torchrun --nproc_per_node 2 --nnodes 1 pretrain_gpt.py {GPT}"
    script += " --num-layers $L --micro-batch-size $B --global-batch-size 12"
    (line,) = asked(tmp_path, "run.sh", script)
    assert line == (
        "--num-layers, --micro-batch-size: 0 without the script's arguments; pass script and arguments as one string: "
        "'SCRIPT ARG ...'"
    )
    job = to_job(read("auto", f"{tmp_path / 'run.sh'} -l 3 -b 6", SETS), SETS)
    assert (job.model.n_layers, job.data.microbatch_sz) == (3, 6)
    assert main(["--from", "auto", str(tmp_path / "run.sh"), "--machine", "dgx-h100"]) == 2
    assert "to go on" not in capsys.readouterr().err


def test_a_program_that_is_an_argument_is_asked_for(tmp_path: Path) -> None:
    """8 processes over tp 2 are 4 ranks; which program reads the sizes is known only with the second argument."""
    script = f"#!/bin/bash\nFILE=$2\ntorchrun --nproc_per_node=8 $FILE --tensor-model-parallel-size 2 {GPT}\n"
    (line,) = asked(tmp_path, "run.sh", script)
    assert line == "line 3 launches $2: $2 has no value; pass script and arguments as one string: 'SCRIPT ARG ...'"
    given = read("auto", f"{tmp_path / 'run.sh'} data pretrain_gpt.py", SETS)
    assert given.config["parallelism"]["dp"] == 4


OUTPUT = """\
    #!/bin/bash
    tensor() {
        local size=$1
        case "$size" in
            7b) echo 2 ;;
            70b) echo 4 ;;
            *) echo "unknown size $size" >&2; exit 1 ;;
        esac
    }
    nodes() { scontrol show hostnames | wc -l; }
    TP=$(tensor %s)
    torchrun --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size $TP %s
"""


@pytest.mark.parametrize(("size", "ranks"), [("7b", 4), ("70b", 2)])
def test_what_a_function_prints(tmp_path: Path, size: str, ranks: int) -> None:
    """8 devices over tp 2 or 4."""
    assert written(tmp_path, "run.sh", OUTPUT % (size, GPT)).config["parallelism"]["dp"] == ranks


def test_a_function_that_fails_or_runs_a_command_prints_nothing_known(tmp_path: Path) -> None:
    assert "$(tensor 3b) in line 11 is a command" in asked(tmp_path, "run.sh", OUTPUT % ("3b", GPT))[0]
    counted = OUTPUT.replace("$(tensor %s)", "$(nodes)") % GPT
    assert "$(nodes) in line 11 is a command" in asked(tmp_path, "run.sh", counted)[0]


@pytest.mark.parametrize("body", ["echo 2 | sed s/2/4/", "tensor 7b | head -1", "echo 2; echo 4 | cat > log"])
def test_what_a_function_prints_through_a_pipe_is_not_known(tmp_path: Path, body: str) -> None:
    """Of a pipeline only the first command is interpreted."""
    script = OUTPUT.replace("scontrol show hostnames | wc -l", body).replace("$(tensor %s)", "$(nodes)") % GPT
    assert "$(nodes) in line 11 is a command" in asked(tmp_path, "run.sh", script)[0]


def test_functions_that_print_functions_without_end(tmp_path: Path) -> None:
    """25 levels of two calls each are 2^25 commands."""
    each = "".join(f"f{i}() {{ echo $(f{i + 1}) $(f{i + 1}); }}\n" for i in range(25))
    script = f"{each}f25() {{ echo 1; }}\nTP=$(f0)\ntorchrun --nproc_per_node=8 pretrain_gpt.py {GPT}\n"
    assert "too many commands for a launch script" in " ".join(asked(tmp_path, "run.sh", script))


def test_a_number_of_nodes_that_is_too_long(tmp_path: Path) -> None:
    digits = "9" * 4000
    script = f"#!/bin/bash\n#PBS -l select={digits}:mpiprocs={digits}\nN=$(wc -l < $PBS_NODEFILE)\n"
    script += f"mpirun -np $N python pretrain_gpt.py {GPT}\n"
    assert "number of nodes unknown" in asked(tmp_path, "run.sh", script)[0]


LISTED = """\
    #!/bin/bash
    nodes=( $(%s) )
    head=${nodes[0]}
    srun torchrun --nnodes ${#nodes[@]} --nproc_per_node 8 --rdzv_endpoint $head:29500 pretrain_gpt.py %s
"""
LISTS = ["scontrol show hostnames $SLURM_JOB_NODELIST", "cat $PBS_NODEFILE | sort -u"]


@pytest.mark.parametrize("command", LISTS)
def test_the_length_of_a_list_of_nodes_is_not_one(tmp_path: Path, command: str) -> None:
    """The array has as many elements as the command prints, which is not run: 3 nodes of 8 only where the user says so."""
    script = LISTED % (command, GPT)
    assert "number of nodes unknown, which $(" in asked(tmp_path, "run.sh", script)[0]
    headers = "#!/bin/bash\n#SBATCH --nodes=2\n#PBS -l select=2:mpiprocs=8\n"
    assert written(tmp_path, "run.sh", script.replace("#!/bin/bash\n", headers)).config["parallelism"]["dp"] == 16


def test_the_length_of_a_list_that_another_command_prints(tmp_path: Path) -> None:
    script = LISTED % ("cat hosts.txt", GPT)
    assert "$(cat hosts.txt) in line 2 is a command" in asked(tmp_path, "run.sh", script)[0]


PART = "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\n    "


@pytest.mark.parametrize(
    "fills",
    [
        "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 2))",
        "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST | grep -v $(hostname)))",
        "nodes=($(srun -w $(scontrol show hostnames $SLURM_JOB_NODELIST | head -1) hostname -I))",
        PART + 'nodes=("${nodes[@]:1}")',
        PART + "nodes+=($MORE)",
    ],
)
def test_a_part_of_the_list_of_nodes_has_another_length(tmp_path: Path, fills: str) -> None:
    """How many of the nodes it has is not known, whatever the user says of the job's."""
    script = (LISTED % ("", GPT)).replace("nodes=( $() )", fills).replace("srun ", "")
    assert "commands are not run; add --set parallelism.dp=N" in asked(tmp_path, "run.sh", script)[0]


def test_the_length_of_a_text_that_is_not_known(tmp_path: Path) -> None:
    script = f"N=$(hostname)\ntorchrun --nnodes ${{#N}} --nproc_per_node 8 pretrain_gpt.py {GPT}\n"
    assert "$(hostname) in line 1 is a command" in asked(tmp_path, "run.sh", script)[0]


def test_one_of_the_nodes_is_one(tmp_path: Path) -> None:
    """8 devices of one node, though the job has 2."""
    header = "#SBATCH --nodes=2\n    "
    script = (LISTED % ("", GPT)).replace("nodes=( $() )", f"{header}{PART}nodes=(${{nodes[0]}})").replace("srun ", "")
    assert written(tmp_path, "run.sh", script).config["parallelism"]["dp"] == 8


@pytest.mark.parametrize(
    ("fills", "told"),
    [
        ('mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")', "number of nodes unknown, which $("),
        ('readarray -t nodes <<< "$(scontrol show hostnames)"', "number of nodes unknown, which $("),
        ("mapfile -t nodes < hosts.txt", "is a command"),
        ('IFS=, read -ra nodes <<< "$HOSTS_OF_JOB"', "$HOSTS_OF_JOB has no value"),
    ],
)
def test_the_length_of_an_array_that_is_read(tmp_path: Path, fills: str, told: str) -> None:
    script = (LISTED % ("", GPT)).replace("nodes=( $() )", fills)
    assert told in asked(tmp_path, "run.sh", script)[0]


def test_the_lines_of_a_text_that_is_known(tmp_path: Path) -> None:
    """Two lines: 2 nodes of 8; an array that is not set has no elements, for which the branch is not taken."""
    script = (LISTED % ("", GPT)).replace("nodes=( $() )", "mapfile -t nodes <<< $'a\\nb'")
    more = "    if [ ${#extra[@]} -gt 0 ]; then exit 1; fi\n"
    script = script.replace("    head=", f"{more}    head=").replace("$'a\\nb'", '"a\nb"')
    assert written(tmp_path, "run.sh", script).config["parallelism"]["dp"] == 16


@pytest.mark.parametrize(
    ("headers", "each"),
    [
        ("--nodes=2 --ntasks-per-node=1 --gpus-per-task=4", "4"),
        ("--nodes=2 --gres=gpu:a100:8", "8"),
        ("--nodes=2 --gpus=8", "4"),
        ("--nodes=2 --ntasks-per-node=4", None),
        ("--nodes=2 --gres=gpu:4,nvme:1", "4"),
        ("--nodes=1-4 --gpus=8", None),
        ("--nodes=3 --gpus=8", None),
        ("--gpus=8", "8"),
    ],
)
def test_the_devices_of_a_node_that_slurm_gives(headers: str, each: str | None) -> None:
    """sbatch: SLURM_GPUS_ON_NODE, the devices of the batch step: those of each task times its tasks, or all over the nodes."""
    text = f"#SBATCH {headers}\n"
    assert slurm_variables(headers_of(text), text).get("SLURM_GPUS_ON_NODE") == each


@pytest.mark.parametrize(("each", "key"), [(8, "hardware.nodes"), (4, "devices")])
def test_the_number_that_a_launcher_of_part_of_a_node_asks_for(each: int, key: str, tmp_path: Path) -> None:
    """hardware.nodes=2 is 16 devices of a DGX H100: of a launcher of 4 processes on each node that is twice too many."""
    script = "N=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)\n"
    script += f"torchrun --nnodes $N --nproc-per-node {each} pretrain_gpt.py --tensor-model-parallel-size 2 {GPT}\n"
    machine = {"hardware.node_type": "dgx-h100"}
    (line,) = asked(tmp_path, "run.sh", script, **machine)
    assert line.endswith(f"in line 1 counts; add --set {key}=N")
    told = machine | {key: 2 if each == 8 else 8}
    assert to_job(written(tmp_path, "run.sh", script, **told), SETS | told).parallelism.devices == 2 * each


@pytest.mark.parametrize("launch", ["srun -N $N", "srun -n $((N * 4))", "mpirun -np $((N * 4))"])
def test_the_devices_that_a_node_list_does_not_tell(launch: str, tmp_path: Path) -> None:
    """4 processes on each node by a header or a product: devices are asked for, and no nodes for the batch that they scale."""
    script = "#!/bin/bash\n#SBATCH --ntasks-per-node=4\nN=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)\n"
    script += f"{launch} python pretrain_gpt.py --tensor-model-parallel-size 2 {GPT}"
    machine = {"hardware.node_type": "dgx-h100"}
    (line,) = asked(tmp_path, "run.sh", script, **machine)
    assert line.endswith("in line 3 counts; add --set devices=N")
    told = machine | {"devices": 8}
    assert to_job(written(tmp_path, "run.sh", script, **told), SETS | told).parallelism.devices == 8
    batch, line = asked(tmp_path, "run.sh", f"{script} --global-batch-size $((N * 8))", **machine)
    assert "--global-batch-size" in batch
    assert batch.endswith("in line 3 counts; write the value into the script")
    assert line.endswith("add --set devices=N")


def test_the_partition_of_a_header_decides_which_command_runs(tmp_path: Path) -> None:
    """SLURM_JOB_PARTITION (slurm.schedmd.com/sbatch.html); a started script that prints its words runs them once."""
    (tmp_path / "start.sh").write_text('echo "starts $@"\npython "$@"\n', encoding="utf-8")
    script = "#!/bin/bash\n#SBATCH --partition=dev\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n"
    script += 'if [ "$SLURM_JOB_PARTITION" = "dev" ]; then\n  srun --label ./start.sh pretrain_gpt.py $ARGS\n'
    script += "else\n  srun --cpu-bind=none ./start.sh pretrain_gpt.py $ARGS --tensor-model-parallel-size 4\nfi\n"
    plan = written(tmp_path, "run.sh", script.replace("$ARGS", GPT)).config["parallelism"]
    assert (plan["tp"], plan["dp"]) == (1, 16)
    other = script.replace("partition=dev", "partition=standard").replace("$ARGS", GPT)
    assert written(tmp_path, "run.sh", other).config["parallelism"]["tp"] == 4
