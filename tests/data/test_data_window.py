"""The window: every tree once, rows that fit, and the same rows after going back to any of them."""

import json
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.packing.window import WindowPacker
from jaxtrain.data.sample import Dropped

ROW = 20


@dataclass(frozen=True)
class Piece:
    name: str
    num_tokens: int


class Replies:
    """A reader of a given list of draws, endless if asked."""

    repeated = False

    def __init__(self, draws, endless):
        self.draws, self.endless, self.place = draws, endless, 0
        self.pass_len = len(draws) if any(isinstance(i, Piece) for d in draws for i in d) else None

    def __next__(self):
        if self.place >= len(self.draws) and not self.endless:
            raise StopIteration
        self.place += 1
        return self.draws[(self.place - 1) % len(self.draws)]

    def state(self):
        return {"place": self.place}

    def restore(self, state):
        self.place = state["place"]

    def close(self):
        pass


@st.composite
def replies(draw):
    sizes = draw(
        st.lists(st.lists(st.integers(0, ROW), max_size=3), min_size=1, max_size=30).filter(
            lambda lists: any(size for sizes in lists for size in sizes)
        )
    )
    return [
        [Piece(f"{i}.{j}", n) if n else Dropped("odd") for j, n in enumerate(items)]
        for i, items in enumerate(sizes)
    ]


def collect(packer, limit=60):
    """Rows and the state before each, up to the end."""
    rows, states = [], []
    for _ in range(limit):
        states.append(json.loads(json.dumps(packer.state())))
        row = next(packer, None)
        if row is None:
            break
        rows.append(row)
    return rows, states


@settings(max_examples=150, deadline=None)
@given(replies(), st.integers(1, 40), st.booleans(), st.booleans())
def test_every_tree_comes_out_once_in_rows_that_fit(draws, window, packing, shuffle):
    options = {"row_tokens": ROW, "window": window, "packing": packing, "shuffle": shuffle}
    rows, _ = collect(WindowPacker(Replies(draws, False), **options), limit=1000)
    assert all(row and sum(piece.num_tokens for piece in row) <= ROW for row in rows)
    names = [piece.name for row in rows for piece in row]
    assert sorted(names) == sorted(p.name for items in draws for p in items if isinstance(p, Piece))
    if not packing:
        assert all(len(row) == 1 for row in rows)


@settings(max_examples=100, deadline=None)
@given(replies(), st.integers(1, 40), st.booleans(), st.booleans(), st.booleans(), st.data())
def test_going_back_gives_the_same_rows_and_counts(draws, window, packing, endless, shuffle, data):
    options = {"row_tokens": ROW, "window": window, "packing": packing, "shuffle": shuffle}
    packer = WindowPacker(Replies(draws, endless), **options)
    rows, states = collect(packer)
    cut = data.draw(st.integers(0, len(states) - 1))
    second = (
        packer if data.draw(st.booleans()) else WindowPacker(Replies(draws, endless), **options)
    )
    second.restore(states[cut])
    again, states_again = collect(second, limit=60 - cut)
    assert again == rows[cut:]
    assert states_again == states[cut:]
