#!/bin/bash
# Makes the environment of one node. No compiler and no CUDA module: nothing is built, neither now nor later.

module load python
virtualenv --no-download $SLURM_TMPDIR/env
source $SLURM_TMPDIR/env/bin/activate
pip install --upgrade pip --no-index
pip install --no-index torch "${DEEPSPEED_WHEEL:?export the path of a wheel of this package (make wheel)}"  # by name it could be another project
