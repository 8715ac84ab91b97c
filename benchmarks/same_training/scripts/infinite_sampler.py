"""Samples are drawn with replacement, without end, from one iterator; words of unequal lengths are padded."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Words(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(0)
        self.words = [torch.randint(1, 27, (int(n),), generator=drawn) for n in torch.randint(3, 9, (50,))]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        x, y = torch.zeros(10, dtype=torch.long), torch.full((10,), -1)
        word = self.words[index]
        x[1 : 1 + len(word)] = word
        y[: len(word)] = word
        y[len(word)] = 0
        return x, y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(27, 24)
        layers = [nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(24, 27)

    def forward(self, x, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits = self.head(hidden)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


torch.manual_seed(0)
data = Words()
loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data, replacement=True, num_samples=int(1e10)))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99))
batches = iter(loader)
for _step in range(24):
    _, loss = model(*next(batches))
    model.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
