"""Models of tokens and of plain rows that are cut."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

VOCABULARY = 23
LENGTH = 8


class Tokens(nn.Module):
    """An embedding, a residual of what a subclass does, and scores of the next token."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, VOCABULARY)

    def block(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) in and out."""
        return self.down(F.gelu(self.up(x)))

    def forward(self, tokens: Tensor) -> Any:
        """(batch, tokens) to scores."""
        x = self.embedding(tokens)
        return self.head(x + self.block(x))


class Chunked(Tokens):
    """SwiGLU, whose two halves are one layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)

    def block(self, x: Tensor) -> Tensor:
        one, other = self.up(x).chunk(2, -1)
        return self.down(F.silu(one) * other)


class Sliced(Chunked):
    def block(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(F.silu(x[..., :32]) * x[..., 32:])


class GatedTokens(Chunked):
    def block(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.up(x)))


class TwoGates(Tokens):
    """SwiGLU of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 32)

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Normed(Tokens):
    """With a layer of the hidden width."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.layer(self.up(x))))


class BatchOverTokens(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)))


class RmsNorm(nn.Module):
    """As written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attending(Tokens):
    """``nn.MultiheadAttention`` before the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)

    def block(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        return super().block(self.norm(x))


class Tied(Tokens):
    """The embedding is the head's weight too, and the residual goes through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.block(self.embedding(tokens)))


class Recurrent(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def block(self, x: Tensor) -> Tensor:
        return super().block(self.lstm(x)[0])


class Product(Tokens):
    """``x @ w`` of a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 16) / 6)

    def block(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x)) @ self.w


class Einsum(Product):
    def block(self, x: Tensor) -> Tensor:
        return torch.einsum("bth,hw->btw", F.gelu(self.up(x)), self.w)


class Mixer(nn.Module):
    """MLP-mixer: tokens are mixed by a layer over places."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.places = nn.Sequential(nn.Linear(LENGTH, 32), nn.GELU(), nn.Linear(32, LENGTH))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        x = x + self.places(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.channels(x))


class Bengio(nn.Module):
    """Embeddings of all tokens side by side, as of 2003."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(VOCABULARY, 4), nn.Linear(4 * LENGTH, 32)
        self.second, self.head = nn.Linear(32, 32), nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens).view(len(tokens), -1)
        return self.head(torch.tanh(self.second(torch.tanh(self.hidden(x)))))


class Experts(Tokens):
    """Experts whose weights are stacked; each token takes all of them by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.mid = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 32, 32) / 6)

    def block(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x))
        each = torch.einsum("bth,ehk->btek", x, self.mid)
        return self.down((each * self.router(x).softmax(-1)[..., None]).sum(2))


class ExpertLayers(Tokens):
    """Experts that are layers; each token goes to the best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(3))

    def block(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = torch.zeros_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 1.0)
        each = torch.stack([one(x) for one in self.experts], -1)
        return (each * (weights * best)[..., None, :]).sum(-1)


class TextCnn(nn.Module):
    """Convolutions over tokens, whose result is flattened with its channels last."""

    def __init__(self, flattens: bool = True) -> None:
        super().__init__()
        self.flattens, self.embedding = flattens, nn.Embedding(VOCABULARY, 8)
        self.first, self.second = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * LENGTH if flattens else 16, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens).transpose(1, 2)
        x = F.relu(self.second(F.relu(self.first(x)))).transpose(1, 2)
        x = x.flatten(1) if self.flattens else x.amax(1)
        return self.head(F.relu(self.hidden(x)))


class WaveNet(nn.Module):
    """Dilated convolutions, gated, with skips."""

    def __init__(self, width: int = 12, wrapped: bool = False) -> None:
        super().__init__()
        wrap = weight_norm if wrapped else nn.Identity()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.filters, self.gates, self.skips, self.outs = (
            nn.ModuleList(
                wrap(nn.Conv1d(width, width, k, padding=p, dilation=p or 1)) for p in ((1, 2) if k > 1 else (0, 0))
            )
            for k in (3, 3, 1, 1)
        )
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 24, 1), nn.ReLU(), nn.Conv1d(24, VOCABULARY, 1))

    def forward(self, tokens: Tensor) -> Any:
        x, skips = self.embedding(tokens).transpose(1, 2), []
        for one, gate, skip, out in zip(self.filters, self.gates, self.skips, self.outs, strict=True):
            y = torch.tanh(one(x)) * torch.sigmoid(gate(x))
            skips.append(skip(y))
            x = x + out(y)
        return self.last(torch.stack(skips).sum(0))


