"""Data are made in the loop, without a DataLoader; the loss is the model's own."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 24), nn.Linear(24, 40)
        layers = [nn.TransformerEncoderLayer(24, 2, 48, batch_first=True, dropout=0.1) for _ in range(2)]
        self.blocks = nn.ModuleList(layers)

    def forward(self, x, y):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def batch():
    places = torch.randint(len(text) - 13, (8,))
    rows = torch.stack([text[place : place + 13] for place in places])
    return rows[:, :-1], rows[:, 1:]


torch.manual_seed(0)
text = torch.randint(40, (1000,))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for _step in range(24):
    loss = model(*batch())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
