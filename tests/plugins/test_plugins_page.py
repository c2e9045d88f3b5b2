"""docs/extending.md does what it says: each kind by entry point, by module:name and by file."""

import asyncio
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy_run import MODEL

from jaxtrain.config import Config, EnvConfig, OptimConfig, RewardConfig, validate_config
from jaxtrain.config.data import FORMATS, DataConfig, DatasetConfig
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.optimizer import build_optimizer, build_schedule
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.formats import COLUMNS
from jaxtrain.data.pipeline import open_source
from jaxtrain.data.preview import probe_samples
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.data.sequences import Sequences
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.rewards.load import call_function, find_function
from jaxtrain.environments.rewards.score import open_rewards
from jaxtrain.errors import UserError
from jaxtrain.generation.curators import open_curator
from jaxtrain.generation.engine import Completion, PromptRequest
from jaxtrain.generation.engines import find_engine
from jaxtrain.main import main
from jaxtrain.methods.registry import make_task
from jaxtrain.models import build, families, loading
from jaxtrain.runs.checkpoint import Checkpoints
from jaxtrain.runs.observers.dispatch import Observers
from jaxtrain.runs.sinks import Sinks

WINDOWED = {
    "architectures": ["WindowedLlamaForCausalLM"],
    "model_type": "cwm",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(params=["entry point", "module", "file"])
def name_of(request, my_package):
    """The three ways to write one thing: (entry point, module, attribute) -> name."""
    return lambda entry, module, attribute: {
        "entry point": entry,
        "module": f"my_package.{module}:{attribute}",
        "file": f"{my_package}/my_package/{module}.py:{attribute}",
    }[request.param]


def make_config(**sections) -> Config:
    table = {
        "run": {"max_steps": 10},
        "model": {"architecture": WINDOWED, "tokenizer": "builtin"},
        "data": {"datasets": [{"path": "x"}], "sequence_len": 64},
        "log": {"console": "plain"},
    }
    return validate_config({**table, **sections}, "test")


def test_a_curator_of_ones_own(name_of):
    with pytest.raises(
        UserError, match=r"\(seed, \*\*rollout.curator_options\): .*its options are enough"
    ):
        open_curator(name_of("unsolved", "curators", "Unsolved"), {"begin": 10}, 0)
    curator = open_curator(name_of("unsolved", "curators", "Unsolved"), {"enough": 0.5}, 0)
    first, second = PromptRequest(0, 0, {}), PromptRequest(1, 0, {}, index=1)
    assert curator.choose(first)
    curator.learn(first, [1.0, 0.5])
    curator.learn(second, [1.0, 0.0])
    state = json.loads(json.dumps(curator.state()))
    resumed = open_curator(name_of("unsolved", "curators", "Unsolved"), {"enough": 0.5}, 0)
    resumed.restore(state)
    assert [resumed.choose(entry) for entry in (first, second)] == [False, True]


def test_a_reward(name_of):
    function = find_function(name_of("brevity", "rewards", "brevity"))
    arguments = {"completions": ["x" * 10, "x" * 40], "limit": 20, "answer": ["a", "b"]}
    assert call_function(function, arguments) == [1.0, 0.5]


def test_a_reward_is_found_in_its_worker_process(my_package):
    open_rewards([RewardConfig(function="brevity")], workers=1).close()


def test_an_environment(name_of, tokenizer):
    class Engine:
        async def generate(self, prompt, sampling, stop_ids, index):
            tokens = tokenizer("It is 12.")["input_ids"]
            return Completion(tokens, [-1.0] * len(tokens), "stop")

    env = open_env(EnvConfig(kind=name_of("quiz", "worlds", "Quiz")), tokenizer)
    for answer, reward in [("12", 1.0), ("13", 0.0)]:
        row = {"prompt": "What is 3 x 4?", "answer": answer}
        assert asyncio.run(env.run(row, Engine(), None, 0)).rewards == {"right": reward}


def test_a_format(name_of, tokenizer, tmp_path):
    rows = [{"script": "A: one\nB: two"}, {"script": "A: Hello?\nB: Hi.\nA: So?\nB: Yes."}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    dataset = DatasetConfig(
        path=str(tmp_path / "x.jsonl"), format=name_of("dialogue", "formats", "dialogue")
    )
    tokenize = RowTokenizer(dataset, tokenizer, 64, "drop")
    [sample] = tokenize(rows[1], "row 1")
    shown = [tokenizer.decode(sample.tokens[sample.weights > 0])]
    assert shown == ["Hi.<|im_end|>Yes.<|im_end|>"]
    assert tokenize({"script": "A: alone"}, "row 2") == [
        Dropped("malformed row: a script of one line", "row 2")
    ]
    with pytest.raises(UserError, match=r"row 3: format .*KeyError: 'script' \(.*formats.py:3\)"):
        tokenize({"text": "no script"}, "row 3")
    data = DataConfig(datasets=[dataset], sequence_len=64, num_workers=1)
    assert len(probe_samples(dataset, tokenizer, data).samples) == 8


@pytest.mark.slow
def test_a_format_in_a_file_reaches_worker_processes(my_package, tokenizer, tmp_path):
    """No pickle by reference survives that."""
    (tmp_path / "x.jsonl").write_text((json.dumps({"script": "A: one\nB: two"}) + "\n") * 8)
    name = f"{my_package}/my_package/formats.py:dialogue"
    dataset = DatasetConfig(path=str(tmp_path / "x.jsonl"), format=name)
    data = DataConfig(datasets=[dataset], sequence_len=64, num_workers=1)
    recipe = Sequences(data, tokenizer)
    source = open_source(data, recipe, seed=0, rows_per_microstep=1, microsteps=1)
    try:
        assert next(source)[0].tokens.shape == (1, 1, 64)
    finally:
        source.close()


def test_a_format_may_give_tokens_and_weights(tokenizer, tmp_path):
    path = tmp_path / "raw.py"
    path.write_text(
        "def raw(row, tokenizer, dataset):\n    return [(row['ids'], row['weights'])]\n"
    )
    dataset = DatasetConfig(path="x", format=f"{path}:raw", fields={"ids": "tokens"})
    tokenize = RowTokenizer(dataset, tokenizer, 3, "truncate")
    [sample] = tokenize({"tokens": [5, 6, 7, 8], "weights": [1, 0, 2, 1]}, "row 1")
    assert isinstance(sample, Sample) and sample.tokens.tolist() == [5, 6, 7]
    assert sample.weights.tolist() == [0, 0, 2]
    with pytest.raises(UserError, match="it must return"):
        tokenize({"tokens": [5, 6], "weights": [1]}, "row 1")


def test_the_config_knows_the_built_in_formats():
    assert set(FORMATS) == {"auto", *COLUMNS}


@pytest.mark.parametrize("family", [None, "my_package.windowed", "{}/my_package/windowed.py"])
def test_a_model_family(my_package, family, tmp_path):
    section = {"path": str(tmp_path), "init": "random", "tokenizer": "builtin"}
    if family is not None:
        section["family"] = family.format(my_package)
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED))
    config = build_model_bundle(make_config(model=section)).architecture
    assert config.architecture == "WindowedLlamaForCausalLM"
    assert [spec.window for spec in config.layers()] == [None, 5]
    assert config == families.read_config(tmp_path, section.get("family"))
    parameters = dict(nnx.to_flat_state(nnx.state(build.abstract(config))))
    names = [entry.param for entry in families.family(config).names(config)]
    assert sorted(names) == sorted(".".join(map(str, path)) for path in parameters)


