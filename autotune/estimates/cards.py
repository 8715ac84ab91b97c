"""``CARDS``: what is known of graphics cards that need not be here."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any, get_args

from ..errors import UserError
from ..techniques import Device
from ..techniques.precision import Kind, Precision
from ..units import MIB, shortened
from .types import CONTEXT, Interval

_NATIVE_BF16 = (8, 0)
"""Compute capability from which on cards multiply in bfloat16."""
_CUDNN = Interval(low=0, value=16 * MIB, high=350 * MIB)
"""What a context takes more once cuDNN is loaded: 16 MiB with CUDA 13, on an H200 (``results/gpu/h200.json``).
With CUDA 12.6 the process of resnet50, whisper and convnext_large took 60 to 360 MiB more than BERT's on H100, H200 and
L40S (milabench's rows)."""
_LOADED = Interval(low=0, value=146 * MIB, high=300 * MIB)
"""What a context that is here takes more once a step has run: 132 to 148 MiB on an H200, from 610 MiB on, and 218 with
offload (``results/gpu/h200.json``, ``results/cards-own-cuda.jsonl``). The upper end
is a guess."""
_TRIED = Interval(low=0, value=100 * MIB, high=600 * MIB)
"""What it takes more where cuDNN tries every kernel (``torch.backends.cudnn.benchmark``), so that all are loaded:
focalnet's process took 80 to 630 MiB more on an L40S (milabench's rows)."""
_TRIED_NEWER = Interval(low=0, value=1200 * MIB, high=1900 * MIB)
"""The same from Hopper on: 1,200 to 2,200 MiB on an H100, and 1,230 with one sample to a batch."""
_MIOPEN = (0.8, 1.5)
"""What convolutions on an AMD card take beside CUDA's, as shares: likely, and at most. Rows of one batch differ by up
to twice, so that no rule is seen: those of milabench on an MI325X were 0 to 1.5 above, and 0.8 at the median. Of 351
above 8 GiB, 15 exceed the 98th percentile of the other models', each model left out in turn: 14 are ConvNeXt's."""
_NEWER = (9, 0)
"""Hopper's compute capability."""
_NEAREST = 4
"""Names that are offered in place of one that is not known."""


@dataclass(frozen=True)
class Card:
    """A type of card."""

    name: str
    """As people write it."""
    capability: tuple[int, int]
    """CUDA compute capability; of AMD's as torch says it, 9.4 for gfx942."""
    memory_mib: int
    """What torch can have of it (``total capacity`` in its words for a full card), MiB."""
    driver_mib: int = 0
    """What the driver keeps beside that, where it is known: nvidia-smi's total is both, and so is what it counts as
    used."""
    context_mib: int = CONTEXT.value // MIB
    """What a CUDA context takes with torch's kernels loaded, MiB."""
    is_amd: bool = False
    """Whether it is AMD's, where torch calls HIP ``cuda``, and its allocator is the same (``c10/hip`` is made of
    ``c10/cuda``)."""

    @property
    def device(self) -> Device:
        """The card as a device that is planned for."""
        return Device(
            type="cuda",
            name=self.name,
            memory_bytes=self.memory_mib * MIB,
            capability=self.capability,
            is_amd=self.is_amd,
            bf16=self.capability >= _NATIVE_BF16,
        )

    @property
    def precisions(self) -> tuple[Kind, ...]:
        """What it computes in natively."""
        return tuple(kind for kind in get_args(Kind) if Precision(kind=kind).lacking(self.device) is None)


# Readings are public: "t" is torch's total capacity in an issue, "s" nvidia-smi's total, and what the driver keeps of
# it is known for a card of the same memory. Contexts of H100, H200, L40S and MI325X are fitted to milabench's rows of
# BERT.
CARDS = (
    Card("T4", (7, 5), 14_909),  # t: Zheng-Chong/CatVTON#133
    Card("V100-16GB", (7, 0), 16_158),  # t: googlecolab/colabtools#2001
    Card("V100-32GB", (7, 0), 32_501),  # t: haotian-liu/LLaVA#812
    Card("RTX 2080 Ti", (7, 5), 10_997),  # t: lllyasviel/FramePack#369
    Card("RTX 3060", (8, 6), 12_032),  # t: smy20011/dreambooth-gui#78
    Card("RTX 3090", (8, 6), 24_268),  # t: sunset1995/DirectVoxGO#57
    Card("RTX A4000", (8, 6), 15_984),  # t: DengKaiCQ/VGGT-Long#6
    Card("RTX A6000", (8, 6), 48_538),  # s: 49,140, less the L40's 602
    Card("A10", (8, 6), 22_511),  # mayooot/detect-gpu#3: what is free of an idle one, of 23,028
    Card("A10G", (8, 6), 22_511),  # s: 23,028, modal-labs/modal-client#2797; as the A10
    Card("A30", (8, 0), 24_094),  # t: google/RB-Modulation#5
    Card("A100-40GB", (8, 0), 40_339),  # bottlerocket-os/bottlerocket#3873: CUDA's total
    Card("A100-80GB", (8, 0), 81_152),  # t: HiDream-ai/VAREdit#6
    Card("RTX 4090", (8, 9), 24_176),  # t: pinokiofactory/flux-webui#11
    Card("RTX 6000 Ada", (8, 9), 45_496),  # t: DINGYANB/MTVCrafter#21
    Card("L4", (8, 9), 22_517),  # s: 23,034, modal-labs/modal-client#2797, less the A10's 517
    Card("L40", (8, 9), 45_466, 602),  # t: NVlabs/Eagle#68; s: 46,068
    Card("L40S", (8, 9), 45_466, 602, 270),  # s: 46,068, modal-labs/modal-client#2797
    Card("H100", (9, 0), 81_009, 550, 650),  # t: vllm-project/vllm#27508; s: 81,559, modal-labs/modal-client#2797
    Card("H100 NVL", (9, 0), 95_232, context_mib=650),  # t: ali-vilab/VACE#56
    Card("H200", (9, 0), 143_221, 550, 800),  # s: 143,771, milabench's readings; as the H100
    Card("B200", (10, 0), 182_630, context_mib=650),  # pytorch/ao#4002: CUDA's total; the H100's context
    Card("MI325X", (9, 4), 262_128, 16, 2200, True),  # t: vllm's 255.98 GiB; s: 262,144, milabench's largest readings
    Card("RTX 5090", (12, 0), 32_112),  # t: TrajectoryCrafter/TrajectoryCrafter#20
)
"""By generation, then by memory."""


def find_cards(names: str) -> tuple[Card, ...]:
    """The cards that a text with commas between them names; ``all`` is every one.

    Raises:
        UserError: there is no such card, with the nearest names.
    """
    return CARDS if names.strip().lower() == "all" else tuple(dict.fromkeys(map(_named, names.split(","))))


def on_device(
    device: Device, has_convolutions: bool, tries_kernels: bool = False, context_bytes: int | None = None
) -> dict[str, Any]:
    """What the options of predictions take from the device that is planned for.

    Args:
        device: a CPU, or a card that need not be here.
        has_convolutions: whether the model has any, so that cuDNN is loaded.
        tries_kernels: whether cuDNN tries every kernel of them.
        context_bytes: what this process's context takes there before a step; None is not known.
    """
    if device.type == "cpu":
        return {"target": "cpu"}
    card = recognised(device.name)
    context = _context(card) if context_bytes is None else _LOADED.plus(context_bytes)
    if card is not None and card.is_amd:
        more = {"workspaces": _MIOPEN} if has_convolutions else {}
        return {"target": "cuda", "capability": device.capability, "context": context, **more}
    if has_convolutions:
        context = context.with_part(_CUDNN)
        if tries_kernels:
            context = context.with_part(_TRIED_NEWER if (device.capability or _NEWER) >= _NEWER else _TRIED)
    return {"target": "cuda", "capability": device.capability, "context": context}


def _context(card: Card | None) -> Interval:
    """What a process is charged beside what its allocator reserves, without cuDNN."""
    return CONTEXT if card is None else CONTEXT.plus(card.context_mib * MIB - CONTEXT.value)


def recognised(driver_name: str) -> Card | None:
    """The card that a driver names ``NVIDIA A100-SXM4-80GB``: the one most of whose words are in it."""
    words = set(_words(driver_name))
    known = [card for card in CARDS if words.issuperset(_words(card.name))]
    return max(known, key=lambda card: len(_words(card.name)), default=None)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _named(text: str) -> Card:
    asked = _key(text)
    for card in CARDS:
        if _key(card.name) == asked:
            return card
    near = [card for card in CARDS if asked and asked in _key(card.name)]
    if not near:
        keys = {_key(card.name): card for card in CARDS}
        near = [keys[key] for key in difflib.get_close_matches(asked, keys, _NEAREST, 0.4)]
    said = f"The nearest: {', '.join(map(option_name, near[:_NEAREST]))}. " if near else ""
    raise UserError(
        f"--card: no card is known as {shortened(text.strip())!r}. {said}`--card all` shows every one. For any other "
        "card, give its memory: --device-memory 24GiB."
    )


def option_name(card: Card) -> str:
    """As ``--card`` takes it."""
    return re.sub(r"\s+", "-", card.name.lower())


def _key(text: str) -> str:
    """A name without what people leave out: the vendor, the brand, spaces and dashes."""
    return re.sub(r"nvidia|geforce|tesla|quadro|rtx|amd|instinct|[^a-z0-9]", "", text.lower())
