"""Trains the backbone on the digits 0 to 4, and writes backbone.pt: half a minute.

python pretrain.py
"""

import torch
import torch.nn.functional as F
from model import BACKBONE, batch_size, build_reader, training_part
from torch.utils.data import DataLoader

EPOCHS = 3


def main() -> None:
    torch.manual_seed(0)
    reader = build_reader()
    optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for images, digits in DataLoader(training_part(0), batch_size, shuffle=True):
            loss = F.cross_entropy(reader(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}  last loss {loss.item():.3f}", flush=True)
    torch.save(reader.state_dict(), BACKBONE)


if __name__ == "__main__":
    main()
