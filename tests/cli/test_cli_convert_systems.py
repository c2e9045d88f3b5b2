"""`jaxtrain convert`: what configs of each system need to run as they come out, nothing lost."""

import json
import tomllib

import pytest

from jaxtrain.adapters.spec import AdaptableLinear, match_any
from jaxtrain.config.load import load_config, validate_config
from jaxtrain.convert import SYSTEMS, trl
from jaxtrain.convert.shared import match_linears
from jaxtrain.errors import UserError
from jaxtrain.main import main

BARE = dict.fromkeys(("format", "no_input_format"), "{instruction}")
BASE = {"base_model": "m", "datasets": [{"path": "a.jsonl"}], "num_epochs": 2}


def convert(system, **keys):
    """Return the conversion of a table, whose result passes the loader."""
    conversion = SYSTEMS[system].convert(keys)
    validate_config(conversion.table, "it")
    return conversion


def run(tmp_path, files, *more):
    """(exit code, the file that was written, as a table)."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in files if not name.endswith((".json", "acc.yml"))]
    output = tmp_path / "ours.toml"
    code = main(["convert", *paths, "--output", str(output), *more])
    return code, tomllib.loads(output.read_text()), output


@pytest.mark.parametrize(
    ("keys", "expected", "gone"),
    [
        ({"evals_per_epoch": 4, "eval_strategy": "epoch"}, {}, "eval.per_epoch"),
        ({"eval_steps": 50, "early_stopping_patience": 3}, {}, "eval.every"),
        ({"evals_per_epoch": 0, "val_set_size": 0.1}, {"eval.every": "never"}, "eval.per_epoch"),
        (
            {"early_stopping_patience": 3, "val_set_size": 0.1, "eval_steps": 5},
            {"checkpoint.best_metric": "eval/loss", "eval.patience": 3},
            None,
        ),
        (
            {"saves_per_epoch": 2, "evals_per_epoch": 4, "val_set_size": 0.1, "max_steps": 100},
            {"checkpoint.every": 25, "eval.every": 13, "run.max_steps": 100},
            "run.num_epochs",
        ),
        ({"warmup_steps": 0.1}, {"optim.warmup_ratio": 0.1}, "optim.warmup_steps"),
        (
            {"warmup_steps": 10, "warmup_ratio": 0.1},
            {"optim.warmup_steps": 10},
            "optim.warmup_ratio",
        ),
        (
            {"lr_scheduler": "constant", "warmup_steps": 10},
            {"optim.lr_scheduler": "constant"},
            "optim.warmup_steps",
        ),
        (
            {"tokens": {"bos_token": "<s>", "pad_token": "<pad>"}},
            {"model.special_tokens": {"bos_token": "<s>", "pad_token": "<pad>"}},
            "model.added_tokens",
        ),
        ({"lora_r": 8, "adapter": None}, {}, "adapter"),
        (
            {"adapter": "lora", "lora_target_modules": False},
            {"adapter.kind": "lora"},
            "adapter.target",
        ),
        ({"optimizer": "adamw_torch_4bit"}, {"optim.moments": "int4", "optim.name": "adamw"}, None),
    ],
)
def test_axolotl_keys_that_ask_for_nothing_or_for_something_else(keys, expected, gone):
    conversion = convert("axolotl", **BASE, **keys)
    assert {key: conversion.get(key) for key in expected} == expected
    assert gone is None or conversion.get(gone) is None


def test_a_dropped_key_has_a_line():
    conversion = convert("axolotl", **BASE, evals_per_epoch=4, flash_attention=True, xformers=None)
    text = conversion.write("head")
    assert "eval.per_epoch: there is nothing to evaluate" in text
    assert "flash_attention: the kernel follows" in text
    assert "xformers" not in text, "an empty key asks for nothing"


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        ({"data_files": ["x.jsonl"]}, "datasets.data_files = 'x.jsonl': a dataset here is one"),
        ({"type": "user_defined", "chosen_format": "{chosen}!"}, "datasets.chosen_format"),
        ({"system_prompt": "Be brief."}, "datasets.system_prompt = 'Be brief.': read in a table"),
    ],
)
def test_axolotl_keys_of_a_dataset_that_nothing_reads_have_a_line(dataset, line):
    assert line in convert("axolotl", **{**BASE, "datasets": [{"path": "a", **dataset}]}).write("")


def test_axolotl_keys_that_are_about_all_datasets():
    keys = {
        "streaming": True,
        "max_steps": 9,
        "test_datasets": [{"path": "t.jsonl"}],
        "val_set_size": 0.1,
    }
    conversion = convert("axolotl", **BASE, **keys, shuffle_before_merging_datasets=True)
    parts = [conversion.get(f"data.{name}")[0] for name in ("datasets", "eval_datasets")]
    assert all(part["streaming"] for part in parts)
    text = conversion.write("")
    assert "val_set_size: test_datasets is what is held out" in text
    assert "shuffle_before_merging_datasets: rows of all datasets" in text


def test_axolotl_prompts_of_a_format_are_no_alpaca_in_silence():
    kind = {"field_instruction": "q", "field_output": "a", "format": "[INST] {instruction} [/INST]"}
    dataset = {"path": "a.jsonl", "type": {**kind, "system_prompt": "Be {brief}."}}
    conversion = convert("axolotl", **{**BASE, "datasets": [dataset]})
    assert not conversion.missed and conversion.get("data.datasets") == [
        {
            "path": "a.jsonl",
            "format": "prompt_completion",
            "fields": {"instruction": "q", "completion": "a"},
            "column_formats": {
                "prompt": [
                    "Be {{brief}}.[INST] {instruction} [/INST]",
                    "Be {{brief}}.{instruction} ",  # theirs, where the file does not say
                ]
            },
        }
    ]
    bare = {"path": "a.jsonl", "type": {**kind, **BARE}}
    conversion = convert("axolotl", **{**BASE, "datasets": [bare]})
    assert not conversion.missed and conversion.get("data.datasets") == [
        {
            "path": "a.jsonl",
            "format": "prompt_completion",
            "fields": {"prompt": "q", "completion": "a"},
        }
    ]
    styled = {"path": "a.jsonl", "type": "alpaca:chat"}
    assert convert("axolotl", **{**BASE, "datasets": [styled]}).missed


def test_axolotl_pairs_with_formats_of_their_own():
    kind = {
        "field_chosen": "good",
        "prompt_format": "{system}Q: {prompt}",
        "chosen_format": "{chosen}!",
    }
    dataset = {"path": "a.jsonl", "type": kind}
    conversion = convert("axolotl", **{**BASE, "rl": "dpo", "datasets": [dataset]})
    assert not conversion.missed and conversion.get("data.datasets") == [
        {
            "path": "a.jsonl",
            "fields": {"chosen": "good"},
            "column_formats": {
                "prompt": ["{system}Q: {prompt}", "Q: {prompt}"],
                "chosen": "{chosen}!",
            },
        }
    ]


def test_axolotl_turns_that_train():
    dataset = {"path": "a.jsonl", "type": "chat_template", "roles_to_train": ["gpt", "tool"]}
    dataset |= {"train_on_eos": "last", "drop_system_message": True, "split_thinking": True}
    dataset["message_field_training_detail"] = "parts"
    conversion = convert("axolotl", **{**BASE, "datasets": [dataset]})
    assert not conversion.missed and conversion.get("data.datasets") == [
        {
            "path": "a.jsonl",
            "format": "chat",
            "roles_to_train": ["assistant", "tool"],
            "train_on_eot": "last",
            "drop_system_message": True,
            "split_thinking": True,
            "fields": {"messages.train_detail": "parts"},
        }
    ]


def test_an_expression_of_matrices_becomes_their_names():
    expression = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|q|k)_proj"
    conversion = convert("axolotl", **BASE, adapter="lora", lora_target_modules=expression)
    assert conversion.get("adapter.target") == ["q_proj", "k_proj", "up_proj"]
    some = r"model\.layers\.(3|7)\.self_attn\.q_proj"
    assert match_linears(some) == (["q_proj"], False) and match_linears("(") == ([], False)
    conversion = convert("axolotl", **BASE, adapter="lora", lora_target_modules=some)
    assert conversion.get("adapter.target") == [f"({some})"] and not conversion.missed
    layers = {"lora_target_modules": ["q_proj"], "peft_layers_to_transform": [0, 7]}
    conversion = convert("axolotl", **BASE, adapter="lora", **layers)
    target = [r"layers\.(0|7)\.(.*\.)?q_proj"]
    assert conversion.get("adapter.target") == target and not conversion.missed
    names = ["model.layers.0.self_attn.q_proj", "model.layers.7.self_attn.q_proj"]
    names += ["model.layers.17.self_attn.q_proj", "model.layers.7.self_attn.k_proj"]
    linears = {"q": AdaptableLinear(None, tuple(names), (4, 8, 8))}
    assert match_any(linears, "target", target) == {"q": [True, True, False, False]}
    layers["peft_layers_to_transform"] = {"first": 3}
    conversion = convert("axolotl", **BASE, adapter="lora", **layers)
    assert conversion.get("adapter.target") == ["q_proj"]
    assert [key for key, *_ in conversion.missed] == ["peft_layers_to_transform"]


def test_axolotl_ebft():
    ebft = {
        "feature_layers": [0.5],
        "embed_method": "concat",
        "use_whitening": True,
        "ce_coef": 0.1,
    }
    trl = {"num_generations": 4, "max_completion_length": 64, "loss_type": "grpo"}
    sizes = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
    conversion = convert("axolotl", **BASE, **sizes, rl="ebft", ebft=ebft, trl=trl)
    assert conversion.get("task") == {
        "kind": "ebft",
        "features": {"layers": [0.5], "pooling": "concat", "whitening": True},
        "ce_coef": 0.1,
        "objective": "grpo",
    }
    assert conversion.get("rollout") == {"group_size": 4, "prompts_per_step": 2}
    strided = {"mode": "strided", "stride": 4, "n_samples_per_prompt": 2, "top_p": 0.9}
    conversion = convert("axolotl", **BASE, **sizes, rl="ebft", ebft=strided)
    assert conversion.get("task") == {
        "kind": "ebft_strided",
        "stride": 4,
        "n_samples": 2,
        "top_p": 0.9,
    }
    assert conversion.get("data.micro_batch_size") == 2


def test_a_policy_draws_from_all_tokens():
    trl = {
        "num_generations": 4,
        "top_p": 0.9,
        "reward_funcs": ["a.py:f"],
        "max_completion_length": 600,
    }
    conversion = convert("axolotl", **{**BASE, "micro_batch_size": 4}, rl="grpo", trl=trl)
    assert ("top_p", 0.9) in [(key, value) for key, value, _ in conversion.missed]
    assert conversion.get("data.sequence_len") == 1624, "Axolotl's 512 hold no answer"


@pytest.mark.parametrize("size", [0, 8])
def test_log_probs_of_replayed_groups_go_with_a_buffer(size):
    trl = {"num_generations": 4, "reward_funcs": ["a.py:f"], "replay_recompute_logps": True}
    trl |= {"replay_buffer_size": size} if size else {}
    conversion = convert("axolotl", **{**BASE, "micro_batch_size": 4}, rl="grpo", trl=trl)
    assert conversion.get("rollout.replay_logp") == ("recomputed" if size else None)
    assert ("trl.replay_recompute_logps" in str(conversion.dropped)) == (not size)


def test_parameters_of_generation_go_where_they_are_read(tmp_path):
    flags = {"generation_kwargs": {"min_tokens": 8, "stop": "END", "repetition_penalty": 1.1}}
    flags |= {"vllm_structured_outputs_regex": "(yes|no)", "reward_funcs": ["f.py:r"]}
    common = {"model_name_or_path": "m", "dataset_name": "d", **flags}
    served = convert("trl", **common, use_vllm=True)
    sampling = served.get("sampling")
    assert sampling["structured_outputs"] == {"regex": "(yes|no)"} and sampling["stop"] == ["END"]
    assert served.get("rollout.vllm.generation_kwargs") == {"min_tokens": 8}
    missed = {key for key, *_ in served.missed}
    assert missed == {"generation_kwargs.repetition_penalty"}
    local = convert("trl", **common)
    assert local.get("rollout.vllm") is None and local.get("sampling") == sampling
    assert {key for key, *_ in local.missed} == missed | {"generation_kwargs.min_tokens"}
    command = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs f.py:r --use_vllm"
    text = f"""{command} --generation_kwargs '{{"min_tokens": 8, "temperature": 0.9}}'"""
    code, ours, _ = run(tmp_path, {"a.sh": text})
    assert code == 0 and ours["rollout"]["vllm"]["generation_kwargs"] == {"min_tokens": 8}
    assert ours["sampling"]["temperature"] == 0.9, "as there, they replace the other keys"
    trl = {"use_vllm": True, "reward_funcs": ["a.py:f"], "generation_kwargs": {"bad_words": ["x"]}}
    conversion = convert("axolotl", **{**BASE, "micro_batch_size": 4}, rl="grpo", trl=trl)
    assert conversion.get("rollout.vllm.generation_kwargs") == {"bad_words": ["x"]}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # Microsteps: 4 of them are the one step of a generation.
        ("--gradient_accumulation_steps 4 --steps_per_generation 4", (4, None)),
        ("--gradient_accumulation_steps 4 --steps_per_generation 8", (8, 2)),
        ("--gradient_accumulation_steps 4", (4, None)),
        ("--generation_batch_size 32", (4, 4)),
        ("--gradient_accumulation_steps 4 --steps_per_generation 6", (4, None)),
        ("", (1, None)),
    ],
)
def test_a_round_of_trl(tmp_path, flags, expected):
    command = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs f.py:r"
    sizes = "--num_generations 8 --per_device_train_batch_size 8"
    code, ours, output = run(tmp_path, {"a.sh": f"{command} {sizes} {flags}"})
    assert code == 0
    task, rollout = ours["task"], ours["rollout"]
    assert (rollout["prompts_per_step"], task.get("num_minibatches")) == expected
    assert load_config(output).optim.gradient_accumulation_steps == 1
    assert ("48 of a generation are no whole number" in output.read_text()) == ("6" in flags)


def test_a_command_reads_the_files_that_it_names(tmp_path):
    line = "python -m trl.scripts.sft --config acc.yml --learning_rate 1e-3"
    yaml = "model_name_or_path: m\ndataset_name: d\nlearning_rate: 1e-5\nmax_length: 512\n"
    code, ours, output = run(tmp_path, {"a.sh": line, "acc.yml": yaml})
    assert code == 0 and ours["data"]["sequence_len"] == 512
    assert ours["optim"]["learning_rate"] == 1e-3, "flags win"
    output.unlink()
    line = (
        "accelerate launch --config_file no.yaml sft.py --config none.yaml --model_name_or_path m"
    )
    _, _, output = run(tmp_path, {"a.sh": f"{line} --dataset_name d"})
    text = output.read_text()
    assert "config_file = 'no.yaml': no such file" in text and "config = 'none.yaml'" in text


def test_accelerate_starts_a_script_of_any_name(tmp_path):
    lines = """#!/bin/bash
