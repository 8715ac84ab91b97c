"""A LightningModule with a schedule and a validation, flags by argparse."""

import argparse
import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)]
        self.net = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    flags = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    inputs = torch.randn(80, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    train, validation = torch.utils.data.random_split(data, [64, 16])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", accumulate_grad_batches=flags.accumulate, **quiet)
    trainer.fit(Classifier(), DataLoader(train, flags.batch_size, shuffle=True), DataLoader(validation, 16))
