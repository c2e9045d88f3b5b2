"""Short control calls to a server: blocking, from any thread, with plain answers and errors.

What asks for tokens is elsewhere (`engine.py`): that is many requests at once and asynchronous.
"""

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key of servers that were started with one; vLLM reads it, too."""


class ServerGone(Exception):
    """The server did not answer: refused, cut off, or too late."""


class ServerRefused(Exception):
    """The server answered, but not with 200."""

    def __init__(self, status: int, message: str):
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message


def headers() -> dict[str, str]:
    """Headers of every request."""
    key = os.environ.get(KEY_VARIABLE)
    found = {"Content-Type": "application/json"}
    return {**found, "Authorization": f"Bearer {key}"} if key else found


def call(
    url: str, method: str, path: str, body: Any = None, *, timeout: float, **query: str | int
) -> Any:
    """The JSON of an answer, None for an empty one; ServerGone or ServerRefused otherwise."""
    if query:
        path = f"{path}?{urllib.parse.urlencode(query)}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, headers(), method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            raw = answer.read()
    except urllib.error.HTTPError as error:
        raise ServerRefused(error.code, explain(error.read())) from None
    except TimeoutError:
        raise ServerGone(f"{path} was not answered within {timeout:g} s") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise ServerGone(f"{path} was not answered within {timeout:g} s") from None
        raise ServerGone(str(getattr(error.reason, "strerror", None) or error.reason)) from None
    except ConnectionError as error:
        raise ServerGone(error.strerror or "hung up") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerGone(f"{path}: {error!r}") from None
    try:
        return json.loads(raw) if raw.strip() else None
    except ValueError:
        return raw.decode(errors="replace")


def explain(raw: bytes, longest: int = 400) -> str:
    """What an error answer says, in one line."""
    text = raw.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, dict):
        found = found.get("message", found)
    text = " ".join(str(found).split())
    return text if len(text) <= longest else text[: longest - 3] + "..."
