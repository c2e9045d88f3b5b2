"""Section adapter: train small corrections beside frozen weights."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Literal

from pydantic import Field

from jaxtrain.config.base import Place, Section, unread
from jaxtrain.config.limits import WIDTH


class AdapterConfig(Section):
    """LoRA and its relatives: the model's own weights are frozen, in model.param_dtype."""

    kind: Literal["none", "lora", "dora"] = "none"
    """none: all weights are trained. lora: low-rank corrections of matrices. dora: LoRA with a
    trained length for every column of the matrix."""
    rank: int = Field(16, ge=1, le=WIDTH)
    """Rank of the corrections."""
    alpha: float = Field(32.0, gt=0)
    """The correction is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA), for large ranks."""
    target: str | list[str] = "all-linear"
    """What gets an adapter: "attention", "mlp", "all-linear", "router", "tower" and "projector" (of
    what reads images), or patterns of names, ours ("attention.q", "mlp.*") or Hugging Face's
    ("q_proj", "mlp.up_proj"), with numbers of layers ("layers.7.mlp.*") or as regular expressions
    ("layers.(3|7|11).mlp"). Routers, towers and projectors only by name."""
    rank_pattern: dict[str, int] = {}
    """Other ranks for some of them, by pattern: {"mlp" = 8, "q_proj" = 32}; the last match
    counts."""
    alpha_pattern: dict[str, float] = {}
    """Other alphas for some of them, by pattern."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Share of an adapter's input that is dropped in training, drawn anew in every step. Unset: 0,
    or what adapter.path says."""
    train_embeddings: bool = False
    """Train the token embedding in full (a tied head is the same table)."""
    train_head: bool = False
    """Train the output head in full (a tied embedding is the same table). The head of a reward
    model always is."""
    path: Place | None = None
    """PEFT folder to start from. It brings its own rank, alpha, targets and patterns."""
    quantize: Literal["none", "nf4", "nf4_fused", "int8", "mxfp4"] = "none"
    """Store the frozen matrices in fewer bits, quantized as they are read. nf4: 4 bits with double
    quantization (QLoRA), each matrix of each expert by itself. nf4_fused: the same over whole
    tensors of transformers, all experts of a layer in one, as bitsandbytes has it and with it
    Axolotl's quantize_moe_experts: for adapters that are trained beside such weights. int8: 8 bits.
    mxfp4: only the matrices of experts, in the 4 bits in which gpt-oss is published, which this
    keeps as it is. The embedding and the head stay as they are."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the trained weights and their optimizer state."""

    def targets(self) -> list[str]:
        """The patterns of `target`."""
        return [self.target] if isinstance(self.target, str) else self.target


def find_adapter_off_conflicts(reference: str, adapter: AdapterConfig) -> Iterator[str]:
    """Yield one sentence for each reason why task.reference cannot be had of this adapter."""
    full = adapter.train_embeddings or adapter.train_head
    if reference == "adapter_off" and adapter.kind == "none":
        yield 'task.reference adapter_off needs an adapter; set adapter.kind or reference "frozen"'
    if reference == "adapter_off" and full:
        yield (
            "task.reference adapter_off is not the base where adapter.train_embeddings or"
            ' train_head trains a table in full; set task.reference to "frozen"'
        )
    if reference == "mixed" and adapter.kind != "none":
        yield 'task.reference mixed needs full training; set it to "adapter_off" with an adapter'


def find_adapter_conflicts(adapter: AdapterConfig) -> Iterator[str]:
    """Yield one sentence for each impossible combination within the section."""
    if adapter.kind == "none":
        cure = 'set adapter.kind to "lora" or "dora", or remove it'
        rule = unread("adapter.*", "adapter.kind", lambda kind: kind != "none", cure=cure)
        yield from rule(SimpleNamespace(adapter=adapter))
        return
    if adapter.quantize != "none" and adapter.kind == "dora":
        yield 'adapter.quantize needs adapter.kind "lora"; dora reads the norms of whole matrices'
    if not adapter.targets():
        yield 'adapter.target is empty; set it to "attention", "mlp", "all-linear" or names'
    for key, pattern in [
        ("rank_pattern", adapter.rank_pattern),
        ("alpha_pattern", adapter.alpha_pattern),
    ]:
        for name, value in pattern.items():
            if value <= 0:
                yield f"adapter.{key}.{name} is {value}; it must be above 0"
