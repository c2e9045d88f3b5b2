"""Section eval: held-out losses, and sets of problems that the model answers."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from jaxtrain.config.base import Place, Section
from jaxtrain.config.data import DatasetConfig
from jaxtrain.config.env import EnvConfig
from jaxtrain.config.limits import ROWS, TOKENS
from jaxtrain.config.task import StructuredOutputs
from jaxtrain.text_safety import show

Benchmark = Literal[
    "gsm8k",
    "math500",
    "aime24",
    "aime25",
    "humaneval",
    "mbpp",
    "livecodebench",
    "swe-bench",
    "mt-bench",
    "alpaca",
]


class EvalSetConfig(Section):
    """Set of problems, answered k times each through an environment and judged by rewards."""

    path: Place
    """As a dataset's: file, folder, Hub id or "builtin:calculator"."""
    name: str | None = None
    """What metrics call it. Unset: the file's name."""
    subset: str | None = None
    """Configuration of a Hub dataset with several, such as "main" of openai/gsm8k."""
    split: str | None = None
    """Split, with optional slice. Unset: "test"; of a benchmark always its own."""
    benchmark: Benchmark | None = None
    """Rows are those of this benchmark, in its own columns: `prompt` becomes the text that it is
    usually asked with (of a conversation its first turn), and of a larger set a sample of the usual
    size is asked, or of max_rows. Unset: rows say themselves what is asked."""
    fields: dict[str, str] = {}
    """Renamed columns, wanted = found."""
    options: dict[str, Any] = {}
    """Options of a builtin generator."""
    max_rows: int | None = Field(None, ge=1)
    """Only the first rows."""
    env: EnvConfig | None = None
    """What plays this set, with the keys of section env. Unset: section env itself."""
    rewards: list[str] | None = None
    """Which of the [[rewards]] judge this set's answers, by name. Unset: all; []: none, because the
    environment judges."""
    k: int = Field(1, ge=1, le=ROWS)
    """Answers to each problem: for avg@k and pass@k."""
    threshold: float = 1.0
    """An answer whose reward is at least this solves its problem."""
    temperature: float | None = Field(None, ge=0, le=1000)
    """Unset: sampling.temperature."""
    max_new_tokens: int | None = Field(None, ge=1, le=TOKENS)
    """Unset: sampling.max_new_tokens."""
    structured_outputs: StructuredOutputs | None = None
    """Unset: sampling.structured_outputs; {}: none."""

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or PurePath(self.path.rpartition(":")[2]).stem

    def dataset(self) -> DatasetConfig:
        """The rows, as a dataset section."""
        values = {key: getattr(self, key) for key in ("path", "fields", "options", "max_rows")}
        return DatasetConfig(name=self.subset, split=self.split or "test", **values)


class EvalConfig(Section):
    """Held-out loss and generated answers during training."""

    every: Annotated[int, Field(ge=1)] | Literal["never"] | None = None
    """Steps between evaluations; unset: only at the end; never: not even there."""
    per_epoch: float | None = Field(None, gt=0, le=1e6)
    """Also evaluate so many times in each of run.num_epochs, evenly; 0.5: every second epoch."""
    at_start: bool = False
    """Also evaluate before the first step."""
    patience: int | None = Field(None, ge=1)
    """End the run after so many evaluations in a row in which checkpoint.best_metric was not better
    than its best value before; unset: train to the end."""
    min_delta: float = Field(0.0, ge=0)
    """patience: by how much it must be better to count."""
    max_batches: int | None = Field(None, ge=1)
    """Evaluate at most this many batches of each held-out dataset."""
    sets: list[EvalSetConfig] = []
    """Sets of problems that the model answers k times each, through an environment, judged by the
    rewards: avg@k, pass@k. With rollout.engine vllm its servers answer, else the process itself.
    Every answer goes to samples.jsonl."""
    show: int = Field(3, ge=0, le=1000)
    """How many of the best and how many of the worst answers to each set to print."""

    @field_validator("every", mode="wrap")
    @classmethod
    def check_every(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Replace pydantic's two errors, one for each type, with one sentence."""
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(
                f'must be a whole number of steps, at least 1, or "never"; found {show(value)}'
            ) from None


def find_eval_set_conflicts(config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination around the sections."""
    sets, sampling = config.eval.sets, config.sampling
    for index, eval_set in enumerate(sets):
        unread = ("split", "subset", "options") if eval_set.benchmark else ()
        for key in (key for key in unread if getattr(eval_set, key)):
            yield (
                f"eval.sets.{index}.{key} has no effect while eval.sets.{index}.benchmark is"
                f" {eval_set.benchmark!r}; leave one of them out"
            )
    labels = [eval_set.label for eval_set in sets]
    yield from sampling.structured_outputs.find_conflict("sampling.structured_outputs")
    for index, eval_set in enumerate(sets):
        if eval_set.structured_outputs is not None:
            yield from eval_set.structured_outputs.find_conflict(
                f"eval.sets.{index}.structured_outputs"
            )
        if eval_set.label in labels[:index]:
            yield f"eval.sets: two are called {eval_set.label!r}; set eval.sets.{index}.name"
        temperature = sampling.temperature if eval_set.temperature is None else eval_set.temperature
        if eval_set.k > 1 and temperature == 0:
            yield (
                f"eval.sets.{index}.k is {eval_set.k} but its temperature is 0, so all answers"
                f" would be"
                f" the same; set eval.sets.{index}.temperature above 0, or k to 1"
            )
