"""The rules for a job: one list, evaluated in two ways.

A rule is a name, a text and a predicate. For one config the texts of the broken rules are the error lines; for a search the
predicates over numpy columns say which candidates can run (`search.grid.checked`). So predicates use `&`, `|`, `%` and
comparisons on `Facts`, whose numbers may be columns; words and flags (`software`, `zero_level`, `layers_per_stage` ...) are
always plain values.
"""

from __future__ import annotations

from steptime.base.config import ConfigProblem
from steptime.job.expert_rules import EXPERT_RULES
from steptime.job.facts import Facts
from steptime.job.fsdp_rules import FSDP_RULES
from steptime.job.layer_rules import LAYER_RULES
from steptime.job.limits import MODELED, SANE, Rule
from steptime.job.offload_rules import OFFLOAD_RULES
from steptime.job.performance_rules import PERFORMANCE_RULES
from steptime.job.pipeline_rules import PIPELINE_RULES

LAYOUT_RULES = [
    Rule(
        "tp divides n_q_heads",
        "parallelism.tp",
        "must divide n_q_heads {f.n_q_heads} (got {f.tp}); valid: {f.tp_choices}",
        lambda f: f.n_q_heads % f.tp == 0,
    ),
    Rule(
        "tp against n_kv_heads",
        "parallelism.tp",
        "must divide n_kv_heads {f.n_kv_heads} or be a multiple of it (got {f.tp}); valid: {f.tp_choices}",
        lambda f: (f.n_kv_heads % f.tp == 0) | (f.tp % f.n_kv_heads == 0),
    ),
    Rule(
        "tp over n_kv_heads",
        "parallelism.tp",
        "{f.software} does not replicate key-value heads, so tp must divide n_kv_heads {f.n_kv_heads} (got {f.tp}); "
        "valid: {f.tp_choices}",
        lambda f: (f.n_kv_heads % f.tp == 0) | f.framework.replicates_kv,
    ),
    Rule(
        "tp divides inter_sz",
        "parallelism.tp",
        "must divide inter_sz {f.inter_sz} (got {f.tp}); valid: {f.tp_choices}",
        lambda f: f.inter_sz % f.tp == 0,
    ),
    Rule(
        "tp divides vocab_sz",
        "parallelism.tp",
        "must divide vocab_sz {f.vocab_sz}, which {f.software} does not pad (got {f.tp}); lower tp, or pad vocab_sz",
        # nanotron src/nanotron/helpers.py, _vocab_size_with_padding: to a multiple of tp times its 1
        lambda f: (f.vocab_multiple > 1) | (f.vocab_sz % f.tp == 0) | (f.software.startswith("nanotron")),
    ),
    Rule(
        "tp divides seqlen",
        "data.seqlen",
        "must be a multiple of tp {f.tp} with sequence parallelism (got {f.seqlen}); round it, or set parallelism.sp false",
        lambda f: (not f.sp) | (f.seqlen % f.tp == 0),
    ),
    Rule(
        "framework has cp",
        "parallelism.cp",
        "{f.software} does not support context parallelism (got {f.cp}); use 1",
        lambda f: (f.cp == 1) | bool(f.framework.context),
    ),
    Rule(
        "framework has cp_comm_type",
        "parallelism.cp_comm_type",
        "{f.software} has no {f.cp_comm_type}; use {f.framework.context_words}",
        lambda f: (f.cp == 1) | (not f.framework.context) | (f.cp_comm_type in f.framework.context),
    ),
    # megatron/core/transformer/dot_product_attention.py, DotProductAttention.__init__: context_parallel_size == 1
    Rule(
        "cp needs flash",
        "parallelism.cp",
        "unfused attention does not support context parallelism (got {f.cp}); use attention_impl flash or cp 1",
        lambda f: (
            (f.cp == 1)
            | (not f.framework.context)
            | (f.kernels.attention_impl == "flash")
            | f.framework.only_swaps_heads
        ),
    ),
    # deepspeed/sequence/layer.py, DistributedAttention: any local attention, over the whole sequence
    Rule(
        "unfused attention over swapped heads",
        "parallelism.cp",
        "{f.software} exchanges tokens for heads (Ulysses) around unfused attention, which is not modeled (got {f.cp}); use "
        "attention_impl flash or cp 1",
        lambda f: (f.cp == 1) | (f.kernels.attention_impl == "flash") | (not f.framework.only_swaps_heads),
    ),
    Rule(
        "cp with FlexAttention in torch's own kernels",
        "parallelism.cp",
        "attention_kernel flex_eager is not modeled with context parallelism (got {f.cp}); use attention_kernel flex, or cp 1",
        lambda f: (f.cp == 1) | (f.kernels.attention_kernel != "flex_eager"),
    ),
    # two chunks a rank, i and 2cp-1-i, even out the causal mask (megatron/core/utils.py, get_batch_on_this_cp_rank)
    Rule(
        "cp divides seqlen",
        "data.seqlen",
        "must be a multiple of {f.chunks_of_cp} with cp {f.cp} (got {f.seqlen}); round it, or lower cp",
        lambda f: (f.cp == 1) | (f.seqlen % f.chunks_of_cp == 0),
    ),
    Rule(
        "tp divides seqlen of cp",
        "data.seqlen",
        "must be a multiple of tp*cp with sequence parallelism and cp: {f.head_ranks} (got {f.seqlen}); round it, or lower tp",
        lambda f: (f.cp == 1) | (not f.sp) | (f.seqlen % f.head_ranks == 0),
    ),
    # TransformerEngine AttnFuncWithCPAndQKVOA2A: q and k heads of a tensor-parallel rank divide by cp
    Rule(
        "a2a divides heads",
        "parallelism.cp",
        "a2a needs n_q_heads {f.n_q_heads} and n_kv_heads {f.n_kv_heads} to be multiples of "
        "tp*cp = {f.head_ranks}; lower cp",
        lambda f: (
            (f.cp == 1)
            | (f.cp_comm_type != "a2a")
            | ((f.n_q_heads % f.head_ranks == 0) & (f.n_kv_heads % f.head_ranks == 0))
        ),
    ),
    # the same function in AttnFuncWithCPAndKVP2P; groups of a single rank are those of p2p or a2a (attn_forward_func_with_cp)
    Rule(
        "cp_a2a divides cp",
        "parallelism.cp_a2a",
        "a2a+p2p needs groups of 2 or more ranks, 2 or more of them in cp {f.cp} (got {f.cp_a2a}); use a2a or p2p, or "
        "set parallelism.cp_a2a",
        lambda f: (
            (f.cp == 1) | (f.cp_comm_type != "a2a+p2p") | ((f.cp_a2a > 1) & (f.cp > f.cp_a2a) & (f.cp % f.cp_a2a == 0))
        ),
    ),
    Rule(
        "cp_a2a divides heads",
        "parallelism.cp_a2a",
        "a2a+p2p needs n_q_heads {f.n_q_heads} and n_kv_heads {f.n_kv_heads} to be multiples of tp*cp_a2a: "
        "{f.tp} * {f.cp_a2a}; lower one of them",
        lambda f: (
            (f.cp == 1)
            | (f.cp_comm_type != "a2a+p2p")
            | ((f.n_q_heads % (f.tp * f.cp_a2a) == 0) & (f.n_kv_heads % (f.tp * f.cp_a2a) == 0))
        ),
    ),
    Rule(
        "cp_a2a without a2a+p2p",
        "parallelism.cp_a2a",
        "is for cp_comm_type a2a+p2p (got {f.cp_comm_type}); remove it",
        lambda f: (f.cp_a2a == 1) | (f.cp_comm_type == "a2a+p2p"),
    ),
    Rule(
        "n_kv_heads divides n_q_heads",
        "model.n_kv_heads",
        "must divide n_q_heads {f.n_q_heads} (got {f.n_kv_heads}); change one of them",
        lambda f: f.n_q_heads % f.n_kv_heads == 0,
    ),
    Rule(
        "head_dim",
        "model.hidden_sz",
        "{f.hidden_sz} is not a multiple of n_q_heads {f.n_q_heads}; set model.head_dim",
        lambda f: f.head_dim_said | (f.hidden_sz % f.n_q_heads == 0),
    ),
    Rule(
        "seqlen within positions",
        "data.seqlen",
        "must be at most model.max_positions {f.max_positions} (got {f.seqlen}); lower it, or raise max_positions",
        lambda f: (f.max_positions == 0) | (f.seqlen <= f.max_positions),
    ),
    Rule(
        "layers listed",
        "model.n_layers",
        "must be the {f.layers_listed} layers that {f.listed_by} lists, repeats included (got {f.n_layers}); "
        "set it to that, or change the list",
        lambda f: (f.layers_listed is None) | (f.layers_listed == f.n_layers),
    ),
    Rule(
        "layers divide",
        "parallelism.pp",
        "pp*vpp = {f.chunks} must divide n_layers {f.n_layers} (got pp {f.pp}, vpp {f.vpp}); valid pp*vpp: {f.chunk_choices}; "
        "or set parallelism.layers_per_stage to auto",
        lambda f: (f.layers_per_stage is not None) | f.ends_count | (f.n_layers % f.chunks == 0) | (f.units < f.chunks),
    ),
    Rule(
        "layers and ends divide",
        "parallelism.pp",
        "pp*vpp = {f.chunks} must divide n_layers + 2 = {f.units} with embedding_and_loss_count_as_layers (got pp {f.pp}, "
        "vpp {f.vpp}); valid pp*vpp: {f.chunk_choices}; or set parallelism.layers_per_stage to auto",
        lambda f: (
            (f.layers_per_stage is not None) | (not f.ends_count) | (f.units % f.chunks == 0) | (f.units < f.chunks)
        ),
    ),
    Rule(
        "enough layers",
        "parallelism.pp",
        "pp*vpp = {f.chunks} is more than n_layers {f.n_layers}; lower pp or vpp{f.or_ends} (got pp {f.pp}, vpp {f.vpp})",
        lambda f: (f.layers_per_stage not in {None, "auto"}) | (f.units >= f.chunks),
    ),
    Rule(
        "layers_per_stage has a count per chunk",
        "parallelism.layers_per_stage",
        "expected pp*vpp = {f.chunks} counts (got {f.split_words}); give as many, or auto",
        lambda f: f.layers_per_stage in {None, "auto"} or (len(f.stage_counts) == f.chunks),
    ),
    Rule(
        "layers_per_stage sums to n_layers",
        "parallelism.layers_per_stage",
        "counts must sum to n_layers {f.n_layers} and be 0 or more (got {f.split_words}); change one, or use auto",
        lambda f: (not f.stage_counts) | ((sum(f.stage_counts) == f.n_layers) & (min(f.stage_counts, default=0) >= 0)),
    ),
    Rule(
        "layers_per_stage or ends",
        "parallelism.embedding_and_loss_count_as_layers",
        "has no effect with layers_per_stage counts; remove one",
        lambda f: not (f.stage_counts and f.ends_count),
    ),
    Rule(
        "gbs divides",
        "data.gbs",
        "must be a multiple of dp*microbatch_sz = {f.batch} (got {f.gbs}); nearest: {f.gbs_choices}",
        lambda f: f.gbs % f.batch == 0,
    ),
    Rule(
        "replicas divide dp",
        "parallelism.replicas",
        "must divide {f.copied_words} (got {f.replicas}); lower it",
        lambda f: f.copied_ranks % f.replicas == 0,
    ),
    Rule(
        "replicas need sharding",
        "parallelism.replicas",
        "replicas require sharded states, that is zero_level 1 or higher "
        "(got {f.replicas} with zero_level {f.zero_level}); raise it, or use replicas 1",
        lambda f: (f.replicas == 1) | (f.zero_level >= 1),
    ),
    *FSDP_RULES,
    Rule(
        "zero framework",
        "parallelism.zero_level",
        "{f.software} is modeled with {f.framework.zero_words} (got {f.zero_level}); use one of these, or software deepspeed or "
        "megatron-core, which have levels 0 to 3",
        lambda f: (f.fsdp is not None) | (f.zero_level in f.framework.zero_levels),
    ),
    Rule(
        "zero with pipeline",
        "parallelism.zero_level",
        "{f.software} supports only levels {f.framework.pipeline_zero_words} with pp > 1 "
        "(got {f.zero_level} with pp {f.pp}); use zero_level 1 or pp 1",
        lambda f: (
            (f.pp == 1) | (f.zero_level in f.framework.pipelines_zero) | (f.zero_level not in f.framework.zero_levels)
        ),
    ),
    *EXPERT_RULES,
    *LAYER_RULES,
    Rule(
        "one bucket size",
        "parallelism",
        "bucket_size_mb and n_param_buckets are both set; use one",
        lambda f: not f.both_buckets,
    ),
    Rule(
        "n_dcs divides dp",
        "cross_dc.n_dcs",
        "must divide dp {f.dp} (got {f.n_dcs}); change one of them",
        lambda f: f.dp % f.n_dcs == 0,
    ),
    *PIPELINE_RULES,
    *PERFORMANCE_RULES,
    *OFFLOAD_RULES,
]

RULES = [*SANE, *MODELED, *LAYOUT_RULES]


def problems(facts: Facts) -> list[ConfigProblem]:
    """One problem per broken rule; implausible numbers and unsupported models are reported without the others."""

    def broken(stage: list[Rule]) -> list[ConfigProblem]:
        return [
            ConfigProblem(f"{rule.path}: {rule.text.format(f=facts)}", rule.path, by_rule=True)
            for rule in stage
            if not rule.holds(facts)
        ]

    absurd, unmodeled = broken(SANE), broken(MODELED)
    if absurd:
        return absurd
    strange = any(problem.path.startswith("model.") for problem in unmodeled)
    return unmodeled if strange else [*unmodeled, *broken(LAYOUT_RULES)]
