#!/bin/bash
# Two nodes with two GPUs each: sbatch deepspeed-example.sh
#SBATCH --nodes 2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=2
#SBATCH --cpus-per-task=4
#SBATCH --mem=16000M
#SBATCH --time=0-00:10
#SBATCH --output=%N-%j.out

# One task per node makes the virtual environment on the node's own disk.
srun -N $SLURM_NNODES -n $SLURM_NNODES ./config_env.sh

export HEAD_NODE=$(hostname) # where the nodes meet: the first one runs this file

srun ./launch_training_deepspeed.sh "$@" # sbatch deepspeed-example.sh --make_data
