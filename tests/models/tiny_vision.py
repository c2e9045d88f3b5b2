"""Tiny vision-language configs, and packed rows with images for them, shared by tests."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from tiny_models import RAW, SIZES

from jaxtrain.batch import IMAGE_SLOT, Batch, Images

IMAGE = 5
"""Token of an image."""
TEXT = {**SIZES, "model_type": "llama", "rope_theta": 1e4, "rms_norm_eps": 1e-3}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 33,
    "patch_size": 5,
    "initializer_range": 0.1,
    "layer_norm_eps": 1e-4,
}
TURNS = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
QWEN_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "depth": 4,
    "num_heads": 3,
    "patch_size": 5,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
    "initializer_range": 0.1,
}
VISION = {
    "smolvlm": {
        "model_type": "smolvlm",
        "text_config": TEXT,
        "vision_config": {**TOWER, "model_type": "smolvlm_vision"},
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    },
    "idefics3": {
        "model_type": "idefics3",
        "text_config": {**TEXT, "attention_bias": True, "tie_word_embeddings": True},
        "vision_config": {
            **TOWER,
            "image_size": 38,
            "patch_size": 6,
            "hidden_act": "gelu",
            "model_type": "idefics3_vision",
        },
        "image_token_id": IMAGE,
        "scale_factor": 3,
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": TURNS,
        },
        "vision_config": {
            **QWEN_TOWER,
            "model_type": "qwen3_vl_vision",
            "deepstack_visual_indexes": [1, 3],
        },
        "image_token_id": IMAGE,
        "tie_word_embeddings": True,
    },
}
VISION["qwen3_vl_moe"] = {
    **VISION["qwen3_vl"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **VISION["qwen3_vl"]["text_config"],
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "vision_config": {
        **VISION["qwen3_vl"]["vision_config"],
        "model_type": "qwen3_vl_moe_vision",
    },
}
VISION["gemma3"] = {
    "model_type": "gemma3",
    "text_config": {
        **SIZES,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "vision_config": {
        **TOWER,
        "model_type": "siglip_vision_model",
        "image_size": 33,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": IMAGE,
    "tie_word_embeddings": True,
}
SLIDING, FULL = "sliding_attention", "full_attention"
AXIAL_TOWER = {
    "model_type": "gemma4_vision",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 5,
    "pooling_kernel_size": 3,
    "position_embedding_size": 15,
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.1,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    **{"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL]},
    **{"head_dim": 4, "global_head_dim": 8, "sliding_window": 7, "rms_norm_eps": 1e-2},
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
    },
}
VISION["gemma4"] = {
    "model_type": "gemma4",
    "text_config": {**SIZES, **GEMMA4, "use_bidirectional_attention": "vision"},
    "vision_config": {**AXIAL_TOWER, "standardize": True},
    "image_token_id": IMAGE,
    "tie_word_embeddings": True,
}
VISION["gemma4_per_layer"] = {
    **VISION["gemma4"],
    "text_config": {
        **SIZES,
        **GEMMA4,
        **{"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
        **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "pad_token_id": 3},
        **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97},
    },
    "vision_config": {**AXIAL_TOWER, "num_hidden_layers": 2, "use_clipped_linears": True},
}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
for name in ("qwen3_5", "qwen3_5_moe"):
    turns = {**TURNS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    VISION[name] = {
        "model_type": name,
        "text_config": {**RAW[name], **LAYERS, "rope_parameters": turns},
        "vision_config": {**QWEN_TOWER, "model_type": f"{name}_vision"},
        "image_token_id": IMAGE,
        "tie_word_embeddings": RAW[name].get("tie_word_embeddings", False),
    }
for name in ("qwen2_vl", "qwen2_5_vl"):
    tower = {key: value for key, value in QWEN_TOWER.items() if key != "num_position_embeddings"}
    if name == "qwen2_vl":
        del tower["intermediate_size"], tower["out_hidden_size"]
        tower |= {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2}
    else:  # windows of 2 x 2 features, smaller ones at the edges
        tower |= {"window_size": 23, "fullatt_block_indexes": [1]}
    VISION[name] = {
        "model_type": name,
        "text_config": {
            **{key: value for key, value in TEXT.items() if key != "rope_theta"},
            "model_type": f"{name}_text",
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}
            },
        },
        "vision_config": {**tower, "model_type": f"{name}_vision"},
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    }
"""The side of a tile is 6 patches, with some pixels to spare."""
SQUARES = ((6, 6), (6, 6), (6, 6), (6, 6), (4, 4))
SHAPES = {
    "gemma3": ((6, 6),) * 5,
    "smolvlm": SQUARES,
    "idefics3": (*SQUARES[:4], (3, 3)),
    **dict.fromkeys(
        ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ((4, 8), (6, 4), (6, 4), (2, 16), (4, 2)),
    ),
}
SHAPES["gemma4"] = SHAPES["gemma4_per_layer"] = ((6, 6), (3, 12), (6, 6), (3, 6), (3, 3))
SHAPES["qwen2_5_vl"] = ((6, 6), (2, 18), (6, 6), (2, 16), (4, 2))
"""Rows and columns of patches of the images of `make_batch`."""
VALUES = ((np.arange(256) / 255).astype(np.float32)[:, None] - np.float32(0.5)) / np.float32(
    [0.5, 0.4, 0.3]
)
"""Pixel values after rescaling and normalization; channels differ, so that none can be swapped."""


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A branch of a packed row, for a reference that reads it alone."""

    row: int
    places: np.ndarray
    seen: int
    """Tokens that an earlier sequence has, too."""
    images: tuple[int, ...]
    """Numbers of its images."""


