"""Section rollout: who samples, how much, and how far ahead of the trainer."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxtrain.config.base import RESUMABLE, Place, Section, requires, unread
from jaxtrain.config.data import find_stream_conflicts
from jaxtrain.config.launch import find_launch_conflicts
from jaxtrain.config.limits import ITEMS, ROWS, WORKERS
from jaxtrain.config.ray import RayConfig, find_ray_conflicts
from jaxtrain.config.refresh import DraftRefresh, find_refresh_conflicts
from jaxtrain.config.vllm import (
    VllmConfig,
    find_kwargs_conflicts,
    find_server_conflicts,
    find_vllm_conflicts,
)


class LocalConfig(Section):
    """Storage of what the local engine reads for every token. The trainer computes as before,
    and log-probs are those of the sampler as it is: section task says how they correct for it."""

    weights: Literal["default", "int8"] = "default"
    """Matrices of the layers, in model.compute_dtype or in 8 bits with a scale for each output,
    quantized anew after every update. Embeddings, head, norms and routers stay as they are."""
    cache: Literal["default", "int8", "fp8"] = "default"
    """Keys and values of attention layers, in model.compute_dtype or in 8 bits (fp8: e4m3) with a
    scale for each token and head. States of recurrent layers stay as they are."""


class RolloutConfig(Section):
    """Sampling of answers for task.kind rl, and for distillation on the student's own; the draws
    themselves are section sampling."""

    engine: str = "local"
    """local: the trainer's own weights and devices. vllm: servers over HTTP. sglang: servers of
    SGLang, which section rollout.vllm lists; they read new weights from disk. Or a custom kind of
    engine: an entry point of the group jaxtrain.engines, "package.module:Class" or
    "file.py:Class"."""
    options: dict[str, Any] = {}
    """Options of a custom kind of engine."""
    prompts_per_step: int = Field(8, ge=1, le=ITEMS)
    """Groups of a round, that is of task.num_minibatches optimizer steps."""
    group_size: int = Field(8, ge=1, le=ROWS)
    """Answers to each prompt."""
    mode: Literal["sync", "prefetch", "async"] = "sync"
    """sync: a round is drawn after the last one was trained. prefetch: while it is trained. async:
    all the time, up to max_lag rounds ahead."""
    max_lag: int = Field(1, ge=0, le=ROWS)
    """async: groups with a token from a policy older than this many rounds are dropped."""
    streaming: bool = False
    """Train each of a round's task.num_minibatches as soon as enough groups for it are finished,
    while the others are still drawn, so that the slowest answers hold up one step, not the round.
    Short answers come first, and the ratio is that to the weights which the minibatch meets."""
    devices: int = Field(0, ge=0, le=ROWS)
    """local: devices set aside for sampling, the last ones; 0: it shares those of the trainer."""
    max_batch: int = Field(64, ge=1, le=ROWS)
    """local: answers that are decoded together."""
    draft: Place | None = None
    """local: folder of a draft model (task.kind dflash or eagle3), or mtp, the model's own
    multi-token prediction head, for speculative decoding: the same answers in fewer passes of the
    policy, whose log-probs stay exact. See docs/speculative.md."""
    draft_rows: int = Field(0, ge=0, le=ROWS)
    """With draft: it guesses only while no more answers than these are under way, for many rows
    fill the device without it; 0: always."""
    draft_refresh: DraftRefresh | None = None
    """With draft: train it further between rounds, so that it follows the policy; see its section.
    Unset: it stays as it is."""
    exact: bool = False
    """local: sampler and trainer compute the same log-probs, to the bit, in any batch and packing,
    so that ratios are exactly 1 in a round's first update and old log-probs are the sampler's. On
    one CPU or GPU; whatever keeps them apart is refused. See docs/exact.md."""
    zero_advantage: Literal["drop", "keep", "refill"] = "drop"
    """Groups whose rewards are all equal: leave them out, train them anyway (they matter to a KL
    term only), or draw further prompts until the round is full (DAPO's dynamic sampling)."""
    max_refill: int = Field(4, ge=1, le=ROWS)
    """refill: prompts drawn for a round, as a multiple of prompts_per_step, before it goes on with
    what there is."""
    retries: Annotated[int, RESUMABLE] = Field(2, ge=0, le=ROWS)
    """How often an episode or a judgment that failed (an exception, a time-out, a lost server) is
    tried again before its group is dropped. Before a second try of somebody's code there is a pause
    of 1 s, then of 2, 4, ...: a short outage of a judge costs nothing."""
    max_failures: Annotated[float, RESUMABLE] = Field(0.5, ge=0, le=1)
    """Share of the episodes of the last two rounds (and as many as are drawn ahead; at least 64
    episodes) that may fail for good; beyond it the run ends, saved, and says what failed. 1: never.
    """
    max_idle_rounds: Annotated[int, RESUMABLE] = Field(8, ge=1, le=ROWS)
    """Rounds in a row without anything to learn from (all rewards of each group equal, say) after
    which the run ends, saved, and shows what was sampled."""
    replay_size: int = Field(0, ge=0, le=ITEMS)
    """Informative groups that are kept to stand in for those dropped as zero_advantage; 0: none."""
    replay_max_lag: int = Field(8, ge=1)
    """Rounds after which a kept group is let go."""
    replay_share: float = Field(0.0, ge=0, lt=1)
    """Share of a round's groups that the kept ones make up, as far as there are some, beside those
    that stand in: so many prompts fewer are asked."""
    replay_logp: Literal["sampler", "recomputed"] = "sampler"
    """Log-probs that stand for the sampler's in kept groups. sampler: those of the weights that
    drew them, so that ratios and corrections see how far the policy has moved. recomputed: those of
    the weights at the beginning of the round, as if these had drawn the groups; rounds with such
    groups take one more pass."""
    curator: str = "all"
    """Which of the prompts that come up are asked. all: every one. solved: not those that are
    nearly always solved. greso: those whose groups keep earning the same, less and less often. Or
    a custom one: an entry point of the group jaxtrain.curators, "package.module:Class" or
    "file.py:Class". What is left out counts as done and comes up again in the next epoch."""
    curator_options: dict[str, Any] = {}
    """solved: threshold (1.0), bound (0.9), weight (0.5), every (4). greso: explore (0.5), floor
    (0.05). See docs/rl.md."""
    reroll_start: float = Field(1.0, ge=0, le=1)
    """Share of the run after which prompts without any reward are asked again; 1: never."""
    reroll_max_groups: int = Field(1, ge=1)
    """Prompts of a round that may be such ones."""
    router_replay: bool = False
    """Of a mixture of experts: record to which experts tokens go while answers are drawn, and send
    them there again in training (R3, arXiv:2510.11370): what the sampler rounds otherwise moves no
    token. vLLM: servers started with --enable-return-routed-experts."""
    samples: Annotated[Annotated[int, Field(ge=0, le=ITEMS)] | Literal["all"], RESUMABLE] = 2
    """Answers of a round that samples.jsonl keeps: so many, the best and the worst, or "all"."""
    reward_workers: Annotated[Annotated[int, Field(ge=1, le=WORKERS)] | None, RESUMABLE] = None
    """Processes that run the reward functions. None: one; if all functions are built in, up to
    eight, but one less than there are CPU cores. In each of Ray's workers: one."""
    local: LocalConfig = LocalConfig()
    """Weights and cache in fewer bits; only with engine local."""
    vllm: VllmConfig = VllmConfig()
    """Servers and weight sync; only with engine vllm."""
    service: str = "process"
    """Where episodes are played and judged. process: in that of the trainer. ray: in a service and
    workers on a Ray cluster that the run starts. ray://NAME: in those that jaxtrain serve-rollouts
    has started, which outlive the run."""
    ray: RayConfig = RayConfig()
    """The cluster; only with service ray."""


SGLANG_KEYS = {
    *("servers", "discover", "adapter_dir", "keep_adapters", "weight_dtype", "concurrency"),
    *("request_seconds", "retries", "health_seconds", "wait_seconds", "drain_seconds"),
    *("progress_seconds", "sync_seconds", "generation_kwargs", "adapter_transport"),
}
"""Keys of section rollout.vllm that engine sglang reads."""


def find_sglang_conflicts(rollout: RolloutConfig) -> Iterator[str]:
    """Yield one sentence for each impossible combination, of a run that samples with SGLang."""
    if not rollout.vllm.servers and not rollout.vllm.discover:
        yield (
            'rollout.engine sglang needs rollout.vllm.servers, such as ["http://127.0.0.1:30000"]:'
            " start one with python -m sglang.launch_server"
        )
    if rollout.vllm.discover and not rollout.vllm.discover.startswith(("file:", "dns:")):
        yield "rollout.vllm.discover: engine sglang reads file:///PATH and dns://NAME:PORT alone"
    for key in rollout.vllm.model_dump(exclude_defaults=True).keys() - SGLANG_KEYS:
        yield f"rollout.vllm.{key} is for vLLM's servers; remove it with rollout.engine sglang"
    yield from find_server_conflicts(rollout.vllm.servers)
    yield from find_kwargs_conflicts(rollout.vllm.generation_kwargs)
    if rollout.router_replay:
        yield "rollout.router_replay is for engines local and vllm; remove it"


def find_drawing_conflicts(config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination of whatever trains on drawn answers."""
    kind, rollout, sampling = config.task.kind, config.rollout, config.sampling
    if sampling.temperature == 0:
        yield (
            f"task.kind {kind} draws answers at random; set sampling.temperature above 0, such as"
            " 1.0"
        )
    if sampling.max_new_tokens >= config.data.sequence_len:
        yield (
            f"sampling.max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt within"
            f" data.sequence_len {config.data.sequence_len}, which must hold prompt and answer;"
            " raise the second or lower the first"
        )
    if rollout.engine in ("vllm", "sglang") and rollout.devices:
        yield "rollout.devices is for the local engine; remove it, servers have their own"
    yield from requires("rollout.draft_rows", "rollout.draft", "; set that or remove it")(config)
    yield from unread("rollout.replay_logp rollout.replay_max_lag", "rollout.replay_size", bool)(
        config
    )
    replayed = round(rollout.replay_share * rollout.prompts_per_step)
    if rollout.replay_share and replayed > rollout.replay_size:
        yield (
            f"rollout.replay_share {rollout.replay_share:g} is {replayed} groups of a round, but"
            f" rollout.replay_size keeps {rollout.replay_size}; set that to"
            f" {max(4 * replayed, 1)}, say"
        )
    if replayed and replayed == rollout.prompts_per_step:
        yield (
            f"rollout.replay_share {rollout.replay_share:g} leaves no place of"
            f" rollout.prompts_per_step {rollout.prompts_per_step} for a prompt; lower it"
        )
    if rollout.router_replay and rollout.draft is not None:
        yield (
            "rollout.router_replay does not record what a draft's guesses read; remove that or"
            " rollout.draft"
        )
    if rollout.engine != "local" and rollout.draft is not None:
        vllm_hint = "; vLLM takes a draft when it starts (vllm serve --speculative-config)"
        yield (
            "rollout.draft is for the local engine: remove it, or set rollout.engine to"
            f' "local"{vllm_hint if rollout.engine == "vllm" else ""}'
        )
    if rollout.exact and kind != "rl":
        yield f'rollout.exact is for task.kind "rl", not {kind}; remove it'
    yield from find_refresh_conflicts(config)
    yield from find_ray_conflicts(rollout)
    if rollout.engine == "vllm":
        yield from find_vllm_conflicts(rollout.vllm, config.adapter.kind, rollout.mode)
        if rollout.vllm.eval_servers and not config.eval.sets:
            yield "rollout.vllm.eval_servers has no effect without [[eval.sets]]; remove it"
        yield from find_launch_conflicts(config)
    if rollout.engine == "sglang":
        yield from find_sglang_conflicts(rollout)
        sections = {f"eval.sets.{index}": entry for index, entry in enumerate(config.eval.sets)}
        for key, section in {"sampling": sampling, **sections}.items():
            if section.structured_outputs is not None and section.structured_outputs.choice:
                yield (
                    f"{key}.structured_outputs.choice: SGLang takes json_schema or regex; write"
                    ' the texts as regex = "(yes|no)"'
                )
    if rollout.engine != "local" and rollout.local.model_dump(exclude_defaults=True):
        vllm_hint = "; vLLM takes --quantization and --kv-cache-dtype when it starts"
        yield (
            f'section rollout.local has no effect while rollout.engine is "{rollout.engine}"'
            f"{vllm_hint if rollout.engine == 'vllm' else ''}"
        )
    if rollout.local.weights != "default" and config.adapter.quantize != "none":
        yield (
            f'rollout.local.weights "{rollout.local.weights}": adapter.quantize'
            f' "{config.adapter.quantize}" stores these matrices in fewer bits already, for the'
            " sampler as well; remove one"
        )
    if rollout.local.weights != "default" and config.adapter.kind == "dora":
        yield (
            f'rollout.local.weights "{rollout.local.weights}" needs adapter.kind "lora" or none;'
            " dora reads the norms of whole matrices"
        )
    if rollout.engine == "local" and rollout.vllm.model_dump(exclude_defaults=True):
        yield 'section rollout.vllm has no effect while rollout.engine is "local"'
    if config.data.global_batch_size or config.optim.gradient_accumulation_steps > 1:
        yield (
            f"rollout.prompts_per_step sets the size of a step for task.kind {kind}; remove"
            " data.global_batch_size and optim.gradient_accumulation_steps"
        )
    yield from find_stream_conflicts(config, f"task.kind {kind} needs all prompts")
