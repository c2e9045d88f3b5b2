"""Findings about packages, disks, memory, the Hub, ports, vLLM, and what a config asks for"""

import re

from jaxtrain.runs.doctor.needs import OPTIONAL, VLLM, Facts, Finding, numbers, pip

GIB = 2**30


def judge_packages(facts: Facts) -> list[Finding]:
    """Compare installed packages with the bounds of pyproject.toml."""
    versions, requires = facts["packages"]["versions"], facts["packages"]["requires"]
    required = [line for line in requires if "extra ==" not in line]
    if not required:
        text = "jaxtrain is not installed as a package: its requirements are not known"
        return [Finding("packages", "note", text, "pip install -e . in the repository")]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [
            Finding(
                "packages", "note", "not checked: no package packaging", pip(facts, "packaging")
            )
        ]
    wrong = []
    requirements = [Requirement(line) for line in required]
    for line in requirements:
        version = versions.get(line.name)
        if line.marker is not None and not line.marker.evaluate():
            continue
        if version is None or not line.specifier.contains(version, prereleases=True):
            wrong.append(
                (
                    f"{line.name} {version or 'is missing'} ({line.specifier})",
                    f"{line.name}{line.specifier}",
                )
            )
    if wrong:
        texts, lines = zip(*wrong, strict=True)
        return [Finding("packages", "error", "; ".join(texts), pip(facts, *lines))]
    return [
        Finding(
            "packages",
            "ok",
            f"jaxtrain {versions.get('jaxtrain')}: all {len(requirements)} that it needs",
        )
    ]


def judge_optional(facts: Facts) -> Finding:
    """Report the installed packages that only some configs use."""
    versions = facts["packages"]["versions"]
    installed = [f"{name} {versions[name]}" for name in OPTIONAL if versions.get(name)]
    missing = [name for name in OPTIONAL if not versions.get(name)]
    text = "; not installed: ".join(
        filter(None, [", ".join(installed) or "none", ", ".join(missing)])
    )
    return Finding("optional", "ok", text)


def judge_disks(facts: Facts) -> list[Finding]:
    """Room and permission, folder by folder."""
    findings = []
    for disk in facts["disks"]:
        name, where = disk["what"], disk["path"]
        full = "another folder"
        full = {"output": "run.output_dir=ANOTHER/FOLDER", "TMPDIR": "TMPDIR=ANOTHER/FOLDER"}.get(
            name, full
        )
        full = {"Hugging Face cache": "HF_HOME=ANOTHER/FOLDER"}.get(name, full)
        if name == "/dev/shm":
            findings.append(judge_shared(disk))
        elif disk["problem"]:
            text = f"{where}: cannot be written: {disk['problem']}"
            findings.append(Finding(name, "error", text, full))
        elif disk["free"] < GIB:
            findings.append(Finding(name, "error", f"{where}: {_size(disk['free'])} free", full))
        elif disk["free"] < 20 * GIB and name != "TMPDIR":
            text = f"{where}: {_size(disk['free'])} free; a checkpoint of 1 B parameters takes 12"
            findings.append(Finding(name, "note", text, full))
        else:
            findings.append(Finding(name, "ok", f"{where}: {_size(disk['free'])} free"))
    return findings


def judge_shared(disk: Facts) -> Finding:
    """/dev/shm, by which vLLM, NCCL and the workers of data.num_workers talk."""
    if disk["problem"] or disk["free"] < GIB:
        text = (
            disk["problem"] or f"{_size(disk['free'])} free, too little for vLLM, NCCL and workers"
        )
        return Finding("/dev/shm", "note", text, "in a container: docker run --shm-size=16g")
    return Finding("/dev/shm", "ok", f"{_size(disk['free'])} free")


def judge_memory(facts: Facts) -> Finding:
    """Judge the memory of the host or the container."""
    memory = facts["memory"]
    if memory["free"] is None:
        return Finding("memory", "ok", f"{memory['cores']} cores; the memory is not told here")
    text = f"{_size(memory['free'])} of {_size(memory['total'])} free, {memory['cores']} cores"
    if memory["free"] < 4 * GIB:
        do = "weights are read tensor by tensor, yet compiling takes 1 to 3 GiB: end what else runs"
        return Finding("memory", "note", text, do)
    return Finding("memory", "ok", text)


