"""A script that hands another to sbatch, and words that its reader is to fill in."""

import pytest
from launch_readings import job_of

from steptime.base.config import ConfigError
from steptime.launch.shell.script import read_script

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --vocab-size 1000"
)
H100 = {"hardware.node_type": "dgx-h100"}


def test_a_script_that_submits_another_has_its_nodes_and_the_headers_of_that_one(tmp_path):
    """2 nodes of sbatch's own words, 8 tasks on each by the header: 16 devices over tp 4."""
    (tmp_path / "job.sh").write_text(
        f"#SBATCH --ntasks-per-node=8\nsrun python pretrain_gpt.py $PARAMS {FLAGS} --fp16\n"
    )
    run = tmp_path / "run.sh"
    run.write_text(
        '#!/bin/bash\nexport PARAMS="--tensor-model-parallel-size 4"\nsbatch --nodes=2 --export=PARAMS job.sh\n'
    )
    found = job_of(run)
    assert (found.parallelism.tp, found.parallelism.dp, str(found.performance.precision)) == (4, 4, "fp16")


def test_words_to_be_filled_in_are_no_redirections(tmp_path):
    """A shell would write to the file --fp16: the reader means it as a flag."""
    run = tmp_path / "run.sh"
    run.write_text(
        f'#!/bin/bash\nO="{FLAGS} --tensorboard-dir <PATH TO tensorboard> --fp16 "\n'
        'CMD="torchrun --nproc_per_node 8 pretrain_gpt.py $O"\nbash -c "${CMD}"\n'
    )
    assert str(job_of(run).performance.precision) == "fp16"


def test_words_behind_the_text_of_bash_c_are_its_arguments(tmp_path):
    """bash -c TEXT NAME ARGUMENT...: $@ are the arguments; 2 nodes of 4 processes over tp 4: dp 2."""
    run = tmp_path / "run.sh"
    run.write_text(
        f"#!/bin/bash\nCMD=(python pretrain_gpt.py {FLAGS} --fp16 --tensor-model-parallel-size 4)\n"
        'torchrun --nnodes 2 --nproc_per_node 4 --no_python bash -c \'\nexport A=1\nexec "$@"\n\' bash "${CMD[@]}"\n'
    )
    found = job_of(run)
    assert (found.parallelism.tp, found.parallelism.dp, str(found.performance.precision)) == (4, 2, "fp16")


def test_a_here_document_given_to_sbatch_is_the_job(tmp_path):
    """The outer shell fills in $TP; what is behind a backslash is the job's own. 3 nodes of 8 over tp 4: dp 6."""
    run = tmp_path / "run.sh"
    run.write_text(
        f"#!/bin/bash\nTP=4\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=8\n"
        f'CMD="python pretrain_gpt.py {FLAGS} --tensor-model-parallel-size $TP"\n'
        'srun --label bash -x -c "\\$CMD" 2>&1 | tee log\nEOF\n'
    )
    found = job_of(run)
    assert (found.parallelism.tp, found.parallelism.dp) == (4, 6)


def test_a_here_document_goes_through_a_pipe_to_sbatch(tmp_path):
    """cat <<EOF | sbatch: 2 nodes of 8 over tp 2."""
    run = tmp_path / "run.sh"
    run.write_text(
        "#!/bin/bash\nNODES=2\ncat <<EOF | sbatch --export=ALL\n#!/bin/bash\n#SBATCH --nodes=$NODES\n"
        f"srun torchrun --nnodes=\\$SLURM_NNODES --nproc_per_node=8 pretrain_gpt.py {FLAGS} --tensor-model-parallel-size 2\nEOF\n"
    )
    assert (job_of(run).parallelism.tp, job_of(run).parallelism.dp) == (2, 8)


