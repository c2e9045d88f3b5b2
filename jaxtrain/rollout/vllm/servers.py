"""Which servers there are, which of them may be asked now, and what they are asked for.

    new ──bring(weights)──> up ──refused, dead, stalled──> down ──healthy again, bring──> up
                            │
                            └─ only `up` servers that hold the newest weights get requests

One watcher thread per server looks at /health, or at once when a request failed (`suspect`), drops
a server that is gone, or whose engine does nothing for the requests that it holds, and takes one
back that has returned: a restarted server knows nothing of the run, so it is inspected, must draw a
token, and is given the weights again before it gets work. Everything here may be called from any
thread.
"""

import contextlib
import dataclasses
import json
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.rollout.types import Sampling
from jaxtrain.rollout.vllm.control import Deadline, ServerGone, ServerRefused, call
from jaxtrain.rollout.vllm.messages import (
    COMPLETIONS,
    GENERATE,
    GarbageAnswer,
    build_request,
    parse_answer,
)

TESTED = ((0, 32), (0, 33))
"""vLLM versions from the first, before the second."""
HEALTH_TIMEOUT_SECONDS = 20.0
MAX_STRIKES = 3
"""Unanswered looks at /health before a server counts as stalled."""
PROBE_SECONDS = 120.0
PROBE_TEXT = "The quick brown fox: naïve 3.14159 × 42 = ? \n\tdef f(x):  return x**2  # 東京 🙂"


TOKEN_COUNTER = re.compile(
    r"^vllm:(?:prompt_tokens|generation_tokens|iteration_tokens_total)"
    r"_(?:total|sum)(?:\{.*\})? (\S+)",
    re.MULTILINE,
)
"""Lines of /metrics that change with every step of an engine that works."""


@dataclasses.dataclass(eq=False)
class Server:
    """One server; its fields change under the lock of Servers."""

    url: str
    state: str = "new"
    """new, up or down."""
    version: int = -1
    """Newest policy version that it holds; -1: none of this run's."""
    in_flight: int = 0
    epoch: int = 0
    """Counts how often it was dropped: a request of an older epoch will not be answered."""
    why: str = "not asked yet"
    """Why it is not up."""
    updating: bool = False
    """It gets no new requests."""
    strikes: int = 0
    model: str = ""
    """Name of the base model there."""
    route: str = GENERATE
    max_model_len: int = 0
    processed: bool = False
    """Whether its log-probs are of the distribution after temperature and truncation."""
    progressed: float = 0.0
    """When it was last seen to work on its requests (monotonic)."""
    counted: tuple[float, ...] | None = None
    """What it had counted of tokens then."""
    short: bool = False
    """Whether it was told that max_model_len is short."""
    sync_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    """Held while weights are brought to it."""
    nudge: threading.Event = dataclasses.field(default_factory=threading.Event)

    @contextlib.contextmanager
    def alone(self, deadline: Deadline) -> Iterator[None]:
        """Hold sync_lock; ServerGone when another sync keeps it for too long."""
        if not self.sync_lock.acquire(timeout=deadline.left()):
            raise ServerGone(f"an earlier sync is not over after {deadline.seconds:g} s")
        try:
            yield
        finally:
            self.sync_lock.release()


