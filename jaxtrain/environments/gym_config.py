"""Config of a NeMo Gym that a run starts, and the Python environments of its servers."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.gym import GymConfig
from jaxtrain.environments.chat_request import MODEL
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.errors import UserError

KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
"""Folders in which Gym searches for servers."""
POLICY_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"


def make_config(
    config: GymConfig, policy: PolicyServer, port: int, folder: Path, packages: Path
) -> dict[str, Any]:
    """Build Gym's config: config files of its servers, the policy's model server, paths."""
    directory = Path(config.directory).absolute()
    paths = [
        str(directory / path) if (directory / path).exists() else str(packages / path)
        for path in config.configs or list_own(directory)
    ]
    gym_config: dict[str, Any] = {
        "config_paths": [*paths, str(packages / POLICY_CONFIG)],
        "policy_base_url": policy.base_url,
        "policy_api_key": policy.token,
        "policy_model_name": MODEL,
        "policy_model": {
            "responses_api_models": {
                "vllm_model": {
                    "request_prompt_and_generation_token_ids": True,
                    "uses_reasoning_parser": True,
                }
            }
        },
        "head_server": {"host": "127.0.0.1", "port": port},
        "uv_cache_dir": str(folder / "uv"),
    }
    if not config.own_environments:
        gym_config |= {"skip_venv_if_present": True, "uv_venv_dir": str(folder / "environments")}
    return merge(gym_config, config.overrides)


def list_own(directory: Path) -> list[str]:
    """List the config files of all servers in a user's folder."""
    paths = [path for kind in KINDS for path in directory.glob(f"{kind}/*/configs/*.yaml")]
    return [str(path.relative_to(directory)) for path in sorted(paths)]


def write_config(
    config: GymConfig, policy: PolicyServer, port: int, folder: Path, packages: Path, key: str
) -> Path:
    """Write the config to `folder`; UserError if it names no server. key: the section's."""
    gym_config = make_config(config, policy, port, folder, packages)
    *server_configs, _ = gym_config["config_paths"]
    if not server_configs:
        raise UserError(
            f"{key}.directory: there is no {KINDS[0]}/NAME/configs/NAME.yaml in"
            f" {Path(config.directory).absolute()}; name Gym's config files in {key}.configs"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gym_{port}.yaml"
    path.touch(mode=0o600)  # it contains the key of the policy endpoint
    path.write_text(json.dumps(gym_config, indent=1), encoding="utf-8")
    return path


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dicts; values of the second take precedence."""
    merged = dict(below)
    for key, value in above.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if nested else value
    return merged


def link_environments(folder: Path, python: Path, roots: tuple[Path, ...]) -> None:
    """Link the virtual environment of each server to the shared one."""
    for root in roots:
        for kind in KINDS:
            for server in sorted((root / kind).glob("*/")):
                link = folder / kind / server.name / ".venv"
                if link.is_symlink() and link.readlink() == python.parent.parent:
                    continue
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(python.parent.parent)


def find_packages(python: Path, key: str) -> Path:
    """Return the folder that contains nemo_gym in an environment; UserError if there is none."""
    root = python.parent.parent
    for package in sorted(root.glob("lib/python3*/site-packages/nemo_gym")):
        return package.parent
    raise UserError(f"{key}.python: no nemo_gym below {root}/lib; is {python} Gym's interpreter?")


def find_free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
