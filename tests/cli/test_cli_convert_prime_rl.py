"""`jaxtrain convert` of prime-rl: files that compose, sources, methods, evaluations."""

import tomllib

import pytest
from test_cli_convert_systems import convert, run

from jaxtrain.config.load import load_config, validate_config
from jaxtrain.convert import SYSTEMS
from jaxtrain.errors import UserError

ENV = {"env": {"taskset": {"id": "sort"}}}

SOURCES = """
seq_len = 4096
[model]
name = "m"
[orchestrator]
batch_size = 64
max_off_policy_steps = 4
[orchestrator.train]
group_size = 8
[[orchestrator.train.source]]
name = "sort"
ratio = 0.75
env.taskset = { id = "sort", hard = true }
env.agent.harness = { id = "null", runtime = { type = "subprocess" } }
[[orchestrator.train.source]]
ratio = 0.25
env.taskset.id = "swe@1.0"
env.agent.harness = { id = "bash", skills = ["search"] }
env.agent.runtime = { type = "docker" }
[orchestrator.eval]
interval = 20
[[orchestrator.eval.source]]
name = "aime"
group_size = 4
num_tasks = 30
env.taskset.id = "aime25"
[orchestrator.renderer]
name = "qwen3"
[trainer.model]
compile = "None"
[monitors.wandb]
project = "p"
"""


def test_prime_rl_sources_and_overlays(tmp_path):
    """A source is a dataset with its environment, and a later file replaces keys of the first."""
    overlay = "max_steps = 7\n[trainer.optim]\nlr = 1e-5\n"
    code, table, output = run(tmp_path, {"base.toml": SOURCES, "over.toml": overlay})
    assert code == 0, output.read_text()
    config = load_config(output)
    sort, swe = config.data.datasets
    assert (sort.weight, swe.weight) == (0.75, 0.25)
    assert sort.env.verifiers.args == {"hard": True} and sort.env.verifiers.harness == "null"
    assert (swe.env.verifiers.taskset, swe.env.verifiers.runtime) == ("swe", "docker")
    assert swe.env.verifiers.agents == {"agent": {"harness": {"id": "bash", "skills": ["search"]}}}
    assert (config.rollout.prompts_per_step, config.rollout.mode, config.rollout.max_lag) == (
        8,
        "async",
        4,
    )
    (aime,) = config.eval.sets
    assert (aime.label, aime.k, aime.options, config.eval.every) == (
        "aime",
        4,
        {"num_rows": 30},
        20,
    )
    assert config.sampling.max_new_tokens == 4096 - 512, "answers up to seq_len there"
    assert (config.run.max_steps, config.optim.learning_rate) == (7, 1e-5)
    assert config.task.scale_rewards == "none" and config.log.wandb_project == "p"


def rounds(**orchestrator):
    """Return the keys of a run over one source."""
    train = {"source": [ENV], "group_size": 4, **orchestrator.pop("train", {})}
    return {
        "model": {"name": "m"},
        "max_steps": 3,
        "orchestrator": {"train": train, **orchestrator},
    }


def test_a_model_and_an_environment_of_their_own_files(tmp_path):
    """Join files as prime-rl's `rl @ model.toml @ env.toml` does; either alone is not enough."""
    model = 'seq_len = 4096\n[model]\nname = "m"\n[orchestrator]\nbatch_size = 32\ngroup_size = 8\n'
    environment = '[[orchestrator.train.source]]\nname = "s"\nenv.taskset.id = "s"\n'
    code, table, _ = run(tmp_path, {"model.toml": model, "env.toml": environment})
    assert code == 0 and table["rollout"] == {"group_size": 8, "prompts_per_step": 4}
    assert table["env"]["verifiers"] == {"taskset": "s"}
    # Either by itself names what is missing.
    for name, file in (("orchestrator.train.source", "model.toml"), ("model", "env.toml")):
        conversion = SYSTEMS["prime-rl"].convert(tomllib.loads((tmp_path / file).read_text()))
        assert "jaxtrain convert" in dict(conversion.notes)[name]


