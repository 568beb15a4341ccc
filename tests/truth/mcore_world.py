"""Megatron-Core on a CPU: one process that pretends to be one rank of a large job.

Reads a JSON request on stdin, writes a JSON answer on stdout. A process can initialise one layout only, so the tests fork one
process per layout and send it many configurations. The process group is torch's "fake" one: collectives move nothing, but
each is recorded.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import traceback
import types

import mcore_imports  # noqa: F401  (Megatron itself, after what stands in for its extensions)
import mcore_linear
import mcore_mamba
import mcore_moe
import mcore_mtp
import mcore_muon
import mcore_patches as patches
import mcore_torch_fsdp
import torch
import torch.distributed as dist
from mcore_peak import Live
from mcore_record import Collectives, Saved
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_BYTES = 8 * 2**30
"""Address space: some settings of Megatron recurse without end (recomputing an mlp that has biases)."""


def squared_relu(x):
    """Megatron-Core's own."""
    from megatron.core.activations import squared_relu as theirs

    return theirs(x)


ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu, "relu2": squared_relu}


def start(tp, pp, dp, rank, ep, etp, instances):
    """Pretend to be `rank` of tp*dp*pp (tp fastest, pp slowest) and set Megatron's parallel state."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp * dp)
    from megatron.core import parallel_state

    patches.device_and_random()
    patches.norms()
    mcore_moe.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,
    )


def config_of(c, world):
    """A TransformerConfig from a flat description."""
    from megatron.core.fusions import fused_bias_geglu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent = c.get("mla", {})
    kind = MLATransformerConfig if latent else TransformerConfig
    dtype, glu = DTYPES[c.get("dtype", "bf16")], c.get("glu", True)
    recompute = {f"recompute_{k}": v for k, v in c.get("recompute", {}).items()}
    activation = {"activation_func": ACTIVATIONS[c.get("activation", "silu" if glu else "gelu")]}
    if "limit" in c:  # gpt-oss
        activation = {"activation_func": fused_bias_geglu.quick_gelu, "glu_linear_offset": 1.0}
        activation["activation_func_clamp_value"] = c["limit"]
    return kind(
        num_layers=c["layers"],
        hidden_size=c["h"],
        num_attention_heads=c["nq"],
        num_query_groups=c["nkv"],
        kv_channels=c["d"],
        ffn_hidden_size=c["i"],
        use_cpu_initialization=True,
        perform_initialization=False,
        gated_linear_unit=glu,
        **activation,
        bias_activation_fusion=c.get("fused_activation", True),
        masked_softmax_fusion=c.get("fused_softmax", False),
        add_bias_linear=c.get("bias", False),
        qk_layernorm=c.get("qk_norm", False),
        normalization=c.get("norm", "RMSNorm"),
        hidden_dropout=c.get("dropout", 0.0),
        attention_dropout=c.get("dropout", 0.0),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=world["tp"],
        pipeline_model_parallel_size=world["pp"],
        sequence_parallel=c.get("sp", False),
        gradient_accumulation_fusion=c.get("grad_accumulation_fusion", False),
        cross_entropy_loss_fusion=c.get("fused_loss", False),
        **recompute,
        **c.get("mamba", {}),
        **c.get("linear", {}),
        mtp_num_layers=c.get("mtp"),
        **expert_config(c, world),
        **latent,
    )


def expert_config(c, world):
    """Megatron's own keys of a mixture of experts, with even routing."""
    said = c.get("moe")
    if not said:
        return {}
    mcore_moe.Even.topk, mcore_moe.Even.stride = said["moe_router_topk"], c.get("stride", 1)
    degrees = {"expert_model_parallel_size": world["ep"], "expert_tensor_parallel_size": world["etp"]}
    return said | degrees | {"moe_router_force_load_balancing": True, "moe_grouped_gemm": c.get("grouped", True)}


