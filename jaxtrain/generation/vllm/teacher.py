"""A teacher behind a vLLM server: its log-probs of token sequences that others wrote.

    batch of trees ─> the branches with trained tokens ─> POST /v1/completions, prompt_logprobs k
        ─> the k likeliest tokens at each trained position

Every branch is sent whole; the server's prefix cache avoids recomputing what branches share.
"""

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import pause_before
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, call
from jaxtrain.text_safety import escape_control_chars

ROUTE = "/v1/completions"
TRIES = 4
NOTHING = -1
"""Id of a position without a token."""


class TeacherServer:
    """Client for one address, which may be a load balancer; connects with the first batch."""

    def __init__(
        self,
        url: str,
        k: int,
        *,
        concurrency: int = 32,
        seconds: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """k: likeliest tokens per position. seconds: time limit for one sequence. sleep: called
        with the seconds of a pause."""
        self.url, self.k = url.rstrip("/"), k
        self.concurrency, self.seconds = concurrency, seconds
        self.sleep = sleep
        self.model: str | None = None

    def score(self, batch: Batch, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32, log-probs float32), both [A, B, T, k], where `mask` [A, B, T] is set.

        Elsewhere, and where fewer tokens are known, the ids are -1. Log-probs are those at
        temperature 1. Raises RunStopped when the server cannot be reached, UserError when it
        refuses.
        """
        shape = (*batch.tokens.shape, self.k)
        ids, logp = np.full(shape, NOTHING, np.int32), np.zeros(shape, np.float32)
        rows = [
            (row, path)
            for row in np.ndindex(batch.tokens.shape[:-1])
            for path in find_branches(batch.prev[row], mask[row])
        ]
        if not rows:
            return ids, logp
        self.find_model()
        with ThreadPoolExecutor(self.concurrency) as pool:
            tokens = [batch.tokens[row][path].tolist() for row, path in rows]
            # `map` returns in order. A token that branches share is asked with each and has the
            # same answer every time, up to the server's rounding.
            for (row, path), entries in zip(rows, pool.map(self.ask, tokens), strict=True):
                for index, entry in zip(path, entries, strict=True):
                    if not mask[row][index]:
                        continue
                    pairs = read_entry(entry, self.k, self.url)
                    ids[row][index, : len(pairs)] = [pair[0] for pair in pairs]
                    logp[row][index, : len(pairs)] = [pair[1] for pair in pairs]
        return ids, logp

    def find_model(self) -> None:
        """Look up the name of the server's model."""
        if self.model is None:
            answer = self._call("GET", "/v1/models")
            try:
                self.model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise UserError(
                    f"task.teacher.url {self.url}: /v1/models names no model; is it a vLLM server?"
                ) from None

    def ask(self, tokens: list[int]) -> list[Any]:
        """Return one entry for each token of a sequence; that of the first is null."""
        body = {
            "model": self.model,
            "prompt": tokens,
            # vLLM refuses 0; the drawn token is ignored.
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.k,
        }
        answer = self._call("POST", ROUTE, body)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            entries = None
        if not isinstance(entries, list) or len(entries) != len(tokens):
            raise RunStopped(
                f"{self.url}{ROUTE} gives no prompt_logprobs for {len(tokens)} tokens; is it a vLLM"
                " server, and is anything between it and here that changes answers?"
            )
        return entries

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer's JSON; repeats the request where that may help."""
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                self.sleep(pause_before(attempt))
            try:
                return call(self.url, method, path, body, timeout=self.seconds)
            except ServerGone as gone:
                reason = str(gone)
            except ServerRefused as refused:
                reason = str(refused)
                if not refused.passes:
                    raise UserError(
                        f"task.teacher.url {self.url} refuses {path}:"
                        f" {escape_control_chars(reason)}; a server for task.top_k"
                        f" {self.k} is started with --max-logprobs {self.k} or more, and with"
                        " --max-model-len for the longest row"
                    ) from None
        raise RunStopped(
            f"task.teacher.url {self.url}: {path} failed {TRIES} times, the last time:"
            f" {escape_control_chars(reason)}"
        )


def find_branches(prev_T: np.ndarray, mask_T: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each branch's tokens, root first, up to its last masked token. Every
    masked token is on at least one branch."""
    paths, covered = [], np.zeros(len(prev_T), bool)
    # In preorder a token's children lie behind it: from the end, the first that is not on a known
    # branch ends one of its own.
    for end in np.flatnonzero(mask_T)[::-1]:
        if covered[end]:
            continue
        path, index = [], int(end)
        while index >= 0:
            path.append(index)
            index = int(prev_T[index])
        branch = np.array(path[::-1])
        covered[branch] = True
        paths.append(branch)
    return paths[::-1]


def read_entry(entry: Any, k: int, url: str) -> list[tuple[int, float]]:
    """Return the k likeliest of {"7": {"logprob": -0.1, "rank": 1}, ...}. vLLM includes the actual
    token even if it is not among them."""
    try:
        assert isinstance(entry, Mapping)
        pairs = [(int(token), float(value["logprob"])) for token, value in entry.items()]
    except (AssertionError, KeyError, TypeError, ValueError):
        raise RunStopped(
            f"{url}{ROUTE} gives {str(entry)[:80]} where log-probs should be"
        ) from None
    likeliest = sorted((p for p in pairs if p[1] > -np.inf), key=lambda pair: -pair[1])[:k]
    total = math.fsum(math.exp(min(value, 1.0)) for _, value in likeliest)
    if total > 1.02:
        raise RunStopped(
            f"{url}{ROUTE} gives log-probs whose probabilities sum to {total:.3g}; start it without"
            " --logprobs-mode, or with raw_logprobs"
        )
    return likeliest
