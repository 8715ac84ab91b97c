"""A causal language model by transformers' Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.tokens = torch.randint(60, (32, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 60}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    Trainer(model=model, args=arguments, train_dataset=Text(), eval_dataset=Text()).train()
