"""rotate_heads in plain XLA: the definition, of whose norms the backward keeps what they read."""

import functools

import jax

from jaxtrain_kernels.rotate_heads import reference

# Rematerialized on its own: the backward keeps x, which is there anyway, and none of the float32
# values in between, which take longer to store and load than to compute.
normalize = jax.checkpoint(reference.normalize, prevent_cse=False, static_argnums=2)
rotate_heads = functools.partial(reference.rotate_heads, normalize=normalize)
