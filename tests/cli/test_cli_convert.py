"""`jaxtrain convert`: configs of other systems in our keys, and what is said of the rest."""

import tomllib

import pytest

from jaxtrain.config.docs import list_keys, list_sections
from jaxtrain.config.load import load_config, suggest
from jaxtrain.convert import SYSTEMS, axolotl, find_hint, prime_rl, trl
from jaxtrain.convert.conversion import Conversion
from jaxtrain.errors import UserError
from jaxtrain.main import main

AXOLOTL = """
base_model: some/model
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: teknium/cleaned
    type: alpaca
  - path: json
    data_files: chats.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {assistant: [gpt, model]}
val_set_size: 0.1
train_on_inputs: true
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
learning_rate: 2e-4
weight_decay: 1E-2
chat_template: phi_35
bf16: auto
flash_attention: true
evals_per_epoch: 4
neftune_noise_alpha: 5
surprise: 3
"""
COMMAND = """
CUDA_VISIBLE_DEVICES=0 trl grpo --model_name_or_path some/model \\
  --dataset_name some/data --reward_funcs rewards.py:right length --reward_weights 1 0.5 \\
  --use_vllm --vllm_server_port 8001 --max_steps 10 --use_peft --lora_r 4 --no_shuffle_dataset
"""
PRIME = """
max_steps = 100
[model]
name = "some/model"
[orchestrator]
batch_size = 512
rollouts_per_example = 16
sampling.max_tokens = 64
[[orchestrator.env]]
id = "some/env"
[trainer.optim]
lr = 3e-6
[trainer.model.lora]
rank = 8
"""


ELSEWHERE = {
    "rl": "task.kind",
    "lora_dropout": "adapter.dropout",
    "loraplus_lr_ratio": "optim.lora_plus_ratio",
    "neftune_noise_alpha": "model.neftune_alpha",
    "saves_per_epoch": "checkpoint.per_epoch",
    "val_set_size": "data.validation_split",
    "test_size": "data.validation_split",
    "special_tokens": "model.special_tokens",
    "eos_token": "model.special_tokens.eos_token",
    "deepspeed": "parallel.fsdp",
    "unsloth": "not needed",
}


def convert(tmp_path, name, text):
    """(exit code, the file that was written, as a table)."""
    source, output = tmp_path / name, tmp_path / "ours.toml"
    source.write_text(text)
    code = main(["convert", str(source), "--output", str(output)])
    return code, tomllib.loads(output.read_text()), output


def test_an_axolotl_file_loads_and_says_what_is_lost(tmp_path, capsys):
    code, actual_values, output = convert(tmp_path, "config.yml", AXOLOTL)
    assert code == 0
    assert actual_values["adapter"] == {
        **{"quantize": "nf4", "kind": "lora", "rank": 8, "target": "all-linear"},
        "dropout": 0.05,
    }
    assert actual_values["model"]["neftune_alpha"] == 5
    first, second = actual_values["data"]["datasets"]
    assert first == {
        "path": "teknium/cleaned",
        "format": "alpaca",
        "train_on": "all",
    }
    assert second["path"] == "chats.jsonl"
    assert second["fields"] == {
        "messages": "conversations",
        "messages.role": "from",
        "messages.content": "value",
    }
    assert second["roles"] == {"gpt": "assistant", "model": "assistant"}
    assert actual_values["data"]["validation_split"] == 0.1
    assert actual_values["eval"] == {"per_epoch": 4}
    # YAML 1.1 reads these as texts.
    assert (actual_values["optim"]["learning_rate"], actual_values["optim"]["weight_decay"]) == (
        2e-4,
        0.01,
    )
    assert actual_values["model"]["chat_template"] == "phi3"
    # Axolotl's own defaults, which are not ours.
    assert actual_values["data"]["sequence_len"] == 512
    assert load_config(output).optim.name == "adamw"
    printed = capsys.readouterr().out
    assert actual_values["optim"]["moments"] == "int8"
    for part in ("surprise = 3",):
        assert part in printed
    assert "flash_attention" not in printed and "load_in_4bit" not in printed
    with pytest.raises(UserError, match="exists"):
        from jaxtrain.cli.convert import convert as verb

        verb([tmp_path / "config.yml"], None, output)


