"""Findings from scripted facts: machines that are not here."""

import copy
import re
import tomllib
from pathlib import Path

import jaxtrain_kernels.mosaic
import pytest

from jaxtrain.generation.vllm import inspector
from jaxtrain.runs.doctor import needs
from jaxtrain.runs.doctor.command import judge, render

ROOT = Path(__file__).parents[2]
GIB = 2**30
T4 = {"name": "Tesla T4", "memory_mib": 15360, "used_mib": 3, "capability": (7, 5)}
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559, "used_mib": 1, "capability": (9, 0)}
CPU = [{"platform": "cpu", "kind": "cpu", "capability": None, "memory": None}]
CUDA12 = 'py -m pip install -U "jax[cuda12]>=0.11.2,<0.12" "nvidia-ml-py>=12"'
CUDA13 = 'py -m pip install -U "jax[cuda13]>=0.11.2,<0.12" "nvidia-ml-py>=12"'


def machine(**changes) -> dict:
    """Facts of a healthy machine without accelerators, changed (packages__versions={...})."""
    versions = {"jaxtrain": "0.2.0", "jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.8"}
    facts = {
        "python": {"version": "3.13.5", "executable": "py", "install": "py -m pip install -U"},
        "packages": {
            "versions": versions,
            "requires": ["jax>=0.10.2", "flax>=0.12.8", 'wandb>=0.18; extra == "wandb"'],
        },
        "environ": {},
        "nvidia": {"state": "missing", "driver": None, "message": "", "gpus": [], "files": []},
        "tpu": {"chips": 0, "kind": None},
        "jax": {
            "state": "ok",
            "stage": "done",
            "backend": "cpu",
            "devices": CPU,
            "code": 0,
            "message": "",
            "warnings": [],
            "seconds": 2.0,
        },
        "disks": [
            {"what": label, "path": "/p", "free": 100 * GIB, "total": 200 * GIB, "problem": None}
            for label in ("output", "TMPDIR", "/dev/shm")
        ],
        "memory": {"free": 20 * GIB, "total": 24 * GIB, "cores": 2},
        "hub": {"cache": "/h", "offline": False, "token": True, "models": []},
        "ports": {"problem": None},
        "vllm": None,
        "config": None,
    }
    facts = copy.deepcopy(facts)
    for path, value in changes.items():
        position = facts
        *above, last = path.split("__")
        for part in above:
            position = position[part]
        if isinstance(value, dict) and isinstance(position.get(last), dict):
            position[last] |= value
        else:
            position[last] = value
    return facts


def nvidia(gpu, driver, versions, **changes) -> dict:
    """Facts of a machine with one GPU, on which jax computes."""
    capability = ".".join(map(str, gpu["capability"]))
    device = {"platform": "gpu", "kind": gpu["name"], "capability": capability, "memory": GIB}
    facts = machine(
        nvidia={"state": "ok", "driver": driver, "gpus": [gpu], "files": ["/dev/nvidia0"]},
        jax={"backend": "gpu", "devices": [device]},
        packages__versions=versions,
    )
    for path, value in changes.items():
        facts[path] |= value
    return facts


def plugin(major: int, version: str = "0.11.2") -> dict:
    return {f"jax-cuda{major}-plugin": version, f"jax-cuda{major}-pjrt": version}


def told(facts, level="error") -> dict:
    """{name: text and advice} of the findings of one level."""
    return {f.name: f"{f.text} -> {f.do}" for f in judge(facts) if f.level == level}


def test_nothing_is_wrong_with_a_healthy_machine():
    for facts in (machine(), nvidia(H100, "580.65", plugin(13)), nvidia(H100, "550.1", plugin(12))):
        assert told(facts) == told(facts, "note") == {}
    assert "Hopper kernels" in told(facts, "ok")
    assert render(judge(facts)).endswith("\nall well")


