"""Weights from a trainer into a real vLLM on the same GPU: seconds, pauses, and its log-probs then.

python benchmarks/vllm_sync.py --vllm path/to/vllm/python --tokenizer path/to/a/model \
    --models smollm2-135m qwen3-moe-0.9b qwen3-8b --out benchmarks/results/vllm_sync_h100
python benchmarks/vllm_sync.py --vllm ... --tokenizer ... --models smollm2-135m   # CPUs, to try it

The trainer's side is a run's own, with random float32 weights; vLLM starts with weights of its own
(--load-format dummy), so that its log-probs become the trainer's only if every tensor arrives.
A version is made of the one before by turning the sign of one weight in 64.

all s     from the call to the last server's report
wait s    of it the trainer waits
pause s   of it the server draws nothing
off       mean difference between log-probs of prompts in vLLM and in the trainer, in bfloat16
moved     by how much the same log-probs of the trainer differ from those of the version before
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.46")  # vLLM and the image need the rest

import jax
import jax.numpy as jnp
import numpy as np
from harness import Table, command_line, log, make_parser, query_gpu, shorten
from step_work import MODELS
from weight_sync import Trainer

from jaxtrain.core.scorer import make_logp
from jaxtrain.data.packing.pack import lay_out, pack_for_scoring
from jaxtrain.data.packing.tree import chain
from jaxtrain.generation.vllm.control import call
from jaxtrain.models import build, families
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.parameters import Params, split_model

COLUMNS = (
    ("model", "model", "<15"),
    ("way", "way", "<12"),
    ("GB", "GB", ">6.2f"),
    ("all s", "seconds", ">6.2f"),
    ("wait s", "blocked", ">6.2f"),
    ("pause s", "pause", ">7.2f"),
    ("off", "off", ">8.4f"),
    ("moved", "moved", ">7.3f"),
)
VERSIONS = 3
"""Versions of each way; the first touches memory and opens links."""
ROOT = Path(__file__).parents[1]
TEXTS, LENGTH = 4, 96


def write_header(path: Path, shapes: dict[str, Sequence[int]]) -> None:
    """Write a safetensors file whose tensors {name: shape} in bfloat16 take no room on disk: vLLM
    reads none with --load-format dummy, but names and shapes of experts come from a header."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


class RealServer:
    """A vLLM with weights of its own, as a child."""

    def __init__(self, options: argparse.Namespace, raw: dict, shapes: dict, folder: Path):
        port = options.port
        options.port += 1
        self.url, self.folder = f"http://127.0.0.1:{port}", folder
        for file in options.tokenizer.glob("*token*"):
            shutil.copy(file, folder)
        (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}))
        write_header(folder / "model.safetensors", shapes)
        command = [options.vllm, "-m", "jaxtrain_vllm.serve", "--model", str(folder)]
        command += ["--port", str(port), "--sync", "delta", "--", "--load-format", "dummy"]
        command += ["--max-model-len", "512", "--dtype", "bfloat16", "--enforce-eager"]
        command += ["--gpu-memory-utilization", str(options.share), "--max-num-seqs", "16"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.log = open(folder / "log", "w")
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )

    def wait(self, seconds: float = 400) -> None:
        """Return once it answers; RuntimeError with its last lines if it does not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(shorten((self.folder / "log").read_text()[-1500:], 1500))

    def score(self, texts: np.ndarray) -> np.ndarray:
        """Return the log-probs of each text's tokens from the second on."""
        scores = []
        for text in texts.tolist():
            body = {"model": str(self.folder), "prompt": text, "max_tokens": 1, "temperature": 0}
            body |= {"prompt_logprobs": 0}
            answer = call(self.url, "POST", "/v1/completions", body, timeout=60)
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            pairs = zip(entries, text[1:], strict=True)
            scores.append([entry[str(token)]["logprob"] for entry, token in pairs])
        return np.array(scores)

    def close(self) -> None:
        """End it and all of its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def list_tensors(config: DecoderConfig, params: Params) -> tuple[list, dict]:
    """Return the entries of a model's parameters, and {name: shape} of its tensors in files."""
    names = families.family(config).names(config)
    entries, tensors = [entry for entry in names if entry.param in params], {}
    for entry in entries:
        tensors |= entry.op.shapes(params[entry.param].shape)
    return entries, tensors