class Servers:
    """The servers of a run. `bring` is the publisher's function that gives a server the newest
    weights; it raises ServerGone, ServerRefused, UserError or RunStopped."""

    def __init__(
        self,
        config: VllmConfig,
        sampling: Sampling,
        say: Callable[[str], None] = print,
        tokenise: Callable[[str], list[int]] | None = None,
    ):
        """tokenise: the trainer's own token ids of a text, to be compared with the servers'."""
        self.config, self.sampling, self.say, self.tokenise = config, sampling, say, tokenise
        self.session = secrets.token_hex(4)
        """Part of every version's label: no other run's weights pass for ours."""
        self.all = [Server(url.rstrip("/")) for url in config.servers]
        self.bring: Callable[[Server], None] | None = None
        self.version = -1
        """Newest published version; of one under way already that, so that requests wait for it."""
        self.publishing = False
        self.counters: Counter[str] = Counter()
        self.error: BaseException | None = None
        """What a watcher found that no waiting will mend."""
        self.asleep = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._turn = 0

    def open(self) -> None:
        """Wait for the servers, inspect them and begin to watch them.

        Goes on without a server that stays away. Raises UserError when none comes, and for one
        that cannot do what this run needs.
        """
        deadline = time.monotonic() + self.config.wait_seconds
        told = False
        while waiting := [server for server in self.all if not server.model]:
            for server in waiting:
                try:
                    call(server.url, "GET", "/health", timeout=HEALTH_TIMEOUT_SECONDS)
                    self._inspect(server)
                except (ServerGone, ServerRefused) as error:
                    server.why = str(error)
            waiting = [server for server in waiting if not server.model]
            if waiting and time.monotonic() > deadline:
                break
            if waiting:
                if not told:
                    self.say(f"waiting for {', '.join(_tell(server) for server in waiting)}")
                    told = True
                time.sleep(min(1.0, self.config.health_seconds))
        if len(waiting) == len(self.all):
            raise UserError(
                f"rollout.vllm.servers: none answered within {self.config.wait_seconds:g} s"
                f" (rollout.vllm.wait_seconds): {', '.join(_tell(server) for server in waiting)}"
            )
        for server in waiting:
            server.state = "down"
            self.say(f"going on without {_tell(server)}; it is taken in when it answers")
        for server in self.all:
            threading.Thread(target=self._watch, args=(server,), daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        for server in self.all:
            server.nudge.set()

    def label(self, version: int) -> str:
        """The name of a version on the servers."""
        return f"jaxtrain-{self.session}-{version}"

    def read_label(self, label: str) -> int | None:
        """The version of a label; None for weights that this run never sent."""
        start, _, number = label.rpartition("-")
        known = start == f"jaxtrain-{self.session}" and number.isdigit()
        return int(number) if known and int(number) <= self.version + 1 else None

    def up(self) -> list[Server]:
        with self._lock:
            return [server for server in self.all if server.state == "up"]

    def acquire(self) -> Server | None:
        """The least loaded server that may be asked now, its load counted; None: none may."""
        with self._lock:
            if self.asleep:
                return None
            ready = [
                server
                for server in self.all
                if server.state == "up" and not server.updating and server.version == self.version
            ]
            if not ready:
                return None
            self._turn += 1
            at = {id(server): i for i, server in enumerate(ready)}
            chosen = min(ready, key=lambda s: (s.in_flight, (at[id(s)] - self._turn) % len(ready)))
            if not chosen.in_flight:
                chosen.progressed = time.monotonic()
            chosen.in_flight += 1
            return chosen

    def release(self, server: Server) -> None:
        """Give back what `acquire` counted."""
        with self._lock:
            server.in_flight -= 1

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counters[name] += number

    def note_progress(self, server: Server) -> None:
        """The server has answered, or is not expected to."""
        server.progressed = time.monotonic()

    def begin_publish(self, version: int) -> None:
        """No server that holds an older version is asked any more; what is under way goes on."""
        with self._lock:
            self.version, self.publishing = max(self.version, version), True

    def mark_up(self, server: Server, version: int, epoch: int | None = None) -> None:
        """The server holds that version now and may be asked. epoch: when that was begun;
        ServerGone where it was dropped since."""
        with self._lock:
            if epoch not in (None, server.epoch):
                raise ServerGone("it was given up before it held the weights")
            returned, server.state = server.state == "down", "up"
            server.progressed = time.monotonic()
            server.version, server.strikes, server.why = version, 0, ""
            self.version = max(self.version, version)
        if returned:
            self.say(f"vllm {server.url} is back with version {version}")

    def drop(self, server: Server, why: str) -> None:
        """Ask it no more until it has been taken back; its requests are redone elsewhere."""
        with self._lock:
            if server.state == "down":
                return
            server.state, server.why, server.version = "down", why, -1
            server.epoch += 1
            left = sum(other.state == "up" for other in self.all)
            self.counters["servers_lost"] += 1
        there = (
            f"{left} left"
            if left
            else f"none left: waiting up to {self.config.wait_seconds:g} s for one to come back"
        )
        self.say(f"vllm {server.url} dropped ({why}); its requests are asked again; {there}")

    def suspect(self, server: Server) -> None:
        """A request to it failed: look at its health now."""
        server.nudge.set()

    def wait_for(self, version: int) -> list[Server]:
        """The servers that hold a version, as soon as there is one; RunStopped after too long."""
        deadline = time.monotonic() + self.config.wait_seconds
        while True:
            found = [server for server in self.up() if server.version == version]
            if found:
                return found
            self.check(time.monotonic() > deadline)
            time.sleep(0.1)

    def check(self, too_late: bool) -> None:
        """Raise what ends the run: a watcher's error, or that no server came back in time."""
        if self.error is not None:
            raise self.error
        if too_late:
            raise RunStopped(
                f"no vLLM server for {self.config.wait_seconds:g} s (rollout.vllm.wait_seconds): "
                + ", ".join(_tell(server) for server in self.all)
            )

    def _watch(self, server: Server) -> None:
        """A thread: drop the server when it is gone, take it back when it has returned."""
        while not self._closed.is_set():
            server.nudge.wait(self.config.health_seconds)
            server.nudge.clear()
            if self._closed.is_set():
                return
            try:
                call(server.url, "GET", "/health", timeout=HEALTH_TIMEOUT_SECONDS)
            except (ServerGone, ServerRefused) as error:
                self._note_failure(server, error)
                continue
            server.strikes = 0
            if server.state == "down" and self.version >= 0 and self.bring is not None:
                self._take_back(server, self.bring)
            elif server.state == "up":
                self._check_progress(server)

    def _note_failure(self, server: Server, error: ServerGone | ServerRefused) -> None:
        server.strikes += 1
        late = isinstance(error, ServerGone) and "not answered" in str(error)
        if server.state == "up" and (not late or server.strikes >= MAX_STRIKES):
            self.drop(server, f"/health: {error}")
        elif late:
            server.nudge.set()

    def _check_progress(self, server: Server) -> None:
        """Drop a server that is healthy by its own word but does nothing for its requests."""
        if not server.in_flight or server.updating or self.asleep:
            self.note_progress(server)
            return
        epoch, limit = server.epoch, self.config.progress_seconds
        if time.monotonic() - server.progressed < limit / 4:
            return
        counted = read_token_counters(server.url)
        if counted is not None and counted != server.counted:
            server.counted = counted
            self.note_progress(server)
        silent = time.monotonic() - server.progressed
        if silent < limit:
            return
        if counted is None:
            # It does not tell what it does: ask for one token, behind what waits there.
            try:
                self._probe(server.route, server.url, server.model, min(limit, PROBE_SECONDS))
                return self.note_progress(server)
            except (ServerGone, ServerRefused, UserError):
                if time.monotonic() - server.progressed < limit:
                    return
        if server.epoch == epoch and server.in_flight:
            self.count("servers_hung")
            self.drop(
                server,
                f"hung: no token for {silent:.0f} s with {server.in_flight} requests under way,"
                " though /health says 200; rollout.vllm.progress_seconds",
            )

    def _take_back(self, server: Server, bring: Callable[[Server], None]) -> None:
        try:
            self._inspect(server)
            bring(server)
            while server.state == "up" and server.version < self.version:
                bring(server)  # another version was published meanwhile
        except (ServerGone, ServerRefused) as error:
            server.why = str(error)
        except (UserError, RunStopped) as error:
            # It came back as something that this run cannot use; the others may do without it.
            if str(error) != server.why:
                self.say(f"vllm {server.url} is back but of no use: {error}")
            server.why = str(error)

    def _inspect(self, server: Server) -> None:
        """Learn what the server is; UserError where this run cannot use it."""
        url = server.url
        found = call(url, "GET", "/version", timeout=30)
        self._check_version(url, found.get("version") if isinstance(found, dict) else found)
        listed = call(url, "GET", "/v1/models", timeout=30)
        try:
            base = next(model for model in listed["data"] if not model.get("parent"))
            server.max_model_len = int(base.get("max_model_len") or 0)
            model = base["id"]
        except (TypeError, KeyError, StopIteration, ValueError):
            raise UserError(
                f"{url}/v1/models does not list a model; is this a vLLM server?"
            ) from None
        self._end_pause(url)
        server.route = self._find_route(url, model)
        server.processed = self._probe(server.route, url, model) == 0.0
        self._check_logprobs(server)
        self._compare_tokens(url, model)
        self.check_length(server, 1, self.sampling.max_new_tokens)
        server.model = model

    def _end_pause(self, url: str) -> None:
        """A sync that broke off, of this run or an earlier one, may have left it paused: no request
        would ever be answered."""
        try:
            found = call(url, "GET", "/is_paused", timeout=30)
            if isinstance(found, dict) and found.get("is_paused") is True:
                call(url, "POST", "/resume", timeout=30)
                self.say(f"vllm {url} was paused, which a sync that broke off leaves behind")
        except ServerRefused:
            pass  # it was started without these routes

    def check_length(self, server: Server, prompt: int, new: int) -> None:
        """Say once when a prompt and its answer are longer than what the server takes."""
        limit = server.max_model_len
        if 0 < limit < prompt + new and not server.short:
            server.short = True
            self.say(
                f"warning: vllm {server.url} takes {limit} tokens (max_model_len), but a prompt of"
                f" {prompt} and sampling.max_new_tokens {new} are {prompt + new}: such answers are"
                f" cut off at {max(0, limit - prompt)} tokens; start it with --max-model-len"
                f" {prompt + new} or more"
            )

    def _compare_tokens(self, url: str, model: str) -> None:
        """Say when the server's tokenizer is another than the trainer's."""
        if self.tokenise is None:
            return
        body = {"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        try:
            found = call(url, "POST", "/tokenize", body, timeout=30)
            theirs = [int(token) for token in found["tokens"]]
        except (ServerRefused, KeyError, TypeError, ValueError):
            return  # started without a tokenizer: it gets and gives ids all the same
        ours = self.tokenise(PROBE_TEXT)
        if theirs != ours:
            place = next(
                (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len({*pair}) > 1),
                min(len(ours), len(theirs)),
            )
            self.say(
                f"warning: vllm {url} has another tokenizer than the trainer: {len(theirs)} tokens"
                f" of a text of {len(ours)} here, which differ from place {place} on (there"
                f" {theirs[place : place + 3]}, here {ours[place : place + 3]}); start it with the"
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
            self._probe(GENERATE, url, model)
        except ServerRefused as error:
            if error.status not in (403, 404, 405):
                raise
            self.say(f"vllm {url} runs without --enable-scale-out: sampling over {COMPLETIONS}")
            return COMPLETIONS
        return GENERATE

    def _probe(self, route: str, url: str, model: str, timeout: float = PROBE_SECONDS) -> float:
        """Log-prob of the one token that top_k 1 leaves: 0 exactly where log-probs are taken after
        truncation."""
        sampling = Sampling(temperature=1.0, top_k=1, max_new_tokens=1)
        # Two tokens: a lone one ends vLLM 0.32 where a CPU runs layers of linear attention.
        body = build_request(route, [1, 1], sampling, (), max_tokens=1, seed=0, model=model)
        raw = call(url, "POST", route, body, timeout=timeout)
        try:
            return parse_answer(route, json.dumps(raw).encode(), 1).logprobs[0]
        except GarbageAnswer as error:
            raise UserError(f"{url}{route} answers what no vLLM server does: {error}") from None

    def _check_logprobs(self, server: Server) -> None:
        """The log-probs that it returns must be those of softmax(logits / temperature)."""
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


def read_token_counters(url: str) -> tuple[float, ...] | None:
    """What a server has counted of tokens since its start; None where it does not say."""
    try:
        text = call(url, "GET", "/metrics", timeout=HEALTH_TIMEOUT_SECONDS)
    except (ServerGone, ServerRefused):
        return None
    if not isinstance(text, str):
        return None
    found = TOKEN_COUNTER.findall(text)
    try:
        return tuple(float(number) for number in found) or None
    except ValueError:
        return None


def _tell(server: Server) -> str:
    return f"{server.url} ({server.why})"