@pytest.mark.parametrize(("shell", "dp"), [("bash -s 8 3", 6), ("bash -", 4), ("bash -x", 4), ("bash", 4)])
def test_a_shell_reads_a_here_document_with_its_arguments(tmp_path, shell, dp):
    """Without arguments 2 nodes of 8 over tp 4, with them 3."""
    run = tmp_path / "run.sh"
    run.write_text(
        f"#!/bin/bash\n{shell} <<'EOF'\ntorchrun --nproc_per_node ${{1:-8}} --nnodes ${{2:-2}} pretrain_gpt.py {FLAGS} "
        "--tensor-model-parallel-size 4\nEOF\n"
    )
    assert job_of(run).parallelism.dp == dp


def test_a_quoted_here_document_is_filled_in_by_the_job_alone(tmp_path):
    """TP of the outer script is not seen by the job, which sets its own."""
    run = tmp_path / "run.sh"
    run.write_text(
        f'#!/bin/bash\nTP=4\nsbatch --nodes 2 <<"EOF"\n#!/bin/bash\n#SBATCH --ntasks-per-node=8\nTP=2\n'
        f"srun python pretrain_gpt.py {FLAGS} --tensor-model-parallel-size $TP\nEOF\n"
    )
    found = job_of(run)
    assert (found.parallelism.tp, found.parallelism.dp) == (2, 8)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "accelerate launch -m lm_eval --model=hf\naccelerate launch -m lm_eval --model=vllm\n",
            "line 2 runs lm_eval, which does not train",
        ),
        (
            "export DGXNNODES=16\nexport MINIBS=192\nexport TENSOR_MODEL_PARALLEL=8\n",
            "sets variables of a job (DGXNNODES, MINIBS, TENSOR_MODEL_PARALLEL) and has no launch command",
        ),
    ],
)
def test_a_script_that_trains_nothing_says_what_it_is(tmp_path, text, line):
    run = tmp_path / "run.sh"
    run.write_text(f"#!/bin/bash\n{text}")
    with pytest.raises(ConfigError) as error:
        job_of(run)
    assert [line in problem for problem in error.value.problems] == [True]


def words(text, **env):
    """The words after the program that a script launches."""
    return [word.text for word in read_script(text, "run.sh", env).arguments]


def test_the_first_of_several_jobs_is_read_unless_a_line_is_chosen():
    text = "torchrun train.py --a 1\ntorchrun train.py --a 2"
    assert (words(text), words(text, LAUNCH_LINE="2")) == (["--a", "1"], ["--a", "2"])
    for other in ("3", "\N{SUPERSCRIPT TWO}"):  # a digit, but no number
        with pytest.raises(
            ConfigError, match=f"LAUNCH_LINE={other} is no line that launches a job; use one of lines 1, 2"
        ):
            words(text, LAUNCH_LINE=other)
    (note,) = read_script(text, "run.sh").notes[:1]
    assert note.startswith("lines 1, 2 each launch a job, of which only the first is read; write LAUNCH_LINE=N before")
    assert words("torchrun main.py --a 1\ntorchrun other.py --a 2", LAUNCH_LINE="2") == ["--a", "2"]


def test_jobs_of_which_a_test_chooses_one_are_asked_about():
    text = "if [ -f x ]; then\ntorchrun train.py --a 1\nelse\ntorchrun train.py --a 2\nfi"
    with pytest.raises(ConfigError, match="write LAUNCH_LINE=N before the command, N one of these"):
        words(text)


def test_values_missing_from_a_script_that_is_written_first_are_asked_for(tmp_path):
    """A missing value stands as a numbered mark, whose number was read as the value once the script was written to a file."""
    flags = FLAGS.replace("--num-layers 4", "--num-layers $LAYERS").replace(
        "--micro-batch-size 1", "--micro-batch-size $MBS"
    )
    run = tmp_path / "run.sh"
    body = f"torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py {flags} --bf16"
    run.write_text(f"#!/bin/bash\ncat > job.sbatch <<EOF\n#!/bin/bash\n{body}\nEOF\nsbatch job.sbatch\n")
    with pytest.raises(ConfigError) as error:
        job_of(run)
    fix = "write LAYERS=... MBS=... before the command"
    assert error.value.problems == [f"{run}: line 2: $LAYERS, $MBS have no value; {fix}"]


