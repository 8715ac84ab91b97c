"""A small GPT that draws its own batches, without a DataLoader, and evaluates before it trains."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--max_iters", type=int, default=5)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, vocabulary=32, width=32, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(1)
tokens = torch.randint(0, 32, (2000,))


def batch(size):
    starts = torch.randint(0, 1983, (size,))
    return torch.stack([tokens[s : s + 16] for s in starts]), torch.stack([tokens[s + 1 : s + 17] for s in starts])


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
model.eval()
with torch.no_grad():
    model(*batch(4))
model.train()
losses = []
for _ in range(args.max_iters):
    total = 0.0
    for _ in range(args.gradient_accumulation_steps):
        logits, loss = model(*batch(args.batch_size))
        (loss / args.gradient_accumulation_steps).backward()
        total += loss.item() / args.gradient_accumulation_steps
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(total)
    print(f"loss {total!r}")
