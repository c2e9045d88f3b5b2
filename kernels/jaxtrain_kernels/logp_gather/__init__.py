"""Log-probability of one target per hidden state, without logits in memory."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.dispatch import dispatch
from jaxtrain_kernels.logp_gather import mosaic_gpu, reference, triton_gpu, xla
from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.logp_gather.slices import Axis, join, local_targets
from jaxtrain_kernels.precision import accumulator

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.logp_gather,
    "triton": triton_gpu.logp_gather,
    "xla": xla.logp_gather,
    "reference": reference.logp_gather,
}


def logp_gather(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: jax.Array | float | None = None,
    softcap: float | None = None,
    freeze_head: bool = False,
    axis: Axis = None,
    impl: str = "auto",
) -> LogProbs:
    """log softmax(logits)[targets], the entropy and the log-sum-exp of every row; float32 [T].

    hidden [T, D]; head [V, D]; targets int32 [T] in [0, V). logits = hidden @ head.T in hidden's
    dtype (the head is cast to it), then softcap * tanh(logits / softcap), then / temperature (a
    scalar or [T]; a constant: no gradient flows to it). All three results carry gradients to
    `hidden` and, unless `freeze_head`, to `head`; a frozen head's gradient is 0 and costs nothing.
    Float64 hidden states give float64 results. Inside shard_map with `axis`, `head` is this
    device's slice of a vocabulary that is split over those mesh axes, in order; `targets` count in
    the whole.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    """
    T, D = hidden.shape
    V = head.shape[0]
    if head.shape != (V, D) or targets.shape != (T,):
        raise ValueError(
            f"logp_gather: hidden {hidden.shape}, head {head.shape}, targets {targets.shape}; "
            "want [T, D], [V, D], [T]"
        )
    if temperature is not None:
        temperature = jnp.asarray(temperature, accumulator(hidden.dtype))
        if temperature.shape not in ((), (T,)):
            raise ValueError(
                f"logp_gather: temperature has shape {temperature.shape}; want a scalar or ({T},)"
            )
        temperature = jax.lax.stop_gradient(jnp.broadcast_to(temperature, (T,)))
    if freeze_head:
        head = jax.lax.stop_gradient(head)
    local, is_local = local_targets(targets.astype(jnp.int32), V, axis)
    result = dispatch(
        "logp_gather",
        impl,
        BACKENDS,
        hidden,
        head,
        local if axis is None else jnp.where(is_local, local, 0),
        temperature=temperature,
        softcap=softcap,
        freeze_head=freeze_head,
    )
    return result if axis is None else join(result, is_local, axis)
