"""ZeRO stage 3 with parameters and optimizer state in files on the node's own disk. See README.md."""

import os

import net
import pytorch_lightning as pl
from pytorch_lightning.strategies import DeepSpeedStrategy

from deepspeed.ops.adam import DeepSpeedCPUAdam


def main() -> None:
    args = net.parse_arguments("CIFAR-10, Lightning, ZeRO stage 3 with offload to local disk")
    local_scratch = os.environ["SLURM_TMPDIR"]  # where the scheduler mounts the node's disk for this job
    print(f"Offloading to: {local_scratch}", flush=True)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=args.devices,
        num_nodes=net.node_count(),
        strategy=DeepSpeedStrategy(
            stage=3,
            offload_optimizer=True,
            offload_parameters=True,
            remote_device="nvme",
            offload_params_device="nvme",
            offload_optimizer_device="nvme",
            nvme_path=local_scratch,
        ),
        max_epochs=args.max_epochs,
        enable_progress_bar=False,
    )
    net.run(net.Net(DeepSpeedCPUAdam), trainer, args)


if __name__ == "__main__":
    main()
