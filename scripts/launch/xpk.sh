#!/bin/bash
# One training run on a TPU slice of a GKE cluster, through xpk (github.com/AI-Hypercomputer/xpk):
#
#   CLUSTER=c ZONE=us-central2-b TPU_TYPE=v5litepod-16 IMAGE=REGISTRY/jaxtrain:0.2 NAME=run1 \
#       scripts/launch/xpk.sh --config configs/sft_qwen3.toml run.output_dir=/shared/runs/a parallel.fsdp=-1
#
# jax finds the slice's other machines by itself. STORAGE names an xpk storage that all of them share
# (xpk storage attach). Ended by: xpk workload delete --workload NAME --cluster CLUSTER --zone ZONE.
set -eu
: "${CLUSTER:?the cluster}" "${ZONE:?its zone}" "${TPU_TYPE:?such as v5litepod-16}"
: "${IMAGE:?an image with jaxtrain[tpu]}" "${NAME:?of the workload}"
# One token for all machines, which keeps strangers out of the run.
token=${JAXTRAIN_TOKEN:-$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')}
words=$(printf ' %q' "$@")
exec xpk workload create --workload "$NAME" --cluster "$CLUSTER" --zone "$ZONE" \
  --tpu-type "$TPU_TYPE" --num-slices 1 --docker-image "$IMAGE" --max-restarts 20 \
  ${STORAGE:+--storage "$STORAGE"} \
  --command "JAXTRAIN_TOKEN=$token jaxtrain parallel.launcher=tpu$words"
