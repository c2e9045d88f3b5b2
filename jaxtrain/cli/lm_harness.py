"""Tasks of lm-evaluation-harness (`pip install 'jaxtrain[lm-eval]'`), answered by a model.

tasks ─ loglikelihood ─> continuations of one context are a tree ─> sums of log-probs
      └ generate_until ─> the local sampler ─> texts
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.api import Model
from jaxtrain.batch import Batch
from jaxtrain.config import SamplingConfig
from jaxtrain.config.load import validate
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.core.losses.topk import likeliest_tokens
from jaxtrain.data.packing.pack import PackedTree, lay_out
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.errors import UserError
from jaxtrain.models.parameters import Params, Rebuild
from jaxtrain.runs.manifest import write_atomically

try:
    from lm_eval.api.model import TemplateLM
except ImportError:  # run_harness says how to get it
    TemplateLM = object

OPTIONS = (
    "num_fewshot",
    "limit",
    "apply_chat_template",
    "fewshot_as_multiturn",
    "system_instruction",
    "gen_kwargs",
    "include_path",
)
RESULTS = "lm_eval.json"
MAX_NEW_TOKENS = 256
"""Of tasks that name no limit, as in the harness's own engines."""
READ_BY_SAMPLER = ("temperature", "top_k", "top_p", "min_p", "seed")

Pair = tuple[Any, list[int], list[int]]
"""What identifies a request in the harness's cache, its context, its continuation."""


