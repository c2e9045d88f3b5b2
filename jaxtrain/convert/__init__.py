"""Configs of Axolotl, TRL and prime-rl put into the keys of this project.

One table a system: its keys, and what each is here. `jaxtrain convert` writes a config by them, and
a config that holds one of their keys is answered with ours.
"""

from jaxtrain.convert import axolotl, prime_rl, trl
from jaxtrain.convert.conversion import Conversion, ConversionRule, read_numbers

SYSTEMS = {"axolotl": axolotl, "trl": trl, "prime-rl": prime_rl}


def find_hint(key: str) -> str | None:
    """Describe the counterpart of another system's key; None for a key that no system has."""
    for system in SYSTEMS.values():
        rule: ConversionRule | None = system.RULES.get(key)
        if rule is not None:
            return rule.hint
    return None


__all__ = ["SYSTEMS", "Conversion", "find_hint", "read_numbers"]
