"""Mosaic kernels are lowered once for equal kernels, in a process and on disk."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import Context, attention, lowered_kernels, mosaic
from jaxtrain_kernels.lowered_kernels import Describer, UnknownObjectError, keep_lowered

pytestmark = pytest.mark.skipif(
    mosaic.plgpu is None or jax.__version_info__[:2] != mosaic.TESTED,
    reason=f"Mosaic kernels are written for jax {mosaic.TESTED}",
)
NAME = "lower_unpipelined_jaxpr_to_module"


@pytest.fixture
def start_process(monkeypatch):
    """A function after which nothing is in memory, as in a new process; returns a list to which
    the name of each kernel that is lowered from then on is added."""
    from jax._src.pallas.mosaic_gpu import lowering

    original = getattr(lowering, NAME).__wrapped__

    def start():
        names = []

        def lower(mesh, jax_mesh, jaxpr, *arguments, **options):
            names.append(jaxpr.debug_info.func_name)
            return original(mesh, jax_mesh, jaxpr, *arguments, **options)

        fresh = types.SimpleNamespace(**{NAME: lower}, LoweringResult=lowering.LoweringResult)
        keep_lowered(fresh)
        monkeypatch.setattr(lowering, NAME, getattr(fresh, NAME))
        return names

    return start


def lower(T=256, **settings) -> str:
    """Return the text for a Hopper GPU of attention's forward pass, traced anew."""
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    heads = [jax.ShapeDtypeStruct((1, T, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    until = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def step(q, k, v, until):
        context = Context(until, positions=until)
        return attention(q, k, v, context, impl="mosaic_gpu", **settings)

    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(step).trace(*heads, until).lower(lowering_platforms=("cuda",)).as_text()


def test_equal_kernels_are_lowered_once(start_process, tmp_path, monkeypatch):
    monkeypatch.setattr(lowered_kernels, "find_file", lambda key: tmp_path / key)
    names = start_process()
    text = lower()
    assert "tree_attention_fwd" in names and len(names) == len(set(names))
    count = len(names)
    assert lower() == text and len(names) == count
    assert lower(softcap=20.0) != text and lower(softcap=30.0) != lower(softcap=20.0)
    assert names.count("tree_attention_fwd") == 3

    names = start_process()
    assert lower() == text and not names  # all from the disk
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    names = start_process()
    lower(T=512)
    assert lower() == text  # whatever was lowered before
    assert names.count("tree_attention_fwd") == 2  # files that are not whole are not used


def test_kernels_that_differ_have_other_keys(start_process, monkeypatch):
    """Shapes, numbers in the kernel, and what a function of it closes over."""
    keys, original = [], lowered_kernels.hash_kernel

    def note_key(*arguments):
        keys.append(original(*arguments))
        return keys[-1]

    monkeypatch.setattr(lowered_kernels, "hash_kernel", note_key)
    monkeypatch.setattr(lowered_kernels, "find_file", lambda key: None)
    start_process()
    rows = {}
    for settings in {}, {"T": 512}, {"scale": 0.3}, {"window": 100}, {"window": 101}:
        keys.clear()
        lower(**settings)
        rows[str(settings)] = keys[-1]
    assert len(set(rows.values())) == len(rows)


def test_descriptions_tell_functions_apart():
    def describe(value):
        describer = Describer()
        describer.add(value)
        return describer.hexdigest()

    def make(number, default=1):
        def function(x, y=default):
            return x + y + number

        function.__module__ = "jaxtrain_kernels.mosaic"
        return function

    def foreign(x):
        return x

    assert describe(make(1)) == describe(make(1))
    assert len({describe(f) for f in (make(1), make(2), make(1, 2), make(1.0), make(True))}) == 5
    assert describe(functools.partial(make(1), 3)) != describe(functools.partial(make(1), 4))
    pair = make(lambda: 1), make(lambda: 2)
    for function in pair:
        function.__closure__[0].cell_contents.__module__ = "jaxtrain_kernels.mosaic"
    assert describe(pair[0]) != describe(pair[1])
    assert describe((1, (2,))) != describe(((1, 2),)) != describe((1, 2))
    assert describe({"a": "b c"}) != describe({"a b": "c"})
    with pytest.raises(UnknownObjectError, match="foreign"):
        describe(foreign)  # what it calls may have changed since
    with pytest.raises(UnknownObjectError):
        describe(make(object()))
    with pytest.raises(UnknownObjectError):
        describe(object())


def test_descriptions_are_those_of_every_process():
    """Neither what an object remembers of itself, nor addresses, nor devices' identities."""
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    def describe(mesh):
        describer = Describer()
        describer.add(NamedSharding(mesh, PartitionSpec("x")))
        return describer.hexdigest()

    asked = AbstractMesh((1,), ("x",))
    assert hash(asked) and asked.manual_axes == () and not asked.empty
    assert describe(asked) == describe(AbstractMesh((1,), ("x",)))
    assert describe(AbstractMesh((2,), ("x",))) != describe(asked)
    describe(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)))
    with pytest.raises(UnknownObjectError, match="array of objects"):
        Describer().add(np.array([object()]))


def test_folder_that_takes_no_file_costs_nothing(start_process, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(lowered_kernels, "find_file", lambda key: tmp_path / "file" / key)
    names = start_process()
    assert "tree_attention_fwd" in lower() and names


def test_file_that_cannot_be_moved_leaves_nothing(tmp_path):
    (tmp_path / "key" / "in the way").mkdir(parents=True)
    lowered_kernels.write_sealed(tmp_path / "key", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_keys_depend_on_the_target(monkeypatch, tmp_path):
    """The GPU's architecture, how many hosts a mesh has, options of a call; not a package's
    path."""
    from jax.experimental.mosaic.gpu import core, utils

    mesh = jax.sharding.AbstractMesh((2,), ("x",))

    def hash_all(**options):
        return lowered_kernels.hash_kernel(None, mesh, options)

    monkeypatch.setattr(core, "is_nvshmem_available", lambda: False)
    first = hash_all()
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", str(tmp_path))
    assert hash_all() == first != hash_all(fast=True)
    with monkeypatch.context() as patch:
        patch.setattr(utils, "_infer_arch", lambda: (10, 0))
        assert hash_all() != first
    with monkeypatch.context() as patch:
        patch.setattr(core, "_is_known_multihost_mesh", lambda mesh: True)
        assert hash_all() != first
    with jax.enable_x64(True):
        assert hash_all() != first
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    assert hash_all() != first


def test_files_are_kept_where_jax_keeps_programs(tmp_path):
    from jax._src import config

    with config.compilation_cache_dir(str(tmp_path)):
        assert lowered_kernels.find_file("key") == tmp_path / "mosaic" / "key"
        with config.enable_compilation_cache(False):
            assert lowered_kernels.find_file("key") is None
