"""Fields of requests to the policy endpoint: their types, and what the others may hold.

READ       read by the endpoint; of one of these types
NEUTRAL    change what is drawn, or what the log-probs are of: at this value alone
EMPTY      the same, and only as null or empty
HARMLESS   change nothing here; named once in the log
others     refused by name, since a misspelled field would change nothing in silence
"""

import codecs
import difflib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jaxtrain.safe_io import has_surrogates, parse_json
from jaxtrain.text_safety import name_type, show

Note = Callable[[str], None]
"""Receives the name of a field that changes nothing."""


class RequestRefused(Exception):
    """A request is answered with an HTTP error, whose text is the message."""

    def __init__(self, status: int, message: str, param: str | None = None):
        """param: the field at fault, where the message does not begin with it."""
        super().__init__(message)
        self.status, self.param = status, param


TYPES: Mapping[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a number": lambda value: type(value) in (int, float),
    "a whole number": lambda value: type(value) is int,
    "true or false": lambda value: isinstance(value, bool),
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "a list of texts": lambda value: _is_list_of(value, str),
    "a list of whole numbers": lambda value: _is_list_of(value, int),
    "a list of objects": lambda value: _is_list_of(value, dict),
}

SAMPLING: Mapping[str, tuple[str, ...]] = {
    "temperature": ("a number",),
    "top_p": ("a number",),
    "min_p": ("a number",),
    "top_k": ("a whole number",),
    "max_tokens": ("a whole number",),
    "stop": ("a text", "a list of texts"),
    "stop_token_ids": ("a list of whole numbers",),
    "seed": ("a whole number",),
    "structured_outputs": ("an object",),
    "logprobs": ("true or false", "a whole number"),
}
CHAT: Mapping[str, tuple[str, ...]] = {
    **SAMPLING,
    "messages": ("a list of objects",),
    "tools": ("a list of objects",),
    "tool_choice": ("a text", "an object"),
    "chat_template_kwargs": ("an object",),
    "max_completion_tokens": ("a whole number",),
    "top_logprobs": ("a whole number",),
    "response_format": ("an object",),
    "guided_json": ("an object", "a text"),
    "guided_regex": ("a text",),
    "guided_choice": ("a list of texts",),
    "model": ("a text",),
    "metadata": ("an object",),
    "stream": ("true or false",),
    "stream_options": ("an object",),
    "return_token_ids": ("true or false",),
}
TOKENS: Mapping[str, tuple[str, ...]] = {
    "token_ids": ("a list of whole numbers",),
    "sampling_params": ("an object",),
    "model": ("a text",),
    "metadata": ("an object",),
}
NEUTRAL: Mapping[str, float | bool] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "typical_p": 1,
    "min_tokens": 0,
    "use_beam_search": False,
    "ignore_eos": False,
    "echo": False,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "add_special_tokens": False,
}
EMPTY = (
    *("logit_bias", "bad_words", "allowed_token_ids", "logits_processors", "documents"),
    *("chat_template", "reasoning_effort", "thinking_token_budget", "truncate_prompt_tokens"),
    *("functions", "function_call", "prediction", "modalities", "audio", "web_search_options"),
    *("vllm_xargs", "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "features"),
)
HARMLESS = (
    *("user", "store", "service_tier", "request_id", "priority", "cache_salt", "verbosity"),
    *("prompt_cache_key", "safety_identifier", "parallel_tool_calls", "include_reasoning"),
    *("return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "prompt_logprobs", "detokenize", "output_kind"),
    "return_token_strs",
)
MAX_STOPS, MAX_STOP_TEXT = 64, 1024
"""Limits for stop texts and stop tokens of a request, and for the characters of a text."""


def _is_list_of(value: Any, kind: type) -> bool:
    # type(), as true is an int.
    return isinstance(value, list) and all(type(item) is kind for item in value)


def check_fields(
    body: Mapping[str, Any], read: Mapping[str, tuple[str, ...]], note: Note, within: str = ""
) -> None:
    """Raise RequestRefused, naming the field, for one of another type or one that would change what
    is drawn.

    read: CHAT, TOKENS or SAMPLING. within: prefix of names in messages. A field that is null counts
    as absent.
    """
    for name, value in body.items():
        if value is None:
            continue
        label = within + name
        if name in read:
            kinds = read[name]
            if not any(TYPES[kind](value) for kind in kinds):
                refuse(f"{label} must be {' or '.join(kinds)}, found {describe(value)}")
        elif name in NEUTRAL:
            neutral = NEUTRAL[name]
            if not same_number(value, neutral):
                refuse(
                    f"{label} {show(value, 40)} is not served: only {show(neutral)} is; leave it"
                    " out"
                )
        elif name in EMPTY:
            if value not in ("", [], {}, False):
                refuse(f"{label} is not served, and would change what is drawn; leave it out")
        elif name in HARMLESS:
            note(label)
        else:
            [*close] = difflib.get_close_matches(name[:60], [*read, *NEUTRAL], 1)
            advice = f"did you mean {close[0]}?" if close else "leave it out"
            message = f"{within}{show(name, 60)} is no field that is understood here; {advice}"
            raise RequestRefused(400, message, name[:60])
    check_stops(body, within)


def refuse(message: str) -> NoReturn:
    """Raise RequestRefused with status 400."""
    raise RequestRefused(400, message)


def check_stops(body: Mapping[str, Any], within: str) -> None:
    """Raise RequestRefused for stop texts or stop tokens that no engine takes."""
    for name in ("stop", "stop_token_ids"):
        stops = body.get(name)
        if isinstance(stops, list) and len(stops) > MAX_STOPS:
            refuse(f"{within}{name} has {len(stops)} entries; at most {MAX_STOPS} are taken")
        texts = [stops] if isinstance(stops, str) else stops or []
        if name == "stop" and any(not 0 < len(text) <= MAX_STOP_TEXT for text in texts):
            refuse(f"{within}stop: a text has 1 to {MAX_STOP_TEXT} characters")


def same_number(requested: Any, expected: float | bool) -> bool:
    """Return True if a requested number equals the expected one within float32 precision; a truth
    value equals itself alone."""
    if isinstance(expected, bool) or isinstance(requested, bool):
        return requested is expected
    try:
        distance = abs(requested - expected)
    except (TypeError, OverflowError):
        return False
    return distance <= 1e-6 * max(1.0, abs(expected))


def describe(value: Any) -> str:
    """Return a value, or its type if it is no plain one, for a message."""
    if isinstance(value, dict):
        return "an object"
    return show(value, 40) if isinstance(value, str | int | float) else name_type(value)


def decompress(raw: bytes, coding: str, most: int) -> bytes:
    """Return the content of a body that has a content coding; RequestRefused for one that is not
    known, and for more than `most` bytes."""
    if coding in ("identity", ""):
        return raw
    if coding not in ("gzip", "deflate"):
        raise RequestRefused(415, f"Content-Encoding: {show(coding, 40)}; send gzip or deflate")
    # 32: the header says whether it is gzip or zlib.
    reader = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)
    try:
        content = reader.decompress(raw, most + 1)
    except zlib.error:
        refuse(f"the body is not {coding}, as Content-Encoding says")
    if len(content) > most:
        raise RequestRefused(413, f"the body has more than {most:,} bytes")
    return content


def parse_body(raw: bytes, charset: str | None) -> dict[str, Any]:
    """Parse the body of a request; RequestRefused unless it is a JSON object. Half a surrogate
    pair, which JSON may hold and no tokenizer takes, becomes a question mark."""
    try:
        is_utf8 = codecs.lookup(charset or "utf-8").name in ("utf-8", "ascii")
    except (LookupError, ValueError):
        is_utf8 = False
    if not is_utf8:
        raise RequestRefused(415, f"Content-Type: charset {show(charset, 40)}; send UTF-8")
    try:
        body = parse_json(raw, unique=True, surrogates=True)
    except ValueError as error:
        refuse(f"the body is no valid JSON: {error}")
    if not isinstance(body, dict):
        refuse(f"the body must be a JSON object, found {name_type(body)}")
    if has_surrogates(body):
        body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
    return body