class Policy:
    """The trainer's model, and what its log-probs are."""

    def __init__(self, raw: dict):
        config = families.config_from_hf(raw)
        params, rebuild = split_model(build.init(config, 0, param_dtype="float32"))
        # A model that computes in bfloat16 with the same parameters.
        rebuild = split_model(build.abstract(config, param_dtype="float32", dtype="bfloat16"))[1]
        self.params, self.compute = dict(params), make_logp(rebuild, "auto", None)
        self.entries, self.named = list_tensors(config, params)
        rng = np.random.default_rng(0)
        self.texts = rng.integers(5, min(raw["vocab_size"], 40000), (TEXTS, LENGTH))
        trees = [lay_out(chain(text, {})) for text in self.texts]
        self.packed = list(pack_for_scoring(trees, rows=1, share_rows=False))

    def score(self) -> np.ndarray:
        """Return the log-probs [texts, tokens - 1] of each token given those before it."""
        scores = np.zeros((TEXTS, LENGTH - 1))
        for batch, spans in self.packed:
            output = np.asarray(self.compute(self.params, batch))[0]
            for index, row, start in spans:
                scores[index] = output[row, start + 1 : start + LENGTH]
        return scores

    def turn_signs(self, seed: int) -> None:
        """Turn the sign of one weight in 64 of each parameter."""

        @partial(jax.jit, donate_argnums=0)
        def alter(array, key):
            hit = jax.random.bits(key, array.shape, "uint8") < 4
            return jnp.where(hit, -array, array)

        keys = jax.random.split(jax.random.key(seed), len(self.params))
        for path, key in zip(list(self.params), keys, strict=True):
            self.params[path] = alter(self.params[path], key)
        jax.block_until_ready(self.params)


def measure(name: str, policy: Policy, server: RealServer, table: Table) -> None:
    """Add a row for each version that the server is sent."""
    before, version = policy.score(), -1
    server.wait()
    off = np.abs(before - server.score(policy.texts)).mean()
    table.add({"model": name, "way": "none yet", "off": off})
    ways = {"host": "shared", "device": "device"}
    if jax.default_backend() != "gpu":
        del ways["device"]
    for way, transport in ways.items():
        chosen = argparse.Namespace(base="host", transport=transport)
        model = policy.entries, None, policy.named
        trainer = Trainer(chosen, model, policy.params, [server.url], 8, 4)
        trainer.version = version
        for index in range(VERSIONS):
            policy.turn_signs(trainer.version + 1)
            numbers = trainer.publish(delta=False)
            after = policy.score()
            moved, before = np.abs(after - before).mean(), after
            off = np.abs(after - server.score(policy.texts)).mean()
            labels = {"model": name, "way": way if index else f"{way}, first"}
            table.add({**labels, "off": off, "moved": moved, **numbers})
        version = trainer.version
        trainer.publisher.close()


def main() -> None:
    """Measure the chosen models, each with a server of its own."""
    parser = make_parser(__doc__)
    parser.add_argument("--vllm", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model's folder")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), required=True)
    parser.add_argument("--share", type=float, default=0.27, help="vLLM's of the GPU's memory")
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    table = Table(COLUMNS, options.out, command_line(), hardware=query_gpu("name").strip())
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            log(f"{name}: vLLM starts")
            config = families.config_from_hf(MODELS[name])
            tensors = list_tensors(config, split_model(build.abstract(config))[0])[1]
            server = RealServer(options, MODELS[name], tensors, Path(folder))
            try:
                policy = Policy(MODELS[name])
                measure(name, policy, server, table)
            except Exception as reason:  # the other models are measured all the same
                last = (Path(folder) / "log").read_text()[-20000:]
                log(f"{name} failed, {reason}; the server's last lines:\n{last}")
                table.add({"model": name, "way": "", "failed": shorten(reason, 300)})
            finally:
                server.close()
                policy = None  # its memory is the next one's


if __name__ == "__main__":
    main()
