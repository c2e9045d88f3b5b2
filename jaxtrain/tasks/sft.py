"""Supervised fine-tuning and pre-training: the weights of the batch say which tokens train."""

from functools import partial

from jaxtrain.losses.nll import nll_loss


def sft_loss(logp_impl: str):
    """Token-mean negative log-likelihood with the given backend of the log-prob op."""
    return partial(nll_loss, impl=logp_impl)
