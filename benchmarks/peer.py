"""The published memory-saving layers, where they can be imported: Bhatia and Dangel 2024, arXiv:2404.12406."""

from __future__ import annotations

import copy

from torch import nn

try:
    from memsave_torch.nn import convert_to_memory_saving
except ImportError:
    convert_to_memory_saving = None

HOW_TO_INSTALL = """The columns of the peer are empty, since memsave_torch cannot be imported. To fill them:
pip install --no-deps git+https://github.com/plutonium-239/memsave_torch@154f88c"""


def converted_by_peer(model: nn.Module) -> nn.Module | None:
    """A copy with all of the peer's layers, as its authors convert; None where the peer is not installed.

    The peer's layers share their parameters with the model that it is given: that is a copy too.
    """
    return None if convert_to_memory_saving is None else convert_to_memory_saving(copy.deepcopy(model))
