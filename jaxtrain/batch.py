"""Batch: packed rows of prefix trees, the input of every training step.

Axes: A microsteps, B rows, T packed tokens of a row; a Batch is [A, B, T] or [B, T] throughout.
A row is a forest in depth-first preorder, so two int arrays describe its structure: `prev` (the
token that predicts this one) and `until` (the end of the tokens that can see it). Documents,
preference pairs, GRPO groups and agent trees differ only in these numbers. A log-prob is stored on
the token that it scores: the hidden state at `prev[t]` predicts token `t`, so nothing is shifted.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A numpy array on the host, a jax.Array once fed to devices; nothing here imports jax."""


ANCHOR = "anchor"
"""Stream int32 of draft models: where a block begins, the number of branches through that token;
else 0."""
NEXT = "next"
"""Stream int32 of draft models: index in the row of the token that follows on the branch that was
drawn; -1: none."""
ROUTED = "routed"
"""Stream uint8 or uint16 [..., T, R]: the experts that a token is sent to, in place of the router's
own choice, concatenated over the layers with experts; the dtype's largest number where the router
chooses."""
IMAGE_SLOT = "image_slot"
"""Stream int32 of rows with images: which feature of the row's images stands at a placeholder; -1
at text."""


class RouteShape(NamedTuple):
    """Shape of the stream ROUTED for one model."""

    layers: tuple[int, ...]
    """Layers that have experts, counted from 0."""
    top: int
    """Experts that a token goes to."""
    experts: int
    """Experts of a layer."""

    @property
    def width(self) -> int:
        """Return R, the entries per token."""
        return len(self.layers) * self.top

    @property
    def dtype(self) -> np.dtype:
        """The narrowest dtype with one number more than there are experts."""
        return np.dtype(np.uint8 if self.experts < 256 else np.uint16)

    @property
    def missing(self) -> int:
        """Value that leaves the choice of experts to the router."""
        return int(np.iinfo(self.dtype).max)


class Images(NamedTuple):
    """Patches of the images of a batch, packed like tokens: P patches of a row, leading axes as in
    the Batch.

    A segment is what the tower attends within: a whole image, or one tile of it. Its patches are
    consecutive, begin at a multiple of m * m and lie block by block, each block of m * m patches in
    row order, blocks in row order, too; feature k of a row comes from the patches of its block k.
    """

    pixels: Array
    """uint8 [..., P, 3 p p] values of a patch by channel, row and column; 0 in padding."""
    since: Array
    """int32 [..., P] first patch of the segment; padding: its own index."""
    until: Array
    """int32 [..., P] end of the segment; padding: its own index + 1."""
    row_col: Array
    """int32 [..., P, 2] row and column of the patch in its segment; 0 in padding."""
    grid: Array
    """int32 [..., P, 2] rows and columns of the segment; 1 in padding."""
    values: Array
    """float32 [..., 256, 3] what the tower reads for a value of a pixel, by channel: rescaled and
    normalized."""


class Batch(NamedTuple):
    """Tokens of an optimizer step (leading axes [A, B, T]) or of a microstep ([B, T])."""

    tokens: Array
    """int32 token ids; 0 in padding."""
    positions: Array
    """int32 depth of the token along its own branch: what RoPE and sliding windows measure."""
    prev: Array
    """int32 index in the row of the previous token on the same branch; -1 at a root, in padding."""
    until: Array
    """int32; key k is visible to queries k <= q < until[k] (the end of k's subtree). Padding sees
    itself alone: until = index + 1."""
    weights: dict[str, Array]
    """float32 loss weight of each token, by loss component ("nll", ...); 0 is context."""
    since: Array | None = None
    """int32 first query that sees key k, at most k itself, which None stands for (causal). Set for
    bidirectional blocks and prefix language models."""
    owner: Array | None = None
    """int32 id of the branch that a trained token belongs to; sequence-level losses sum by it."""
    denoms: dict[str, Array] = {}
    """Constant denominators by component, one for the whole optimizer step: a number [A] times,
    or once in a microstep. A component that is missing here is divided by the sum of its weights
    over the step."""
    streams: dict[str, Array] = {}
    """Other per-token arrays [..., T] or [..., T, n] of any dtype: advantage, old_logp, target."""
    images: Images | None = None
    """Images of the rows, placed by the stream IMAGE_SLOT; None: text alone, without a tower."""