def test_the_model_family_computes_what_transformers_does(my_package, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    # Code World Model, whose model_type it has, is Llama with windows.
    settings = transformers.AutoConfig.for_model(**WINDOWED)
    reference = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    reference.float().eval().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED))
    tokens = np.arange(20)[None] * 7 % 512
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()

    @nnx.jit
    def logits(model):
        return model.logits(model.decode(jnp.asarray(tokens), model.init_cache(1, 32))[0])

    np.testing.assert_allclose(logits(loading.load(tmp_path)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "raw", "message"),
    [
        (
            None,
            {"architectures": ["WindowedLlamaForCausalML"]},
            "did you mean 'WindowedLlamaForCausalLM'",
        ),
        (
            "jaxtrain.models.llama",
            {},
            "names 'WindowedLlamaForCausalLM', but jaxtrain.models.llama holds",
        ),
        ("jaxtrain.models.naming", {}, "has no Config and no Model and no names"),
        ("my_package.nothing", {}, "there is no module my_package.nothing"),
    ],
)
def test_what_is_no_such_family_is_refused(my_package, family, raw, message):
    with pytest.raises(UserError, match=message):
        families.config_from_hf({**WINDOWED, **raw}, family)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_engine(name_of, tokenizer):
    rollout = {
        "engine": name_of("scripted", "scripted", "Scripted"),
        "options": {"answers": ["yes", "no"]},
    }
    sampling = {"temperature": 1.0, "max_new_tokens": 16}
    judge = [{"function": "length"}]
    config = make_config(task={"kind": "rl"}, rollout=rollout, sampling=sampling, rewards=judge)
    parts = SimpleNamespace(tokenizer=tokenizer)
    engine, publisher = find_engine(config).open(config, parts, print)
    publisher.publish(3, {}, None)
    actual = [asyncio.run(engine.generate([1], None, [2], index)) for index in range(3)]
    assert [tokenizer.decode(answer.tokens[:-1]) for answer in actual] == ["yes", "no", "yes"]
    assert set(actual[0].versions) == {3} and actual[0].tokens[-1] == 2


