#!/bin/bash
# One training run over the GPUs of several machines, one process a GPU:
#
#   sbatch --nodes=2 scripts/slurm_train.sh --config CONFIG parallel.fsdp=8 parallel.data=2
#
# The script is submitted from the repository's folder, on a file system that all machines share; VENV
# names the virtual environment. A job that is stopped or preempted saves a checkpoint, and the same
# command goes on from it, on as many GPUs as there are then (set data.global_batch_size).
#SBATCH --job-name=jaxtrain
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# SIGTERM two minutes before the time limit: enough to finish a step and save.
#SBATCH --signal=TERM@120
#SBATCH --requeue

set -eu
VENV=${VENV:-.venv}
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jaxtrain}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# Keeps strangers out of the run; srun hands it to every process.
JAXTRAIN_TOKEN=${JAXTRAIN_TOKEN:-$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')}
export JAXTRAIN_TOKEN
# --kill-on-bad-exit=0: processes end each other by themselves, with one line on the cause.
exec srun --kill-on-bad-exit=0 "$VENV/bin/python" -m jaxtrain.main "$@"
