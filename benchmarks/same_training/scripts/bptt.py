"""A recurrent language model, time first: sequences of varying length, a learning rate by length, no DataLoader."""

import random

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(30, 16), nn.LSTM(16, 24, 2)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(24, 30)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.drop(self.embedding(x)), hidden)
        return self.head(self.drop(out)), hidden


random.seed(0)
torch.manual_seed(0)
text = torch.randint(30, (8 * 120,)).view(8, -1).t().contiguous()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for _epoch in range(3):
    hidden, place = None, 0
    while place < len(text) - 2:
        length = min(max(3, int(random.gauss(12, 3))), len(text) - 1 - place)
        x, y = text[place : place + length], text[place + 1 : place + 1 + length]
        place += length
        hidden = None if hidden is None else tuple(one.detach() for one in hidden)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * length / 12
        optimizer.zero_grad()
        output, hidden = model(x, hidden)
        nn.functional.cross_entropy(output.flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