def check_batch(batch: Batch) -> None:
    """Assert the structural invariants of host arrays [..., T]; raises AssertionError.

    For tests and for builders of new kinds of rows: what the attention kernels and `token_logp`
    rely on. A violation is a bug of the packer, never of a user.
    """
    tokens, positions = np.asarray(batch.tokens), np.asarray(batch.positions)
    prev, until = np.asarray(batch.prev), np.asarray(batch.until)
    assert tokens.shape == positions.shape == prev.shape == until.shape, "fields differ in shape"
    named = {"tokens": tokens, "positions": positions, "prev": prev, "until": until}
    for name, array in {**named, "since": batch.since, "owner": batch.owner}.items():
        assert array is None or array.dtype == np.int32, f"{name} is {array.dtype}, not int32"
    index = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    assert (prev < index).all() and (prev >= -1).all(), "prev must point backwards"
    assert (until > index).all() and (until <= tokens.shape[-1]).all(), "until out of range"
    has_prev = prev >= 0
    parent = np.maximum(prev, 0)
    parent_until = np.take_along_axis(until, parent, axis=-1)
    parent_position = np.take_along_axis(positions, parent, axis=-1)
    assert (until <= parent_until)[has_prev].all(), "a subtree ends after its parent's"
    assert (index < parent_until)[has_prev].all(), "prev is not visible from its child"
    assert (positions == parent_position + 1)[has_prev].all(), "position is not the branch depth"
    if batch.since is not None:
        since = np.asarray(batch.since)
        assert since.shape == tokens.shape, "since differs in shape"
        assert ((since >= 0) & (since <= index)).all(), "a token must see itself"
        # Then all tokens between lie on k's branch, too: in preorder there is no room for others.
        first_until = np.take_along_axis(until, since, axis=-1)
        first_position = np.take_along_axis(positions, since, axis=-1)
        assert (index < first_until).all(), "a token is seen from another tree or branch"
        assert (positions - first_position == index - since).all(), "since skips other branches"
    for name, stream in batch.streams.items():
        assert stream.shape[: tokens.ndim] == tokens.shape, f"streams[{name}] differs in shape"
    for component, weight in batch.weights.items():
        weight = np.asarray(weight)
        assert np.issubdtype(weight.dtype, np.floating), f"weights[{component}]: {weight.dtype}"
        assert weight.shape == tokens.shape, f"weights[{component}] differ in shape"
        assert not weight[~has_prev].any(), (
            f"weights[{component}]: a token without a predecessor has a weight"
        )


def join_routes(earlier: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Join two records [n, R] of the routes of one sequence, the second of as many tokens or more.

    A record has the experts of each token, R expert layers times experts per token, and the largest
    number of its dtype where they are unknown, as for the last token, which no model has read.
    Known entries stay, because tokens were sampled from the states that they describe.
    """
    if earlier is None or later is None:
        return later if earlier is None else earlier
    count = min(len(earlier), len(later))
    joined = (later if len(later) >= len(earlier) else earlier).copy()
    gap = np.iinfo(joined.dtype).max
    joined[:count] = np.where(earlier[:count] == gap, later[:count], earlier[:count])
    return joined


def pad_routes(routes: np.ndarray | None, length: int, shape: RouteShape) -> np.ndarray:
    """Pad a record to [length, R] with `missing`."""
    full = np.full((length, shape.width), shape.missing, shape.dtype)
    if routes is not None:
        full[: len(routes)] = routes[:length]
    return full
