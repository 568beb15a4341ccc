"""What each framework can run: one entry per profile that extends no other, or that can run less than what it extends."""

from functools import cache
from typing import NamedTuple

from steptime.schedule import SCHEDULES
from steptime.software.precision import RECIPES

TRANSFORMER_ENGINE = tuple(name for name, recipe in RECIPES.items() if recipe.casts is None)
TORCHAO = tuple(name for name, recipe in RECIPES.items() if recipe.casts is not None)


class Framework(NamedTuple):
    """What a software profile's framework can run."""

    zero_levels: tuple[int, ...]
    pipelines_zero: tuple[int, ...]
    """ZeRO levels it runs with pp > 1."""
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "interleaved")
    """Pipeline schedules that it runs."""
    replicates_kv: bool = True
    """tp may exceed n_kv_heads: key and value heads are copied."""
    context: tuple[str, ...] = ()
    """Supported values of cp_comm_type; empty: no context parallelism."""
    copies_cut_cp: bool = False
    """The ranks of one sequence may be in different replicas of the shards."""
    rounds: bool = False
    """Whether interleaving runs in rounds that follow from the micro-batches (torch)."""
    groups: bool = False
    """Whether interleaving runs in groups of a size that can be set (Megatron-Core since 0.10); else of pp micro-batches."""
    recipes: tuple[str, ...] = TRANSFORMER_ENGINE
    """Supported low-precision recipes."""
    optimizers: tuple[str, ...] = ("adamw", "lion", "sgd")
    """Optimizers that are modeled for it."""
    experts: bool = False
    """Whether its mixtures of experts are modeled."""
    experts_tp: bool = True
    """Whether tensor parallelism together with experts is modeled for it."""
    fully_shards: bool = False
    """Whether it shards by torch's `fully_shard`, or by the FullyShardedDataParallel before it."""

    @property
    def zero_words(self) -> str:
        """Its ZeRO levels."""
        return ", ".join(map(str, self.zero_levels))

    @property
    def pipeline_zero_words(self) -> str:
        """Its ZeRO levels with pipelines."""
        return " and ".join(map(str, self.pipelines_zero))

    @property
    def context_words(self) -> str:
        """Values of cp_comm_type that it runs."""
        return " or ".join(self.context)

    @property
    def only_swaps_heads(self) -> bool:
        """Whether its context parallelism is an all-to-all around any attention: DeepSpeed's Ulysses."""
        return self.context == ("a2a",)

    @property
    def optimizer_words(self) -> str:
        """The modeled optimizers, in words."""
        return ", ".join(self.optimizers)


FRAMEWORKS = {
    # num_distributed_optimizer_instances divides dp * cp (megatron/core/parallel_state.py, initialize_model_parallel);
    # torchtitan's dp_replicate stands beside cp, which is sharded over (torchtitan/distributed/parallel_dims.py)
    # DistributedOptimizer is ZeRO-1; ZeRO-2 and -3 are Megatron-FSDP, which has no pipeline
    "megatron-core": Framework(
        (0, 1, 2, 3),
        (0, 1),
        context=("p2p", "all_gather", "a2a", "a2a+p2p"),
        copies_cut_cp=True,
        groups=True,
        optimizers=("adamw", "lion", "sgd", "muon", "dist_muon"),
        experts=True,
    ),
    "megatron-2021": Framework((0, 1), (0, 1), recipes=()),
    # deepspeedai/Megatron-DeepSpeed megatron/model/transformer.py, --ds-sequence-parallel-size: DistributedAttention
    # ZeRO-2 without its pipelines: megatron/training.py, --no-pipeline-parallel
    "megatron-deepspeed": Framework((0, 1, 2), (0, 1), context=("a2a",), recipes=()),
    # DistributedDataParallel, and ZeroRedundancyOptimizer; torch/distributed/tensor/experimental/_context_parallel rotates keys
    # and values by "allgather" or "alltoall", which is a ring: each rank sends to the next one
    "torch": Framework(
        (0, 1),
        (0, 1),
        tuple(SCHEDULES),
        replicates_kv=False,
        context=("p2p", "all_gather"),
        rounds=True,
        recipes=(),
        optimizers=("adamw", "sgd", "adamw_8bit", "adafactor", "muon"),
    ),
    "fsdp2": Framework(
        (2, 3),
        (2, 3),
        tuple(SCHEDULES),
        replicates_kv=False,
        context=("p2p", "all_gather"),
        rounds=True,
        recipes=TORCHAO,
        optimizers=("adamw", "sgd", "adamw_8bit", "muon"),
        experts=True,
        fully_shards=True,
    ),
    # PipelineEngine asserts zero_optimization_stage() < 2 (deepspeed/runtime/pipe/engine.py)
    # deepspeed/sequence/layer.py, DistributedAttention: Ulysses alone
    "deepspeed": Framework(
        (0, 1, 2, 3),
        (0, 1),
        ("gpipe", "1f1b"),
        context=("a2a",),
        recipes=(),
        optimizers=("adamw", "lion", "sgd", "adamw_8bit"),
    ),
}
FRAMEWORKS["automodel"] = FRAMEWORKS["fsdp2"]._replace(experts_tp=False)
# without resharding it is fsdp.reshard_after_forward false, not zero_level 2
FRAMEWORKS["megatron-core-fsdp2"] = FRAMEWORKS["megatron-core"]._replace(
    zero_levels=(3,), pipelines_zero=(3,), recipes=(), optimizers=("adamw", "sgd"), experts=False, fully_shards=True
)
ANY = Framework((0, 1, 2, 3), (0, 1, 2, 3), tuple(SCHEDULES), context=("p2p", "all_gather", "a2a", "a2a+p2p"))


@cache
def framework_of(software: str, family: str) -> Framework:
    """What a profile's framework supports (`software` is its name, with or without a release), or that of its family."""
    return FRAMEWORKS.get(software.partition("@")[0]) or FRAMEWORKS.get(family, ANY)
