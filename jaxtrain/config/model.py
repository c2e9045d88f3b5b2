"""Section model: which architecture, which weights, in which numbers."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from jaxtrain.config.base import RESUMABLE, Place, Section, known_in
from jaxtrain.config.limits import ROWS

DTYPE = Literal["float32", "bfloat16", "float64"]


class SpecialTokens(Section):
    """Control tokens, which only the chat template writes; those that the tokenizer lacks are added
    to it."""

    bos_token: str | None = None
    """Begins a text."""
    eos_token: str | None = None
    """Ends a text."""
    pad_token: str | None = None
    """Fills up rows of unlike lengths."""
    unk_token: str | None = None
    """Stands for what is unknown."""
    additional_special_tokens: list[str] = []
    """Further ones, such as those of a chat template: ["<|im_start|>", "<|im_end|>"]."""

    def roles(self) -> dict[str, str]:
        """Return the tokens that are set, by role."""
        tokens = self.model_dump(exclude={"additional_special_tokens"}, exclude_none=True)
        return dict(tokens)


class VisionTraining(Section):
    """Section model.vision: what is trained of a model that reads images."""

    train: Literal["none", "projector", "all"] = "none"
    """Parts for images that are trained with the text: neither, the projector alone, which makes
    features of what the tower sees, or both. What is not trained has no gradients and no optimizer
    state. With an adapter they are named in adapter.target."""


class MTPTraining(Section):
    """Section model.mtp: the multi-token prediction head of a model that has one."""

    train: Literal["none", "decoupled", "joint"] = "none"
    """none: the head's tensors are copied into every export as they are. decoupled: the head
    trains beside the model, which its loss does not reach. joint: its loss trains the model, too.
    To be trained, a folder without a head gets a new one."""
    weight: float = Field(0.1, gt=0, le=1000)
    """Factor of its loss."""


class ModelConfig(Section):
    """A Hugging Face checkpoint to start from, or an architecture to start at random."""

    path: Place | None = None
    """Hugging Face folder or Hub id with config.json (and safetensors, unless init = "random")."""
    init: Literal["pretrained", "random"] = "pretrained"
    """pretrained: load the weights at path; random: only its config.json is used."""
    architecture: dict[str, Any] | None = None
    """Instead of path: the keys of a config.json, for a model with random weights."""
    family: str | None = None
    """Module with the architecture's code, where config.json's is neither built in nor an entry
    point's: "package.module" or "file.py" (docs/extending.md)."""
    tokenizer: Place | None = None
    """Folder or Hub id of the tokenizer; default path. "builtin" is the small one shipped here."""
    chat_template: Place | None = None
    """Chat template that replaces the tokenizer's own, also in what is exported: chatml (or
    builtin), llama3, gemma, mistral, mistral_v1, mistral_v3_tekken, mistral_v7_tekken, phi3, phi4,
    zephyr, alpaca, vicuna, or a file with a Jinja template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template in every rendering, such as { enable_thinking = false }; also
    in what is exported. Those of a dataset and of a row come first."""
    added_tokens: list[str] = []
    """Tokens that the tokenizer gets, wherever texts spell them. Rows that the model's tables lack
    begin as the mean of the others; beside an adapter they train and the tables stay."""
    special_tokens: SpecialTokens = SpecialTokens()
    """The tokenizer's control tokens."""
    param_dtype: DTYPE = "float32"
    """Type of the trained weights and the optimizer state (the masters)."""
    compute_dtype: DTYPE = "bfloat16"
    """Type that activations and matrix products use."""
    remat: Annotated[
        Literal["none", "elementwise", "dots", "save_attention", "full", "offload"], RESUMABLE
    ] = "none"
    """What the backward pass recomputes, to save memory: nothing; cheap operations (everything but
    matrix products and attention); everything but matrix products; everything but attention; or
    whole blocks. offload: whole blocks, whose inputs wait in pinned memory of the host."""
    scan_layers: bool = True
    """Compile one layer and loop over it, rather than compile every layer."""
    matmul: Literal["default", "fp8", "fp8_row"] = "default"
    """In what the matrices of the layers are multiplied in training: compute_dtype; or FP8, with
    one scale for each operand or one for each row of it (docs/fp8.md). Head, embeddings, routers,
    experts and all weights stay as they are, and samplers compute in compute_dtype."""
    matmul_gradients: Literal["e5m2", "e4m3"] = "e5m2"
    """The FP8 type of gradients in these products: more range, or one bit more of precision."""
    attention: Annotated[str, RESUMABLE] = "auto"
    """Backend of the attention op: auto, xla, reference or a kernel's name."""
    logp: Annotated[str, RESUMABLE] = "auto"
    """Backend of the log-prob op: auto, xla, reference or a kernel's name."""
    experts: Annotated[str, RESUMABLE] = "auto"
    """Backend of the op of a mixture's experts: auto, xla, reference or a kernel's name."""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Factor of the load-balancing loss of a mixture of experts; 0 trains without it.
    (config.json's own value is not used.)"""
    router_aux_loss_scope: Literal["row", "batch"] = "row"
    """What its means are taken over: each packed row, or all rows of a microstep."""
    router_sequence_loss_coef: float = Field(0.0, ge=0)
    """Factor of DeepSeek's sequence-wise loss: the same within each document and layer, 1 at
    perfect balance (DeepSeek-V3: 1e-4)."""
    router_z_loss_coef: float = Field(0.0, ge=0)
    """Factor of the mean square of the logits' logsumexp, which keeps them small (OLMoE: 1e-3)."""
    router_bias_update_rate: float = Field(0.0, ge=0, le=1)
    """Balance without a loss: how far each step moves the correction bias of every expert towards
    an even load (DeepSeek-V3: 1e-3). For families that have such a bias, trained in full."""

    vision: VisionTraining = VisionTraining()
    """Tower and projector of a model that reads images."""
    mtp: MTPTraining = MTPTraining()
    """The head that guesses the token after the next one."""
    neftune_alpha: float = Field(0.0, ge=0, le=1000)
    """Uniform noise on the embeddings in training, in +-alpha / sqrt(tokens of the text * features)
    (NEFTune: 5 to 15). 0: none."""

    def find_balancing(self) -> str | None:
        """The first key that asks for something of a router, with its value; None: none does."""
        names = ("aux_loss_coef", "sequence_loss_coef", "z_loss_coef", "bias_update_rate")
        settings = ((f"router_{name}", getattr(self, f"router_{name}")) for name in names)
        return next((f"model.{key} {value}" for key, value in settings if value), None)


OPTIMIZERS = ("adamw", "schedule_free_adamw", "adafactor", "lion", "muon", "sgd")
MOMENTS = tuple(name for name in OPTIMIZERS if name != "adafactor")
"""Optimizers that keep arrays of a parameter's shape."""
SCHEDULES = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")


def find_width_conflict(section: str, compute: str, param: str) -> list[str]:
    """Return a sentence where a model would compute in more bits than its weights have."""
    wide = {"float64": 8, "float32": 4, "bfloat16": 2}
    if wide[compute] <= wide[param]:
        return []
    wider = f"{section}.compute_dtype {compute} is wider than {section}.param_dtype {param}"
    return [f"{wider}; lower the first or raise the second"]


def check_pattern(text: str) -> str:
    """Return a regular expression; ValueError if it is none."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(check_pattern)]


class LearningRateGroup(Section):
    """Parameters with a learning rate of their own: an entry of optim.lr_groups."""

    pattern: Pattern
    """Regular expression that is searched in the names of Hugging Face's tensors, with adapters of
    PEFT's: "layers.(30|31).mlp"."""
    learning_rate: float = Field(gt=0, le=1000)
    """Their peak learning rate."""


class OptimConfig(Section):
    """Optimizer, schedule and the size of a step."""

    name: Annotated[str, known_in("optimizers", OPTIMIZERS)] = "adamw"
    """adamw, adafactor, lion, muon (for weight matrices, with adamw for all else), sgd or
    schedule_free_adamw, which averages its steps instead of decaying its rate; evaluations,
    rollouts and exports use the average. Or a function that makes an optax transformation of the
    learning rate and `options`: an entry point's name, "optax:adan", "package.module:function" or
    "file.py:function"."""
    options: dict[str, Any] = {}
    """Of such a function: { b1 = 0.98, b2 = 0.92 } for "optax:adan"."""
    learning_rate: float = Field(1e-5, gt=0, le=1000)
    """Peak learning rate."""
    lr_scheduler: Annotated[str, known_in("schedules", SCHEDULES)] = "cosine"
    """Shape after warm-up: constant, linear, cosine, inverse_sqrt or wsd, which stays constant and
    decays over the last decay_ratio of the run. Or a function that makes a schedule, warm-up and
    all, of what it names of learning_rate, total_steps, warmup_steps and min_lr and of
    `scheduler_options`: an entry point's name, "package.module:function" or "file.py:function"."""
    scheduler_options: dict[str, Any] = {}
    """Of such a function: { power = 2.0 } for one that takes `power`."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up from 0. Give this or warmup_ratio."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """Warm-up as a share of all steps. Give this or warmup_steps."""
    min_lr: float | None = Field(None, ge=0)
    """Learning rate at the end of a decay. Give this or min_lr_ratio."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """The same as a share of learning_rate; 0 when neither is given."""
    wsd_decay: Literal["linear", "cosine", "exponential", "one_minus_sqrt"] = "one_minus_sqrt"
    """Shape of the wsd scheduler's final decay."""
    decay_ratio: float = Field(0.2, gt=0, le=1)
    """Share of all steps that the wsd scheduler decays over."""
    weight_decay: float = Field(0.0, ge=0, le=1000)
    """Decoupled weight decay, on matrices only (no norms, no biases; embeddings and the output head
    with decay_embeddings)."""
    decay_embeddings: bool = False
    """Decay embeddings and the output head as well."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First-moment decay (adamw, lion), momentum (muon, sgd), or the share of the average in where
    schedule_free_adamw takes its gradients."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Second-moment decay (adamw, schedule_free_adamw, lion, and muon's adamw)."""
    eps: float = Field(1e-8, ge=1.2e-38, le=1)
    """Term that keeps adamw's division finite; below 1.2e-38 it would be 0 in float32."""
    moments: Literal["params", "float32", "bfloat16", "int8", "int4"] = "params"
    """What moments or momentum (of every optimizer but adafactor) are stored as between steps: as
    the parameters are (model.param_dtype), or in 4, 2, about 1 or about half a byte each. bfloat16
    rounds the second moment at random, in proportion; int8 is that of bitsandbytes' 8-bit
    optimizers, int4 that of torchao's AdamW4bit, both by blocks along the last axis: norms, biases,
    token embeddings and small arrays stay float32."""
    offload: bool = False
    """Keep what the optimizer stores in pinned memory of the hosts; each step fetches it once its
    gradients are there, and sends it back."""
    lora_plus_ratio: float | None = Field(None, gt=0, le=1e6)
    """Learning rate of every adapter's B, and of DoRA's lengths, as a multiple of learning_rate,
    which is A's (LoRA+: 16)."""
    embedding_lr: float | None = Field(None, gt=0, le=1000)
    """Peak learning rate of the token embedding and the output head, where they are trained. Unset:
    learning_rate."""
    tower_lr: float | None = Field(None, gt=0, le=1000)
    """Peak learning rate of the tower for images, where it is trained. Unset: learning_rate."""
    projector_lr: float | None = Field(None, gt=0, le=1000)
    """Peak learning rate of the projector behind it, where it is trained. Unset: learning_rate."""
    lr_groups: list[LearningRateGroup] = []
    """Parameters with other peak learning rates; of several that fit a tensor the last one counts,
    before embedding_lr, tower_lr, projector_lr and lora_plus_ratio."""
    unfrozen_parameters: list[Pattern] = []
    """Train only tensors in whose Hugging Face names one of these regular expressions is found, and
    of these only the rows of a range behind it: "^model.embed_tokens.weight$[128000:]". Empty: all.
    """
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Clip the global gradient norm to this; unset to not clip."""
    gradient_accumulation_steps: int = Field(1, ge=1, le=ROWS)
    """Microsteps per optimizer step; the update equals that of one large batch exactly."""

    def find_conflicts(self) -> Iterator[str]:
        """A sentence for each key that has no meaning for that optimizer."""
        if self.name == "schedule_free_adamw" and self.lr_scheduler in SCHEDULES[1:]:
            yield (
                f"optim.lr_scheduler {self.lr_scheduler!r} lowers the rate, which"
                ' schedule_free_adamw replaces by an average: set optim.lr_scheduler = "constant"'
            )
        if self.moments != "params" and self.name not in MOMENTS:
            yield (
                f"optim.moments {self.moments!r} is for {', '.join(MOMENTS)}; {self.name!r} keeps"
                " things of its own: remove optim.moments"
            )
