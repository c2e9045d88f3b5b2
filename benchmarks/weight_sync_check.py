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
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
SIZE = 2**28
HELD_GB = {"8b": (33.0, 16.4), "tiny": (0.1, 0.1)}
"""GB of the trainer's weights in float32, and of one copy in bfloat16."""


def lend(folder):
    """Owner of lent memory, until it is killed."""
    from jaxtrain_vllm.cuda_driver import Cuda

    cuda = Cuda()
    position = cuda.allocate(0, SIZE)
    created = bytes(range(256)) * (SIZE // 256)
    host = ctypes.create_string_buffer(created, SIZE)
    with cuda._on(0):
        cuda._call("cuMemcpyHtoD_v2", ctypes.c_uint64(position), host, ctypes.c_size_t(SIZE))
    (folder / "handle.part").write_bytes(cuda.export(0, position))
    (folder / "handle.part").rename(folder / "handle")
    time.sleep(60)


def borrow(folder):
    """Reads lent memory, has its owner killed, and says what becomes of the own GPU."""
    import torch

    from jaxtrain_vllm.cuda_driver import Cuda

    owner = subprocess.Popen([sys.executable, __file__, "--role", "lend", "--folder", str(folder)])
    torch.zeros(1, device="cuda")
    wait_for(folder / "handle", owner)
    cuda, stream = Cuda(), torch.cuda.current_stream().cuda_stream
    expected = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(SIZE // 256)
    actual = torch.zeros_like(expected)

    def read(label):
        try:
            actual.zero_()
            cuda.copy(0, actual.data_ptr(), position, SIZE, stream)
            torch.cuda.synchronize()
            print(
                f"{label}: {'the right bytes' if torch.equal(actual, expected) else 'OTHER BYTES'}"
            )
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


def wait_for(file, owner):
    end = time.monotonic() + 20
    while not file.exists():
        if owner.poll() is not None or time.monotonic() > end:
            raise SystemExit("the owner did not lend its memory; its error is above")
        time.sleep(0.02)


def run_case(name, command, seconds, env):
    """Run a case and return True if it ended well in time; its output is shown as it comes."""
    print(f"## {name} (at most {seconds:.0f} s)", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(command, env=env, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(max(1.0, seconds))
        messages = "ok" if code == 0 else f"FAILED with {code}"
    except subprocess.TimeoutExpired:
        messages = "FAILED: too late"
    try:
        os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind
    except ProcessLookupError:
        pass
    process.wait()
    print(f"## {name}: {messages}, {time.monotonic() - start:.1f} s", flush=True)
    return messages == "ok"


def measure_memory():
    """GB of the GPU, None without one."""
    ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        actual = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        print(f"# no GPU is seen: {error}", flush=True)
        return None
    print(f"# {actual.splitlines()[0]} MiB", flush=True)
    return int(actual.splitlines()[0].split(",")[1]) * 2**20 / 1e9


def main():
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
    end, total = time.monotonic() + options.seconds, measure_memory()
    runs, messages = [], {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": text + "/compiled"}
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONUNBUFFERED": "1"}
        if total:
            local_value = [sys.executable, __file__, "--role", "borrow", "--folder", text]
            messages["the driver alone"] = run_case("the driver alone", local_value, 40, env)
        for number, transport, extra in (
            (1, "device", ["--verify"]),
            (4, "device", ["--verify"]),
            (4, "shared", ["--load"]),
            (1, "shared", ["--load"]),
        ):
            name = f"{transport}, {number} server{'s' * (number > 1)}"
            weights, copy = HELD_GB[options.shape]
            peers = (number + (transport == "device")) * copy + number * 2.5 + 3
            if total and weights + 8 + peers > total:
                print(f"## {name}: skipped, it needs {weights + 8 + peers:.0f} GB", flush=True)
                continue
            remaining = end - time.monotonic()
            if remaining < 15:
                print(f"## {name}: skipped, no time is left", flush=True)
                continue
            if total:
                share = min(0.75, (0.97 * total - peers) / total)
                env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.2f}"
            out = folder / f"{transport}{number}.json"
            local_value = [
                sys.executable,
                str(ROOT / "benchmarks" / "weight_sync.py"),
                "--repeat",
                "2",
            ]
            local_value += [
                "--shape",
                options.shape,
                "--servers",
                str(number),
                "--transport",
                transport,
            ]
            local_value += [*extra, "--out", str(out)]
            messages[name] = run_case(name, local_value, min(remaining, options.case_seconds), env)
            if out.exists():
                runs.append(json.loads(out.read_text()))
    print("# " + "; ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in messages.items()))
    for run in runs:
        for row in run["rows"]:
            short = {k: row[k] for k in ("seconds", "blocked", "checksum", "stage", "pause")}
            cells = "  ".join(f"{k} {v:.3f}" for k, v in short.items())
            print(f"{row['transport']:>6} {row['servers']} {row['kind']:>5}  {cells}")
    if options.out:
        options.out.write_text(json.dumps({"runs": runs, "cases": messages}, indent=1) + "\n")


if __name__ == "__main__":
    main()
