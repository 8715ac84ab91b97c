"""A Lightning job in bf16, 4 samples x 2, clipped: a residual MLP without dropout."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune

TRAINER = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = (self.blocks(x) - x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx)["loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


def build_loader():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)


task = autotune.from_lightning(Module, lambda: (build_loader(), build_loader()), TRAINER)
