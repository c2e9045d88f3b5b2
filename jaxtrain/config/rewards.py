"""Sections rewards: the functions that judge what the policy wrote."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from jaxtrain.config.base import RESUMABLE, Place, Section
from jaxtrain.config.limits import SECONDS
from jaxtrain.config.model import ModelConfig

SILENT = ("single_turn", "tools", "dialogue")
"""Environments that give no rewards themselves."""


class RewardConfig(Section):
    """Reward function; a completion's reward is the weighted sum of all of them."""

    function: Place | None = None
    """A built-in (math, choice, ifeval, exact_match, format, regex, length, json_schema,
    python_tests, vllm_reward), an entry point's name, "package.module:function" or
    "file.py:function". It is called as TRL calls one, with `prompts`, `completions` and the columns
    of the row, and returns a number or None each."""
    model: ModelConfig | None = None
    """Instead of a function: a reward model beside the policy on the devices that train, named by
    the keys of section model (path, compute_dtype, ...). It judges each answer at its last token; a
    process reward model each turn, which then counts as that turn's reward."""
    name: str | None = None
    """What metrics call it. Unset: the function's own name."""
    policy: str | None = None
    """Of several trained policies (section policies) the one whose answers it judges; unset: all.
    """
    weight: float = 1.0
    """Factor in the sum; 0 only reports it."""
    timeout: Annotated[float, RESUMABLE] = Field(30.0, gt=0, le=SECONDS)
    """Seconds for one group of completions; then its process is killed, and the group is judged
    again, at most rollout.retries times (an evaluation leaves the reward out)."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the function."""

    @property
    def label(self) -> str:
        """Name in metrics."""
        function = self.function or "model"
        return self.name or function.rsplit(":", 1)[-1].rsplit(".", 1)[-1]


def find_reward_conflicts(config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination of the sections, and of what they
    judge."""
    labels = [reward.label for reward in config.rewards]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            yield f"rewards.{index}: two rewards are called {label!r}; set rewards.{index}.name"
    draws = "rewards" in config.task.reads
    yield from find_model_conflicts(config, draws)
    judged = [(f"eval.sets.{index}", entry) for index, entry in enumerate(config.eval.sets)]
    for index, dataset in enumerate(config.data.datasets):
        key = f"data.datasets.{index}"
        if draws:
            judged.append((key, dataset))
        yield from find_unread(key, dataset, "" if draws else ' while task.kind is not "rl"')
    for index, dataset in enumerate(config.data.eval_datasets):
        yield from find_unread(f"data.eval_datasets.{index}", dataset, "; use [[eval.sets]]")
    functions = [reward.label for reward in config.rewards if reward.model is None]
    for key, entry in judged:
        named = functions if key.startswith("eval") else labels
        judges = named if entry.rewards is None else entry.rewards
        for name in judges:
            if name not in named:
                reward_names = ", ".join(named) or "none"
                yield (
                    f"{key}.rewards: there is no reward {name!r}; the [[rewards]] are:"
                    f" {reward_names}"
                )
        needed = key.startswith("eval") or not config.task.rewards_itself
        judges = getattr(entry, "graders", None) or judges
        if needed and (entry.env or config.env).kind in SILENT and not judges:
            yield (
                f"{key}: nothing judges the answers; add a [[rewards]] table with a function, or"
                f" set {key}.env.kind (env.kind for all) to an environment that gives rewards:"
                ' "calculator", or a custom one'
            )
    for index, label in enumerate(labels if judged else []):
        if all(entry.rewards is not None and label not in entry.rewards for _, entry in judged):
            yield f"rewards.{index} ({label}) judges nothing; no dataset and no set names it"


def find_model_conflicts(config: Any, draws: bool) -> Iterator[str]:
    """Yield one sentence for each reward that is neither a function nor a model, or that cannot
    be."""
    for index, reward in enumerate(config.rewards):
        key = f"rewards.{index}"
        if (reward.function is None) == (reward.model is None):
            set_keys = "neither is" if reward.model is None else "both are"
            yield f"{key}: set either function or model; {set_keys} set"
        trained = [name for name, policy in config.policies.items() if policy.trained]
        if reward.policy is not None and reward.policy not in trained:
            yield (
                f"{key}.policy {reward.policy!r} is no trained policy; section policies trains:"
                f" {', '.join(trained) or 'none'}"
            )
        if reward.model is None:
            continue
        if reward.options:
            yield f"{key}.options are for a function; set keys of {key}.model"
        if not reward.model.path or reward.model.init == "random":
            yield f"{key}.model needs a path with the weights of a reward model"
        if not draws:
            yield (
                f"{key}.model judges rounds of task.kind"
                ' "rl" alone; for [[eval.sets]] use a function, such as vllm_reward'
            )
        if config.rollout.replay_size:
            yield (
                f"rollout.replay_size keeps answers by rewards that are known when they are drawn;"
                f" set it to 0 with {key}.model"
            )
        for number, dataset in enumerate(config.data.datasets):
            if dataset.rewards is not None:
                yield (
                    f"data.datasets.{number}.rewards chooses functions, but {key}.model judges all"
                    " answers; remove one of the two"
                )


def find_unread(key: str, dataset: Any, why: str) -> Iterator[str]:
    """Yield one sentence for each key of a dataset that only sampling reads, where nothing is
    sampled."""
    for name in ("env", "rewards"):
        if why and getattr(dataset, name) is not None:
            yield f"{key}.{name} has no effect{why}; remove it"
