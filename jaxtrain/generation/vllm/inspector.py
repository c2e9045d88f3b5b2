"""Inspection of a server before it gets work: version, model, route, log-probs, tokenizer,
length."""

import json
from collections.abc import Callable

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.vllm.control import ServerRefused, call
from jaxtrain.generation.vllm.messages import (
    COMPLETIONS,
    GENERATE,
    AnswerPart,
    GarbageAnswer,
    build_request,
    parse_answer,
)
from jaxtrain.generation.vllm.server import VllmServer
from jaxtrain.generation.vllm.sources import list_workers

TESTED = ((0, 32), (0, 33))
"""Tested vLLM versions: from the first, before the second."""
PROBE_SECONDS = 120.0
PROBE_TEXT = "The quick brown fox: naïve 3.14159 × 42 = ? \n\tdef f(x):  return x**2  # 東京 🙂"


class Inspector:
    """Inspects servers for a run. tokenize: the trainer's token ids of a text, to be compared with
    the servers'."""

    def __init__(
        self,
        config: VllmConfig,
        sampling: Sampling,
        log: Callable[[str], None],
        tokenize: Callable[[str], list[int]] | None = None,
    ):
        self.config, self.sampling, self.log, self.tokenize = config, sampling, log, tokenize

    def refuse_router(self, url: str) -> None:
        """Raise UserError for a router's address: its control calls reach an arbitrary server
        behind it."""
        if list_workers(url) is not None:
            raise UserError(
                f"{url} is a router: new weights would reach one of its servers alone. Remove it"
                f' from rollout.vllm.servers and set rollout.vllm.discover to "router+{url}"'
            )

    def inspect(self, server: VllmServer) -> None:
        """Read the server's properties; UserError if this run cannot use it."""
        url = server.url
        info = call(url, "GET", "/version", timeout=30)
        self._check_version(url, info.get("version") if isinstance(info, dict) else info)
        listed = call(url, "GET", "/v1/models", timeout=30)
        try:
            # Adapters that an earlier run has left loaded are listed as well, with a parent.
            base = next(model for model in listed["data"] if not model.get("parent"))
            server.max_model_len = int(base.get("max_model_len") or 0)
            model = base["id"]
        except (TypeError, KeyError, StopIteration, ValueError):
            raise UserError(
                f"{url}/v1/models does not list a model; is this a vLLM server?"
            ) from None
        # Before the first probe, which a paused server would never answer.
        self._end_pause(url)
        server.route = self._find_route(url, model)
        if self.config.routed and server.route == COMPLETIONS:
            raise UserError(
                f"{url} does not say which weights drew a token, so no router may stand between;"
                ' start it with --enable-scale-out, or set rollout.vllm.via to "direct"'
            )
        # No route reports --logprobs-mode, but a distribution cut to one token has the log-prob 0.
        server.processed = self.probe(server.route, url, model) == 0.0
        self._check_logprobs(server)
        self._compare_tokens(url, model)
        self.check_length(server, 1, self.sampling.max_new_tokens)
        # Last of all: it marks the server as inspected, see Servers.open.
        server.model = model

    def _end_pause(self, url: str) -> None:
        """Resume a server that an interrupted sync, of this run or an earlier one, left paused, and
        wake one that went to sleep after it was given up; it would never answer a request."""
        try:
            status = call(url, "GET", "/is_sleeping", timeout=30)
            if isinstance(status, dict) and status.get("is_sleeping") is True:
                call(url, "POST", "/wake_up", timeout=self.config.progress_seconds)
                self.log(f"vllm {url} was asleep, which nobody would have ended; it is awake again")
        except ServerRefused:
            pass  # it was started without these routes
        try:
            status = call(url, "GET", "/is_paused", timeout=30)
            if isinstance(status, dict) and status.get("is_paused") is True:
                call(url, "POST", "/resume", timeout=30)
                self.log(f"vllm {url} was paused, which a sync that broke off leaves behind")
        except ServerRefused:
            pass  # it was started without these routes

    def check_length(self, server: VllmServer, prompt: int, new: int) -> None:
        """Log once if a prompt and its answer exceed the server's limit."""
        limit = server.max_model_len
        if 0 < limit < prompt + new and not server.short:
            server.short = True
            self.log(
                f"warning: vllm {server.url} takes {limit} tokens (max_model_len), but a prompt of"
                f" {prompt} and sampling.max_new_tokens {new} are {prompt + new}: such answers are"
                f" cut off at {max(0, limit - prompt)} tokens; start it with --max-model-len"
                f" {prompt + new} or more"
            )

    def _compare_tokens(self, url: str, model: str) -> None:
        """Warn if the server's tokenizer differs from the trainer's."""
        if self.tokenize is None:
            return
        body = {"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        try:
            answer = call(url, "POST", "/tokenize", body, timeout=30)
            server_ids = [int(token) for token in answer["tokens"]]
        except (ServerRefused, KeyError, TypeError, ValueError):
            return  # started without a tokenizer: it gets and gives ids all the same
        trainer_ids = self.tokenize(PROBE_TEXT)
        if server_ids != trainer_ids:
            position = next(
                (
                    i
                    for i, pair in enumerate(zip(trainer_ids, server_ids, strict=False))
                    if len({*pair}) > 1
                ),
                min(len(trainer_ids), len(server_ids)),
            )
            self.log(
                f"warning: vllm {url} has another tokenizer than the trainer: {len(server_ids)}"
                f" tokens of a text of {len(trainer_ids)} here, which differ from place {position}"
                f" on (there {server_ids[position : position + 3]}, here"
                f" {trainer_ids[position : position + 3]}); start it with the"
                " tokenizer of model.path, or stop texts are looked for in other words than ours"
            )

    def _check_version(self, url: str, version: object) -> None:
        try:
            numbers = tuple(int(part) for part in str(version).split(".")[:2])
        except ValueError:
            numbers = ()
        if not self.config.any_version and not TESTED[0] <= numbers < TESTED[1]:
            low, high = (".".join(map(str, numbers)) for numbers in TESTED)
            raise UserError(
                f"{url} runs vLLM {version}; tested are versions from {low} before {high}. Install"
                " one of those there, or set rollout.vllm.any_version to true"
            )

    def _find_route(self, url: str, model: str) -> str:
        try:
            self.probe(GENERATE, url, model)
        except ServerRefused as error:
            # A proxy may forbid the route where vLLM has none; any other refusal is about the
            # request.
            if error.status not in (403, 404, 405):
                raise
            self.log(f"vllm {url} runs without --enable-scale-out: sampling over {COMPLETIONS}")
            return COMPLETIONS
        return GENERATE

    def probe(self, route: str, url: str, model: str, timeout: float = PROBE_SECONDS) -> float:
        """Return the log-prob of the only token that top_k 1 allows: exactly 0 if log-probs are
        taken after truncation."""
        sampling = Sampling(temperature=1.0, top_k=1, max_new_tokens=1)
        # Two tokens: a lone one ends vLLM 0.32 where a CPU runs layers of linear attention.
        body = build_request(route, AnswerPart([1, 1], sampling, (), 1, 0), model)
        raw = call(url, "POST", route, body, timeout=timeout)
        try:
            return parse_answer(route, json.dumps(raw).encode(), 1).logprobs[0]
        except GarbageAnswer as error:
            raise UserError(f"{url}{route} answers what no vLLM server does: {error}") from None

    def _check_logprobs(self, server: VllmServer) -> None:
        """Raise UserError unless its log-probs are those of softmax(logits / temperature)."""
        draw = self.sampling
        cut = draw.top_p < 1 or draw.top_k > 0 or draw.min_p > 0
        if draw.temperature not in (0.0, 1.0) and not server.processed:
            raise UserError(
                f"sampling.temperature is {draw.temperature:g}, but {server.url} returns log-probs"
                " as of temperature 1; start it with --logprobs-mode processed_logprobs"
            )
        if draw.temperature and cut and server.processed:
            raise UserError(
                f"sampling.top_p, top_k or min_p cut the distribution, and {server.url} returns"
                " log-probs of what is left, which the trainer cannot reproduce; set them to 1, 0"
                " and 0 (or keep temperature 1 and start the server with --logprobs-mode"
                " raw_logprobs)"
            )
