#!/bin/bash
# One training run on all machines of a TPU slice:
#
#   TPU_NAME=my-slice ZONE=us-central2-b scripts/tpu_pod.sh --config configs/sft_qwen3.toml \
#       run.output_dir=gs-mounted/runs/a parallel.fsdp=-1
#
# Copies this folder to every machine, installs it there with pip, and starts the same command on
# each; jax finds the others by itself. run.output_dir must be a folder that all machines share, such
# as a mounted bucket or NFS. Ctrl-C ends the ssh sessions only: use `STOP=1 scripts/tpu_pod.sh`.
set -eu
: "${TPU_NAME:?the name of the TPU slice}" "${ZONE:?its zone}"
everywhere() {
  gcloud compute tpus tpu-vm ssh "$TPU_NAME" --zone="$ZONE" --worker=all --command="$1"
}
if [ -n "${STOP:-}" ]; then
  # shellcheck disable=SC2016  # each machine has its own number in the file
  everywhere 'kill -TERM $(cat jaxtrain/train.pid)'
  exit
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git archive --format=tar.gz --prefix=jaxtrain/ -o "$folder/jaxtrain.tar.gz" HEAD
gcloud compute tpus tpu-vm scp "$folder/jaxtrain.tar.gz" "$TPU_NAME": --zone="$ZONE" --worker=all
everywhere 'tar xzf jaxtrain.tar.gz && rm jaxtrain.tar.gz && cd jaxtrain && python3 -m venv .venv &&
  .venv/bin/pip install --quiet -e ".[tpu]"'
words=$(printf ' %q' "$@")
everywhere "cd jaxtrain && echo \$\$ > train.pid && exec .venv/bin/python -m jaxtrain.main$words"
