"""Adapters over frozen linear layers as huggingface/peft writes them (src/peft/tuners/lora/layer.py, Linear.forward)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steptime.model.lora import Lora

NAMES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""Target of each linear layer of `torch_blocks`."""


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, lora: Lora, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.p = base, lora.dropout
        self.down = nn.Linear(base.in_features, lora.rank, bias=False, dtype=dtype)
        self.up = nn.Linear(lora.rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        x = x.to(self.down.weight.dtype)
        dropped = torch.native_dropout(x, self.p, train=True)[0] if self.p else x
        del x
        return result + self.up(self.down(dropped)) * 2.0


def adapt(module: nn.Module, lora: Lora, dtype: torch.dtype | None = None) -> None:
    """Freeze a module and give its targets adapters, in the dtype of the weights unless another is said."""
    for param in module.parameters():
        param.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and NAMES.get(name) in lora.targets:
                setattr(parent, name, LoraLinear(child, lora, dtype or child.weight.dtype))


def with_gradient(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    """The embedding's output takes a gradient (transformers modeling_utils.py, enable_input_require_grads)."""
    output.requires_grad_(True)
