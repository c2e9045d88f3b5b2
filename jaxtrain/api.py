"""For programs: log-probs, logits, scores and answers of lists of texts; trees as flat rows.

    from jaxtrain.api import Model, logprobs

    logprobs("runs/sft", ["Water boils at 100 degrees."])      # one call
    model = Model("Qwen/Qwen3-0.6B")                           # loaded once, asked often
    model.logits([[151644, 872], "as text"])

A model is named as for `jaxtrain generate`: a run's output_dir (its newest checkpoint), a Hugging
Face or PEFT folder, a Hub id. Texts are strings or lists of token ids; short ones share rows.
docs/api.md has examples.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config import SamplingConfig
from jaxtrain.config.load import validate
from jaxtrain.core.scorer import make_logp, make_scores
from jaxtrain.data.chat.template import encode, end_of_turn_ids
from jaxtrain.data.packing.branches import TreeBranch, list_branches
from jaxtrain.data.packing.pack import (
    BARE,
    MIN_SCORING_ROW,
    SCORING_ROW,
    PackedTree,
    lay_out,
    pack_for_scoring,
)
from jaxtrain.data.packing.tree import chain
from jaxtrain.distributed.feed import feed, row_shards, to_host
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion
from jaxtrain.generation.local.draft_model import open_draft
from jaxtrain.generation.local.requests import Requests, open_sampling_packer
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.speculation import DraftedModel
from jaxtrain.methods.reopen import load_newer, open_trained
from jaxtrain.models.parameters import Params, Rebuild
from jaxtrain.models.scores import ScoreHead

__all__ = ["TreeBranch", "Completion", "Model", "Text", "list_branches", "logits", "logprobs"]

Text = str | Sequence[int] | np.ndarray
"""A string, which is tokenized as it stands (no chat template, no token added at its ends), or the
ids themselves."""
SAMPLING_ROWS = (64, 256)
"""Least and largest number of texts that are continued at once."""
SAMPLING_SLOTS = 2048
"""Tokens of a text, prompt included, for which a row is given room where memory allows more than
the least."""


class Model:
    """A model with its weights on the devices."""

    def __init__(
        self,
        name: str | os.PathLike,
        overrides: Sequence[str] = (),
        *,
        several: bool = False,
        own_dtype: bool = False,
    ):
        """name: a run's output_dir (its newest checkpoint), a Hugging Face or PEFT folder, or a Hub
        id. several: open all policies of a run that trained several as `policies`; methods without
        a policy use the first one. overrides: "section.key=value" as on the command line, such as
        "model.compute_dtype=bfloat16" (a folder is computed in float32, a run as it trained).
        own_dtype: a folder is computed in its own dtype.

        Raises UserError for a name that is no model, and for a damaged one.
        """
        self.name = os.fspath(name)
        trained = open_trained(
            os.path.expanduser(self.name),
            list(overrides),
            all_policies=several,
            own_dtype=own_dtype,
        )
        self.config, self.snapshot, self.policies = (
            trained.config,
            trained.snapshot,
            trained.policies,
        )
        self.open_sampler = trained.task.sampler
        bundle = self.snapshot.roles.bundle
        if bundle.architecture.guesses:
            raise UserError(
                f"{self.name} is the run of a draft model, which writes nothing alone; name its"
                f" target, {self.config.model.path}, and {self.name}/model as --draft"
            )
        self.mesh, self.tokenizer = bundle.mesh, bundle.tokenizer
        self.packer = open_sampling_packer(self.tokenizer)
        """Makes patches of images; None for a model that reads none."""
        self.vocab_size: int = bundle.architecture.vocab_size
        self.max_len: int = bundle.architecture.longest
        """Tokens of the longest text."""
        self.longest_said: str = bundle.architecture.longest_said

    def refresh(self) -> bool:
        """Load the newest checkpoint of a run that has trained on since; False if there is none.
        Samplers keep their weights until `use`."""
        newer = load_newer(self.name, self.snapshot, self.policies)
        if newer is not None:
            self.snapshot, self.policies = newer
        return newer is not None

    def encode(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Ids int32 [n] of each text; UserError for what is neither text nor ids of this model."""
        if isinstance(texts, (str, bytes)) or not isinstance(texts, (Sequence, np.ndarray)):
            raise UserError(f"give a list of texts or of lists of ids, not {texts!r:.60}")
        return [self._ids(text, index) for index, text in enumerate(texts)]

    def logprobs(self, texts: Sequence[Text], temperature: float | None = None) -> list[np.ndarray]:
        """Return log-probs (natural, float32 [n]) of each text's n tokens given those before them.

        The first token, which nothing predicts, has 0: the sum is that of the rest given it.
        temperature: what logits are divided by.
        """
        self.require_next_token()
        if temperature is not None and not 0 < temperature < float("inf"):
            raise UserError(f"temperature {temperature!r} must be a number above 0")
        role = self.snapshot.roles.trained
        score = make_logp(self.snapshot.roles.rebuild(role), self.config.model.logp, temperature)
        text_logprobs = self._run(self.encode(texts), score, SCORING_ROW, np.zeros(0, np.float32))
        for values in text_logprobs:
            values[:1] = 0.0
        return text_logprobs

    def logits(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Return logits float32 [n, V] of each text: row i predicts the token after token i.

        All of them lie in the host's memory: 4 n V bytes a text.
        """
        self.require_next_token()
        score = make_logits(self.snapshot.roles.rebuild(self.snapshot.roles.trained))
        nothing = np.zeros((0, self.vocab_size), np.float32)
        return self._run(self.encode(texts), score, MIN_SCORING_ROW, nothing)

    def generate(self, texts: Sequence[Text], **sampling: Any) -> list[Completion]:
        """Return a Completion (tokens, logprobs, finish_reason) for each text, which is continued
        as it stands, up to a token that ends a text or an assistant's turn. sampling: keys of
        section sampling, such as max_new_tokens=64, temperature=0.0."""
        table = {**self.config.sampling.model_dump(), **sampling}
        chosen = validate(SamplingConfig, table, "sampling")
        prompts = [ids.tolist() for ids in self.encode(texts)]
        return self.sampler(raw=False).generate(prompts, chosen)

    def scores(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Return a reward model's scores float32 [n, C] of each text; row i is that at token i.
        With C = 1, a score of a whole answer is that of its last token."""
        count = len(self.require_scores().labels)
        score = make_scores(self.snapshot.roles.rebuild(self.snapshot.roles.trained))
        return self._run(self.encode(texts), score, SCORING_ROW, np.zeros((0, count), np.float32))

    def require_scores(self) -> ScoreHead:
        """Return the scoring head; UserError for a language model."""
        head = self.snapshot.roles.bundle.architecture.score
        if head is None:
            raise UserError(
                f"{self.name} is a language model, which has no score for a text; name a reward"
                ' model, such as one that task.kind "reward_model" trained'
            )
        return head

    def require_language(self) -> None:
        """UserError for a model that scores texts instead of writing any."""
        if self.snapshot.roles.bundle.architecture.score is not None:
            raise UserError(
                f"{self.name} is a reward model: it scores texts (jaxtrain score) and writes none"
            )

    def require_next_token(self) -> None:
        """UserError for a model that does not predict the next token of a text."""
        self.require_language()
        if self.open_sampler is not None:
            raise UserError(
                f"{self.name} was trained with task.kind {self.config.task.kind!r}: it predicts no"
                " next token, so that texts have no log-probs by it and no draft can guess for it;"
                " `jaxtrain generate` and `jaxtrain eval` work with it"
            )

    def sampler(
        self,
        raw: bool,
        draft: str | None = None,
        policy: str | None = None,
        max_batch: int | None = None,
        prefixes: int | None = 0,
    ) -> Requests:
        """Return a sampler with these weights. raw: an answer ends with its text, not with a turn.
        draft: folder of a draft model for speculative decoding: same answers, faster. policy:
        another one of `policies`. max_batch: most answers that are drawn at once, by
        default what the memory has room for. prefixes: answers whose states stay for prompts that
        begin like them (None: a quarter of max_batch)."""
        self.require_language()
        model = (self.snapshot if policy is None else self.policies[policy]).model()
        if draft is not None:
            self.require_next_token()
            bundle = self.snapshot.roles.bundle
            model = DraftedModel(model, open_draft(draft, bundle, self.mesh, "--draft", model))
        memory = (next(iter(self.mesh.local_devices)).memory_stats() or {}).get("bytes_limit", 0)
        rows = choose_rows(model, memory) if self.open_sampler is None else SAMPLING_ROWS[0]
        max_batch = min(rows, max_batch or rows)
        make: Callable[..., Requests] | None = self.open_sampler
        if make is None:
            prefixes = max(1, max_batch // 4) if prefixes is None else prefixes
            make = functools.partial(LocalSampler, prefixes=prefixes)
        return make(
            model,
            end_of_turn_ids(self.tokenizer, raw),
            max_len=self.max_len,
            max_batch=max_batch,
            to_text=self.tokenizer.decode,
            tokenizer=self.tokenizer,
            mesh=self.mesh,
        )

    def _ids(self, text: Text, index: int) -> np.ndarray:
        if isinstance(text, str):
            ids = np.asarray(encode(self.tokenizer, text), np.int64)
        else:
            ids = read_ids(text, self.vocab_size, f"text {index}")
        if len(ids) > self.max_len:
            raise UserError(
                f"text {index} has {len(ids)} tokens, more than"
                f" {self.longest_said} of {self.name}; cut it"
            )
        return ids.astype(np.int32)

    def _run(
        self, texts: list[np.ndarray], score: Callable, row_tokens: int, empty: np.ndarray
    ) -> list[np.ndarray]:
        """Run score(params, batch [1, B, T]) -> [1, B, T, ...] on texts, of which some are empty,
        and split its outputs by text."""
        trees = [lay_out(chain(ids, {})) for ids in texts if len(ids)]
        scored = iter(self.run_packed(trees, score, 1, row_tokens))
        return [next(scored) if len(ids) else empty.copy() for ids in texts]

    def run_packed(
        self, trees: Sequence[PackedTree], score: Callable, rows: int, row_tokens: int = SCORING_ROW
    ) -> list[Any]:
        """Run score(params, batch [1, B, T]) -> a pytree of [1, B, T, ...] on packed trees; return
        its arrays [tokens, ...] by tree. rows: of a pass, on a device."""
        scored: list[Any] = [None] * len(trees)
        params, rows = self.snapshot.params(), rows * row_shards(self.mesh)
        shares = self.snapshot.model().follows_trees
        pictured = any(tree.images is not None for tree in trees)
        fields = replace(BARE, images=self.packer) if pictured else BARE
        with jax.set_mesh(self.mesh):
            for batch, spans in pack_for_scoring(
                trees, rows=rows, share_rows=shares, row_tokens=row_tokens, fields=fields
            ):
                output = score(params, feed(batch, self.mesh))
                host = jax.tree.map(lambda value: np.asarray(to_host(value))[0], output)
                for index, row, start in spans:
                    end = start + len(trees[index].tokens)
                    cut = lambda value: value[row, start:end].copy()  # noqa: B023, E731
                    scored[index] = jax.tree.map(cut, host)
        return scored


def choose_rows(model: Any, memory: int) -> int:
    """Return how many texts a sampler continues at once: as many as have room for SAMPLING_SLOTS
    tokens each in a quarter of a device's `memory` (bytes; 0: unknown), within SAMPLING_ROWS."""
    row = jax.eval_shape(lambda: model.init_cache(1, SAMPLING_SLOTS))
    row_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(row))
    least, most = SAMPLING_ROWS
    return min(max(memory // 4 // row_bytes, least), most)


def logprobs(
    model: str | os.PathLike | Model, texts: Sequence[Text], temperature: float | None = None
) -> list[np.ndarray]:
    """Call `Model.logprobs` on a loaded model, or load one for the call."""
    return (model if isinstance(model, Model) else Model(model)).logprobs(texts, temperature)


def logits(model: str | os.PathLike | Model, texts: Sequence[Text]) -> list[np.ndarray]:
    """Call `Model.logits` on a loaded model, or load one for the call."""
    return (model if isinstance(model, Model) else Model(model)).logits(texts)


def read_ids(token_ids: Any, vocab_size: int, label: str) -> np.ndarray:
    """Return token ids int64 [n] of a list or an array; a UserError calls them `label`."""
    try:
        ids = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError):
        ids = np.asarray(None)
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, np.int64)
    is_integer = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
    if not is_integer or (
        ids is not token_ids and any(isinstance(token, bool) for token in token_ids)
    ):
        raise UserError(
            f"{label} must be a list of token ids (whole numbers), not {token_ids!r:.60}"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise UserError(
            f"{label} holds the id {wrong}; the model has those from 0 to {vocab_size}-1"
        )
    return ids.astype(np.int64)


@functools.lru_cache(maxsize=8)
def make_logits(rebuild: Rebuild) -> Callable[[Params, Batch], jax.Array]:
    """Compiled once `(params, batch [A, B, T]) -> logits float32 [A, B, T, V]`."""

    def score(params: Params, batch: Batch) -> jax.Array:
        model = rebuild(params)
        return jax.lax.map(lambda micro: model.logits(model.hidden(micro).hidden), batch)

    return jax.jit(score)