def test_a_script_without_an_extension_that_is_written_and_submitted(tmp_path):
    """By its first line a script; sbatch is given the name in a variable, and reads the headers: 2 nodes of 8 over tp 4."""
    run = tmp_path / "run.sh"
    run.write_text(
        "name=job\ncat >$name <<EOD\n#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n"
        f"srun python pretrain_gpt.py {FLAGS} --bf16 --tensor-model-parallel-size $TP\nEOD\nsbatch $name\n"
    )
    with pytest.raises(ConfigError, match=r"\$TP has no value"):
        job_of(run)
    run.write_text(run.read_text().replace("$TP", "4"))
    assert (job_of(run).parallelism.tp, job_of(run).parallelism.dp) == (4, 4)


@pytest.mark.parametrize(
    ("headers", "command", "devices"),
    [
        ("--nodes=1 --gres=gpu:2", "llamafactory-cli train job.yaml", 2),
        ("--gpus=4", "accelerate launch -m axolotl.cli.train job.yaml", 4),
        ("--nodes=1 --gres=gpu:8", "CUDA_VISIBLE_DEVICES=0,1,2 llamafactory-cli train job.yaml", 3),
    ],
)
def test_the_devices_that_slurm_gives_a_launcher_are_those_of_its_headers(tmp_path, headers, command, devices):
    """Slurm sets CUDA_VISIBLE_DEVICES to the devices of --gres (slurm.schedmd.com/gres.html); a launcher counts those."""
    script = read_script(f"#!/bin/bash\n#SBATCH {headers}\n{command}\n", "run.slurm")
    assert (script.devices or script.devices_per_node) == devices


@pytest.mark.parametrize(
    ("first", "asks"),
    [
        ("TP=8", "line 5 sources ./CONFIG.sh, which was not found; put it in the same folder, or add --with FILE"),
        ("DGXNNODES=1", "give the config that reads them: --from nemo FILE, with this file as --with"),
    ],
)
def test_a_file_of_variables_asks_for_what_reads_them(tmp_path, first, asks):
    """Sizes that a sourced script puts into its command, or those of MLPerf, whose config reads them."""
    run = tmp_path / "run.sh"
    run.write_text(f"{first}\nPP=2\nMBS=4\nGBS=64\n. `pwd`/CONFIG.sh\n")
    with pytest.raises(ConfigError) as error:
        read_script(run.read_text(), str(run), {}, None)
    assert error.value.problems[0].endswith(asks)


@pytest.mark.parametrize(
    "command", ["torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py", "accelerate launch train.py"]
)
def test_words_that_a_command_prints_are_noted(command):
    """They may be any option; what a command prints for an option's value is that option's."""
    script = read_script(f"{command} --a 1 $(python make.py) --name $(date +%s)", "run.sh")
    assert [note for note in script.notes if "empty" in note] == [
        "line 1: $(python make.py) in line 1 is a command, and commands are not run: taken as empty"
    ]


def test_a_script_that_echo_writes_and_torchrun_starts_without_python(tmp_path):
    """torchrun --no-python runs any program; here 2 x 4 processes of one script, which a variable holds as a here-document."""
    flags = (
        "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    )
    flags += "--micro-batch-size 1 --global-batch-size 16 --bf16 --vocab-file gpt2-vocab.json"
    script = f"""#!/bin/bash
BODY=$(cat <<- EOM
  sleep 3 ;
  numactl --membind=\\$((LOCAL_RANK/2)) nice -10 python pretrain_gpt.py {flags}
EOM
)
echo "$BODY" > worker.sh
torchrun --nproc-per-node=4 --nnodes=2 --no-python bash worker.sh 2>&1 | tee log.txt
"""
    run = tmp_path / "run.sh"
    run.write_text(script, encoding="utf-8")
    assert (job_of(run).parallelism.dp, job_of(run).model.n_layers) == (8, 4)
