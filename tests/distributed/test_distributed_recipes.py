"""The launch recipes of scripts/launch: what each starts on two machines, with the variables that
its system sets, is one run of two processes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from other_devices import set_cpus

from jaxtrain.config import ParallelConfig, load_config
from jaxtrain.distributed.hub import free_port
from jaxtrain.distributed.launch import Launch, find_launch

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "scripts" / "launch"
PROGRAM = """#!{python}
import json, os, sys
print(json.dumps(sys.argv[1:]), flush=True)
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if os.environ.get("MEET"):
    from jaxtrain.config import ParallelConfig
    from jaxtrain.config.overrides import parse_value
    from jaxtrain.distributed.processes import join_by_config, shutdown
    import jax
    section = {{k[9:]: parse_value(v) for k, v in words.items() if k.startswith("parallel.")}}
    join_by_config(ParallelConfig(**section))
    print(jax.process_index(), "of", jax.process_count(), jax.device_count(), flush=True)
    shutdown()
"""


@pytest.fixture
def environ(tmp_path):
    """An environment whose `jaxtrain` tells how it was called, and meets the others if asked to."""
    program = tmp_path / "bin" / "jaxtrain"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return {
        **os.environ,
        **set_cpus(1),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests/plain'}",
        "JAXTRAIN_TOKEN": "0123456789abcdef" * 4,
        "OUTPUT_DIR": str(tmp_path / "run"),
    }


def render_kubernetes(machine: int, address: str) -> tuple[list[str], dict[str, str]]:
    """(command, variables) of a pod, as the kubelet and JobSet would have them."""
    manifest = yaml.safe_load((RECIPES / "kubernetes.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]["containers"][0]
    variables = {
        variable["name"]: variable["value"] for variable in pod["env"] if "value" in variable
    }
    name, count = manifest["metadata"]["name"], job["template"]["spec"]["parallelism"]
    assert variables.pop("COORDINATOR") == f"{name}-{job['name']}-0-0.{name}:8476"
    assert variables["NUM_PROCESSES"] == str(count) == str(job["template"]["spec"]["completions"])
    del variables["OUTPUT_DIR"], variables["JAX_COMPILATION_CACHE_DIR"]
    return [*pod["command"], *pod["args"]], {
        **variables,
        "COORDINATOR": address,
        "JOB_COMPLETION_INDEX": str(machine),
    }


def render_skypilot(machine: int, address: str) -> tuple[list[str], dict[str, str]]:
    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    assert set(task["secrets"]) == {"JAXTRAIN_TOKEN"} and "pip install" in task["setup"]
    script = task["run"].replace(":8476", ":" + address.rpartition(":")[2])
    return ["bash", "-c", script], {
        "CONFIG": task["envs"]["CONFIG"],
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": str(machine),
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
    }


def start(render, environ, address, **variables):
    """Both machines' processes."""
    rendered = [render(machine, address) for machine in range(2)]
    return [
        subprocess.Popen(
            # Not in the checkout: SkyPilot's looks there for an environment first.
            command,
            env={**environ, **machine_variables, **variables},
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(environ["OUTPUT_DIR"]).parent,
        )  # fmt: skip
        for command, machine_variables in rendered
    ]


def read_launch(words: list[str]) -> Launch | None:
    sections = dict(word.split("=", 1) for word in words if word.startswith("parallel."))
    size, process = int(sections["parallel.num_processes"]), int(sections["parallel.process_id"])
    parallel = ParallelConfig(
        coordinator=sections["parallel.coordinator"], num_processes=size, process_id=process
    )
    return find_launch(parallel, {})


@pytest.mark.parametrize("render", [render_kubernetes, render_skypilot])
def test_two_machines_are_told_of_each_other(render, environ):
    outputs = [
        process.communicate(timeout=60)[0] for process in start(render, environ, "here:8476")
    ]
    words = [json.loads(text.splitlines()[0]) for text in outputs]
    launches = [read_launch(command) for command in words]
    host = "here" if render is render_kubernetes else "127.0.0.1"
    assert launches == [Launch(f"{host}:8476", process, 2) for process in range(2)]
    assert all(command[:2] == ["--config", "configs/sft_qwen3.toml"] for command in words)
    load_config(ROOT / words[0][1], words[0][2:])  # which go together


def test_a_pod_whose_run_has_not_finished_says_so(environ):
    for state, code in [("stopped", 75), ("finished", 0)]:
        tell_state(environ, state)
        running = start(render_kubernetes, environ, "here:8476")
        assert [process.wait(60) for process in running] == [code, code]


def tell_state(environ, state):
    """Report the state, like process 0 at the end of a run."""
    folder = Path(environ["OUTPUT_DIR"])
    folder.mkdir(exist_ok=True)
    (folder / "heartbeat.json").write_text(json.dumps({"state": state}))


@pytest.mark.slow
def test_the_processes_meet(environ):
    tell_state(environ, "finished")
    running = start(render_kubernetes, environ, f"localhost:{free_port()}", MEET="1")
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert [lines[1] for lines in outputs] == ["0 of 2 2", "1 of 2 2"]


def test_xpk_gets_the_command(tmp_path, environ):
    program = tmp_path / "bin" / "xpk"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    variables = {
        "CLUSTER": "c",
        "ZONE": "z",
        "TPU_TYPE": "v5litepod-16",
        "IMAGE": "i",
        "NAME": "run1",
    }
    command = [str(RECIPES / "xpk.sh"), "--config", "a.toml", "run.output_dir=/shared/a b"]
    done = subprocess.run(command, env={**environ, **variables}, capture_output=True, text=True)
    words = json.loads(done.stdout)
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert words[:2] == ["workload", "create"] and options["--tpu-type"] == "v5litepod-16"
    shown = subprocess.run(
        ["bash", "-c", options["--command"]], env=environ, capture_output=True, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(shown.stdout.splitlines()[0])[-1] == "run.output_dir=/shared/a b", shown
    missing = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert missing.returncode and "CLUSTER" in missing.stderr


def test_rays_processes_are_told_of_each_other():
    spec = importlib.util.spec_from_file_location("ray_train", RECIPES / "ray_train.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    args, words = recipe.read_arguments(["--machines", "2", "--", "--config", "a.toml"])
    assert (args.machines, args.gpus, words) == (2, 8, ["--config", "a.toml"])
    launches = [read_launch(recipe.write_words(words, "h0:99", 2, process)) for process in range(2)]
    assert launches == [Launch("h0:99", 0, 2), Launch("h0:99", 1, 2)]
