"""Checkpoints: bit-exact, on any mesh, and safe against every kind of damage and kill."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxtrain.errors import UserError
from jaxtrain.runs import checkpoint
from jaxtrain.runs.checkpoint import Checkpoints, load_checkpoint
from jaxtrain.runs.checkpoint_folder import choose_retained, find_good_step
from jaxtrain.runs.manifest import NAME, find_damage, read_manifest, write_manifest

REPO = Path(__file__).parents[2]


def make_arrays(seed: int = 0) -> dict:
    """A small state with each dtype that a run saves, odd values included."""
    key = jax.random.key(seed)
    odd = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45, 3.0], jnp.float32)
    return {
        "params": {
            "layers.0/kernel": jax.random.normal(key, (8, 4)),
            "half": jax.random.normal(key, (4, 6), jnp.bfloat16),
        },
        "opt": (odd, [jnp.int32(seed), jnp.arange(6, dtype=jnp.int8)]),
        "key": jax.random.key_data(jax.random.key(seed + 1)),
    }


def describe(tree, sharding=None):
    sharding = sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def assert_same_bits(first, right):
    assert jax.tree.structure(first) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def write_run(folder, steps=(1, 2, 3), **options) -> list[str]:
    """Save make_arrays(step) with a cursor for each step; returns what was said."""
    output = []
    store = Checkpoints(folder, **{"keep": 9, "log": output.append, **options})
    for step in steps:
        store.save(step, make_arrays(step), {"position": step}, {"eval/loss": 1.0 / step})
    store.close()
    return output


@pytest.mark.parametrize("name", ["run[1]", "a\\b", "*?", 'it\'s "$HOME" 🙂 {x} ~'])
def test_a_folder_may_have_any_name(tmp_path, name):
    write_run(tmp_path / name, steps=(1, 2), keep=1)
    store = Checkpoints(tmp_path / name, log=print)
    restored = store.restore(describe(make_arrays()))
    store.close()
    assert restored.step == 2
    assert_same_bits(restored.arrays, make_arrays(2))
    assert [path.name for path in (tmp_path / name).iterdir()] == ["2"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def restore(folder, **options):
    output = []
    store = Checkpoints(folder, keep=9, log=output.append, **options)
    try:
        return store.restore(describe(make_arrays())), output
    finally:
        store.close()


@pytest.mark.parametrize("background", [True, False])
def test_round_trip_is_bit_exact(tmp_path, background):
    write_run(tmp_path / "c", background=background)
    restored, output = restore(tmp_path / "c")
    assert restored.step == 3 and restored.cursor == {"position": 3} and output == []
    assert_same_bits(restored.arrays, make_arrays(3))


def test_nothing_saved_gives_none(tmp_path):
    assert restore(tmp_path / "c") == (None, [])


def test_restores_onto_another_mesh(tmp_path):
    devices = np.array(jax.devices()[:4])
    rows = NamedSharding(jax.sharding.Mesh(devices, ("fsdp",)), PartitionSpec("fsdp"))
    grid = jax.sharding.Mesh(devices.reshape(2, 2), ("data", "fsdp"))
    columns = NamedSharding(grid, PartitionSpec(None, ("fsdp", "data")))
    value = jax.random.normal(jax.random.key(0), (8, 12))
    store = Checkpoints(tmp_path, keep=1)
    store.save(1, {"w": jax.device_put(value, rows)}, {})
    for sharding in (columns, rows, SingleDeviceSharding(devices[1])):
        restored = store.restore(describe({"w": value}, sharding)).arrays["w"]
        assert restored.sharding == sharding
        assert_same_bits(restored, value)
    store.close()


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    value = jnp.arange(4_000_000, dtype=jnp.float32)
    expected = np.array(value)
    store = Checkpoints(tmp_path, keep=1)
    store.save(1, {"w": value}, {})
    for _ in range(5):
        value = overwrite(value)
    value.block_until_ready()
    restored = store.restore(describe({"w": value})).arrays["w"]
    store.close()
    np.testing.assert_array_equal(restored, expected)


@pytest.mark.parametrize(
    ("options", "retained"),
    [
        ({"keep": 2}, [6, 7]),
        ({"keep": 1, "keep_every": 3}, [3, 6, 7]),
        ({"keep": 1, "best_metric": "eval/loss"}, [2, 7]),
        ({"keep": 1, "best_metric": "eval/loss", "best_mode": "max"}, [4, 7]),
        ({"keep": 1, "best_metric": "never written"}, [7]),
    ],
)
def test_retention(tmp_path, options, retained):
    losses = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 9.0, 5: 2.0}
    store = Checkpoints(tmp_path, **options)
    for step in range(1, 8):
        metrics = {"eval/loss": losses[step]} if step in losses else {}
        store.save(step, {"w": jnp.float32(step)}, {}, metrics)
    store.close()
    assert store.steps() == retained
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == retained


def test_a_best_metric_that_was_not_measured_is_said_once(tmp_path):
    output = write_run(tmp_path, best_metric="eval/los")
    assert len(output) == 1 and "'eval/los' was not measured at step 1" in output[0]
    assert output[0].endswith("Measured: eval/loss")


def test_retention_survives_damage_to_an_old_checkpoint(tmp_path):
    write_run(tmp_path, steps=[1, 2])
    damage(tmp_path / "1" / NAME, "truncate")
    write_run(tmp_path, steps=[3], keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_ties_keep_the_first_best():
    scores = {1: {"m": 2.0}, 2: {"m": 1.0}, 3: {"m": 1.0}, 4: {"m": 3.0}}
    assert choose_retained(scores, 1, None, "m", "min") == {2, 4}


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove"])
def test_each_damaged_file_is_named_and_the_one_before_is_used(tmp_path, harm):
    write_run(tmp_path / "good")
    files = sorted(p.relative_to(tmp_path / "good") for p in (tmp_path / "good/3").rglob("*"))
    files = [name for name in files if (tmp_path / "good" / name).is_file()]
    assert len(files) > 8
    for number, name in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        damage(folder / name, harm)
        step, problems = find_good_step(folder)
        assert step == 2 and problems[0].damaged
        assert name.relative_to("3").as_posix() in problems[0].reason, (name, problems)


def damage(path: Path, harm: str) -> None:
    content = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


def test_damage_is_said_once_and_training_can_save_that_step_again(tmp_path):
    write_run(tmp_path)
    damage(next(p for p in (tmp_path / "3").rglob("d/*") if p.is_file()), "flip")
    restored, output = restore(tmp_path)
    assert restored.step == 2
    assert_same_bits(restored.arrays, make_arrays(2))
    [message] = output
    assert "checkpoint 3 is damaged" in message and "going on from step 2" in message
    assert (tmp_path / "3.damaged").is_dir()
    write_run(tmp_path, steps=[3])
    restored, output = restore(tmp_path)
    assert restored.step == 3 and output == []


def test_all_damaged_is_an_error_and_moves_nothing(tmp_path):
    write_run(tmp_path, steps=[1, 2])
    damage(tmp_path / "1" / NAME, "remove")
    damage(tmp_path / "2" / NAME, "truncate")
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(UserError, match=r"2: manifest.json is not readable; 1: manifest.json is"):
        restore(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    with pytest.raises(UserError, match="no usable checkpoint"):
        load_checkpoint(tmp_path, describe(make_arrays()))
    with pytest.raises(UserError, match=r"no checkpoint of step 7; there are \[2\]"):
        load_checkpoint(tmp_path, describe(make_arrays()), step=7)
    with pytest.raises(UserError, match="2 is damaged: manifest.json is not readable"):
        load_checkpoint(tmp_path, describe(make_arrays()), step=2)


def test_killed_between_commit_and_manifest(tmp_path):
    """SIGKILL leaves a renamed folder and its marker, but no manifest."""
    write_run(tmp_path, steps=[1, 2])
    (tmp_path / "2" / NAME).unlink()
    (tmp_path / "2.writing").touch()
    restored, [message] = restore(tmp_path)
    assert restored.step == 1 and "checkpoint 2 was never finished" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]


def test_an_unfinished_first_checkpoint_starts_from_the_beginning(tmp_path):
    (tmp_path / "1.orbax-checkpoint-tmp/state").mkdir(parents=True)
    (tmp_path / "1.writing").touch()
    restored, [message] = restore(tmp_path)
    assert restored is None and "starting from the beginning" in message
    assert list(tmp_path.iterdir()) == []


def test_killed_while_deleting_an_old_one(tmp_path):
    write_run(tmp_path, steps=[1, 2])
    (tmp_path / "1").rename(tmp_path / "1.trash")
    (tmp_path / "1.trash" / NAME).unlink()
    restored, output = restore(tmp_path)
    assert restored.step == 2 and output == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2"]


def test_other_arrays_are_refused_by_name(tmp_path):
    write_run(tmp_path)
    expected = describe(make_arrays())
    expected["params"]["half"] = jax.ShapeDtypeStruct((4, 7), jnp.bfloat16)
    expected["new"] = jax.ShapeDtypeStruct((1,), jnp.float32)
    store = Checkpoints(tmp_path)
    with pytest.raises(UserError) as caught:
        store.restore(expected)
    store.close()
    assert "params/half: saved bfloat16[4, 6], this run bfloat16[4, 7]" in str(caught.value)
    assert "new: saved nothing, this run float32[1]" in str(caught.value)


def test_a_part_can_be_read_without_changing_the_folder(tmp_path):
    write_run(tmp_path)
    (tmp_path / "4.writing").touch()
    before = sorted(tmp_path.rglob("*"))
    part = {"params": describe(make_arrays())["params"]}
    restored = load_checkpoint(tmp_path, part)
    assert load_checkpoint(tmp_path, part, step=1).step == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert_same_bits(restored.arrays, {"params": make_arrays(3)["params"]})


def test_saving_the_restored_step_again_changes_nothing(tmp_path):
    write_run(tmp_path, steps=[1])
    before = (tmp_path / "1" / NAME).read_bytes()
    write_run(tmp_path, steps=[1])
    assert (tmp_path / "1" / NAME).read_bytes() == before


def test_full_disk_is_one_clear_error_and_older_checkpoints_survive(tmp_path, monkeypatch):
    """The seal thread's disk is full; a real full disk is in the slow test below."""
    write_run(tmp_path, steps=[1])

    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_manifest", refuse)
    store = Checkpoints(tmp_path, keep=1)
    store.save(2, make_arrays(2), {})
    with pytest.raises(UserError, match=r"step 2 could not be written .*No space left.* disk: 1\)"):
        store.wait()
    store.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]
    monkeypatch.undo()
    assert restore(tmp_path)[0].step == 1


