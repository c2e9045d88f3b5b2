"""Heads that score what a decoder read, in the place of the one that predicts tokens.

transformers knows two of them, for every decoder alike: `<Name>ForSequenceClassification` has
`score.weight` [n, D], read at the last token of a text (a reward model has n = 1), and
`<Name>ForTokenClassification` has `score.bias` [n] as well, read at any token (a process reward
model has n = 2: wrong, right).

Around a tower for images it has such classes for few families (`KNOWN`); others are named by the
same rule.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe

Per = Literal["sequence", "token"]
SUFFIXES: dict[str, Per] = {
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
}
LANGUAGE, PICTURED = "ForCausalLM", "ForConditionalGeneration"
KNOWN = {
    "Gemma3ForSequenceClassification",
    "Qwen3_5ForSequenceClassification",
    "Qwen3_5ForTokenClassification",
}
"""Classes of transformers 5.24 that score texts with images."""
OTHERWISE = {
    "Gemma3ForSequenceClassification": "Gemma3TextForSequenceClassification",
    "Qwen3_5ForSequenceClassification": "Qwen3_5TextForSequenceClassification",
}
"""What transformers calls those of text alone where the rule's name is a multimodal class."""
BY_RULE = {"GPT2LMHeadModel": "GPT2ForCausalLM"}
"""Language models with names of their own, and what they would be called by the rule."""
CLASSIFIERS = ("falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox")
"""Families whose class for tokens calls its head otherwise in transformers."""
MAX_LABELS = 2**14


@dataclasses.dataclass(frozen=True)
class ScoreHead:
    """A score head: its labels, and whether it scores sequences or tokens."""

    per: Per
    """sequence: a text, at its last token, without a bias. token: each token, with one."""
    labels: tuple[str, ...]
    """What each score is called."""
    drawn: bool = False
    """The weights to start from are a language model's, which has no such head: it is drawn."""

    def to_hf(self, architecture: str, *, pictured: bool = False) -> dict[str, Any]:
        """Keys of the config.json of such a model of a family, by the name of the model that
        writes. pictured: with a tower for images."""
        suffix = next(suffix for suffix, per in SUFFIXES.items() if per == self.per)
        scalar = self.per == "sequence" and len(self.labels) == 1
        architecture = BY_RULE.get(architecture, architecture)
        name = architecture.removesuffix(LANGUAGE).removesuffix(PICTURED) + suffix
        return {
            "architectures": [name if pictured else OTHERWISE.get(name, name)],
            "num_labels": len(self.labels),
            "id2label": {str(index): label for index, label in enumerate(self.labels)},
            "label2id": {label: index for index, label in enumerate(self.labels)},
            # Else vLLM puts a lone score through a sigmoid.
            "problem_type": "regression" if scalar else None,
        }


def split_architecture(name: str) -> tuple[str, Per | None]:
    """(the family's causal model, what its head scores) of an architecture's name; None: tokens are
    predicted."""
    name = next((canonical for canonical, alias in OTHERWISE.items() if alias == name), name)
    for suffix, per in SUFFIXES.items():
        if name.endswith(suffix):
            name = name.removesuffix(suffix) + LANGUAGE
            return next((model for model, rule in BY_RULE.items() if rule == name), name), per
    return name, None


def read_score_head(raw: Mapping[str, Any], per: Per) -> ScoreHead:
    """The head that a config.json describes; UserError for labels that are none."""
    named, count = raw.get("id2label"), raw.get("num_labels")
    if count is not None and not (type(count) is int and 1 <= count <= MAX_LABELS):
        raise UserError(
            f"config.json: num_labels is {describe(count)}; it must be a number from 1 to"
            f" {MAX_LABELS}"
        )
    if named is None:
        # transformers leaves out two labels, its default.
        return ScoreHead(per, name_labels(count or 2))
    if not isinstance(named, Mapping) or not 1 <= len(named) <= MAX_LABELS:
        raise UserError(f"config.json: id2label is {describe(named)}; it must be an object")
    labels = [named.get(str(index)) for index in range(len(named))]
    if not all(isinstance(label, str) for label in labels) or count not in (None, len(labels)):
        raise UserError(
            "config.json: id2label must name a text for each of the numbers from 0, as many as"
            f" num_labels; found {describe(named)}"
        )
    return ScoreHead(per, tuple(map(str, labels)))


def name_labels(count: int) -> tuple[str, ...]:
    """transformers' names for labels that nobody named."""
    return tuple(f"LABEL_{index}" for index in range(count))
