"""Frozen policies of Hugging Face folders: a judge with a tokenizer of its own, drawn in the
process; what is no such folder is refused before anything is read."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from real_vllm import make_model
from test_generation_frozen import JUDGED

from jaxtrain.config import EnvConfig, SamplingConfig, validate_config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.environments.guarded import open_guarded
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.episode_engine import with_policies
from jaxtrain.generation.local.frozen_folder import assemble_folder, frozen_shapes, open_folders
from jaxtrain.models import loading

TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A judge whose ids are not those of the builtin tokenizer."""
    folder = make_model(tmp_path_factory.mktemp("judge") / "judge", seed=3, tied=True)
    path = folder / "tokenizer.json"
    payload = json.loads(path.read_text())
    vocab = payload["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    path.write_text(json.dumps(payload))
    return folder


def make_config(judge, **sections):
    model = {"tokenizer": "builtin", "compute_dtype": "float32", "architecture": RAW}
    table = {
        "run": {"max_steps": 1},
        "model": model,
        "data": {"datasets": [{"path": "builtin:calculator"}], "sequence_len": 64},
        "task": {"kind": "rl"},
        "env": {"kind": "calculator"},
        "sampling": {"temperature": 1.0, "max_new_tokens": 8},
        "policies": {"judge": judge},
    }
    return validate_config({**table, **sections}, "test")


RAW = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
def test_a_folder_answers_by_its_own_template_and_weights(folder, tmp_path):
    config = make_config({"path": str(folder), "max_tokens": TOKENS})
    parts, output = build_model_bundle(config), []
    (judge,) = open_folders(config, parts, jax.local_devices()[:1], output.append).values()
    (again,) = open_folders(config, parts, jax.local_devices()[:1], output.append).values()
    assert again.sampler._weights[0] is judge.sampler._weights[0] and len(output) == 1
    shapes = frozen_shapes(config, parts)["judge"].values()
    assert all(shape.sharding.is_fully_replicated for shape in shapes), "told as it will be"
    size = sum(shape.size * shape.dtype.itemsize for shape in shapes) / 2**30
    assert output[0] == f"policies.judge: {folder}, {size:.3f} GiB"
    (tmp_path / "judged.py").write_text(JUDGED)
    env_config = EnvConfig(kind=f"{tmp_path}/judged.py:judged", history="tokens")
    env = open_guarded(env_config, load_tokenizer("builtin"))

    async def run(thread):
        pair = with_policies(
            ScriptedEngine(load_tokenizer("builtin"), ["2", "Good."]),
            {"judge": judge.speak(thread)},
        )
        try:
            return await env.run({"question": "1 + 1?"}, pair, SamplingConfig(), 5), pair.counters()
        finally:
            await pair.close()

    with ThreadPoolExecutor(1) as thread:
        episode, counted = asyncio.run(run(thread))
    assert counted == {"judge/requests": 1.0, "judge/failed": 0.0}
    tokenizer = load_tokenizer(str(folder))
    requests = [{"role": "system", "content": "1 + 1? 2"}]
    prompt = prompt_tokens(tokenizer, requests)
    assert prompt != prompt_tokens(load_tokenizer("builtin"), requests)
    expected = take_greedy(folder, prompt)
    output = load_tokenizer("builtin").decode(
        [t for t, drawn in zip(episode.tokens, episode.sampled, strict=True) if not drawn]
    )
    assert tokenizer.decode(expected, skip_special_tokens=True).strip() in output, (
        "its words are context"
    )

    async def too_long():
        speaker = judge.speak()
        try:
            await speaker.reply([{"role": "user", "content": "7 " * 400}])
        finally:
            await speaker.close()

    with pytest.raises(EpisodeFailed, match=r"policies\.judge does not answer"):
        asyncio.run(too_long())


def take_greedy(folder, prompt) -> list[int]:
    """Tokens by plain passes over the whole text."""
    from test_generation_local import next_logits

    model = loading.load(folder, param_dtype="float32", dtype="float32")
    row = np.zeros((1, 64), np.int32)
    row[0, : len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + TOKENS):
        row[0, end] = np.asarray(next_logits(model, row))[0, end - 1].argmax()
    return row[0, len(prompt) : len(prompt) + TOKENS].tolist()


def test_what_is_no_chat_model_is_refused_before_weights_are_read(tmp_path):
    raw = {**RAW, "vocab_size": 300}
    folders = {name: tmp_path / name for name in ("empty", "bare", "mute", "small", "peft", "run")}
    for name, folder in folders.items():
        folder.mkdir()
        if name != "empty":
            (folder / "config.json").write_text(json.dumps(raw))
        if name not in ("empty", "bare"):
            load_tokenizer("builtin").save_pretrained(folder)
    (folders["mute"] / "chat_template.jinja").unlink()
    (folders["peft"] / "adapter_config.json").write_text("{}")
    (folders["run"] / "checkpoints").mkdir()
    config = make_config({"path": str(folders["small"])})
    parts = build_model_bundle(config)
    for name, text in {
        "empty": "has no config.json",
        "bare": "has no tokenizer; copy",
        "mute": "has no chat template",
        "small": "the model has 300 tokens, the tokenizer",
        "peft": "is an adapter; .*jaxtrain merge",
        "run": "is a run; .*jaxtrain export",
    }.items():
        section = config.policies["judge"].model_copy(update={"path": str(folders[name])})
        with pytest.raises(UserError, match=rf"policies\.judge\.path.*{text}"):
            assemble_folder("judge", section, parts)


@pytest.mark.parametrize(
    "keys, sections, text",
    [
        ({"servers": ["http://a:1"]}, {}, r"policies\.judge\.servers is for a policy behind"),
        ({"options": {"a": 1}}, {}, r"policies\.judge\.options is for a policy behind servers"),
        ({}, {"rollout": {"engine": "vllm"}}, r"policies\.judge\.path is drawn by the local"),
        ({}, {"rollout": {"service": "ray"}}, "drawn in the trainer's process"),
    ],
)
def test_sections_that_do_not_go_with_a_folder_are_refused(keys, sections, text):
    with pytest.raises(UserError, match=text):
        make_config({"path": "judge", **keys}, **sections)
