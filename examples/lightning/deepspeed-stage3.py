"""ZeRO stage 3 by name: parameters, gradients and optimizer state are sharded over the ranks. See README.md."""

import net
import pytorch_lightning as pl

from deepspeed.ops.adam import FusedAdam


def main() -> None:
    args = net.parse_arguments("CIFAR-10, Lightning, ZeRO stage 3")
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=args.devices,
        num_nodes=net.node_count(),
        strategy="deepspeed_stage_3",
        max_epochs=args.max_epochs,
        enable_progress_bar=False,  # it would write a line per update into the job's log
    )
    net.run(net.Net(FusedAdam), trainer, args)


if __name__ == "__main__":
    main()
