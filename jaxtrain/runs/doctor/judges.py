"""Findings about a machine, from facts alone: `JUDGES` lists the checks."""

import re
from collections.abc import Callable, Iterator
from functools import partial

from jaxtrain.runs.doctor.needs import (
    CAPABILITIES,
    DRIVERS,
    JAX,
    KERNELS_FOR,
    OPTIONAL,
    VLLM,
    Facts,
    Finding,
    choose_cuda,
    install_cuda,
    numbers,
    pip,
)

GIB = 2**30
STAGES = {
    "import jax": "is imported",
    "find devices": "looks for devices",
    "multiply matrices": "multiplies two matrices",
}
ELSEWHERE = {
    "output": "run.output_dir=ANOTHER/FOLDER",
    "TMPDIR": "TMPDIR=ANOTHER/FOLDER",
    "Hugging Face cache": "HF_HOME=ANOTHER/FOLDER",
}
"""Advice about a full disk."""
Findings = Iterator[Finding]


def judge_python(facts: Facts) -> Findings:
    """Python's version; and whether the newest jax exists for it."""
    version = facts["python"]["version"]
    level, text, do = "ok", f"{version} ({facts['python']['executable']})", ""
    if numbers(version)[:2] < (3, 11):
        level, do = "error", "jaxtrain needs Python 3.11 or newer"
    elif numbers(version)[:2] < (3, 12) and facts["nvidia"]["gpus"]:
        text += "; the newest jax for it is 0.10, with which the Hopper kernels decline"
        level, do = "note", "Python 3.12 or newer, for jax 0.11"
    elif numbers(version)[:2] > (3, 13):
        level, text = "note", f"{text}; tested are 3.11, 3.12 and 3.13"
    yield Finding("python", level, text, do)


def judge_jax(facts: Facts) -> Findings:
    """jax and jaxlib, and whether they start."""
    versions, probe, advice = facts["packages"]["versions"], facts["jax"], recommend(facts)
    jax, lib = versions.get("jax"), versions.get("jaxlib")
    text, doing = f"jax {jax}, jaxlib {lib}", STAGES.get(probe.get("stage", ""), "starts")
    error = partial(Finding, "jax", "error")
    if jax is None or lib is None:
        yield error(f"{'jax' if jax is None else 'jaxlib'} is not installed", advice)
    elif numbers(lib) > numbers(jax):
        yield error(f"{text}: jaxlib is newer than jax, which refuses it", advice)
    elif "failed" in probe:
        yield error(f"{text}: could not be asked: {probe['failed']}")
    elif probe["state"] == "timeout":
        yield error(f"{text}: no answer while it {doing}", unblock(facts))
    elif probe["state"] == "failed":
        message = probe["message"] or f"it ended with exit code {probe['code']}"
        yield error(f"{text}: fails while it {doing}: {message}", mend(facts))
    else:
        yield Finding("jax", "ok", f"{text}, ready in {probe.get('seconds', 0):g} s")


def recommend(facts: Facts) -> str:
    """The pip line of jax for this machine."""
    if facts["tpu"]["chips"]:
        return pip(facts, JAX["tpu"])
    return install_cuda(facts) if facts["nvidia"]["gpus"] else pip(facts, "jax>=0.10.2")


def unblock(facts: Facts) -> str:
    """Return advice for when jax hangs."""
    if facts["tpu"]["chips"]:
        return (
            "a TPU is one process's at a time: end the other (lsof /dev/accel* /dev/vfio/*); the"
            " hosts of a pod wait for each other: there it is started on all of them at once"
        )
    if facts["nvidia"]["files"] or facts["nvidia"]["gpus"]:
        return "see if nvidia-smi answers, and who uses the GPUs; JAX_PLATFORMS=cpu goes without"
    return "try again with --seconds 300: a slow disk takes long to import from; else reinstall jax"


