"""Megatron's own layers where no flag names them: told by the checkout, the container, or a dump of arguments."""

from launch_readings import HARDWARE

from steptime.launch.megatron.sources import of_dump
from steptime.launch.read import read
from steptime.launch.reading import to_job

FLAGS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 16 --fp16 --vocab-file gpt2-vocab.json"
)
PARSER = "group.add_argument('--transformer-impl', default='{}', choices=['local', 'transformer_engine'])\n"


def attention(folder, script, files=(), more=""):
    for name, text in dict(files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    path = folder / "examples" / "run.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script} {FLAGS} {more}\n", encoding="utf-8")
    found = read("megatron", str(path), HARDWARE)
    return found.config["performance"]["attention_impl"], [
        note for note in found.config["notes"] if "own layers" in note
    ]


RUN = "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py"


def test_the_default_of_the_parser_in_the_checkout(tmp_path):
    files = {"pretrain_gpt.py": "import megatron\n", "megatron/training/arguments.py": PARSER.format("local")}
    told = ["Megatron's own layers: the default of --transformer-impl in the arguments.py of the checkout"]
    assert attention(tmp_path, RUN, files) == ("unfused", told)
    assert attention(tmp_path, RUN, files, "--transformer-impl transformer_engine")[0] == "flash"
    newer = files | {"megatron/training/arguments.py": PARSER.format("transformer_engine")}
    assert attention(tmp_path, RUN, newer) == ("flash", [])


def test_core_models_have_other_layers_where_the_program_does_not_ask(tmp_path):
    files = {"pretrain_gpt.py": "import megatron\n", "megatron/arguments.py": PARSER.format("local")}
    assert attention(tmp_path, RUN, files, "--use-mcore-models")[0] == "flash"
    asks = files | {"pretrain_gpt.py": "use_te = args.transformer_impl == 'transformer_engine'\n"}
    assert attention(tmp_path, RUN, asks, "--use-mcore-models")[0] == "unfused"


def test_a_container_older_than_transformer_engine(tmp_path):
    """NVIDIA's PyTorch containers have it from 22.09 on."""
    srun = 'srun --nodes 2 --ntasks-per-node 8 --container-image "nvcr.io/nvidia/pytorch:{}-py3" python pretrain_gpt.py'
    told = ["Megatron's own layers: the container pytorch:22.08 has no TransformerEngine"]
    assert attention(tmp_path, srun.format("22.08")) == ("unfused", told)
    assert attention(tmp_path, srun.format("22.09")) == ("flash", [])


def test_a_dump_without_a_choice_of_layers():
    """recompute_granularity came before --transformer-impl."""
    dump = {"num_layers": "4", "recompute_granularity": "None", "DDP_impl": "local"}
    assert of_dump(dump)["transformer_impl"] == "local"
    assert "transformer_impl" not in of_dump(
        {"num_layers": "4", "DDP_impl": "local"}
    )  # of 2021, which has its own profile
    assert of_dump({"transformer_impl": "transformer_engine"}) == {"transformer_impl": "transformer_engine"}


def test_attention_in_fp32_keeps_all_scores(tmp_path):
    """TransformerEngine's fused kernels take 16-bit values only: without --fp16 and --bf16 it multiplies whole matrices."""
    path = tmp_path / "run.sh"
    path.write_text(f"{RUN} {FLAGS.replace('--fp16 ', '')} --transformer-impl transformer_engine\n", encoding="utf-8")
    performance = read("megatron", str(path), HARDWARE).config["performance"]
    assert (performance["precision"], performance["attention_impl"]) == ("fp32", "unfused")
    path.write_text(f"{RUN} {FLAGS} --transformer-impl transformer_engine\n", encoding="utf-8")
    assert read("megatron", str(path), HARDWARE).config["performance"]["attention_impl"] == "flash"