def test_axolotls_quantized_experts(tmp_path):
    text = "base_model: m\nquantize_moe_experts: true\nload_in_4bit: true\nadapter: qlora\n"
    text += "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]\n"
    _, actual_values, output = convert(
        tmp_path, "config.yml", text + "lora_target_modules: [q_proj]\n"
    )
    assert actual_values["adapter"] == {
        "quantize": "nf4_fused",
        "kind": "lora",
        "target": ["q_proj", "experts.gate", "experts.up", "experts.down"],
    }
    assert "experts" not in output.read_text().split("[")[0], "nothing is missed"


@pytest.mark.parametrize(
    ("rules", "reference", "options"),
    [
        (
            axolotl.RULES,
            {"hub_model_id": "me/x", "hub_strategy": "all_checkpoints", "hub_revision": "dev"},
            {"repo": "me/x", "strategy": "all_checkpoints", "branch": "dev"},
        ),
        (
            trl.RULES,
            {"push_to_hub": True, "output_dir": "runs/x/", "hub_private_repo": False},
            {"repo": "x", "strategy": "every_save", "private": False},
        ),
        (trl.RULES, {"hub_model_id": "me/x", "push_to_hub": False}, None),
    ],
)
def test_a_push_to_the_hub_becomes_an_observer(rules, reference, options):
    conversion = Conversion(reference)
    conversion.run(rules, reference)
    expected = None if options is None else [{"kind": "hub", "options": options}]
    assert conversion.get("observers") == expected and not conversion.missed


def test_no_evaluation_is_never_and_not_at_the_end():
    for value in (False, "no"):  # YAML 1.1 reads `no` as false
        conversion = Conversion({"eval_strategy": value})
        conversion.run(axolotl.RULES, conversion.source)
        assert conversion.table == {"eval": {"every": "never"}}


def test_a_template_that_writes_more_there_is_said():
    for name, messages in (("phi_4", "system message"), ("alpaca", "sentence")):
        conversion = Conversion({"chat_template": name})
        conversion.run(axolotl.RULES, conversion.source)
        assert conversion.get("model.chat_template") == name.replace("_", "") and messages in str(
            conversion.notes
        )
    conversion = Conversion({"chat_template": "exaone"})
    conversion.run(axolotl.RULES, conversion.source)
    assert conversion.missed


def test_a_trl_command_line_with_trl_s_defaults(tmp_path):
    code, actual_values, output = convert(tmp_path, "run.sh", COMMAND)
    assert code == 0
    assert actual_values["task"] == {"kind": "rl", "objective": "dapo", "beta": 0.0}
    assert (
        actual_values["rollout"]["group_size"] == 8 and actual_values["rollout"]["engine"] == "vllm"
    )
    assert actual_values["rollout"]["vllm"] == {
        "servers": ["http://127.0.0.1:8001"],
        "sync": "lora",
    }
    assert actual_values["rewards"] == [
        {"function": "rewards.py:right", "weight": 1.0},
        {"function": "length", "weight": 0.5},
    ]
    assert actual_values["run"] == {"max_steps": 10}  # and no 3 epochs beside them
    assert actual_values["data"]["shuffle"] is False
    assert actual_values["adapter"]["rank"] == 4 and actual_values["adapter"]["kind"] == "lora"
    config = load_config(output)
    assert config.optim.learning_rate == 1e-6 and config.sampling.temperature == 1.0


