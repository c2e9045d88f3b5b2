"""conv_heads in plain XLA: the definition, whose backward makes the unit vectors again."""

import functools

import jax

from jaxtrain_kernels.conv_heads import reference

# Without the checkpoint the backward pass would keep the float32 unit vectors.
to_unit = jax.checkpoint(reference.to_unit, prevent_cse=False, static_argnums=(1, 2))
conv_heads = functools.partial(reference.conv_heads, to_unit=to_unit)
