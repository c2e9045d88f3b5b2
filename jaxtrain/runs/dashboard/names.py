"""Metrics by what they mean to people: their order, groups and short names."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

FIRST = {
    "rl": (
        *("reward", "eval/*/reward", "eval/accuracy", "completions/mean_length", "entropy"),
        *("grad_norm", "tokens_per_second_per_device", "sampling/mismatch_kl"),
    ),
    "": (
        *("loss", "eval/loss", "*accuracy", "grad_norm", "learning_rate"),
        *("tokens_per_second_per_device", "eval/*/reward", "reward*"),
    ),
}
"""Charts that come first, by task.kind."""

GROUPS = (
    (
        "Progress",
        (
            "loss",
            "eval/*",
            "*accuracy",
            "perplexity",
            "entropy",
            "grad_norm",
            "learning_rate",
            "*loss",
        ),
    ),
    ("Reward", ("reward*", "frac_reward*", "rewards/*", "env/*", "completions/*", "*margin*")),
    (
        "Policy",
        (
            "sampling/*",
            "lag/*",
            "policy_version",
            "dropped/*",
            "kl",
            "clip*",
            "ratio*",
            "cancelled/*",
            "curator/*",
            "importance*",
        ),
    ),
    (
        "Speed",
        (
            "step_seconds",
            "*per_second*",
            "mfu",
            "peak_memory*",
            "rollout/*",
            "sync/*",
            "vllm/*",
            "ray/*",
            "packing*",
        ),
    ),
    ("Data", ("*",)),
)
"""Title and metrics of each part of the numbers."""

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


def label(name: str) -> str:
    """A metric's short name."""
    return SHORT.get(name, name)


def order_charts(names: Iterable[str], kind: str) -> list[str]:
    """Metrics as charts: those of the task's kind first, then the others as they came."""
    remaining, ordered = dict.fromkeys(names), []
    for pattern in (*FIRST.get(kind, FIRST[""]), *FIRST[""]):
        matching = sorted(name for name in remaining if fnmatchcase(name, pattern))
        ordered += matching
        for name in matching:
            del remaining[name]
    data = [name for name in remaining if name.startswith("data/")]
    return [*ordered, *(name for name in remaining if name not in data), *data]


def group(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Metrics by groups, without groups that have none."""
    remaining, groups = dict.fromkeys(names), []
    for title, patterns in GROUPS:
        members = []
        for pattern in patterns:
            matching = [name for name in remaining if fnmatchcase(name, pattern)]
            members += matching
            for name in matching:
                del remaining[name]
        if members:
            groups.append((title, members))
    return groups
