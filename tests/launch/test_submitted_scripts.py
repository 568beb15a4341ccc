"""A script that hands another to sbatch, and words that its reader is to fill in."""

from steptime.launch.read import read
from steptime.launch.reading import to_job

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --vocab-size 1000"
)
H100 = {"hardware.node_type": "dgx-h100"}


def job(path):
    return to_job(read("auto", str(path), H100), H100)


def test_a_script_that_submits_another_has_its_nodes_and_the_headers_of_that_one(tmp_path):
    """2 nodes of sbatch's own words, 8 tasks on each by the header: 16 devices over tp 4."""
    (tmp_path / "job.sh").write_text(
        f"#SBATCH --ntasks-per-node=8\nsrun python pretrain_gpt.py $PARAMS {FLAGS} --fp16\n"
    )
    run = tmp_path / "run.sh"
    run.write_text(
        '#!/bin/bash\nexport PARAMS="--tensor-model-parallel-size 4"\nsbatch --nodes=2 --export=PARAMS job.sh\n'
    )
    found = job(run)
    assert (found.parallelism.tp, found.parallelism.dp, str(found.performance.precision)) == (4, 4, "fp16")


def test_words_to_be_filled_in_are_no_redirections(tmp_path):
    """A shell would write to the file --fp16: the reader means it as a flag."""
    run = tmp_path / "run.sh"
    run.write_text(
        f'#!/bin/bash\nO="{FLAGS} --tensorboard-dir <PATH TO tensorboard> --fp16 "\n'
        'CMD="torchrun --nproc_per_node 8 pretrain_gpt.py $O"\nbash -c "${CMD}"\n'
    )
    assert str(job(run).performance.precision) == "fp16"