def judge_hub(facts: Facts) -> Finding:
    """The Hugging Face Hub: asked or not, as whom."""
    hub = facts["hub"]
    text = f"{hub['cache']}: {len(hub['models'])} models; "
    if hub["offline"]:
        do = "unset HF_HUB_OFFLINE, or give folders as model.path and data"
        return Finding("Hub", "note", f"{text}HF_HUB_OFFLINE is set: nothing is loaded from it", do)
    return Finding(
        "Hub", "ok", text + ("with a token" if hub["token"] else "no token (gated models need one)")
    )


def judge_ports(facts: Facts) -> Finding:
    """Judge whether processes of this machine reach each other."""
    problem = facts["ports"]["problem"]
    if problem:
        text = f"127.0.0.1 cannot be used: {problem}"
        return Finding(
            "ports", "error", text, "a firewall or sandbox forbids sockets of this machine"
        )
    return Finding("ports", "ok", "processes reach each other over 127.0.0.1")


def judge_vllm(facts: Facts) -> list[Finding]:
    """The Python of vLLM's environment, if one is named."""
    vllm = facts["vllm"]
    if vllm is None:
        return []
    low, high = (".".join(map(str, bound)) for bound in VLLM)
    install = f'{vllm["python"]} -m pip install "vllm>={low},<{high}"'
    if vllm["version"] is None:
        text = f"{vllm['python']}: {vllm['message'] or vllm['state']}"
        return [Finding("vLLM", "error", text, install)]
    text = f"vllm {vllm['version']} ({vllm['python']})"
    if not VLLM[0] <= numbers(vllm["version"])[:2] < VLLM[1]:
        return [
            Finding(
                "vLLM",
                "error",
                f"{text}; tested is {low}",
                f"{install}; or rollout.vllm.any_version=true",
            )
        ]
    return [Finding("vLLM", "ok", text)]


def judge_libraries(facts: Facts) -> list[Finding]:
    """Libraries of CUDA that would be found before those that jax brings."""
    path = facts["environ"].get("LD_LIBRARY_PATH", "")
    if facts["nvidia"]["gpus"] and re.search("cuda|cudnn", path, flags=re.I):
        text = f"LD_LIBRARY_PATH={path} comes before the CUDA libraries that jax brings"
        return [
            Finding("libraries", "note", text, "unset LD_LIBRARY_PATH if jax complains of cuDNN")
        ]
    return []


def judge_config(facts: Facts) -> list[Finding]:
    """Judge the requirements of a config, as `read_needs` reads them."""
    config = facts["config"]
    if config is None:
        return []
    if config.get("problem"):
        return [Finding("config", "error", config["problem"])]
    versions, findings = facts["packages"]["versions"], []
    for key, package in config["packages"]:
        if not versions.get(package):
            pips = re.findall(r'"[^"]+"', OPTIONAL[package].rpartition(": ")[2])
            text = f"{key} needs the package {package}"
            findings.append(
                Finding(
                    "config",
                    "error",
                    text,
                    pip(facts, *(requirement.strip('"') for requirement in pips)),
                )
            )
    model = config["model"]
    if model and not config["model_here"]:
        if facts["hub"]["offline"] and model not in facts["hub"]["models"]:
            text = (
                f"model.path {model}: no folder, not in the Hub's cache, and HF_HUB_OFFLINE is set"
            )
            findings.append(
                Finding("config", "error", text, "unset HF_HUB_OFFLINE, or give a folder")
            )
    probe = facts["jax"]
    old = [
        d
        for d in probe.get("devices", [])
        if d["platform"] == "gpu" and (0,) < numbers(d["capability"]) < (8,)
    ]
    if old and config["compute_dtype"] == "bfloat16":
        text = f"model.compute_dtype is bfloat16, which {old[0]['kind']} does not have"
        findings.append(Finding("config", "error", text, "model.compute_dtype=float32"))
    if config["vllm"] and facts["vllm"] is None:
        text = "rollout.vllm.launch starts servers with this Python unless another is named"
        do = "rollout.vllm.python or VLLM_PYTHON: the Python of an environment with vLLM"
        findings.append(Finding("config", "note", text, do))
    if not findings:
        do = f"jaxtrain --config {config['path']} --dry-run opens its data and builds its shapes"
        findings.append(Finding("config", "ok", f"{config['path']}: what it needs is here", do))
    return findings


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / GIB:,.0f} GiB" if count >= 10 * GIB else f"{count / GIB:.1f} GiB"
