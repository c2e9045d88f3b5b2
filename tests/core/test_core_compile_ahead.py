"""The step's programs compile in a thread before the first step, and no step compiles again."""

import json
import threading
from collections import Counter

import jax
import pytest
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.main import main

RUN = """
[run]
max_steps = 2
export = false
{model}
[data]
sequence_len = 128
micro_batch_size = 2
[log]
plot = false
report = false
[checkpoint]
every = 100
"""
CALCULATOR = '[[data.datasets]]\npath = "builtin:calculator"\noptions = { num_rows = 40 }\n'
STEPS = {"single_step", "zeros", "add_micro", "update"}


def sections(folder):
    """Return sections of a config by the kind of task, with further overrides."""
    rows = [
        {"prompt": f"{a} + 1 =", "chosen": f" {a + 1}", "rejected": f" {a + 2} or so"}
        for a in range(36)
    ]
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout = "[rollout]\nprompts_per_step = 2\ngroup_size = 2\n"
    data = f'[[data.datasets]]\npath = "{pairs}"\n[task]\n'
    return {
        "sft": CALCULATOR,
        "accumulated": f"{CALCULATOR}[optim]\ngradient_accumulation_steps = 3\n",
        "rl": f'{CALCULATOR}[task]\nkind = "rl"\n{rollout}{EVEN_TOKENS}',
        "preference": f'{data}kind = "preference"\n',
        "reward_model": f'{data}kind = "reward_model"\n',
        "tree": f'{CALCULATOR}[task]\nkind = "tree"\n',
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "accumulated", "rl", "preference", "reward_model", "tree"])
def test_no_step_compiles(kind, tmp_path, capsys):
    compiled = Counter()

    def note(event, seconds, **values):
        name = str(values.get("fun_name")).removeprefix("jit(").removesuffix(")")
        if event == "/jax/core/compile/backend_compile_duration" and name in STEPS:
            compiled[name, threading.current_thread().name] += 1

    config = tmp_path / "run.toml"
    model = MODEL.replace("max_position_embeddings = 64", "max_position_embeddings = 512")
    config.write_text(RUN.format(model=model) + sections(tmp_path)[kind])
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        assert main(["--config", str(config), f"run.output_dir={tmp_path / 'run'}"]) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled and set(compiled.values()) == {1}, compiled
    assert {thread for _, thread in compiled} == {"compiling ahead"}, compiled
    printed = capsys.readouterr().out
    assert "compiled while the weights are read" in printed
    assert "compiling step program" not in printed