def test_files_of_single_processes(tmp_path):
    files = {
        "orch.toml": 'batch_size = 32\ngroup_size = 8\nmax_steps = 3\n[model]\nname = "m"\n'
        '[optim]\nlr = 3e-5\n[[train.env]]\nid = "s"\n',
        "trainer.toml": "max_concurrent_runs = 2\nenable_router_replay = true\n"
        "[model.lora]\nrank = 4\n",
        "server.toml": 'address = "tcp://127.0.0.1:5000"\n[env]\nname = "s"\n',
    }
    code, table, _ = run(tmp_path, files)
    assert code == 0 and len(table["data"]["datasets"]) == 1
    assert (table["optim"]["learning_rate"], table["adapter"]["rank"]) == (3e-5, 4)
    assert table["rollout"]["router_replay"] is True


@pytest.mark.parametrize("section", ["train", "orchestrator"])
def test_a_method_counts_wherever_it_stands(section):
    algorithm = {"algo": {"type": "opd", "teacher": {"name": "t"}}}
    keys = rounds(train=algorithm) if section == "train" else rounds(**algorithm)
    conversion = convert("prime-rl", **keys)
    assert conversion.get("task.kind") == "distillation"
    assert conversion.get("task.teacher.path") == "t" and not conversion.missed


def test_max_rl_divides_by_the_mean_reward():
    conversion = convert("prime-rl", **rounds(algo={"type": "max_rl"}))
    assert conversion.get("task") == {
        "kind": "rl",
        "objective": "grpo",
        "average": "token",
        "scale_rewards": "mean",
    }


@pytest.mark.parametrize(
    "keys",
    [
        rounds(algo={"type": "echo"}),
        rounds(train={"source": [ENV, {**ENV, "algo": {"type": "opd"}}]}),
        {**rounds(), "trainer": {"loss": {"type": "score_centering"}}},
        rounds(train={"algo": {"type": "sft", "teacher": {"name": "t"}}}),
    ],
    ids=["echo", "several", "loss", "sft"],
)
def test_no_method_takes_the_place_of_another(keys):
    conversion = SYSTEMS["prime-rl"].convert(keys)
    with pytest.raises(UserError, match=r"task\.(kind|objective)|data\.datasets is empty"):
        validate_config(conversion.table, "it")
    assert {"orchestrator.algo.type", "trainer.loss.type"} & {key for key, *_ in conversion.missed}


def test_data_that_the_orchestrator_trains_on():
    algorithm = {"type": "dataset_sft", "dataset": {"name": "rows"}}
    keys = {"seq_len": 4096, **rounds(algo=algorithm, token_batch_size=131072)}
    conversion = convert("prime-rl", **keys)
    data = {"sequence_len": 4096, "global_batch_size": 32, "datasets": [{"path": "rows"}]}
    assert conversion.get("data") == data and conversion.get("rollout") is None
    supervised = convert("prime-rl", **keys, trainer={"loss": {"type": "sft"}})
    assert supervised.get("data") == data and not supervised.missed
    assert not any("answer" in text for _, text in supervised.notes), "none is drawn"


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ({"type": "advantage_range"}, "refill"),
        ({"import_path": "prime_rl.orchestrator.curricula.AdvantageRangeGate"}, "refill"),
        ({"type": "advantage_range", "reject_max": 0.5}, None),
    ],
)
def test_groups_without_advantages_are_drawn_again(gate, expected):
    source = {**ENV, "curriculum": {"gates": {"zero_advantage": gate}}}
    conversion = convert("prime-rl", **rounds(train={"source": [source]}))
    assert conversion.get("rollout.zero_advantage") == expected
    assert [key for key, *_ in conversion.missed] == ([] if expected else ["env.curriculum"])


@pytest.mark.parametrize(
    ("vlm", "adapter", "expected"),
    [
        ({"freeze_vision_encoder": False}, {}, "all"),
        ({"freeze_vision_encoder": False}, {"lora": {"rank": 4}}, None),
        ({"vision_encoder_attr": "model.visual"}, {}, None),
    ],
)
def test_a_tower_trains_unless_it_is_frozen(vlm, adapter, expected):
    model = {"name": "Qwen/Qwen3-VL-4B", "vlm": vlm, **adapter}
    conversion = convert("prime-rl", **{**rounds(), "model": model})
    assert conversion.get("model.vision.train") == expected
    assert conversion.images == "model.vlm" and not conversion.missed


