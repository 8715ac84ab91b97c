"""A small translation model whose own batch sampler makes batches by tokens, padding counted; prints its losses."""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--max-tokens", type=int, default=1024)
parser.add_argument("--update-freq", type=int, default=1)
parser.add_argument("--max-updates", type=int, default=1000000)
parser.add_argument("--sentences", type=int, default=2000)
parser.add_argument("--width", type=int, default=32)
args = parser.parse_args()

PAD, VOCABULARY, LONGEST = 0, 64, 96


class Pairs(Dataset):
    def __init__(self, number, seed):
        draw = random.Random(seed)
        self.lengths = [max(3, min(LONGEST, round(draw.lognormvariate(2.6, 0.6)))) for _ in range(number)]
        self.seed = seed

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1000003 + index)
        source = torch.randint(1, VOCABULARY, (self.lengths[index],), generator=generator)
        return source, source.flip(0)


class ByTokens:
    """Sorted by length, cut where the longest times their number would be more; batches in a random order."""

    def __init__(self, lengths, max_tokens, seed):
        self.batches, batch, longest = [], [], 0
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            longest = max(longest, lengths[index])
            if batch and longest * (len(batch) + 1) > max_tokens:
                self.batches.append(batch)
                batch, longest = [], lengths[index]
            batch.append(index)
        self.batches.append(batch)
        self.random = random.Random(seed)

    def __iter__(self):
        return iter(self.random.sample(self.batches, len(self.batches)))

    def __len__(self):
        return len(self.batches)


def pad(samples):
    return tuple(
        nn.utils.rnn.pad_sequence(side, batch_first=True, padding_value=PAD) for side in zip(*samples, strict=True)
    )


class Translator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.positions = nn.Embedding(LONGEST, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source):
        x = self.embedding(source) + self.positions.weight[: source.shape[1]]
        return self.head(self.encoder(x, src_key_padding_mask=source == PAD))


torch.manual_seed(0)
data, held_out = Pairs(args.sentences, 1), Pairs(200, 2)
loader = DataLoader(data, batch_sampler=ByTokens(data.lengths, args.max_tokens, 3), collate_fn=pad)
validation = DataLoader(held_out, batch_size=16, collate_fn=pad)
model = Translator(args.width)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss_of(source, target):
    return F.cross_entropy(model(source).flatten(0, 1), target.flatten(), ignore_index=PAD)


done, total, passes = 0, 0.0, 0
while done < args.max_updates:
    for source, target in loader:
        loss = loss_of(source, target) / args.update_freq
        loss.backward()
        total, passes = total + loss.item(), passes + 1
        if passes % args.update_freq:
            continue
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        print(f"loss {total!r}", flush=True)
        total = 0.0
        if done == args.max_updates:
            break
    model.eval()
    with torch.no_grad():
        print("validation", sum(loss_of(*batch).item() for batch in validation), flush=True)
    model.train()
