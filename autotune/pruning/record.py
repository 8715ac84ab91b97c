"""``Record``: which indices of which tensors a pruned model keeps, as plain data that has a hash."""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Self

from ..errors import PlanError

_FORMAT = "autotune/pruning@1"
_MAX_BYTES = 2**27
"""Of a record's text: widths of a million, a thousand times."""


@dataclass(frozen=True)
class Kept:
    """What one tensor keeps."""

    shape: tuple[int, ...]
    """Before the cut."""
    sets: tuple[int | None, ...]
    """For each dimension, which of the record's sets; None keeps all."""


@dataclass(frozen=True)
class Record:
    """A pruning, such that torch alone makes it again from the same weights."""

    model: str
    """Hash of names, shapes and ties of the tensors before the cut."""
    sets: tuple[tuple[int, ...], ...]
    """Distinct sets of kept indices, each ascending."""
    tensors: dict[str, Kept]
    """Parameters and buffers that are cut, by name."""
    attributes: dict[str, dict[str, tuple[Any, Any]]]
    """By module and name, plain values before and after, such as ``out_channels``."""
    left: tuple[str, ...] = ()
    """What was not cut although it was asked for, in words."""

    @property
    def hash(self) -> str:
        """``sha256:…`` of :meth:`text`."""
        return f"sha256:{hashlib.sha256(self.text().encode()).hexdigest()}"

    def text(self) -> str:
        """JSON: the same text for the same record."""
        return json.dumps({"schema": _FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"))

    def packed(self) -> str:
        """The text, compressed, in base64."""
        return base64.b64encode(self.compressed()).decode()

    def compressed(self) -> bytes:
        """The text as a gzip file."""
        return gzip.compress(self.text().encode(), mtime=0)

    @staticmethod
    def hash_of(packed: str) -> str:
        """:attr:`hash` of a packed record."""
        return f"sha256:{hashlib.sha256(gzip.decompress(base64.b64decode(packed))).hexdigest()}"

    @classmethod
    def unpacked(cls, packed: str, expected_hash: str) -> Self:
        """Read :meth:`packed` back.

        Raises:
            PlanError: it is no record, or its hash is another.
        """
        try:
            return cls.decompressed(base64.b64decode(packed, validate=True), expected_hash)
        except binascii.Error:
            raise _wrong("it is not base64") from None

    @classmethod
    def decompressed(cls, content: bytes, expected_hash: str, source: str = "settings.pruning.record") -> Self:
        """Read :meth:`compressed` back; ``source`` names it in errors.

        Raises:
            PlanError: it is no record, or its hash is another.
        """
        try:
            engine = zlib.decompressobj(wbits=31)
            text = engine.decompress(content, _MAX_BYTES).decode()
            data = json.loads(text)
            found = cls._of(data)
        except (zlib.error, ValueError, TypeError, KeyError, AttributeError) as error:
            raise _wrong(f"it cannot be read: {type(error).__name__}: {error}", source) from None
        if (got := f"sha256:{hashlib.sha256(text.encode()).hexdigest()}") != expected_hash:
            raise _wrong(f"its hash is {got[:19]}…, but the plan names {expected_hash[:19]}…: it was edited", source)
        return found

    @classmethod
    def _of(cls, data: Any) -> Self:
        if data.pop("schema", None) != _FORMAT:
            raise ValueError(f"schema: {_FORMAT} was expected")
        return cls(
            model=data["model"],
            sets=tuple(map(tuple, data["sets"])),
            tensors={
                name: Kept(tuple(row["shape"]), tuple(row["sets"])) for name, row in sorted(data["tensors"].items())
            },
            attributes={
                name: {key: (before, after) for key, (before, after) in row.items()}
                for name, row in data["attributes"].items()
            },
            left=tuple(data["left"]),
        )


def _wrong(what: str, source: str = "settings.pruning.record") -> PlanError:
    return PlanError(
        f"{source}: a record of kept indices was expected, but {what}. Take the file that was written beside the plan, "
        "or leave record out to cut anew."
    )