def test_steps_of_the_sign_are_lion_without_momentum():
    import jax.numpy as jnp
    import optax

    optim = {"type": "sign_sgd", "lr": 0.5}
    conversion = convert("prime-rl", **rounds(), trainer={"optim": optim})
    assert (conversion.get("optim.name"), conversion.get("optim.beta1")) == ("lion", 0.0)
    descent = optax.lion(0.5, b1=0.0)
    state = descent.init(jnp.zeros(3))
    for gradient in (jnp.array([3.0, -0.1, 0.0]), jnp.array([-1.0, 2.0, 0.5])):
        steps, state = descent.update(gradient, state, jnp.zeros(3))
        assert jnp.array_equal(steps, -0.5 * jnp.sign(gradient))


def test_a_rate_of_zero_changes_no_weight():
    import numpy as np

    conversion = convert("prime-rl", **rounds(), trainer={"optim": {"lr": 0.0}})
    rate = conversion.get("optim.learning_rate")
    weights = np.array([1e-8, 0.02, -3.0], np.float32)
    assert rate > 0 and np.array_equal(weights - np.float32(rate), weights)
    assert ("optim.learning_rate" in dict(conversion.notes)) and not conversion.missed


def test_switches_of_templates_are_kept_where_they_are_false():
    renderer = {"name": "nemotron-3", "truncate_history_thinking": False}
    expected = {"truncate_history_thinking": False}
    conversion = convert("prime-rl", **rounds(renderer=renderer))
    assert conversion.get("model.chat_template_kwargs") == expected
    conversion = convert("prime-rl", **rounds(), inference={"renderer": renderer})
    assert conversion.get("model.chat_template_kwargs") == expected


def test_sources_of_one_dataset_and_data_that_is_made_up():
    data = {"name": "d", "source": [{"split": "math"}], "seq_len": 64}
    conversion = convert("prime-rl", model={"name": "m"}, max_steps=3, data=data)
    assert conversion.get("data.datasets") == [{"path": "d", "split": "math"}]
    data = {"subsets": ["a", "b"], "probabilities": [0.9, 0.1], "columns": {"messages": "chat"}}
    conversion = convert("prime-rl", model={"name": "m"}, max_steps=3, data={"name": "d", **data})
    fields = {"messages": "chat"}
    assert conversion.get("data.datasets") == [
        {"path": "d", "name": "a", "fields": fields, "weight": 0.9},
        {"path": "d", "name": "b", "fields": fields, "weight": 0.1},
    ]
    for data in ({"type": "fake"}, {"source": [{"type": "fake"}]}):
        conversion = convert("prime-rl", model={"name": "m"}, max_steps=3, data=data)
        assert conversion.get("data.datasets.0") is None
        assert conversion.get("data.datasets")[0]["path"] == "builtin:calculator"


EVALUATION = """
model = "m"
select.limit = 20
group_size = 3
[client]
base_url = "http://localhost:8000/v1"
timeout = 60
[sampling]
max_completion_tokens = 768
[[source]]
name = "sort"
env.taskset.id = "sort"
env.agent.harness.id = "null"
"""


def test_an_evaluation_of_its_own(tmp_path, capsys):
    code, table, output = run(tmp_path, {"eval.toml": EVALUATION})
    printed = capsys.readouterr().out
    assert code == 0 and "jaxtrain eval --config" in printed
    # Its answers would be those of other weights.
    assert "no counterpart: client.base_url = " in printed and "client.timeout" not in printed
    assert "client.timeout: settings of their own servers" in output.read_text()
    config = load_config(output)
    (sort,) = config.eval.sets
    assert (config.model.path, sort.label, sort.k, sort.max_new_tokens) == ("m", "sort", 3, 768)
    assert sort.options == {"num_rows": 20} and sort.env.verifiers.harness == "null"


