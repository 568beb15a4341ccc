"""Three steps of a tiny transformer under torch.profiler, alone or on a rank of gloo and DDP: traced_step.py DIR [recompute]."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

HIDDEN, HEADS, VOCAB = 128, 4, 512


class Block(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.recompute = recompute

    def block(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)


def main():
    where, recompute = sys.argv[1], "recompute" in sys.argv
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *[Block(recompute) for _ in range(2)], nn.Linear(HIDDEN, VOCAB))
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCAB, (4, 64))

    def save(profiler):
        profiler.export_chrome_trace(f"{where}/rank{rank}.json")

    plan = schedule(wait=0, warmup=1, active=3, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=save) as profiler:
        for _ in range(4):
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
