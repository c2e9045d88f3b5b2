"""States on disk: found by tokens however packed, whole after a kill, refused when damaged."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxtrain.batch import Batch
from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.state_store import StateLayout, StateStore, UnknownSample, list_samples
from jaxtrain.methods.drafts.state_writer import StateWriter

WIDTHS = {"captured": 6, "last": 2}
ABOUT = {"weights": "a" * 64, "layers": [1, 3]}


def tree(number: int) -> Tree:
    """A tree of 5 to 11 tokens, every third one with a branch."""
    draw = np.random.default_rng(number)

    def node(parent: int, size: int) -> Node:
        tokens = draw.integers(0, 500, size).astype(np.int32)
        return Node(parent, tokens, {"nll": np.ones(size)}, {}, "assistant")

    if number % 3:
        return Tree((node(-1, int(draw.integers(5, 12))),), (0,), f"row {number}", 0)
    return Tree((node(-1, 3), node(0, 4), node(0, 2)), (1, 2), f"row {number}", 0)


def pack(numbers: list[list[int]], row_tokens: int = 32) -> Batch:
    return build_batch([[lay_out(tree(n)) for n in row] for row in numbers], row_tokens)


def states_of(batch: Batch) -> dict[str, np.ndarray]:
    """States that are a function of the token alone."""
    token = batch.tokens[..., None]
    return {
        name: ((token * 7 + np.arange(width)) % 251 - 125).astype(ml_dtypes.bfloat16)
        for name, width in WIDTHS.items()
    }


def open_writer(folder: Path, about=ABOUT) -> StateWriter:
    # 16 bytes a token: chunks of 4, shards of 16 tokens.
    layout = StateLayout(WIDTHS, "bfloat16", 4, 16)
    return StateWriter(folder, layout, about)


def add(writer: StateWriter, batch: Batch) -> int:
    actual = states_of(batch)
    return sum(
        writer.add(s.key, {n: v[s.row][s.start : s.stop] for n, v in actual.items()})
        for s in list_samples(batch)
    )


FIRST, SECOND = [[0, 1, 2], [3, 4]], [[5, 6], [7, 8, 9]]


def write(folder: Path, *batches) -> None:
    with open_writer(folder) as writer:
        for batch in batches:
            add(writer, pack(batch))
        writer.finish({"digest": "rows.jsonl"})


def content(folder: Path) -> dict[str, bytes]:
    names = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".npz"]
    actual = {str(p.relative_to(folder)): p.read_bytes() for p in names}
    for path in folder.glob("index/*.npz"):
        with np.load(path) as arrays:
            actual[path.name] = b"".join(arrays[name].tobytes() for name in arrays)
    return actual


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "whole"
    write(folder, FIRST, SECOND)
    return folder


def test_states_come_back_however_the_samples_are_packed(written):
    store = StateStore(written)
    assert len(store.places) == 10
    for rows in ([[9, 0], [4, 6]], [[2], [3, 8, 1]]):
        batch = pack(rows)
        actual, expected = store.read(batch, ("captured", "last")), states_of(batch)
        real = (batch.owner >= 0)[..., None]
        for name in WIDTHS:
            assert actual[name].dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(actual[name], np.where(real, expected[name], 0))
        second = store.read(batch, ("captured",), {1})["captured"]
        np.testing.assert_array_equal(second[1], actual["captured"][1])
        assert not second[0].any()


def test_a_tree_is_no_chain_of_the_same_tokens():
    batch = pack([[3]])
    chain = batch._replace(prev=np.where(batch.owner >= 0, np.arange(32) - 1, -1).astype(np.int32))
    (entry,), (second,) = list_samples(batch), list_samples(chain)
    assert entry[:3] == second[:3] and entry.key != second.key


def test_unknown_samples_are_told_as_such(written):
    with pytest.raises(UnknownSample):
        StateStore(written).read(pack([[1, 77]]), ("captured",))


@pytest.mark.parametrize("before", [[FIRST], [[[0]]], [FIRST, [[5]]]])
def test_an_interrupted_capture_ends_in_the_same_bytes(written, tmp_path, before):
    with open_writer(tmp_path / "states") as writer:
        for batch in before:
            add(writer, pack(batch))
    with pytest.raises(UserError, match="interrupted"):
        StateStore(tmp_path / "states")
    with open_writer(tmp_path / "states") as writer:
        retained = len(writer.keys)
        added = add(writer, pack(FIRST)) + add(writer, pack(SECOND))
        writer.finish({"digest": "rows.jsonl"})
    assert retained + added == 10 and (retained > 0) == (before != [[[0]]])
    assert content(tmp_path / "states") == content(written)


def test_a_shard_without_its_index_counts_for_nothing(written, tmp_path):
    """Killed between the two: the samples are captured again."""
    write(tmp_path / "states", FIRST)
    newest = max((tmp_path / "states" / "index").glob("*.npz"))
    newest.unlink()
    with open_writer(tmp_path / "states") as writer:
        assert 0 < len(writer.keys) < 5
        add(writer, pack(FIRST))
        add(writer, pack(SECOND))
        writer.finish({"digest": "rows.jsonl"})
    assert content(tmp_path / "states") == content(written)


def test_more_samples_go_behind_a_finished_store(written, tmp_path):
    write(tmp_path / "states", FIRST)
    write(tmp_path / "states", FIRST, SECOND)
    assert content(tmp_path / "states") == content(written)


def test_another_target_is_refused(written):
    before = content(written)
    with pytest.raises(UserError, match=r"other weights, layers \[1, 3\] there, \[2, 3\] here"):
        open_writer(written, {"weights": "b" * 64, "layers": [2, 3]})
    assert content(written) == before


def test_two_writers_and_strange_folders_are_refused(tmp_path):
    with open_writer(tmp_path / "one"), pytest.raises(UserError, match="another process"):
        open_writer(tmp_path / "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds thesis.txt"):
        open_writer(tmp_path / "other")
    with pytest.raises(UserError, match="no target states in"):
        StateStore(tmp_path / "nowhere")


def test_a_flipped_bit_is_noticed(tmp_path):
    write(tmp_path / "states", FIRST)
    shard = next(p for p in (tmp_path / "states" / "captured" / "c").rglob("*") if p.is_file())
    data = bytearray(shard.read_bytes())
    data[5] ^= 4
    shard.write_bytes(data)
    with pytest.raises(UserError, match="(?s)cannot be read.*Digest mismatch"):
        StateStore(tmp_path / "states").read(pack(FIRST), ("captured",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": {}}, "its layout is damaged"),
        ({"layout": None}, "its layout is damaged"),
        ({"layout": {"widths": {"captured": "6"}, "dtype": "bfloat16"}}, "its layout is damaged"),
        ({"datasets": 3}, "manifest.json is damaged"),
        ({"tokens": 7}, r"its index has \d+ tokens, 7 were captured"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, change, message):
    write(tmp_path / "states", FIRST)
    path = tmp_path / "states" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        StateStore(tmp_path / "states")


def test_a_store_that_lacks_a_part_is_refused(tmp_path):
    """The last of its index, or the end of an array."""
    write(tmp_path / "states", FIRST, SECOND)
    newest = max((tmp_path / "states" / "index").glob("*.npz"))
    content = newest.read_bytes()
    newest.unlink()
    with pytest.raises(UserError, match=r"its index has \d+ tokens, \d+ were captured"):
        StateStore(tmp_path / "states")
    newest.write_bytes(content[:-40])
    with pytest.raises(UserError, match=r"npz is damaged"):
        StateStore(tmp_path / "states")
    with np.load(written := newest.with_name("000000.npz")) as arrays:
        parts = dict(arrays)
    for name, value in (("starts", parts["starts"] + 99), ("counts", parts["counts"][1:])):
        np.savez(written, **{**parts, name: value})
        with pytest.raises(UserError, match=r"000000.npz is damaged \(it"):
            StateStore(tmp_path / "states")
    np.savez(written, **parts)
    newest.write_bytes(content)
    shape = tmp_path / "states" / "captured" / "zarr.json"
    shape.write_text(json.dumps({**json.loads(shape.read_text()), "shape": [3, 6]}))
    with pytest.raises(UserError, match=r"array 'captured' is \[3, 6\], it must be"):
        StateStore(tmp_path / "states")


def test_states_that_are_not_finite_are_not_kept(tmp_path):
    batch = pack([[1]])
    states = {name: np.full((9, width), np.nan, np.float32) for name, width in WIDTHS.items()}
    with open_writer(tmp_path / "states") as writer:
        with pytest.raises(UserError, match=r"states \(captured\) are NaN or infinite"):
            writer.add(next(list_samples(batch)).key, states)
        assert not writer.keys


def test_a_store_of_another_format_or_none_is_refused(tmp_path):
    write(tmp_path / "states", [[1]])
    path = tmp_path / "states" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))
    with pytest.raises(UserError, match="format 9"):
        StateStore(tmp_path / "states")
    path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        StateStore(tmp_path / "states")
