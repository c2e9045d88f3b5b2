"""Numbers and examples that describe episodes, under the names that TRL's users know."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.packing.tree import Image
from jaxtrain.generation.episodes import Episode
from jaxtrain.runs.samples import message_text
from jaxtrain.text_safety import escape_control_chars

MAX_THUMBNAILS = 8
"""Thumbnails of a line of samples.jsonl, of a few kilobytes each."""
MAX_DRAWN = 256
"""Limit of DRAWN."""
DRAWN: dict[str, str | None] = {}
"""Thumbnails that were drawn last, by the images' hashes; None: of what cannot be read."""


def describe_episodes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return lengths in drawn tokens, the share that was cut off, and what the environment
    measured."""
    if not episodes:
        return {}
    lengths = np.array([episode.num_sampled for episode in episodes])
    ended = np.array([episode.finish_reason != "length" for episode in episodes])
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1.0 - ended.mean()),
        "num_tokens": float(sum(episode.num_tokens for episode in episodes)),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
        metrics["completions/min_terminated_length"] = float(lengths[ended].min())
        metrics["completions/max_terminated_length"] = float(lengths[ended].max())
    return {**metrics, **average_env_metrics(episodes)}


def average_env_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means of the environment's metrics, as env/NAME, over the episodes that have them."""
    means = {}
    for name in dict.fromkeys(name for episode in episodes for name in episode.metrics):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        pairs = [value if isinstance(value, tuple) else (value, 1.0) for value in values]
        if weight := sum(pair[1] for pair in pairs):
            means[f"env/{name}"] = float(sum(pair[0] for pair in pairs) / weight)
    return means


def describe_sample(
    episode: Episode, reward: float, rewards: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return what every line of samples.jsonl has, and the thumbnails of images by their hashes."""
    thumbnails = list_thumbnails(episode)
    return {
        **({"policy": episode.policy} if episode.policy else {}),
        **({"agent": episode.agent} if episode.agent else {}),
        "reward": reward,
        "rewards": rewards,
        "prompt": episode.prompt,
        "completion": episode.completion,
        "finish_reason": episode.finish_reason,
        "tokens": episode.num_sampled,
        **({"thumbnails": thumbnails} if thumbnails else {}),
    }


def list_thumbnails(episode: Episode) -> dict[str, str]:
    """Return data URLs of an episode's first images by their hashes."""
    images = {
        image.key: image
        for sequence in episode.sequences
        if sequence.images is not None
        for image in sequence.images.images
    }
    if not images:
        return {}
    first = itertools.islice(images.values(), MAX_THUMBNAILS)
    urls = ((image.key, draw_thumbnail(image)) for image in first)
    return {key: url for key, url in urls if url is not None}


def draw_thumbnail(image: Image) -> str | None:
    """Return `decode.make_thumbnail` of an image, drawn once for all answers to its prompt."""
    # By hash: a cache of the images themselves would hold the files of rows in Parquet.
    if image.key in DRAWN:
        return DRAWN[image.key]
    from jaxtrain.data.images.decode import make_thumbnail

    url = make_thumbnail(image.source)
    while len(DRAWN) >= MAX_DRAWN:
        DRAWN.pop(next(iter(DRAWN)), None)
    DRAWN[image.key] = url
    return url


def excerpt(text: Any, width: int = 160) -> str:
    """Return the end of a text, or of a conversation's last message, on one line, quoted."""
    if isinstance(text, list) and text and isinstance(text[-1], dict):
        text = message_text(text[-1])
    line = " ".join(str(text or "").split())
    return escape_control_chars(repr(line if len(line) <= width else f"...{line[-width:]}"))