def test_a_prime_rl_file_runs(tmp_path, capsys):
    code, actual_values, output = convert(tmp_path, "rl.toml", PRIME)
    assert code == 0, capsys.readouterr().out
    assert actual_values["rollout"] == {"group_size": 16, "prompts_per_step": 32}
    assert actual_values["adapter"] == {"rank": 8, "kind": "lora"}
    assert actual_values["optim"] == {
        "learning_rate": 3e-6,
        "weight_decay": 0.01,
        "lr_scheduler": "constant",
    }
    assert actual_values["sampling"]["max_new_tokens"] == 64
    assert actual_values["env"] == {"kind": "verifiers", "verifiers": {"taskset": "some/env"}}
    (dataset,) = load_config(output).data.datasets
    assert (dataset.path, dataset.options) == ("builtin:tasks", {"num_rows": 32})
    assert "how many the taskset has" in capsys.readouterr().out


GYM = """
base_model: some/model
rl: grpo
plugins: [axolotl.integrations.nemo_gym.NemoGymPlugin]
trl:
  num_generations: 8
  reward_funcs: [axolotl.integrations.nemo_gym.rewards.reward_env]
nemo_gym_enabled: true
nemo_gym_auto_start: false
nemo_gym_datasets:
  - {path: rows.jsonl, server_name: sudoku, max_samples: 100}
datasets:
  - {path: rows.jsonl, type: chat_template, field_messages: responses_create_params.input}
max_steps: 5
"""


def test_axolotls_nemo_gym(tmp_path, capsys):
    """A Gym that runs needs no more; of one to be started it is said what is still to be added."""
    code, actual_values, output = convert(tmp_path, "gym.yml", GYM)
    assert code == 0, capsys.readouterr().out
    gym = load_config(output).env.gym
    assert (gym.head, gym.agent, gym.mode) == ("http://127.0.0.1:11000", "sudoku", "verify")
    assert actual_values["data"]["datasets"] == [{"path": "rows.jsonl", "max_rows": 100}]
    assert "rewards" not in actual_values and actual_values["env"]["kind"] == "nemo_gym"
    started = GYM.replace("auto_start: false", "config_paths: [a.yaml]\nnemo_gym_multi_turn: true")
    output.unlink()
    code, actual_values, _ = convert(tmp_path, "start.yml", started)
    assert code == 1 and "env.gym.python" in capsys.readouterr().out
    assert actual_values["env"]["gym"] == {
        "mode": "agent",
        "start_seconds": 360,
        "start": True,
        "configs": ["a.yaml"],
    }


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.yml", "x: 1", "--from"),
        ("a.yml", "[1, 2", "not valid YML"),
        ("a.sh", "python train.py --lr 1", "names what it runs"),
        ("a.sh", "trl dpo --x 'open", "command line"),
    ],
)
def test_what_is_no_config_of_theirs_is_refused(tmp_path, capsys, name, text, part):
    (tmp_path / name).write_text(text)
    assert main(["convert", str(tmp_path / name)]) == 2
    assert part in capsys.readouterr().err


def test_every_key_that_the_tables_name_exists_here():
    """A key that is renamed here must be renamed there."""
    actual_values = set()
    for title, section in list_sections():
        position = title.split(" ")[0].strip("[]")
        actual_values |= {f"{position}.{key}" for key, *_ in list_keys(section)}
    rules = [rule for system in SYSTEMS.values() for _, rule in walk(system.RULES)]
    keys = {rule.key for rule in rules if rule.key is not None}
    keys = {key for key in keys if not key.startswith("model.chat_template_kwargs.")}
    assert len(keys) > 150
    datasets = {rule.key for rule in axolotl.DATASET.values() if rule.key}
    assert keys - datasets <= actual_values
    inner = {f"data.datasets.{key}" for key in datasets if key.partition(".")[0] == key}
    assert inner and inner <= actual_values


def walk(rules):
    """(key, rule) of a table and those within it."""
    for key, rule in rules.items():
        yield key, rule
        yield from walk(rule.inner or {})


