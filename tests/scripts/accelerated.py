"""An Accelerate loop, as people write it, in as many processes as it is started in."""

import argparse
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--grad-accum", type=int, default=1)
parser.add_argument("--steps", type=int, default=100_000_000)
parser.add_argument("--pids", default=os.devnull)
args = parser.parse_args()
with open(args.pids, "a") as file:
    print(os.getpid(), file=file)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.grad_accum)
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 12), torch.randint(0, 4, (256,)))
loader = DataLoader(data, args.batch_size)
net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

done = 0
while done < args.steps:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        done += accelerator.sync_gradients
        if done == args.steps:
            break
del model
accelerator.free_memory()  # which holds the model, too, and so the group
accelerator.end_training()  # else torch's threads of the group may outlive Python, and abort the process as it ends
if accelerator.is_main_process:
    print("trained in", accelerator.num_processes, "with foreach", optimizer.param_groups[0]["foreach"])
