"""Settings for every test: 4 fake CPU devices, no network, and quick compilation."""

import atexit
import gc
import importlib
import os
import shutil
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# The older of two ways to emit fused loops compiles in a quarter of the time. New jaxlibs have only
# the other way: `make test-kernels` runs the kernels as users compile them.
os.environ.setdefault(
    "XLA_FLAGS",
    # The second is what the verbs set for their own process, so that all share what is compiled.
    "--xla_force_host_platform_device_count=4 --xla_gpu_enable_triton_gemm=false"
    # A device that gets no core for 40 s, as on a busy machine, would end the process.
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""),
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

# Workers of pytest-xdist and what they start share few cores: threads of torch and numpy that wait
# for each other were a fifth of the time of a comparison with torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What one test compiled no other compiles again, nor a process that it starts. Workers of
# pytest-xdist inherit the folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxtrain-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# Most programs of a test take less than the second from which jax keeps them by itself.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Tokenized data, too.
if "JAXTRAIN_TEST_CACHE" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxtrain-tests-cache-")
    os.environ["JAXTRAIN_TEST_CACHE"] = os.environ["XDG_CACHE_HOME"]
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# A test compiles for longer than it runs, and this takes a third off. Processes that a test starts
# inherit it. The kernels' own tests, whose rounding is what is tested (kernels/conftest.py),
# programs for other devices and runs that are killed and resumed are compiled as usual.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

# jax fills a context of MLIR for every program, a fifth of the time of tests. As jax 0.11 does by
# itself, ten programs of a thread share one.
import jax
from jax._src.interpreters import mlir

if not hasattr(mlir, "_create_ir_context"):
    shared_contexts = threading.local()

    def make_context(create=mlir.make_ir_context):
        if not getattr(shared_contexts, "uses", 0):
            shared_contexts.context, shared_contexts.uses = create(), 10
        shared_contexts.uses -= 1
        return shared_contexts.context

    mlir.make_ir_context = make_context

# Tracing makes millions of objects that are not garbage, and torch, transformers and jax have made
# as many already: collections that find nothing were 4 to 7 % of a test's time.
gc.freeze()
gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave thorough tests to an expression that names them, whatever other marks they carry."""
    expression = config.option.markexpr
    if expression and "thorough" not in expression:
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        if thorough:
            items[:] = [item for item in items if not item.get_closest_marker("thorough")]
            config.hook.pytest_deselected(items=thorough)


def pytest_collection_finish(session):
    """Keep modules and tests from garbage collection, which would look at them again and again."""
    gc.freeze()


MAX_MAPPINGS, CHECK_SECONDS = 30_000, 20.0
"""Mappings of memory above which compiled programs are dropped, and seconds between two counts.
Programs take some each; Linux lets a process have 65,530, and ends it by a segmentation fault."""
last_check = time.monotonic()


def count_mappings():
    """Return the number of this process's mappings; 0 where the system does not list them."""
    listing = Path("/proc/self/maps")
    return listing.read_bytes().count(b"\n") if listing.exists() else 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Drop compiled programs before there are too many; the compilation cache still has them."""
    global last_check
    if time.monotonic() - last_check > CHECK_SECONDS:
        if count_mappings() > MAX_MAPPINGS:
            jax.clear_caches()
            gc.collect()
        last_check = time.monotonic()


# The same examples each time: a change is not refused for what an older one did. To look for new
# ones: pytest --hypothesis-profile=search.
settings.register_profile("repeat")
settings.register_profile("search", max_examples=1000)
settings.load_profile("repeat")


@pytest.fixture(scope="module")
def tokenizer():
    from jaxtrain.data.chat.template import load_tokenizer

    return load_tokenizer("builtin")


class ImportedModules(dict):
    """Modules by name, each imported when it is first asked for."""

    def __missing__(self, name):
        self[name] = importlib.import_module(name)
        return self[name]


@pytest.fixture(scope="module")
def benchmarks():
    """Modules of benchmarks/; scripts are no package."""
    pytest.importorskip("torch")
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    before = set(sys.modules)
    yield ImportedModules()
    sys.path.remove(folder)
    for name in set(sys.modules) - before:
        if folder in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