def test_optimizers_in_8_bits_and_paged_ones_keep_what_they_save():
    conversion = Conversion({})
    conversion.run(trl.RULES, {"optim": "paged_adamw_8bit"})
    assert conversion.table["optim"] == {"name": "adamw", "moments": "int8", "offload": True}


@pytest.mark.parametrize(
    ("source", "remat"),
    [
        ({"gradient_checkpointing": True}, "full"),
        ({"gradient_checkpointing": False}, None),
        ({"gradient_checkpointing": "offload"}, "offload"),
        ({"activation_offloading": True, "gradient_checkpointing": True}, "offload"),
        ({"gradient_checkpointing": True, "activation_offloading": False}, "full"),
    ],
)
def test_checkpointing_and_offloading_are_one_key(source, remat):
    conversion = Conversion(source)
    conversion.run(trl.RULES, source)
    assert conversion.table.get("model", {}).get("remat") == remat and not conversion.missed


def test_values_without_counterpart_are_told():
    conversion = Conversion({})
    conversion.run(trl.RULES, {"optim": "galore_adamw", "lr_scheduler_type": "polynomial"})
    assert [key for key, *_ in conversion.missed] == ["optim", "lr_scheduler_type"]
    assert "adamw" in conversion.missed[0][2]


def test_keys_of_other_systems_are_answered_with_ours():
    assert find_hint("evals_per_epoch") == "eval.per_epoch" and find_hint("no_such_key") is None
    assert "sampling.max_new_tokens" in suggest("max_completion_length", ["seed"])
    assert "kernel follows" in suggest("flash_attention", ["seed"])
    assert "checkpoint.every" in suggest("save_steps", ["every", "profile_steps"])
    for key, actual_values in ELSEWHERE.items():
        assert actual_values in suggest(key, ["seed"]), key
    # One that task has, in a section with a key that is nearly the same.
    assert "did you mean 'beta1'" in suggest("beta", ["beta1", "eps"])


@pytest.mark.slow
def test_the_defaults_are_trl_s():
    """Compare with the installed TRL."""
    module = pytest.importorskip("trl", reason="the test extra installs TRL")
    from dataclasses import fields

    from trl.experimental.gkd import GKDConfig

    for method, defaults in trl.DEFAULTS.items():
        names = {"reward": "RewardConfig", "distillation": "DistillationConfig"}
        name = names.get(method, f"{method.upper()}Config")
        of_method = GKDConfig if method == "gkd" else getattr(module, name)
        reference = {f.name: f.default for f in fields(of_method)}
        expected = trl.COMMON_DEFAULTS | defaults
        if method in ("grpo", "rloo", "distillation"):
            expected |= trl.SAMPLING_DEFAULTS
        assert {key: reference[key] for key in expected} == expected, method


def test_version_tells_what_is_installed(capsys):
    import jaxtrain

    assert main(["--version"]) == 0
    messages = capsys.readouterr().out
    assert (
        messages.startswith(f"jaxtrain {jaxtrain.__version__}, python 3.")
        and ", jax 0." in messages
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("axolotl", "llama-factory") else [])
        for name in SYSTEMS
    ],
)
def test_values_of_any_kind_end_in_a_config_or_a_line(name):
    """No rule fails on a value that the other system would refuse, and what is written is TOML."""
    system = SYSTEMS[name]
    odd = (
        None,
        True,
        -1,
        2.5,
        1e300,
        "x",
        "",
        [],
        [None, {"a": None}],
        {"b.c": [1, "\x7f"]},
    )
    for key in system.RULES:
        for value in odd:
            created = system.convert({key: value})
            tomllib.loads(created.write("head"))
    for value in odd:
        data = {"datasets": [{"path": "a.jsonl", "split": value}, value], "val_set_size": value}
        tomllib.loads(axolotl.convert(data).write("head"))
    keys = prime_rl.RULES["orchestrator"].inner
    deep = {"orchestrator": dict.fromkeys(keys, 3), "trainer": {"model": [1]}}
    tomllib.loads(prime_rl.convert(deep).write("head"))
