"""Findings about Python, jax, its plugins and the devices: what jax found against what is there"""

from jaxtrain.runs.doctor.needs import (
    CAPABILITIES,
    DRIVERS,
    JAX,
    KERNELS_FOR,
    Facts,
    Finding,
    choose_cuda,
    install_cuda,
    numbers,
    pip,
)


def judge_python(facts: Facts) -> Finding:
    """Its version; and whether the newest jax exists for it."""
    version = facts["python"]["version"]
    text = f"{version} ({facts['python']['executable']})"
    if numbers(version)[:2] < (3, 11):
        return Finding("python", "error", text, "jaxtrain needs Python 3.11 or newer")
    if numbers(version)[:2] < (3, 12) and facts["nvidia"]["gpus"]:
        text += "; the newest jax for it is 0.10, with which the Hopper kernels decline"
        return Finding("python", "note", text, "Python 3.12 or newer, for jax 0.11")
    if numbers(version)[:2] > (3, 13):
        return Finding("python", "note", f"{text}; tested are 3.11, 3.12 and 3.13")
    return Finding("python", "ok", text)


def judge_jax(facts: Facts) -> Finding:
    """jax and jaxlib, and whether they start."""
    versions, probe = facts["packages"]["versions"], facts["jax"]
    jax, lib = versions.get("jax"), versions.get("jaxlib")
    install = recommend(facts)
    if jax is None or lib is None:
        missing = "jax" if jax is None else "jaxlib"
        return Finding("jax", "error", f"{missing} is not installed", install)
    text = f"jax {jax}, jaxlib {lib}"
    if numbers(lib) > numbers(jax):
        text += ": jaxlib is newer than jax, which refuses it"
        return Finding("jax", "error", text, install)
    if "failed" in probe:
        return Finding("jax", "error", f"{text}: could not be asked: {probe['failed']}")
    if probe["state"] == "timeout":
        return Finding(
            "jax", "error", f"{text}: no answer while it {_doing(probe)}", unblock(facts)
        )
    if probe["state"] == "failed":
        message = probe["message"] or f"it ended with exit code {probe['code']}"
        return Finding(
            "jax", "error", f"{text}: fails while it {_doing(probe)}: {message}", mend(facts)
        )
    return Finding("jax", "ok", f"{text}, ready in {probe.get('seconds', 0):g} s")


def _doing(probe: Facts) -> str:
    does = {
        "import jax": "is imported",
        "find devices": "looks for devices",
        "multiply matrices": "multiplies two matrices",
    }
    return does.get(probe.get("stage", ""), "starts")


def recommend(facts: Facts) -> str:
    """The pip line of jax for this machine."""
    if facts["tpu"]["chips"]:
        return pip(facts, JAX["tpu"])
    if facts["nvidia"]["gpus"]:
        return install_cuda(facts)
    return pip(facts, "jax>=0.10.2")


def unblock(facts: Facts) -> str:
    """Return advice for when jax hangs."""
    if facts["tpu"]["chips"]:
        return (
            "a TPU is one process's at a time: end the other (lsof /dev/accel* /dev/vfio/*); the"
            " hosts of a pod wait for each other: there it is started on all of them at once"
        )
    if facts["nvidia"]["files"] or facts["nvidia"]["gpus"]:
        return (
            "see whether nvidia-smi answers, and who uses the GPUs; JAX_PLATFORMS=cpu goes without"
        )
    return "try again with --seconds 300: a slow disk takes long to import from; else reinstall jax"


def mend(facts: Facts) -> str:
    """Return advice for when jax fails."""
    message = facts["jax"]["message"]
    platforms = facts["environ"].get("JAX_PLATFORMS", "")
    if "already in use" in message or "libtpu_lockfile" in message:
        return unblock(facts)
    if "RESOURCE_EXHAUSTED" in message or "CUDA_ERROR_OUT_OF_MEMORY" in message:
        return "another process has the GPU's memory: nvidia-smi names it"
    if platforms and platforms != "cpu":
        return f"JAX_PLATFORMS={platforms} is set: unset it, or {recommend(facts)}"
    if "cuda" in facts["environ"].get("LD_LIBRARY_PATH", "").lower():
        return f"unset LD_LIBRARY_PATH (jax brings its own CUDA libraries), or {recommend(facts)}"
    return recommend(facts)


