"""Compile the training step with the TPU compiler, for TPUs that are not there.

Run by test_core_tpu.py in a process of its own, because it needs the wheel libtpu where the tests
run on the CPU: `python tpu_step.py` prints a line per compiled program.
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this machine is no cloud TPU: do not ask
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from test_core_tpu import ARCHITECTURE, EXPERTS, make_arguments

from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.distributed.sharding import partition_spec


def place(arguments, mesh):
    """State whole on every device, rows of the batch split as in training."""
    state, batch = arguments
    whole = NamedSharding(mesh, PartitionSpec())
    names = (None, "rows", "length")

    def put(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def split(x):
        return put(x, NamedSharding(mesh, partition_spec(names, x.shape, mesh)))

    return jax.tree.map(lambda x: put(x, whole), state), jax.tree.map(split, batch)


def main():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    for count, architecture in ((1, ARCHITECTURE), (4, ARCHITECTURE), (2, EXPERTS)):
        mesh = make_mesh(devices[:count], fsdp=count)
        with jax.set_mesh(mesh):
            step, *arguments = make_arguments(architecture)
            text = jax.jit(step).trace(*place(arguments, mesh)).lower().compile().as_text()
        assert "tree_attention_dq" in text
        print("compiled", architecture["model_type"], "for", count, devices[0], flush=True)


if __name__ == "__main__":
    main()
