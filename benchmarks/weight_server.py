"""A server of weight_sync.py: the real receiving code of `jaxtrain_vllm` without vLLM.

It answers the routes that the publisher calls, at a loopback address that stands for its host, and
its one worker connects from there. `Receiver` is its state; nothing else is of the process.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
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


def find_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def stand_in_cuda():
    """Return host memory with the driver's interface, for machines without a GPU."""
    sys.path.append(str(ROOT / "tests" / "generation"))
    from host_cuda import HostCuda

    return HostCuda()


def open_receiver(transport: str):
    """Return the receiver of a transport."""
    from jaxtrain_vllm.shared_memory import SharedMemorySegment
    from jaxtrain_vllm.weight_receiver import WeightReceiver

    if transport == "device":
        from jaxtrain_vllm.cuda_ipc import CudaIpcMemory, open_ipc_memory

        opened = open_ipc_memory(find_device())
        return WeightReceiver(
            opened or (lambda messages: CudaIpcMemory(messages, "cpu", stand_in_cuda()))
        )
    if transport == "tcp":

        def attach(described):
            raise OSError("another host")

        SharedMemorySegment.attach = attach
    return WeightReceiver()


class Receiver:
    """The weights of this process and the routes that change them."""

    def __init__(self, options, tensors: dict):
        self.receiver, self.tensors = open_receiver(options.transport), tensors
        self.loaded, self.memory, self.listener, self.version = {}, None, None, None
        if options.load:
            from jaxtrain_vllm.pinned_memory import PinnedArray

            self.memory = PinnedArray()
            if find_device() == "cuda":
                import torch

                torch.zeros(1, device="cuda")
        self.routes = {
            "/health": lambda body: {},
            "/version": lambda body: {"version": "0.32.0"},
            "/v1/models": lambda body: {"data": [{"id": "base", "max_model_len": 4096}]},
            "/inference/v1/generate": self.draw,
            "/get_world_size": lambda body: {"world_size": 1},
            "/init_weight_transfer_engine": self.connect,
            "/pause": lambda body: {},
            "/resume": lambda body: {},
            "/start_weight_update": lambda body: {},
            "/update_weights": self.check,
            "/finish_weight_update": self.commit,
            "/digest": self.digest,
        }

    def draw(self, body):
        logprobs = {"content": [{"token_id": 1, "logprob": 0.0}]}
        choice = {"token_ids": [1], "finish_reason": "length", "logprobs": logprobs}
        return {"choices": [choice]}

    def connect(self, body):
        from jaxtrain_vllm import weight_receiver

        info = body["init_info"]
        serves = self.receiver.begin(info["token"])
        link = weight_receiver.connect(info, 0, self.tensors, serves)
        self.listener = threading.Thread(target=self.receiver.listen, args=(link,), daemon=True)
        self.listener.start()

    def check(self, body):
        self.version = body["update_info"]["version"]
        self.receiver.check(self.version, body["update_info"]["checksum"])

    def load(self, tensors):
        """Copy everything to the GPU, into tensors that are there already after the first time."""
        if self.memory is None:
            return
        import torch

        from jaxtrain_vllm.pinned_memory import to_torch

        device = find_device()
        for name, (shape, dtype, bits) in tensors.items():
            if name not in self.loaded:
                self.loaded[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self.loaded[name].copy_(to_torch(bits, shape, dtype, device))
        if device == "cuda":
            torch.cuda.synchronize()

    def commit(self, body):
        if self.memory is not None:
            self.memory.take(self.receiver.memory, find_device())
        self.receiver.commit(self.version, self.load)

    def digest(self, body):
        """Return {name: CRC of the bits} of all that was loaded."""
        import torch

        from jaxtrain_vllm import wire

        largest = max(tensor.nbytes for tensor in self.loaded.values())
        room = torch.empty(largest, dtype=torch.uint8, pin_memory=find_device() == "cuda")
        sums = {}
        for name, tensor in self.loaded.items():
            part = room[: tensor.nbytes]
            part.copy_(tensor.view(-1).view(torch.uint8))
            bits = part.numpy().view(wire.BITS[tensor.itemsize])
            wired = wire.WireTensor(tuple(tensor.shape), "bfloat16", bits)
            sums[name] = wire.checksum({name: wired})
        return sums


class Handler(BaseHTTPRequestHandler):
    """HTTP around a receiver's routes."""

    routes: dict = {}

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        self.answer(json.loads(self.rfile.read(size) or b"null"))

    def answer(self, body):
        route = self.routes.get(self.path.split("?")[0])
        try:
            status, content = (200, route(body)) if route else (404, {"detail": "Not Found"})
        except (KeyError, ValueError) as error:
            status, content = 500, {"error": {"message": str(error)}}
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def serve(options) -> None:
    """Serve until the input ends; its first line is {tensor: shape}."""
    pace(options.rate)
    connect = socket.create_connection
    socket.create_connection = partial(connect, source_address=(options.serve, 0))
    receiver = Receiver(options, json.loads(sys.stdin.readline()))
    Handler.routes = receiver.routes
    server = ThreadingHTTPServer((options.serve, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    if receiver.listener is not None:
        receiver.listener.join(5)


class ServerProcess:
    """A server in a process of its own at an address; `open` gives it what it serves."""

    def __init__(self, command: list[str], address: str, env: dict):
        self.address = address
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*command, "--serve", address], env=env, **pipe)

    def open(self, shapes: dict) -> str:
        """Return the URL, once it serves tensors of these shapes."""
        self.process.stdin.write(json.dumps(shapes) + "\n")
        self.process.stdin.flush()
        return f"http://{self.address}:{int(self.process.stdout.readline())}"

    def hang_up(self) -> None:
        """End its input, upon which it ends."""
        try:
            self.process.stdin.close()
        except OSError:  # it is dead already
            pass

    def wait(self) -> None:
        """Wait until it ended; kill it if it does not."""
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