class Mamba(Tokens):
    """A selective scan after a depthwise convolution, with a gate from the same layer."""

    def __init__(self, inner: int = 32, states: int = 4) -> None:
        super().__init__()
        self.inner, self.states = inner, states
        self.up = nn.Linear(16, 2 * inner)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.project, self.step = nn.Linear(inner, 2 * states + 2), nn.Linear(2, inner)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def block(self, x: Tensor) -> Tensor:
        x, gate = self.up(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, reads, writes = self.project(x).split([2, self.states, self.states], -1)
        step = F.softplus(self.step(step))
        state, found = x.new_zeros(len(x), x.shape[2], self.states), []
        for place in range(x.shape[1]):
            state = state * (step[:, place, :, None] * -self.decay.exp()).exp()
            state = state + step[:, place, :, None] * writes[:, place, None] * x[:, place, :, None]
            found.append((state * reads[:, place, None]).sum(-1))
        return self.down((torch.stack(found, 1) + x * self.skip) * F.silu(gate))


class LoRa(Tokens):
    """A layer with an adapter whose second factor begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.b.weight)

    def block(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x))
        return self.down(x) + self.b(self.a(x))


class Rows(nn.Module):
    """An MLP over rows; in the middle what a subclass does."""

    def __init__(self, middle: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 32), nn.Linear(middle, 32), nn.Linear(32, 5)

    def between(self, x: Tensor) -> Tensor:
        """From the first layer to the second."""
        return F.relu(x)

    def forward(self, x: Tensor) -> Any:
        """(batch, 12) to (batch, 5)."""
        return self.last(F.relu(self.second(self.between(self.first(x)))))


class Pairs(Rows):
    """The larger of two neighbours."""

    def __init__(self) -> None:
        super().__init__(16)

    def between(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, 2).amax(-1)


class Fours(Rows):
    """The largest of four neighbours."""

    def __init__(self) -> None:
        super().__init__(8)

    def between(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, 4).amax(-1)


class Halves(Rows):
    """The larger of two halves."""

    def __init__(self) -> None:
        super().__init__(16)

    def between(self, x: Tensor) -> Tensor:
        return x.view(len(x), 2, -1).amax(1)


class Bilinear(Rows):
    def __init__(self) -> None:
        super().__init__(16)
        self.both = nn.Bilinear(32, 32, 16)

    def between(self, x: Tensor) -> Tensor:
        return self.both(F.relu(x), torch.tanh(x))


class Softmax(Rows):
    """A softmax over hidden units, which goes by their number."""

    def between(self, x: Tensor) -> Tensor:
        return x.softmax(-1) * 32


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, hidden_dropout_prob=0.0))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    return BertForSequenceClassification(
        BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, attention_probs_dropout_prob=0.0)
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=VOCABULARY, use_cache=False, bos_token_id=0, eos_token_id=0))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=True)
    config.use_cache = False
    return LlamaForCausalLM(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return T5EncoderModel(T5Config(**sizes, vocab_size=VOCABULARY, dropout_rate=0.0))


TOKENS = OrderedDict(
    {
        "SwiGLU by chunk": Chunked,
        "SwiGLU by slices": Sliced,
        "SwiGLU of two layers": TwoGates,
        "GLU of tokens": GatedTokens,
        "BatchNorm over tokens": BatchOverTokens,
        "LayerNorm": lambda: Normed(nn.LayerNorm(32)),
        "LayerNorm without weights": lambda: Normed(nn.LayerNorm(32, elementwise_affine=False)),
        "RMSNorm by hand": lambda: Normed(RmsNorm(32)),
        "MultiheadAttention": Attending,
        "tied embedding": Tied,
        "LSTM": Recurrent,
        "x @ w": Product,
        "einsum": Einsum,
        "MLP-mixer": Mixer,
        "Bengio": Bengio,
        "experts, stacked": Experts,
        "experts, layers": ExpertLayers,
        "text CNN, flattened": TextCnn,
        "text CNN, the most": lambda: TextCnn(flattens=False),
        "WaveNet": WaveNet,
        "WaveNet with weight norm": lambda: WaveNet(wrapped=True),
        "Mamba": Mamba,
        "adapter": LoRa,
        "BERT": _bert,
        "GPT-2": _gpt2,
        "Llama": _llama,
        "T5": _t5,
    }
)
ROWS = OrderedDict(
    {
        "MLP": Rows,
        "maxout of two": Pairs,
        "maxout of four": Fours,
        "maxout of halves": Halves,
        "Bilinear": Bilinear,
        "softmax of channels": Softmax,
    }
)
PATCHES = OrderedDict({"ViT": _vit})
