"""Section rollout.vllm: servers that sample over HTTP, and how they get the weights."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from jaxtrain.config.base import RESUMABLE, Place, Section
from jaxtrain.config.limits import ITEMS, ROWS, SECONDS, WORKERS

LOCAL = ("127.0.0.1", "localhost", "::1")
DISCOVER = re.compile(r"file:///.+|dns://[^/]+:\d+|(router|dynamo)\+https?://[^/]+/?")
EVERYWHERE = ("", "0.0.0.0", "::")


class VllmConfig(Section):
    """vLLM servers, for rollout.engine vllm. Start one with python -m jaxtrain_vllm.serve, or let
    launch do so. Engine sglang reads those keys that mean the same for its servers."""

    launch: Annotated[Literal["none", "local", "ray"], RESUMABLE] = "none"
    """none: they run already. local: jaxtrain starts them on this machine, starts again one that
    ends, and ends them with the run. ray: the same on the machines of a Ray cluster (section
    rollout.ray), wherever it has GPUs. Those that servers names are used beside them."""
    python: Annotated[Place | None, RESUMABLE] = None
    """launch: Python of the environment with vLLM. Unset: the environment variable VLLM_PYTHON, or
    the Python of this run."""
    replicas: Annotated[int, RESUMABLE] = Field(1, ge=1, le=WORKERS)
    """launch: how many servers."""
    gpus: Annotated[int | None, RESUMABLE] = Field(None, ge=0, le=ROWS)
    """launch: GPUs for all of them together, split evenly (tensor parallel); on this machine the
    last ones, which the trainer then leaves alone (with sleep it shares them). Unset: one a replica
    where there are GPUs. 0: they compute on the CPU."""
    args: Annotated[list[str], RESUMABLE] = []
    """launch: further options for vLLM, such as ["--max-model-len", "4096"]."""
    servers: Annotated[list[str], RESUMABLE] = []
    """Base URLs such as "http://127.0.0.1:8000"; several share the work."""
    discover: Annotated[str, RESUMABLE] = ""
    """Where more servers are listed, asked every health_seconds: "file:///PATH" (a URL a line),
    "dns://NAME:PORT" (every address of a name), "router+http://HOST:PORT" (the workers of a
    vllm-router), "dynamo+http://HOST:PORT". Who is listed is taken in during the run; who is listed
    no more gets no new requests and may end its own."""
    via: Annotated[Literal["router", "direct"], RESUMABLE] = "router"
    """discover router+http: whether requests go through the router, or to the servers that it
    lists. Weights always go to these."""
    sync: Literal["lora", "full", "delta"] = "full"
    """lora: each version as a PEFT folder that the servers load. full: all weights over TCP.
    delta: only what changed in weight_dtype since the last version."""
    weight_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What full and delta send; choose what the servers compute in. In float32 nearly everything
    changes with every step, so delta saves nothing."""
    full_every: int = Field(20, ge=1)
    """delta: every so many versions everything is sent."""
    delta_base: Literal["host", "device"] = "host"
    """delta: where the last version is kept to be compared with. device: on the trainer's devices,
    2 bytes a weight (4 in float32), so that only what has changed is copied to the host. Of a run
    of one process; several compare on the host."""
    transport: Literal["host", "device"] = "host"
    """full, delta: where servers of the trainer's host read new weights. device: in the trainer's
    GPU memory (CUDA IPC), for which it takes 2 bytes a weight (4 in float32) beside jax's pool;
    nothing passes through the host's memory. Where a server cannot, it is as with host, told in a
    line."""
    listen: Annotated[str | None, RESUMABLE] = None
    """full, delta: address of this machine under which the servers reach the trainer. Unset:
    127.0.0.1; with launch ray the one that the cluster knows."""
    listen_port: Annotated[int, RESUMABLE] = Field(0, ge=0, le=65535)
    """full, delta: port there; 0 takes a free one."""
    streams: Annotated[int, RESUMABLE] = Field(4, ge=1, le=64)
    """full, delta: connections that more than 256 MiB to a worker of another host travel over, a
    range of bytes over each."""
    fan_out: Annotated[int, RESUMABLE] = Field(8, ge=0, le=1024)
    """full, delta: hosts that the trainer sends a version to itself. Where there are more, each
    that has it passes it on, to one other at a time; the trainer sends it to those that did not get
    it there in time. 0: the trainer sends it to all."""
    adapter_dir: Place | None = None
    """lora: folder for the adapters. Unset: OUTPUT_DIR/adapters."""
    adapter_transport: Annotated[Literal["auto", "disk", "http"], RESUMABLE] = "auto"
    """lora: how servers get an adapter. disk: they see adapter_dir under the same path. http: it is
    sent to each, which keeps it in a folder of its own (serve with VLLM_API_KEY). auto: a server
    that does not see the folder is sent it. Engine sglang: http sends all tensors, else they are
    read from adapter_dir."""
    keep_adapters: int = Field(2, ge=2, le=1024)
    """lora: versions that stay on disk and loaded. Two, so that answers under way can end."""
    concurrency: Annotated[int, RESUMABLE] = Field(512, ge=1, le=ITEMS)
    """Requests under way at once, on all servers together; each has a connection of its own. A
    server whose own queue grows gets no more."""
    request_seconds: Annotated[float, RESUMABLE] = Field(600.0, gt=0, le=SECONDS)
    """Longest wait for one answer; then it is asked for again, elsewhere if possible."""
    retries: int = Field(3, ge=0, le=ROWS)
    """How often a request is repeated after a time-out or a server error."""
    health_seconds: Annotated[float, RESUMABLE] = Field(5.0, gt=0, le=SECONDS)
    """Pause between two looks at a server's health."""
    wait_seconds: Annotated[float, RESUMABLE] = Field(600.0, gt=0, le=SECONDS)
    """How long to wait for a server: at the start, and when all of them are gone."""
    drain_seconds: Annotated[float, RESUMABLE] = Field(60.0, ge=0, le=SECONDS)
    """How long requests at a server that leaves may go on; then they are asked again elsewhere."""
    progress_seconds: Annotated[float, RESUMABLE] = Field(20.0, gt=0, le=SECONDS)
    """A server hangs, whatever its /health says, if it draws no token for so long though requests
    wait there, or does not answer /health, a step of a weight sync, of loading an adapter, of sleep
    or of waking (a second more for each 256 MiB of weights). It is named in the log before, dropped
    then, its requests are asked elsewhere, and it is taken back once it answers again."""
    sync_seconds: Annotated[float, RESUMABLE] = Field(600.0, gt=0, le=SECONDS)
    """Longest wait for the servers to take new weights, all steps together; then the run goes on
    with those that have."""
    sleep: bool = False
    """Let the servers give their GPU memory back while the trainer works: one GPU for both. Only
    with rollout.mode sync."""
    eval_servers: Annotated[Annotated[int, Field(ge=0, le=WORKERS)] | list[str], RESUMABLE] = 0
    """Servers that answer eval.sets while training goes on: how many, or their URLs. From the begin
    of an evaluation to its end they keep its version and answer nobody else; then they are given
    the newest weights. 0: all servers answer the sets, between rounds."""
    generation_kwargs: dict[str, Any] = {}
    """Further sampling parameters of every request, as vLLM names them: { min_tokens = 8 }. Those
    that section sampling sets are refused. What changes the distribution changes what log-probs are
    of (docs/sampling.md)."""
    any_version: bool = False
    """Go on with a vLLM version that this release was not tested with."""

    @property
    def routed(self) -> bool:
        """Return whether requests go through a router."""
        return self.discover.startswith("router+") and self.via == "router"