def draw_images(shapes, patch: int) -> list[np.ndarray]:
    """Return images uint8 [H, W, 3]; shapes: (rows, columns) of patches."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, (h * patch, w * patch, 3), np.uint8) for h, w in shapes]


def merge_of(raw) -> int:
    """Patches along a side of the block of a feature."""
    if tokens := raw.get("mm_tokens_per_image"):
        vision = raw["vision_config"]
        return int(vision["image_size"] // vision["patch_size"] / tokens**0.5)
    vision = raw["vision_config"]
    fallback = vision.get("pooling_kernel_size") or vision.get("spatial_merge_size", 2)
    return raw.get("scale_factor") or fallback


def pack_images(rows, patch: int, merge: int, length: int) -> Images:
    """Patches of rows of images, block by block, in rows of `length` patches."""
    count, index = len(rows), np.arange(length, dtype=np.int32)
    pixels = np.zeros((count, length, 3 * patch * patch), np.uint8)
    since = np.tile(index, (count, 1))
    until = since + 1
    row_col = np.zeros((count, length, 2), np.int32)
    grid = np.ones((count, length, 2), np.int32)
    for row, images in enumerate(rows):
        start = 0
        for image in images:
            high, wide = image.shape[0] // patch, image.shape[1] // patch
            stop, slot = start + high * wide, start
            for top in range(0, high, merge):
                for left in range(0, wide, merge):
                    for r in range(top, top + merge):
                        for c in range(left, left + merge):
                            part = image[r * patch :, c * patch :][:patch, :patch]
                            pixels[row, slot] = part.transpose(2, 0, 1).reshape(-1)
                            row_col[row, slot] = r, c
                            slot += 1
            since[row, start:stop], until[row, start:stop] = start, stop
            grid[row, start:stop] = high, wide
            start = stop
    values = np.tile(VALUES, (count, 1, 1))
    return Images(*map(jnp.asarray, (pixels, since, until, row_col, grid, values)))


def make_batch(raw) -> tuple[Batch, list[Sequence], list[np.ndarray]]:
    """[2, 48], its branches, its images. One row is a document with two images. The other is a
    prefix with an image, a branch with one and a branch without, and a document with a smaller one.
    """
    merge, patch = merge_of(raw), raw["vision_config"]["patch_size"]
    shapes = SHAPES[raw["model_type"]]
    images, T = draw_images(shapes, patch), 48
    counts = [h * w // merge**2 for h, w in shapes]
    tokens = np.random.default_rng(1).integers(6, 97, (2, T)).astype(np.int32)
    slots = np.full((2, T), -1, np.int32)
    for number, (row, start) in enumerate([(0, 3), (0, 20), (1, 2), (1, 19), (1, 41)]):
        stop, first = start + counts[number], sum(counts[2 if row else 0 : number])
        tokens[row, start:stop] = IMAGE
        slots[row, start:stop] = np.arange(first, first + counts[number])
    positions = np.tile(np.arange(T, dtype=np.int32), (2, 1))
    prev = positions - 1
    until = np.full((2, T), T, np.int32)
    until[1, :16], until[1, 16:30], until[1, 30:40] = 40, 30, 40
    prev[1, 30], prev[1, 40] = 15, -1
    positions[1, 30:40], positions[1, 40:] = np.arange(16, 26), np.arange(8)
    prefix = np.arange(16)
    sequences = [
        Sequence(0, np.arange(T), 0, (0, 1)),
        Sequence(1, np.arange(30), 0, (2, 3)),
        Sequence(1, np.concatenate([prefix, np.arange(30, 40)]), 16, (2,)),
        Sequence(1, np.arange(40, T), 0, (4,)),
    ]
    weights = {"nll": jnp.asarray((prev >= 0).astype(np.float32))}
    batch = Batch(
        *map(jnp.asarray, (tokens, positions, prev, until)),
        weights=weights,
        streams={IMAGE_SLOT: jnp.asarray(slots)},
        images=pack_images([images[:2], images[2:]], patch, merge, 108),
    )
    return batch, sequences, images


def processed(raw, tokens, images) -> dict[str, np.ndarray]:
    """Return arguments of the model of transformers for tokens [n] with images, as its processor
    makes them."""
    return {"input_ids": np.array(tokens, np.int64)[None], **_process(raw, tokens, images)}


def _process(raw, tokens, images) -> dict[str, np.ndarray]:
    pixels = [VALUES[image, np.arange(3)].transpose(2, 0, 1) for image in images]
    if "mm_tokens_per_image" in raw:
        types = (np.array(tokens) == IMAGE).astype(np.int64)[None]
        return {"pixel_values": np.stack(pixels), "token_type_ids": types}
    if raw["model_type"] == "gemma4":
        return _process_axial(raw, tokens, pixels)
    if "spatial_merge_size" not in raw["vision_config"]:
        return {"pixel_values": np.stack(pixels)[None]}
    patch, merge, rows, grids = raw["vision_config"]["patch_size"], merge_of(raw), [], []
    for image in pixels:
        high, wide = (size // patch for size in image.shape[1:])
        grids.append([1, high, wide])
        blocks = np.stack([image, image], 1).reshape(
            *(3, 2, high // merge, merge, patch, wide // merge, merge, patch)
        )
        blocks = blocks.transpose(2, 5, 3, 6, 0, 1, 4, 7)
        rows.append(blocks.reshape(high * wide, -1))
    return {
        "pixel_values": np.concatenate(rows),
        "image_grid_thw": np.array(grids),
        "mm_token_type_ids": (tokens == IMAGE).astype(np.int64)[None],
    }


def _process_axial(raw, tokens, pixels) -> dict[str, np.ndarray]:
    """Patches row by row, with places (x, y), of all images in as many as the largest has."""
    patch = raw["vision_config"]["patch_size"]
    shapes = [tuple(size // patch for size in image.shape[1:]) for image in pixels]
    most = max(high * wide for high, wide in shapes)
    values = np.zeros((len(pixels), most, 3 * patch**2), np.float32)
    places = np.full((len(pixels), most, 2), -1)
    for number, (image, (high, wide)) in enumerate(zip(pixels, shapes, strict=True)):
        cut = image.reshape(3, high, patch, wide, patch).transpose(1, 3, 2, 4, 0)
        values[number, : high * wide] = cut.reshape(high * wide, -1)
        row, col = np.divmod(np.arange(high * wide), wide)
        places[number, : high * wide] = np.stack([col, row], -1)
    types = (np.array(tokens) == IMAGE).astype(np.int64)[None]
    return {"pixel_values": values, "image_position_ids": places, "mm_token_type_ids": types}
