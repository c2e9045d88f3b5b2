"""Section task of reward models: scores of answers, or of the steps of an answer."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from jaxtrain.config.limits import TOKENS
from jaxtrain.config.task import TaskSection


class RewardModelTask(TaskSection):
    """A model that scores texts: trained on pairs of answers (Bradley-Terry), or on steps that are
    right or wrong (process reward model)."""

    kind: Literal["reward_model"] = "reward_model"
    """The training method."""
    labels: Literal["pairs", "steps"] = "pairs"
    """What the data say. pairs: which of two answers is better; one score, read at the last token
    of an answer. steps: which steps of an answer are right; two scores, read where a step ends."""
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Pairs: factor of (R_chosen + R_rejected)^2, which keeps scores around 0; 0.01 is usual."""
    share_prompts: bool = True
    """Pairs: compute a prompt once for all its answers; the loss is the same. false, or a model
    whose layers do not follow trees: each answer with a copy of its prompt."""
    step_separator: str = "\n"
    """Steps: text put behind each step, tokenized alone; its last token is where the step is
    scored."""
    train_on_last_step_only: bool = False
    """Steps: only the label of an answer's last step trains. Held-out data keep all labels."""
    max_completion_length: int | None = Field(None, ge=1, le=TOKENS)
    """Steps: tokens of all steps together; what is longer is cut there, before data.too_long."""

    def find_conflicts(self, config: Any) -> Iterator[str]:
        """Yield one sentence for each impossible combination."""
        of = {
            "pairs": ("center_rewards_coefficient", "share_prompts"),
            "steps": ("step_separator", "train_on_last_step_only", "max_completion_length"),
        }
        changed = self.model_dump(exclude_defaults=True)
        for labels, keys in of.items():
            for key in keys if labels != self.labels else ():
                if key in changed:
                    yield (
                        f"task.{key} has no effect with task.labels {self.labels!r}; remove it, or"
                        f" set task.labels to {labels!r}"
                    )
        if not self.step_separator:
            yield "task.step_separator is empty; a step is scored at its last token"
        if self.labels == "pairs" and config.data.too_long == "truncate":
            yield (
                "data.too_long truncate would cut off the end of an answer, where it is scored; set"
                ' it to "drop" or "error"'
            )
        if config.eval.sets:
            yield "eval.sets asks for answers, and a reward model writes none; remove [[eval.sets]]"