def test_older_models_are_those_of_a_parser_that_does_not_ask_for_others(tmp_path):
    """Up to core 0.7 models are the older ones unless --use-mcore-models is given; --use-flash-attn is read by these.

    --attention-backend of later releases, which such a fork also has, does not make them Megatron-Core's.
    """
    older = PARSER.format("transformer_engine")
    older += "group.add_argument('--use-mcore-models', action='store_true',\n    help='Use those of megatron core')\n"
    files = {"pretrain_gpt.py": "import megatron\n", "megatron/training/arguments.py": older}
    flags = "--use-flash-attn --transformer-impl local --attention-backend auto"
    assert attention(tmp_path, RUN, files, flags)[0] == "flash"
    assert attention(tmp_path, RUN, files, f"{flags} --use-mcore-models")[0] == "unfused"
    newer = older.replace("help='Use", "help='DEPRECATED. Use")
    assert attention(tmp_path, RUN, files | {"megatron/training/arguments.py": newer}, flags)[0] == "unfused"


def test_transformer_engine_has_no_fused_attention_on_older_devices(tmp_path):
    """get_attention_backend (pytorch/attention/dot_product_attention/utils.py): sm80 and newer only; V100 has 7.0, A100 8.0."""
    (script := tmp_path / "run.sh").write_text(
        f"#!/bin/bash\n{RUN} {FLAGS} --attention-backend auto\n", encoding="utf-8"
    )
    for machine, kind, told in (("dgx-1v", "unfused", 1), ("dgx-a100", "flash", 0)):
        found = to_job(read("megatron", str(script), sets := {"hardware.node_type": machine}), sets)
        assert found.performance.attention_impl == kind
        assert sum("compute capability 8, v100-sxm2-32 has 7" in note for note in found.notes) == told
    sets = {"hardware.node_type": "dgx-1v", "performance.attention_impl": "flash"}
    assert to_job(read("megatron", str(script), sets), sets).performance.attention_impl == "flash"


def test_the_parser_of_a_checkout_says_whose_models_are_the_default(tmp_path):
    """From core 0.8 on --use-legacy-models asks for those that read --use-flash-attn; without it, local layers keep all scores.

    Nothing in these flags says the release (NVIDIA/Megatron-LM core_r0.8.0 megatron/training/arguments.py).
    """
    parser = PARSER.format("transformer_engine") + "group.add_argument('--use-legacy-models', action='store_true')\n"
    files = {"pretrain_gpt.py": "import megatron\n", "megatron/training/arguments.py": parser}
    flags = "--use-flash-attn --transformer-impl local"
    assert attention(tmp_path, RUN, files, flags)[0] == "unfused"
    assert attention(tmp_path, RUN, files, f"{flags} --use-legacy-models")[0] == "flash"


def test_before_release_2_fused_kernels_are_off_by_default(tmp_path):
    """v1.1.5 megatron/arguments.py: --batch-size and --model-parallel-size, which 2.0 stops at; flags turn fusions on."""
    old = FLAGS.replace("--micro-batch-size 1 --global-batch-size 16", "--batch-size 2 --model-parallel-size 4")
    path = tmp_path / "run.sh"
    for more, kinds in (("", ("composite", "composite")), (_FUSIONS, ("fused", "fused"))):
        path.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt2.py {old} {more}\n", encoding="utf-8")
        found = read("megatron", str(path), HARDWARE)
        performance = found.config["performance"]
        assert (performance["softmax_impl"], performance["activation_impl"]) == kinds
        assert (found.config["data"]["gbs"], found.framework) == (2 * 2, "Megatron-LM (2019 and 2020)")


_FUSIONS = "--scaled-upper-triang-masked-softmax-fusion --bias-gelu-fusion"


def test_flash_attention_of_local_layers_is_told_where_nothing_says_the_release(tmp_path):
    """Releases from core 0.4 to 0.19 have the flags: the older models read --use-flash-attn, Megatron-Core's layers do not."""
    path = tmp_path / "run.sh"
    for more, told in (("", 1), (" --data-impl mmap", 0)):  # --data-impl is of 23.06 and before
        path.write_text(f"{RUN} {FLAGS} --transformer-impl local --use-flash-attn{more}\n", encoding="utf-8")
        found = read("megatron", str(path), HARDWARE)
        assert found.config["performance"]["attention_impl"] == "flash"
        assert sum(flag.name == "--use-flash-attn" for flag in found.of("approximated")) == told


