"""Archives that nobody should send, and what is to come of each."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path


def tar(*members, body=b"x", form=tarfile.GNU_FORMAT):
    """An archive of members as they come."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as file:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            data = body if info.isreg() else b""
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def special(kind, name="x", target="/etc/passwd", **more):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    for key, value in more.items():
        setattr(info, key, value)
    return info


def told(**headers):
    """A member whose extended header says otherwise."""
    return tar(special(tarfile.REGTYPE, pax_headers=headers), form=tarfile.PAX_FORMAT)


def claims(size):
    """A header that promises more than follows."""
    info = tarfile.TarInfo("x")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + b"x" * 512


OUTSIDE = Path(tempfile.gettempdir(), f"autotune-outside-{os.getpid()}")
"""Where nothing is to be."""


@dataclass(frozen=True)
class Row:
    """An archive, and what is to come of it."""

    data: bytes
    kept: tuple[str, ...] | None = None
    """Paths; None where it is refused."""


ZIPPED = gzip.compress(tar("a", "b", body=os.urandom(9999)), mtime=0)
CORPUS = {
    "parent": Row(tar("../x")),
    "parent within": Row(tar("a/../../x")),
    "parent at the end": Row(tar("a/..")),
    "absolute": Row(tar(f"{OUTSIDE}/x")),
    "absolute, two slashes": Row(tar(f"/{OUTSIDE}/x")),
    "backslash": Row(tar("..\\x")),
    "control character": Row(tar("a\x1bb")),
    "line break": Row(tar("a\nb")),
    "extended header: parent": Row(told(path="../x")),
    "extended header: absolute": Row(told(path=f"{OUTSIDE}/x")),
    "extended header: a size": Row(told(size=str(2**40))),
    "extended header: a negative size": Row(told(size="-512")),
    "extended header: no number": Row(told(size="many"), ("x",)),
    "extended header: a sparse file": Row(told(**{"GNU.sparse.size": str(2**60), "GNU.sparse.map": "0,1"})),
    "symlink": Row(tar(special(tarfile.SYMTYPE))),
    "symlink, then through it": Row(tar(special(tarfile.SYMTYPE, "d", "/tmp"), "d/x")),
    "hard link": Row(tar(special(tarfile.LNKTYPE))),
    "hard link within": Row(tar("a", special(tarfile.LNKTYPE, "b", "a"))),
    "character device": Row(tar(special(tarfile.CHRTYPE, devmajor=1, devminor=5))),
    "block device": Row(tar(special(tarfile.BLKTYPE, devmajor=8))),
    "pipe": Row(tar(special(tarfile.FIFOTYPE))),
    "contiguous file": Row(tar(special(tarfile.CONTTYPE))),
    "sparse file": Row(special(tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT) + bytes(1024)),
    "a type that is none": Row(tar(special(b"Z"))),
    "twice": Row(tar("x", "x")),
    "twice, in other words": Row(tar("x", "./x")),
    "below a file": Row(tar("x", "x/y")),
    "a file where a folder is": Row(tar("x/y", "x")),
    "headers without end": Row(told(path="a")[:1024] * 3000 + tar("x")),
    "too deep": Row(tar("/".join("a" * 40))),
    "too long": Row(tar("a/" + "b" * 256)),
    "more members than are taken": Row(gzip.compress(tar(*map(str, range(10_001)), body=b""), 1)),
    "as many folders": Row(gzip.compress(tar(*(special(tarfile.DIRTYPE, f"d{n}") for n in range(10_001))), 1)),
    "a size that nothing follows": Row(claims(4096)),
    "a size beyond all": Row(claims(2**62)),
    "empty": Row(tar()),
    "a folder alone": Row(tar(special(tarfile.DIRTYPE, "d"))),
    "no tar": Row(b"PK\x03\x04 a zip"),
    "nothing": Row(b""),
    "zeros": Row(bytes(10_240)),
    "xz": Row(lzma.compress(tar("x"))),
    "gzip of noise": Row(gzip.compress(os.urandom(4096))),
    "gzip in a gzip": Row(gzip.compress(ZIPPED)),
    "gzip with a wrong sum": Row(ZIPPED[:-8] + bytes(8), ("a", "b")),
    **{f"cut at {part} of 8": Row(ZIPPED[: len(ZIPPED) * part // 8]) for part in range(1, 8)},
    "case alone tells them apart": Row(tar("x", "X"), ("X", "x")),
    "rights of the superuser": Row(tar(special(tarfile.REGTYPE, mode=0o7777, uid=0)), ("x",)),
    "a dot before each": Row(tar("./x", "./d/y"), ("d/y", "x")),
    "bytes behind its end": Row(tar("x") + b"more" * 1000, ("x",)),
    "two gzips, one behind the other": Row(gzip.compress(tar("x")[:512]) + gzip.compress(tar("x")[512:]), ("x",)),
}
