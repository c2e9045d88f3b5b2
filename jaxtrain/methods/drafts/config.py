"""Sections of draft models: the draft that is trained, and where its target's states come from."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from jaxtrain.config.base import RESUMABLE, Place, Section, broken, unread
from jaxtrain.config.limits import ITEMS, ROWS, TOKENS
from jaxtrain.config.model import DTYPE, find_width_conflict
from jaxtrain.config.task import TaskSection


class DraftConfig(Section):
    """The draft model. Sizes that are left out are the target's."""

    path: Place | None = None
    """Draft folder (config.json and safetensors) to go on from; it fixes all sizes below. Unset: a
    new draft."""
    num_layers: int | None = Field(None, ge=1, le=256)
    """Its layers; unset: 5 for dflash, 1 for eagle3."""
    intermediate_size: int | None = Field(None, ge=1, le=2**22)
    """Width of its MLPs."""
    num_attention_heads: int | None = Field(None, ge=1, le=2**14)
    """Query heads."""
    num_key_value_heads: int | None = Field(None, ge=1, le=2**14)
    """Key-value heads."""
    head_dim: int | None = Field(None, ge=2, le=2**14)
    """Dims of a head."""
    attention_bias: bool = False
    """Biases on the four projections of attention."""
    target_layers: list[int] | None = None
    """Layers of the target whose output it reads, from 0, each once. Unset: for dflash as many as
    the draft has layers, spread evenly from 1 to the third last; for eagle3 1, the middle one and
    the fourth last."""
    mask_token_id: int | None = Field(None, ge=0, le=2**24)
    """dflash: token in the place of what is guessed. Unset: the tokenizer's mask token, else the
    first row of the embedding that the tokenizer does not use, else its pad token."""
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    """Which layers see all of the context and which only the last sliding_window tokens of it;
    inside a block a sliding layer is causal. Unset: all see all."""
    sliding_window: int | None = Field(None, ge=1, le=TOKENS)
    """Window of the sliding layers."""
    param_dtype: DTYPE = "float32"
    """Type of the trained weights and the optimizer state."""
    compute_dtype: DTYPE | None = None
    """Type of activations and matrix products; unset: model.compute_dtype."""
    remat: Literal["none", "elementwise", "dots", "save_attention", "full"] = "none"
    """What the draft's backward pass recomputes: see model.remat."""
    scan_layers: bool = True
    """Compile one layer and loop over it, rather than compile every layer."""


