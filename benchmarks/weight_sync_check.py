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
    place = cuda.allocate(0, SIZE)
    made = bytes(range(256)) * (SIZE // 256)
    host = ctypes.create_string_buffer(made, SIZE)
    with cuda._on(0):
        cuda._call("cuMemcpyHtoD_v2", ctypes.c_uint64(place), host, ctypes.c_size_t(SIZE))
    (folder / "handle.part").write_bytes(cuda.export(0, place))
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
    wanted = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(SIZE // 256)
    found = torch.zeros_like(wanted)

    def read(what):
        try:
            found.zero_()
            cuda.copy(0, found.data_ptr(), place, SIZE, stream)
            torch.cuda.synchronize()
            print(f"{what}: {'the right bytes' if torch.equal(found, wanted) else 'OTHER BYTES'}")
        except (OSError, RuntimeError) as error:
            print(f"{what}: {error!r:.300}", flush=True)

    try:
        start = time.perf_counter()
        place = cuda.open(0, (folder / "handle").read_bytes())
        print(f"opened in {time.perf_counter() - start:.4f} s", flush=True)
        read("read")
        start = time.perf_counter()
        for _ in range(20):
            cuda.copy(0, found.data_ptr(), place, SIZE, stream)
        torch.cuda.synchronize()
        print(f"copied at {20 * SIZE / 1e9 / (time.perf_counter() - start):.0f} GB/s", flush=True)
    finally:
        owner.kill()
        owner.wait(10)
    time.sleep(1)
    read("read after its owner was killed")
    cuda.close(0, place)
    total = float(torch.ones(1000, device="cuda").sum())
    print(f"the GPU goes on: {'yes' if total == 1000 else 'NO'}", flush=True)


def wait_for(file, owner):
    end = time.monotonic() + 20
    while not file.exists():
        if owner.poll() is not None or time.monotonic() > end:
            raise SystemExit("the owner did not lend its memory; its error is above")
        time.sleep(0.02)


def run_case(name, command, seconds, env):
    """Whether a case ended well in time; what it prints is seen as it comes."""
    print(f"## {name} (at most {seconds:.0f} s)", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(command, env=env, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(max(1.0, seconds))
        told = "ok" if code == 0 else f"FAILED with {code}"
    except subprocess.TimeoutExpired:
        told = "FAILED: too late"
    try:
        os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind
    except ProcessLookupError:
        pass
    process.wait()
    print(f"## {name}: {told}, {time.monotonic() - start:.1f} s", flush=True)
    return told == "ok"


def measure_memory():
    """GB of the GPU, None without one."""
    ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        print(f"# no GPU is seen: {error}", flush=True)
        return None
    print(f"# {found.splitlines()[0]} MiB", flush=True)
    return int(found.splitlines()[0].split(",")[1]) * 2**20 / 1e9


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
    runs, told = [], {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": text + "/compiled"}
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONUNBUFFERED": "1"}
        if total:
            own = [sys.executable, __file__, "--role", "borrow", "--folder", text]
            told["the driver alone"] = run_case("the driver alone", own, 40, env)
        for number, transport, extra in (
            (1, "device", ["--verify"]),
            (4, "device", ["--verify"]),
            (4, "shared", ["--load"]),
            (1, "shared", ["--load"]),
        ):
            name = f"{transport}, {number} server{'s' * (number > 1)}"
            weights, copy = HELD_GB[options.shape]
            others = (number + (transport == "device")) * copy + number * 2.5 + 3
            if total and weights + 8 + others > total:
                print(f"## {name}: skipped, it needs {weights + 8 + others:.0f} GB", flush=True)
                continue
            left = end - time.monotonic()
            if left < 15:
                print(f"## {name}: skipped, no time is left", flush=True)
                continue
            if total:
                share = min(0.75, (0.97 * total - others) / total)
                env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.2f}"
            out = folder / f"{transport}{number}.json"
            own = [sys.executable, str(ROOT / "benchmarks" / "weight_sync.py"), "--repeat", "2"]
            own += ["--shape", options.shape, "--servers", str(number), "--transport", transport]
            own += [*extra, "--out", str(out)]
            told[name] = run_case(name, own, min(left, options.case_seconds), env)
            if out.exists():
                runs.append(json.loads(out.read_text()))
    print("# " + "; ".join(f"{name}: {'ok' if ok else 'FAILED'}" for name, ok in told.items()))
    for run in runs:
        for row in run["rows"]:
            short = {k: row[k] for k in ("seconds", "blocked", "checksum", "stage", "pause")}
            cells = "  ".join(f"{k} {v:.3f}" for k, v in short.items())
            print(f"{row['transport']:>6} {row['servers']} {row['kind']:>5}  {cells}")
    if options.out:
        options.out.write_text(json.dumps({"runs": runs, "cases": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
