"""Prepares the folder that `benchmarks.public_scripts` reads: changed lines, and data in place of those to be fetched.

    python -m benchmarks.public_scripts.prepare --folder FOLDER

FOLDER must hold the repositories (``scripts.py`` names them) as ``FOLDER/<name>``, and what they import beside torch in
``FOLDER/site``:

    git clone https://github.com/<owner>/<name> FOLDER/<name>
    pip install --target FOLDER/site --no-deps torchvision==0.28.* pillow tensorboard tensorboardX absl-py markdown \
        grpcio six hydra-core omegaconf antlr4-python3-runtime==4.9.3 rootutils python-dotenv hydra-colorlog \
        sentencepiece

with the torchvision of the torch that is there. The data are drawn from a seed, and small; something can be learned
from each. Two things of torchvision's copy in FOLDER/site are changed too: the checksums of CIFAR-100 are those of the
data; and where its compiled part was built for another torch (PyPI's, beside a torch for CPUs), it is not asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from .scripts import SCRIPTS, Script

_SEED = 0


def main() -> None:
    """Prepare each repository; what is prepared already is made anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the repositories lie")
    folder: Path = parser.parse_args().folder
    for script in SCRIPTS:
        place = folder / script.name
        if not place.exists():
            sys.exit(
                f"{place} is not there: clone https://github.com/{script.repository} and check {script.commit} out"
            )
        print(f"{script.name}: {changed(script, place)} changed lines")
        if script.name in _DATA:
            _DATA[script.name](place)
    own_checksums(folder / "site" / "torchvision", folder / "pytorch-cifar100" / "data" / "cifar-100-python")
    without_operators(folder / "site")


def changed(script: Script, place: Path) -> int:
    """Check the commit out and change its lines.

    Returns:
        How many lines differ from the commit's.
    """
    subprocess.run(["git", "-C", str(place), "checkout", "--quiet", "--force", script.commit], check=True)
    for name, (old, new) in script.changes.items():
        text = (place / name).read_text(encoding="utf-8")
        if old not in text:
            sys.exit(f"{place / name}: {old!r} was expected somewhere; is this {script.commit}?")
        (place / name).write_text(text.replace(old, new), encoding="utf-8")
    told = subprocess.run(
        ["git", "-C", str(place), "diff", "--numstat"], check=True, capture_output=True, text=True
    ).stdout
    return sum(int(line.split()[0]) for line in told.splitlines())


def stories(place: Path) -> None:
    """Shards of tokens as `tinystories.py pretokenize` writes them; the first is for validation."""
    folder = place / "data" / "tok512"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        tokens = walk(np.random.default_rng(_SEED + number), 200_000, 512)
        tokens[::150] = 1  # begins a text
        tokens.astype(np.uint16).tofile(folder / f"data{number:02}.bin")


def words(place: Path) -> None:
    """A corpus of a thousand words: with the torch of today the script fails after its first epoch, which is long."""
    folder = place / "data" / "words"
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, size) in enumerate({"train": 2_000_000, "valid": 4_000, "test": 4_000}.items()):
        tokens = walk(np.random.default_rng(_SEED + number), size, 1_000)
        lines = (" ".join(f"w{token}" for token in line) for line in tokens.reshape(-1, 20))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def walk(random: np.random.Generator, size: int, num_kinds: int) -> np.ndarray:
    """Tokens, each one of four that its predecessor may have, seldom another; the four are the same for all seeds."""
    after = np.random.default_rng(_SEED).integers(2, num_kinds, (num_kinds, 4))
    choices, others = random.integers(4, size=size), random.integers(2, num_kinds, size)
    is_other, found, token = random.random(size) < 0.1, np.empty(size, dtype=np.int64), 2
    for place in range(size):
        token = int(others[place] if is_other[place] else after[token, choices[place]])
        found[place] = token
    return found


def images(num: int, num_kinds: int, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, list[int]]:
    """Images of noise over a pattern of their kind, and the kinds; patterns are the same for all seeds."""
    random = np.random.default_rng(seed)
    patterns = np.random.default_rng(_SEED).integers(0, 160, (num_kinds, *shape))
    kinds = random.integers(num_kinds, size=num)
    return (patterns[kinds] + random.integers(0, 96, (num, *shape))).astype(np.uint8), kinds.tolist()


def cifar(place: Path) -> None:
    """CIFAR-100's own files: 1,600 images to train on, 200 to test."""
    folder = place / "data" / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, num) in enumerate({"train": 1_600, "test": 200}.items()):
        data, kinds = images(num, 100, (3, 32, 32), _SEED + number)
        content = {"data": data.reshape(num, -1), "fine_labels": kinds}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(kind) for kind in range(100)]}, protocol=4))


def digits(place: Path) -> None:
    """MNIST's own files: 12,800 images and 2,200."""
    folder = place / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, num) in enumerate({"train": 12_800, "t10k": 2_200}.items()):
        data, kinds = images(num, 10, (28, 28), _SEED + number)
        for kind, array in (("images-idx3", data), ("labels-idx1", np.array(kinds, dtype=np.uint8))):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def ratings(place: Path) -> None:
    """A user's items lie near each other; one of them and 99 others are for the test."""
    random, folder = np.random.default_rng(_SEED), place / "data"
    folder.mkdir(exist_ok=True)
    num_users, num_items, num_each = 300, 800, 30
    liked = [(user * 7 + random.choice(200, num_each + 1, replace=False)) % num_items for user in range(num_users)]
    lines: dict[str, Iterable[str]] = {
        "train.rating": (f"{user}\t{item}\t5\t0" for user, own in enumerate(liked) for item in own[1:]),
        "test.rating": (f"{user}\t{own[0]}\t5\t0" for user, own in enumerate(liked)),
        "test.negative": (
            "\t".join(
                [f"({user},{own[0]})", *map(str, random.permutation(np.setdiff1d(np.arange(num_items), own))[:99])]
            )
            for user, own in enumerate(liked)
        ),
    }
    for name, rows in lines.items():
        (folder / f"ml-1m.{name}").write_text("\n".join(rows) + "\n", encoding="utf-8")


_DATA: Mapping[str, Callable[[Path], None]] = {
    "llama2.c": stories,
    "awd-lstm-lm": words,
    "pytorch-cifar100": cifar,
    "lightning-hydra-template": digits,
    "NCF": ratings,
}


def own_checksums(torchvision: Path, data: Path) -> None:
    """torchvision takes the data for CIFAR-100."""
    path = torchvision / "datasets" / "cifar.py"
    before, name, own = path.read_text(encoding="utf-8").partition("class CIFAR100")
    for file in ("train", "test", "meta"):
        digest = hashlib.md5((data / file).read_bytes()).hexdigest()
        own = re.sub(
            rf'("{file}",\s*(?:"key": "fine_label_names",\s*)?(?:"md5": )?)"[0-9a-f]{{32}}"', rf'\1"{digest}"', own
        )
    path.write_text(before + name + own, encoding="utf-8")


def without_operators(site: Path) -> None:
    """torchvision is imported without its compiled operators, where they are for another torch: no script uses them."""
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(site)!r}); import torchvision"]
    if subprocess.run(command, capture_output=True).returncode == 0:
        return
    path = site / "torchvision" / "__init__.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"^    _(autograd|meta)_registrations,\n", "", text, flags=re.MULTILINE), encoding="utf-8")
    subprocess.run(command, check=True)
    print("torchvision: without its compiled operators, which are for another torch")


if __name__ == "__main__":
    main()
