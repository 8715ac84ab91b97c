"""Archives that nobody should send: each is refused, and nothing of it is anywhere; or what it holds stays in its
folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import resource
import signal
import subprocess
import tarfile
from dataclasses import replace

import pytest
from archive_corpus import CORPUS, OUTSIDE, tar
from service_runs import archive, put

from autotune.errors import UserError
from autotune.service.archives import Limits, pack, unpack
from autotune.service.problems import Problem


@pytest.mark.medium
@pytest.mark.parametrize("what", CORPUS)
def test_what_an_archive_holds_stays_in_its_folder_or_it_is_refused(client, tmp_path, what):
    """Over HTTP it is 422 and is not kept; unpacked, nothing but plain files is made, and none outside."""
    row = CORPUS[what]
    answer = put(client, row.data)
    assert answer.status_code == (422 if row.kept is None else 201), answer.text
    places = client.app.state.service.places
    assert (places.archives / hashlib.sha256(row.data).hexdigest()).exists() == (row.kept is not None)
    assert not list(places.archives.glob(".*"))
    path, into = tmp_path / "archive", tmp_path / "in" / "to"
    path.write_bytes(row.data)
    if row.kept is None:
        with pytest.raises(Problem) as refused:
            unpack(path, into, Limits())
        assert refused.value.status == 422
    else:
        unpack(path, into, Limits())
        made = sorted(each for each in into.rglob("*") if not each.is_dir())
        assert tuple(each.relative_to(into).as_posix() for each in made) == row.kept
        assert all(each.is_file() and not each.is_symlink() for each in made)
        assert all(each.stat().st_mode & 0o7000 == 0 for each in made)
    assert not OUTSIDE.exists()
    assert {each.name for each in tmp_path.iterdir()} == {"archive", "in"}
    assert {each.name for each in (tmp_path / "in").iterdir()} == {"to"}


SMALL = Limits(archive_bytes=10_000, members=10, file_bytes=1000, total_bytes=5000)
BOMBS = {
    "members": tar(*map(str, range(11))),
    "one file": tar("x", body=b"0" * 1001),
    "all files": tar(*"abcdef", body=b"0" * 900),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_ends_at_its_limit(tmp_path, what):
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[what])
    with pytest.raises(Problem) as refused:
        unpack(path, tmp_path / "out", SMALL)
    assert refused.value.status == 422
    assert sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file()) <= SMALL.total_bytes


def test_a_gzip_of_zeros_is_not_unzipped_to_its_end(tmp_path):
    """64 MiB of zeros in 64 KiB, behind a header that names no end."""
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(tar("x") + b"\0" * 2**26))
    unpack(path, None, SMALL)  # tar ends at its two blocks of zeros, whatever follows
    long_name = tarfile.TarInfo("n")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 2**26
    path.write_bytes(gzip.compress(long_name.tobuf() + b"a" * 2**20))
    with pytest.raises(Problem, match="longer than any name"):
        unpack(path, None, SMALL)


def test_a_folder_that_is_too_large_is_not_packed(tmp_path):
    """The client says so, and names the folder."""
    (tmp_path / "data").write_bytes(os.urandom(2000))
    small = Limits(archive_bytes=1000, members=3, total_bytes=5000)
    for limits in (small, replace(small, archive_bytes=10**6, total_bytes=1999)):
        with pytest.raises(UserError, match=f"{tmp_path}: a folder of at most 3 files and .* was expected"):
            pack(tmp_path, limits)
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="at most 3 files"):
        pack(tmp_path, replace(small, archive_bytes=10**6))


@pytest.mark.parametrize("form", ["tar", "tar.gz"])
def test_what_git_archives_is_taken(client, tmp_path, form):
    """It has a header for all members, of the commit."""
    (tmp_path / "model.py").write_text("x = 1\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=ann", "-c", "user.email=ann@host")
    for words in (("init", "-q"), ("add", "model.py"), ("commit", "-q", "-m", "one")):
        subprocess.run([*git, *words], check=True)
    packed = subprocess.run([*git, "archive", f"--format={form}", "HEAD"], check=True, capture_output=True).stdout
    answer = put(client, packed)
    assert (answer.status_code, answer.json().get("num_files")) == (201, 1), answer.text


@pytest.mark.parametrize("header", [{"path": "x.py"}, {"size": "3"}, {"size": "-1"}, {"GNU.sparse.size": "9"}])
def test_a_header_for_all_members_says_nothing_else(tmp_path, header):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, pax_headers=header) as file:
        file.addfile(tarfile.TarInfo("model.py"), io.BytesIO())
    (tmp_path / "archive").write_bytes(packed.getvalue())
    with pytest.raises(Problem) as refused:
        unpack(tmp_path / "archive", tmp_path / "folder", Limits())
    assert refused.value.status == 422
    assert [*(tmp_path / "folder").iterdir()] == []


def test_an_archive_that_the_disk_has_no_room_for_is_507(client):
    """Nothing of it is kept, and once there is room it is taken."""
    data = archive(x=os.urandom(2**20).hex())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))  # the kernel refuses what goes beyond
    try:
        answer = put(client, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (answer.status_code, "Nothing was kept" in answer.json()["detail"]) == (507, True)
    assert not list(client.app.state.service.places.archives.glob(".*"))
    assert put(client, data).status_code == 201
