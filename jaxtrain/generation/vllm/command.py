"""The command and environment of a server that jaxtrain starts. No jax here."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jaxtrain_vllm
from jaxtrain.config import Config
from jaxtrain.config.policies import list_trained
from jaxtrain.errors import UserError
from jaxtrain.generation.vllm.control import KEY_VARIABLE

PYTHON_VARIABLE = "VLLM_PYTHON"
SHARED_FRACTION = "0.4"
"""Of a GPU's memory, for a server that shares it with the trainer."""
LORA_RANKS = (64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be told, from serve's default on."""
ASK_SECONDS = 60.0


def find_python(python: str | None) -> str:
    """The Python that servers run with: rollout.vllm.python, VLLM_PYTHON or this one."""
    return os.path.expanduser(python or os.environ.get(PYTHON_VARIABLE) or sys.executable)


def check_python(python: str | None) -> None:
    """UserError where that Python is none, or has no vLLM. Takes as long as Python's start."""
    found = find_python(python)
    key = "rollout.vllm.python" if python or not os.environ.get(PYTHON_VARIABLE) else "VLLM_PYTHON"
    fix = f"; name the Python of an environment with vLLM in {key}"
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run(
            [found, "-c", code], capture_output=True, text=True, timeout=ASK_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "it does not answer"
        raise UserError(f"rollout.vllm.launch: {found} cannot be run: {why}{fix}") from None
    if done.returncode:
        raise UserError(f"rollout.vllm.launch: {found} has no vLLM{fix}")


def build_command(
    config: Config,
    port: int | str,
    *,
    host: str = "127.0.0.1",
    ranks: int = 1,
    longest: int | None = None,
) -> list[str]:
    """The command line of one server of this run.

    port: a text stands for one that is not known yet. ranks: GPUs that it spreads over. longest:
    tokens of a sequence that the model takes, where that may be less than data.sequence_len. What
    rollout.vllm.args says comes last, so that it counts.
    """
    model, vllm = config.model, config.rollout.vllm
    assert model.path is not None, "the config says that there is one"
    command = [find_python(vllm.python), "-m", "jaxtrain_vllm.serve", "--model", str(model.path)]
    command += ["--host", host, "--port", str(port), "--sync", vllm.sync]
    command += ["--drain-seconds", "0"]  # it ends with the run, which then waits for no answer
    if vllm.sync == "lora":
        rank = next((r for r in LORA_RANKS if r >= config.adapter.rank), config.adapter.rank)
        command += ["--max-lora-rank", str(rank)]
        if len(policies := list_trained(config)) > 1:
            command += ["--max-loras", str(2 * len(policies))]
    if vllm.sleep:
        command.append("--sleep")
    length = min(config.data.sequence_len, longest or config.data.sequence_len)
    options = {"--max-model-len": str(length)}
    if vllm.sync != "lora":
        options["--dtype"] = vllm.weight_dtype
        if model.init == "random":
            options["--load-format"] = "dummy"  # the weights come with the first sync
    if model.tokenizer not in (None, "builtin"):
        options["--tokenizer"] = str(model.tokenizer)
    if ranks > 1:
        options["--tensor-parallel-size"] = str(ranks)
    if vllm.sleep:
        options["--gpu-memory-utilization"] = SHARED_FRACTION
    command.append("--")
    for name, value in options.items():
        command += [name, value]
    if config.rollout.router_replay:
        command.append("--enable-return-routed-experts")
    return command + vllm.args


def build_environment(
    folder: Path, key: str | None, gpus: Sequence[str] | None, python: str | None
) -> dict[str, str]:
    """The environment of a server. folder: gets a link to jaxtrain_vllm, which vLLM's Python is to
    find, and nothing else of this one's packages. key: asked of whoever sends it requests. gpus:
    those that it may see; None: as this process."""
    folder.mkdir(parents=True, exist_ok=True)
    link, package = folder / "jaxtrain_vllm", Path(jaxtrain_vllm.__file__).parent
    if not link.is_symlink() or link.readlink() != package:
        link.unlink(missing_ok=True)
        link.symlink_to(package)
    paths = [str(folder.absolute())]
    if find_python(python) == sys.executable:
        paths += filter(None, [os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if key is not None:
        env[KEY_VARIABLE] = key
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env
