"""``ds_plan --measure FILE``: starts one rank per device, measures, and writes the figures for ``--machine``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.plan.machine import write_machine_file


def measure_in_ranks(target: str, devices: int) -> None:
    """Starts the ranks of :func:`main` on this machine with the launcher."""
    from deepspeed.launcher import runner

    options = ["--num_gpus", str(devices), "--no_local_rank", "--module"]
    runner.main([*options, "deepspeed.cli.measure", str(Path(target).resolve())])


def main(args: Sequence[str] | None = None) -> None:
    """Measures together with the other ranks; rank 0 writes the file. Every rank must call it."""
    parser = argparse.ArgumentParser(prog="ds_plan --measure", description=__doc__, allow_abbrev=False)
    parser.add_argument("target")
    target = parser.parse_args(args).target

    from deepspeed import comm
    from deepspeed.plan.measuring.machine import measure_device

    comm.init_distributed(verbose=False)
    device = measure_device()
    if comm.get_rank() == 0:
        write_machine_file(device, target)
        reached = device.efficiency
        collectives = (
            f"{device.link * reached.link / 1e9:,.2f} GB/s of a collective, {1e6 * reached.start:,.0f} us to start one"
        )
        sys.stdout.write(
            f"{target}: {device.name}, {device.flops * reached.matmul / 1e9:,.1f} GFLOP/s in products, "
            f"{device.memory_bandwidth * reached.bandwidth / 1e9:,.2f} GB/s elementwise, "
            f"{collectives if comm.get_world_size() > 1 else 'no collective, as there is one rank'}, "
            f"{1e6 * reached.launch:,.1f} us per operation\n"
        )
    comm.barrier()
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
