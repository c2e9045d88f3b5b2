"""Compiled programs are kept on disk and reused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.distributed import compile_cache
from jaxtrain.distributed.compile_cache import CompileCounter, keep_compiled

ROOT = Path(__file__).parents[2]


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


def test_programs_of_cpus_lie_apart_by_the_kind_of_cpu(accelerator, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    folder = keep_compiled()
    assert folder is not None and folder.parent == accelerator
    assert folder.name == compile_cache.describe_cpu()
    assert folder.name.startswith("cpu-") and len(folder.name) == 20


def test_nothing_changes_where_it_cannot_help(accelerator, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_cache.default_folder().parts[-2:] == ("jaxtrain", "compiled")
    assert keep_compiled() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_the_counter_names_programs_and_adds_up_their_seconds():
    names = []
    with CompileCounter() as counter:
        counter._add_seconds(compile_cache.TRACED, 1.0, fun_name="within")
        counter._add_seconds(compile_cache.TRACED, 3.0, fun_name="step")
        counter._add_seconds(compile_cache.LOWERED, 5.0, fun_name="jit(step)")
        names.append(counter.current)
        counter._add_seconds(compile_cache.COMPILED, 7.0, fun_name="jit(step)")
        names.append(counter.current)
        assert (names, counter.programs, counter.blocked) == (["step", ""], 1, 15.0)
        assert counter.describe().endswith("tracing 3.0 s, lowering 5.0 s, XLA 7.0 s")
        jax.block_until_ready(jax.jit(lambda x: jnp.cos(x) * 0.321)(jnp.ones(3)))
    assert counter.programs >= 2 and counter.current == ""


COUNT = """
import sys, jax
counts = {"requests": 0, "hits": 0}
def listen(event, **values):
    counts["requests"] += event == "/jax/compilation_cache/compile_requests_use_cache"
    counts["hits"] += event == "/jax/compilation_cache/cache_hits"
jax.monitoring.register_event_listener(listen)
from jaxtrain.main import main
code = main(sys.argv[1:])
print("COUNTS", code, counts["requests"], counts["hits"])
"""
"""A program that runs a command and prints how many programs it needed and how many it read."""

SFT = """
[[data.datasets]]
path = "ROWS"
"""
RL = f"""{SFT}{EVEN_TOKENS}
[task]
kind = "rl"
[rollout]
engine = "local"
prompts_per_step = 4
group_size = 4
"""


def count_programs(config, output, cache, *options) -> tuple[int, int]:
    """Run a config in a process of its own; (programs, those of them read from the cache)."""
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "XLA_FLAGS": ""}
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        env.pop(name, None)
    words = ["--config", str(config), f"run.output_dir={output}", *options]
    command = [sys.executable, "-c", COUNT, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    code, requests, hits = done.stdout.rpartition("COUNTS ")[2].split()[:3]
    assert code == "0"
    return int(requests), int(hits)


def write_config(tmp_path, table):
    """Write a config of three steps, and its rows."""
    config = tmp_path / "config.toml"
    run = "[run]\nmax_steps = 3\n[data]\nsequence_len = 64\nmicro_batch_size = 2\n"
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for number in range(40):
            answer = {"role": "assistant", "content": str(number + 1)}
            turns = [{"role": "user", "content": f"{number} + 1"}, answer]
            file.write(json.dumps({"messages": turns}) + "\n")
    config.write_text(f"{MODEL}\n{run}{table}".replace("ROWS", str(rows)))
    return config


@pytest.mark.thorough
@pytest.mark.parametrize("table", [SFT, RL], ids=["sft", "grpo"])
def test_the_same_command_again_compiles_nothing(table, tmp_path):
    """Start the second run in another process, with another folder for its output."""
    config = write_config(tmp_path, table)
    first, read_at_first = count_programs(config, tmp_path / "one", tmp_path / "cache")
    again, read_again = count_programs(config, tmp_path / "two", tmp_path / "cache")
    assert first > read_at_first >= 0 and again == first
    assert read_again == again


@pytest.mark.thorough
@pytest.mark.parametrize("table", [SFT, RL], ids=["sft", "grpo"])
def test_a_run_finds_what_a_dry_run_compiled(table, tmp_path):
    config, cache = write_config(tmp_path, table), tmp_path / "cache"

    def list_steps():
        names = ("single_step", "add_micro", "update", "zeros")
        return {p.name for name in names for p in cache.rglob(f"jit_{name}-*-cache")}

    count_programs(config, tmp_path / "run", cache, "--dry-run", "--compile")
    assert not (tmp_path / "run").exists()
    compiled = list_steps()
    assert len(compiled) == (1 if table == SFT else 3)
    _, read = count_programs(config, tmp_path / "run", cache)
    assert list_steps() == compiled and read >= len(compiled)
