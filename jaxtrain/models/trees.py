"""Whether a model may see several branches or documents in one row, and later tokens."""

from jaxtrain.errors import UserError
from jaxtrain.models import build
from jaxtrain.models.decoder_config import DecoderConfig


def follows_trees(config: DecoderConfig) -> bool:
    """Whether all layers of the model follow trees (see layers.mixer.Mixer)."""
    return build.abstract(config).follows_trees


def require_trees(config: DecoderConfig, found: str, fix: str, key: str = "model.path") -> None:
    """UserError unless all layers of the model follow trees (see layers.mixer.Mixer).

    For whoever packs branches that share a prefix, or several documents, into a row: a layer that
    runs along the row would carry one into the next. found: what asks for it ('task.mode "tree"
    packs branches that share a prefix'); fix: what to do instead; key: where the model is named.
    """
    if not follows_trees(config):
        raise UserError(
            f"{found}, but {key} is {config.architecture}, which has layers that pass something"
            f" from one branch or document of a row to the next; {fix}, or choose another {key}"
        )


def require_both_sides(config: DecoderConfig, found: str, key: str = "model.path") -> None:
    """UserError unless all layers of the model can see later tokens as well as earlier ones.

    found: what asks for it ('task.kind "diffusion" fills in what is masked from both sides').
    """
    model = build.abstract(config)
    if model.both_sides:
        return
    windows = {spec.window for spec, _ in model.stack.mixers() if spec.window is not None}
    said = "layers that run along the text and see no later token"
    if windows:
        said = f"layers that look only {min(windows)} tokens back"
    raise UserError(
        f"{found}, but {key} is {config.architecture}, which has {said}; choose a model whose"
        " layers are all full attention"
    )
