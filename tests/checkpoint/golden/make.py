"""Makes checkpoints of one format version to keep: ``python -c "import tests.checkpoint.golden.make as m; m.main(1)"``.

Run once per version, by the code that writes it, before a later version replaces it; so the files of older versions
cannot be made again. Each is a zip of a folder of checkpoints, with digests of what the run held (``values.json``).
"""

import hashlib
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.training import engine, fragments, joined, other_state, train
from tests.harness import run_ranks, shut_down

HERE = Path(__file__).resolve().parent
TAG = "golden"

# Name: ranks, stage, precision, whether frozen parameters were left out.
MADE: dict[str, tuple[int, int, str, bool]] = {
    "1-stage0-fp32": (1, 0, "fp32", False),
    "2-stage3-bf16": (2, 3, "bf16", False),
    "3-stage1-fp16": (3, 1, "fp16", False),
    "2-stage2-bf16-trained-only": (2, 2, "bf16", True),
}


def digests(held: dict[str, torch.Tensor]) -> dict[str, str]:
    """A digest of the bits and the dtype of every tensor."""
    return {
        name: f"{values.dtype} " + hashlib.sha256(bytes(values.contiguous().view(-1).view(torch.uint8))).hexdigest()
        for name, values in held.items()
    }


def plain(state: dict[str, Any]) -> Any:
    """What :func:`tests.checkpoint.training.other_state` returns, as it comes back from JSON."""
    return json.loads(json.dumps(state, default=lambda value: value.tolist()))


def write(folder: str, stage: int, precision: str, exclude_frozen: bool) -> tuple[Any, Any]:
    """One rank's run."""
    run = engine(stage, precision)
    train(run, range(3))
    run.save_checkpoint(folder, tag=TAG, client_state={"note": "hello"}, exclude_frozen_parameters=exclude_frozen)
    return fragments(run), other_state(run)


def main(version: int) -> None:
    """Writes what :data:`MADE` names."""
    for name, (ranks, stage, precision, exclude_frozen) in MADE.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            result = run_ranks(write, ranks, place, stage, precision, exclude_frozen, timeout=200)
            held = digests(joined([entry[0] for entry in result]))
            values = {"held": held, "other": plain(result[0][1])}
            (folder / "values.json").write_text(json.dumps(values, indent=1, sort_keys=True))
            (HERE / f"version{version}").mkdir(exist_ok=True)
            target = HERE / f"version{version}" / f"{name}.zip"
            with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and path.suffix != ".py":
                        archive.write(path, path.relative_to(folder))
        sys.stdout.write(f"{target.relative_to(HERE)} {target.stat().st_size}\n")
    shut_down()
