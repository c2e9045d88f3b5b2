"""Compile the gradient of a scanned model for an H200 that is not there.

Run by test_models_stack.py in a process of its own: `python scan_program.py` prints a line of JSON
for each remat policy, {remat, matmuls}, and one for experts, {gathers, products}: how many the
loops over layers run.
"""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import RAW, documents, pack

from jaxtrain.models import build, families

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 64,
}
EXPERTS = SIZES | {"moe_intermediate_size": 128}


def compile_gradient(raw: dict, remat: str, sharding: NamedSharding) -> str:
    """The program's text."""
    config = families.config_from_hf(raw)
    model = build.abstract(config, dtype="bfloat16", remat=remat)
    graphdef, state = nnx.split(model)
    batch = pack([documents(0, 1000)], 1024)

    def loss(state, batch):
        return nnx.merge(graphdef, state).hidden(batch).hidden.astype(jnp.float32).sum()

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (state, batch)
    )
    return jax.jit(jax.grad(loss)).trace(*shapes).lower().compile().as_text()


def count_calls(text: str, kind: str) -> int:
    """Custom calls of a kind in the bodies of loops, by themselves or fused with the slices
    around."""
    computations = dict(re.findall(r"\n%?([\w.-]+) \([^\n]*\{\n(.*?)\n\}", text, re.DOTALL))
    called = {
        name: sum(kind in line for line in body.splitlines() if " custom-call(" in line)
        for name, body in computations.items()
    }
    total = 0
    for name in re.findall(r" while\([^\n]*body=%?([\w.-]+)", text):
        fused = re.findall(r" fusion\([^\n]*calls=%?([\w.-]+)", computations[name])
        total += called[name] + sum(called[second] for second in fused)
    return total


def main():
    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
    from sm90a import make_mesh

    mesh = make_mesh()
    named_sharding = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for remat in ("none", "elementwise", "dots"):
            matmuls = count_calls(
                compile_gradient(RAW["qwen3"] | SIZES, remat, named_sharding), "__cublas"
            )
            print(json.dumps({"remat": remat, "matmuls": matmuls}), flush=True)
        text = compile_gradient(RAW["qwen3_moe"] | EXPERTS, "none", named_sharding)
        kinds = {"gathers": "grouped_gather/", "products": "grouped_gated_product/"}
        actual = {name: count_calls(text, kind) for name, kind in kinds.items()}
        print(json.dumps(actual), flush=True)


if __name__ == "__main__":
    main()