def model_of(c, world):
    """Megatron's GPTModel with its local layer spec: this rank's pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(c, world)
    said = {
        "vocab_size": c["vocab"],
        "max_sequence_length": c["s"],
        "parallel_output": True,
        "share_embeddings_and_output_weights": c.get("tied", False),
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    if "hybrid" in c:
        return mcore_mamba.hybrid(c, config, **said).to(config.params_dtype).train()
    position = "learned_absolute" if c.get("learned_positions") else "none" if "mla" in c else "rope"
    spec = layers_of(c, config)
    said |= mcore_mtp.block(config, spec)
    model = GPTModel(config=config, transformer_layer_spec=spec, position_embedding_type=position, **said)
    return model.to(config.params_dtype).train()


def layers_of(c, config):
    """The spec of all layers, or of each where only some have experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    said = {"normalization": config.normalization, "qk_layernorm": config.qk_layernorm}
    latent = {"multi_latent_attention": True} if "mla" in c else {}
    spec = get_gpt_layer_local_spec(**said, **latent, num_experts=config.num_moe_experts)
    if latent:
        mcore_moe.latent(spec)
    if config.num_moe_experts and c.get("grouped", True):
        mcore_moe.grouped(spec)
    listed = isinstance(config.moe_layer_freq, list)
    if not listed and "linear" not in c:
        return spec
    dense = get_gpt_layer_local_spec(**said)
    frequency = config.moe_layer_freq if listed else [1] * config.num_layers
    specs = [spec if has_experts else dense for has_experts in frequency]
    if "linear" in c:
        specs = mcore_linear.layers(specs, c["linear"]["linear_attention_freq"])
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


def forward(model, core, c, world):
    """One micro-batch through `model` (GPTModel `core`, perhaps wrapped): token ids, or the previous stage's output."""
    b, s = c["b"], c["s"]
    if not core.pre_process:
        rows = s // world["tp"] if c.get("sp") else s
        dtype = DTYPES[c.get("dtype", "bf16")]
        core.set_input_tensor(torch.zeros(rows, b, c["h"], dtype=dtype, requires_grad=True))
    tokens = torch.zeros(b, s, dtype=torch.long)
    labels = torch.zeros(b, s, dtype=torch.long) if core.post_process else None
    causal = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    mask = {"loss_mask": torch.ones(b, s)} if "mtp" in c else {}  # as pretrain_gpt.py gives it
    return model(tokens, torch.arange(s).repeat(b, 1), causal, labels=labels, **mask)


def run(c, world):
    """One forward and backward of a model: its parameters, saved storages, collectives, and Megatron's shared buffer."""
    mode = patches.CudaIsCpu if "moe" in c else contextlib.nullcontext  # fused permutation keeps its indices on "cuda"
    torch.use_deterministic_algorithms(c.get("deterministic", False))
    mcore_moe.Buffer.sent.clear()
    with mode():
        return pass_through(model_of(c, world), c, world)


def pass_through(model, c, world):
    """One forward and backward of a model."""
    from megatron.core import parallel_state

    if c.get("grad_accumulation_fusion"):
        for p in model.parameters():
            p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), False
    saved, ahead, back = Saved(model), Collectives(), Collectives()
    shared = parallel_state.get_global_memory_buffer().buffer
    shared.clear()
    with patches.bool_dropout_masks() if c.get("bool_masks", True) else contextlib.nullcontext():
        with saved.watch(), ahead:
            out = forward(model, model, c, world)
        rows = saved.rows()
        holds = mcore_moe.held(model, saved.storages())
        with back:
            out.sum().backward()
    params = [[name, list(p.shape)] for name, p in model.named_parameters()]
    return {
        "params": params,
        "saved": rows,
        "forward": ahead.calls,
        "backward": back.calls,
        "exchanges": list(mcore_moe.Buffer.sent),
        "held_bytes": holds,
        "buffer_bytes": sum(t.nbytes for t in shared.values()),
    }


def peak(c, world):
    """The most bytes alive in a forward and in the backward after it, of one micro-batch; and Megatron's shared buffer."""
    from megatron.core import parallel_state

    model = model_of(c, world)
    for p in model.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), True
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # as DistributedDataParallel does
    shared = parallel_state.get_global_memory_buffer().buffer
    shared.clear()
    live = Live([*model.parameters(), *(p.main_grad for p in model.parameters())])
    live.fuse()
    with patches.bool_dropout_masks(), live:
        loss = forward(model, model, c, world).sum()
        ahead = live.restart()
        loss.backward()
    return {"forward": ahead, "backward": live.restart(), "buffer_bytes": sum(t.nbytes for t in shared.values())}


