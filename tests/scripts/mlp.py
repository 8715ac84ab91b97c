"""A plain training loop, as people write it: prints each step's loss."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--grad-accum", type=int, default=1)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--say", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 12), torch.randint(0, 4, (256,)))
loader = DataLoader(data, args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_function = nn.CrossEntropyLoss()

done, total = 0, 0.0
while done < args.steps:
    for place, (x, y) in enumerate(loader):
        loss = loss_function(model(x), y) / args.grad_accum
        loss.backward()
        total += loss.item()
        if (place + 1) % args.grad_accum:
            continue
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {total!r}")
        done, total = done + 1, 0.0
        if done == args.steps:
            break
if args.say:
    print("modules", [type(m).__mro__[1].__name__ for m in model], "dtype", loss.dtype)
    print("workers", loader.num_workers, "fused", optimizer.param_groups[0]["fused"])
