"""DFlash from its formulas, in plain jnp on the tensors of a draft folder ([out, in], by their
names there), with a dense mask that is filled in pair by pair: a block sees the states of its
anchor's ancestors, found by walking `prev`, and itself.
"""

import jax
import jax.numpy as jnp
import numpy as np


def rms(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def turned(x_TNH, positions, theta):
    """Rotate-half at absolute positions."""
    half = x_TNH.shape[-1] // 2
    turn = np.asarray(positions)[:, None] * theta ** (-np.arange(half) * 2.0 / (2 * half))
    cos, sin = (np.concatenate([f(turn)] * 2, -1)[:, None] for f in (np.cos, np.sin))
    return x_TNH * cos + jnp.concatenate([-x_TNH[..., half:], x_TNH[..., :half]], -1) * sin


def row_blocks(batch, row, block_size):
    """[(anchor, the row indices of its ancestors, those of the block, -1 beyond the end)]."""
    anchors = np.flatnonzero(batch.streams["anchor"][row])
    after, prev, actual = batch.streams["next"][row], batch.prev[row], []
    for anchor in anchors:
        block = [int(anchor)]
        while len(block) < block_size:
            block.append(int(after[block[-1]]) if block[-1] >= 0 else -1)
        before, index = [], int(prev[anchor])
        while index >= 0:
            before.append(index)
            index = int(prev[index])
        actual.append((int(anchor), before, block))
    return actual


def dense_mask(blocks, positions, length, size, window):
    """bool [Q, T + Q] of a row: the places of all blocks against the row's states and places."""
    count = len(blocks)
    mask = np.zeros((count * size, length + count * size), bool)
    for number, (anchor, before, _) in enumerate(blocks):
        for position in range(size):
            local_result = positions[anchor] + position
            for index in before:
                near = window is None or local_result - positions[index] < window
                mask[number * size + position, index] = near
            for second in range(size):
                near = window is None or 0 <= position - second < window
                mask[number * size + position, length + number * size + second] = near
    return mask


def row_hidden(tensors, config, embed, tokens, positions, states_TF, blocks):
    """[blocks * K, D]: what the head reads of a row's blocks."""
    K, T, eps = config.block_size, len(tokens), config.rms_norm_eps
    heads, kv, H = config.num_attention_heads, config.num_key_value_heads, config.head_size
    theta = dict(config.rope)["rope_theta"]
    context = rms(states_TF @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    ids = [[tokens[anchor]] + [config.mask_token_id] * (K - 1) for anchor, _, _ in blocks]
    x = embed[np.array(ids).reshape(-1)]
    places = np.concatenate([positions[anchor] + np.arange(K) for anchor, _, _ in blocks])
    everywhere = np.concatenate([positions, places])
    for layer, spec in enumerate(config.layers()):

        def weight(name, layer=layer):
            return tensors[f"layers.{layer}.{name}.weight"]

        def linear(name, x, layer=layer):
            bias = tensors.get(f"layers.{layer}.{name}.bias", 0.0)
            return x @ tensors[f"layers.{layer}.{name}.weight"].T + bias

        h = rms(x, weight("input_layernorm"), eps)
        array = jnp.concatenate([context, h])
        q = rms(
            linear("self_attn.q_proj", h).reshape(-1, heads, H), weight("self_attn.q_norm"), eps
        )
        k = linear("self_attn.k_proj", array).reshape(-1, kv, H)
        k = rms(k, weight("self_attn.k_norm"), eps)
        v = linear("self_attn.v_proj", array).reshape(-1, kv, H)
        q, k = turned(q, places, theta), turned(k, everywhere, theta)
        k, v = (jnp.repeat(y, heads // kv, axis=1) for y in (k, v))
        mask = dense_mask(blocks, positions, T, K, spec.window)
        score = jnp.where(mask, jnp.einsum("qnh,snh->nqs", q, k) / np.sqrt(H), -jnp.inf)
        out = jnp.einsum("nqs,snh->qnh", jax.nn.softmax(score), v).reshape(len(x), -1)
        x = x + linear("self_attn.o_proj", out)
        h = rms(x, weight("post_attention_layernorm"), eps)
        gate, up = linear("mlp.gate_proj", h), linear("mlp.up_proj", h)
        x = x + linear("mlp.down_proj", gate / (1 + jnp.exp(-gate)) * up)
    return rms(x, tensors["norm.weight"], eps)
