"""Section task for preferences: the loss by name, its numbers, and the reference beside it."""

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import Field
from typing_extensions import override

from jaxtrain.config.adapter import find_adapter_off_conflicts
from jaxtrain.config.base import broken
from jaxtrain.config.data import PACKING_RULES, find_stream_conflicts
from jaxtrain.config.limits import ITEMS, TOKENS
from jaxtrain.config.task import TaskSection

LossName = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
    "sft",
    "kto",
    "apo_zero_unpaired",
    "orpo",
    "cpo",
    "cpo_hinge",
    "cpo_ipo",
    "simpo",
    "alphapo",
]

COMMON: dict[str, Any] = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "simpo_gamma": 0.0,
    "alphapo_alpha": 0.0,
    "cpo_alpha": 0.0,
    "nll_on": "answer",
}
PAPERS: dict[str, dict[str, Any]] = {
    "exo_pair": {"label_smoothing": 1e-3},
    "sft": {"cpo_alpha": 1.0},
    "orpo": {"cpo_alpha": 1.0, "nll_on": "sequence"},
    **dict.fromkeys(("cpo", "cpo_hinge", "cpo_ipo"), {"cpo_alpha": 1.0}),
    "simpo": {"beta": 2.0, "simpo_gamma": 0.5},
    "alphapo": {"beta": 2.0, "simpo_gamma": 0.5, "alphapo_alpha": 0.25},
}
"""What a loss sets otherwise than COMMON; a key given in the config replaces both."""

OF_LABELS = {"kto", "apo_zero_unpaired"}
WITHOUT_REFERENCE = {"sft", "orpo", "cpo", "cpo_hinge", "cpo_ipo", "simpo", "alphapo"}
SMOOTHED = {
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "exo_pair",
    "aot",
    "aot_unpaired",
    "cpo",
    "simpo",
    "alphapo",
}
"""Losses in which a share of wrong labels means something."""
SHAPED = {"sigmoid", "hinge", "ipo", "robust", "exo_pair", "discopop", "sigmoid_norm"}
"""Losses of an f-divergence's scores: those of a difference between two answers. A score has an
unknown term of the prompt, which cancels in the difference alone (2309.16240)."""
RANKED = {"aot", "aot_unpaired"}
MARGINAL = {"simpo", "alphapo"}


