"""Where a router sends tokens, and among how many devices a token's experts lie."""

from typing import NamedTuple

from steptime.base.num import Num, maximum, where


class Routing(NamedTuple):
    """Where the router sends tokens: `top_k` of `n_experts`, all in the `limit` best of `n_groups` groups of experts."""

    n_experts: Num
    top_k: int
    n_groups: int = 1
    limit: int = 1

    def distinct(self, parts: Num) -> Num:
        """Expected number of distinct parts among a token's experts, of `parts` with equal numbers of experts.

        Of P parts no larger than a group: a group is chosen for its best experts (DeepSeek-V3, arXiv 2412.19437, 2.1.2), so one
        of the k lies in each of the l chosen of g groups; the others are drawn without replacement from the rest of these
        groups. A part of m = E / P experts is missed by the first with 1 - g / P, by the others with C(E l / g - l - m, k - l) /
        C(E l / g - l, k - l). Without groups: P (1 - C(E - m, k) / C(E, k)). Of parts of several groups: those of l groups drawn.

        >>> Routing(8, 2).distinct(8.0), Routing(8, 2).distinct(1.0)
        (2.0, 1.0)
        >>> [round(Routing(256, 8, 8, 4).distinct(parts), 3) for parts in (64.0, 8.0, 4.0)]
        [7.482, 4.0, 3.143]
        """
        groups, limit = self.n_groups, self.limit
        per_part, group = self.n_experts / parts, self.n_experts / groups
        missed: Num = maximum(group - per_part, 0.0) / group
        for drawn in range(limit, self.top_k):
            missed = missed * maximum(group * limit - per_part - drawn, 0.0) / (group * limit - drawn)
        found = parts * limit / groups * (1.0 - missed)
        return found if groups == 1 else where(parts < groups, Routing(groups, limit).distinct(parts), found)


def ranks_in_turn(experts: int, per_token: int, ep: int) -> int:
    """Ranks that a token is sent to where tokens take experts in turn, mean, rounded: consecutive experts are on the same rank.

    Benchmarks that force an even load: token i takes the experts from i * per_token on, modulo their number (pytorch/torchtitan@
    b5bcd76c torchtitan/models/common/moe.py, _debug_force_load_balance_routing; NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/
    components/moe/layers.py, FakeBalancedGate). DeepSeek-V3 on 64 ranks: 8 experts of which a rank has 4.

    >>> ranks_in_turn(256, 8, 64), ranks_in_turn(128, 8, 8)
    (2, 1)
    """
    starts = [token * per_token % experts for token in range(experts)]
    touched = [len({(start + i) % experts * ep // experts for i in range(per_token)}) for start in starts]
    return round(sum(touched) / len(touched))
