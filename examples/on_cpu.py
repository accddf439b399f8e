"""Runs a script that was written for GPUs on the CPU, to try it out before it goes to a cluster.

    torchrun --nproc-per-node 2 examples/on_cpu.py SCRIPT [ARGUMENTS...]
    accelerate launch --config_file FILE examples/on_cpu.py SCRIPT [ARGUMENTS...]

DeepSpeed itself trains on CPU ranks. Lightning and Accelerate ask for GPUs before they use it; this file replaces that
question, and only that, in whichever of the two the script imports:

- Lightning: ``accelerator="gpu"`` gives CPU ranks, and its DeepSpeed strategy accepts them.
- Accelerate: several CPU ranks are counted as several processes, which meet over gloo.

The script must be started by a launcher (torchrun, srun, accelerate): Lightning's own would start it without this file.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path


def lightning(package: str = "lightning.pytorch", fabric: str = "lightning.fabric") -> None:
    """Lets Lightning's DeepSpeed strategies take CPU ranks.

    Args:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        fabric: ``lightning.fabric`` or ``lightning_fabric``, the one that ``package`` uses.
    """
    connectors = {
        package: ("trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        fabric: ("connector", "_Connector"),
    }
    for name, (module, connector) in connectors.items():
        strategy = importlib.import_module(f"{name}.strategies.deepspeed")
        # The strategy's check of its accelerator, and of device numbers, which CPU ranks do not have.
        strategy.CUDAAccelerator = importlib.import_module(f"{name}.accelerators").CPUAccelerator
        strategy._validate_device_index_selection = lambda devices: None
        # What "gpu" stands for.
        found = getattr(importlib.import_module(f"{name}.{module}"), connector)
        found._choose_gpu_accelerator_backend = staticmethod(lambda: "cpu")


def accelerate() -> None:
    """Lets Accelerate count CPU ranks as processes."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_CPU)


REPLACEMENTS: dict[str, Callable[[], None]] = {
    "lightning": lightning,
    "pytorch_lightning": lambda: lightning("pytorch_lightning", "lightning_fabric"),
    "accelerate": accelerate,
}


def replace_checks_of(script: Path) -> None:
    """Replaces the checks of the libraries that a script, or a module beside it, imports."""
    text = "\n".join(path.read_text() for path in (script, *script.parent.glob("*.py")))
    for library, replace in REPLACEMENTS.items():
        if re.search(rf"^\s*(?:import|from) {library}\b", text, flags=re.MULTILINE):
            replace()


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    if not Path(sys.argv[1]).is_file():
        sys.exit(
            f"on_cpu.py: there is no script {sys.argv[1]} in {Path.cwd()}; expected: on_cpu.py SCRIPT [ARGUMENTS...]"
        )
    # Before torch and deepspeed are imported: a GPU that is here must not be used by half.
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    sys.argv = sys.argv[1:]
    script = Path(sys.argv[0]).resolve()
    sys.path[0] = str(script.parent)
    replace_checks_of(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
