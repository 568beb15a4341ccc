"""Memory that experts add on a GPU beside states and saved tensors, worked out by hand for each mechanism.

The job is a GPT of Megatron-LM's own tests: 12 layers of 512, 8 heads, 4 sequences of 1,024 tokens, 8 experts of 2,048, top 2.
"""

import pytest
from jobs import job
from plain_backward import AUTOGRAD

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.job.assembly import Assembly
from steptime.memory.buffers import stage_buffers
from steptime.memory.ledger import NO_BYTES, Peak
from steptime.memory.op_walk import kept_by_part, walk_part
from steptime.memory.part_memories import PartMemories
from steptime.memory.states import stage_states
from steptime.memory.woven import walks, woven_peak
from steptime.model.ops import Comm, Move, Tensor
from steptime.validation.job_memory import refused
from steptime.validation.judgement import Judgement
from steptime.validation.measurements import shipped

MIB = 2.0**20
MOE = {"n_experts": 8, "expert_inter_sz": 2048, "experts_per_token": 2, "score_function": "softmax"}
GPT = {
    "n_layers": 12, "hidden_sz": 512, "inter_sz": 2048, "n_q_heads": 8, "vocab_sz": 50257, "norm": "layernorm", "bias": False,
    "learned_positions": True, "rotary_embeds": False, "glu": False, "tie_embeddings": True, "dropout": 0.1, "moe": MOE,
}  # fmt: skip
PLAIN = {"permute_fusion": False, "router_dtype": "compute"}


def experts(hardware="dgx-h100", moe=None, gbs=32, **layout):
    said = {"cublas_workspace": ":4096:8", "grad_accumulation_fusion": False, "moe": PLAIN | (moe or {})}
    return job(GPT, gbs=gbs, seqlen=1024, microbatch_sz=4, hardware=hardware, performance=said, **layout)


def held(plan):
    """MiB of every buffer of the last stage."""
    assembly = Assembly(plan)
    states = stage_states(assembly)
    return {item.name: item.bytes / MIB for item in stage_buffers(assembly, -1, states[-1])}


@pytest.mark.parametrize(("hardware", "mib"), [("dgx-a100-80", 4 * 4.0), ("dgx-h100", 4 * 32.0)])
def test_workspaces_of_grouped_products(hardware, mib):
    """TransformerEngine's grouped products run on 4 streams, each with a workspace like that of a plain product."""
    found = held(experts(hardware, tp=1, pp=1, dp=8, ep=8))
    assert found["workspaces of grouped GEMMs"] == mib
    one_by_one = held(experts(hardware, {"grouped_gemm": False}, tp=1, pp=1, dp=8, ep=8))
    assert "workspaces of grouped GEMMs" not in one_by_one


def test_gathered_tokens_lie_in_the_grow_only_buffer():
    """The all-gather dispatcher: 8 ranks of 4,096 tokens of 512 in 2 bytes are 32 MiB, the largest of the buffer's tensors."""
    found = held(experts(moe={"dispatcher": "allgather"}, tp=1, pp=1, dp=8, ep=8))
    assert found["Megatron's grow-only buffer"] == 8 * 4096 * 512 * 2 / MIB == 32.0
    assert "Megatron's grow-only buffer" not in held(experts(tp=1, pp=1, dp=8, ep=8))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_deterministic_sums_keep_their_rows(dispatcher):
    """index_add_ keeps 2 x 4,096 rows of 512 in 2 bytes, 8 MiB a layer, and index_put_ the numbers of 4,096 tokens, 32 KiB."""
    layout = {"tp": 1, "pp": 1, "dp": 8, "ep": 8}
    kinds = [
        Assembly(experts(moe={"dispatcher": dispatcher, "deterministic": said}, **layout)).kinds[0]
        for said in (False, True)
    ]
    kept = [
        sum({name: part.sizes[name] for op in part.ops for name in op.saves if name in part.sizes}.values())
        for part in kinds
    ]
    assert kept[1] - kept[0] == 2 * 4096 * 512 * 2 + 4096 * 8


def test_replicas_divide_the_ranks_of_experts():
    """dp 8 and ep 4 leave edp 2: two instances of the optimizer hold an expert's states whole, four there are none of."""
    states = [stage_states(Assembly(experts(tp=1, pp=1, dp=8, ep=4, zero_level=1, replicas=n)))[0] for n in (1, 2)]
    expert = 12 * 2 * 2 * 512 * 2048
    dense = states[0].params_bytes / 2 - expert
    assert states[0].optimizer_bytes == 12.0 * (expert / 2 + dense / 8)
    assert states[1].optimizer_bytes == 12.0 * (expert + dense / 4)
    with pytest.raises(ConfigError, match="replicas: must divide edp"):
        experts(tp=1, pp=1, dp=8, ep=4, zero_level=1, replicas=4)


def test_refused_jobs_are_counted_by_reason():
    """Two of one reason and split, one of another; rows that are judged or of other sources do not count."""
    rows = [row for row in shipped() if row.file == "megatron_ci" and row.text("split") == "test"][:3]
    other = next(row for row in shipped() if row.file != "megatron_ci")
    judged = [Judgement(row, skipped=why) for row, why in zip(rows, ("b", "a", "a"), strict=True)]
    assert refused([*judged, Judgement(rows[0]), Judgement(other, skipped="a")]) == {
        "a": {"test": 2, "fit": 0},
        "b": {"test": 1, "fit": 0},
    }