SET_OTHERWISE = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "stop": "sampling.stop",
    "seed": "sampling.seed",
    "max_tokens": "sampling.max_new_tokens",
    "max_new_tokens": "sampling.max_new_tokens",
    "structured_outputs": "sampling.structured_outputs",
    "guided_regex": "sampling.structured_outputs.regex",
    "guided_json": "sampling.structured_outputs.json_schema",
    "guided_choice": "sampling.structured_outputs.choice",
    "response_format": "sampling.structured_outputs.json_schema",
    "regex": "sampling.structured_outputs.regex",
    "json_schema": "sampling.structured_outputs.json_schema",
    "n": "rollout.group_size",
}
"""Keys of a request to vLLM or SGLang that others of this config set."""
FIXED = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "stop_token_ids"),
    *("model", "prompt", "token_ids", "sampling_params", "return_token_ids", "stream"),
    *("prompt_logprobs", "detokenize", "echo", "best_of", "use_beam_search"),
)
"""Keys that every request has fixed values of, or none."""


def find_kwargs_conflicts(kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for each sampling parameter that the run sets itself."""
    for name in kwargs:
        key = f"rollout.vllm.generation_kwargs.{name}"
        if name in SET_OTHERWISE:
            yield f"{key} is set by {SET_OTHERWISE[name]}; set that"
        elif name in FIXED:
            yield (
                f"{key} is part of what every request is sent with, for the tokens' log-probs to be"
                " the policy's; remove it"
            )


def find_server_conflicts(urls: Sequence[str]) -> Iterator[str]:
    """Yield one sentence for each fault of rollout.vllm.servers."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield f"rollout.vllm.servers {url!r} is no URL; write http://HOST:PORT"
    if len({url.rstrip("/") for url in urls}) < len(urls):
        yield "rollout.vllm.servers names a server twice; remove one"


def find_vllm_conflicts(vllm: VllmConfig, adapter_kind: str, mode: str) -> Iterator[str]:
    """Yield one sentence for each impossible combination, of a run that samples with vLLM."""
    if not vllm.servers and not vllm.discover and vllm.launch == "none":
        yield (
            'rollout.engine vllm needs rollout.vllm.servers, such as ["http://127.0.0.1:8000"]:'
            " start one with python -m jaxtrain_vllm.serve, or have jaxtrain start them with"
            ' rollout.vllm.launch = "local"; or name where they are listed in rollout.vllm.discover'
        )
    if vllm.discover and not DISCOVER.fullmatch(vllm.discover):
        yield (
            f"rollout.vllm.discover {vllm.discover!r} is none of file:///PATH, dns://NAME:PORT,"
            " router+http://HOST:PORT, dynamo+http://HOST:PORT"
        )
    if vllm.discover and vllm.sleep:
        yield (
            "rollout.vllm.sleep is for servers that share the trainer's GPU; remove"
            " rollout.vllm.discover"
        )
    yield from find_server_conflicts(vllm.servers)
    if vllm.sync == "lora" and adapter_kind != "lora":
        yield (
            f"rollout.vllm.sync lora needs adapter.kind lora, which is {adapter_kind}; set"
            ' rollout.vllm.sync to "full" or "delta", or train a LoRA'
        )
    if vllm.sync != "lora" and adapter_kind != "none":
        yield (
            f"rollout.vllm.sync {vllm.sync} sends whole weights, but adapter.kind {adapter_kind}"
            ' trains an adapter; set rollout.vllm.sync to "lora" or adapter.kind to "none"'
        )
    addresses = [*vllm.servers, *([vllm.discover] if not vllm.discover.startswith("file") else [])]
    remote = [url for url in filter(None, addresses) if urlsplit(url).hostname not in LOCAL]
    if vllm.sync != "lora" and vllm.listen in EVERYWHERE:
        yield (
            f"rollout.vllm.listen {vllm.listen!r} is where to listen, not where servers can connect"
            " to; write this machine's address"
        )
    listen = vllm.listen or LOCAL[0]
    if vllm.sync != "lora" and listen in LOCAL and remote:
        yield (
            f"rollout.vllm.listen {listen!r} cannot be reached from {remote[0]}; write this"
            " machine's address as that server sees it"
        )
    yield from find_eval_server_conflicts(vllm)
    yield from find_kwargs_conflicts(vllm.generation_kwargs)
    if vllm.sleep and mode != "sync":
        yield (
            f"rollout.vllm.sleep stops the servers while training, but rollout.mode {mode} samples"
            ' then; set rollout.mode to "sync" or rollout.vllm.sleep to false'
        )


def find_eval_server_conflicts(vllm: VllmConfig) -> Iterator[str]:
    """Yield one sentence for each reason why no server can be spared for evaluations."""
    requested, key = vllm.eval_servers, "rollout.vllm.eval_servers"
    if not requested:
        return
    fixed = not vllm.discover and vllm.launch == "none"
    urls = {url.rstrip("/") for url in vllm.servers}
    if isinstance(requested, list):
        unknown = [url for url in requested if url.rstrip("/") not in urls]
        if fixed and unknown:
            yield f"{key} names {unknown[0]!r}, which is not one of rollout.vllm.servers"
    count = len(requested) if isinstance(requested, list) else requested
    most = len(vllm.servers) + (vllm.replicas if vllm.launch != "none" else 0)
    if not vllm.discover and count >= most:
        yield f"{key} {requested} leaves none of {most} servers to training; name fewer"
    if vllm.sleep:
        yield f"{key}: with rollout.vllm.sleep all servers rest while training; remove one of them"
    if vllm.routed:
        yield (
            f"{key}: a router would send training's requests to servers that keep older weights;"
            ' set rollout.vllm.via to "direct"'
        )
