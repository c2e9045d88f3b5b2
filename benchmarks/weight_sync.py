"""Weights from a trainer to servers: seconds in all, seconds that the trainer waits, and the parts.

    python benchmarks/weight_sync.py --shape 8b --servers 1 4 --load        a GPU with 80 GB or more
    python benchmarks/weight_sync.py --shape tiny --plain                   a CPU, to try it
    python benchmarks/weight_sync.py --shape 4b --hosts 8                   a CPU with 64 GB
    python benchmarks/weight_sync.py --shape 64m --hosts 1 1 1 1 --fan-out 0 2 --rate 50

The trainer's side is the run's own (`generation/weight_sync/publish_weights.py`) with random
float32 weights made on the device; a server is a process of `weight_server.py`. --load has it copy
what it committed to the GPU, as vLLM would (its repacking is not in that).

--transport tcp: each server is sent its own copy over loopback; device: from GPU memory to GPU
memory (without a GPU: host memory that stands in for it).
--hosts: so many servers on each of several hosts, none of them the trainer's. Hosts are addresses
of loopback, whose servers read the memory of their host's first one (not with --transport tcp).
--rate: no process sends more than so many MB a second, as if that were its network card's.
--verify: all bytes that servers loaded against what the host's way makes. --plain: also the plain
way, tensor by tensor on the host, whose bits must be the same. `weight_sync_check.py` runs the ways
between processes of one GPU, each on its own.
"""

import argparse
import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from harness import Report
from weight_server import ServerProcess, pace, serve, stand_in_cuda


def shape(vocab: int, width: int, ffn: int, layers: int, heads: tuple[int, int], dim: int) -> dict:
    """Return the sizes of a config.json; heads: (query, key)."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": dim,
        "tie_word_embeddings": False,
    }


SHAPES = {
    "8b": shape(151936, 4096, 12288, 36, (32, 8), 128),
    "4b": shape(151936, 2560, 9728, 34, (32, 8), 128),  # 7.9 GB in bfloat16
    "0.6b": shape(151936, 1024, 3072, 28, (16, 8), 128),
    "64m": shape(32768, 512, 2048, 8, (8, 4), 64),  # 129 MB
    "tiny": shape(4096, 256, 1024, 6, (4, 2), 64),
}
CHANGED = 0.015


def make_model(shape: str):
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


def draw_params(shapes: dict) -> dict:
    """Return random float32 parameters."""
    import jax

    make = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape), static_argnums=1)
    return {path: make(jax.random.key(i), s) for i, (path, s) in enumerate(shapes.items())}


def change(params: dict, seed: int) -> None:
    """Put other weights at some places: about CHANGED of them in bfloat16."""
    import jax

    @partial(jax.jit, donate_argnums=0)
    def alter(array, key):
        hit = jax.random.bits(key, array.shape, "uint16") < int(CHANGED * 2**16)
        return jax.numpy.where(hit, array * 1.05 + 1e-4, array)

    keys = jax.random.split(jax.random.key(seed), len(params))
    for path, key in zip(list(params), keys, strict=True):
        params[path] = alter(params[path], key)
    jax.block_until_ready(params)


class Trainer:
    """The publisher of a run, its weights, and servers that it sends them to."""

    def __init__(self, options, model, params, urls: list[str], fan_out: int, streams: int):
        from jaxtrain.config import SamplingConfig
        from jaxtrain.config.vllm import VllmConfig
        from jaxtrain.generation.vllm.servers import Servers
        from jaxtrain.generation.weight_sync.device_layout import PublishedCopy, list_pieces
        from jaxtrain.generation.weight_sync.publish_weights import TensorSet, WeightPublisher

        self.options, self.params, self.urls = options, params, urls
        self.entries, _, self.named = model
        waits = {"wait_seconds": 20, "sync_seconds": 600, "full_every": 1000}
        config = VllmConfig(servers=urls, fan_out=fan_out, streams=streams, **waits)
        self.servers = Servers(config, SamplingConfig(), lambda line: print("!", line, flush=True))
        self.servers.open()
        retained = PublishedCopy() if options.base == "device" else None

        def write(params, **how):
            return list_pieces(params, self.entries, "bfloat16", retained, **how)

        self.publisher = WeightPublisher(
            self.servers,
            write,
            TensorSet(self.named),
            delta=True,
            ahead=True,
            find=partial(write, compare=True) if retained else None,
            device=self.open_device() if options.transport == "device" else None,
        )
        self.version = -1

    def open_device(self):
        """Return the trainer's image of the weights in GPU memory."""
        import jax

        from jaxtrain.generation.weight_sync.device_image import DeviceImage
        from jaxtrain.generation.weight_sync.device_layout import list_rows
        from jaxtrain_vllm.cuda_driver import Cuda

        def rows(params, homes):
            return list_rows(params, self.entries, "bfloat16", homes)

        cuda = Cuda() if jax.default_backend() in ("gpu", "cuda") else stand_in_cuda()
        return DeviceImage(self.named, "bfloat16", rows, cuda)

    def publish(self, delta: bool = True) -> dict:
        """Send the parameters and return the parts of what it took."""
        self.version += 1
        self.publisher.delta = delta
        start = time.perf_counter()
        blocked = self.publisher.publish(self.version, self.params)["sync/blocked_seconds"]
        parts = self.publisher.delivery.wait()
        seconds = time.perf_counter() - start
        assert not self.servers.counters["servers_lost"]
        through_host = self.options.transport == "device" and not self.publisher.device
        assert not through_host, "it went through the host"
        size = sum(array.size for array in self.params.values()) * 2 * len(self.urls) / 1e9
        return {
            "sent": "delta" if parts["sync/delta"] else "all",
            "seconds": seconds,
            "blocked": blocked,
            "checksum": parts["sync/checksum_seconds"],
            "stage": parts["sync/stage_seconds"],
            "pause": parts["sync/pause_seconds"],
            "GB": size,
            "GB/s": size / seconds,
            "tcp_GB": parts["sync/tcp_bytes"] / 1e9,
            "changed": parts.get("sync/changed", 1.0),
        }

    def measure(self, report: Report, **labels) -> None:
        """Add rows of whole versions and of deltas."""
        for _ in range(2):  # memory is touched for the first time, functions are compiled
            self.publish()
        plan = [False] * self.options.repeat + [True] * self.options.repeat
        for index, delta in enumerate(plan):
            change(self.params, self.version)
            kind = "delta" if delta else "full"
            report.add(**labels, kind=kind, base=self.options.base, **self.publish(delta))
            if self.options.verify and delta not in plan[index + 1 :]:
                self.verify()

    def verify(self) -> None:
        """AssertionError unless all bytes are what the host's way makes of the parameters."""
        import numpy as np

        from jaxtrain.generation.vllm.control import call
        from jaxtrain.generation.weight_sync.device_layout import list_pieces
        from jaxtrain.generation.weight_sync.host_image import look_ahead
        from jaxtrain_vllm import wire

        with ThreadPoolExecutor() as pool:
            digests = [pool.submit(call, url, "GET", "/digest", timeout=60) for url in self.urls]
            room, filled, expected = np.zeros(0, "<u2"), 0, {}
            for piece in look_ahead(list_pieces(self.params, self.entries, "bfloat16")):
                size = int(np.prod(piece.shape))  # the pieces of a tensor come one after the other
                if room.size < size:
                    room = np.zeros(size, room.dtype)
                bits, array = room[:size], np.asarray(piece.array)
                bits.reshape(piece.shape)[piece.index] = array.view(bits.dtype)
                filled += array.size
                if filled == size:
                    tensor = wire.WireTensor(piece.shape, "bfloat16", bits)
                    expected[piece.name], filled = wire.checksum({piece.name: tensor}), 0
            actual = [digest.result() for digest in digests]
        differ = [n for n in expected for sums in actual if sums.get(n) != expected[n]]
        print(f"verified {len(actual)} servers, {len(expected)} tensors, {len(differ)} differ")
        assert not differ and set(expected) == set(actual[0]), f"other bytes in {differ[:5]}"

    def compare_with_plain(self, report: Report) -> None:
        """Add the seconds of the plain way, on the host in one thread; AssertionError for other
        bits."""
        import numpy as np

        from jaxtrain.generation.weight_sync.publish_weights import collect
        from jaxtrain_vllm import wire

        start = time.perf_counter()
        pieces = (
            piece
            for entry in self.entries
            for piece in entry.op.write(np.asarray(self.params[entry.param]), np.asarray)
        )
        tensors = collect(pieces, self.named, "bfloat16")
        report.add(kind="plain, on the host", seconds=time.perf_counter() - start)
        assert wire.checksum(tensors) == self.publisher.newest.checksum, "other bits"