WOVEN = {"tp": 2, "dp": 4, "pp": 1, "ep": 4, "etp": 1, "sp": True, "zero_level": 0}


def woven(dispatcher="alltoall", gbs=32, **settings):
    """The tests' job with its exchange beside another micro-batch."""
    said = {"cublas_workspace": ":4096:8", "grad_accumulation_fusion": False, "overlap": {"ep": True}}
    said |= {"moe": PLAIN | {"dispatcher": dispatcher} | settings}
    return job(GPT, gbs=gbs, seqlen=1024, microbatch_sz=4, hardware="dgx-h100", performance=said, **WOVEN)


def test_graphs_of_layers_run_piece_by_piece():
    """Each router's graph ends at the 2,048 tokens x 512 in bf16 that its piece took, 2 MiB, and their gradient: 12 * 4 MiB.

    Jobs on H100 and GB200 hold 50.6 to 57.5 MiB more between steps than without the overlap. DeepEP's dispatcher refers to
    probabilities that its piece took itself, so to no graph.
    """
    graphs = "graphs referenced by token dispatchers"
    assert held(woven())[graphs] == 12 * 4.0
    assert graphs not in held(woven("flex"))
    assert graphs not in held(experts(**WOVEN))
    row, plain = (estimate(plan).memory.stages[0] for plan in (woven(), experts(**WOVEN)))
    assert row.persisting_bytes - plain.persisting_bytes == 48.0 * MIB
    assert row.allocated_bytes == plain.allocated_bytes


def test_pieces_that_keep_their_gradients():
    """Before core_v0.16 a layer's pieces keep 22 MiB till the chunk's backward ends, beside the next micro-batch's forward.

    Its input, the residual stream after attention, the gradients of both and of the residual are 2 MiB each; the gradients of the
    2 * 2,048 rows of 512 before and after the dispatch and before the combine 4 MiB each. Jobs on H100 hold 250 to 253 MiB more
    at their peak than those of core_v0.16 to v0.18.
    """
    pieces = "gradients of layers run in pieces"
    assert held(woven(overlap_keeps_pieces=True))[pieces] == 12 * (5 * 2.0 + 3 * 4.0)
    assert pieces not in held(woven())
    assert pieces not in held(woven(overlap_keeps_pieces=True, gbs=16))  # one micro-batch a rank
    old, new = (estimate(woven(overlap_keeps_pieces=kept)).memory for kept in (True, False))
    assert old.peak_allocated_bytes - new.peak_allocated_bytes == 264.0 * MIB


X = Tensor("x", 10, 1.0)
LAYER = [
    Move("attn", ("x",), (Tensor("p", 20, 1.0),), ("x",)),
    Comm("moe.dispatch", ("p",), (Tensor("d", 30, 1.0),), step="dispatch"),
    Move("moe.experts", ("d",), (Tensor("e", 40, 1.0),), ("d",)),
    Comm("moe.combine", ("e",), (Tensor("y", 10, 1.0),), step="combine"),
]


def test_a_backward_takes_turns_with_a_forward():
    """Backward alone: 40 B kept and dy 10, de 40 (90), then dd 30 beside de and what is kept: 40 + 40 + 30 = 110 B.

    Woven, the other layer's forward has run up to its dispatch by then and holds its input and p, 10 + 20: 140 B. All turns:
    combine back 90 + 10, attention 30 + 80, experts back 110 + 30, dispatch 60 + 40, dispatch back 60 + 40, experts and combine
    90 + 30, attention back 40 + 50.
    """
    alone = walk_part(LAYER, X, "y", frozenset(), AUTOGRAD)
    assert alone.backward == Peak(110.0, "moe.experts")
    assert woven_peak(LAYER, walks(LAYER, X, "y", kept_by_part(LAYER, X, frozenset(), AUTOGRAD), AUTOGRAD)) == Peak(
        140.0, "moe.experts"
    )
    first = LAYER[:1]  # no experts
    assert woven_peak(first, walks(first, X, "p", kept_by_part(first, X, frozenset(), AUTOGRAD), AUTOGRAD)) == NO_BYTES


def test_layers_that_take_turns_hold_more():
    """The weave is counted in steps of several micro-batches where the exchange is overlapped, and there alone."""
    layer = Assembly(woven()).kinds[0]
    several, one, apart = (PartMemories(Assembly(plan)) for plan in (woven(), woven(gbs=16), experts(**WOVEN)))
    assert one.plain[one.assembly.kinds[0]].backward == apart.plain[apart.assembly.kinds[0]].backward
    held = kept_by_part(layer.ops, layer.x, frozenset(), several.autograd)
    beside = woven_peak(layer.ops, walks(layer.ops, layer.x, layer.out, held, several.autograd))
    assert several.plain[several.assembly.kinds[0]].backward == beside
    assert beside.bytes > one.plain[one.assembly.kinds[0]].backward.bytes
