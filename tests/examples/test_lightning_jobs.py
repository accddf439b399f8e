"""examples/lightning: the three scripts by their SLURM job files, and in the ranks of the harness."""

import importlib.util
import os
import re

import pytest

from tests.ecosystem.lightning.devices import admit_ranks, has_gpus, run_on_devices
from tests.examples.support import EXAMPLES, Desk, commands_of, run_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch-lightning is not installed"
)

SCRIPTS = ["deepspeed-stage3", "deepspeed-stage3-offload-cpu", "deepspeed-stage3-offload-nvme"]
ACCURACY = re.compile(r"right on ([\d.]+) % of the test pictures")


def _scripts(folder):
    """All three, one after the other; returns what rank 0 saw."""
    import contextlib
    import io

    from deepspeed.logging import logger

    level = logger.level
    os.chdir(folder)
    os.environ["SLURM_TMPDIR"] = str(folder)
    admit_ranks(2, "pytorch_lightning")
    shown = {}
    for name in SCRIPTS:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            run_script(EXAMPLES / "lightning" / f"{name}.py", "--make_data", "--batch_size", "64", "--max_epochs", "1")
        shown[name] = output.getvalue()
    logger.setLevel(level)
    return shown


def test_scripts_train_alike(tmp_path):
    shown, _ = run_on_devices(_scripts, 2, tmp_path, timeout=100)
    assert f"Offloading to: {tmp_path}" in shown["deepspeed-stage3-offload-nvme"]
    accuracies = {name: float(ACCURACY.search(text)[1]) for name, text in shown.items()}
    assert min(accuracies.values()) > 30, accuracies
    losses = {re.search(r"epoch 0: mean loss (\d\.\d+) in", text)[1] for text in shown.values()}
    assert len(losses) == 1, "where states lie changes no loss"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_job_files(name, tmp_path):
    assert f"sbatch {name}.sh --make_data" in commands_of("lightning")
    shown = Desk(tmp_path, "lightning", on_gpus=has_gpus(2)).sbatch(f"{name}.sh", "--make_data", "--max_epochs", "4")
    assert len(ACCURACY.findall(shown)) == 1 and float(ACCURACY.search(shown)[1]) > 30, shown


@pytest.mark.slow
def test_the_command_for_a_machine_without_a_gpu(tmp_path):
    line = "torchrun --nproc-per-node 2 ../on_cpu.py deepspeed-stage3.py --make_data --batch_size 256 --max_epochs 8"
    assert line in commands_of("lightning")
    shown = Desk(tmp_path, "lightning").run(f"{line} --batch_size 64 --max_epochs 1")
    assert float(ACCURACY.search(shown)[1]) > 30