def mend(facts: Facts) -> str:
    """Return advice for when jax fails."""
    message, environ = facts["jax"]["message"], facts["environ"]
    platforms = environ.get("JAX_PLATFORMS", "")
    if "already in use" in message or "libtpu_lockfile" in message:
        return unblock(facts)
    if "RESOURCE_EXHAUSTED" in message or "CUDA_ERROR_OUT_OF_MEMORY" in message:
        return "another process has the GPU's memory: nvidia-smi names it"
    if platforms and platforms != "cpu":
        return f"JAX_PLATFORMS={platforms} is set: unset it, or {recommend(facts)}"
    if "cuda" in environ.get("LD_LIBRARY_PATH", "").lower():
        return f"unset LD_LIBRARY_PATH (jax brings its own CUDA libraries), or {recommend(facts)}"
    return recommend(facts)


def judge_devices(facts: Facts) -> Findings:
    """Compare the backend that jax uses with the accelerators that are present."""
    probe, present, chips = facts["jax"], facts["nvidia"]["gpus"], facts["tpu"]["chips"]
    if probe.get("state") != "ok":  # reported under jax
        return
    devices, backend, environ = probe["devices"], probe["backend"], facts["environ"]
    kinds = ", ".join(dict.fromkeys(device["kind"] for device in devices))
    text = f"{len(devices)} x {kinds} ({backend})"
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    finding = partial(Finding, "devices")
    if backend == "gpu" and hidden is None and 0 < len(devices) < len(present):
        text += f", but nvidia-smi lists {len(present)}"
        yield finding("note", text, "see nvidia-smi about the others")
    elif backend != "cpu":
        yield finding("ok", text)
    elif not present and not chips:
        yield finding("ok", f"no accelerator here; {text}")
    else:
        here = f"{chips} TPU chips" if chips else f"{len(present)} x {present[0]['name']}"
        if environ.get("JAX_PLATFORMS", "").lower() == "cpu":
            text = f"{here} here, but JAX_PLATFORMS=cpu keeps jax on the CPU"
            yield finding("note", text, "unset JAX_PLATFORMS to use them")
        elif not chips and hidden is not None and hidden.strip() in ("", "-1"):
            text = f"{here} here, but CUDA_VISIBLE_DEVICES={hidden} hides them"
            yield finding("note", text, "unset CUDA_VISIBLE_DEVICES to use them")
        else:
            versions, why = facts["packages"]["versions"], [*probe["warnings"], probe["message"]]
            if chips and not versions.get("libtpu"):
                why = ["libtpu is not installed"]
            elif not chips and not any(versions.get(f"jax-cuda{m}-plugin") for m in DRIVERS):
                why = ["it has no CUDA plugin"]
            text = ": ".join([f"{here} here, but jax computes on the CPU", *filter(None, why[:1])])
            yield finding("error", text, recommend(facts))
    if backend == "gpu":
        yield from judge_gpus(facts)


def judge_gpus(facts: Facts) -> Findings:
    """Report the GPUs' capabilities (bfloat16, Hopper kernels) and how much memory is taken."""
    present, jax = facts["nvidia"]["gpus"], facts["packages"]["versions"].get("jax")
    fallback = tuple(present[0]["capability"] or ()) if present else ()
    capabilities = [numbers(d["capability"]) or fallback for d in facts["jax"]["devices"]]
    oldest = min(filter(None, capabilities), default=None)
    if oldest is not None and oldest < (8, 0):
        text = f"compute capability {_dotted(oldest)} has no bfloat16"
        yield Finding("bfloat16", "note", text, "model.compute_dtype=float32 (it is faster)")
    if oldest is not None and oldest[0] != 9:
        text = f"for compute capability 9.0, these GPUs have {_dotted(oldest)}"
        yield Finding("Hopper kernels", "ok", f"{text}: XLA computes instead")
    elif oldest is not None and numbers(jax)[:2] != KERNELS_FOR:
        text = f"for jax {_dotted(KERNELS_FOR)}, found {jax}: they decline, XLA computes instead"
        yield Finding("Hopper kernels", "note", text, install_cuda(facts))
    elif oldest is not None:
        yield Finding("Hopper kernels", "ok", "used")
    for gpu in present:
        total, used = gpu["memory_mib"], gpu["used_mib"]
        if total and used and used > total / 4:
            text = f"{used / 1024:.0f} of {total / 1024:.0f} GiB of {gpu['name']} are taken"
            yield Finding("GPU memory", "note", text, "nvidia-smi names the process")
            break


