"""Axolotl's plugin for NeMo Gym, keys nemo_gym_*: one section env.gym, made of all of them."""

from collections.abc import Mapping

from jaxtrain.convert.conversion import Conversion

HEAD_PORT = 11000
START_SECONDS = 360
"""What Axolotl takes where a file says nothing."""
PLUGIN = "nemo_gym"
"""In the names of its reward functions, and of itself."""


def finish_gym(conversion: Conversion) -> None:
    """Put together what all keys but these have made, and these."""
    source = conversion.source
    if not source.get("nemo_gym_enabled"):
        return
    conversion.set("env.kind", "nemo_gym")
    conversion.set("env.timeout", source.get("nemo_gym_run_timeout"))
    agent = bool(source.get("nemo_gym_multi_turn"))
    conversion.set("env.gym.mode", "agent" if agent else "verify")
    conversion.set("env.gym.start_seconds", source.get("nemo_gym_server_timeout") or START_SECONDS)
    if source.get("nemo_gym_auto_start", True):
        conversion.set("env.gym.start", True)
        conversion.set("env.gym.directory", source.get("nemo_gym_dir"))
        conversion.set("env.gym.configs", source.get("nemo_gym_config_paths"))
        needed = "env.gym.python, the Python of the environment with nemo-gym 0.7, is to be added"
        conversion.missed.append(("nemo_gym_auto_start", True, needed))
    else:
        port = source.get("nemo_gym_head_port") or HEAD_PORT
        conversion.set("env.gym.head", f"http://127.0.0.1:{port}")
        if agent:
            needed = "env.gym.port and api_key, as that Gym's policy_base_url has them, are missing"
            conversion.missed.append(("nemo_gym_auto_start", False, needed))
    if source.get("nemo_gym_max_turns") and agent:
        text = "set max_steps of the agent in env.gym.overrides, or in its own config"
        conversion.log(text, "nemo_gym_max_turns")
    listed = source.get("nemo_gym_datasets") or []
    datasets = [dataset for dataset in listed if isinstance(dataset, Mapping)]
    rows = [{"path": d.get("path"), "max_rows": d.get("max_samples") or None} for d in datasets]
    conversion.set("data.datasets", [{k: v for k, v in row.items() if v} for row in rows])
    names = list(dict.fromkeys(dataset.get("server_name") for dataset in datasets))
    if agent:
        text = "rows name their agent (agent_ref.name), or env.gym.agent does: an agent's name"
        conversion.log(text, "nemo_gym_datasets")
    elif len(names) == 1:
        conversion.set("env.gym.agent", names[0])
    else:
        text = f"several servers ({', '.join(map(str, names))}): each dataset needs an env with its"
        conversion.log(f"{text} own env.gym.agent, or rows an agent_ref", "nemo_gym_datasets")
    rewards = conversion.remove("rewards") or []
    others = [reward for reward in rewards if PLUGIN not in str(reward.get("function"))]
    conversion.set("rewards", others or None)
    if rewards and not others:
        conversion.notes = [note for note in conversion.notes if note[0] != "trl.reward_funcs"]
