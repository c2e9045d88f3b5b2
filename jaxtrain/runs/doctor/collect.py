"""This machine as facts: plain values that `accelerators.py` and `surroundings.py` judge. Nothing
here imports what it looks at."""

import glob
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.runs.doctor.needs import OPTIONAL, Facts
from jaxtrain.runs.doctor.probe import probe_jax, run_quietly
from jaxtrain.runs.hardware import read_memory

PLUGINS = "jax-cuda12-plugin jax-cuda12-pjrt jax-cuda13-plugin jax-cuda13-pjrt libtpu".split()
VARIABLES = (
    "JAX_PLATFORMS CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH XLA_FLAGS XLA_PYTHON_CLIENT_MEM_FRACTION"
    " XLA_PYTHON_CLIENT_PREALLOCATE JAX_COMPILATION_CACHE_DIR HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE"
    " TMPDIR COLAB_RELEASE_TAG TPU_NAME TPU_WORKER_HOSTNAMES SLURM_JOB_ID"
).split()
CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
VLLM_VARIABLES = ("JAXTRAIN_VLLM_PYTHON", "VLLM_PYTHON")
GOOGLE = "0x1ae0"
TPUS = {"0x0027": "v2 or v3", "0x0056": "plc", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e"}
TPUS |= {"0x006f": "v6e", "0x0076": "7x", "0x0083": "8i", "0x007c": "8t"}
"""Vendor and devices on the PCI bus, as in jax/_src/hardware_utils.py."""


def collect(seconds: float, output: Path, config: Facts | None = None) -> Facts:
    """Collect all facts. seconds: time limit for jax to start; output: where a run would write;
    config: the requirements that `read_needs` returns for a config."""
    python = (config or {}).get("vllm_python") or next(
        filter(None, map(os.getenv, VLLM_VARIABLES)), None
    )
    return {
        "python": _look(collect_python),
        "packages": _look(collect_packages),
        "environ": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "nvidia": _look(collect_nvidia),
        "tpu": _look(collect_tpu),
        "jax": _look(lambda: probe_jax(seconds)),
        "disks": _look(lambda: collect_disks(output)),
        "memory": _look(collect_memory),
        "hub": _look(collect_hub),
        "ports": _look(collect_ports),
        "vllm": _look(lambda: collect_vllm(python)),
        "config": config,
    }


def _look(ask: Callable[[], Any]) -> Any:
    """Return the answer; what could not be looked at does not stop the rest."""
    try:
        return ask()
    except Exception as error:  # of strange machines there are more than kinds of exceptions
        return {"failed": f"{type(error).__name__}: {error}"}


def collect_python() -> Facts:
    """Version, place and how packages get into it."""
    if importlib.util.find_spec("pip"):
        install = f"{sys.executable} -m pip install -U"
    else:
        install = f"uv pip install -U --python {sys.executable}"
    version, machine = platform.python_version(), platform.machine()
    facts = {"version": version, "executable": sys.executable, "install": install}
    return facts | {"system": sys.platform, "machine": machine}


def collect_packages() -> Facts:
    """Versions of what is installed, by name, and what jaxtrain says that it requires."""
    try:
        requires = importlib.metadata.requires("jaxtrain") or []
    except importlib.metadata.PackageNotFoundError:
        requires = []
    names = {"jaxtrain", "jax", "jaxlib", "flax", *PLUGINS, *OPTIONAL}
    names |= {re.split(r"[\[<>=!~; (]", line)[0] for line in requires if "extra ==" not in line}
    return {"versions": {name: find_version(name) for name in sorted(names)}, "requires": requires}


def find_version(name: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect_nvidia() -> Facts:
    """The driver and its GPUs, by nvidia-smi, and the device files that there are without it."""
    fields = ["name", "driver_version", "memory.total", "memory.used", "compute_cap"]
    for queried in (fields, fields[:-1]):  # drivers before 510 do not report the capability
        query = f"--query-gpu={','.join(queried)}"
        state, text = run_quietly(["nvidia-smi", query, "--format=csv,noheader,nounits"], 15.0)
        if state != "failed":
            break
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if state == "ok" and len(row) == len(queried)]
    gpus = [
        {
            "name": row[0],
            "memory_mib": _number(row[2]),
            "used_mib": _number(row[3]),
            "capability": _capability(row[4]) if len(row) == 5 else None,
        }
        for row in rows
    ]
    return {
        "state": state,
        "driver": rows[0][1] if rows else None,
        "message": "" if state == "ok" else text.strip()[-300:],
        "gpus": gpus,
        "files": sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg")),
    }


def _number(text: str) -> int | None:
    return int(float(text)) if text.replace(".", "", 1).isdigit() else None


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def collect_tpu() -> Facts:
    """TPU chips on the PCI bus, as jax looks for them."""
    kinds = []
    for vendor in glob.glob("/sys/bus/pci/devices/*/vendor"):
        try:
            device = Path(vendor).with_name("device").read_text().strip()
            if Path(vendor).read_text().strip() == GOOGLE and device in TPUS:
                kinds.append(TPUS[device])
        except OSError:
            continue
    return {"chips": len(kinds), "kind": kinds[0] if kinds else None}


def collect_disks(output: Path) -> list[Facts]:
    """Return the free space of folders that runs write to, and whether a file can be written."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    try:
        temporary = tempfile.gettempdir()
    except OSError:  # nowhere to write
        temporary = os.environ.get("TMPDIR", "/tmp")
    folders = {"output": output, "TMPDIR": Path(temporary), "Hugging Face cache": home}
    if cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        if "://" not in cache:
            folders["JAX_COMPILATION_CACHE_DIR"] = Path(cache)
    if Path("/dev/shm").is_dir():
        folders["/dev/shm"] = Path("/dev/shm")
    return [
        {"what": label, "path": str(path), **look_at_disk(path)} for label, path in folders.items()
    ]


def look_at_disk(path: Path) -> Facts:
    """Return free bytes of a folder, or of its nearest existing parent, and why it cannot be
    written."""
    folder = path.absolute()
    try:
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        usage = shutil.disk_usage(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(65_536))
            file.flush()
        return {"free": usage.free, "total": usage.total, "problem": None}
    except OSError as error:
        return {"free": None, "total": None, "problem": error.strerror or str(error)}


def collect_memory() -> Facts:
    """Bytes of the host, or of the container's limit, and cores."""
    used, total = read_memory()
    free = None if used is None or total is None else total - used
    groups = [Path("/sys/fs/cgroup", name) for name in CGROUP_LIMITS]
    limits = [
        text for path in groups if path.exists() and (text := path.read_text()).strip().isdigit()
    ]
    limit = int(limits[0]) if limits else None
    if limit is not None and total is not None and limit < total:
        total, free = limit, min(limit, free or limit)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"total": total, "free": free, "cores": cores}


def collect_hub() -> Facts:
    """Return whether the Hugging Face Hub is reachable, the user name, and the cached models."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    models = [
        path.name.removeprefix("models--").replace("--", "/") for path in cache.glob("models--*")
    ]
    token = bool(os.environ.get("HF_TOKEN")) or (home / "token").is_file()
    return {"cache": str(cache), "offline": offline, "token": token, "models": sorted(models)}


def collect_ports() -> Facts:
    """Return whether two processes of this machine can talk over loopback, by trying one port."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5.0):
                return {"problem": None}
    except OSError as error:
        return {"problem": error.strerror or str(error)}


def collect_vllm(python: str | None) -> Facts | None:
    """The Python with which vLLM servers would be started, where one is named."""
    if not python:
        return None
    ask = "import importlib.metadata as m; print('@' + m.version('vllm'))"
    state, text = run_quietly([os.path.expanduser(python), "-c", ask], 60.0)
    answers = [line[1:] for line in text.splitlines() if line.startswith("@")]
    version = answers[0] if answers and state == "ok" else None
    return {"python": python, "state": state, "version": version, "message": text.strip()[-200:]}
