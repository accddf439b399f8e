"""ZeRO stage 3 with parameters and optimizer state in host memory, and the update on the CPU. See README.md."""

import net
import pytorch_lightning as pl
from pytorch_lightning.strategies import DeepSpeedStrategy

from deepspeed.ops.adam import DeepSpeedCPUAdam


def main() -> None:
    args = net.parse_arguments("CIFAR-10, Lightning, ZeRO stage 3 with offload to host memory")
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=args.devices,
        num_nodes=net.node_count(),
        strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True),
        max_epochs=args.max_epochs,
        enable_progress_bar=False,
    )
    net.run(net.Net(DeepSpeedCPUAdam), trainer, args)


if __name__ == "__main__":
    main()
