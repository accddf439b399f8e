"""Checks a wheel and an sdist as their users meet them: `make release-check`, or `python .ci/release_check.py FILE...`.

Each file is installed into a new environment with nothing but its dependencies, and used from outside the checkout: the
commands, the quickstart on two ranks, a user's program under two type checkers, a run under Accelerate.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

TYPED_PROGRAM = """
import torch
import deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.zero import GatheredParameters

engine, optimizer, loader, scheduler = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 2})
with GatheredParameters(list(engine.parameters())):
    engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
engine.save_checkpoint("folder", tag="one")
"""
# Each is appended to the program above; both type checkers must find it.
TYPE_ERRORS = {
    "a missing argument": "engine.backward()\n",
    "a wrong keyword": "deepspeed.initialize(modle=torch.nn.Linear(2, 2))\n",
    "a wrong type": "engine.save_checkpoint(3)\n",
    "a misspelled name": "from deepspeed.zero import NoSuchName\n",
    "a misspelled name of the root": "from deepspeed import initialise\n",
}

ACCELERATED = """
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from deepspeed import DeepSpeedEngine

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1))
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
data = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=2)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data)
assert isinstance(model, DeepSpeedEngine), type(model)
losses = []
for batch in data:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
accelerator.end_training()
"""


@contextmanager
def step(title: str) -> Iterator[None]:
    """Writes one line with the time of what is done inside."""
    sys.stdout.write(f"  {title} ... ")
    sys.stdout.flush()
    began = time.monotonic()
    yield
    sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")


def fail(what: str) -> None:
    """Ends the program with a sentence."""
    sys.exit(f"failed\nrelease-check: {what}")


def run(command: list[str], folder: Path, expected: int | None = 0) -> str:
    """Returns the output of a command that runs outside the checkout, without the checkout's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "DS_"))}
    kept |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{Path(command[0]).parent}:{kept['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=1800)
    if expected is not None and done.returncode != expected:
        fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def check_contents(artifact: Path) -> None:
    """Refuses a file without licence or types, and one with tests, caches or a path of the machine that built it."""
    if artifact.suffix == ".whl":
        with zipfile.ZipFile(artifact) as wheel:
            contents = {name: wheel.read(name) for name in wheel.namelist()}
    else:
        with tarfile.open(artifact) as sdist:
            files = [member for member in sdist.getmembers() if member.isfile()]
            contents = {member.name: sdist.extractfile(member).read() for member in files}  # type: ignore[union-attr]
    for needed in ("LICENSE", "NOTICE", "deepspeed/py.typed", "deepspeed/commit.txt"):
        if not any(name.endswith(needed) for name in contents):
            fail(f"{artifact.name} has no {needed}")
    folders = {str(ROOT).encode(), str(Path.home()).encode()} - {b"/", b"/root"}
    for name, content in contents.items():
        parts = Path(name).parts
        if "tests" in parts or "__pycache__" in parts or parts[-1].startswith("."):
            if parts[-1] != ".gitignore":  # hatchling packs it, so that a wheel of the sdist leaves out the same files
                fail(f"{artifact.name} has {name}")
        for folder in folders:
            if folder in content:
                fail(f"{artifact.name}: {name} has the path {folder.decode()}")


def commands_of(python: Path) -> list[str]:
    """Returns the console scripts that the installed distribution declares."""
    code = "from importlib.metadata import distribution as d; print(*(e.name for e in d('deepspeed').entry_points))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()


def check_types(tools: Path, python: Path, folder: Path) -> None:
    """Refuses a package whose types mypy or pyright does not see, or finds wrong in a right program."""
    checkers: dict[str, Callable[[Path], list[str]]] = {
        "mypy": lambda program: [str(tools / "mypy"), "--python-executable", str(python), str(program)],
        "pyright": lambda program: [str(tools / "pyright"), "--pythonpath", str(python), str(program)],
    }
    right = folder / "right.py"
    right.write_text(TYPED_PROGRAM)
    for checker, command in checkers.items():
        run(command(right), folder)
        for what, line in TYPE_ERRORS.items():
            wrong = folder / "wrong.py"
            wrong.write_text(TYPED_PROGRAM + line)
            shown = run(command(wrong), folder, expected=1)
            if not re.search(rf"wrong\.py:{len(wrong.read_text().splitlines())}\b", shown):
                fail(f"{checker} does not find {what} ({line.strip()}):\n{shown}")


def check(artifact: Path, tools: Path, folder: Path) -> None:
    """Installs one file into an environment of its own and uses it."""
    sys.stdout.write(f"{artifact.name}\n")
    with step("contents"):
        check_contents(artifact)
    environment, work = folder / "environment", folder / "work"
    work.mkdir(parents=True)
    python = environment / "bin" / "python"
    with step("installing with its dependencies"):
        run([sys.executable, "-m", "venv", str(environment)], work)
        run([str(python), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), str(artifact)], work)
        run([str(python), "-m", "pip", "check"], work)
    with step("commands"):
        shown = run([str(environment / "bin" / "ds_report")], work)
        version = run([str(python), "-c", "import deepspeed; print(deepspeed.__version__)"], work).split()[-1]
        if "+g" not in version or version not in shown:
            fail(f"ds_report does not show version {version}, or that has no label of a commit:\n{shown}")
        for command in commands_of(python):
            if "usage" not in run([str(environment / "bin" / command), "--help"], work).lower():
                fail(f"{command} --help shows no usage")
    with step("quickstart on two ranks"):
        shutil.copytree(ROOT / "examples" / "quickstart", work / "quickstart")
        launcher = str(environment / "bin" / "deepspeed")
        shown = run([launcher, "--num_gpus", "2", "quickstart/train.py", "--minutes", "0.1"], work)
        if "Loss:" not in shown:
            fail(f"the quickstart reports no loss:\n{shown}")
    with step("types, by mypy and pyright"):
        check_types(tools, python, work)
    with step("Accelerate, whose plugin also needs Transformers"):
        run([str(python), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), "accelerate", "transformers"], work)
        (work / "accelerated.py").write_text(ACCELERATED)
        # Without a GPU Accelerate counts one process beside DeepSpeed, unless this runs before the script.
        shutil.copy(ROOT / "examples" / "on_cpu.py", work)
        run([launcher, "--num_gpus", "2", "--no_local_rank", "on_cpu.py", "accelerated.py"], work)


def main() -> None:
    """Checks every file named on the command line, by default those in dist/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="*", type=Path, help="wheels and source distributions; default: dist/")
    given = [path.resolve() for path in parser.parse_args().artifacts]
    artifacts = given or sorted((ROOT / "dist").glob("deepspeed-*"))
    if not artifacts:
        sys.exit("release-check: dist/ has no wheel and no sdist; run `make wheel` first")
    with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
        with step("installing mypy and pyright"):
            tools = Path(folder, "tools")
            run([sys.executable, "-m", "venv", str(tools)], Path(folder))
            run([str(tools / "bin" / "python"), "-m", "pip", "install", "-q", "mypy", "pyright[nodejs]"], Path(folder))
        for number, artifact in enumerate(artifacts):
            check(artifact, tools / "bin", Path(folder, str(number)))
    sys.stdout.write(f"{len(artifacts)} files can be released: {', '.join(path.name for path in artifacts)}\n")


if __name__ == "__main__":
    main()
