"""Image classification by Lightning, as its documentation shows: a batch as a flag, and data that are made up."""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """Convolution and ReLU, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width, height, width) in and out."""
        return x + torch.relu(self.conv(x))


class Classifier(pl.LightningModule):
    """Four blocks at one resolution."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            *(Block(width) for _ in range(4)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) to (batch, 10)."""
        logits: torch.Tensor = self.net(images)
        return logits

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def build_loader(batch_size: int = 64) -> DataLoader:
    """Noise, with labels."""
    drawn = torch.Generator().manual_seed(0)
    images, labels = torch.randn(2048, 3, 48, 48, generator=drawn), torch.randint(10, (2048,), generator=drawn)
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True)


def main() -> None:
    """Train as the flags say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1000)
    flags = parser.parse_args()
    trainer = pl.Trainer(
        max_epochs=flags.epochs,
        accelerator="cpu",
        accumulate_grad_batches=flags.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), build_loader(flags.batch_size))


if __name__ == "__main__":
    main()
