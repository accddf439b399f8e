"""CIFAR-10 as its authors publish it for Python, read without torchvision; and a made data set of the same format.

    python cifar10_data.py FOLDER      writes the made data set: FOLDER/cifar-10-batches-py, 4,000 + 800 pictures

The folder ``cifar-10-batches-py`` holds ``data_batch_1`` to ``data_batch_5``, ``test_batch`` and ``batches.meta``. Each
batch is a pickled dict: ``data``, uint8 of shape (pictures, 3072), red, green and blue plane of 32 x 32 one after the
other; and ``labels``, a list of class numbers. Put the real files there instead and nothing else changes.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

FOLDER = "cifar-10-batches-py"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TRAIN_FILES = [f"data_batch_{number}" for number in range(1, 6)]
TEST_FILES = ["test_batch"]


class Cifar10(Dataset):
    """Pictures as float32 of shape (3, 32, 32) between -1 and 1, with their class number.

    Args:
        root: The folder that ``cifar-10-batches-py`` lies in.
        train: The five training files, or the one for testing.
    """

    def __init__(self, root: str | Path, train: bool = True) -> None:
        folder = Path(root) / FOLDER
        if not (folder / "batches.meta").exists():
            raise FileNotFoundError(
                f"there is no CIFAR-10 in {folder}: unpack cifar-10-python.tar.gz into {root}, or make a small data "
                f"set of the same format with: python {Path(__file__).name} {root}"
            )
        # Only unpickle files that you made or fetched from their authors: a pickle can run code.
        batches = [pickle.loads((folder / name).read_bytes(), encoding="latin1") for name in _files(train)]
        self.pictures = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        self.labels = [label for batch in batches for label in batch["labels"]]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.pictures[index]).float() / 127.5 - 1, self.labels[index]


def _files(train: bool) -> list[str]:
    return TRAIN_FILES if train else TEST_FILES


def make(root: str | Path, pictures_per_file: int = 800, seed: int = 0) -> None:
    """Writes a data set that a small network can learn: each class is a smooth pattern of colors, shifted and noisy.

    Does nothing where a data set lies already. Several ranks may call it at the same time.
    """
    folder = Path(root) / FOLDER
    if (folder / "batches.meta").exists():
        return
    dice = np.random.default_rng(seed)
    coarse = dice.uniform(40, 215, size=(len(CLASSES), 3, 4, 4))
    patterns = coarse.repeat(8, axis=2).repeat(8, axis=3)
    for number, name in enumerate([*TRAIN_FILES, *TEST_FILES], 1):
        labels = dice.integers(len(CLASSES), size=pictures_per_file)
        pictures = np.stack([_picture(patterns[label], dice) for label in labels])
        _write(
            folder / name,
            {
                "batch_label": f"batch {number} of {len(TRAIN_FILES)}" if number <= len(TRAIN_FILES) else "testing",
                "data": pictures.reshape(pictures_per_file, -1),
                "labels": labels.tolist(),
                "filenames": [f"{CLASSES[label]}_{number}_{index}.png" for index, label in enumerate(labels)],
            },
        )
    meta = {"label_names": CLASSES, "num_cases_per_batch": pictures_per_file, "num_vis": 3072}
    _write(folder / "batches.meta", meta)  # last: whoever finds it finds the rest


def _picture(pattern: np.ndarray, dice: np.random.Generator) -> np.ndarray:
    shifted = np.roll(pattern, shift=tuple(dice.integers(-6, 7, size=2)), axis=(1, 2))
    noisy = shifted * dice.uniform(0.7, 1.3) + dice.normal(0, 40, size=pattern.shape)
    return noisy.clip(0, 255).astype(np.uint8)


def _write(path: Path, content: dict) -> None:
    """Under a name of its own first, so that no other rank reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        pickle.dump(content, file)
    os.replace(file.name, path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(sys.argv[1])
    print(f"{len(Cifar10(sys.argv[1]))} pictures to learn from, {len(Cifar10(sys.argv[1], train=False))} to test with")
