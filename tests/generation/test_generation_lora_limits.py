"""Adapters that no server of a run would serve are refused before it starts; needs no vLLM."""

import json
import sys
from pathlib import Path

import pytest
from tiny_vision import VISION

from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.config import validate_config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.distributed import gpus
from jaxtrain.errors import UserError
from jaxtrain.generation.vllm import factory as opening
from jaxtrain.models import families
from jaxtrain_vllm import serve

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from make_models_table import tiny_configs

RAW = {name: raw for name, (_, raw) in tiny_configs().items()}

RAW["towers"] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": RAW["qwen3_5_moe"],
}


RAW["pictures"] = {**VISION["qwen3_vl"], "architectures": ["Qwen3VLForConditionalGeneration"]}


def config_of(**vllm):
    table = {
        "run": {"max_steps": 1, "output_dir": "out"},
        "task": {"kind": "rl"},
        "model": {"path": "some/model"},
        "adapter": {"kind": "lora"},
        "data": {"datasets": [{"path": "builtin:calculator"}]},
        "env": {"kind": "calculator"},
        "sampling": {"temperature": 1.0},
        "rollout": {"engine": "vllm", "vllm": {"sync": "lora", **vllm}},
    }
    return validate_config(table, "test")


GIVEN = {"servers": ["http://127.0.0.1:1"]}
LOCAL = {"launch": "local"}


@pytest.fixture(autouse=True)
def one_gpu_for_the_servers(monkeypatch):
    monkeypatch.setattr(gpus, "_for_servers", ["0"])
    monkeypatch.setattr(opening, "check_python", lambda python: None)


def check(name, vllm, target="all-linear", ranks=None):
    architecture = families.config_from_hf(RAW[name])
    slots = choose_slots(find_linears(architecture), [target], LoRASpec(4, 8.0), ranks or {}, {})
    parts = ModelBundle(None, architecture, None, None, {}, Adapter(slots))
    opening.VllmKind().check(config_of(**vllm), parts)


@pytest.mark.parametrize("target", ["all-linear", "attention"])
def test_a_mixture_on_a_cpu_is_refused_whatever_is_adapted(monkeypatch, target):
    monkeypatch.setattr(gpus, "_for_servers", [])
    with pytest.raises(UserError, match=r'mixture of experts.*CPU.*rollout\.engine to "local"'):
        check("qwen3_moe", LOCAL, target)
    check("nemotron_h", LOCAL, target)


@pytest.mark.parametrize(
    "name, has, wants",
    [
        ("granitemoehybrid", "one pair for all experts", "a pair for each expert"),
        ("towers", "a pair for each expert", "one pair for all experts"),
    ],
)
def test_experts_in_the_form_that_vllm_refuses_are_refused(name, has, wants):
    with pytest.raises(UserError, match=rf"experts\.gate.* has {has}.* takes {wants}.*target"):
        check(name, GIVEN)
    check(name, GIVEN, "attention")


def test_ranks_that_differ_are_refused():
    with pytest.raises(UserError, match=r"one rank and alpha; remove adapter\.rank_pattern"):
        check("nemotron_h", GIVEN, "attention", {"q_proj": 2})


def test_keys_that_are_values_too_are_refused():
    """Seen with Gemma 4 in vLLM 0.32: log-probs differ by 0.09 and no word is said."""
    with pytest.raises(UserError, match=r"full\.attention\.k, which makes the values.*target"):
        check("gemma4", GIVEN, "attention")
    check("gemma4", GIVEN, "mlp")


def test_a_module_that_vllm_does_not_know_is_refused():
    with pytest.raises(UserError, match=r"mlp\.gate.* Glm4ForCausalLM's gate_up_proj.*target"):
        check("glm4", GIVEN)
    check("glm4", GIVEN, "attention")


@pytest.mark.parametrize("vllm", [GIVEN, LOCAL])
def test_what_vllm_may_take_is_left_to_it(vllm):
    for name in ("qwen3_moe", "gpt_oss"):
        check(name, vllm)


@pytest.mark.slow
def test_serve_refuses_a_mixture_on_a_cpu_by_its_config_json(monkeypatch, tmp_path, capsys):
    for name, raw in RAW.items():
        architecture = families.config_from_hf(raw)
        (tmp_path / "config.json").write_text(json.dumps(architecture.to_hf()))
        mixture = architecture.experts_per_token is not None
        assert serve.has_experts(str(tmp_path)) == mixture, name
    assert not serve.has_experts("some/model")

    (tmp_path / "config.json").write_text(json.dumps(RAW["qwen3_moe"]))
    command = ["serve", "--model", str(tmp_path), "--sync", "lora"]
    started = []
    monkeypatch.setattr(serve.os, "execve", lambda *command: started.append(command))
    for cpu in (True, False):
        monkeypatch.setattr(serve, "runs_on_cpu", lambda cpu=cpu: cpu)
        monkeypatch.setattr(sys, "argv", command)
        if cpu:
            with pytest.raises(SystemExit):
                serve.main()
            assert "is a mixture of experts, which vLLM on a CPU" in capsys.readouterr().err
        else:
            serve.main()
    assert len(started) == 1


def test_an_adapter_of_what_reads_images_is_refused():
    for target in ("tower", "projector"):
        with pytest.raises(UserError, match=r"reaches vision\..* name only Linears of the text"):
            check("pictures", GIVEN, target)
    check("pictures", GIVEN)