def judge_plugins(facts: Facts) -> Findings:
    """Each against jaxlib, which takes its own version alone; two of CUDA exclude each other."""
    versions = facts["packages"]["versions"]
    majors = [major for major in DRIVERS if versions.get(f"jax-cuda{major}-plugin")]
    for major in majors:
        name, pjrt = f"jax-cuda{major}-plugin", f"jax-cuda{major}-pjrt"
        text, wrong = f"{name} {versions[name]} beside jaxlib {versions.get('jaxlib')}", ""
        if numbers(versions[name]) != numbers(versions.get("jaxlib")):
            wrong = ": not the same version, so jax does not use it"
        elif numbers(versions.get(pjrt)) != numbers(versions[name]):
            wrong = f", but {pjrt} {versions.get(pjrt) or 'is missing'}"
        do = pip(facts, JAX["cuda" if major == 13 else "cuda12"]) if wrong else ""
        yield Finding("plugin", "error" if wrong else "ok", text + wrong, do)
    if len(majors) > 1:
        text = "the plugins of CUDA 12 and 13 are both here"
        yield Finding("plugin", "error", text, install_cuda(facts))


def judge_driver(facts: Facts) -> Findings:
    """The NVIDIA driver against the plugin's CUDA, and GPUs too old for it."""
    nvidia, versions = facts["nvidia"], facts["packages"]["versions"]
    if nvidia["state"] != "ok":
        if nvidia["files"] or nvidia["state"] != "missing":
            here = f"{nvidia['files'][0]} is here, but " if nvidia["files"] else ""
            text = f"{here}nvidia-smi: {nvidia['message'] or nvidia['state']}"
            do = "load or update the NVIDIA driver; in a container: docker run --gpus all"
            yield Finding("driver", "error", text, do)
        return
    majors = [major for major in DRIVERS if versions.get(f"jax-cuda{major}-plugin")]
    for major in majors:
        text, wrong = f"NVIDIA {nvidia['driver']}, CUDA {major} of jax-cuda{major}-plugin", True
        least = CAPABILITIES[major]
        old = [g for g in nvidia["gpus"] if g["capability"] and tuple(g["capability"]) < least]
        if numbers(nvidia["driver"])[:1] < (DRIVERS[major],):
            text += f" wants {DRIVERS[major]} or newer"
        elif old:
            text = f"{old[0]['name']}: CUDA {major} wants compute capability {_dotted(least)}"
            text += " or newer"
        else:
            wrong = False
        yield Finding(
            "driver", "error" if wrong else "ok", text, wrong and install_cuda(facts) or ""
        )
    if not majors:
        text = f"NVIDIA {nvidia['driver']}: for CUDA {choose_cuda(facts) or 'of older jax'}"
        yield Finding("driver", "ok", text)


def judge_libraries(facts: Facts) -> Findings:
    """Libraries of CUDA that would be found before those that jax brings."""
    path = facts["environ"].get("LD_LIBRARY_PATH", "")
    if facts["nvidia"]["gpus"] and re.search("cuda|cudnn", path, flags=re.I):
        text = f"LD_LIBRARY_PATH={path} comes before the CUDA libraries that jax brings"
        yield Finding("libraries", "note", text, "unset LD_LIBRARY_PATH if jax complains of cuDNN")


