"""Bytes of the key-value cache that one token adds, over all layers, before tensor parallelism.

Formulas: 2 x key rows a layer (keys and values) for attention with heads; for multi-head latent attention the compressed vector
and the rotary key, the rows of the down projection (DeepSeek-V2, arXiv 2405.04434, section 2.1.4).
"""

from __future__ import annotations

import re

from steptime.checkpoint.found import FoundArchitecture
from steptime.checkpoint.weight_names import LATENT

WIDTH = 2  # bytes of an element: fp16 or bf16
_NO_DECODER = re.compile(r"(?:^|\.)encoder\.|bert|^transformer\.layer\.|vision|visual")


def record(f: FoundArchitecture, families: list[str]) -> None:
    """Set `kv_cache_bytes_per_token` [bytes] where the layers are a decoder's and their key rows are known."""
    encodes = _NO_DECODER.search(f.parts.main.prefix) or f.last("q_lin") or any("bert" in name for name in families)
    if f.get("vocab_sz") is None or encodes:
        return
    kinds, latent = f.get("layer_kinds"), f.last(*LATENT)
    layers = kinds.get("attention", 0) if kinds else f.get("n_layers")
    heads, width = f.get("n_kv_heads"), f.get("head_dim")
    if latent is not None:
        rows, source, each = min(latent[1]), f"rows of {latent[0]} x 2 bytes", 1
    else:
        rows, source, each = f.get("kv_rows") or (heads and width and heads * width), "rows x 2 bytes", 2
    if layers and rows:
        text = f"{layers} layers x {rows} {source}"
        f.set("kv_cache_bytes_per_token", each * layers * rows * WIDTH, text if latent else f"2 x {text}")