def test_too_little_space_is_found_before_writing(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    store = Checkpoints(tmp_path / "c")
    with pytest.raises(UserError, match="bytes needed, 10 free"):
        store.save(1, make_arrays(), {})
    store.close()
    assert list((tmp_path / "c").iterdir()) == []


def test_really_full_disk(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        store = Checkpoints(tmp_path / "c", keep=9)
        abstract, saved = None, []
        with pytest.raises(UserError, match="No space left on device"):
            for step in range(9):
                arrays = {"w": jax.random.normal(jax.random.key(step), (200_000,))}
                abstract = describe(arrays)
                store.save(step, arrays, {})
                store.wait()
                saved.append(arrays)
        store.close()
        store = Checkpoints(tmp_path / "c")
        restored = store.restore(abstract)
        store.close()
        assert restored.step == len(saved) - 1 >= 1
        assert_same_bits(restored.arrays, saved[-1])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    store = Checkpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(UserError, match="Not a directory"):
        store.save(1, make_arrays(), {})
    store.close()


def test_orbax_is_silent_and_absl_is_left_as_it_was(tmp_path, capfd):
    filters = list(logging.getLogger("absl").filters)
    write_run(tmp_path)
    restore(tmp_path)
    assert logging.getLogger("absl").filters == filters
    assert capfd.readouterr() == ("", "")


def test_the_manifest_notices_its_own_damage(tmp_path):
    (tmp_path / "a").write_text("x")
    write_manifest(tmp_path, {"step": 5, "metrics": {}})
    assert find_damage(tmp_path) is None and read_manifest(tmp_path)["step"] == 5
    text = (tmp_path / NAME).read_text().replace('"step": 5', '"step": 6')
    (tmp_path / NAME).write_text(text)
    assert find_damage(tmp_path) == "manifest.json is not readable"
    json.loads(text)  # it is the checksum that noticed, not the JSON parser


KILLED = """
import sys, jax, jax.numpy as jnp
from jaxtrain.runs.checkpoint import Checkpoints
store = Checkpoints(sys.argv[1], keep=2)
print("ready", flush=True)
for step in range(1, 100_000):
    store.save(step, {"w": jnp.full((100_000,), step, jnp.float32)}, {"position": step})
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_a_good_checkpoint(tmp_path):
    """Real kills, spread over the write of a checkpoint, which takes some 20 ms here."""
    env = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO}/tests/plain", "XLA_FLAGS": ""}
    sharding = SingleDeviceSharding(jax.devices()[0])
    abstract = {"w": jax.ShapeDtypeStruct((100_000,), jnp.float32, sharding=sharding)}
    for attempt in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=env
        )
        assert child.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while find_good_step(tmp_path)[0] < 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.007 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        store = Checkpoints(tmp_path, log=lambda text: None)
        restored = store.restore(abstract)
        store.close()
        assert restored.cursor == {"position": restored.step}
        np.testing.assert_array_equal(restored.arrays["w"], restored.step)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
