"""Weights from a trainer to servers: seconds in all, seconds that the trainer waits, and the parts.

    python benchmarks/weight_sync.py --shape 8b --servers 1 4 --load        a GPU with 80 GB or more
    python benchmarks/weight_sync.py --shape tiny --plain                   a CPU, to try it

The trainer's side is the run's own (`rollout/vllm/publish_weights.py`) with random float32 weights
made on the device. A server is a process with the real receiving code of `jaxtrain_vllm` behind the
routes that the publisher calls, but without vLLM; --load has it copy what it committed to the GPU,
as vLLM would (its repacking is not in that). --transport tcp: as for a server on another host, over
loopback. --plain: also the plain way, tensor by tensor on the host, whose bits must be the same.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]

SHAPES = {
    "8b": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip
CHANGED = 0.015


class Receiver(BaseHTTPRequestHandler):
    """The routes of a server; its worker is one shelf."""

    shelf, held, device, loaded, label = None, {}, None, {}, "default"
    paused = wanted = None

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        self.answer(json.loads(self.rfile.read(size) or b"null"))

    def answer(self, body):
        path = self.path.split("?")[0]
        try:
            found = ROUTES[path](body)
            status = 200
        except KeyError:
            found, status = {"detail": "Not Found"}, 404
        except ValueError as error:
            found, status = {"error": {"message": str(error)}}, 500
        raw = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def draw(body):
    logprobs = {"content": [{"token_id": 1, "logprob": 0.0}]}
    choice = {"token_ids": [1], "finish_reason": "length", "logprobs": logprobs}
    return {"choices": [choice]}


def connect(body):
    from jaxtrain_vllm import shelf

    link = shelf.connect(body["init_info"], 0, Receiver.held)
    threading.Thread(target=Receiver.shelf.listen, args=(link,), daemon=True).start()


def check(body):
    Receiver.wanted = body["update_info"]["version"]
    Receiver.shelf.check(Receiver.wanted, body["update_info"]["checksum"])


def load(tensors):
    """Copy everything to the GPU, into tensors that are there already after the first time."""
    if Receiver.device is None:
        return
    import torch

    from jaxtrain_vllm.pinned import to_torch

    for name, (shape, dtype, bits) in tensors.items():
        if name not in Receiver.loaded:
            Receiver.loaded[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        Receiver.loaded[name].copy_(to_torch(bits, shape, dtype, "cuda"))
    torch.cuda.synchronize()


def commit(body):
    if Receiver.device is not None:
        Receiver.device.take(Receiver.shelf.memory, "cuda")
    Receiver.shelf.commit(Receiver.wanted, load)


ROUTES = {
    "/health": lambda body: {},
    "/version": lambda body: {"version": "0.32.0"},
    "/v1/models": lambda body: {"data": [{"id": "base", "max_model_len": 4096}]},
    "/inference/v1/generate": draw,
    "/get_world_size": lambda body: {"world_size": 1},
    "/init_weight_transfer_engine": connect,
    "/pause": lambda body: {},
    "/resume": lambda body: {},
    "/start_weight_update": lambda body: {},
    "/update_weights": check,
    "/finish_weight_update": commit,
}


def serve(options):
    """A server, until its input ends."""
    from jaxtrain_vllm.segment import Segment
    from jaxtrain_vllm.shelf import WeightShelf

    Receiver.shelf, Receiver.held = WeightShelf(), json.loads(sys.stdin.readline())
    if options.transport == "tcp":

        def attach(described):
            raise OSError("another host")

        Segment.attach = attach
    if options.load:
        from jaxtrain_vllm.pinned import Pinned

        Receiver.device = Pinned()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


def start_servers(count, shapes, options):
    """[(process, url)] of servers that hold tensors of these shapes."""
    own = [sys.executable, __file__, "--serve", "--transport", options.transport]
    own += ["--load"] if options.load else []
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = []
    for _ in range(count):
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(own, env=env, **pipe)
        process.stdin.write(json.dumps(shapes) + "\n")
        process.stdin.flush()
        found.append(process)
    return [(p, f"http://127.0.0.1:{int(p.stdout.readline())}") for p in found]


def make_model(shape):
    """(entries, {path: shape}, {Hugging Face name: shape}) of a Qwen3 of that shape."""
    import jax

    from jaxtrain.models import build
    from jaxtrain.models.parameters import split_model

    raw = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SHAPES[shape]}
    config = build.config_from_hf(raw)
    like = split_model(build.abstract(config))[0]
    shapes = {path: tuple(jax.numpy.shape(value)) for path, value in like.items()}
    entries = [e for e in build.family(config).names(config) if e.param in shapes]
    named = {}
    for entry in entries:
        named |= entry.op.shapes(shapes[entry.param])
    return entries, shapes, named


def draw_params(shapes):
    import jax

    make = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape), static_argnums=1)
    return {path: make(jax.random.key(i), s) for i, (path, s) in enumerate(shapes.items())}


def change(params, seed):
    """Other weights at some places: about CHANGED of them in bfloat16."""
    import jax

    @partial(jax.jit, donate_argnums=0)
    def alter(array, key):
        hit = jax.random.bits(key, array.shape, "uint16") < int(CHANGED * 2**16)
        return jax.numpy.where(hit, array * 1.05 + 1e-4, array)

    keys = jax.random.split(jax.random.key(seed), len(params))
    for path, key in zip(list(params), keys, strict=True):
        params[path] = alter(params[path], key)
    jax.block_until_ready(params)


def measure(count, options, model, params):
    """Rows of the table for so many servers."""
    import jax

    from jaxtrain.config import SamplingConfig
    from jaxtrain.config.vllm import VllmConfig
    from jaxtrain.rollout.vllm.device_layout import Kept, list_pieces
    from jaxtrain.rollout.vllm.publish_weights import WeightPublisher
    from jaxtrain.rollout.vllm.servers import Servers

    entries, _, named = model
    started = start_servers(count, {name: list(shape) for name, shape in named.items()}, options)
    config = VllmConfig(servers=[url for _, url in started], full_every=1000, wait_seconds=60)
    servers = Servers(config, SamplingConfig(), lambda line: print("!", line, flush=True))
    servers.open()

    kept = Kept() if options.base == "device" else None

    def write(params):
        return list_pieces(params, entries, "bfloat16", kept)

    def find(params):
        return list_pieces(params, entries, "bfloat16", kept, compare=True)

    publisher = WeightPublisher(
        servers, write, named, delta=True, ahead=True, find=find if kept else None
    )
    rows, version = [], -1
    plan = [("full", False)] * options.repeat + [("delta", True)] * options.repeat
    for _ in range(2):  # memory is touched for the first time, functions are compiled
        publisher.publish(version := version + 1, params)
        publisher.delivery.wait()
    print(f"# {count} servers, {options.transport}: ready", flush=True)
    for kind, delta in plan:
        change(params, version)
        publisher.delta = delta
        jax.block_until_ready(params)
        start = time.perf_counter()
        blocked = publisher.publish(version := version + 1, params)["sync/blocked_seconds"]
        parts = publisher.delivery.wait()
        seconds = time.perf_counter() - start
        assert not servers.counters["servers_lost"]
        row = {"servers": count, "transport": options.transport, "kind": kind}
        row |= {"base": options.base, "sent": "delta" if parts["sync/delta"] else "all"}
        row |= {"seconds": seconds, "blocked": blocked, "checksum": parts["sync/checksum_seconds"]}
        row |= {"stage": parts["sync/stage_seconds"], "pause": parts["sync/pause_seconds"]}
        size = (sum(array.size for array in params.values()) * 2 * count) / 1e9
        row |= {"GB": size, "GB/s": size / seconds, "tcp_GB": parts["sync/tcp_bytes"] / 1e9}
        rows.append(row | {"changed": parts.get("sync/changed", 1.0)})
        show(rows[-1])
    if options.plain and count == options.servers[0]:
        rows.append(compare_with_plain(publisher, entries, named, params))
        show(rows[-1])
    publisher.close()
    for process, _ in started:
        process.stdin.close()
        process.wait(60)
    return rows


def compare_with_plain(publisher, entries, named, params):
    """Seconds of the plain way, on the host in one thread; AssertionError for other bits."""
    import numpy as np

    from jaxtrain.rollout.vllm.publish_weights import collect
    from jaxtrain_vllm import wire

    start = time.perf_counter()
    pieces = (p for e in entries for p in e.op.write(np.asarray(params[e.param]), np.asarray))
    tensors = collect(pieces, named, "bfloat16")
    row = {"kind": "plain, on the host", "seconds": time.perf_counter() - start}
    assert wire.checksum(tensors) == publisher.newest.checksum, "other bits than the plain way's"
    return row | {"bits": "the same"}


def show(row):
    cells = (f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
    print("  ".join(cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--transport", choices=["shared", "tcp"], default="shared")
    parser.add_argument("--base", choices=["host", "device"], default="host")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)
    import jax

    model = make_model(options.shape)
    params = draw_params(model[1])
    count = sum(array.size for array in params.values())
    device = jax.devices()[0].device_kind
    print(f"# {count / 1e9:.2f} B parameters in float32 on {device}, {os.cpu_count()} cores")
    rows = [row for number in options.servers for row in measure(number, options, model, params)]
    if options.out:
        header = {"command": " ".join(["python", *sys.argv]), "hardware": device}
        header |= {"cores": os.cpu_count(), "jax": jax.__version__, "parameters": count}
        options.out.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
