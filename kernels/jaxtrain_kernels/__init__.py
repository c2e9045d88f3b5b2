"""The public ops of jaxtrain, each with a plain reference and faster backends behind `impl`."""

from jaxtrain_kernels.logp_gather import LogProbs, logp_gather
from jaxtrain_kernels.tree_attention import attention

__all__ = ["LogProbs", "attention", "logp_gather"]
