"""A backward on one device of which nothing is recomputed, compiled or stored elsewhere, for walks done by hand."""

from steptime.memory.op_walk import Autograd

AUTOGRAD = Autograd(
    tp=1,
    experts=1,
    weight_grad_itemsize=0.0,
    weight_grads_stay=False,
    stops_early=False,
    pool=False,
    compiled=False,
)