def judge_libtpu(facts: Facts) -> Findings:
    """Its version, where there are TPUs."""
    version = facts["packages"]["versions"].get("libtpu")
    if facts["tpu"]["chips"] and version is None:
        yield Finding("libtpu", "error", "not installed", pip(facts, JAX["tpu"]))
    elif facts["tpu"]["chips"]:
        yield Finding("libtpu", "ok", f"{version}, TPU {facts['tpu']['kind']}")


def judge_packages(facts: Facts) -> Findings:
    """Compare installed packages with the bounds of pyproject.toml; list those that only some
    configs use."""
    versions, wrong, finding = facts["packages"]["versions"], {}, partial(Finding, "packages")
    required = [line for line in facts["packages"]["requires"] if "extra ==" not in line]
    try:
        from packaging.requirements import Requirement

        for line in map(Requirement, required):
            version = versions.get(line.name)
            if line.marker is not None and not line.marker.evaluate():
                continue
            if version is None or not line.specifier.contains(version, prereleases=True):
                shown = f"{line.name} {version or 'is missing'} ({line.specifier})"
                wrong[shown] = f"{line.name}{line.specifier}"
        if not required:
            text = "jaxtrain is not installed as a package: its requirements are not known"
            yield finding("note", text, "pip install -e . in the repository")
        elif wrong:
            yield finding("error", "; ".join(wrong), pip(facts, *wrong.values()))
        else:
            yield finding(
                "ok", f"jaxtrain {versions.get('jaxtrain')}: all {len(required)} it needs"
            )
    except ImportError:
        yield finding("note", "not checked: no package packaging", pip(facts, "packaging"))
    installed = [f"{name} {versions[name]}" for name in OPTIONAL if versions.get(name)]
    missing = [name for name in OPTIONAL if not versions.get(name)]
    parts = [", ".join(installed) or "none", ", ".join(missing)]
    yield Finding("optional", "ok", "; not installed: ".join(filter(None, parts)))


def judge_disks(facts: Facts) -> Findings:
    """Space and permission, folder by folder; /dev/shm connects vLLM, NCCL and data workers."""
    for disk in facts["disks"]:
        name, free, text = disk["what"], disk["free"], f"{disk['path']}: {_size(disk['free'])} free"
        elsewhere, level, do = ELSEWHERE.get(name, "another folder"), "ok", ""
        if name == "/dev/shm" and (disk["problem"] or free < GIB):
            level, do = "note", "in a container: docker run --shm-size=16g"
            text = disk["problem"] or f"{_size(free)} free, too little for vLLM, NCCL and workers"
        elif disk["problem"]:
            text = f"{disk['path']}: cannot be written: {disk['problem']}"
            level, do = "error", elsewhere
        elif free < GIB:
            level, do = "error", elsewhere
        elif free < 20 * GIB and name not in ("TMPDIR", "/dev/shm"):
            text += "; a checkpoint of 1 B parameters takes 12"
            level, do = "note", elsewhere
        yield Finding(name, level, text, do)


def judge_memory(facts: Facts) -> Findings:
    """Memory of the host or the container."""
    free, total, cores = (facts["memory"][key] for key in ("free", "total", "cores"))
    if free is None:
        yield Finding("memory", "ok", f"{cores} cores; the memory is not known here")
        return
    do = "weights are read tensor by tensor, yet compiling takes 1 to 3 GiB: end what else runs"
    text, low = f"{_size(free)} of {_size(total)} free, {cores} cores", free < 4 * GIB
    yield Finding("memory", "note" if low else "ok", text, do if low else "")


def judge_hub(facts: Facts) -> Findings:
    """The Hugging Face Hub: asked or not, as whom."""
    hub = facts["hub"]
    text = f"{hub['cache']}: {len(hub['models'])} models; "
    if hub["offline"]:
        do = "unset HF_HUB_OFFLINE, or give folders as model.path and data"
        yield Finding("Hub", "note", f"{text}HF_HUB_OFFLINE is set: nothing is loaded from it", do)
    else:
        token = "with a token" if hub["token"] else "no token (gated models need one)"
        yield Finding("Hub", "ok", text + token)


