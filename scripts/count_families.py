"""Count which of transformers' causal language models open here by their default config.

python scripts/count_families.py [model_type ...]

Such a model opens if its config.json is read and its shapes have as many parameters, within 2 %,
as transformers builds (on the meta device; nothing is allocated), but for towers that are carried
along. The others are listed with the reason.
"""

import contextlib
import io
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

CLOSE = 0.02
"""Largest difference of the counts, as a share."""


def open_default(model_type: str, architecture: str) -> str | None:
    """Return why the default config of a model type does not open; None if it does."""
    import torch
    import transformers

    from jaxtrain.errors import UserError
    from jaxtrain.models import ARCHITECTURES, build, families

    if architecture not in ARCHITECTURES:
        return f"no family {architecture}"
    default = transformers.AutoConfig.for_model(model_type)
    with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()):
        try:
            model = transformers.AutoModelForCausalLM.from_config(default)
        except Exception as error:  # some defaults of transformers describe no network
            return f"transformers cannot build it: {error}"
    raw = default.to_dict() | {"architectures": [architecture], "model_type": model_type}
    try:
        config = families.config_from_hf(raw)
        actual = build.param_count(config)
    except UserError as error:
        return " ".join(str(error).split())
    expected = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not name.startswith(config.carries)
    )
    same = abs(actual - expected) <= CLOSE * expected
    return None if same else f"{actual} parameters; transformers builds {expected}"


def main() -> int:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    chosen = sys.argv[1:] or sorted(NAMES)
    opened = 0
    for model_type in chosen:
        reason = open_default(model_type, NAMES[model_type])
        opened += reason is None
        print(f"{model_type}: {'opens' if reason is None else reason}", flush=True)
    print(f"{opened} of {len(chosen)} open")
    return 0


if __name__ == "__main__":
    sys.exit(main())
