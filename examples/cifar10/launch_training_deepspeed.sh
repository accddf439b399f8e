#!/bin/bash
# Runs once on each node; torchrun starts one rank per GPU of the node.

source $SLURM_TMPDIR/env/bin/activate

echo "r$SLURM_NODEID master: $HEAD_NODE"

torchrun \
  --nnodes $SLURM_NNODES \
  --nproc_per_node 2 \
  --rdzv_id $SLURM_JOB_ID \
  --rdzv_backend c10d \
  --rdzv_endpoint "$HEAD_NODE" \
  cifar10.py --deepspeed_config="./ds_config.json" "$@"
