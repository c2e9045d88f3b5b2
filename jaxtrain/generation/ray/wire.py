"""Wire format between trainer, rollout service and episode workers: plain data, arrays of numbers.

    RoundSlot, PromptRequest, EpisodeFailed ─> dicts, texts, numpy arrays ─> the other process

No object of ours is pickled: what arrives is checked by the classes that it becomes.
"""

import dataclasses
from collections import Counter
from typing import Any

from jaxtrain import plugins
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed, PromptRequest
from jaxtrain.generation.episode_codec import as_array, pack, unpack
from jaxtrain.generation.episodes import Group, RoundSlot

ERRORS = {kind.__name__: kind for kind in (UserError, RunStopped, Interrupted)}
"""Errors that end a run, by name; any other is a bug."""


def pack_all(value: Any) -> Any:
    """Pack groups, episodes, rows, lists and dicts of them, with nothing left out."""
    return pack(value, (), as_array)


def pack_request(request: PromptRequest) -> dict[str, Any]:
    return {**request._asdict(), "row": pack_all(request.row)}


def unpack_request(packed: dict[str, Any]) -> PromptRequest:
    return PromptRequest(**{**packed, "row": unpack(packed["row"])})


def pack_slot(slot: RoundSlot) -> dict[str, Any]:
    """Pack a slot that was filled."""
    # The group may be one of the flat ones; sent as an index, it is the same object again there.
    index = next((i for i, group in enumerate(slot.flat) if group is slot.group), None)
    return {
        "place": index,
        "group": pack_all(slot.group) if index is None else None,
        "asks": [pack_request(request) for request in slot.requests],
        "flat": [pack_all(group) for group in slot.flat],
        "dropped": dict(slot.dropped),
        "redone": slot.redone,
    }


def unpack_slot(packed: dict[str, Any]) -> RoundSlot:
    flat, index = [unpack(group) for group in packed["flat"]], packed["place"]
    return RoundSlot(
        unpack(packed["group"]) if index is None else flat[index],
        [unpack_request(request) for request in packed["asks"]],
        flat,
        Counter(packed["dropped"]),
        packed["redone"],
    )


def slim(slot: RoundSlot) -> RoundSlot:
    """Return what `Producer.mark_done` reads of a slot: its prompts and what answers earned."""
    slimmed = {id(group): _slim_group(group) for group in [slot.group, *slot.flat] if group}
    return RoundSlot(
        None if slot.group is None else slimmed[id(slot.group)],
        [request._replace(row={}) for request in slot.requests],
        [slimmed[id(group)] for group in slot.flat],
    )


def _slim_group(group: Group) -> Group:
    empty: dict[str, Any] = {"tokens": [], "sampled": [], "logprobs": [], "versions": []}
    empty |= {"completion": "", "prompt": "", "turns": [], "earlier": [], "routed": None}
    episodes = [dataclasses.replace(episode, **empty) for episode in group.episodes]
    return dataclasses.replace(
        group, row={}, episodes=episodes, advantages=None, totals=None, truth=None
    )


def pack_failure(failure: EpisodeFailed) -> dict[str, Any]:
    return {"reason": str(failure), **vars(failure)}


def unpack_failure(packed: dict[str, Any]) -> EpisodeFailed:
    return EpisodeFailed(**packed)


def pack_error(error: BaseException) -> dict[str, str]:
    """Pack what ended a call, to be raised by the caller."""
    for name, kind in ERRORS.items():
        if isinstance(error, kind):
            return {"kind": name, "text": str(error)}
    return {"kind": "bug", "text": plugins.trace(error, 4000)}


def unpack_error(packed: dict[str, str]) -> BaseException:
    kind = ERRORS.get(packed["kind"])
    if kind is None:
        return RuntimeError(f"in another process of the run:\n{packed['text']}")
    return kind(packed["text"])
