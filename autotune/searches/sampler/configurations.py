"""The finite set of configurations that a search may measure, each with its prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution

from ...estimates import Prediction
from .surrogate import Array, Indices

_LARGER, _SMALLER = 1, 3
"""Of each combination's micro-batches, how many are kept beyond the largest that is predicted to fit: predictions
are wrong at times."""
_OCTAVES = 2.0
"""Doublings of the micro-batch over which its effects are similar."""
_PACKED = 8.0
"""How far packed batches are from padded ones, in the same unit: neither tells of the other."""
_WHOLE_RANGE = 2.0
"""The same for another ordered parameter: its range is so many such distances."""


@dataclass(frozen=True)
class Configuration:
    """One point of the search."""

    params: Mapping[str, Any]
    """As Optuna has them."""
    micro_batch: int | None = None
    """Samples in one forward pass, where a parameter chooses it."""
    predicted: Prediction | None = None
    """None where nothing could be predicted."""
    prior_gains: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By technique, mean and standard deviation of its prior gain in the logarithm of the speed."""
    function: str = ""
    """What it computes: equal ones are of one quality, and "" is the reference's."""
    removed: Mapping[str, float] = field(default_factory=dict)
    """By technique that changes the function, the share of the model that it takes away."""
    packed: bool = False
    """Whether the micro-batch is one row of samples, without padding."""


class Configurations:
    """The set: parameters as Optuna has them, and as numbers for the models."""

    def __init__(
        self,
        rows: Sequence[Configuration],
        distributions: Mapping[str, BaseDistribution],
        batch: str | None = None,
    ) -> None:
        """Take the set.

        Args:
            rows: each configuration once; it need not be every combination.
            distributions: of every parameter. Categorical ones have levels, others lie on a line.
            batch: the parameter that chooses the micro-batch, by itself or as a share of what fits: the models see the
                micro-batch in its place.
        """
        if not rows:
            raise ValueError("at least one configuration is needed, but got none")
        self.rows = tuple(rows)
        self.distributions = dict(distributions)
        self._index = {self._key(row.params): number for number, row in enumerate(self.rows)}
        self._batch = batch

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def are_predicted(self) -> bool:
        """Whether something is predicted of each."""
        return all(row.predicted is not None for row in self.rows)

    def derived(self, limit_bytes: float) -> Configurations:
        """Of each combination of everything but the batch, the largest micro-batch that is predicted to fit, or the
        smallest where none is, and those about it: the batch is a share of what fits."""
        ladders: dict[tuple[Any, ...], list[Configuration]] = {}
        for row in sorted(self.rows, key=lambda row: row.micro_batch or 1):
            rest = (value for name, value in row.params.items() if name != self._batch)
            ladders.setdefault((row.packed, *rest), []).append(row)
        kept = (row for ladder in ladders.values() for row in _about_largest(ladder, limit_bytes))
        return Configurations(list(kept), self.distributions, self._batch)

    def joined(self, others: Iterable[Configuration]) -> Configurations:
        """With others, of which something is known: what was measured of them tells of those that are like them. Where
        all that is here is predicted, only others that are."""
        usable = [row for row in others if row.predicted is not None or not self.are_predicted]
        new = [row for row in usable if self.index(row.params) is None]
        return Configurations([*self.rows, *new], self.distributions, self._batch) if new else self

    def index(self, params: Mapping[str, Any]) -> int | None:
        """Number of the configuration with these parameters; None where there is none."""
        return self._index.get(self._key(params)) if params.keys() >= self.distributions.keys() else None

    def inputs(self) -> tuple[Array, NDArray[np.bool_]]:
        """(configurations, parameters): as a surrogate sees them; and (parameters,), which are ordered."""
        columns = [self._column(name) for name in self.distributions]
        ordered = [not isinstance(kind, CategoricalDistribution) for kind in self.distributions.values()]
        return np.array(columns).reshape(len(columns), len(self)).T, np.array(ordered, dtype=bool)

    def micro_batches(self) -> Array:
        """(configurations,): samples in one forward pass; 1 where nothing chooses it."""
        return np.array([float(row.micro_batch or 1) for row in self.rows])

    def indicators(self) -> Array:
        """(configurations, indicators): one, the logarithm of the micro-batch, and 1 for each level that one has."""
        columns = [np.ones(len(self)), np.log(self.micro_batches())]
        for name, kind in self.distributions.items():
            levels = kind.choices if isinstance(kind, CategoricalDistribution) else ()
            columns += [np.array([float(row.params[name] == level) for row in self.rows]) for level in levels]
        return np.column_stack(columns)

    def predicted(self, what: str) -> Array:
        """(configurations,): one field of the predictions, NaN where it is not known."""
        values = [getattr(row.predicted, what, None) for row in self.rows]
        return np.array([np.nan if value is None else float(value) for value in values])

    def prior_gains(self) -> Iterator[Array]:
        """(configurations, 2) for each technique that any has: mean and standard deviation of its gain."""
        for name in sorted({name for row in self.rows for name in row.prior_gains}):
            yield np.array([row.prior_gains.get(name, (0.0, 0.0)) for row in self.rows])

    def functions(self) -> tuple[list[Configuration], Indices]:
        """One configuration of each function, the reference's first; and (configurations,), each one's number."""
        first = {"": Configuration({}), **{row.function: row for row in reversed(self.rows)}}
        numbers = {function: number for number, function in enumerate(first)}
        return list(first.values()), np.array([numbers[row.function] for row in self.rows], dtype=np.intp)

    def _key(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(params[name] for name in self.distributions)

    def _column(self, name: str) -> Array:
        if name == self._batch:
            return np.log2(self.micro_batches()) / _OCTAVES + _PACKED * np.array([row.packed for row in self.rows])
        values = [row.params[name] for row in self.rows]
        kind = self.distributions[name]
        if isinstance(kind, CategoricalDistribution):
            return np.array([float(kind.choices.index(value)) for value in values])
        numbers = np.array(values, dtype=np.float64)
        column: Array = _WHOLE_RANGE * (numbers - numbers.min()) / (np.ptp(numbers) or 1.0)
        return column


def _about_largest(ladder: Sequence[Configuration], limit_bytes: float) -> Sequence[Configuration]:
    """Of one combination, by ascending micro-batch. Without a prediction for each, all of them."""
    peaks = [row.predicted.peak_bytes for row in ladder if row.predicted is not None]
    if len(peaks) < len(ladder):
        return ladder
    largest = max((at for at, peak in enumerate(peaks) if peak <= limit_bytes), default=0)
    return ladder[max(0, largest - _SMALLER) : largest + _LARGER + 1]
