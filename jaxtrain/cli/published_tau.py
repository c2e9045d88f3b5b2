"""Acceptance lengths that others published, which `speculate` prints beside those it measures."""

from jaxtrain.models import dflash, eagle3
from jaxtrain.models.draft import Draft

SETS = ("gsm8k", "math500", "aime24", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")
PAPER = "Table 1 of arXiv:2602.06036: Qwen3-8B without thinking, greedy, at most 2,048 tokens"
PUBLISHED = {
    dflash.Model: {
        f"z-lab's draft, {PAPER}": (6.54, 7.87, None, 7.08, 6.50, 5.95, 7.27, 4.24),
        "TorchSpec's draft of Qwen3-8B, 760,000 conversations, WSD, 30 prompts, SGLang on one"
        " H100": (3.89, 4.19, 3.98, 3.69, 4.30, 3.47, 4.72, 2.76),
    },
    eagle3.Model: {
        f"EAGLE-3 with a tree of 16, {PAPER}": (3.23, 3.02, None, 3.00, 3.17, 2.82, 2.65, 2.83)
    },
}
"""{kind of draft: {source and conditions: tau by SETS, None without one}}."""


def find_published(draft: Draft, name: str) -> dict[str, float]:
    """Return {source and conditions: tau} of a set of prompts; empty if none is known."""
    if name not in SETS:
        return {}
    rows = PUBLISHED.get(type(draft), {}).items()
    values = {source: taus[SETS.index(name)] for source, taus in rows}
    return {source: tau for source, tau in values.items() if tau is not None}