def test_an_evaluation_of_an_impossible_length_is_left_to_the_loader():
    keys = {"source": [ENV["env"]], "model": "m", "sampling": {"max_tokens": "many"}}
    with pytest.raises(UserError, match="max_new_tokens.*'many'"):
        convert("prime-rl", **keys)


def test_the_file_of_a_server_is_refused():
    with pytest.raises(UserError, match="inference server.*rollout.vllm.servers"):
        SYSTEMS["prime-rl"].convert({"vllm": {"model": "m"}})


def test_prime_rl_files_that_inherit(tmp_path):
    child = 'toml_files = ["base.toml"]\nmax_steps = 3\n'
    (tmp_path / "base.toml").write_text(SOURCES)
    code, table, _ = run(tmp_path, {"child.toml": child})
    assert code == 0 and table["run"]["max_steps"] == 3 and len(table["data"]["datasets"]) == 2


def test_evaluations_beside_an_orchestrator_are_converted_and_their_servers_named():
    env = {"taskset": {"id": "sort"}}
    evaluation = {"source": [{"env": env}], "client": {"base_url": "http://localhost:1/v1"}}
    orchestrator = {"train": {"env": [{"env": env}]}}
    keys = {"model": {"name": "m"}, "orchestrator": orchestrator, "eval": evaluation}
    conversion = SYSTEMS["prime-rl"].convert(keys)
    assert [entry["name"] for entry in conversion.get("eval.sets")] == ["sort"]
    assert "eval.client" in {key for key, *_ in conversion.missed}
    inner = {"source": [{"env": {"taskset": {"id": "sum"}}}]}
    keys["orchestrator"] = {**orchestrator, "eval": inner}
    conversion = SYSTEMS["prime-rl"].convert(keys)
    assert [entry["name"] for entry in conversion.get("eval.sets")] == ["sum"]
    assert [key for key, *_ in conversion.missed] == ["eval"]


def test_prime_rl_teachers_and_data():
    algo = {"type": "opd", "teacher": {"name": "t", "base_url": ["http://localhost:8001/v1"]}}
    env = {"taskset": {"id": "sort"}}
    orchestrator = {"group_size": 4, "algo": algo, "train": {"env": [{"env": env}]}}
    conversion = convert("prime-rl", model={"name": "m"}, max_steps=3, orchestrator=orchestrator)
    teacher = {"path": "t", "kind": "server", "url": "http://localhost:8001"}
    assert conversion.get("task.teacher") == teacher and conversion.get("task.on_policy_share") == 1
    orchestrator["algo"] = {"type": "sft"}
    orchestrator["eval"] = {"source": [{"env": env}], "sampling": {"top_p": 0.9}}
    refused = SYSTEMS["prime-rl"].convert({"model": {"name": "m"}, "orchestrator": orchestrator})
    with pytest.raises(UserError, match="data.datasets is empty"):
        validate_config(refused.table, "it")  # no RL in the place of another method
    assert {"eval.sampling.top_p", "orchestrator.algo.type"} <= {key for key, *_ in refused.missed}
    data = {"name": "d", "subsets": ["a"], "splits": ["train[:9]"], "seq_len": 64, "batch_size": 4}
    conversion = convert("prime-rl", model={"name": "m"}, max_steps=3, data=data)
    assert conversion.get("data") == {
        "sequence_len": 64,
        "global_batch_size": 4,
        "datasets": [{"path": "d", "name": "a", "split": "train[:9]"}],
    }


def test_rows_of_tasks_are_their_numbers():
    from jaxtrain.config.data import DatasetConfig
    from jaxtrain.data.sources.dataset import open_rows

    rows = open_rows(DatasetConfig(path="builtin:tasks", options={"num_rows": 3}))
    assert [rows[index] for index in range(len(rows))] == [{"task": 0}, {"task": 1}, {"task": 2}]
    with pytest.raises(UserError, match="needs options.num_rows.*found nothing"):
        open_rows(DatasetConfig(path="builtin:tasks"))