class PreferenceTask(TaskSection):
    """Preference losses: answers of which one is better (DPO and its family, ORPO, CPO, SimPO), or
    each of which is good or bad (KTO)."""

    kind: Literal["preference"] = "preference"
    """The training method."""
    loss: LossName | list[LossName] = "sigmoid"
    """The loss: sigmoid is DPO. Several are added up. docs/preferences.md says which to take."""
    loss_weights: list[float] = []
    """Factor of each loss; empty: 1 each."""
    beta: float | None = Field(None, gt=0)
    """How fast a loss saturates with the log-ratio; orpo: weight of its odds-ratio term. Unset: 2.0
    for simpo and alphapo, else 0.1."""
    label_smoothing: float | None = Field(None, ge=0, lt=0.5)
    """Share of pairs that are taken to be the wrong way round. Unset: 0, 0.001 for exo_pair."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The divergence that the reference is kept by; reverse_kl is DPO's."""
    f_alpha: float = 0.5
    """f_divergence alpha: its alpha; 1 is reverse_kl."""
    ld_alpha: float | None = Field(None, ge=0, le=1)
    """LD-DPO: share of an answer's tokens behind as many as the other answer of its pair has."""
    use_weighting: bool = False
    """WPO: weigh pairs by how likely the policy itself is to write them."""
    discopop_tau: float = Field(0.05, gt=0)
    """discopop: temperature of its gate."""
    simpo_gamma: float | None = Field(None, ge=0)
    """simpo, alphapo: margin that the chosen answer shall have, inside the sigmoid. Unset: 0.5."""
    alphapo_alpha: float | None = None
    """alphapo, cpo and simpo: shape of the reward, (1 - p^-alpha) / alpha; 0 is the log-prob.
    Unset: 0.25 for alphapo, else 0."""
    cpo_alpha: float | None = Field(None, ge=0)
    """Weight of the chosen answers' negative log-likelihood beside the comparison. Unset: 1 for
    cpo, cpo_hinge, cpo_ipo, orpo and sft, else 0."""
    nll_on: Literal["answer", "sequence"] | None = None
    """What that likelihood is of: the chosen answer's trained tokens, or all tokens of prompt and
    chosen answer. Unset: sequence for orpo (as TRL), else answer."""
    desirable_weight: float = Field(1.0, gt=0)
    """kto, apo_zero_unpaired: weight of answers with a good label."""
    undesirable_weight: float = Field(1.0, gt=0)
    """The same of answers with a bad one."""
    average: Literal["pairs", "prompts"] = "pairs"
    """What counts as one in the loss: every pair (answer with a label), or every prompt with all of
    its pairs."""
    reference: Literal["auto", "adapter_off", "frozen", "mixed", "precomputed", "none"] = "auto"
    """adapter_off: the model without its adapter. frozen: a copy of the starting weights. mixed: a
    copy that follows the policy (TR-DPO). precomputed: the starting weights' log-probs of all data,
    computed once and kept in data.cache_dir. none: as if it gave every answer probability 1. auto:
    none where no loss needs one, adapter_off with an adapter, else frozen."""
    reference_every: int = Field(512, ge=1)
    """mixed: steps between two mixings."""
    reference_alpha: float = Field(0.6, ge=0, le=1)
    """mixed: share of the policy in a mixing."""
    share_prompts: bool = True
    """Compute the prompt of a pair once, its answers as branches of a tree; false: flat rows."""
    max_packed_tokens: int | None = Field(None, ge=8, le=TOKENS)
    """Tokens of a packed row, and so of a prompt with all its answers; data.sequence_len limits a
    prompt with one of them. Unset: twice data.sequence_len, which holds any pair."""
    units_per_step: int | None = Field(None, ge=1, le=ITEMS)
    """Prompts of an optimizer step; the number of microsteps follows. Unset: as many as fill the
    rows."""

    @property
    def losses(self) -> list[tuple[str, float]]:
        """(name, weight) of each loss."""
        names = [self.loss] if isinstance(self.loss, str) else self.loss
        weights = self.loss_weights or [1.0] * len(names)
        return list(zip(names, weights, strict=True))

    @property
    def names(self) -> list[str]:
        """The losses."""
        return [self.loss] if isinstance(self.loss, str) else list(self.loss)

    @property
    def of_labels(self) -> bool:
        """Return whether single answers are judged, not pairs."""
        return bool(OF_LABELS & set(self.names))

    @property
    def needs_reference(self) -> bool:
        """Return whether any loss compares with a reference."""
        return not set(self.names) <= WITHOUT_REFERENCE

    @property
    def nll_weight(self) -> float:
        """Factor of the chosen answers' likelihood in the loss."""
        nll_losses = sum(
            weight * PAPERS.get(name, {}).get("cpo_alpha", 0.0)
            for name, weight in self.losses
            if name == "sft" or self.cpo_alpha is None
        )
        return nll_losses + (self.cpo_alpha or 0.0)

    def resolved(self, name: str) -> Any:
        """A key's value, the loss's own where the config leaves it unset."""
        setting = getattr(self, name)
        if setting is not None:
            return setting
        named = [loss for loss in self.names if loss != "sft"] or self.names
        return PAPERS.get(named[0], {}).get(name, COMMON[name])

    @override
    def find_conflicts(self, config: Any) -> Iterator[str]:
        return find_preference_conflicts(self, config)


