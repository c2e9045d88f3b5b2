"""ParallelMLP: a dense MLP and experts in parallel, each between its own norms (Gemma 4).

out_norm(dense(norm x)) + experts_out_norm(experts(experts_norm x; chosen by x))
"""

import jax
from flax import nnx
from jaxtrain_kernels import Context

from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.moe import MoE
from jaxtrain.layers.norm import RMSNorm


class ParallelMLP(nnx.Module):
    """[B, T, D] -> [B, T, D]; the router reads what the norms read."""

    def __init__(
        self,
        dense: GatedMLP,
        experts: MoE,
        *,
        norm: RMSNorm,
        out_norm: RMSNorm,
        experts_norm: RMSNorm,
        experts_out_norm: RMSNorm,
    ):
        self.dense, self.norm, self.out_norm = dense, norm, out_norm
        self.experts = experts
        self.experts_norm, self.experts_out_norm = experts_norm, experts_out_norm

    def __call__(
        self, x_BTD: jax.Array, context: Context, replayed_BTK: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (result, the experts' notes); see `MoE`."""
        dense_BTD = self.out_norm(self.dense(self.norm(x_BTD)))
        y_BTD, noted = self.experts(
            self.experts_norm(x_BTD), context, replayed_BTK, routed_BTD=x_BTD
        )
        return dense_BTD + self.experts_out_norm(y_BTD), noted
