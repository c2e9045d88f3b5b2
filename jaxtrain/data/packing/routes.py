"""Routes: to which experts each token of a sequence went while answers to it were drawn.

Training sends the same tokens to the same experts again (`rollout.router_replay`), where a rounding
of the sampler's would have moved some of them: R3 (arXiv:2510.11370). A record is an array [n, R]
of the first n tokens, R the expert layers times the experts of a token, in the order of the layers;
the dtype's largest number where nothing is known, as of the last token, which no model has read.
"""

import numpy as np

from jaxtrain.batch import RouteShape


def join_routes(known: np.ndarray | None, found: np.ndarray | None) -> np.ndarray | None:
    """Two records of one sequence, the second of as many tokens or more: what is known stays, since
    a token was drawn behind the states that it describes."""
    if known is None or found is None:
        return found if known is None else known
    count = min(len(known), len(found))
    joined = (found if len(found) >= len(known) else known).copy()
    gap = np.iinfo(joined.dtype).max
    joined[:count] = np.where(known[:count] == gap, found[:count], known[:count])
    return joined


def pad_routes(known: np.ndarray | None, length: int, shape: RouteShape) -> np.ndarray:
    """[length, R], with `missing` where there is no record."""
    full = np.full((length, shape.width), shape.missing, shape.dtype)
    if known is not None:
        full[: len(known)] = known[:length]
    return full
