"""A scripted vLLM server as a process of its own: FAKE_CHILD --model ... --port N ..., as serve is
called. `write_python` makes what rollout.vllm.python may name."""

import shlex
import sys
import threading
from pathlib import Path


def write_python(folder: Path, code: str = "") -> Path:
    """A "Python with vLLM" whose servers are scripted; code: shell that a server runs first."""
    path = folder / "python"
    python, root = shlex.quote(sys.executable), shlex.quote(str(Path(__file__).parents[2]))
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n{code}\n'
        f'export PYTHONPATH="$PYTHONPATH:{root}"\n'
        f'exec {python} {shlex.quote(__file__)} "$@"\n'
    )
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    from fake_vllm import FakeVllm
    from safetensors.numpy import load_file

    told = dict(zip(sys.argv[:-1], sys.argv[1:], strict=True))
    files = Path(told["--model"]).glob("*.safetensors")
    tensors = {name: list(one.shape) for file in files for name, one in load_file(file).items()}
    FakeVllm(port=int(told["--port"]), tensors=tensors)
    threading.Event().wait()