def judge_plugins(facts: Facts) -> list[Finding]:
    """Each against jaxlib, which takes its own version alone; two of CUDA exclude each other."""
    versions = facts["packages"]["versions"]
    lib, findings = versions.get("jaxlib"), []
    majors = [major for major in DRIVERS if versions.get(f"jax-cuda{major}-plugin")]
    for major in majors:
        name, pjrt = f"jax-cuda{major}-plugin", f"jax-cuda{major}-pjrt"
        plugin_version = versions[name]
        text = f"{name} {plugin_version} beside jaxlib {lib}"
        extra = JAX["cuda" if major == 13 else "cuda12"]
        if numbers(plugin_version) != numbers(lib):
            text += ": not the same version, so jax does not use it"
            findings.append(Finding("plugin", "error", text, pip(facts, extra)))
        elif numbers(versions.get(pjrt)) != numbers(plugin_version):
            text += f", but {pjrt} {versions.get(pjrt) or 'is missing'}"
            findings.append(Finding("plugin", "error", text, pip(facts, extra)))
        else:
            findings.append(Finding("plugin", "ok", text))
    if len(majors) > 1:
        text = "the plugins of CUDA 12 and 13 are both here"
        findings.append(Finding("plugin", "error", text, install_cuda(facts)))
    return findings


def judge_driver(facts: Facts) -> list[Finding]:
    """The NVIDIA driver against the plugin's CUDA, and GPUs too old for it."""
    nvidia, versions = facts["nvidia"], facts["packages"]["versions"]
    if nvidia["state"] != "ok":
        if not nvidia["files"] and nvidia["state"] == "missing":
            return []
        text = f"nvidia-smi: {nvidia['message'] or nvidia['state']}"
        if nvidia["files"]:
            text = f"{nvidia['files'][0]} is here, but {text}"
        do = "load or update the NVIDIA driver; in a container: docker run --gpus all"
        return [Finding("driver", "error", text, do)]
    findings = []
    driver = numbers(nvidia["driver"])
    suits = choose_cuda(facts)
    for major in (major for major in DRIVERS if versions.get(f"jax-cuda{major}-plugin")):
        text = f"NVIDIA {nvidia['driver']}, CUDA {major} of jax-cuda{major}-plugin"
        old = [
            g
            for g in nvidia["gpus"]
            if g["capability"] and tuple(g["capability"]) < CAPABILITIES[major]
        ]
        if driver[:1] < (DRIVERS[major],):
            text += f" wants {DRIVERS[major]} or newer"
            findings.append(Finding("driver", "error", text, install_cuda(facts)))
        elif old:
            least = ".".join(map(str, CAPABILITIES[major]))
            text = f"{old[0]['name']}: CUDA {major} wants compute capability {least} or newer"
            findings.append(Finding("driver", "error", text, install_cuda(facts)))
        else:
            findings.append(Finding("driver", "ok", text))
    if not findings:
        findings.append(
            Finding(
                "driver", "ok", f"NVIDIA {nvidia['driver']}: for CUDA {suits or 'of older jax'}"
            )
        )
    return findings


