"""Configs of Axolotl, LLaMA-Factory, TRL and prime-rl put into the keys of this project.

One table a system: its keys, and what each is here. `jaxtrain convert` writes a config by them, and
a config that holds one of their keys is answered with ours.
"""

from jaxtrain.convert import axolotl, llama_factory, prime_rl, trl
from jaxtrain.convert.conversion import Conversion, describe, read_numbers

SYSTEMS = {"axolotl": axolotl, "llama-factory": llama_factory, "trl": trl, "prime-rl": prime_rl}
"""In the order in which a file is tried."""


def find_hint(key: str) -> str | None:
    """Describe the counterpart of another system's key; None for a key that no system has."""
    rules = (system.RULES.get(key) for system in SYSTEMS.values())
    return next((rule.hint for rule in rules if rule is not None), None)


__all__ = ["SYSTEMS", "Conversion", "describe", "find_hint", "read_numbers"]
