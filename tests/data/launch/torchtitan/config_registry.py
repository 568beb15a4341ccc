# Config functions for the tests, after torchtitan/models/llama3/config_registry.py; read by their syntax, never run
import dataclasses

from torchtitan.components.optimizer import OptimizersContainer, OptimizersInBackwardContainer
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.protocols.model_converter import ModelConvertersContainer
from torchtitan.trainer import Trainer

from . import model_registry

SEQ_LEN = 8192


def llama3_8b() -> Trainer.Config:
    """One node or more."""
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=model_registry("8B"),
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=SEQ_LEN, steps=1000),
        dataloader=make_loader("c4", workers=2 * 4),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )


def llama3_8b_tp() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=4, data_parallel_shard_degree=16)
    config.training.local_batch_size = 2
    config.activation_checkpoint = None
    return config


def llama3_8b_long() -> Trainer.Config:
    base = llama3_8b_tp()
    return dataclasses.replace(base, training=TrainingConfig(local_batch_size=1, seq_len=32768))


def llama3_8b_float8() -> Trainer.Config:
    config = llama3_8b_tp()
    config.model_converters = ModelConvertersContainer.Config(
        converters=[Float8LinearConverter.Config(enable_fsdp_float8_all_gather=True)],
    )
    config.compile = CompileConfig(enable=True)
    config.optimizer = OptimizersInBackwardContainer.Config(lr=8e-4)
    return config


def llama3_8b_computed() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=4 * 2, seq_len=8192),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8),
    )


def llama3_8b_looped() -> Trainer.Config:
    config = llama3_8b_tp()
    for section in (config.training,):
        section.seq_len = 4096
    return config


def llama3_8b_grown() -> Trainer.Config:
    config = llama3_8b_tp()
    config.training.seq_len += 4096
    return config


def llama3_8b_flex() -> Trainer.Config:
    config = llama3_8b_tp()
    config.model_spec = model_registry("8B_flex")
    return config
