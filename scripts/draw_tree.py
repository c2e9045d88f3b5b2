"""Draw docs/tree.png: a packed row with two trees, who sees whom, and the weight of each token."""

from pathlib import Path

import matplotlib
import numpy as np

from jaxtrain.data.pack import build_batch, lay_out
from jaxtrain.data.turns import Trained, build_caterpillar, build_current_rl, make_turns

ROW = 40
COLOURS = {"context": "#c9d1d9", "think": "#e8a33d", "response": "#3d7ee8"}


def draw(path: Path) -> None:
    """Write the picture."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    ids = iter(range(1, 1000))
    sizes = [(4, 3, 3), (3, 4, 3), (3, 3, 2)]
    turns = make_turns([tuple([next(ids) for _ in range(n)] for n in turn) for turn in sizes])
    tree = build_caterpillar(turns, Trained())
    chain = build_current_rl(turns[:1], Trained())[0]
    packed = [lay_out(tree), lay_out(chain)]
    batch = build_batch([packed], ROW)
    until, weights = batch.until[0], batch.weights["nll"][0]
    query, key = np.mgrid[:ROW, :ROW]
    visible = (key <= query) & (query < until[key])

    roles = [tree.nodes[i].role for i in packed[0].node]
    parts = [len(turns[0].prompt), len(turns[0].reasoning), len(turns[0].response)]
    roles += np.repeat(["context", "think", "response"], parts).tolist()
    figure, (mask, bars) = plt.subplots(
        2, 1, figsize=(7, 8.6), height_ratios=[4, 1], sharex=True, layout="constrained"
    )
    picture = np.ones((ROW, ROW, 3))
    for k, role in enumerate(roles):
        picture[visible[:, k], k] = matplotlib.colors.to_rgb(COLOURS[role])
    picture[visible & (query >= len(roles))] = 0.93
    mask.imshow(picture, interpolation="none", aspect="auto")
    mask.set(ylabel="query", title="A tree of K = 4 branches and a chain in one row: who sees whom")
    mask.set_xticks(np.arange(-0.5, ROW), minor=True)
    mask.set_yticks(np.arange(-0.5, ROW), minor=True)
    mask.grid(which="minor", color="white", linewidth=0.5)
    mask.tick_params(which="minor", length=0)
    names = {"context": "context", "think": "thought (side leaf)", "response": "response (trunk)"}
    mask.legend(handles=[Patch(color=COLOURS[role], label=name) for role, name in names.items()])
    bars.bar(range(len(roles)), weights[: len(roles)], color=[COLOURS[role] for role in roles])
    bars.set(xlabel="key, in packed order", ylabel="weight g/K", ylim=(0, 1.05))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).parents[1] / "docs" / "tree.png")
