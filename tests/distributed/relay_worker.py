"""Run by test_distributed_relay.py, once a process: values and parameters from and to process 0.

relay_worker.py PORT SIZE PROCESS
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.batch import Batch
from jaxtrain.config import ParallelConfig
from jaxtrain.distributed.broadcast import broadcast
from jaxtrain.distributed.gather import cut_pieces, gather_params
from jaxtrain.distributed.launch import Launch
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.distributed.processes import join, shutdown


def make_round() -> list[Batch]:
    """About 50 MB: twelve microsteps of 8 rows of 16k tokens."""
    shape = (12, 8, 16384)
    ints = [np.full(shape, i, np.int32) for i in range(4)]
    return [
        Batch(
            *ints,
            weights={"pg": np.ones(shape, np.float32)},
            streams={name: np.ones(shape, np.float32) for name in ("advantage", "sampler_logp")},
            denoms={"pg": np.float32(3)},
        )._replace(since=np.zeros(shape, np.int32))
    ]


def main(port: str, size: int, process: int) -> None:
    join(
        Launch(f"localhost:{port}", process, size),
        {},
        ParallelConfig(start_timeout=60, meet_timeout=60),
    )
    report = {
        "one": broadcast("a number", lambda: time.sleep(2) or 17),
        "two": broadcast("text", lambda: "x" * 3),
    }
    broadcast("warm", make_round)
    start = time.monotonic()
    batches = broadcast("a round", make_round)
    report["seconds"] = time.monotonic() - start
    arrays = jax.tree.leaves(batches)
    report["bytes"] = sum(array.nbytes for array in arrays)
    report["checksum"] = float(sum(array.astype(np.float64).sum() for array in arrays))

    mesh = make_mesh(data=size, fsdp=-1)
    rng = np.random.default_rng(0)
    expected = {
        "stack": (rng.normal(size=(5, 8, 6)).astype(np.float32), (None, "fsdp", None)),
        "table": (rng.normal(size=(8, 10)).astype(np.float32), ("fsdp", None)),
        "all": (rng.normal(size=(8, 4)).astype(np.float32), (("data", "fsdp"), None)),
        "cut": (rng.normal(size=(8,)).astype(np.float32), (("data", "fsdp"),)),
        "norm": (rng.normal(size=(7,)).astype(np.float32), (None,)),
        "scale": (np.float32(3), ()),
    }
    params = {
        path: jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index, v=value: v[index]
        )
        for path, (value, spec) in expected.items()
    }
    local_mesh = make_mesh(jax.local_devices(), tensor=-1)
    places = {path: NamedSharding(local_mesh, PartitionSpec()) for path in params}
    places["stack"] = NamedSharding(local_mesh, PartitionSpec(None, None, "tensor"))
    report["pieces"] = {path: cut_pieces(value, 100) for path, value in params.items()}
    with jax.set_mesh(mesh):  # as the loop has it
        for limit in (100, 2**20):
            copies = gather_params(params, places, limit)
            assert list(copies) == ([] if process else list(params))
            for path, copy in copies.items():
                assert copy.sharding == places[path]
                np.testing.assert_array_equal(np.asarray(copy), expected[path][0])
        total = jax.jit(jnp.sum)(params["stack"])  # the devices of all still agree
    report["total"] = float(total) - float(expected["stack"][0].sum())
    print(json.dumps(report), flush=True)
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
