"""Weights from a trainer to servers: seconds in all, seconds that the trainer waits, and the parts.

    python benchmarks/weight_sync.py --shape 8b --servers 1 4 --load        a GPU with 80 GB or more
    python benchmarks/weight_sync.py --shape tiny --plain                   a CPU, to try it

The trainer's side is the run's own (`generation/weight_sync/publish_weights.py`) with random
float32 weights made on the device. A server is a process with the real receiving code of
`jaxtrain_vllm` behind the routes that the publisher calls, but without vLLM; --load has it copy
what it committed to the GPU, as vLLM would (its repacking is not in that). --transport tcp: as for
a server on another host, over loopback; device: from GPU memory to GPU memory (without a GPU: host
memory that stands in for it).
--verify: all bytes that servers loaded against what the host's way makes. --plain: also the plain
way, tensor by tensor on the host, whose bits must be the same. `weight_sync_check.py` runs the ways
between processes of one GPU, each on its own.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

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
    paused = pending_version = listener = None

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
            actual = ROUTES[path](body)
            status = 200
        except KeyError:
            actual, status = {"detail": "Not Found"}, 404
        except ValueError as error:
            actual, status = {"error": {"message": str(error)}}, 500
        raw = json.dumps(actual).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def draw(body):
    logprobs = {"content": [{"token_id": 1, "logprob": 0.0}]}
    choice = {"token_ids": [1], "finish_reason": "length", "logprobs": logprobs}
    return {"choices": [choice]}


def connect(body):
    from jaxtrain_vllm import weight_receiver

    info = body["init_info"]
    link = weight_receiver.connect(info, 0, Receiver.held, Receiver.shelf.begin(info["token"]))
    Receiver.listener = threading.Thread(target=Receiver.shelf.listen, args=(link,), daemon=True)
    Receiver.listener.start()


def check(body):
    Receiver.pending_version = body["update_info"]["version"]
    Receiver.shelf.check(Receiver.pending_version, body["update_info"]["checksum"])


def load(tensors):
    """Copy everything to the GPU, into tensors that are there already after the first time."""
    if Receiver.device is None:
        return
    import torch

    from jaxtrain_vllm.pinned_memory import to_torch

    where = find_device()
    for name, (shape, dtype, bits) in tensors.items():
        if name not in Receiver.loaded:
            Receiver.loaded[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=where)
        Receiver.loaded[name].copy_(to_torch(bits, shape, dtype, where))
    if where == "cuda":
        torch.cuda.synchronize()


def commit(body):
    if Receiver.device is not None:
        Receiver.device.take(Receiver.shelf.memory, find_device())
    Receiver.shelf.commit(Receiver.pending_version, load)


def digest(body):
    """{name: CRC of the bits} of all that was loaded."""
    import torch

    from jaxtrain_vllm import wire

    largest = max(tensor.nbytes for tensor in Receiver.loaded.values())
    room = torch.empty(largest, dtype=torch.uint8, pin_memory=find_device() == "cuda")
    actual = {}
    for name, tensor in Receiver.loaded.items():
        part = room[: tensor.nbytes]
        part.copy_(tensor.view(-1).view(torch.uint8))
        bits = part.numpy().view(wire.BITS[tensor.itemsize])
        actual[name] = wire.checksum({name: wire.WireTensor(tuple(tensor.shape), "bfloat16", bits)})
    return actual


def find_device():
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_shelf(transport):
    """Return the receiver of a transport."""
    from jaxtrain_vllm.shared_memory import SharedMemorySegment
    from jaxtrain_vllm.weight_receiver import WeightReceiver

    if transport == "device":
        from jaxtrain_vllm.cuda_ipc import CudaIpcMemory, open_ipc_memory

        opened = open_ipc_memory(find_device())
        return WeightReceiver(
            opened or (lambda messages: CudaIpcMemory(messages, "cpu", stand_in()))
        )
    if transport == "tcp":

        def attach(described):
            raise OSError("another host")

        SharedMemorySegment.attach = attach
    return WeightReceiver()


def stand_in():
    """For the driver, where there is none."""
    sys.path.append(str(ROOT / "tests" / "generation"))
    from host_cuda import HostCuda

    return HostCuda()


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
    "/digest": digest,
}


def serve(options):
    """A server, until its input ends."""
    Receiver.shelf = open_shelf(options.transport)
    if options.load:
        from jaxtrain_vllm.pinned_memory import PinnedArray

        Receiver.device = PinnedArray()
        if find_device() == "cuda":
            import torch

            torch.zeros(1, device="cuda")
    Receiver.held = json.loads(sys.stdin.readline())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    if Receiver.listener is not None:
        Receiver.listener.join(5)


def start_servers(count, options):
    """Processes that will be servers once they are told what they hold (`tell_servers`)."""
    local_value = [sys.executable, __file__, "--serve", "--transport", options.transport]
    local_value += ["--load"] if options.load else []
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    actual = []
    for _ in range(count):
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        actual.append(subprocess.Popen(local_value, env=env, **pipe))
    return actual


def tell_servers(started, shapes):
    """Their URLs; they hold tensors of these shapes."""
    for process in started:
        process.stdin.write(json.dumps(shapes) + "\n")
        process.stdin.flush()
    return [f"http://127.0.0.1:{int(process.stdout.readline())}" for process in started]


def make_model(shape):
    """(entries, {path: shape}, {Hugging Face name: shape}) of a Qwen3 of that shape."""
    import jax

    from jaxtrain.models import build, families
    from jaxtrain.models.parameters import split_model

    raw = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SHAPES[shape]}
    config = families.config_from_hf(raw)
    template = split_model(build.abstract(config))[0]
    shapes = {path: tuple(jax.numpy.shape(value)) for path, value in template.items()}
    entries = [e for e in families.family(config).names(config) if e.param in shapes]
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


def measure(started, options, model, params):
    """Rows of the table for servers that were started."""
    import jax

    from jaxtrain.config import SamplingConfig
    from jaxtrain.config.vllm import VllmConfig
    from jaxtrain.generation.vllm.servers import Servers
    from jaxtrain.generation.weight_sync.device_layout import PublishedCopy, list_pieces
    from jaxtrain.generation.weight_sync.publish_weights import TensorSet, WeightPublisher

    entries, _, named = model
    count = len(started)
    urls = tell_servers(started, {name: list(shape) for name, shape in named.items()})
    config = VllmConfig(servers=urls, full_every=1000, wait_seconds=20, sync_seconds=60)
    servers = Servers(config, SamplingConfig(), lambda line: print("!", line, flush=True))
    servers.open()

    retained = PublishedCopy() if options.base == "device" else None

    def write(params):
        return list_pieces(params, entries, "bfloat16", retained)

    def find(params):
        return list_pieces(params, entries, "bfloat16", retained, compare=True)

    publisher = WeightPublisher(
        servers, write, TensorSet(named), delta=True, ahead=True,
        find=find if retained else None,
        device=open_device(named, entries) if options.transport == "device" else None,
    )  # fmt: skip
    rows, version = [], -1
    plan = [("full", False)] * options.repeat + [("delta", True)] * options.repeat
    start = time.perf_counter()
    for _ in range(2):  # memory is touched for the first time, functions are compiled
        publisher.publish(version := version + 1, params)
        publisher.delivery.wait()
    took = time.perf_counter() - start
    print(f"# {count} servers, {options.transport}: ready; twice in {took:.1f} s", flush=True)
    for kind, delta in plan:
        change(params, version)
        publisher.delta = delta
        jax.block_until_ready(params)
        start = time.perf_counter()
        blocked = publisher.publish(version := version + 1, params)["sync/blocked_seconds"]
        parts = publisher.delivery.wait()
        seconds = time.perf_counter() - start
        assert not servers.counters["servers_lost"]
        assert options.transport != "device" or publisher.device, "it went through the host"
        row = {"servers": count, "transport": options.transport, "kind": kind}
        row |= {"base": options.base, "sent": "delta" if parts["sync/delta"] else "all"}
        row |= {"seconds": seconds, "blocked": blocked, "checksum": parts["sync/checksum_seconds"]}
        row |= {"stage": parts["sync/stage_seconds"], "pause": parts["sync/pause_seconds"]}
        size = (sum(array.size for array in params.values()) * 2 * count) / 1e9
        row |= {"GB": size, "GB/s": size / seconds, "tcp_GB": parts["sync/tcp_bytes"] / 1e9}
        rows.append(row | {"changed": parts.get("sync/changed", 1.0)})
        show(rows[-1])
        if options.verify and (kind, delta) not in plan[version - 1 :]:
            verify(urls, entries, params)
    if options.plain and count == options.servers[0]:
        rows.append(compare_with_plain(publisher, entries, named, params))
        show(rows[-1])
    publisher.close()
    stop(started)
    return rows


def stop(started):
    for process in started:
        with contextlib.suppress(OSError):  # it is dead already
            process.stdin.close()
    for process in started:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def open_device(named, entries):
    """The trainer's image of the weights in GPU memory."""
    import jax

    from jaxtrain.generation.weight_sync.device_image import DeviceImage
    from jaxtrain.generation.weight_sync.device_layout import list_rows
    from jaxtrain_vllm.cuda_driver import Cuda

    def rows(params, homes):
        return list_rows(params, entries, "bfloat16", homes)

    cuda = Cuda() if jax.default_backend() in ("gpu", "cuda") else stand_in()
    return DeviceImage(named, "bfloat16", rows, cuda)


