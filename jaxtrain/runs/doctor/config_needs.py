"""Requirements of one config on a machine, read from its keys."""

import os
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.runs.doctor.needs import Facts


def read_needs(path: str, overrides: Sequence[str] = ()) -> Facts:
    """Packages by the keys that ask for them, model, folder; "problem": why it cannot be read."""
    try:
        from jaxtrain.config import load_config

        config = load_config(path, overrides)
    except UserError as error:
        return {"path": path, "problem": str(error)}
    except ImportError as error:  # of what jaxtrain requires; named under packages
        return {"path": path, "problem": f"configs cannot be read: {error}"}
    rollout, vllm = config.rollout, config.rollout.vllm
    rewards = {reward.function for reward in config.rewards}
    optional = [
        ("rollout.service ray", "ray", rollout.service.startswith("ray")),
        ("rollout.vllm.launch ray", "ray", vllm.launch == "ray"),
        ("rollout.vllm.discover", "vllm-router", vllm.discover.startswith("router+")),
        ("env.kind verifiers", "verifiers", config.env.kind == "verifiers"),
        ("reward math", "math-verify", "math" in rewards),
        ("reward json_schema", "jsonschema", "json_schema" in rewards),
        ("log.wandb_project", "wandb", config.log.wandb_project is not None),
        ("log.tensorboard", "tensorboardX", config.log.tensorboard),
    ]
    starts = rollout.engine == "vllm" and vllm.launch == "local"
    model = config.model.path
    return {
        "path": path,
        "problem": None,
        "output": config.run.output_dir,
        "packages": [(key, package) for key, package, needed in optional if needed],
        "model": model,
        "model_here": bool(model) and Path(os.path.expanduser(model or "")).is_dir(),
        "compute_dtype": config.model.compute_dtype,
        "vllm": starts,
        "vllm_python": vllm.python if starts else None,
    }
