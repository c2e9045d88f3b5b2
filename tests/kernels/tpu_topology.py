"""Compile the TPU kernels with the TPU compiler, for a TPU that is not there.

Run by test_kernels_tree_attention_tpu.py in a process of its own, because it needs the wheel libtpu
where the tests run on the CPU: `python tpu_topology.py` prints a line per compiled program.
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this machine is no cloud TPU: do not ask
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtrain_kernels import Context, attention

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")
CASES = (
    (64, {"window": 100}),
    (128, {}),
    (256, {"softcap": 30.0, "window": 1000}),
)


def compile_for(topology, head_dim, **settings):
    """The compiled gradient of attention over a row of 8,192 tokens, heads 4/2."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    full = NamedSharding(mesh, PartitionSpec())

    def loss(q, k, v, until, positions):
        context = Context(until, positions=positions)
        out = attention(q, k, v, context, impl="tpu", **settings)
        return out.astype(jnp.float32).sum()

    shapes = [((1, 8192, n, head_dim), jnp.bfloat16) for n in (4, 2, 2)]
    shapes += [((1, 8192), jnp.int32)] * 2
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=full) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays).lower().compile()


def main():
    for topology in TOPOLOGIES:
        for head_dim, settings in CASES:
            compile_for(topology, head_dim, **settings)
            print("compiled", topology, head_dim, settings, flush=True)


if __name__ == "__main__":
    main()