export WANDB_API_KEY=secret-of-mine
cd work && ls
accelerate launch --config_file acc.yml examples/train_grpo.py \\
  --model_name_or_path m --dataset_name d --reward_funcs f.py:r --hub_token hf_abc && echo done
"""
    files = {"a.sh": lines, "acc.yml": "num_processes: 4\ndistributed_type: MULTI_GPU\n"}
    code, ours, output = run(tmp_path, files)
    assert code == 0 and ours["task"]["kind"] == "rl"
    assert ours["rollout"] == {"group_size": 8, "prompts_per_step": 4}
    text = output.read_text()
    assert "hf_abc" not in text and "secret-of-mine" not in text and "4 device(s)" in text
    plain = (
        "torchrun --nproc_per_node 2 my.py --model_name_or_path m --dataset_name d --max_steps 3"
    )
    output.unlink()
    code, ours, _ = run(tmp_path, {"b.sh": plain})
    assert code == 0 and "task" not in ours and ours["run"]["max_steps"] == 3


def test_secrets_are_written_nowhere(tmp_path, capsys):
    text = """
base_model: https://me:pass-word@host/model
comet_api_key: top-secret
env: {WANDB_API_KEY: top-secret, list: [{token: top-secret}]}
datasets: [{path: "https://host/a.jsonl?token=top-secret"}]
num_epochs: 1
rl: grpo
trl: {use_vllm: true, vllm_server_host: "me:pass-word@host", reward_funcs: [f.py:r]}
"""
    code, ours, output = run(tmp_path, {"a.yml": text})
    written = output.read_text() + capsys.readouterr().out
    assert "top-secret" not in written and "pass-word" not in written
    assert "<not-saved>" in ours["model"]["path"]
    assert main(["convert", str(tmp_path / "a.yml")]) in (0, 1)
    printed = capsys.readouterr().out
    assert "top-secret" not in printed and "pass-word" not in printed


LLAMA = """
model_name_or_path: some/model
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: chats, mine
template: qwen3
cutoff_len: 4096
max_samples: 100
buffer_size: 256
learning_rate: 1.0e-4
ddp_timeout: 180000000
val_size: 0.1
eval_strategy: steps
eval_steps: 500
bf16: true
"""
INFO = {
    "chats": {
        "hf_hub_url": "some/chats",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations"},
        "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human"},
    },
    "mine": {"file_name": "mine.json", "columns": {"prompt": "q", "response": "a", "audios": "i"}},
    "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"chosen": "good"}},
}


def test_llama_factory(tmp_path):
    files = {"data/dataset_info.json": json.dumps(INFO), "a.yaml": LLAMA}
    code, ours, output = run(tmp_path, files)
    assert code == 0
    assert ours["data"]["datasets"] == [
        {
            "path": "some/chats",
            "format": "chat",
            "max_rows": 100,
            "fields": {
                "messages": "conversations",
                "messages.role": "from",
                "messages.content": "value",
            },
            "roles": {"human": "user"},
        },
        {
            "path": "data/mine.json",
            "format": "alpaca",
            "as_chat": True,
            "max_rows": 100,
            "fields": {"instruction": "q", "output": "a"},
        },
    ]
    # Theirs is twice the rank where lora_alpha is unset.
    assert ours["adapter"] == {"target": "all-linear", "rank": 8, "alpha": 16.0, "kind": "lora"}
    assert (ours["optim"]["lr_scheduler"], ours["run"]["num_epochs"]) == ("linear", 3.0)
    assert ours["data"]["shuffle_buffer"] == 256
    assert ours["eval"] == {"every": 500} and ours["parallel"]["meet_timeout"] == 1e6
    assert "mine.columns.audios" in output.read_text()


@pytest.mark.parametrize(
    ("keys", "task"),
    [
        ({"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2.0}, {"loss": "simpo", "beta": 2.0}),
        ({"stage": "dpo"}, {"loss": "sigmoid"}),
        ({"stage": "kto"}, {"loss": "kto"}),
        ({"stage": "rm"}, {"kind": "reward_model"}),
    ],
)
def test_stages_of_llama_factory(keys, task):
    keys |= {"model_name_or_path": "m", "dataset": "pairs", "dataset_info": INFO}
    conversion = convert("llama-factory", **keys, finetuning_type="full")
    assert conversion.get("task") == {"kind": "preference", **task}
    (dataset,) = conversion.get("data.datasets")
    assert dataset["fields"] == {"chosen": "good"}
    ppo = SYSTEMS["llama-factory"].convert({**keys, "stage": "ppo"})
    assert ppo.get("task.kind") == "ppo" and ppo.missed, "no SFT in the place of another method"


def test_variables_of_the_chat_template():
    thinking = {"enable_thinking": False}
    conversion = convert("axolotl", **BASE, chat_template_kwargs=thinking)
    assert conversion.get("model.chat_template_kwargs") == thinking
    keys = {"model_name_or_path": "m", "stage": "sft", "dataset": "a.jsonl"}
    conversion = convert("llama-factory", **keys, **thinking)
    assert conversion.get("model.chat_template_kwargs") == thinking
    sampling = {"extra_body": {"chat_template_kwargs": thinking, "top_k": 20}}
    orchestrator = {"train": {"env": [{"id": "x"}], "sampling": sampling}}
    conversion = convert("prime-rl", model={"name": "m"}, orchestrator=orchestrator)
    assert conversion.get("model.chat_template_kwargs") == thinking
    assert "top_k" in [key for key, *_ in conversion.missed]


TEACHER = "--model_name_or_path m --teacher_model_name_or_path t --dataset_name d"


@pytest.mark.parametrize(
    ("line", "share", "beta", "temperatures"),
    [
        (f"python trl/scripts/distillation.py {TEACHER}", 1.0, 1.0, (1.0, 1.0)),
        (f"python examples/scripts/gkd.py {TEACHER}", 0.5, 0.5, (None, 0.9)),
        (f"python gkd.py {TEACHER} --lmbda 0 --beta 0.1", 0, 0.1, (None, 0.9)),
        (f"python mine.py {TEACHER} --temperature 2", 1.0, 1.0, (2, 2)),
    ],
)
def test_trl_distills(line, share, beta, temperatures):
    """Temperatures are those of the loss and of answers; TRL's GKDTrainer has the second alone."""
    keys = trl.parse_command(f"{line} --per_device_train_batch_size 4")
    conversion = convert("trl", **keys)
    task = conversion.get("task")
    assert (task["kind"], task["teacher"]) == ("distillation", {"path": "t"})
    assert (task["on_policy_share"], task["beta"]) == (share, beta)
    actual = task.get("temperature"), conversion.get("sampling.temperature")
    assert actual == temperatures
    rollout = {"group_size": 1, "prompts_per_step": 4} if share else None
    assert conversion.get("rollout") == rollout


@pytest.mark.parametrize("name", ["gold", "bco", "nash_md"])
def test_trl_scripts_of_other_methods_are_no_sft(name):
    keys = trl.parse_command(f"python examples/scripts/{name}.py --model_name_or_path m")
    with pytest.raises(UserError, match=f"task.kind.*'{name}'"):
        convert("trl", **keys, dataset_name="d")
