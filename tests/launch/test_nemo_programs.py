"""Programs of NeMo 2.0 that give objects of their own to llm.train."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from test_files_of_forks import asked, written

PROGRAM = """\
    import argparse
    from nemo import lightning as nl
    from nemo.collections import llm
    from megatron.core.optimizer import OptimizerConfig

    def options():
        own = argparse.ArgumentParser()
        own.add_argument("--layers", type=int, default=6)
        return own

    if __name__ == "__main__":
        args = options().parse_args()
        length = 1024
        data = llm.MockDataModule(seq_length=length, global_batch_size=32)
        size = llm.GPTConfig(num_layers=args.layers, hidden_size=512, ffn_hidden_size=2048, num_attention_heads=8)
        model = llm.GPTModel(size, tokenizer=data.tokenizer)
        strategy = nl.MegatronStrategy(tensor_model_parallel_size=2, pipeline_dtype=torch.bfloat16)
        config = OptimizerConfig(optimizer="adam", bf16=True, use_distributed_optimizer=True)
        optimizer = nl.MegatronOptimizerModule(config=config)
        trainer = nl.Trainer(devices=8, num_nodes=2, strategy=strategy, plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"))
        print("starting")
        llm.train(model=model, data=data, trainer=trainer, log=nl.NeMoLogger(), optim=optimizer)
"""


def test_a_program_without_a_recipe(tmp_path: Path) -> None:
    """16 devices over tp 2 are 8 ranks; a micro-batch of 4 and GPT-2's 50,257 entries are MockDataModule's own."""
    plan = written(tmp_path, "run.py", PROGRAM).config
    assert {key: plan["model"][key] for key in ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "vocab_sz")} == {
        "n_layers": 6, "hidden_sz": 512, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 50257,
    }  # fmt: skip
    assert {key: plan["parallelism"][key] for key in ("tp", "dp", "zero_level")} == {"tp": 2, "dp": 8, "zero_level": 1}
    assert plan["data"] == {"gbs": 32, "microbatch_sz": 4, "seqlen": 1024}
    assert plan["performance"]["precision"] == "bf16"


@pytest.mark.parametrize(("code", "precision"), [("[bf16_mixed()]", "bf16"), ("own(args)", ""), ("None", "fp32")])
def test_the_precision_plugin_of_a_program(tmp_path: Path, code: str, precision: str) -> None:
    """A function of precision/mixed_precision.py by its name, one that is not read, and none at all."""
    text = PROGRAM.replace('nl.MegatronMixedPrecision(precision="bf16-mixed")', code)
    if precision:
        assert written(tmp_path, "run.py", text).config["performance"]["precision"] == precision
    else:
        assert asked(tmp_path, "run.py", text)[0].startswith("trainer.plugins is own(...), not read; add --set")


def test_a_class_with_sizes_of_its_own(tmp_path: Path) -> None:
    """nemo/collections/llm/gpt/model/llama.py, Llama2Config7B."""
    old = PROGRAM[PROGRAM.index("llm.GPTConfig(") : PROGRAM.index(")\n        model")]
    plan = written(tmp_path, "run.py", PROGRAM.replace(old, "llm.Llama2Config7B(bias_dropout_fusion=True")).config
    assert (plan["model"]["n_layers"], plan["model"]["inter_sz"], plan["model"]["glu"]) == (32, 11008, True)


def with_class(own: str, made: str) -> str:
    """The program with a class before its functions, of which it makes its config."""
    old = PROGRAM[PROGRAM.index("llm.GPTConfig(") : PROGRAM.index(")\n        model")]
    before = textwrap.indent(textwrap.dedent(own), "    ")
    return PROGRAM.replace(old, made).replace("    def options", f"{before}\n    def options")


def test_a_class_of_its_own(tmp_path: Path) -> None:
    """Over Llama3Config (nemo/collections/llm/gpt/model/llama.py): a gated MLP, RMSNorm and 8 groups."""
    own = """\
        @dataclass
        class Small(Llama3Config):
            num_layers: int = 4
            hidden_size: int = 512
            num_attention_heads: int = 16
            ffn_hidden_size: int = %s
    """
    text = with_class(own, "Small(hidden_size=1024")
    model = written(tmp_path, "run.py", text % 1408).config["model"]
    assert {key: model[key] for key in ("n_layers", "hidden_sz", "inter_sz", "n_kv_heads", "glu", "norm")} == {
        "n_layers": 4, "hidden_sz": 1024, "inter_sz": 1408, "n_kv_heads": 8, "glu": True, "norm": "rmsnorm",
    }  # fmt: skip
    (line,) = asked(tmp_path, "run.py", text % "4 * width()")
    assert line == "line 11: ffn_hidden_size is computed; add --set model=NAME"
    assert written(tmp_path, "run.py", text % "4 * width()", model="llama3-8b").config["model"] == "llama3-8b"


def test_a_class_of_its_own_that_sets_nothing(tmp_path: Path) -> None:
    """Only a dataclass has fields of its own: Python's other classes keep the __init__ of their base, and its defaults."""
    own = "class Small(llm.Llama2Config7B):\n    num_layers: int = 4\n"
    assert written(tmp_path, "run.py", with_class(own, "Small(")).config["model"]["n_layers"] == 32
    assert written(tmp_path, "run.py", with_class(f"@dataclass\n{own}", "Small(")).config["model"]["n_layers"] == 4


def test_a_class_of_its_own_whose_code_sets_fields(tmp_path: Path) -> None:
    own = "@dataclass\nclass Small(llm.Llama2Config7B):\n    def __post_init__(self):\n        self.num_layers = 4\n"
    (line,) = asked(tmp_path, "run.py", with_class(own, "Small("))
    assert line == "line 8: __post_init__ sets fields; add --set model=NAME"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("llm.MockDataModule", "OwnData", "data: micro_batch_size is that of a module of its own;"),
        (
            "global_batch_size=32",
            "global_batch_size=32, tokenizer=own()",
            "vocabulary size unknown (tokenizer of its own);",
        ),
        ("llm.GPTModel(size, tokenizer=data.tokenizer)", "own_model()", "model of llm.train is not read;"),
        ('print("starting")', "setattr(size, 'num_layers', 2)", "line 21 sets the job in a way that is not read;"),
        (
            "num_layers=args.layers",
            "num_layers=depth()",
            "model.config.num_layers: expected a whole number of at least 1",
        ),
    ],
)
def test_what_such_a_program_leaves_unsaid(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in PROGRAM
    (problem,) = asked(tmp_path, "run.py", PROGRAM.replace(old, new))
    assert problem.startswith(said)


def test_a_setting_under_a_test_that_is_not_decided_is_not_taken(tmp_path: Path) -> None:
    """Two stages on a machine with more than four devices, one elsewhere: the 2 is not the number of stages."""
    line = "        trainer = nl.Trainer("
    branch = "        if torch.cuda.device_count() > 4:\n            strategy.pipeline_model_parallel_size = 2\n"
    program = PROGRAM.replace(line, branch + line)
    assert "2 if torch.cuda.device_count() > 4" in "\n".join(asked(tmp_path, "run.py", program))


def test_a_class_of_a_preset_with_other_sizes(tmp_path: Path) -> None:
    """Qwen3Config600M has 28 layers; what the program sets over them counts."""
    old = PROGRAM[PROGRAM.index("llm.GPTConfig(") : PROGRAM.index(")\n        model")]
    plan = written(tmp_path, "run.py", PROGRAM.replace(old, "llm.Qwen3Config600M(num_layers=2")).config
    assert plan["model"] == {"preset": "qwen3-0.6b", "n_layers": 2}