def test_a_gpu_that_jax_has_no_plugin_for():
    facts = nvidia(H100, "580.65", {}, jax={"backend": "cpu", "devices": CPU})
    output = told(facts)["devices"]
    assert (
        "1 x NVIDIA H100 80GB HBM3 here" in output
        and "no CUDA plugin" in output
        and CUDA13 in output
    )
    facts["nvidia"]["driver"] = "570.86"
    assert CUDA12 in told(facts)["devices"]


def test_colab_after_a_plain_install():
    """jaxlib is new, Colab's plugin is its old one: a warning, then the CPU."""
    warned = "JAX plugin jax_cuda12_plugin version 0.7.2 is installed, but it is not compatible"
    facts = nvidia(
        T4,
        "570.86",
        plugin(12, "0.7.2"),
        jax={"backend": "cpu", "devices": CPU, "warnings": [warned]},
    )
    output = told(facts)
    assert (
        "0.7.2 beside jaxlib 0.11.2" in output["plugin"]
        and "jax[cuda12]>=0.11.2" in output["plugin"]
    )
    assert warned in output["devices"] and CUDA12 in output["devices"]


def test_colab_as_it_comes():
    old = {"jax": "0.7.2", "jaxlib": "0.7.2", "flax": "0.11.2", **plugin(12, "0.7.2")}
    output = told(nvidia(T4, "570.86", old))
    assert output == {
        "packages": "jax 0.7.2 (>=0.10.2); flax 0.11.2 (>=0.12.8) -> py -m pip install -U"
        ' "jax>=0.10.2" "flax>=0.12.8"'
    }


def test_a_driver_too_old_for_the_plugin():
    facts = nvidia(H100, "570.86", plugin(13), jax={"state": "failed", "message": "no CUDA"})
    assert "CUDA 13 of jax-cuda13-plugin wants 580" in told(facts)["driver"]
    assert f"remove jax-cuda13-plugin and jax-cuda13-pjrt, then {CUDA12}" in told(facts)["driver"]
    facts["nvidia"]["driver"] = "470.1"
    assert "driver of 525 or newer" in told(facts)["driver"]


def test_a_gpu_too_old_for_cuda_13():
    v100 = {"name": "Tesla V100", "memory_mib": 16000, "used_mib": 1, "capability": (7, 0)}
    output = told(nvidia(v100, "580.65", plugin(13)))["driver"]
    assert "wants compute capability 7.5" in output and CUDA12 in output


def test_no_driver():
    facts = machine(
        nvidia={"state": "missing", "message": "No such file", "files": ["/dev/nvidia0"]},
    )
    assert "docker run --gpus all" in told(facts)["driver"]
    # Without device files and plugins nobody expects one.
    assert "driver" not in told(machine()) | told(machine(), "ok")


def test_both_plugins():
    output = told(nvidia(H100, "580.65", plugin(12) | plugin(13)))["plugin"]
    assert "remove jax-cuda12-plugin" in output and "jax[cuda13]" in output


def test_a_t4_has_no_bfloat16():
    facts = nvidia(T4, "570.86", plugin(12))
    assert not told(facts)
    assert "model.compute_dtype=float32" in told(facts, "note")["bfloat16"]
    needs_bf16 = {
        "path": "c.toml",
        "problem": None,
        "packages": [],
        "model": None,
        "model_here": False,
        "compute_dtype": "bfloat16",
        "vllm": False,
    }
    assert "Tesla T4 does not have" in told(facts | {"config": needs_bf16})["config"]
    assert not told(facts | {"config": needs_bf16 | {"compute_dtype": "float32"}})


def test_hopper_with_another_jax():
    new = {"jax": "0.12.0", "jaxlib": "0.12.0", **plugin(13, "0.12.0")}
    output = told(nvidia(H100, "580.65", new), "note")["Hopper kernels"]
    assert "found 0.12.0: they decline" in output and CUDA13 in output


def test_python_311_with_a_gpu():
    facts = nvidia(H100, "580.65", {}, jax={"backend": "cpu", "devices": CPU})
    facts["python"]["version"] = "3.11.9"
    assert '"jax[cuda12]>=0.10.2,<0.11"' in told(facts)["devices"]
    assert "Python 3.12" in told(facts, "note")["python"]


