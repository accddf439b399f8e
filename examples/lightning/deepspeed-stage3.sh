#!/bin/bash
# One node, two GPUs: sbatch deepspeed-stage3.sh
#SBATCH --nodes 1
#SBATCH --gres=gpu:2
#SBATCH --tasks-per-node=2    # one task per GPU: Lightning takes SLURM's tasks for its ranks
#SBATCH --mem=32G
#SBATCH --time=0-00:20
#SBATCH --output=%N-%j.out
#SBATCH --account=<your account>

module load python
virtualenv --no-download $SLURM_TMPDIR/env
source $SLURM_TMPDIR/env/bin/activate
pip install --no-index torch pytorch-lightning "${DEEPSPEED_WHEEL:?export the path of a wheel of this package (make wheel)}"

# Without srun there would be one process where Lightning expects two.
srun python deepspeed-stage3.py --batch_size 256 "$@"