def test_a_spec_of_megatron_cores_own_layers(tmp_path):
    """core models/gpt/gpt_layer_specs.py, get_gpt_layer_local_spec: DotProductAttention, with all scores."""
    specs = "--spec megatron.core.models.gpt.gpt_layer_specs"
    assert attention(tmp_path, RUN, (), f"{specs} get_gpt_layer_local_spec --use-flash-attn")[0] == "unfused"
    assert attention(tmp_path, RUN, (), f"{specs} get_gpt_layer_with_transformer_engine_spec")[0] == "flash"
    path = tmp_path / "own.sh"
    for name, refused in (("get_gpt_layer_local_spec", 0), ("get_gpt_layer_own_spec", 1)):
        path.write_text(f"{RUN} {FLAGS} {specs} {name}\n", encoding="utf-8")
        assert len(read("megatron", str(path), HARDWARE).of("unmodeled")) == refused


def test_a_pipeline_that_overlaps_only_where_a_flag_says_so(tmp_path):
    """NVIDIA/Megatron-LM@f9283c5a megatron/arguments.py; core 0.4 has --no-overlap-p2p-communication in its place."""
    parser = "group.add_argument('--overlap-p2p-communication', action='store_true', dest='overlap_p2p_comm')\n"
    stages = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --num-layers 8"

    def overlaps(flags, files=()):
        attention(tmp_path, RUN, files, f"{stages} {flags}")
        found = read("megatron", str(tmp_path / "examples" / "run.sh"), HARDWARE)
        return found.config["performance"]["overlap"]["pp"]

    assert overlaps("")
    files = {"pretrain_gpt.py": "import megatron\n", "megatron/arguments.py": parser}
    assert not overlaps("", files)
    assert overlaps("--overlap-p2p-communication", files)


def test_the_parser_of_a_checkout_four_folders_up(tmp_path):
    files = {"pretrain_gpt.py": "import megatron\n", "megatron/arguments.py": PARSER.format("local")}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert attention(tmp_path / "scripts" / "site" / "model", RUN)[0] == "unfused"


def test_experts_of_a_checkout_without_a_choice_of_their_number(tmp_path):
    """Core 0.4 and before: SwitchMLP gives each token one expert, by Sinkhorn's algorithm; core 0.5 has --moe-router-topk 2."""

    def experts(parser, more=""):
        files = {"pretrain_gpt.py": "import megatron\n", "megatron/arguments.py": parser}
        attention(tmp_path, RUN, files, f"--num-experts 8 --transformer-impl transformer_engine {more}")
        found = read("megatron", str(tmp_path / "examples" / "run.sh"), HARDWARE).config["model"]["moe"]
        return found["experts_per_token"], found["load_balancing"]

    older = "group.add_argument('--num-experts', type=int, default=None)\n"
    newer = older + "group.add_argument('--moe-router-topk', type=int, default=2)\n"
    assert experts(older) == (1, "sinkhorn")
    assert experts(newer)[0] == 2
    assert experts(f"{older}ArgumentGroupFactory(TransformerConfig)  # args.moe_router_topk\n")[0] == 2
    assert experts(newer, "--use-legacy-models") == (1, "sinkhorn")


def test_a_flag_that_the_parser_stores_under_another_name(tmp_path):
    """--norm-epsilon is of core 0.4 to 0.15, some of which have the older models; 0.16 has it as --layernorm-epsilon."""
    (path := tmp_path / "run.sh").write_text(
        f"{RUN} {FLAGS} --transformer-impl local --use-flash-attn --norm-epsilon 1e-5 --normalization RMSNorm\n",
        encoding="utf-8",
    )
    found = read("megatron", str(path), HARDWARE)
    assert found.config["performance"]["attention_impl"] == "flash"
    assert sum(flag.name == "--use-flash-attn" for flag in found.of("approximated")) == 1


def test_layers_of_mindspeed_have_flash_attention_by_a_flag(tmp_path):
    """Ascend/MindSpeed-LLM: local layers by default, whose attention is replaced only where --use-flash-attn is given."""
    told = ["Megatron's own layers: the default of --transformer-impl in MindSpeed-LLM"]
    own, bloom = tmp_path / "own", tmp_path / "bloom"
    own.mkdir()
    bloom.mkdir()
    flags = "--use-mcore-models --use-fused-rmsnorm --normalization RMSNorm"
    assert attention(own, RUN, (), f"{flags} --use-flash-attn") == ("flash", told)
    assert attention(own, RUN, (), f"{flags} --use-flash-attn --transformer-impl local") == ("flash", [])
    assert attention(own, RUN, (), flags) == ("unfused", told)
    files = {"pretrain_gpt.py": "import megatron\n", "mindspeed_llm/training/arguments.py": PARSER.format("local")}
    assert attention(bloom, RUN, files) == ("unfused", told)


