"""Section rollout: who samples, how much, and how far ahead of the trainer."""

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxtrain.config.base import Section
from jaxtrain.config.bounds import ITEMS, ROWS, WORKERS
from jaxtrain.config.vllm import VllmConfig


class RolloutConfig(Section):
    """How answers are drawn for task.kind rl; the draws themselves are section sampling."""

    engine: str = "local"
    """local: the trainer's own weights and devices. vllm: servers over HTTP. Or an own kind of
    engine: an entry point of the group jaxtrain.engines, "package.module:Class" or
    "file.py:Class"."""
    options: dict[str, Any] = {}
    """For an own kind of engine to read."""
    prompts_per_step: int = Field(8, ge=1, le=ITEMS)
    """Groups of a round, that is of task.num_minibatches optimizer steps."""
    group_size: int = Field(8, ge=1, le=ROWS)
    """Answers to each prompt."""
    mode: Literal["sync", "prefetch", "async"] = "sync"
    """sync: a round is drawn after the last one was trained. prefetch: while it is trained. async:
    all the time, up to max_lag rounds ahead."""
    max_lag: int = Field(1, ge=0, le=ROWS)
    """async: groups with a token from a policy older than this many rounds are dropped."""
    streaming: bool = False
    """Train each of a round's task.num_minibatches as soon as enough groups for it are finished,
    while the others are still drawn, so that the slowest answers hold up one step, not the round.
    Short answers come first, and the ratio is that to the weights which the minibatch meets."""
    devices: int = Field(0, ge=0, le=ROWS)
    """local: devices set aside for sampling, the last ones; 0: it shares those of the trainer."""
    max_batch: int = Field(64, ge=1, le=ROWS)
    """local: answers that are decoded together."""
    zero_advantage: Literal["drop", "keep", "refill"] = "drop"
    """Groups whose rewards are all equal: leave them out, train them anyway (they matter to a KL
    term only), or draw further prompts until the round is full (DAPO's dynamic sampling)."""
    max_refill: int = Field(4, ge=1, le=ROWS)
    """refill: prompts drawn for a round, as a multiple of prompts_per_step, before it goes on with
    what there is."""
    retries: int = Field(2, ge=0, le=ROWS)
    """How often an episode or a judgement that failed (an exception, a time-out, a lost server) is
    tried again before its group is dropped. Before a second try of somebody's code there is a pause
    of 1 s, then of 2, 4, ...: a short outage of a judge costs nothing."""
    max_failures: float = Field(0.5, ge=0, le=1)
    """Share of the episodes of the last two rounds (and as many as are drawn ahead; at least 64
    episodes) that may fail for good; beyond it the run ends, saved, and says what failed. 1: never.
    """
    max_idle_rounds: int = Field(8, ge=1, le=ROWS)
    """Rounds in a row without anything to learn from (all rewards of each group equal, say) after
    which the run ends, saved, and shows what was sampled."""
    replay_size: int = Field(0, ge=0, le=ITEMS)
    """Informative groups that are kept to stand in for those dropped as zero_advantage; 0: none."""
    replay_max_lag: int = Field(8, ge=1)
    """Rounds after which a kept group is let go."""
    reroll_start: float = Field(1.0, ge=0, le=1)
    """Share of the run after which prompts without any reward are asked again; 1: never."""
    reroll_max_groups: int = Field(1, ge=1)
    """Prompts of a round that may be such ones."""
    samples: Annotated[int, Field(ge=0, le=ITEMS)] | Literal["all"] = 2
    """Answers of a round that samples.jsonl keeps: so many, the best and the worst, or "all"."""
    reward_workers: int = Field(1, ge=1, le=WORKERS)
    """Processes that run the reward functions."""
    vllm: VllmConfig = VllmConfig()
    """Servers and weight sync; only with engine vllm."""
