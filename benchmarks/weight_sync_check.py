"""Weights from process to process on one GPU: whether CUDA IPC works, all bytes, how long it takes.

    python benchmarks/weight_sync_check.py                  one GPU; 4 servers need 139 GB, 1 80 GB
    python benchmarks/weight_sync_check.py --shape tiny     a CPU, to try it

The host's way is measured beside it (`weight_sync.py` does both). Every case is a process of its
own, killed when it is late. The first is the driver alone: memory is lent, read, and its owner
killed while another process has it open.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import log, query_gpu, run_limited, write_json

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
SIZE = 2**28
HELD_GB = {"8b": (33.0, 16.4), "tiny": (0.1, 0.1)}
"""GB of the trainer's weights in float32, and of one copy in bfloat16."""
CASES = (
    (1, "device", "--verify"),
    (4, "device", "--verify"),
    (4, "shared", "--load"),
    (1, "shared", "--load"),
)
"""(servers, transport, option) of weight_sync.py."""


def lend(folder: Path) -> None:
    """Own lent memory until killed."""
    from jaxtrain_vllm.cuda_driver import Cuda

    cuda = Cuda()
    position = cuda.allocate(0, SIZE)
    host = ctypes.create_string_buffer(bytes(range(256)) * (SIZE // 256), SIZE)
    with cuda._on(0):
        cuda._call("cuMemcpyHtoD_v2", ctypes.c_uint64(position), host, ctypes.c_size_t(SIZE))
    (folder / "handle.part").write_bytes(cuda.export(0, position))
    (folder / "handle.part").rename(folder / "handle")
    time.sleep(60)


def borrow(folder: Path) -> None:
    """Read lent memory, kill its owner, and check that this process's GPU goes on."""
    import torch

    from jaxtrain_vllm.cuda_driver import Cuda

    owner = subprocess.Popen([sys.executable, __file__, "--role", "lend", "--folder", str(folder)])
    torch.zeros(1, device="cuda")
    wait_for(folder / "handle", owner)
    cuda, stream = Cuda(), torch.cuda.current_stream().cuda_stream
    expected = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(SIZE // 256)
    actual = torch.zeros_like(expected)

    def read(label: str) -> None:
        try:
            actual.zero_()
            cuda.copy(0, actual.data_ptr(), position, SIZE, stream)
            torch.cuda.synchronize()
            same = torch.equal(actual, expected)
            print(f"{label}: {'the right bytes' if same else 'OTHER BYTES'}", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"{label}: {error!r:.300}", flush=True)

    try:
        start = time.perf_counter()
        position = cuda.open(0, (folder / "handle").read_bytes())
        print(f"opened in {time.perf_counter() - start:.4f} s", flush=True)
        read("read")
        start = time.perf_counter()
        for _ in range(20):
            cuda.copy(0, actual.data_ptr(), position, SIZE, stream)
        torch.cuda.synchronize()
        print(f"copied at {20 * SIZE / 1e9 / (time.perf_counter() - start):.0f} GB/s", flush=True)
    finally:
        owner.kill()
        owner.wait(10)
    time.sleep(1)
    read("read after its owner was killed")
    cuda.close(0, position)
    total = float(torch.ones(1000, device="cuda").sum())
    print(f"the GPU goes on: {'yes' if total == 1000 else 'NO'}", flush=True)


def wait_for(file: Path, owner: subprocess.Popen) -> None:
    end = time.monotonic() + 20
    while not file.exists():
        if owner.poll() is not None or time.monotonic() > end:
            raise SystemExit("the owner did not lend its memory; its error is above")
        time.sleep(0.02)


def list_cases(shape: str, total: float | None, folder: Path) -> dict[str, tuple[list[str], float]]:
    """Return {name: (command, GB of the GPU that it needs beside the trainer's own)}; total: of
    the GPU, None without one."""
    driver = [__file__, "--role", "borrow", "--folder", str(folder)]
    cases = {"the driver alone": (driver, 0.0)} if total else {}
    for servers, transport, option in CASES:
        command = [str(ROOT / "benchmarks" / "weight_sync.py"), "--repeat", "2", option]
        command += ["--shape", shape, "--servers", str(servers), "--transport", transport]
        command += ["--out", str(folder / f"{transport}{servers}.json")]
        copies = servers + (transport == "device")
        needed = copies * HELD_GB[shape][1] + servers * 2.5 + 3
        cases[f"{transport}, {servers} server{'s' * (servers > 1)}"] = (command, needed)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(HELD_GB), default="8b")
    parser.add_argument("--seconds", type=float, default=140, help="for all cases together")
    parser.add_argument("--case-seconds", type=float, default=60)
    parser.add_argument("--out", type=Path, help="one JSON file of all rows")
    parser.add_argument("--role", choices=["lend", "borrow"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        return {"lend": lend, "borrow": borrow}[options.role](options.folder)
    memory = query_gpu("memory.total")  # "143771 MiB"
    total = None if memory == "CPU" else int(memory.split()[0]) * 2**20 / 1e9
    end, results, runs = time.monotonic() + options.seconds, {}, []
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = text + "/compiled"
        for name, (command, peers) in list_cases(options.shape, total, folder).items():
            weights = HELD_GB[options.shape][0] if peers else 0.0
            limit = min(end - time.monotonic(), options.case_seconds)
            if limit < 15 or (total and weights + 8 + peers > total):
                log(f"{name}: skipped, it needs {weights + 8 + peers:.0f} GB and 15 s")
                continue
            share = f"{min(0.75, (0.97 * total - peers) / total) if total else 0.75:.2f}"
            env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": share}
            output, failed = run_limited([sys.executable, *command], limit, env=env)
            results[name] = failed is None
            log(f"{name}: {failed or 'ok'}\n{output}")
        for path in sorted(folder.glob("*.json")):
            runs.append(json.loads(path.read_text()))
    log("; ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in results.items()))
    if options.out:
        write_json(options.out, {"runs": runs, "cases": results})


if __name__ == "__main__":
    main()