class HarnessModel(TemplateLM):  # pyright: ignore[reportGeneralTypeIssues]
    """A model as lm-evaluation-harness asks it."""

    def __init__(self, model: Model):
        super().__init__()
        model.require_next_token()
        self.model, self.tokenizer = model, model.tokenizer

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token that stands before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name in the keys of the harness's cache."""
        return self.model.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokenize a text; one that begins with the first token already gets no second."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as text; without a generation prompt its last message goes on."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(self, requests: list[Pair], **kwargs: Any) -> list[Any]:
        """Return (sum of log-probs, True if all are the most probable tokens) of each
        continuation."""
        limit = self.model.max_len + 1  # the last token is scored, but predicts nothing
        pairs = [fit(context, target, limit) for _, context, target in requests]
        snapshot = self.model.snapshot
        groups = group_by_context(pairs, limit, snapshot.model().follows_trees)
        trees = [grow(pairs, group) for group in groups]
        score = make_score(
            snapshot.roles.rebuild(snapshot.roles.trained), self.model.config.model.logp
        )
        answers: list[Any] = [None] * len(pairs)
        for group, tree, (logp, best) in zip(
            groups, trees, self.model.run_packed(trees, score, 1), strict=True
        ):
            start = len(pairs[group[0]][0])
            for index in group:
                end = start + len(pairs[index][1])
                greedy = bool((best[start:end] == tree.tokens[start:end]).all())
                answers[index] = (float(logp[start:end].sum(dtype=np.float64)), greedy)
                start = end
        for (key, _, _), value in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, value)
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-prob of each whole text, in windows of the model's length."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        sums = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.model.max_len,
                context_len=1,
            )
            pairs: list[Pair] = [(None, *make_disjoint_window(window)) for window in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each context, without its stop text."""
        from lm_eval.models.utils import normalize_gen_kwargs

        texts: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        for indices in groups.values():
            arguments = dict(normalize_gen_kwargs(requests[indices[0]].args[1], MAX_NEW_TOKENS))
            until, count = arguments.pop("until"), arguments.pop("max_gen_toks")
            until = [text for text in until if text]
            arguments.pop("do_sample")
            if unread := [key for key in arguments if key not in READ_BY_SAMPLER]:
                raise UserError(f"--lm-eval: gen_kwargs {unread[0]!r} is not served; remove it")
            room = self.model.max_len - count
            if room < 1:
                raise UserError(
                    f"--lm-eval: answers of {count:,} tokens leave no room for a prompt in"
                    f" {self.model.max_len:,}; set gen_kwargs max_gen_toks"
                )
            prompts = [self.tok_encode(requests[index].args[0])[-room:] for index in indices]
            table = {**arguments, "max_new_tokens": count, "stop": until}
            sampling = validate(SamplingConfig, table, "gen_kwargs")
            completions = self.sampler.generate(prompts, sampling)
            for index, completion in zip(indices, completions, strict=True):
                text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
                for stop in until:
                    text = text.split(stop)[0]
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    @functools.cached_property
    def sampler(self) -> Any:
        """The local sampler with these weights."""
        return self.model.sampler(raw=False)


def fit(context: list[int], target: list[int], limit: int) -> tuple[list[int], list[int]]:
    """Cut a context from the left, so that it has room with its continuation."""
    if len(target) >= limit:
        raise UserError(
            f"--lm-eval: a continuation has {len(target):,} tokens; with a context the model reads"
            f" {limit:,}"
        )
    return context[-(limit - len(target)) :], target


def group_by_context(
    pairs: Sequence[tuple[list[int], list[int]]], limit: int, shares: bool
) -> list[list[int]]:
    """Return indices of pairs that are read together: those of one context, up to `limit` tokens;
    each alone if the model cannot read trees."""
    groups: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for index, (context, target) in enumerate(pairs):
        key = (tuple(context), 0 if shares else index)
        while sizes.get(key, len(context)) + len(target) > limit:
            key = (key[0], key[1] + 1)
        groups.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, len(context)) + len(target)
    return list(groups.values())


def grow(pairs: Sequence[tuple[list[int], list[int]]], group: Sequence[int]) -> PackedTree:
    """Return the tree of a context and its continuations, in their order."""
    context = Node(-1, np.asarray(pairs[group[0]][0], np.int32), {})
    leaves = [Node(0, np.asarray(pairs[index][1], np.int32), {}) for index in group]
    return lay_out(Tree((context, *leaves)))


@functools.lru_cache(maxsize=8)
def make_score(
    rebuild: Rebuild, impl: str
) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """Compiled once `(params, batch [A, B, T]) -> (log-probs float32, most probable ids)`, both
    [A, B, T]."""

    def score(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        model = rebuild(params)

        def read(micro: Batch) -> tuple[jax.Array, jax.Array]:
            best = likeliest_tokens(model, micro, 1).ids[..., 0]
            return token_logp(model, micro, impl).logp, best

        return jax.lax.map(read, batch)

    return jax.jit(score)


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Return {name: value} of words KEY=VALUE; UserError for what the harness is not asked."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if key not in OPTIONS or not equals:
            raise UserError(
                f"--lm-eval-option {word!r} is not understood: write KEY=VALUE, KEY one of"
                f" {', '.join(OPTIONS)}"
            )
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


def run_harness(
    open_model: Callable[[], Model], tasks: Sequence[str], words: Sequence[str], folder: Path
) -> None:
    """Answer tasks; prints the harness's tables and writes lm_eval.json to a folder. The model is
    opened once tasks and options are known to be the harness's."""
    options = parse_options(words)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import handle_non_serializable, make_table
    except ImportError as error:
        raise UserError(
            f"--lm-eval needs lm-evaluation-harness ({error}): pip install 'jaxtrain[lm-eval]'"
        ) from None
    manager = TaskManager(include_path=options.pop("include_path", None))
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise UserError(
            f"--lm-eval: the harness has no task {unknown[0]!r}; `lm-eval ls tasks` lists them, and"
            " --lm-eval-option include_path=FOLDER adds own ones"
        )
    results = simple_evaluate(
        HarnessModel(open_model()), tasks=list(tasks), task_manager=manager, **options
    )
    assert results is not None, "there is one process"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, default=handle_non_serializable)
    write_atomically(folder / RESULTS, text)
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))
    print(f"answers: {folder / RESULTS}")
