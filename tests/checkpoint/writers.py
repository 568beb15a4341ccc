"""Tiny random models through the libraries that people save with: `python writers.py NAME FOLDER`.

LLAMA: 512 tokens, width 128, MLP 384, 2 layers, 4 heads of 32, 2 key heads, no tied head; MLP: 4 -> 8 -> 2 with biases.
"""

import os
import sys
from pathlib import Path

LLAMA = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512,
}  # fmt: skip


def llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16)


def perceptron():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))


def linears(model):
    import torch

    return [
        (name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and name != "lm_head"
    ]


def save(state, folder):
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def transformers(folder):
    llama().save_pretrained(folder)


def transformers_shards(folder):
    llama().save_pretrained(folder, max_shard_size="400KB")


def transformers_trainer(folder):
    import torch
    from transformers import Trainer, TrainingArguments

    rows = [dict.fromkeys(("input_ids", "labels"), torch.zeros(8, dtype=torch.long))] * 4
    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 1, "report_to": [], "use_cpu": True}
    trainer = Trainer(llama(), TrainingArguments(str(folder), disable_tqdm=True, **options), train_dataset=rows)
    trainer.train()
    trainer.save_model()


def transformers_family(folder, family, options):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(family, **options)
    kinds = (AutoModelForImageTextToText if "vision_config" in options else AutoModelForCausalLM, AutoModel)
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    kind.from_config(config).save_pretrained(folder)


def quantized_by_transformers(folder, config):
    import torch
    from transformers import AutoModelForCausalLM

    transformers(folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder / "model")


def bitsandbytes_4(folder):
    from transformers import BitsAndBytesConfig

    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantized_by_transformers(folder, BitsAndBytesConfig(**options))


def bitsandbytes_8(folder):
    from transformers import BitsAndBytesConfig

    quantized_by_transformers(folder, BitsAndBytesConfig(load_in_8bit=True))


def torchao_int8(folder):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    quantized_by_transformers(folder, TorchAoConfig(Int8WeightOnlyConfig()))


def torchao_fp8(folder):
    from torchao.quantization import Float8WeightOnlyConfig
    from transformers import TorchAoConfig

    quantized_by_transformers(folder, TorchAoConfig(Float8WeightOnlyConfig()))


def torchao_pickled(folder):
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda part, name: (name, part) in linears(model))
    torch.save(model.state_dict(), folder / "model.pt")


def hqq(folder):
    import torch
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model = llama()
    state = model.state_dict()
    for name, part in linears(model):
        del state[f"{name}.weight"]
        packed = HQQLinear(
            part, BaseQuantizeConfig(nbits=4, group_size=64, axis=1), compute_dtype=torch.bfloat16, device="cpu"
        )
        state |= {f"{name}.{key}": value for key, value in packed.state_dict().items()}
    save(state, folder)


def quanto(folder, bits=8):
    from optimum.quanto import freeze, qint4, qint8, quantize

    model = llama()
    quantize(model, weights={4: qint4, 8: qint8}[bits], exclude="lm_head")
    freeze(model)
    save(model.state_dict(), folder)


def quanto_4(folder):
    quanto(folder, 4)


