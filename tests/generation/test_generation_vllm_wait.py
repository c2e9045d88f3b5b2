"""Runs whose servers start beside them: data, weights and programs do not wait for these."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from fake_vllm import FakeVllm
from real_vllm import make_config, make_model
from safetensors.numpy import load_file

from jaxtrain.core import run
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import open_params
from jaxtrain.errors import Interrupted, UserError
from jaxtrain.generation.vllm import factory
from jaxtrain.generation.vllm.factory import open_vllm
from jaxtrain.generation.vllm.servers import Servers
from jaxtrain.main import main


@pytest.fixture
def stopped(tmp_path):
    """A server that does not run yet, at its port, with the folder of its model."""
    model = make_model(tmp_path / "model", 0, True)
    tensors = load_file(model / "model.safetensors")
    fake = FakeVllm(tensors={name: list(array.shape) for name, array in tensors.items()})
    fake.model = model
    fake.kill()
    yield fake
    if fake.thread.is_alive():
        fake.kill()


def test_what_does_not_answer_yet_is_awaited_before_the_first_publish(stopped, tmp_path):
    config = make_config(stopped, tmp_path, "full", wait_seconds=20.0)
    bundle = build_model_bundle(config)
    _, publisher = open_vllm(config, bundle, str)
    try:
        threading.Timer(0.2, stopped.start).start()
        publisher.wait()
        publisher.publish(0, open_params(bundle, 0), None)
        assert stopped.label.endswith("-0")
        publisher.wait()  # again: nothing
    finally:
        publisher.close()


def test_servers_that_never_answer_are_named(stopped, tmp_path):
    config = make_config(stopped, tmp_path, "full", wait_seconds=0.3, health_seconds=0.1)
    _, publisher = open_vllm(config, build_model_bundle(config), str)
    try:
        with pytest.raises(UserError, match=r"none answered within 0\.3 s .*wait_seconds"):
            publisher.wait()
    finally:
        publisher.close()


def test_a_run_that_is_to_stop_waits_for_no_server(stopped, tmp_path):
    config = make_config(stopped, tmp_path, "full", wait_seconds=60.0, health_seconds=0.1)
    _, publisher = open_vllm(config, build_model_bundle(config), str)
    try:
        stops = iter([False, True])
        with pytest.raises(Interrupted):
            publisher.wait(lambda: next(stops))
    finally:
        publisher.close()


@pytest.mark.parametrize("sleep", [False, True])
def test_servers_on_the_trainers_devices_start_before_its_weights(
    sleep, stopped, tmp_path, monkeypatch
):
    opened = []
    monkeypatch.setattr(Servers, "open", lambda self, wait=True, **_: opened.append(wait))
    config = make_config(stopped, tmp_path, "full")
    vllm = config.rollout.vllm.model_copy(update={"sleep": sleep})
    rollout = config.rollout.model_copy(update={"vllm": vllm})
    config = config.model_copy(update={"rollout": rollout})
    _, publisher = factory.open_vllm(config, build_model_bundle(config), str)
    publisher.close()
    assert opened == [sleep]


CONFIG = (
    '[task]\nkind = "rl"\n[env]\nkind = "calculator"\n[data]\nsequence_len = 256\n'
    '[[data.datasets]]\npath = "builtin:calculator"\n[rollout]\nengine = "vllm"\n'
    "max_idle_rounds = 1\n[run]\nmax_steps = 1\n[sampling]\nmax_new_tokens = 8\n"
    "temperature = 1.0\n"
)


@pytest.mark.slow
def test_a_signal_ends_a_run_that_waits_for_servers(stopped, tmp_path, monkeypatch, capsys):
    read = run.start_state

    def start_state(*args):
        read(*args)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(run, "start_state", start_state)
    (tmp_path / "c.toml").write_text(CONFIG)
    words = [f"model.path={stopped.model}", f'rollout.vllm.servers=["{stopped.url}"]']
    words += [f"run.output_dir={tmp_path / 'run'}", "rollout.vllm.wait_seconds=60"]
    assert main(["--config", str(tmp_path / "c.toml"), *words]) == 0
    output = capsys.readouterr()
    assert "SIGTERM: nothing new to save after step 0" in output.out + output.err


@pytest.mark.slow
def test_a_run_reads_its_weights_meanwhile(stopped, tmp_path, monkeypatch, capsys):
    read = run.start_state

    def start_state(*args):
        assert not stopped.thread.is_alive(), "nobody has asked for it"
        read(*args)
        stopped.start()

    monkeypatch.setattr(run, "start_state", start_state)
    words = SimpleNamespace(
        model=f"model.path={stopped.model}",
        servers=f'rollout.vllm.servers=["{stopped.url}"]',
        folder=f"run.output_dir={tmp_path / 'run'}",
    )
    (tmp_path / "c.toml").write_text(CONFIG)
    main(["--config", str(tmp_path / "c.toml"), *vars(words).values()])
    assert "gave nothing to learn from" in capsys.readouterr().err
    assert stopped.label.endswith("-0"), "weights came, and answers"
