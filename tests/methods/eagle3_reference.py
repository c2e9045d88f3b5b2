"""Eagle3 by its formulas, on one sequence: dense masks, explicit diagonal terms, no packing.

Row t reads the target's state of token t and, in step i, the embedding of token t + 1 + i, and
guesses token t + 2 + i, as the paper counts. Weights have the names of the export.
"""

import jax
import jax.numpy as jnp
import numpy as np


def norm(x, scale, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotate(x_SNH, positions_S, theta):
    half = x_SNH.shape[-1] // 2
    turn = positions_S[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = jnp.cos(turn)[:, None], jnp.sin(turn)[:, None]
    a, b = x_SNH[..., :half], x_SNH[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def shift(x, by):
    """x[t + by], zeros behind the end."""
    return jnp.concatenate([x[by:], jnp.zeros_like(x[:by])])


def unroll(w, tokens_S, captured_SF, embed_VD, *, heads, kv_heads, theta, eps, length):
    """Normed states [length, S, D]."""
    S, groups = len(tokens_S), heads // kv_heads
    h = captured_SF @ w["fc.weight"].T
    lay = lambda x, count: x.reshape(S, count, -1)  # noqa: E731
    keys, values, out = [], [], []
    for i in range(length):
        x = jnp.concatenate(
            [
                norm(embed_VD[shift(tokens_S, 1 + i)], w["midlayer.input_layernorm.weight"], eps),
                norm(h, w["midlayer.hidden_norm.weight"], eps),
            ],
            -1,
        )
        q, k, v = (
            lay(x @ w[f"midlayer.self_attn.{name}_proj.weight"].T, count)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = (rotate(y, jnp.arange(S) + i, theta) for y in (q, k))
        keys.append(jnp.repeat(k, groups, axis=1))
        values.append(jnp.repeat(v, groups, axis=1))
        scale = q.shape[-1] ** -0.5
        first = jnp.einsum("tnh,snh->nts", q, keys[0]) * scale
        first = jnp.where(jnp.tril(jnp.ones((S, S), bool)), first, -jnp.inf)
        local_value = [
            jnp.einsum("tnh,tnh->nt", q, keys[m])[..., None] * scale for m in range(1, i + 1)
        ]
        p = jax.nn.softmax(jnp.concatenate([first, *local_value], -1), -1)
        mixed = jnp.einsum("nts,snh->tnh", p[..., :S], values[0])
        for m in range(1, i + 1):
            mixed += p[..., S + m - 1].T[..., None] * values[m]
        h = h + mixed.reshape(S, -1) @ w["midlayer.self_attn.o_proj.weight"].T
        y = norm(h, w["midlayer.post_attention_layernorm.weight"], eps)
        gate = y @ w["midlayer.mlp.gate_proj.weight"].T
        y = jax.nn.silu(gate) * (y @ w["midlayer.mlp.up_proj.weight"].T)
        h = h + y @ w["midlayer.mlp.down_proj.weight"].T
        out.append(norm(h, w["norm.weight"], eps))
    return jnp.stack(out)


def guesses(w, normed_LSD, last_SE, head_VE, kept_P, kind="soft", kl_scale=1.0, kl_decay=3.0):
    """(loss, hit, kept), each [L, S]: row t of step i, by the target's row t + 1 + i."""
    losses, hits, sayable = [], [], []
    for i, normed_SD in enumerate(normed_LSD):
        z = shift(last_SE, 1 + i) @ head_VE.T
        best = z.argmax(-1)
        u = normed_SD @ w["lm_head.weight"].T
        p, lq = jax.nn.softmax(z[:, kept_P], -1), jax.nn.log_softmax(u, -1)
        ce = -(p * lq).sum(-1)
        a = jnp.minimum(p, jnp.exp(lq)).sum(-1)
        if kind == "soft":
            loss = ce
        elif kind == "alpha":
            loss = -jnp.log(a)
        else:
            k = jax.lax.stop_gradient(kl_scale * jnp.exp(-kl_decay * a))
            loss = k * (ce + (p * jnp.log(p)).sum(-1)) + (1 - k) * (1 - a)
        losses.append(loss)
        hits.append(kept_P[u.argmax(-1)] == best)
        sayable.append(jnp.isin(best, kept_P))
    return jnp.stack(losses), jnp.stack(hits), jnp.stack(sayable)
