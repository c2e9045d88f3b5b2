"""The tensor names that Hugging Face's decoders share."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.huggingface.ops import (
    HEAD_BIAS,
    TIED_COPY,
    ParameterEntry,
    PermutedRows,
    SplitRows,
    StackedOps,
    TensorOp,
    TensorRef,
    Transpose,
)
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.families import family

PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
SANDWICH_NORMS = {
    **POST_NORMS,
    "attention_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
}
"""The norms of a `Block`, and what their tensors are called: before both layers, behind, around."""
CHOICE_BIAS = "gate.e_score_correction_bias"
"""What most families call the bias of a router's choice."""
EXPERT_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
NUMBERED_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
PLAIN_PARTS = {"up": "up_proj", "down": "down_proj"}
"""The matrices of an MLP: with a gate, by name or by number, and without one."""
Runs = tuple[tuple[int, int], ...]
"""(start, size) of consecutive rows of a tensor."""
NORM_TENSORS = {"scale": "weight", "bias": "bias"}
"""What the parameters of a norm are called there."""


def outer_names(config: DecoderConfig, norm: str = "norm") -> list[ParameterEntry]:
    """Embedding, final norm (norm: its name there) and what head there is: tied, of its own, or one
    that scores."""
    entries = [
        ParameterEntry("embed.embedding", TensorRef("model.embed_tokens.weight")),
        *(
            ParameterEntry(f"norm.{part}", TensorRef(f"model.{norm}.{NORM_TENSORS[part]}"))
            for part in config.norm.parameters
        ),
    ]
    if config.first_position is not None:
        table = TensorRef("model.embed_positions.weight")
        entries.append(ParameterEntry("position_embed.embedding", table))
    entries += [ParameterEntry(path, TensorRef(path)) for path in score_paths(config)]
    if config.score is None and not config.tie_word_embeddings:
        entries.append(ParameterEntry("lm_head.embedding", TensorRef(TIED_COPY)))
        if config.head_bias:
            entries.append(ParameterEntry(HEAD_BIAS, TensorRef(HEAD_BIAS)))
    return entries + predictor_names(config)


def predictor_names(config: DecoderConfig) -> list[ParameterEntry]:
    """Every parameter of the multi-token prediction head (models.mtp), if the model has one."""
    if config.mtp is None:
        return []
    form, inner = config.mtp.form, config.mtp.inner

    def rename(name: str) -> str:
        _, _, number, ending = name.split(".", 3)
        for module, renamed in form.renamed:
            if ending.startswith(module):
                ending = renamed + ending.removeprefix(module)
        return form.block.format(n=number) + ending

    blocks = [entry for entry in family(inner).names(inner) if entry.param.startswith("stack.")]
    entries = [e._replace(param=f"mtp.{e.param}") for e in rename_tensors(blocks, rename)]
    norms = {"embed_norm": form.embed_norm, "hidden_norm": form.hidden_norm, "norm": form.norm}
    for path, name in norms.items():
        entries.append(ParameterEntry(f"mtp.{path}.scale", TensorRef(f"{form.root}{name}.weight")))
    kernel = Transpose(TensorRef(f"{form.root}{form.fc}.weight"))
    return [*entries, ParameterEntry("mtp.fc.kernel", kernel)]


def with_prefix(entries: list[ParameterEntry], prefix: str) -> list[ParameterEntry]:
    """The entries with `prefix` in the place of "model." before their tensors; where that ends
    the prefix, too, the head lies beside it."""
    beside = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""

    def rename(name: str) -> str:
        if name == TIED_COPY:
            return beside + name
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name

    return rename_tensors(entries, rename)


def rename_tensors(
    entries: list[ParameterEntry], rename: Callable[[str], str]
) -> list[ParameterEntry]:
    """Return the entries with their tensors renamed."""

    def renamed(op: TensorOp) -> TensorOp:
        if isinstance(op, StackedOps):
            return StackedOps(tuple(renamed(inner) for inner in op.ops))
        if isinstance(op, Transpose):
            return Transpose(renamed(op.op))
        named_op: Any = op
        return dataclasses.replace(named_op, name=rename(named_op.name))

    return [ParameterEntry(entry.param, renamed(entry.op)) for entry in entries]


def score_paths(config: DecoderConfig) -> list[str]:
    """The parameters of a head that scores, which are called alike here and there."""
    if config.score is None:
        return []
    return ["score.weight", *(["score.bias"] if config.score.per == "token" else [])]


def norm_names(
    kind: str,
    layers: Sequence[int],
    norms: Mapping[str, str] = PRE_NORMS,
    root: str = "model.",
    parts: Sequence[str] = ("scale",),
) -> list[ParameterEntry]:
    """The norms of a `Block`, by what they are called here."""
    return [
        _layers(kind, layers, root, f"{path}.{part}", f"{tensor}.{NORM_TENSORS[part]}")
        for path, tensor in norms.items()
        for part in parts
    ]


def joint_names(
    kind: str, layers: Sequence[int], name: str, sizes: Mapping[str, int]
) -> list[ParameterEntry]:
    """Kernels that are one matrix there: {ours: outputs}, in the order of its rows."""
    start, runs = 0, {}
    for path, size in sizes.items():
        runs[path] = ((start, size),)
        start += size
    return row_names(kind, layers, name, runs)