def test_kernels_of_the_models_before_megatron_core(tmp_path):
    """SwiGLU is torch's SiLU and product, rotary embedding products and sums; Megatron-DeepSpeed adds gradients separately."""
    path = tmp_path / "run.sh"
    rotary = "--swiglu --use-rotary-position-embeddings"
    fused = {"activation_impl": "fused", "rope_impl": "fused", "grad_accumulation_fusion": True}
    older = {"activation_impl": "composite", "rope_impl": "own_tables", "grad_accumulation_fusion": True}
    deepspeed = "--deepspeed --zero-stage 1 --accumulate-allreduce-grads-in-fp32"
    mindspeed = "--use-mcore-models --use-fused-rmsnorm --normalization RMSNorm"
    for more, kernels in (
        (rotary, fused),
        (f"{rotary} --no-rope-fusion", fused | {"rope_impl": "own_tables"}),
        (f"{rotary} --use-legacy-models", fused | {"activation_impl": "composite"}),
        (f"{rotary} --use-legacy-models --use-mcore-models", fused),
        (f"{rotary} {mindspeed}", fused | {"rope_impl": "own_tables"}),
        (f"{rotary} {mindspeed} --use-fused-rotary-pos-emb", fused),
        (f"{rotary} --data-impl mmap --recompute-granularity full", older),
        (f"{rotary} --DDP-impl local --accumulate-allreduce-grads-in-fp32", older),
        (f"{rotary} {deepspeed}", older | {"grad_accumulation_fusion": False}),
        (deepspeed, {"activation_impl": "fused", "grad_accumulation_fusion": False}),
    ):
        path.write_text(f"{RUN} {FLAGS.replace('--fp16', '--bf16')} {more}\n", encoding="utf-8")
        found = read("megatron", str(path), HARDWARE).config["performance"]
        assert {key: found[key] for key in kernels} == kernels, more


def test_layers_of_a_dated_megatron_of_pai(tmp_path):
    """Pai-Megatron-Patch's Megatron-LM-231007 has the parser of core 0.4, whose --transformer-impl is local by default."""
    for date, kernels in (("231007", ("composite", "own_tables", True)), ("240405", ("fused", "fused", None))):
        path = tmp_path / "run.sh"
        patched = f"MEGATRON_PATH=/workspace/Megatron-LM-{date}\nexport PYTHONPATH=$MEGATRON_PATH:$PYTHONPATH\n"
        flags = "--swiglu --position-embedding-type rope --use-flash-attn --extra-vocab-size 0"
        path.write_text(f"{patched}{RUN} {FLAGS} {flags}\n", encoding="utf-8")
        found = read("megatron", str(path), HARDWARE)
        performance = found.config["performance"]
        assert performance["attention_impl"] == "flash"
        named = (*(performance[key] for key in ("activation_impl", "rope_impl")), performance.get("scores_in_buffer"))
        assert named == kernels
        told = {flag.name: flag.value for flag in found.of("default")}
        assert told["--transformer-impl"] == ("local" if date == "231007" else "transformer_engine")


def test_the_vocabulary_of_a_checkpoint_that_extra_entries_complete(tmp_path):
    """Pai-Megatron-Patch megatron_patch/tokenizer: tokenizer.vocab_size, without special tokens, + --extra-vocab-size."""
    path = tmp_path / "run.sh"
    for loaded, extra, entries in (
        ("Qwen-2-7b-hf-to-mg-tp1", 293, 151936),
        ("Meta-Llama-3-8B", 256, 128256),
        ("llama-30b-hf", 0, 32000),  # of Llama 1
    ):
        flags = f"--patch-tokenizer-type LLamaTokenizer --load /mnt/{loaded} --extra-vocab-size {extra}"
        path.write_text(f"{RUN} {FLAGS.replace('--vocab-file gpt2-vocab.json', flags)}\n", encoding="utf-8")
        assert read("megatron", str(path), HARDWARE).config["model"]["vocab_sz"] == entries
