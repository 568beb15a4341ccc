"""Small checkpoints, made by the libraries that write them; nothing binary is kept in the repository."""

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from steptime.checkpoint import summarize_checkpoint
from steptime.commands import summarize_ckpt as cli
from steptime.report.checkpoint_summary import report, summary_html


def llama(layers=4, hidden=64, inter=160, vocab=512, kv=16, tied=False, dtype=torch.bfloat16):
    """A state dict with the names of a Hugging Face llama."""
    state = {"model.embed_tokens.weight": torch.zeros(vocab, hidden, dtype=dtype)}
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden),
            "mlp.down_proj": (hidden, inter), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            state[f"{p}{name}.weight"] = torch.zeros(shape, dtype=dtype)
    state["model.norm.weight"] = torch.zeros(hidden, dtype=dtype)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if tied else torch.zeros(vocab, hidden, dtype=dtype)
    return state


HIDDEN, FFN, VOCAB = 64, 160, 512


def megatron_rank(tp, pp, ways=2, stages=2, layers=2, tied=False, vpp=1):
    """model_optim_rng.pt of one rank, as Megatron's generate_state_dict lays it out."""

    def chunk(first, last):
        state = {}
        if first:
            state["embedding.word_embeddings.weight"] = torch.zeros(VOCAB // ways, HIDDEN, dtype=torch.bfloat16)
        for layer in range(layers):
            for name, shape in {
                "self_attention.linear_proj.weight": (HIDDEN, HIDDEN // ways),
                "self_attention.linear_qkv.weight": ((HIDDEN + 32) // ways, HIDDEN),
                "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
                "mlp.linear_fc1.weight": (2 * FFN // ways, HIDDEN),
                "mlp.linear_fc2.weight": (HIDDEN, FFN // ways),
                "pre_mlp_layernorm.weight": (HIDDEN,),
            }.items():
                state[f"decoder.layers.{layer}.{name}"] = torch.zeros(shape, dtype=torch.bfloat16)
        if last:
            state["decoder.final_layernorm.weight"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
            state["output_layer.weight"] = torch.zeros(VOCAB // ways, HIDDEN, dtype=torch.bfloat16)
        return state

    args = argparse.Namespace(
        num_layers=layers * stages * vpp, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=8,
        group_query_attention=True, num_query_groups=2, kv_channels=8, padded_vocab_size=VOCAB, swiglu=True,
        tensor_model_parallel_size=ways, pipeline_model_parallel_size=stages, data_parallel_size=4,
        untie_embeddings_and_output_weights=not tied,
    )  # fmt: skip
    models = {
        "model" if vpp == 1 else f"model{c}": chunk(pp == 0 and c == 0, pp == stages - 1 and c == vpp - 1)
        for c in range(vpp)
    }
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 5000,
        **models,
        "rng_state": [{"cpu": torch.zeros(9)}],
    }


def megatron(folder, ways=2, stages=2, **options):
    for tp in range(ways):
        for pp in range(stages):
            rank = folder / "iter_0005000" / f"mp_rank_{tp:02d}_{pp:03d}"
            rank.mkdir(parents=True)
            state = megatron_rank(tp, pp, ways, stages, **options)
            torch.save(state, rank / "model_optim_rng.pt")
            size = sum(t.numel() for key, value in state.items() if key.startswith("model") for t in value.values())
            flat = {name: torch.zeros(size) for name in ("param", "exp_avg", "exp_avg_sq")}
            torch.save({0: {0: {(torch.bfloat16, torch.float32): flat}}}, rank / "distrib_optim.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("5000")


def raw_safetensors(header, data=b""):
    """Bytes of a safetensors file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def torch_zip(pickled, storages=(), name="archive/data.pkl", method=zipfile.ZIP_STORED):
    """Bytes of a torch-like archive around any pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr(name, pickled)
        for key, size in dict(storages).items():
            archive.writestr(f"archive/data/{key}", bytes(size))
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def count(state):
    """Unique elements of a state dict."""
    return sum(t.numel() for t in {t.data_ptr(): t for t in state.values()}.values())


class Maker:
    """What the tests need to make a checkpoint and look at its summary."""

    llama = staticmethod(llama)
    megatron = staticmethod(megatron)
    raw_safetensors = staticmethod(raw_safetensors)
    torch_zip = staticmethod(torch_zip)
    count = staticmethod(count)
    save_safetensors = staticmethod(save_file)

    def __init__(self, folder):
        self.folder = folder

    def write(self, name, data):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def shards(self, state, parts=2):
        """A sharded safetensors model with its index; returns the file names."""
        names = list(state)
        size = -(-len(names) // parts)
        weight_map = {}
        for part in range(parts):
            file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
            own = names[part * size : (part + 1) * size]
            save_file({n: state[n] for n in own}, self.folder / file)
            weight_map |= dict.fromkeys(own, file)
        total = sum(t.numel() * t.element_size() for t in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return sorted(set(weight_map.values()))


def pytest_collection_modifyitems(items):
    """A parameter for each library that is here: without any there is no test."""
    items[:] = [item for item in items if "NOTSET" not in item.name]


@pytest.fixture
def make(tmp_path):
    return Maker(tmp_path)


@pytest.fixture
def summarize():
    """The summary of a path, its JSON document checked for what must always hold."""

    def run(path, **options):
        summary = summarize_checkpoint(path, **options)
        document = json.loads(json.dumps(summary.to_dict(summary.tensors), allow_nan=False))
        assert document["schema"] == "summarize-ckpt/1"
        assert document["pickle"]["executed"] is False
        assert document["exit_code"] == summary.exit_code
        assert all(problem["message"] for problem in document["problems"])
        text = report(summary)
        assert text.isprintable() or set(text) - {"\n"} <= {c for c in text if c.isprintable()}
        assert max(map(len, text.splitlines()[1:]), default=0) <= 80
        assert summary_html(summary).startswith("<p>")
        return summary

    return run


@pytest.fixture
def command(capsys):
    """(exit code, standard output, standard error) of the command."""

    def run(*argv):
        try:
            code = cli.main([os.fspath(a) for a in argv])
        except SystemExit as stop:
            code = stop.code
        out = capsys.readouterr()
        assert "Traceback" not in out.err
        return code, out.out, out.err

    return run


@pytest.fixture
def codes():
    """The problem codes of a summary."""
    return lambda summary: {problem.code for problem in summary.all_problems}


@pytest.fixture
def run_limited():
    """(exit code, JSON or text) of the command in a process of its own, its CPU time [s] and peak memory [bytes] checked."""

    def run(path, *options, seconds=5, nbytes=500 << 20, text=False):
        code = (
            "import re, sys; from steptime.commands.summarize_ckpt import main; code = main(sys.argv[1:]);"
            "status = open('/proc/self/status').read();"  # ru_maxrss would include the parent's, across fork and exec
            "print(re.search(r'VmHWM:\\s+(\\d+)', status)[1], file=sys.stderr); sys.exit(code)"
        )
        argv = [sys.executable, "-c", code, str(path), *([] if text else ["--json"]), *options]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(argv, capture_output=True, timeout=120, check=False, cwd=Path(__file__).parents[2])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert b"Traceback" not in done.stderr, done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds
        assert int(done.stderr.split()[-1]) * 1024 < nbytes
        return done.returncode, done.stdout.decode() if text else json.loads(done.stdout)

    return run
