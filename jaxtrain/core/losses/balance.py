"""Router balance of a mixture of experts: load metrics, and losses on the load.

The load-balancing loss of the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6) as
transformers computes it (`router_aux_loss_coef`): E * sum_e f_e * P_e, where f_e is the share of
tokens that went to expert e and P_e the mean of the router's probability of it, both over all
layers. It is a product of means, so it depends on what the means are taken over: one packed row,
padding left out and rows counted by their tokens, so that accumulation and devices do not change
it; or all rows of a microstep on all devices (Qiu et al. 2025, arXiv:2501.11873), which leaves
experts room to specialize on some rows.

DeepSeek's sequence-wise loss is the same within each document and layer, over k. The z-loss is the
mean square of the logits' logsumexp (Zoph et al. 2022, arXiv:2202.08906). `move_biases` balances
without a loss (Wang et al. 2024, arXiv:2408.15664).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxtrain.batch import Batch

LOADS = "expert_loads"
"""Entry among a balanced loss's metrics: tokens [layers, E] that went to each expert. It is for
`move_biases` and never logged."""


class Balance(NamedTuple):
    """Factors of the losses on a router's load."""

    aux: float = 0.0
    scope: Literal["row", "batch"] = "row"
    """Tokens over which the means of `aux` are taken."""
    sequence: float = 0.0
    z: float = 0.0

    @property
    def coef(self) -> dict[str, float]:
        """Factors of the components that have a positive one."""
        named = {"balance": self.aux, "sequence_balance": self.sequence, "router_z": self.z}
        return {name: value for name, value in named.items() if value > 0}


class OutputCollector:
    """Wraps a model and collects its outputs whenever a loss asks for hidden states."""

    def __init__(self, model: Any):
        self.model = model
        self.outputs: list[Any] = []

    def hidden(self, *args, **options):
        """Call the model's `hidden` and collect the StackOutput."""
        output = self.model.hidden(*args, **options)
        self.outputs.append(output)
        return output

    def __getattr__(self, name: str):
        return getattr(self.model, name)


def with_balance(loss: Callable, balance: Balance, loads: bool = False) -> Callable:
    """Wrap `loss` (model, batch, ...) -> (sums, metrics): add the router's metrics, and a sum for
    each component of `balance.coef`, which is divided by the step's tokens that are not padding.

    loads: also LOADS among the metrics. A loss that runs the model several times counts every run.
    Nothing changes for a dense model.
    """

    def balanced(model, batch: Batch, *rest):
        if model.experts_per_token is None:
            return loss(model, batch, *rest)
        watched = OutputCollector(model)
        sums, metrics = loss(watched, batch, *rest)
        top, _ = model.experts_per_token
        for noted in (output.notes for output in watched.outputs):
            router_sums, router_metrics = measure_balance(noted, top, balance.scope)
            metrics = {**router_metrics, **metrics}
            sums = {**sums, **{n: sums.get(n, 0.0) + router_sums[n] for n in balance.coef}}
            if loads:
                load_LE = noted["expert_load"].sum(1)
                before = metrics[LOADS][0] if LOADS in metrics else 0.0
                metrics[LOADS] = (before + load_LE, jnp.ones((), load_LE.dtype))
        return sums, metrics

    return balanced


def measure_balance(noted: dict[str, Any], top: int, scope: str = "row"):
    """Return ({loss: sum over tokens}, metrics as (sum, weight)).

    noted: `layers.router_notes.note_choice` of L layers. Losses and metrics: "balance" is the
    auxiliary loss, `top` at perfect balance; "sequence_balance" that within documents, 1 at
    perfect balance; "router_z" the mean square of the logits' logsumexp. Metrics alone:
    "expert_load_max", the busiest expert's tokens over the mean expert's, averaged over layers;
    "expert_unused" the share of experts that no token of the microstep went to; "router_entropy"
    in nats; "router_replay/same_experts", where experts were given, the share of them that the
    routers would have chosen; "expert_rounds", where experts are cut over devices, how often these
    had to fill their buffers in a layer, the slowest of each group.
    """
    load_LBE, probs_LBE = noted["expert_load"], noted["expert_probs"]
    if scope == "batch":
        load_LBE, probs_LBE = (x.sum(1, keepdims=True) for x in (load_LBE, probs_LBE))
    L, _, E = load_LBE.shape
    tokens_B = load_LBE[0].sum(-1) / top
    safe_B = jnp.maximum(tokens_B, 1.0)
    share_BE = load_LBE.sum(0) / (L * safe_B[:, None])
    prob_BE = probs_LBE.sum(0) / (L * safe_B[:, None])
    losses = {
        "balance": jnp.sum(tokens_B * E * (share_BE * prob_BE).sum(-1)),
        "sequence_balance": noted["sequence_balance"].sum() / L,
        "router_z": noted["router_z"].sum() / L,
    }
    tokens = jnp.sum(tokens_B)
    replay, rounds = {}, {}
    if "expert_rounds" in noted:
        rounds["expert_rounds"] = (noted["expert_rounds"].mean() * tokens, tokens)
    if "given" in noted:
        replay["router_replay/same_experts"] = (noted["given_same"].sum(), noted["given"].sum())
    total_LE = load_LBE.sum(1)
    busiest = (total_LE.max(-1) * E / jnp.maximum(total_LE.sum(-1), 1.0)).mean()
    unused = (total_LE == 0).mean(dtype=total_LE.dtype)
    return losses, {
        **{name: (value, tokens) for name, value in losses.items()},
        "expert_load_max": (busiest * tokens, tokens),
        "expert_unused": (unused * tokens, tokens),
        "router_entropy": (noted["router_entropy"].sum() / L, tokens),
        **replay,
        **rounds,
    }


def move_biases(
    params: Mapping[str, Any], loads_LE: Any, places: Mapping[str, Sequence[int]], rate: float
) -> dict[str, Any]:
    """Return `params` with every correction bias moved by `rate` towards an even load: up for
    experts with fewer tokens than the mean, down for those with more.

    loads_LE: tokens of the whole step. places: {path of biases [n, E]: their layers in loads_LE}.
    """
    moved = dict(params)
    for path, layers in places.items():
        load_nE = loads_LE[jnp.array(layers, jnp.int32)]
        step_nE = rate * jnp.sign(load_nE.mean(-1, keepdims=True) - load_nE)
        moved[path] = params[path] + step_nE.astype(params[path].dtype)
    return moved


def count_real(batch: Batch):
    """Tokens that are not padding, as the blocks count them: a token alone at position 0 is."""
    index = np.arange(batch.tokens.shape[-1], dtype=np.int32)
    return ((batch.positions > 0) | (batch.until != index + 1)).sum()