SIZES = (
    *("num_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("attention_bias", "target_layers", "mask_token_id", "layer_types", "sliding_window"),
)
"""Keys that a draft folder fixes."""


UNUSED_IN_REFRESH = {
    "target": "the target is the policy",
    "min_loss_tokens": "every answer counts",
    "draft_vocab_size": "rollout.draft fixes it",
    "vocab_rows": "rollout.draft has its vocabulary",
}
"""Keys that have no effect in rollout.draft_refresh.task, and why."""


class TargetConfig(Section):
    """The source of the target's states."""

    source: Annotated[Literal["step", "ahead", "server", "disk"], RESUMABLE] = "step"
    """step: the target runs in the training step itself. ahead: on devices of its own, a few
    batches before they are trained. server: likewise, in processes of `jaxtrain capture`, here or
    on other hosts. disk: `jaxtrain capture` wrote them to path; no layer of the target is run."""
    devices: Annotated[int, RESUMABLE] = Field(1, ge=1, le=ROWS)
    """ahead: devices of this process, the last ones, that run the target; section parallel is about
    the others. They split its weights and the rows."""
    tensor: Annotated[int, RESUMABLE] = Field(1, ge=1, le=ROWS)
    """ahead: of these devices, how many split each layer."""
    expert: Annotated[int, RESUMABLE] = Field(1, ge=1, le=ROWS)
    """ahead: of these devices, how many split the experts of a mixture."""
    queue: Annotated[int, RESUMABLE] = Field(2, ge=1, le=1024)
    """ahead, server and disk: batches whose states wait, or are being made, on the devices that
    train; two more are in training at most."""
    servers: Annotated[list[str], RESUMABLE] = []
    """server: URLs of `jaxtrain capture` with this config, ["http://127.0.0.1:8100"]. They share
    the rows of each batch."""
    api_key: Annotated[str | None, RESUMABLE] = None
    """server: sent with every request: "$NAME" is that environment variable. Unset: that of
    JAXTRAIN_API_KEY, where it is set."""
    path: Annotated[Place | None, RESUMABLE] = None
    """disk: the folder of the states."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """Store the target's matrices in fewer bits, as adapter.quantize does; its states are those of
    the rounded weights."""


class DraftTask(TaskSection):
    """The keys that all methods that train a draft share."""

    draft: DraftConfig = DraftConfig()
    """The draft model, which is trained."""
    target: TargetConfig = TargetConfig()
    """Where the target's states come from."""
    min_loss_tokens: int = Field(0, ge=0, le=TOKENS)
    """Samples with fewer trained tokens are left out, and counted."""

    @override
    def find_conflicts(self, config: Any) -> Iterator[str]:
        yield from find_draft_conflicts(config)
        yield from self.find_section_conflicts()

    def find_section_conflicts(self) -> Iterator[str]:
        """Yield one sentence for each impossible combination of keys of this section."""
        return iter(())

    def find_refresh_conflicts(self, config: Any) -> Iterator[str]:
        """Yield one sentence for each key that does not go into rollout.draft_refresh.task."""
        changed = self.model_dump(exclude_defaults=True)
        for name, reason in UNUSED_IN_REFRESH.items():
            if name in changed:
                yield f"task.{name} has no effect, for {reason}; remove it"
        for name in ("path", *SIZES):
            if name in changed.get("draft", {}):
                yield f"task.draft.{name}: the draft is that of rollout.draft; remove it"
        yield from self.find_section_conflicts()
        yield from find_width_conflicts(self, config)

    @override
    def started_from(self, config: Any) -> str:
        target = super().started_from(config)
        return f"{self.draft.path or 'random weights'} as a draft of {target}"


class DFlashTask(DraftTask):
    """DFlash: a draft that guesses all tokens of a block at once, from states of the target."""

    kind: Literal["dflash"] = "dflash"
    """The training method."""
    block_size: int | None = Field(None, ge=2, le=256)
    """Tokens of a block: the one that is known and those that are guessed. Unset: 16, or as many as
    the draft folder has that training goes on from."""
    num_anchors: int = Field(512, ge=1, le=TOKENS)
    """Most blocks of a packed row; they begin at trained tokens, drawn anew in every step."""
    decay: float | None = Field(7.0, gt=0, le=1e6)
    """Weight of the j-th guess: exp(-(j - 1) / decay). Unset: all alike."""
    weighting: Literal[
        "decay", "dpace", "cumulative-confidence-only", "continuation-value-only"
    ] = "decay"
    """What else weighs a guess. decay: nothing. The others go by the draft's own probabilities of
    the right tokens, smoothed (alpha), and do without decay: cumulative-confidence-only: their
    product up to the guess, which is how likely it is to count; dpace: the sum of these products
    from the guess on; continuation-value-only: that sum divided by the product."""
    alpha: float = Field(0.5, ge=0, le=1)
    """Weightings by confidence: share of 1 in a smoothed probability."""
    min_loss_tokens: int = Field(32, ge=0, le=TOKENS)
    """Samples with fewer trained tokens are left out, and counted."""

    @override
    def find_section_conflicts(self) -> Iterator[str]:
        rules = (
            unread("task.alpha", "task.weighting", lambda weighting: weighting != "decay"),
            unread("task.decay", "task.weighting", lambda weighting: weighting == "decay"),
        )
        return iter(broken(rules, SimpleNamespace(task=self)))


class Eagle3Task(DraftTask):
    """Eagle3: a draft of one layer that guesses token by token, trained on its own states."""

    kind: Literal["eagle3"] = "eagle3"
    """The training method."""
    length: int | None = Field(None, ge=1, le=64)
    """Steps of the unroll in training, and tokens that the draft guesses. Unset: 7, or as many as
    the draft folder has that training goes on from."""
    decay: float = Field(0.8, gt=0, le=1)
    """Factor of the loss of each further step."""
    draft_vocab_size: int | None = Field(None, ge=1, le=2**24)
    """Tokens that the draft can say, the most frequent ones among the trained tokens of the data.
    Unset: 32000, or all of a smaller vocabulary."""
    vocab_rows: int = Field(200_000, ge=1, le=ITEMS)
    """Rows of each dataset that are counted for it, drawn by run.seed; of a stream the first."""
    loss: Literal["soft", "alpha", "lambda"] = "soft"
    """What a guess is held to, p being the target's distribution over what the draft can say and q
    the draft's. soft: the cross-entropy -sum p log q. The others (LK losses) go by a = sum min(p,
    q), the chance that a sampled guess is accepted: alpha: -log a; lambda: k KL(p | q) + (1 - k)
    (1 - a) with k = kl_scale x exp(-kl_decay x a)."""
    kl_scale: float = Field(1.0, ge=0, le=1)
    """loss lambda: share of the KL divergence where nothing is accepted yet."""
    kl_decay: float = Field(3.0, ge=0, le=1e3)
    """loss lambda: how fast that share falls as more is accepted."""

    @override
    def find_section_conflicts(self) -> Iterator[str]:
        draft = self.draft
        if draft.num_layers not in (None, 1):
            yield f"task.draft.num_layers {draft.num_layers}: an Eagle3 draft has one; remove it"
        for key in ("attention_bias", "mask_token_id", "layer_types", "sliding_window"):
            if getattr(draft, key):
                yield f"task.draft.{key} has no meaning for an Eagle3 draft; remove it"
        changed = self.model_dump(exclude_defaults=True)
        if draft.path is not None and "draft_vocab_size" in changed:
            yield (f"task.draft_vocab_size is fixed by task.draft.path {draft.path!r}; remove it")
        rule = unread("task.kl_scale task.kl_decay", "task.loss", lambda loss: loss == "lambda")
        yield from rule(SimpleNamespace(task=self))


def find_draft_conflicts(config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination around a task that trains a draft."""
    draft, model, adapter = config.task.draft, config.model, config.adapter
    changed = draft.model_dump(exclude_defaults=True)
    if draft.path is not None and (fixed := [key for key in SIZES if key in changed]):
        yield f"task.draft.{fixed[0]} is fixed by task.draft.path {draft.path!r}; remove it"
    if draft.sliding_window and "sliding_attention" not in (draft.layer_types or []):
        yield (
            "task.draft.sliding_window has no effect without a sliding_attention layer in"
            " task.draft.layer_types; add one or remove it"
        )
    if "sliding_attention" in (draft.layer_types or []) and not draft.sliding_window:
        yield "task.draft.layer_types has sliding_attention; set task.draft.sliding_window"
    yield from find_target_conflicts(config.task.target, adapter)
    if adapter.kind != "none" and adapter.path is None:
        yield (
            f"adapter.kind {adapter.kind!r} without adapter.path: the target of a draft is not"
            " trained; name the adapter that it has, or remove the section"
        )
    if balancing := model.find_balancing():
        yield f"{balancing} trains a router, and the target of a draft is not trained; remove it"
    if config.eval.sets:
        yield (
            "eval.sets asks for answers, which a draft alone does not write; remove [[eval.sets]]"
            " and measure with `jaxtrain speculate`"
        )
    yield from find_width_conflicts(config.task, config)


def find_width_conflicts(task: DraftTask, config: Any) -> Iterator[str]:
    """Yield one sentence where a draft would compute in more bits than its weights have."""
    compute = task.draft.compute_dtype or config.model.compute_dtype
    yield from find_width_conflict("task.draft", compute, task.draft.param_dtype)


def find_target_conflicts(target: TargetConfig, adapter: Any) -> Iterator[str]:
    """Yield one sentence for each key of the target that is missing or has no effect."""
    readers = {
        **dict.fromkeys(("devices", "tensor", "expert"), ("ahead",)),
        "queue": ("ahead", "server", "disk"),
        "servers": ("server",),
        "api_key": ("server",),
        "path": ("disk",),
    }
    for key in target.model_dump(exclude_defaults=True):
        if target.source not in readers.get(key, (target.source,)):
            sources = " or ".join(f'"{source}"' for source in readers[key])
            yield (
                f'task.target.{key} has no effect with task.target.source "{target.source}"; set'
                f" source to {sources}, or remove it"
            )
    if target.source == "disk" and target.path is None:
        yield 'task.target.source "disk" needs task.target.path, the folder of the states'
    for url in target.servers:
        if not url.startswith(("http://", "https://")):
            yield f"task.target.servers: {url!r} is no URL; write http://host:port"
    if target.devices % (target.tensor * target.expert):
        yield (
            f"task.target.devices {target.devices} is not a multiple of tensor x expert"
            f" {target.tensor} x {target.expert}; change one of them"
        )
    if "none" not in (target.quantize, adapter.quantize):
        yield "task.target.quantize and adapter.quantize both store the target; remove one"
    if target.quantize != "none" and adapter.kind == "dora":
        yield "task.target.quantize: dora reads the norms of whole matrices; merge the adapter"