def row_names(
    kind: str, layers: Sequence[int], name: str, runs: Mapping[str, Runs], *, bias: bool = False
) -> list[ParameterEntry]:
    """Entries of Linears that are one tensor in folders; runs: {path here: its rows there}."""
    total, entries = sum(size for part in runs.values() for _, size in part), []
    for path, part in runs.items():
        for param, tensor in {"kernel": "weight", **({"bias": "bias"} if bias else {})}.items():
            tensors = (f"model.layers.{layer}.{name}.{tensor}" for layer in layers)
            ops: list[TensorOp] = [PermutedRows(tensor, 0, part, total) for tensor in tensors]
            if param == "kernel":
                ops = [Transpose(op) for op in ops]
            entries.append(ParameterEntry(f"stack.{kind}.{path}.{param}", StackedOps(tuple(ops))))
    return entries


def joint_mlp_names(
    kind: str,
    layers: Sequence[int],
    hidden: int,
    path: str = "mlp",
    modules: Sequence[str] = ("mlp.gate_up_proj", "mlp.down_proj"),
) -> list[ParameterEntry]:
    """A dense gated MLP of `hidden` dims whose gate and up are one matrix."""
    sizes = {f"{path}.{part}": hidden for part in ("gate", "up")}
    return [
        *joint_names(kind, layers, modules[0], sizes),
        *linear_entries(kind, layers, f"{path}.down", modules[1]),
    ]


def fused_expert_names(
    kind: str,
    layers: Sequence[int],
    hidden: int,
    *,
    path: str = "mlp",
    module: str = "mlp.",
    router: str = "gate",
    tensors: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
) -> list[ParameterEntry]:
    """A router and the experts, all experts of `hidden` dims in one tensor [E, out, in]: that of
    gate and up, and that of down, behind `model.layers.<n>.<module>`; path: what the block calls
    the MoE."""
    name = f"{module}{router}.weight"
    entries = [layer_entry(kind, layers, f"{path}.router.kernel", name, transpose=True)]

    def stack(part: str, make: Callable[[str], TensorOp]) -> None:
        names = [f"model.layers.{layer}.{module}" for layer in layers]
        op = StackedOps(tuple(Transpose(make(name)) for name in names))
        entries.append(ParameterEntry(f"stack.{kind}.{path}.experts.{part}.kernel", op))

    for position, part in enumerate(("gate", "up")):
        start = position * hidden
        stack(part, lambda name, s=start: SplitRows(f"{name}{tensors[0]}", 1, s, 2 * hidden))
    stack("down", lambda name: TensorRef(f"{name}{tensors[1]}"))
    return entries


def transpose_experts(entry: ParameterEntry) -> ParameterEntry:
    """Return the entry for experts whose tensor is [E, in, out] in place of [E, out, in]."""
    if ".experts." not in entry.param:
        return entry
    assert isinstance(entry.op, StackedOps)
    ops: list[Any] = [layer.op for layer in entry.op.ops if isinstance(layer, Transpose)]
    split = [dataclasses.replace(op, axis=2) if isinstance(op, SplitRows) else op for op in ops]
    return ParameterEntry(entry.param, StackedOps(tuple(split)))


def expert_names(
    kind: str,
    layers: Sequence[int],
    num_experts: int,
    *,
    path: str = "mlp",
    module: str = "mlp",
    router: str = "gate",
    parts: Mapping[str, str] = EXPERT_PARTS,
    choice_bias: str | None = None,
    shared: str | None = None,
) -> list[ParameterEntry]:
    """A router and the experts, each a tensor of its own, under `model.layers.<n>.<module>`; path:
    what the block calls the MoE; parts: what tensors of an expert's matrices are called.
    choice_bias, shared: what those of the router's bias and of the shared experts are called there,
    where there are any."""
    name = f"{module}.{router}.weight"
    entries = [layer_entry(kind, layers, f"{path}.router.kernel", name, transpose=True)]
    if choice_bias is not None:
        name = f"{module}.{choice_bias}"
        entries.append(layer_entry(kind, layers, f"{path}.router.choice_bias", name))
    for part, projection in parts.items():
        stacks = tuple(
            StackedOps(
                tuple(
                    Transpose(
                        TensorRef(f"model.layers.{layer}.{module}.experts.{e}.{projection}.weight")
                    )
                    for e in range(num_experts)
                )
            )
            for layer in layers
        )
        entries.append(
            ParameterEntry(f"stack.{kind}.{path}.experts.{part}.kernel", StackedOps(stacks))
        )
        if shared is not None:
            name = f"{module}.{shared}.{projection}"
            entries += linear_entries(kind, layers, f"{path}.shared.{part}", name)
    return entries


def layer_entry(
    kind: str, layers: Sequence[int], param: str, name: str, transpose: bool = False
) -> ParameterEntry:
    """A parameter of the layers that are stored as `stack.<kind>`, a tensor of each."""
    return _layers(kind, layers, "model.", param, name, transpose)


def linear_entries(
    kind: str, layers: Sequence[int], param: str, name: str, *, bias: bool = False
) -> list[ParameterEntry]:
    """List the entries of the kernel of a Linear and of its bias."""
    return _linear(kind, layers, "model.", param, name, bias)


def _layers(
    kind: str, layers: Sequence[int], root: str, param: str, name: str, transpose: bool = False
) -> ParameterEntry:
    tensors: list[TensorOp] = [TensorRef(f"{root}layers.{layer}.{name}") for layer in layers]
    ops = [Transpose(tensor) for tensor in tensors] if transpose else tensors
    return ParameterEntry(f"stack.{kind}.{param}", StackedOps(tuple(ops)))


def _linear(
    kind: str, layers: Sequence[int], root: str, param: str, name: str, bias: bool
) -> list[ParameterEntry]:
    kernel = _layers(kind, layers, root, f"{param}.kernel", f"{name}.weight", transpose=True)
    if not bias:
        return [kernel]
    return [kernel, _layers(kind, layers, root, f"{param}.bias", f"{name}.bias")]
