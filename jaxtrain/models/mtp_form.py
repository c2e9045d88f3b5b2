"""Forms of multi-token prediction heads: names of their tensors, and their differences."""

import dataclasses
import json
from collections.abc import Mapping

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPForm:
    """Published form of a family's head; models.mtp computes it."""

    root: str
    """Beginning of the names of all its tensors in a folder."""
    block: str
    """Beginning of the names of the tensors of its n-th block, with {n}."""
    fc: str
    """Name of its projection, without `root`, like the names below."""
    embed_norm: str
    """Name of the norm of embeddings."""
    hidden_norm: str
    """Name of the norm of hidden states."""
    norm: str
    """Name of the final norm."""
    hidden_first: bool = False
    """True if the projection reads the hidden state before the embedding."""
    feeds_normed: bool = True
    """True if a further guess reads the final-normed state, False if the state before that norm."""
    copies: tuple[tuple[str, str], ...] = ()
    """(name, parameter) of copies of the model's embedding and head that folders may have."""
    count_key: str = "num_nextn_predict_layers"
    """Attribute of config.json with the number of heads."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(module in the model's layers, module in the head's blocks), where they differ."""
    further: str = ""
    """Beginning of the names of all heads, if a folder may have more of them than the first, which
    alone is computed; "" otherwise."""


QWEN = MTPForm(
    root="mtp.",
    block="mtp.layers.{n}.",
    fc="fc",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    norm="norm",
    count_key="mtp_num_hidden_layers",
)


MIMO = MTPForm(
    root="model.mtp.layers.0.",
    block="model.mtp.layers.{n}.",
    fc="eh_proj",
    embed_norm="enorm",
    hidden_norm="hnorm",
    norm="final_layernorm",
    renamed=(("post_attention_layernorm.", "pre_mlp_layernorm."),),
    further="model.mtp.layers.",
)


def nemotron_form(num_blocks: int) -> MTPForm:
    """Return the form of Nemotron 3, whose first block holds the projection and whose last one the
    final norm."""
    return MTPForm(
        root="mtp.",
        block="mtp.layers.{n}.",
        fc="layers.0.eh_proj",
        embed_norm="layers.0.enorm",
        hidden_norm="layers.0.hnorm",
        norm=f"layers.{num_blocks - 1}.final_layernorm",
    )


def read_count(stated: Mapping[str, str], *keys: str) -> int | None:
    """Return the number of heads that the first of `keys` states; None: none does. stated:
    {attribute of config.json: JSON}. Raises UserError unless it is a number."""
    for key in keys:
        count = json.loads(stated.get(key, "null"))
        if count is not None and type(count) is not int:
            raise UserError(f"config.json: {key} is {describe(count)}, not a number of heads")
        if count is not None:
            return count
    return None


def layer_form(first: int) -> MTPForm:
    """Return DeepSeek-V3's form (arXiv:2412.19437, section 2.2), a layer behind the model's `first`
    ones."""
    root = f"model.layers.{first}."
    return MTPForm(
        root=root,
        block=root,
        fc="eh_proj",
        embed_norm="enorm",
        hidden_norm="hnorm",
        norm="shared_head.norm",
        feeds_normed=False,
        copies=(
            ("embed_tokens.weight", "embed.embedding"),
            ("shared_head.head.weight", "lm_head.embedding"),
        ),
    )
