"""Section eval: held-out losses, and sets of problems that the model answers."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from jaxtrain.config.base import Place, Section
from jaxtrain.config.data import DatasetConfig
from jaxtrain.config.env import EnvConfig
from jaxtrain.config.limits import ROWS, TOKENS
from jaxtrain.config.rewards import RewardConfig
from jaxtrain.config.task import StructuredOutputs
from jaxtrain.text_safety import show

Benchmark = Literal[
    "gsm8k",
    "math500",
    "aime24",
    "aime25",
    "amc23",
    "minerva",
    "gpqa",
    "mmlu_pro",
    "ifeval",
    "humaneval",
    "mbpp",
    "livecodebench",
    "swe-bench",
    "mt-bench",
    "alpaca",
]

MATH = [RewardConfig(function="math")]
GRADERS: dict[str, list[RewardConfig]] = {
    **dict.fromkeys(("gsm8k", "math500", "aime24", "aime25", "amc23", "minerva"), MATH),
    "gpqa": [RewardConfig(function="choice")],
    "mmlu_pro": [RewardConfig(function="choice")],
    "ifeval": [
        RewardConfig(
            function="ifeval",
            name=f"{level}_{'loose' if loose else 'strict'}",
            weight=float(level == "prompt" and not loose),
            options={"level": level, "loose": loose},
        )
        for level in ("prompt", "instruction")
        for loose in (False, True)
    ],
}
"""Functions that judge the answers to a benchmark; the others have none."""


class EvalSetConfig(Section):
    """Set of problems, answered k times each through an environment and judged by rewards."""

    path: Place | None = None
    """As a dataset's: file, folder, Hub id or "builtin:calculator". Unset: of a benchmark its
    dataset on the Hub."""
    name: str | None = None
    """What metrics call it. Unset: the benchmark, else the file's name."""
    subset: str | None = None
    """Configuration of a Hub dataset with several, such as "main" of openai/gsm8k."""
    split: str | None = None
    """Split, with optional slice. Unset: "test"; of a benchmark always its own."""
    benchmark: Benchmark | None = None
    """Rows are those of this benchmark, in its own columns: `prompt` becomes the text that it is
    usually asked with (of a conversation its first turn), `answer` what the benchmark's own grader
    reads, and that grader alone judges unless `rewards` names others. All rows are asked, or a
    sample of max_rows. Unset: rows say themselves what is asked."""
    examples: Place | None = None
    """Of benchmark mmlu_pro: file, folder or Hub id of its validation split, of which five solved
    questions of the same category go before each. Unset: that of its Hub dataset; none where `path`
    names files."""
    fields: dict[str, str] = {}
    """Renamed columns, wanted = found."""
    options: dict[str, Any] = {}
    """Options of a builtin generator."""
    max_rows: int | None = Field(None, ge=1)
    """Only the first rows."""
    env: EnvConfig | None = None
    """What plays this set, with the keys of section env. Unset: section env itself."""
    rewards: list[str] | None = None
    """Which of the [[rewards]] judge this set's answers, by name. Unset: the benchmark's grader, or
    all; []: none, because the environment judges."""
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
        return self.name or self.benchmark or PurePath(self.source.rpartition(":")[2]).stem

    @property
    def source(self) -> str:
        """Path of the rows, or name of the benchmark that has one of its own."""
        return self.path or self.benchmark or ""

    @property
    def graders(self) -> list[RewardConfig]:
        """The benchmark's own judges; empty if [[rewards]] or the environment judge."""
        return GRADERS.get(self.benchmark or "", []) if self.rewards is None else []

    @model_validator(mode="after")
    def check_source(self) -> "EvalSetConfig":
        """Refuse a set without rows, and examples that nothing reads."""
        if self.path is None and self.benchmark is None:
            raise ValueError(
                "an eval set needs rows: set path to a file, a folder or a Hub id, or benchmark"
            )
        if self.examples is not None and self.benchmark != "mmlu_pro":
            raise ValueError('examples has no effect unless benchmark is "mmlu_pro"; remove it')
        return self

    def dataset(self) -> DatasetConfig:
        """The rows, as a dataset section."""
        values = {key: getattr(self, key) for key in ("fields", "options", "max_rows")}
        split = self.split or "test"
        return DatasetConfig(path=self.source, name=self.subset, split=split, **values)


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
