"""Programs compiled for accelerators are kept on disk and reused."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.distributed import compile_cache
from jaxtrain.distributed.compile_cache import keep_compiled


@pytest.fixture
def accelerator(monkeypatch, tmp_path):
    """Pretend to run on a GPU without a cache folder set."""
    before = {
        name: getattr(jax.config, name)
        for name in (
            "jax_compilation_cache_dir",
            "jax_compilation_cache_max_size",
            "jax_persistent_cache_min_compile_time_secs",
        )
    }
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield tmp_path / "cache" / "jaxtrain" / "compiled"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_lie_in_the_users_cache(accelerator):
    assert keep_compiled() == accelerator
    assert accelerator.stat().st_mode & 0o777 == 0o700
    jax.jit(lambda x: jnp.sin(x) @ x + 0.123)(jnp.ones((3, 3)))
    cached = [path for path in accelerator.iterdir() if path.stat().st_size > 100]
    assert any("lambda" in path.name for path in cached)
    assert keep_compiled() is None, "a folder is named now"


def test_nothing_changes_where_it_cannot_help(accelerator, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "cpu")
        assert keep_compiled() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_cache.default_folder().parts[-2:] == ("jaxtrain", "compiled")
    assert keep_compiled() is None
    assert jax.config.jax_compilation_cache_dir is None
