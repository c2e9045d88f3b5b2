"""What a mixture of experts adds to any loss: how its router's load is spread, and a loss on it.

The load-balancing loss of the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6) as
transformers computes it (`router_aux_loss_coef`): E * sum_e f_e * P_e, where f_e is the share of a
row's tokens that went to expert e and P_e the mean of the router's probability of it, both over all
layers. It is a product of means, so it depends on what the means are taken over. Here that is one
packed row, padding left out, and rows count by their tokens: so accumulation and devices do not
change it, and a batch of one row gives transformers' number.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxtrain.batch import Batch

COMPONENT = "balance"


class Watched:
    """A model that keeps what its blocks note whenever a loss asks for hidden states."""

    def __init__(self, model: Any):
        self.model = model
        self.noted: list[dict[str, Any]] = []

    def hidden(self, *args, **options):
        """As the model's own."""
        found = self.model.hidden(*args, **options)
        self.noted.append(found.notes)
        return found

    def __getattr__(self, name: str):
        return getattr(self.model, name)


def with_balance(loss: Callable, train: bool) -> Callable:
    """`loss` (model, batch, ...) -> (sums, metrics), with the router's metrics among the metrics.

    train: also the sum "balance", to be divided by the step's tokens that are not padding. A loss
    that runs the model several times counts every run. Nothing changes for a dense model.
    """

    def balanced(model, batch: Batch, *rest):
        if model.experts_per_token is None:
            return loss(model, batch, *rest)
        watched = Watched(model)
        sums, metrics = loss(watched, batch, *rest)
        top, _ = model.experts_per_token
        for noted in watched.noted:
            aux, found = measure_balance(noted, top)
            metrics = {**found, **metrics}
            if train:
                sums = {**sums, COMPONENT: sums.get(COMPONENT, 0.0) + aux}
        return sums, metrics

    return balanced


def measure_balance(noted: dict[str, Any], top: int):
    """(the loss summed over rows, each times its tokens; metrics as (sum, weight)).

    noted: `layers.moe.note_balance` of L layers. Metrics: "balance" is the loss, `top` at perfect
    balance; "expert_load_max" the busiest expert's tokens over the mean expert's, averaged over
    layers; "expert_unused" the share of experts that no token of the microstep went to;
    "router_entropy" in nats.
    """
    load_LBE, probs_LBE = noted["expert_load"], noted["expert_probs"]
    L, _, E = load_LBE.shape
    tokens_B = load_LBE[0].sum(-1) / top
    safe_B = jnp.maximum(tokens_B, 1.0)
    share_BE = load_LBE.sum(0) / (L * safe_B[:, None])
    prob_BE = probs_LBE.sum(0) / (L * safe_B[:, None])
    aux = jnp.sum(tokens_B * E * (share_BE * prob_BE).sum(-1))
    tokens = jnp.sum(tokens_B)
    total_LE = load_LBE.sum(1)
    busiest = (total_LE.max(-1) * E / jnp.maximum(total_LE.sum(-1), 1.0)).mean()
    unused = (total_LE == 0).mean(dtype=total_LE.dtype)
    return aux, {
        COMPONENT: (aux, tokens),
        "expert_load_max": (busiest * tokens, tokens),
        "expert_unused": (unused * tokens, tokens),
        "router_entropy": (noted["router_entropy"].sum() / L, tokens),
    }


def count_real(batch: Batch):
    """Tokens that are not padding, as the blocks count them: a token alone at position 0 is."""
    index = jnp.arange(batch.tokens.shape[-1])
    return jnp.sum((batch.positions > 0) | (batch.until != index + 1))
