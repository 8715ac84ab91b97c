"""Parameters whose numbers are not in memory as numbers: they are made, or fetched, for whoever reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn

from ...errors import PlanError


class Elsewhere(Tensor):
    """A tensor of which there are numbers once they are asked for; its memory is nobody's to read."""

    _no_memory: ClassVar[str]
    """Why not, of a weight of some shape, and what to do."""

    def numbers(self) -> Tensor:
        """All of them: not to be written to."""
        raise NotImplementedError

    def fresh(self) -> Tensor:
        """All of them, which nobody else has."""
        return self.numbers()

    def stored(self) -> Tensor:
        """The same, for a state dict."""
        return self.fresh()

    def full(self) -> nn.Parameter:
        """A parameter in memory, with what hangs on this one."""
        made = nn.Parameter(self.fresh(), requires_grad=False)
        own = vars(nn.Parameter(self, requires_grad=False))
        vars(made).update({name: value for name, value in vars(self).items() if name not in own})
        return made

    def numpy(self, *, force: bool = False) -> Any:
        """Its numbers; what is written to them is lost."""
        return self.numbers().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numbers().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """Its numbers."""
        return self.numbers().tolist()

    def data_ptr(self) -> NoReturn:
        """
        Raises:
            PlanError: there are no numbers in memory.
        """
        raise PlanError(self._no_memory.format(shape=tuple(self.shape)))

    def storage(self) -> NoReturn:
        """As :meth:`data_ptr`."""
        self.data_ptr()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.data_ptr()


def put_in_place(model: nn.Module, made: Iterable[tuple[int, Any]]) -> None:
    """Register such parameters in the place of others, by whose identity they are known; state dicts have numbers.

    What gives them one after the other has each in its place before it makes the next.
    """
    places = _places(model)
    for key, weight in made:
        for module, name in places[key]:
            module.register_parameter(name, weight)
            module.register_state_dict_post_hook(_in_full)  # type: ignore[no-untyped-call]


def bring_back(model: nn.Module, kind: type[Elsewhere]) -> None:
    """Undo :func:`put_in_place`."""
    made: dict[int, nn.Parameter] = {}
    for module, name, weight in _parameters(model):
        if isinstance(weight, kind):
            module.register_parameter(name, made.setdefault(id(weight), weight.full()))
            hooks = module._state_dict_hooks
            for key in [key for key, hook in hooks.items() if hook is _in_full]:
                del hooks[key]


def in_full(row: Mapping[str, Any], to_save: bool = False) -> dict[str, Any]:
    """A parameter's state in an optimizer, with numbers of its own in the place of such tensors; to save, as in a state
    dict."""
    ours = {name: one for name, one in row.items() if isinstance(one, Elsewhere)}
    return {**row, **{name: one.stored() if to_save else one.fresh() for name, one in ours.items()}}


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """All, with the modules that have them and their names there."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """By the identity of a parameter, the modules that have it and its names there."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module, name, parameter in _parameters(model):
        found.setdefault(id(parameter), []).append((module, name))
    return found


def _in_full(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict has numbers of its own, unless it is asked for the very parameters."""
    for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
        kept: Any = state_dict.get(prefix + name)
        if isinstance(kept, Elsewhere) and kept is not weight:
            state_dict[prefix + name] = kept.stored()