def train(c, world):
    """DistributedDataParallel and the optimizer over one step: buffers, buckets, states, and the collectives of each part."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    patches.optimizer_types()
    core = model_of(c, world)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=c["sharded"],
        num_distributed_optimizer_instances=world["instances"],
        overlap_grad_reduce=c.get("overlap", True),
        grad_reduce_in_fp32=c.get("fp32_grads", True),
        bucket_size=c.get("bucket_size"),
    )
    model = DistributedDataParallel(core.config, settings, core)
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=core.config.bf16, fp16=False, use_distributed_optimizer=c["sharded"]
    )
    with patches.CudaIsCpu():
        if c.get("muon"):
            optimizer = mcore_muon.optimizer(adam, model)
        else:
            optimizer = get_megatron_optimizer(adam, [model], use_gloo_process_groups=False)
    reduce, step = Collectives(), Collectives()
    forward(model, core, c, world).sum().backward()
    with reduce:
        finalize_model_grads([model])
    with patches.CudaIsCpu(), step:
        optimizer.step()
    states = [t for o in optimizer.chained_optimizers for s in o.optimizer.state.values() for t in s.values()]
    masters = [p for o in optimizer.chained_optimizers for g in o.optimizer.param_groups for p in g["params"]]
    return {
        "params": [
            [name, p.numel(), bool(getattr(p, "shared_embedding", False))] for name, p in core.named_parameters()
        ],
        "buffers": [
            {
                "param_bytes": 0 if b.param_data is None else b.param_data.nbytes,
                "grad_bytes": b.grad_data.nbytes,
                "buckets": [k.grad_data.numel() for k in b.buckets],
                "ranks": b.data_parallel_group.size(),
            }
            for b in (*model.buffers, *model.expert_parallel_buffers)
        ],
        "master_bytes": sum(p.nbytes for p in masters),
        "moment_bytes": sum(t.nbytes for t in states if torch.is_tensor(t) and t.dim()),
        "reduce": reduce.calls,
        "step": step.calls,
    }


def torch_fsdp(c, world):
    """A step under torch's fully_shard."""
    said = {"build": lambda: model_of(c, world), "forward": lambda model, core: forward(model, core, c, world)}
    return mcore_torch_fsdp.step(c, **said)


class Group:
    """As much of a process group as a buffer asks for."""

    def __init__(self, ranks, rank=0):
        self.size, self.rank = (lambda: ranks), (lambda: rank)


def buckets(c, world):
    """Megatron's own buffer over parameters of given sizes: its buckets, and every rank's share of real parameters.

    `params` are element counts in the order of registration; storage is on the meta device.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer as Buffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    dp, sharded = c["dp"], c["sharded"]
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, pad_buckets_for_high_nccl_busbw=c["high_busbw"]
    )
    params = [torch.nn.Parameter(torch.empty(n, device="meta", dtype=torch.bfloat16)) for n in c["params"]]
    for position in c["alone"]:
        params[position].shared_embedding = True
    names = {p: str(n) for n, p in enumerate(params)}
    dtypes, groups = (torch.bfloat16, torch.float32), types.SimpleNamespace(tp=Group(1), dp_cp=Group(dp))
    device, torch.cuda.current_device = torch.cuda.current_device, lambda: "meta"
    buffer = Buffer(settings, *dtypes, params, Group(dp), c["bucket_size"], names, 1.0, [], False, groups)
    torch.cuda.current_device = device
    shares = []
    for rank in range(dp if sharded else 0):
        buffer.data_parallel_group = Group(dp, rank)
        ranges = DistributedOptimizer._build_gbuf_range_map(buffer)[dtypes]
        shares.append(sum(p["param"].size for bucket in ranges for p in bucket["param_map"].values()))
    return {"buckets": [b.grad_data.numel() for b in buffer.buckets], "numel": buffer.numel, "shares": shares}


def main():
    """Answer one request."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    request = json.load(sys.stdin)
    usual = {"tp": 1, "pp": 1, "dp": 1, "rank": 0, "ep": 1, "etp": None, "instances": 1}
    world = {key: request.get(key, value) for key, value in usual.items()}
    start(**world)
    torch.set_num_threads(1)
    tasks = {"run": run, "peak": peak, "train": train, "buckets": buckets, "torch_fsdp": torch_fsdp}
    answers = []
    for c in request["configs"]:
        try:
            answers.append(tasks[c.get("do", "run")](c, world))
        except Exception as error:  # noqa: BLE001  (one bad configuration must not hide the others)
            answers.append({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
