"""Weights to workers of several hosts: bytes and seconds of staging, over loopback.

    python benchmarks/weight_hosts.py --gib 1
    python benchmarks/weight_hosts.py --gib 1 --streams 1 4          one host, over so many each
    python benchmarks/weight_hosts.py --gib 0.125 --relay 0 1 2 8 --rate 100   12 hosts, by fan_out

The trainer's side is the run's own (`generation/weight_sync/staging.py`), a worker is a process
with the real receiving code of `jaxtrain_vllm`; hosts are names. No model loads the weights. Each
case is a whole version and a delta of 1.5 % of the items, once with workers that read the memory of
the first one of their host, and once with each sent its own copy, as by a trainer that knows no
hosts.
--rate: no process sends more than so many MB a second, as if that were its network card's.
"""

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

CHANGED = 0.015
CASES = {"1 host x 8": [8], "4 hosts x 2": [2, 2, 2, 2]}
HOSTS = 12
PIECE = 2**18


def pace(rate: float) -> None:
    """Have all connections of this process together send at most `rate` MB a second; 0: any."""
    from jaxtrain_vllm import wire

    send, lock, free = wire.send_message, threading.Lock(), [0.0]

    class Paced:
        def __init__(self, connection):
            self.connection = connection

        def sendall(self, data):
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                with lock:
                    free[0] = max(free[0], time.monotonic()) + len(piece) / rate / 1e6
                    wait = free[0] - time.monotonic()
                time.sleep(max(0.0, wait))
                self.connection.sendall(piece)

    if rate:
        wire.send_message = lambda to, header, payload=(): send(Paced(to), header, payload)


def work(port: int, token: str, server: str, rate: float) -> None:
    """A worker: connects, and answers until the trainer hangs up."""
    from jaxtrain_vllm.weight_receiver import WeightReceiver, connect

    pace(rate)
    shelf = WeightReceiver()
    info = {"host": "127.0.0.1", "port": port, "token": token, "server": server}
    link = connect(info, 0, {}, shelf.begin(token))
    answer = shelf.answer

    def commit_too(header, payload):
        actual = answer(header, payload)
        if header["command"] == "stage" and "staged" in actual:
            shelf.commit(header["version"], lambda tensors: None)
        return actual

    shelf.answer = commit_too
    shelf.listen(link)


def measure(
    sizes: list[int],
    gib: float,
    share: bool,
    streams: int = 1,
    fan_out: int = 0,
    rate: float = 0.0,
) -> list[tuple[str, float, float]]:
    """(kind, GiB that the trainer sent, seconds) of a whole version and of a delta."""
    from jaxtrain.generation.vllm.control import Deadline
    from jaxtrain.generation.weight_sync.host_image import Image
    from jaxtrain.generation.weight_sync.staging import Staging, WeightVersion
    from jaxtrain.generation.weight_sync.weight_links import WeightLinks
    from jaxtrain_vllm import wire

    shapes = {f"layer{i}": (16, 2**20) for i in range(max(1, round(gib * 2**30 / 2**25)))}
    rng = np.random.default_rng(0)
    image, links, counted = Image(shapes, "bfloat16"), WeightLinks("127.0.0.1", 0), {}

    def count(name: str, number: float) -> None:
        counted[name] = counted.get(name, 0.0) + number

    staging = Staging(count, offers=links.offers, streams=streams, fan_out=fan_out)
    workers, actual = [], []
    try:
        for host, size in enumerate(sizes):
            for position in range(size):
                server = f"{host}/{position}"
                messages = links.describe(server)
                command = [
                    sys.executable,
                    __file__,
                    "--worker",
                    str(messages["port"]),
                    messages["token"],
                ]
                workers.append(subprocess.Popen([*command, server, str(rate)]))
                (link,) = links.wait_for(server, 1, 60)
                link.host, link.local_host, link.can_share = str(host), "trainer", share
                actual.append(link)
        rows, newest = [], None
        for version in range(2):
            if newest is None:
                for tensor in image.tensors.values():
                    tensor.bits[:] = rng.integers(0, 2**14, tensor.bits.size, np.uint16)
                changes = None
            else:
                changes = {}
                for name, tensor in image.tensors.items():
                    step = round(1 / CHANGED)
                    where = np.arange(version, tensor.bits.size, step, dtype=np.uint32)
                    tensor.bits[where] ^= 1
                    changes[name] = wire.Changes(where, tensor.bits[where], tensor.bits.size)
            checksum = wire.checksum(image.tensors)
            image.segment.seal(version, checksum)
            last, newest = (
                newest,
                WeightVersion(version, image.tensors, checksum, changes, version - 1),
            )
            staging.history.add(last, newest)
            staging.relays.begin(version, len(sizes))
            counted.clear()
            start = time.perf_counter()
            errors: list[BaseException] = []

            def one(link, weights=newest, errors=errors) -> None:
                try:
                    staging.stage([link], weights, image.segment, Deadline(600))
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=one, args=(link,)) for link in actual]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
            for link in actual:
                link.served = (version, checksum)
            seconds = time.perf_counter() - start
            kind = "whole" if changes is None else "delta"
            rows.append((kind, counted["sync/tcp_bytes"] / 2**30, seconds))
        return rows
    finally:
        links.close()
        for worker in workers:
            worker.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of a model")
    parser.add_argument("--once", action="store_true", help="leave out the cases of own copies")
    parser.add_argument("--streams", type=int, nargs="+", help="one worker, over so many streams")
    parser.add_argument("--relay", type=int, nargs="+", help=f"{HOSTS} hosts, with these fan_out")
    parser.add_argument("--rate", type=float, default=0.0, help="MB a second of each process")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        port, token, server, rate = options.worker
        return work(int(port), token, server, float(rate))
    pace(options.rate)
    print(f"{'case':14} {'':12} {'':6} {'GiB sent':>9} {'seconds':>8}")
    entry, many = [1], [1] * HOSTS
    if options.streams:
        cases = [("1 host", entry, f"{n} streams", True, n, 0) for n in options.streams]
    elif options.relay:
        cases = [(f"{HOSTS} hosts", many, f"fan_out {n}", True, 1, n) for n in options.relay]
    else:
        ways = [("once a host", True), ("own copies", False)][: 1 if options.once else 2]
        cases = [(name, sizes, *way, 1, 0) for name, sizes in CASES.items() for way in ways]
    for case, sizes, how, share, streams, fan_out in cases * options.repeat:
        rows = measure(sizes, options.gib, share, streams, fan_out, options.rate)
        for kind, sent, seconds in rows:
            print(f"{case:14} {how:12} {kind:6} {sent:9.3f} {seconds:8.2f}", flush=True)


if __name__ == "__main__":
    main()
