"""Section task of supervised fine-tuning."""

from typing import Literal

from jaxtrain.config.task import TaskSection


class SFTTask(TaskSection):
    """Supervised fine-tuning: next-token negative log-likelihood of the trained tokens."""

    kind: Literal["sft"] = "sft"
    """The training method."""
