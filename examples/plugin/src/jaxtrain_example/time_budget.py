"""observers.N.kind = "time_budget": ends a run, saved and exported, after minutes of training."""

from pydantic import Field

from jaxtrain.config.base import Section


class Options(Section):
    """Checked before anything is trained; a typo is answered with the right name."""

    minutes: float = Field(60.0, gt=0)
    """Of all attempts together."""


class TimeBudget:
    """Adds up step_seconds, which a resumed run finds in metrics.jsonl."""

    Section = Options

    def __init__(self, options):
        self.left = 60 * options.minutes

    def start(self, run):
        """Before the first step; `run.earlier()` are the lines of earlier attempts."""
        self.left -= sum(line.get("step_seconds") or 0.0 for line in run.earlier())

    def step(self, step, values):
        """A verdict: None, "save", "evaluate" or "stop"."""
        self.left -= values.get("step_seconds", 0.0)
        return "stop" if self.left <= 0 else None