@pytest.mark.slow
def test_a_round_of_reinforcement_learning_with_the_engine_and_the_environment(
    my_package, tmp_path
):
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in (1, 2)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rl.toml").write_text(
        f"""{MODEL}
[run]
output_dir = "{tmp_path / "run"}"
max_steps = 2
export = false
[data]
sequence_len = 64
datasets = [{{ path = "{tmp_path / "sums.jsonl"}" }}]
[task]
kind = "rl"
[rollout]
engine = "scripted"
options = {{ answers = ["It is 2.", "It is 4."] }}
prompts_per_step = 2
group_size = 2
[env]
kind = "quiz"
[sampling]
temperature = 1.0
max_new_tokens = 16
[log]
plot = false
"""
    )
    assert main(["--config", str(tmp_path / "rl.toml")]) == 0
    steps = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if "loss" in line]
    assert [line["policy_version"] for line in steps] == [0, 1]  # published after each round
    samples = read_lines(tmp_path / "run/samples.jsonl")
    assert {line["completion"] for line in samples} == {"It is 2.", "It is 4."}
    assert {line["reward"] for line in samples} == {0.0, 1.0}


@pytest.mark.parametrize("name", ["zloss", "my_package.zloss", "{}/my_package/zloss.py"])
def test_a_method(my_package, name):
    name = name.format(my_package)
    assert make_task(make_config(task={"kind": name, "z": 0.5})).coef == {"nll": 1.0, "z": 0.5}
    for section, message in [({"zz": 1}, "task.zz: unknown key"), ({"z": 0}, "changes nothing")]:
        with pytest.raises(UserError, match=message):
            make_config(task={"kind": name, **section})


@pytest.mark.slow
def test_the_method_trains_on_rows_of_the_format(my_package, tmp_path):
    rows = [{"script": f"A: {n}?\nB: {n}!"} for n in range(12)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = f'[{{ path = "{tmp_path / "x.jsonl"}", format = "dialogue" }}]'
    (tmp_path / "sft.toml").write_text(
        f"""{MODEL}
[run]
output_dir = "{tmp_path / "run"}"
max_steps = 4
export = false
[data]
sequence_len = 64
datasets = {dataset}
eval_datasets = {dataset}
[optim]
learning_rate = 1e-2
[eval]
at_start = true
[task]
kind = "zloss"
z = 0.1
[log]
plot = false
"""
    )
    assert main(["--config", str(tmp_path / "sft.toml")]) == 0
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    first, last = (line for line in lines if "eval/z" in line)
    assert last["eval/z"] < first["eval/z"]
    assert last["eval/loss"] == pytest.approx(last["eval/nll"] + 0.1 * last["eval/z"])


def test_a_sink(name_of, tmp_path, capsys):
    log = {"console": "plain", "sinks": [name_of("loss_table", "sinks", "LossTable")]}
    with Sinks(make_config(log=log), tmp_path) as sinks:
        sinks.start(10)
        sinks.write(1, {"loss": 2.5})
        sinks.write(1, {"eval/loss": 3.0})
    assert (tmp_path / "loss.csv").read_text() == "1,2.5\n"
    with Sinks(make_config(log=log), tmp_path):
        pass  # nothing was started, so nothing ends
    assert "warning" not in capsys.readouterr().out


def test_a_sink_is_dropped_when_it_fails(tmp_path, capsys):
    class Answers:
        def __init__(self):
            self.heard = []

        def sampled(self, lines):
            self.heard.append(lines)
            raise RuntimeError("no disk")

    answers = Answers()
    with Sinks(make_config(), tmp_path, extra=[answers]) as sinks:
        sinks.start(10)
        sinks.write(1, {"eval/loss": 3.0})
        sinks.sampled(1, [{"reward": 0.5}])
        sinks.sampled(2, [{"reward": 0.7}])
    assert answers.heard == [[{"step": 1, "reward": 0.5}]]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2
    assert capsys.readouterr().out.count("Answers failed and is switched off") == 1
    assert '"eval/loss": 3.0' in (tmp_path / "metrics.jsonl").read_text()


def test_an_observer(name_of, tmp_path):
    run, copies, output = tmp_path / "run", tmp_path / "copies", []
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        '{"step": 3, "tokens": 500.0}\n{"step": 4, "eval/loss": 1}\n'
    )
    table = {
        "kind": name_of("mirror", "mirror", "Mirror"),
        "options": {"target": str(copies), "most_tokens": 1000},
    }
    observers = Observers(make_config(observers=[table]), run, output.append)
    with observers:
        observers.start(10, 4)
        for step, verdicts in ((5, []), (6, ["stop"])):
            observers.notify("step", step, {"tokens": 300.0})
            assert list(observers.take()) == verdicts
        checkpoints = Checkpoints(run / "checkpoints", saved=observers.saved)
        checkpoints.save(6, {"a": jnp.ones(2)}, {})
        checkpoints.close()
    assert not output
    assert (copies / "run/6/manifest.json").is_file()
    assert (copies / "run/ended.txt").read_text() == "finished "
    with pytest.raises(UserError, match="observers.0.options.targte: .*did you mean 'target'"):
        Observers(make_config(observers=[{**table, "options": {"targte": "x"}}]), run, print)