def verify(urls, entries, params):
    """AssertionError unless all bytes are what the host's way makes of the parameters."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from jaxtrain.generation.vllm.control import call
    from jaxtrain.generation.weight_sync.device_layout import list_pieces
    from jaxtrain.generation.weight_sync.host_image import look_ahead
    from jaxtrain_vllm import wire

    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(call, url, "GET", "/digest", timeout=60) for url in urls]
        room, filled, expected = np.zeros(0, "<u2"), 0, {}
        for piece in look_ahead(list_pieces(params, entries, "bfloat16")):
            size = int(np.prod(piece.shape))  # the pieces of a tensor come one after the other
            if room.size < size:
                room = np.zeros(size, room.dtype)
            bits, array = room[:size], np.asarray(piece.array)
            bits.reshape(piece.shape)[piece.index] = array.view(bits.dtype)
            filled += array.size
            if filled == size:
                tensor = wire.WireTensor(piece.shape, "bfloat16", bits)
                expected[piece.name], filled = wire.checksum({piece.name: tensor}), 0
        actual = [done.result() for done in held]
    differ = [name for name in expected for held in actual if held.get(name) != expected[name]]
    messages = {"verified": len(actual), "tensors": len(expected), "differ": len(differ)}
    show(messages | {"seconds": time.perf_counter() - start})
    assert not differ and set(expected) == set(actual[0]), f"other bytes in {differ[:5]}"


def compare_with_plain(publisher, entries, named, params):
    """Seconds of the plain way, on the host in one thread; AssertionError for other bits."""
    import numpy as np

    from jaxtrain.generation.weight_sync.publish_weights import collect
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
    parser.add_argument("--transport", choices=["shared", "tcp", "device"], default="shared")
    parser.add_argument("--base", choices=["host", "device"], default="host")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.load = options.load or options.verify or options.transport == "device"
    if options.serve:
        return serve(options)
    waiting = [start_servers(number, options) for number in options.servers]
    try:
        run(options, waiting)
    finally:
        for started in waiting:
            stop(started)


def run(options, waiting):
    import jax

    model = make_model(options.shape)
    params = draw_params(model[1])
    count = sum(array.size for array in params.values())
    device = jax.devices()[0].device_kind
    print(f"# {count / 1e9:.2f} B parameters in float32 on {device}, {os.cpu_count()} cores")
    rows = [row for started in waiting for row in measure(started, options, model, params)]
    if options.out:
        header = {"command": " ".join(["python", *sys.argv]), "hardware": device}
        header |= {"cores": os.cpu_count(), "jax": jax.__version__, "parameters": count}
        options.out.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
