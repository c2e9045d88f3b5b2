"""Metrics by what they mean to people: their order, groups and short names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

FIRST = {
    "rl": "reward eval/*/reward eval/accuracy completions/mean_length entropy grad_norm"
    " tokens_per_second_per_device sampling/mismatch_kl",
    "": "loss eval/loss *accuracy grad_norm learning_rate tokens_per_second_per_device"
    " eval/*/reward reward*",
}
"""Patterns of the charts that come first, by task.kind."""

GROUPS = {
    "Progress": "loss eval/* *accuracy perplexity entropy grad_norm learning_rate *loss",
    "Reward": "reward* frac_reward* rewards/* env/* completions/* *margin*",
    "Policy": "sampling/* lag/* policy_version dropped/* kl clip* ratio* cancelled/* curator/*"
    " importance*",
    "Speed": "step_seconds *per_second* mfu peak_memory* rollout/* sync/* vllm/* ray/* packing*",
    "Data": "*",
}
"""Patterns of each part of the numbers, by its title."""

SHORT = {
    "frac_reward_zero_std": "zero std",
    "completions/clipped_ratio": "clipped",
    "completions/mean_length": "length",
    "sampling/mismatch_kl": "mismatch",
    "sampling/sampling_logp_difference/max": "logp diff max",
    "sampling/sampling_logp_difference/mean": "logp diff",
    "dropped/zero_advantage": "dropped flat",
    "tokens_per_second_per_device": "tok/s/dev",
    "rollout/tokens_per_second": "rollout tok/s",
    "peak_memory_gib": "memory GiB",
    "packing_efficiency": "packed",
    "num_sampled_tokens": "sampled tokens",
    "prompt_tokens_saved": "prompt saved",
    "learning_rate": "lr",
    "step_seconds": "step s",
    "rollout/seconds": "rollout s",
    "sync/seconds": "sync s",
    "policy_version": "version",
}
"""Names where there is little space; the whole name stands above its chart."""


def order_charts(names: Iterable[str], kind: str) -> list[str]:
    """Metrics as charts: those of the task's kind first, then the others as they came."""
    remaining, ordered = dict.fromkeys(names), []
    for pattern in f"{FIRST.get(kind, '')} {FIRST['']}".split():
        ordered += sorted(take_matching(remaining, pattern))
    data = [name for name in remaining if name.startswith("data/")]
    return [*ordered, *(name for name in remaining if name not in data), *data]


def group(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Metrics by groups, without groups that have none."""
    remaining, groups = dict.fromkeys(names), []
    for title, patterns in GROUPS.items():
        members = [n for pattern in patterns.split() for n in take_matching(remaining, pattern)]
        groups += [(title, members)] if members else []
    return groups


def take_matching(names: dict[str, None], pattern: str) -> list[str]:
    """Remove the names that fit a pattern, and return them."""
    matching = [name for name in names if fnmatchcase(name, pattern)]
    for name in matching:
        del names[name]
    return matching