def find_preference_conflicts(task: PreferenceTask, config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination around task.kind preference."""
    names = task.names
    if not names:
        yield 'task.loss is empty; name one, such as "sigmoid"'
        return
    if len(set(names)) < len(names):
        yield "task.loss names a loss twice; name each once, with its weight in task.loss_weights"
    if task.loss_weights and len(task.loss_weights) != len(names):
        yield (
            f"task.loss_weights has {len(task.loss_weights)} numbers for {len(names)} losses; give"
            " one a loss"
        )
        return
    yield from find_mixture_conflicts(task)
    yield from find_number_conflicts(task)
    yield from find_reference_conflicts(task, config)
    yield from broken(PACKING_RULES, config)


def find_mixture_conflicts(task: PreferenceTask) -> Iterator[str]:
    """Yield one sentence for losses that cannot be added up, or have no numbers in common."""
    names = set(task.names)
    if names & OF_LABELS and names - OF_LABELS:
        yield (
            f"task.loss {', '.join(sorted(names & OF_LABELS))} judges single answers,"
            f" {', '.join(sorted(names - OF_LABELS))} compares two; take losses of one kind"
        )
    if len(names & {"orpo", "sft"}) == 2 or (
        "orpo" in names and any(name.startswith("cpo") for name in names)
    ):
        yield (
            "task.loss orpo has a likelihood of its own; take it without sft and cpo, and set"
            " task.nll_on and task.cpo_alpha"
        )
    for key in ("beta", "label_smoothing", "simpo_gamma", "alphapo_alpha"):
        defaults = {
            PAPERS.get(loss, {}).get(key, COMMON[key]) for loss in task.names if loss != "sft"
        }
        if getattr(task, key) is None and len(defaults) > 1:
            yield (
                f"task.{key} is {' or '.join(map(str, sorted(defaults)))} by the losses'"
                f" papers, and all losses of a run share it; set task.{key}"
            )
    if task.average == "prompts" and names & RANKED:
        yield (
            f"task.loss {', '.join(sorted(names & RANKED))} ranks all pairs of a step, which then"
            ' count alike; set task.average to "pairs"'
        )


def find_number_conflicts(task: PreferenceTask) -> Iterator[str]:
    """Yield one sentence for each number that a loss has no use for."""
    names = set(task.names)

    def unread(key: str, readers: set[str]) -> Iterator[str]:
        # sft is a likelihood beside others, whose numbers it does not share.
        for name in sorted(names - readers - ({"sft"} if names != {"sft"} else set())):
            yield (
                f"task.{key} has no meaning in task.loss {name}; remove it, or take one of"
                f" {', '.join(sorted(readers))}"
            )

    if task.label_smoothing:
        yield from unread("label_smoothing", SMOOTHED)
    if "exo_pair" in names and task.label_smoothing == 0:
        yield "task.label_smoothing 0 has no logarithm, which task.loss exo_pair takes; set 0.001"
    if task.f_divergence != "reverse_kl" and (task.f_divergence, task.f_alpha) != ("alpha", 1):
        yield from unread("f_divergence", SHAPED)
    if task.f_divergence != "alpha" and task.f_alpha != 0.5:
        yield (
            f"task.f_alpha {task.f_alpha} has no meaning in task.f_divergence"
            f' "{task.f_divergence}"; remove it, or set f_divergence to "alpha"'
        )
    if task.discopop_tau != 0.05 and "discopop" not in names:
        yield from unread("discopop_tau", {"discopop"})
    if task.simpo_gamma:
        yield from unread("simpo_gamma", MARGINAL)
    if task.alphapo_alpha:
        yield from unread("alphapo_alpha", WITHOUT_REFERENCE - {"sft", "orpo"})
    if names == {"sft"} and (task.ld_alpha is not None or task.use_weighting):
        key = "use_weighting" if task.ld_alpha is None else "ld_alpha"
        yield from unread(key, set(get_args(LossName)) - {"sft"} - OF_LABELS - RANKED)
    if task.ld_alpha is not None and names & OF_LABELS:
        yield "task.ld_alpha compares the lengths of two answers; remove it for losses of labels"
    if task.use_weighting and names & (RANKED | OF_LABELS):
        yield (
            "task.use_weighting weighs pairs, which task.loss"
            f" {', '.join(sorted(names & (RANKED | OF_LABELS)))} does not train as such; remove it"
        )
    if task.of_labels and task.nll_weight:
        yield "task.cpo_alpha is a likelihood of chosen answers, which labels have not; remove it"
    weights = {task.desirable_weight, task.undesirable_weight}
    if not task.of_labels and weights != {1.0}:
        yield (
            "task.desirable_weight and task.undesirable_weight are for single answers with labels;"
            ' remove them, or set task.loss to "kto"'
        )
    if task.nll_on and not task.nll_weight:
        yield "task.nll_on has no effect while task.cpo_alpha is 0; remove it"


def find_reference_conflicts(task: PreferenceTask, config: Any) -> Iterator[str]:
    """Yield one sentence for each reference that the run cannot have."""
    kind = task.reference
    if not task.needs_reference and kind not in ("auto", "none"):
        yield (
            f"task.reference {kind} has no use: task.loss {', '.join(task.names)} needs no"
            ' reference; set it to "auto"'
        )
    if kind == "none" and "kto" in task.names:
        yield 'task.loss kto is a distance from a reference; set task.reference to "auto"'
    if kind == "precomputed" and "kto" in task.names:
        yield (
            "task.loss kto asks the reference about answers behind other prompts, which are drawn"
            ' step by step; set task.reference to "auto", or task.loss to "apo_zero_unpaired"'
        )
    yield from find_adapter_off_conflicts(kind, config.adapter)
    if kind == "precomputed":
        yield from find_stream_conflicts(config, "task.reference precomputed needs all rows")
