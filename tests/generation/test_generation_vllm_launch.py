"""A run that starts two servers: one is killed, the run is stopped, goes on and is killed itself.

With scripted servers, and with real ones on CPU, which takes minutes; see real_vllm.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_child import write_python
from real_vllm import PYTHON, ROOT, descendants, make_model, read, write_run

pytestmark = pytest.mark.slow
REAL = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not Path(PYTHON or "/nowhere").is_file(),
        reason="JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM",
    ),
]
UP_SECONDS = 600.0


def wait_for(label, run, seconds=UP_SECONDS):
    end = time.monotonic() + seconds
    while not (actual := label()):
        assert time.monotonic() < end, "it did not come"
        assert run.poll() is None, "the run has ended"
        time.sleep(0.5)
    return actual


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "kind", [pytest.param("scripted", marks=pytest.mark.thorough), pytest.param("real", marks=REAL)]
)
def test_two_servers_of_a_run(tmp_path, kind):
    python = PYTHON if kind == "real" else write_python(tmp_path)
    model = make_model(tmp_path / "model", seed=0, tied=True)
    path = write_run(SimpleNamespace(model=model, port=0), tmp_path)
    launch = (
        f'launch = "local"\nreplicas = 2\ngpus = 0\npython = "{python}"\nhealth_seconds = 1.0\n'
    )
    text = path.read_text().replace(
        'servers = ["http://127.0.0.1:0"]', launch + 'args = ["--enforce-eager"]'
    )
    text = text.replace("wait_seconds = 180.0", f"wait_seconds = {UP_SECONDS}")
    # So slow that rewards go on differing: with nothing to learn a run ends.
    text = text.replace("learning_rate = 1e-3", "learning_rate = 1e-7")
    if kind == "scripted":  # whose answers are all the same
        text = text.replace('mode = "async"', 'mode = "async"\nzero_advantage = "keep"')
    path.write_text(text.replace("max_steps = 12", "max_steps = 100000"))
    folder, output = tmp_path / "run", tmp_path / "output"
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/kernels"}
    env |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    env["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"  # compiles sooner
    env.pop("VLLM_API_KEY", None)

    def start():
        command = [sys.executable, "-m", "jaxtrain.main", "--config", str(path)]
        with output.open("a") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=ROOT)

    def steps():
        lines = read(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        return max((line["step"] for line in lines), default=0)

    def keepers():
        notes = sorted((folder / "servers").glob("*.json"))
        return [json.loads(note.read_text())["pids"]["session"] for note in notes]

    run = start()
    seen = []
    try:
        wait_for(lambda: steps() >= 2, run)
        assert len(keepers()) == 2
        seen += descendants(run.pid)
        api = descendants(keepers()[0])[0]
        os.kill(api, signal.SIGKILL)  # alone: its engine must not live on with its memory
        lost = set(descendants(keepers()[0])) - {api}
        wait_for(lambda: "is started again (1 of 3)" in output.read_text(), run, 60)
        assert not any(map(alive, lost & set(seen)))
        before = steps()
        wait_for(lambda: "is back with version" in output.read_text(), run)
        wait_for(lambda: steps() > before, run)
        seen += descendants(run.pid)
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) is not None
        assert not any(map(alive, seen)) and not keepers()

        reached = steps()
        run = start()
        wait_for(lambda: steps() > reached, run)
        seen = descendants(run.pid)
        assert len(keepers()) == 2
        run.kill()
        run.wait()
        end = time.monotonic() + 40
        while any(map(alive, seen)) and time.monotonic() < end:
            time.sleep(0.5)
        assert not any(map(alive, seen))
    finally:
        print(output.read_text()[-4000:])
        run.kill()
