"""Imports Megatron-Core, once for all processes that run it: they are forks of one that has imported this."""

import os
import warnings

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's jit_fuser is torch.compile: run it eagerly
warnings.filterwarnings("ignore")

import mcore_linear  # noqa: E402
import mcore_mamba  # noqa: E402
import mcore_moe  # noqa: E402
import mcore_muon  # noqa: E402
import mcore_patches  # noqa: E402

mcore_patches.extensions()
mcore_moe.extensions()
mcore_mamba.extensions()
mcore_linear.extensions()
mcore_muon.extensions()

import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.core.models.gpt.gpt_model  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel.schedules  # noqa: E402,F401
import torch.testing._internal.distributed.fake_pg  # noqa: E402,F401
