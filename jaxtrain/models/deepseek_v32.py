"""DeepSeek-V3.2 (arXiv:2512.02556): a DeepSeek-V3 in which an indexer chooses the `index_topk` keys
that a query sees.

A text of no more tokens than that sees all of them, so it is computed here as dense latent
attention, which is exact; longer rows are refused. The indexer gets no gradient in that, and every
export takes its tensors along byte by byte.
"""

import dataclasses
from typing import ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.models.blocks import SpecDecoder, spec_names
from jaxtrain.models.latent import ListedLatentConfig

INDEXED = "indexed_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ListedLatentConfig):
    architecture: ClassVar[str] = "DeepseekV32ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v32"

    layer_types: tuple[str, ...]
    """INDEXED, every one."""
    index_topk: int
    """Keys that a query sees."""
    index_head_dim: int
    index_n_heads: int

    def check(self) -> None:
        if set(self.layer_types) != {INDEXED} or self.index_topk < 1:
            raise UserError(
                f"config.json: layer_types={describe(list(self.layer_types))} and index_topk="
                f"{self.index_topk} are not supported; all layers must be {INDEXED}, the second"
                " at least 1"
            )
        super().check()

    @property
    def carries(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The indexers, too."""
        layers = range(self.num_hidden_layers)
        indexers = (f"model.layers.{layer}.self_attn.indexer." for layer in layers)
        return (*super().carries, *indexers)

    @property
    def longest(self) -> int:
        return min(self.index_topk, self.max_position_embeddings)

    @property
    def longest_said(self) -> str:
        return (
            f"index_topk {self.index_topk} (longer rows would need the sparse attention of its"
            " indexer, which is not computed here)"
        )


Model, names = SpecDecoder, spec_names
