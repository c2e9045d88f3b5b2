"""Built-in reward `vllm_reward`: the score of a reward model on a vLLM server.

    vllm serve RM --runner pooling          [[rewards]]
                                            function = "vllm_reward"
                                            options = {url = "http://host:8000", tokenizer = "RM"}

With `tokenizer`, answers are sent as token ids, laid out as in training, and scored at the token
that ends the turn. Without it, conversations are sent as messages, rendered by the server's chat
template, and plain texts unchanged. With `pair`, prompt and answer are sent as the two texts of an
encoder with a score (BERT, DeBERTa and the like), which its own tokenizer joins: route /score.
"""

import http.client
import json
import math
import random
import urllib.parse
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.text_safety import split_login

REDUCE = {"min": min, "mean": lambda values: sum(values) / len(values), "last": lambda v: v[-1]}
"""Reductions of the scores of an answer's steps."""
RAW_SCORES = {"use_activation": False, "activation": False}
"""Names of new and old servers for the same option: the raw score, not its sigmoid."""
MAX_BYTES = 1 << 28
"""Limit of bytes of a response."""
NAME = "reward 'vllm_reward'"


def vllm_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    url: str | Sequence[str],
    model: str | None = None,
    tokenizer: str | None = None,
    api_key: str | None = None,
    separator: str | None = None,
    reduce: str = "min",
    max_tokens: int | None = None,
    pair: bool = False,
    seconds: float = 30.0,
    **columns: Any,
) -> list[float | None]:
    """Score completions; None for one without tokens or steps, or with more than `max_tokens`.

    url: a server, or several, of which each call uses one. model: served model name. tokenizer:
    folder or Hub id of the reward model's tokenizer. separator: set for process reward models: each
    step of the answer, up to this text, is scored by the probability that it is right, and `reduce`
    ("min", "mean", "last") combines the steps. pair: for encoders, which read two texts: that of
    the prompt (the contents of its messages, a blank line between them) and that of the answer.
    seconds: limit of each request; `timeout` of the [[rewards]] bounds the whole group.

    Raises OSError for a server that does not answer (retried, see rollout.retries), and UserError
    for one that refuses.
    """
    if separator is not None and tokenizer is None:
        raise UserError(f"{NAME}: options.separator needs options.tokenizer, to find the steps")
    if pair and (tokenizer is not None or max_tokens is not None):
        raise UserError(
            f"{NAME}: options.pair sends texts, which the server tokenizes and limits; remove"
            " options.tokenizer and max_tokens"
        )
    if reduce not in REDUCE:
        raise UserError(f"{NAME}: options.reduce {reduce!r} is none of {', '.join(REDUCE)}")
    base = url if isinstance(url, str) else random.choice(list(url))
    send = RewardServer(base, model, api_key, seconds)
    if pair:
        return send.score_pairs(
            [write_pair(*texts) for texts in zip(prompts, completions, strict=True)]
        )
    if tokenizer is None:
        return [send.classify_text(*pair) for pair in zip(prompts, completions, strict=True)]
    if separator is not None:
        texts = [
            write_steps(tokenizer, prompt, completion, separator)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        scored = [steps for steps in texts if steps[1] and fits(steps[0], max_tokens)]
        rows = iter(send.score_tokens([ids for ids, _ in scored]))
        join, scores = REDUCE[reduce], {}
        for steps in scored:
            row = next(rows)
            scores[id(steps)] = join([row[end] for end in steps[1]])
        return [scores.get(id(steps)) for steps in texts]
    ids = [write_answer(tokenizer, *pair) for pair in zip(prompts, completions, strict=True)]
    remaining_scores = iter(
        send.classify_ids([sequence for sequence in ids if sequence and fits(sequence, max_tokens)])
    )
    return [next(remaining_scores) if fits(sequence, max_tokens) else None for sequence in ids]


def fits(ids: Sequence[int] | None, max_tokens: int | None) -> bool:
    """Return True if there are tokens to score, and not too many."""
    return bool(ids) and (max_tokens is None or len(ids or ()) <= max_tokens)


class RewardServer:
    """Client of a vLLM server with a pooling model."""

    def __init__(self, url: str, model: str | None, api_key: str | None, seconds: float):
        self.url, self.api_key, self.seconds = url.rstrip("/"), api_key, seconds
        self.common = {} if model is None else {"model": model}

    def classify_ids(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Score sequences of token ids."""
        return self._classify({"input": list(map(list, ids))}, len(ids)) if ids else []

    def classify_text(self, prompt: Any, completion: Any) -> float | None:
        """Score a conversation or a text."""
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._classify({"input": [prompt + completion]}, 1)[0] if completion else None
        (prompt, completion) = (
            [{"role": role, "content": content}] if isinstance(content, str) else list(content)
            for role, content in (("user", prompt), ("assistant", completion))
        )
        body = {"messages": [*prompt, *completion], "add_generation_prompt": False}
        return self._classify(body, 1)[0]

    def score_tokens(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the probability of the last class at each token of each text."""
        if not ids:
            return []
        body = {"input": list(map(list, ids)), "task": "token_classify"}
        entries = self._data("/pooling", body, len(ids))
        scores = []
        for entry, tokens in zip(entries, ids, strict=True):
            rows = entry.get("data")
            if not isinstance(rows, list) or len(rows) != len(tokens):
                raise UserError(
                    f"{NAME}: {self.url}/pooling does not score each token; serve a"
                    " *ForTokenClassification model there, with --runner pooling and without"
                    " chunked prefill"
                )
            scores.append(
                [self._number(row[-1:] if isinstance(row, list) else row) for row in rows]
            )
        return scores

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """Score answers behind their prompts; None for empty ones."""
        answered = [index for index, (_, answer) in enumerate(pairs) if answer]
        scores: list[float | None] = [None] * len(pairs)
        if answered:
            first, second = zip(*(pairs[index] for index in answered), strict=True)
            body = {"text_1": list(first), "text_2": list(second), **RAW_SCORES}
            entries = self._data("/score", body, len(answered))
            for index, entry in zip(answered, entries, strict=True):
                scores[index] = self._number(entry.get("score"))
        return scores

    def _classify(self, body: dict[str, Any], number: int) -> list[float]:
        return [
            self._number(entry.get("probs"))
            for entry in self._data("/classify", {**body, **RAW_SCORES}, number)
        ]

    def _number(self, score: Any) -> float:
        value = score[0] if isinstance(score, list) and len(score) == 1 else score
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise UserError(
                f"{NAME}: {self.url} gives {str(score)[:80]} for an answer, not one number; serve a"
                ' reward model with one label there (task.kind "reward_model" exports one)'
            )
        return float(value)

    def _data(self, route: str, body: dict[str, Any], number: int) -> list[dict[str, Any]]:
        answer = post(self.url, route, {**self.common, **body}, self.api_key, self.seconds)
        data = answer.get("data") if isinstance(answer, dict) else None
        if (
            not isinstance(data, list)
            or len(data) != number
            or not all(isinstance(entry, dict) for entry in data)
        ):
            raise UserError(
                f"{NAME}: {self.url}{route} answers {str(answer)[:120]!r} instead of {number}"
                " entries; is it a vLLM server with a pooling model?"
            )
        return sorted(data, key=lambda entry: entry.get("index", 0))


def post(url: str, route: str, body: Any, api_key: str | None, seconds: float) -> Any:
    """POST to a server and return its JSON; OSError if it does not answer or is unavailable."""
    base = urllib.parse.urlsplit(url)
    if base.scheme not in ("http", "https") or not base.hostname:
        raise UserError(f"{NAME}: options.url {url!r} must be a URL such as http://localhost:8000")
    make = http.client.HTTPSConnection if base.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    sent = split_login(url)[1] or (f"Bearer {api_key}" if api_key else None)
    headers |= {"Authorization": sent} if sent else {}
    connection = make(base.hostname, base.port, timeout=seconds)
    try:
        connection.request("POST", f"{base.path}{route}", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        raw = answer.read(MAX_BYTES)
    except http.client.HTTPException as error:
        raise OSError(f"{url}{route}: {error!r}") from None
    finally:
        connection.close()
    excerpt = " ".join(raw[:2000].decode(errors="replace").split())[:300]
    if answer.status in (408, 425, 429) or answer.status >= 500:
        raise OSError(f"{url}{route}: HTTP {answer.status} {excerpt}")
    if answer.status >= 400:
        raise UserError(f"{NAME}: {url}{route} refuses with HTTP {answer.status}: {excerpt}")
    try:
        return json.loads(raw)
    except ValueError:
        raise UserError(
            f"{NAME}: {url}{route} answers {excerpt[:120]!r}, which is no JSON"
        ) from None


@lru_cache(maxsize=8)
def open_writer(tokenizer: str) -> Any:
    """Return the layout of prompts and answers with a tokenizer, the same as in training."""
    from jaxtrain.config.data import DatasetConfig
    from jaxtrain.data.chat.template import load_tokenizer
    from jaxtrain.data.comparisons.answers import Answers

    return Answers(DatasetConfig(path="reward"), load_tokenizer(tokenizer), 2**30, "drop")


def write_answer(tokenizer: str, prompt: Any, completion: Any) -> list[int] | None:
    """Encode a prompt and its answer up to the end of the turn; None for one without tokens."""
    from jaxtrain.data.chat.messages import MalformedRow
    from jaxtrain.data.chat.rows import Row
    from jaxtrain.data.comparisons.preference_row import PreferenceRow
    from jaxtrain.data.comparisons.ranked import Ranked

    if not (isinstance(prompt, str) and isinstance(completion, str)):
        try:
            prompt = Row({}).read_messages(prompt)
            completion = Row({}).read_messages(completion, "assistant")
        except MalformedRow:
            return None
    ranked, *_ = open_writer(tokenizer)(
        PreferenceRow(prompt, (completion,), labels=(True,)), "a completion"
    )
    if not isinstance(ranked, Ranked):
        return None
    return [*ranked.prompt.tolist(), *ranked.answers[0].tokens.tolist()]


def write_pair(prompt: Any, completion: Any) -> tuple[str, str]:
    """Return the texts of a prompt and of its answer; UserError for images."""
    from jaxtrain.environments.rewards.texts import text_of

    if not isinstance(prompt, str):
        contents = [message["content"] for message in prompt if message.get("content")]
        if not all(isinstance(content, str) for content in contents):
            raise UserError(f"{NAME}: options.pair sends texts alone, and a prompt has images")
        prompt = "\n\n".join(contents)
    return prompt, text_of(completion)


def write_steps(
    tokenizer: str, prompt: Any, completion: Any, separator: str
) -> tuple[list[int], list[int]]:
    """Encode a prompt and an answer: (token ids, index of the last token of each separator)."""
    from jaxtrain.config.data import DataConfig, DatasetConfig
    from jaxtrain.data.chat.messages import MalformedRow
    from jaxtrain.data.chat.rows import Row
    from jaxtrain.data.comparisons.stepwise import StepwiseReader
    from jaxtrain.environments.rewards.texts import text_of

    steps = [step for step in text_of(completion).split(separator) if step.strip()]
    reader = StepwiseReader(
        DatasetConfig(path="reward"), open_writer(tokenizer).tokenizer, DataConfig(), separator
    )
    try:
        before, _, tokens, _ = reader.read(Row({"prompt": prompt, "completions": steps}))
    except MalformedRow:
        return [], []
    ends, end = [], len(before) - 1
    for step in tokens:
        end += len(step)
        ends.append(end)
    return [*before, *(token for step in tokens for token in step)], ends
