"""Log-probability of one target per row of given logits, with entropy and log-sum-exp."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import dispatch
from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.logp_of_logits import mosaic_gpu, reference, triton_gpu, xla
from jaxtrain_kernels.precision import accumulator

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.logp_of_logits,
    "triton": triton_gpu.logp_of_logits,
    "xla": xla.logp_of_logits,
    "reference": reference.logp_of_logits,
}


def logp_of_logits(
    logits: jax.Array,
    targets: jax.Array,
    *,
    temperature: jax.Array | float | None = None,
    impl: str = "auto",
) -> LogProbs:
    """log softmax(logits / temperature)[targets], the entropy and the log-sum-exp of every row.

    logits [T, V] of any float dtype, -inf allowed; targets int32 [T] in [0, V); temperature a
    positive scalar or [T] (a constant: no gradient flows to it). Results float32 [T] (float64 of
    float64 logits); all three carry gradients to `logits`, in their dtype.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    """
    T = logits.shape[0]
    if logits.ndim != 2 or targets.shape != (T,):
        raise ValueError(
            f"logp_of_logits: logits {logits.shape}, targets {targets.shape}; want [T, V], [T]"
        )
    if temperature is not None:
        temperature = jnp.asarray(temperature, accumulator(logits.dtype))
        if temperature.shape not in ((), (T,)):
            raise ValueError(
                f"logp_of_logits: temperature has shape {temperature.shape}; want a scalar or "
                f"({T},)"
            )
        temperature = jax.lax.stop_gradient(jnp.broadcast_to(temperature, (T,)))
    return dispatch(
        "logp_of_logits",
        impl,
        BACKENDS,
        logits,
        targets.astype(jnp.int32),
        temperature=temperature,
    )
