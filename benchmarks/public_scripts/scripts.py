"""The scripts: where each comes from, how it is started, and which of its lines are changed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Script:
    """A repository's training script."""

    repository: str
    """On GitHub, ``owner/name``."""
    commit: str
    words: str
    """What Python is started with, in the repository's folder."""
    changes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By file: what is replaced, wherever it stands, and by what."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.repository.partition("/")[2]

    @property
    def command(self) -> list[str]:
        """The words."""
        return shlex.split(self.words)


SCRIPTS = (
    Script("karpathy/makemore", "988aa59", "makemore.py -b 32"),
    Script("weiaicunzai/pytorch-cifar100", "11d8418", "train.py -net squeezenet -b 8"),
    Script(
        "karpathy/llama2.c",
        "350e04f",
        "train.py --batch_size=8 --gradient_accumulation_steps=2 --device=cpu --compile=False --dtype=float32 "
        "--vocab_source=custom --vocab_size=512 --dim=64 --n_layers=4 --n_heads=4 --n_kv_heads=4 --max_seq_len=64 "
        "--eval_iters=4 --warmup_iters=100",
    ),
    Script(
        "ashleve/lightning-hydra-template",
        "bddbc24",
        "src/train.py data.batch_size=128 +trainer.accumulate_grad_batches=1 trainer.max_epochs=1000 "
        "data.train_val_test_split=[12800,1000,1200]",
    ),
    Script(
        "salesforce/awd-lstm-lm",
        "1d466ec",
        "main.py --cuda --data data/words/ --batch_size 16 --bptt 35 --emsize 64 --nhid 96",
        {"main.py": ("corpus = torch.load(fn)", "corpus = torch.load(fn, weights_only=False)")},
    ),
    Script(
        "guoyang9/NCF",
        "89ff06f",
        "main.py --batch_size 256",
        {
            "main.py": (".cuda()", ""),
            "evaluate.py": (".cuda()", ""),
            "config.py": ("/home/share/guoyangyang/recommendation/NCF-Data/", "data/"),
        },
    ),
)
