"""The definition of weighted_logp: log-probabilities from all logits, plain autodiff."""

from jaxtrain_kernels.logp_gather import reference


def weighted_logp(
    hidden, head, targets, weights, *, temperature=None, softcap=None, freeze_head=False, axis=None
):
    """Implement `jaxtrain_kernels.weighted_logp`."""
    if axis is not None:
        raise NotImplementedError("takes a whole vocabulary")
    scores = reference.logp_gather(
        hidden, head, targets, temperature=temperature, softcap=softcap, freeze_head=freeze_head
    )
    return (weights * scores.logp).sum(), scores
