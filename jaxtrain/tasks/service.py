"""The producer of a method in a rollout service's process: prompts, slots, queue and filters; who
plays is the service's crew."""

from collections.abc import Callable
from typing import Any

from jaxtrain.config import validate_config
from jaxtrain.rollout.cluster.crew import Crew, FarPlayer
from jaxtrain.rollout.cluster.open import enter
from jaxtrain.rollout.open import seed_sampling
from jaxtrain.rollout.producer import Producer
from jaxtrain.tasks import find_method
from jaxtrain.tasks.prompts import PromptData, SecondTries


def open_producer(
    settings: dict[str, Any], crew: Crew, facts: Any, say: Callable[[str], None]
) -> Producer:
    """What `RolloutService.attach` opens; UserError, as where the data are not on this machine."""
    enter(settings["folder"])
    config = validate_config(settings["config"], "the config of the run")
    data = find_method(config).open_data(config, settings["tokenizer"])
    assert isinstance(data, PromptData), "it is a method of drawn answers"
    plan, rollout = data.plan, config.rollout
    player = FarPlayer(
        crew,
        seed_sampling(config),
        data.make_rules(),
        data.make_failures(say),
        given=plan.given,
        judged=plan.judged,
        truths=plan.truths,
    )
    second_tries = SecondTries(rollout.reroll_start, rollout.reroll_max_groups)
    second_tries.source = facts
    return data.make_producer(data.make_prompts(), player, second_tries, say)