def judge_devices(facts: Facts) -> list[Finding]:
    """Compare the backend that jax uses with the accelerators that are present."""
    probe, present, chips = facts["jax"], facts["nvidia"]["gpus"], facts["tpu"]["chips"]
    if probe.get("state") != "ok":  # why is told under jax
        return []
    devices, backend = probe["devices"], probe["backend"]
    kinds = ", ".join(dict.fromkeys(device["kind"] for device in devices))
    text = f"{len(devices)} x {kinds} ({backend})"
    platforms = facts["environ"].get("JAX_PLATFORMS", "")
    hidden = facts["environ"].get("CUDA_VISIBLE_DEVICES")
    if backend != "cpu":
        findings = [Finding("devices", "ok", text)]
        num_present = chips if backend == "tpu" else len(present)
        if backend == "gpu" and hidden is None and 0 < len(devices) < num_present:
            text += f", but nvidia-smi lists {num_present}"
            findings = [Finding("devices", "note", text, "see nvidia-smi about the others")]
        return findings + (judge_gpus(facts) if backend == "gpu" else [])
    if not present and not chips:
        return [Finding("devices", "ok", f"no accelerator here; {text}")]
    things = f"{chips} TPU chips" if chips else f"{len(present)} x {present[0]['name']}"
    if platforms.lower() == "cpu":
        text = f"{things} here, but JAX_PLATFORMS=cpu keeps jax on the CPU"
        return [Finding("devices", "note", text, "unset JAX_PLATFORMS to use them")]
    if not chips and hidden is not None and hidden.strip() in ("", "-1"):
        text = f"{things} here, but CUDA_VISIBLE_DEVICES={hidden} hides them"
        return [Finding("devices", "note", text, "unset CUDA_VISIBLE_DEVICES to use them")]
    versions = facts["packages"]["versions"]
    text = f"{things} here, but jax computes on the CPU"
    if chips and not versions.get("libtpu"):
        text += ": libtpu is not installed"
    elif not chips and not any(versions.get(f"jax-cuda{major}-plugin") for major in DRIVERS):
        text += ": it has no CUDA plugin"
    elif probe["warnings"]:
        text += f": {probe['warnings'][0]}"
    elif probe["message"]:
        text += f": {probe['message']}"
    return [Finding("devices", "error", text, recommend(facts))]


def judge_gpus(facts: Facts) -> list[Finding]:
    """Report the GPUs' capabilities (bfloat16, Hopper kernels) and how much memory is taken."""
    findings = []
    present = facts["nvidia"]["gpus"]
    capabilities = [
        numbers(device["capability"]) or tuple(present[0]["capability"] or () if present else ())
        for device in facts["jax"]["devices"]
    ]
    oldest = min((capability for capability in capabilities if capability), default=None)
    if oldest is not None and oldest < (8, 0):
        text = f"compute capability {_dotted(oldest)} has no bfloat16"
        findings.append(
            Finding("bfloat16", "note", text, "model.compute_dtype=float32 (it is faster)")
        )
    jax = facts["packages"]["versions"].get("jax")
    if oldest is None:
        pass
    elif oldest[0] != 9:
        text = (
            f"for compute capability 9.0, these GPUs have {_dotted(oldest)}: XLA computes instead"
        )
        findings.append(Finding("Hopper kernels", "ok", text))
    elif numbers(jax)[:2] != KERNELS_FOR:
        text = f"for jax {_dotted(KERNELS_FOR)}, found {jax}: they decline, XLA computes instead"
        findings.append(Finding("Hopper kernels", "note", text, install_cuda(facts)))
    else:
        findings.append(Finding("Hopper kernels", "ok", "used"))
    for gpu in present:
        total, used = gpu["memory_mib"], gpu["used_mib"]
        if total and used and used > total / 4:
            text = f"{used / 1024:.0f} of {total / 1024:.0f} GiB of {gpu['name']} are taken"
            findings.append(Finding("GPU memory", "note", text, "nvidia-smi names the process"))
            break
    return findings


def judge_libtpu(facts: Facts) -> list[Finding]:
    """Its version, where there are TPUs."""
    version = facts["packages"]["versions"].get("libtpu")
    if not facts["tpu"]["chips"]:
        return []
    if version is None:
        return [Finding("libtpu", "error", "not installed", pip(facts, JAX["tpu"]))]
    return [Finding("libtpu", "ok", f"{version}, TPU {facts['tpu']['kind']}")]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
