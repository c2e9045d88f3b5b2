"""The reader and writer against the safetensors package, and every kind of damage."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import SplitPiece, full_index
from jaxtrain.huggingface.safetensors import SafetensorsFolder, write_folder

RNG = np.random.default_rng(0)
TENSORS = {
    "w": RNG.standard_normal((6, 5)).astype(np.float32),
    "half": RNG.standard_normal((3, 4)).astype(np.float16),
    "brain": RNG.standard_normal((7,)).astype(ml_dtypes.bfloat16),
    "ids": np.arange(5, dtype=np.int64),
    "scalar": np.array(2.5, np.float64),
    "empty": np.zeros((0, 3), np.float32),
}


def pieces(tensors):
    for name, array in tensors.items():
        yield SplitPiece(name, array.shape, full_index(array.shape), array)


def write(folder, tensors=TENSORS, **options):
    write_folder(
        folder, {n: (a.shape, a.dtype) for n, a in tensors.items()}, pieces(tensors), **options
    )


def test_reads_what_the_package_writes(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.tensors) == set(TENSORS)
    for name, array in TENSORS.items():
        actual = folder.fetch(name, full_index(array.shape))
        assert actual.dtype == array.dtype
        np.testing.assert_array_equal(actual, array)
    np.testing.assert_array_equal(
        folder.fetch("w", (slice(1, 3), slice(2, 5))), TENSORS["w"][1:3, 2:5]
    )


def test_the_package_reads_what_we_write(tmp_path):
    write(tmp_path)
    actual = load_file(tmp_path / "model.safetensors")
    assert set(actual) == set(TENSORS)
    for name, array in TENSORS.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array)
    assert not list(tmp_path.glob(".*"))


def test_shards_carry_an_index_and_replace_an_older_model(tmp_path):
    write(tmp_path)
    write(tmp_path, max_shard_bytes=130)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[0].startswith("model-00001-of-0000")
    assert sorted(p.name for p in tmp_path.iterdir()) == [*files, "model.safetensors.index.json"]
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in TENSORS.values())
    folder = SafetensorsFolder(tmp_path)
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(folder.fetch(name, full_index(array.shape)), array)


def test_an_interrupted_write_leaves_the_old_model(tmp_path):
    write(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def broken():
        yield from list(pieces(TENSORS))[:2]
        raise KeyboardInterrupt

    plan = {n: (a.shape, a.dtype) for n, a in TENSORS.items()}
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path, plan, broken())
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_shards_without_an_index_are_read(tmp_path):
    write(tmp_path, max_shard_bytes=130)
    (tmp_path / "model.safetensors.index.json").unlink()
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.tensors) == set(TENSORS)
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(folder.fetch(name, full_index(array.shape)), array)


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def cut_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def spoil_header(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:12] = b"!!!!"
    path.write_bytes(data)


def drop_shard(folder):
    write(folder, max_shard_bytes=130)
    next(iter(sorted(folder.glob("model-00002*")))).unlink()


def drop_index_and_shard(folder):
    drop_shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def mix_shards(folder):
    write(folder, max_shard_bytes=130)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"of an older download")


def point(folder):
    path = folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


def point_index(folder):
    write(folder, max_shard_bytes=130)
    point(folder)
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")


def remove(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "model.safetensors is truncated: tensor"),
        (cut_header, "model.safetensors is truncated or no safetensors"),
        (spoil_header, "damaged header"),
        (drop_shard, "model-00002-of-.* is missing"),
        (
            drop_index_and_shard,
            "has no model.safetensors.index.json.* model-00002-of-.* is missing",
        ),
        (mix_shards, "model-00001-of-00009.safetensors is of another one"),
        (point, "pointer of Git LFS"),
        (point_index, "index.json is a pointer of Git LFS"),
        (remove, "neither weights in safetensors nor"),
    ],
)
def test_damage_is_named(tmp_path, damage, words):
    write(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=words):
        SafetensorsFolder(tmp_path)