def judge_ports(facts: Facts) -> Findings:
    """Connections between processes of this machine."""
    if problem := facts["ports"]["problem"]:
        do = "a firewall or sandbox forbids sockets of this machine"
        yield Finding("ports", "error", f"127.0.0.1 cannot be used: {problem}", do)
    else:
        yield Finding("ports", "ok", "processes reach each other over 127.0.0.1")


def judge_vllm(facts: Facts) -> Findings:
    """The Python of vLLM's environment, if one is named."""
    vllm = facts["vllm"]
    if vllm is None:
        return
    low, high = map(_dotted, VLLM)
    install = f'{vllm["python"]} -m pip install "vllm>={low},<{high}"'
    text = f"vllm {vllm['version']} ({vllm['python']})"
    if vllm["version"] is None:
        text = f"{vllm['python']}: {vllm['message'] or vllm['state']}"
        yield Finding("vLLM", "error", text, install)
    elif not VLLM[0] <= numbers(vllm["version"])[:2] < VLLM[1]:
        do = f"{install}; or rollout.vllm.any_version=true"
        yield Finding("vLLM", "error", f"{text}; tested is {low}", do)
    else:
        yield Finding("vLLM", "ok", text)


def judge_config(facts: Facts) -> Findings:
    """Requirements of a config, as `read_needs` reads them."""
    config, versions, hub = facts["config"], facts["packages"]["versions"], facts["hub"]
    if config is None:
        return
    error = partial(Finding, "config", "error")
    if config.get("problem"):
        yield error(config["problem"])
        return
    missing = [(key, package) for key, package in config["packages"] if not versions.get(package)]
    for key, package in missing:
        requirements = re.findall(r'"([^"]+)"', OPTIONAL[package].rpartition(": ")[2])
        yield error(f"{key} needs the package {package}", pip(facts, *requirements))
    model = config["model"]
    absent = model and not config["model_here"] and hub["offline"] and model not in hub["models"]
    if absent:
        text = f"model.path {model}: no folder, not in the Hub's cache, and HF_HUB_OFFLINE is set"
        yield error(text, "unset HF_HUB_OFFLINE, or give a folder")
    gpus = [d for d in facts["jax"].get("devices", []) if d["platform"] == "gpu"]
    old = [d["kind"] for d in gpus if (0,) < numbers(d["capability"]) < (8,)]
    old = old if config["compute_dtype"] == "bfloat16" else []
    if old:
        text = f"model.compute_dtype is bfloat16, which {old[0]} does not have"
        yield error(text, "model.compute_dtype=float32")
    unnamed = config["vllm"] and facts["vllm"] is None
    if unnamed:
        text = "rollout.vllm.launch starts servers with this Python unless another is named"
        do = "rollout.vllm.python or VLLM_PYTHON: the Python of an environment with vLLM"
        yield Finding("config", "note", text, do)
    if not (missing or absent or old or unnamed):
        do = f"jaxtrain --config {config['path']} --dry-run opens its data and builds its shapes"
        yield Finding("config", "ok", f"{config['path']}: what it needs is here", do)


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / GIB:,.0f} GiB" if count >= 10 * GIB else f"{count / GIB:.1f} GiB"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


JUDGES: tuple[tuple[str, Callable[[Facts], Findings]], ...] = (
    ("python", judge_python),
    ("jax", judge_jax),
    ("jax", judge_devices),
    ("packages", judge_plugins),
    ("packages", judge_packages),
    ("nvidia", judge_driver),
    ("nvidia", judge_libraries),
    ("tpu", judge_libtpu),
    ("memory", judge_memory),
    ("disks", judge_disks),
    ("hub", judge_hub),
    ("ports", judge_ports),
    ("vllm", judge_vllm),
    ("config", judge_config),
)
"""The facts that a check is mostly about, and the check."""
