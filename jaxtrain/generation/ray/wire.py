"""What travels between trainer, rollout service and episode workers: plain data, numbers as arrays.

    Slot, Ask, EpisodeFailed ─> dicts, texts, numpy arrays ─> the other process ─> the same again

No object of ours is pickled: what arrives is checked by the classes that it becomes.
"""

import dataclasses
from collections import Counter
from typing import Any

from jaxtrain import plugins
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed, PromptRequest
from jaxtrain.generation.episode_codec import as_array, pack, unpack
from jaxtrain.generation.episodes import Group
from jaxtrain.generation.producer import RoundSlot

ERRORS = {kind.__name__: kind for kind in (UserError, RunStopped, Interrupted)}
"""What ends a run, by name; anything else is a bug."""


def pack_all(value: Any) -> Any:
    """Groups, episodes, rows, lists and dicts of them, with nothing left out."""
    return pack(value, (), as_array)


def pack_ask(ask: PromptRequest) -> dict[str, Any]:
    return {**ask._asdict(), "row": pack_all(ask.row)}


def unpack_ask(found: dict[str, Any]) -> PromptRequest:
    return PromptRequest(**{**found, "row": unpack(found["row"])})


def pack_slot(slot: RoundSlot) -> dict[str, Any]:
    """A slot that was filled. Its group may be one of the flat ones, and will be again."""
    place = next((i for i, group in enumerate(slot.flat) if group is slot.group), None)
    return {
        "place": place,
        "group": pack_all(slot.group) if place is None else None,
        "asks": [pack_ask(ask) for ask in slot.asks],
        "flat": [pack_all(group) for group in slot.flat],
        "dropped": dict(slot.dropped),
        "redone": slot.redone,
    }


def unpack_slot(found: dict[str, Any]) -> RoundSlot:
    flat, place = [unpack(group) for group in found["flat"]], found["place"]
    return RoundSlot(
        unpack(found["group"]) if place is None else flat[place],
        [unpack_ask(ask) for ask in found["asks"]],
        flat,
        Counter(found["dropped"]),
        found["redone"],
    )


def slim(slot: RoundSlot) -> RoundSlot:
    """What `Producer.mark_done` reads of a slot: which prompts, and what their answers earned."""
    slimmed = {id(group): _slim_group(group) for group in [slot.group, *slot.flat] if group}
    return RoundSlot(
        None if slot.group is None else slimmed[id(slot.group)],
        [ask._replace(row={}) for ask in slot.asks],
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


def unpack_failure(found: dict[str, Any]) -> EpisodeFailed:
    return EpisodeFailed(**found)


def pack_error(error: BaseException) -> dict[str, str]:
    """What ended a call there, to be raised here."""
    for name, kind in ERRORS.items():
        if isinstance(error, kind):
            return {"kind": name, "text": str(error)}
    return {"kind": "bug", "text": plugins.trace(error, 4000)}


def unpack_error(found: dict[str, str]) -> BaseException:
    kind = ERRORS.get(found["kind"])
    if kind is None:
        return RuntimeError(f"in another process of the run:\n{found['text']}")
    return kind(found["text"])
