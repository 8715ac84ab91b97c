"""A causal language model by transformers' Trainer, as its documentation shows: any TrainingArguments as flags."""

from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    """The model's shape."""

    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 2
    n_positions: int = 64
    vocab_size: int = 512


class Blocks(torch.utils.data.Dataset):
    """Token blocks of one length, made up."""

    def __init__(self, num_blocks: int, model: ModelArguments) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(model.vocab_size, (num_blocks, model.n_positions), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    """Train as the flags say."""
    shape, arguments = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    model = GPT2LMHeadModel(GPT2Config(**vars(shape), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    trainer = Trainer(model, arguments, train_dataset=Blocks(20_000, shape), eval_dataset=Blocks(64, shape))
    trainer.train()


if __name__ == "__main__":
    main()