def test_a_gpu_hidden_on_purpose_is_a_note():
    for environ in ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}):
        facts = nvidia(H100, "580.65", plugin(13), jax={"backend": "cpu", "devices": CPU})
        facts["environ"] = environ
        assert not told(facts)
        assert f"unset {next(iter(environ))}" in told(facts, "note")["devices"]


def test_tpu_without_libtpu():
    facts = machine(tpu={"chips": 1, "kind": "v5e"})
    output = told(facts)
    assert (
        "1 TPU chips here" in output["devices"] and "libtpu is not installed" in output["devices"]
    )
    assert '"jax[tpu]>=0.10.2"' in output["libtpu"]


def test_tpu_that_hangs_or_is_taken():
    facts = machine(tpu={"chips": 4, "kind": "v5e"}, packages__versions={"libtpu": "0.0.48"})
    facts["jax"] |= {"state": "timeout", "stage": "find devices"}
    assert "looks for devices -> a TPU is one process's at a time" in told(facts)["jax"]
    facts["jax"] |= {"state": "failed", "message": "The TPU is already in use by process 7"}
    assert "end the other" in told(facts)["jax"]


@pytest.mark.parametrize(
    "versions, words",
    [
        ({"jax": None}, "jax is not installed"),
        ({"jaxlib": None}, "jaxlib is not installed"),
        ({"jaxlib": "0.12.0"}, "newer than jax"),
    ],
)
def test_jax_and_jaxlib(versions, words):
    output = told(machine(packages__versions=versions, jax={"state": "failed", "message": "x"}))
    assert words in output["jax"] and 'pip install -U "jax>=0.10.2"' in output["jax"]


def test_jax_that_fails():
    facts = machine(jax={"state": "failed", "stage": "import jax", "message": "ImportError: dll"})
    assert "fails while it is imported: ImportError: dll" in told(facts)["jax"]
    facts["jax"] |= {"message": "", "code": -11}
    assert "ended with exit code -11" in told(facts)["jax"]


def test_disks():
    disks = machine()["disks"]
    full, locked, small = (dict(disks[0]) for _ in range(3))
    full["free"] = GIB // 2
    locked |= {"what": "TMPDIR", "problem": "Read-only file system", "free": None}
    small |= {"what": "/dev/shm", "free": 64 * 2**20}
    facts = machine(disks=[full, locked, small])
    assert told(facts)["output"] == "/p: 0.5 GiB free -> run.output_dir=ANOTHER/FOLDER"
    assert "cannot be written: Read-only file system" in told(facts)["TMPDIR"]
    assert "--shm-size" in told(facts, "note")["/dev/shm"]


def test_the_rest():
    facts = machine(
        ports={"problem": "Operation not permitted"},
        hub={"offline": True},
        memory={"free": GIB},
        vllm={"python": "v/python", "version": "0.11.0", "state": "ok", "message": ""},
    )
    assert set(told(facts)) == {"ports", "vLLM"}
    assert '"vllm>=0.32,<0.33"' in told(facts)["vLLM"]
    assert set(told(facts, "note")) == {"Hub", "memory"}
    facts["vllm"] = {"python": "v", "version": None, "state": "missing", "message": "No such file"}
    assert "v: No such file" in told(facts)["vLLM"]


def test_what_could_not_be_looked_at_is_said():
    for name in machine():
        if name in ("environ", "config", "vllm"):
            continue
        facts = machine() | {name: {"failed": "OSError: strange"}}
        assert "OSError: strange" in render(judge(facts))


def test_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, requirement in needs.JAX.items():
        assert requirement in extras[extra]
    assert needs.NVML in extras["cuda"] and needs.NVML in extras["cuda12"]
    every = {entry for group in extras.values() for entry in group}
    for text in needs.OPTIONAL.values():
        assert set(re.findall(r'"([^" ]+)"', text.rpartition(": ")[2])) <= every
    assert needs.KERNELS_FOR == jaxtrain_kernels.mosaic.TESTED
    assert needs.VLLM == inspector.TESTED