def start_servers(options, addresses: list[str]) -> list[ServerProcess]:
    """Start the processes of servers at these addresses."""
    command = [sys.executable, __file__, "--transport", options.transport]
    command += ["--rate", str(options.rate), *(["--load"] if options.load else [])]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return [ServerProcess(command, address, env) for address in addresses]


def list_addresses(options) -> list[list[str]]:
    """Return the servers' addresses in each case; those of --hosts are not the trainer's."""
    if not options.hosts:
        return [["127.0.0.1"] * count for count in options.servers]
    return [[f"127.0.0.{host + 2}" for host, n in enumerate(options.hosts) for _ in range(n)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--hosts", type=int, nargs="+", help="servers of each host")
    parser.add_argument("--transport", choices=["shared", "tcp", "device"], default="shared")
    parser.add_argument("--base", choices=["host", "device"], default="host")
    parser.add_argument("--fan-out", type=int, nargs="+", default=[8], help="rollout.vllm.fan_out")
    parser.add_argument("--streams", type=int, nargs="+", default=[4], help="rollout.vllm.streams")
    parser.add_argument("--rate", type=float, default=0.0, help="MB a second of each process")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.load = options.load or options.verify or options.transport == "device"
    if options.serve:
        return serve(options)
    pace(options.rate)
    ways = list(itertools.product(list_addresses(options), options.fan_out, options.streams))
    waiting = [start_servers(options, addresses) for addresses, _, _ in ways]
    try:
        report, model = Report(options.out), make_model(options.shape)
        params = draw_params(model[1])
        report.header["parameters"] = sum(array.size for array in params.values())
        print(f"# {report.header}, {os.cpu_count()} cores", flush=True)
        for index, (started, (_, fan_out, streams)) in enumerate(zip(waiting, ways, strict=True)):
            shapes = {name: list(shape) for name, shape in model[2].items()}
            urls = [server.open(shapes) for server in started]
            trainer = Trainer(options, model, params, urls, fan_out, streams)
            labels = {"servers": len(urls), "transport": options.transport}
            if options.hosts:
                labels |= {"hosts": len(options.hosts), "fan_out": fan_out, "streams": streams}
            trainer.measure(report, **labels)
            if options.plain and index == 0:
                trainer.compare_with_plain(report)
            trainer.publisher.close()
    finally:
        servers = [server for started in waiting for server in started]
        for server in servers:
            server.hang_up()
        for server in servers:
            server.wait()


if __name__ == "__main__":
    main()
