"""What a NeMo Gym that a run starts has to be told: its config, and where its servers run."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.gym import GymConfig
from jaxtrain.environments.chat_answer import MODEL
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.errors import UserError

KINDS = (
    "resources_servers",
    "responses_api_agents",
    "responses_api_models",
    "environment_servers",
)
"""Folders in which Gym looks for servers."""
POLICY_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"


def make_config(
    config: GymConfig, policy: PolicyServer, port: int, folder: Path, packages: Path
) -> dict[str, Any]:
    """Gym's config for a run: its own files, the policy's model server, where all is."""
    directory = Path(config.directory).absolute()
    paths = [
        str(directory / place) if (directory / place).exists() else str(packages / place)
        for place in config.configs or list_own(directory)
    ]
    made: dict[str, Any] = {
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
        made |= {"skip_venv_if_present": True, "uv_venv_dir": str(folder / "environments")}
    return merge(made, config.overrides)


def list_own(directory: Path) -> list[str]:
    """The config files of all servers in a folder of one's own."""
    found = [place for kind in KINDS for place in directory.glob(f"{kind}/*/configs/*.yaml")]
    return [str(place.relative_to(directory)) for place in sorted(found)]


def write_config(
    config: GymConfig, policy: PolicyServer, port: int, folder: Path, packages: Path, key: str
) -> Path:
    """Make it, as a file in `folder`; UserError where it names no server. key: the section's."""
    made = make_config(config, policy, port, folder, packages)
    *own, _ = made["config_paths"]
    if not own:
        raise UserError(
            f"{key}.directory: there is no {KINDS[0]}/NAME/configs/NAME.yaml in"
            f" {Path(config.directory).absolute()}; name Gym's config files in {key}.configs"
        )
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"gym_{port}.yaml"
    place.touch(mode=0o600)  # it holds the key of the policy endpoint
    place.write_text(json.dumps(made, indent=1), encoding="utf-8")
    return place


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, the second one's values first."""
    found = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merge(found[key], value) if both else value
    return found


def link_environments(folder: Path, python: Path, places: tuple[Path, ...]) -> None:
    """For each server a link to the one environment that all of them run in."""
    for place in places:
        for kind in KINDS:
            for server in sorted((place / kind).glob("*/")):
                link = folder / kind / server.name / ".venv"
                if link.is_symlink() and link.readlink() == python.parent.parent:
                    continue
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(python.parent.parent)


def find_packages(python: Path, key: str) -> Path:
    """The folder in which an environment has nemo_gym; UserError where it has none."""
    root = python.parent.parent
    for found in sorted(root.glob("lib/python3*/site-packages/nemo_gym")):
        return found.parent
    raise UserError(f"{key}.python: no nemo_gym below {root}/lib; is {python} Gym's interpreter?")


def find_free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