def compressed(folder, form, scheme):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = llama()
    groups = {"group": preset_name_to_scheme(scheme, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen", format=form)
    apply_quantization_config(model, config)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def compressed_int4(folder):
    compressed(folder, "pack-quantized", "W4A16")


def compressed_int3(folder):
    compressed(folder, "pack-quantized", "W3A16")


def compressed_mxfp6(folder):
    compressed(folder, "mxfp6-pack-quantized", "MXFP6A16")


def compressed_nvfp4(folder):
    compressed(folder, "nvfp4-pack-quantized", "NVFP4A16")


def compressed_mxfp4(folder):
    compressed(folder, "mxfp4-pack-quantized", "MXFP4A16")


def compressed_fp8(folder):
    compressed(folder, "float-quantized", "FP8_DYNAMIC")


def mlx(folder):
    import mlx.core as mx
    import numpy as np

    found = {}
    for name, tensor in llama().float().state_dict().items():
        array = mx.array(np.array(tensor)).astype(mx.float16)
        if "layers" not in name or array.ndim < 2:
            found[name] = array
            continue
        stem = name.removesuffix(".weight")
        parts = mx.quantize(array, group_size=64, bits=4)
        found |= {f"{stem}.{key}": part for key, part in zip(("weight", "scales", "biases"), parts, strict=True)}
    mx.save_safetensors(str(folder / "model.safetensors"), found)


def peft(folder):
    from peft import LoraConfig, get_peft_model

    get_peft_model(llama(), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])).save_pretrained(folder)


def diffusers(folder):
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    blocks = {"block_out_channels": (32, 64), "layers_per_block": 1}
    parts = {
        "unet": UNet2DConditionModel(
            **blocks, sample_size=8, cross_attention_dim=32, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        "vae": AutoencoderKL(
            **blocks, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4
        ),
        "text_encoder": CLIPTextModel(CLIPTextConfig(hidden_size=32, intermediate_size=37, num_hidden_layers=3, vocab_size=100)),
    }  # fmt: skip
    rest = dict.fromkeys(("tokenizer", "safety_checker", "feature_extractor"))
    pipeline = StableDiffusionPipeline(**parts, **rest, scheduler=DDIMScheduler(), requires_safety_checker=False)
    pipeline.save_pretrained(folder)
    sys.stdout.write(f"{sum(p.numel() for part in parts.values() for p in part.parameters())}\n")


def accelerate(folder):
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = perceptron()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    accelerator.save_state(folder)


def lightning(folder):
    import torch
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = perceptron()

        def training_step(self, batch, _):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    trainer = Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(8, 4)))
    trainer.save_checkpoint(folder / "last.ckpt")


def deepspeed(folder, stage):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + os.getpid() % 400), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    import deepspeed
    import torch

    # no extension for shared memory: compiled for minutes, under a lock in the home directory that a killed run leaves
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = perceptron()
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "Adam", "params": {"torch_adam": True}}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.backward(engine(torch.zeros(1, 4, dtype=torch.bfloat16)).sum())
    engine.step()
    engine.save_checkpoint(str(folder))


def deepspeed_1(folder):
    deepspeed(folder, 1)


def deepspeed_2(folder):
    deepspeed(folder, 2)


def deepspeed_3(folder):
    deepspeed(folder, 3)


def orbax(folder):
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    weights = {"w": jnp.ones((4, 8)), "b": jnp.ones((8,))}
    with ocp.CheckpointManager(str(folder)) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"params": weights, "step": step}))


def flax(folder, orbax=True):
    import flax
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen
    from flax.training import checkpoints, train_state

    flax.config.update("flax_use_orbax_checkpointing", orbax)
    model = linen.Dense(8)
    params = model.init(jax.random.PRNGKey(0), jnp.ones((1, 4)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    for step in (5, 10):
        checkpoints.save_checkpoint(str(folder), state, step=step, keep=2, overwrite=True)


def flax_msgpack(folder):
    flax(folder, orbax=False)


def equinox(folder):
    import equinox
    import jax

    equinox.tree_serialise_leaves(folder / "m.eqx", equinox.nn.MLP(4, 2, 8, 1, key=jax.random.PRNGKey(0)))


def keras(folder):
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    model.fit(np.zeros((4, 4)), np.zeros((4, 2)), verbose=0)
    model.save(folder / "m.keras")


def gguf(folder):
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    matrix = np.zeros((8, 64), np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    import json
    import warnings

    warnings.simplefilter("ignore")
    if sys.argv[1] == "family":
        transformers_family(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    else:
        globals()[sys.argv[1]](Path(sys.argv[2]))
