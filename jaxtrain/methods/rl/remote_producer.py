"""The producer of a method in a rollout service's process: prompts, slots, queue and filters; who
plays is the service's crew."""

from collections.abc import Callable
from typing import Any

from jaxtrain.config import validate_config
from jaxtrain.generation.engines import seed_sampling
from jaxtrain.generation.producer import Producer
from jaxtrain.generation.ray.factory import enter
from jaxtrain.generation.ray.worker_pool import RemotePlayer, RolloutWorkers
from jaxtrain.methods.registry import find_method
from jaxtrain.methods.rl.prompt_data import PromptData, SecondTries


def open_producer(
    settings: dict[str, Any], crew: RolloutWorkers, facts: Any, log: Callable[[str], None]
) -> Producer:
    """What `RolloutService.attach` opens; UserError, as where the data are not on this machine."""
    enter(settings["folder"])
    config = validate_config(settings["config"], "the config of the run")
    data = find_method(config).open_data(config, settings["tokenizer"])
    assert isinstance(data, PromptData), "it is a method of drawn answers"
    plan, rollout = data.plan, config.rollout
    player = RemotePlayer(
        crew,
        seed_sampling(config),
        data.make_rules(),
        data.make_failures(log),
        given=plan.given,
        judged=plan.judged,
        truths=plan.truths,
    )
    second_tries = SecondTries(rollout.reroll_start, rollout.reroll_max_groups)
    second_tries.source = facts
    return data.make_producer(data.make_prompts(), player, second_tries, log)