def test_an_optimizer_and_a_schedule(name_of):
    optim = OptimConfig(
        name=name_of("damped", "optimizers", "damped"),
        options={"momentum": 0.5},
        lr_scheduler=name_of("stairs", "schedules", "stairs"),
        scheduler_options={"steps": 2},
        learning_rate=0.1,
        weight_decay=0.5,
    )
    schedule = build_schedule(optim, 10)
    assert [round(float(schedule(step)), 4) for step in (0, 4, 5, 9)] == [0.1, 0.1, 0.05, 0.05]
    params = {"up.kernel": jnp.full((2, 2), 2.0), "norm.scale": jnp.full((2,), 2.0)}
    optimizer = build_optimizer(optim, schedule, params)
    grads = {name: -value for name, value in params.items()}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Up by the sign; the matrix alone decays: 0.1 * (1 - 0.5 * 2) is nothing.
    np.testing.assert_allclose(updates["up.kernel"], 0.0, atol=1e-7)
    np.testing.assert_allclose(updates["norm.scale"], 0.1, rtol=1e-6)
    wrong = optim.model_copy(update={"options": {"momentun": 0.5}})
    with pytest.raises(UserError, match=r"learning_rate, \*\*optim.options\): .*momentun"):
        build_optimizer(wrong, schedule, params)


def test_a_verb(my_package, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert main(["count-rows", f"{tmp_path}/x.jsonl"]) == 0
    assert capsys.readouterr().out == f"2 {tmp_path}/x.jsonl\n"
    assert main(["count-rows", f"{tmp_path}/y.jsonl"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["count-row"]) == 2 and "convert" in (text := capsys.readouterr().err)
    assert "count-rows" in text


def test_optax_itself_is_outside():
    optim = OptimConfig(
        name="optax:adan",
        options={"b1": 0.9},
        lr_scheduler="optax:cosine_onecycle_schedule",
        scheduler_options={"peak_value": 0.1, "transition_steps": 10},
    )
    schedule = build_schedule(optim, 10)
    assert float(schedule(3)) == pytest.approx(0.1)
    params = {"up.kernel": jnp.ones((2, 2))}
    optimizer = build_optimizer(optim, schedule, params)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert float(updates["up.kernel"][0, 0]) < 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    pass", r"cannot be made with \(folder, config\): TypeError"),
        ("    def __init__(self, *given):\n        1 / 0", r"ZeroDivisionError.*own.py:3\)"),
        (
            "    def __init__(self, *given):\n        pass\n"
            "    def start(self, *steps):\n        raise OSError('no quota')",
            "Own cannot start: OSError: no quota",
        ),
    ],
)
def test_a_sink_that_cannot_start_stops_the_run(tmp_path, body, message):
    (tmp_path / "own.py").write_text(f"class Own:\n{body}\n")
    config = make_config(log={"sinks": [f"{tmp_path}/own.py:Own"], "console": "off"})
    with pytest.raises(UserError, match=message):
        Sinks(config, tmp_path).start(10)
