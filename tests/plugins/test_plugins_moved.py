"""Import paths that earlier versions documented for plugins still work, with a warning."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain import moved, plugins
from jaxtrain.config.load import load_config

REPO = Path(__file__).parents[2]
OLD_NAMES = """
core.assemble: assemble assemble_beside Parts find_tokenizer
core.export: export_model
core.roles: Role
core.task: Task Data Method Round
data.calculator: CalculatorRows
data.messages: read_messages
data.readers: Part
data.sample: Sample
data.sequences: Sequences
data.template: load_tokenizer
envs.open: open_env
envs.policy_server: PolicyServer
envs.scripted: Script ScriptedSpeaker
envs.single_turn: SingleTurn
envs.solver_verifier: solve_and_verify
losses.logp: token_logp
losses.nll: nll_loss
models.windows: windowed_layers
observers.types: Run Observer Verdict
parallel.mesh: is_main_process
rewards.load: call_function find_function NotFinite
rewards.python_tests: find_program
rewards.texts: text_of
rollout.types: Ask Completion DraftPublisher Engine EngineKind Env Episode EpisodeFailed
rollout.types: FinishReason Group KeepLost Keeping KeptEngine Publisher Reply Sampling Shared
rollout.types: Speaker TokenSequence as_game pause_before
sandbox.run: run_python
tasks.offline: OfflineData check_packing
tasks.rl: make open_data
tasks.sft: make open_data
tasks.tree: make open_data
"""
PAIRS = [
    (module, name)
    for line in OLD_NAMES.strip().splitlines()
    for module, _, names in [line.partition(": ")]
    for name in names.split()
]
SECTIONS = (
    "DFlashTask DiffusionTask DistillationTask DraftConfig DraftTask EBFTStridedTask EBFTTask"
    " Eagle3Task FeatureConfig PolicyTask PreferenceTask RLTask RewardModelTask SFTTask"
    " TargetConfig TeacherConfig TreeTask"
).split()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module, name", PAIRS)
def test_old_names_are_still_there(module, name):
    assert getattr(importlib.import_module(f"jaxtrain.{module}"), name) is not None


def test_a_moved_name_says_its_new_place():
    with pytest.warns(DeprecationWarning, match=r"types\.Ask is now .*engine\.PromptRequest"):
        from jaxtrain.rollout.types import Ask  # noqa: F401
    with pytest.warns(DeprecationWarning, match="import RLTask from jaxtrain.methods.rl.config"):
        from jaxtrain.config import RLTask  # noqa: F401


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SECTIONS)
def test_sections_of_methods_are_still_in_config(name):
    from jaxtrain import config

    assert getattr(config, name).__module__.startswith("jaxtrain.methods.")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_config_may_name_a_moved_function():
    path = "jaxtrain.envs.solver_verifier:solve_and_verify"
    assert plugins.find("envs", path, {}, key="env.kind").__name__ == "solve_and_verify"
    config = load_config(REPO / "configs/rl_solver_verifier.toml", [f"env.kind={path}"])
    assert config.env.kind == path


@pytest.mark.parametrize("name", ["jaxtrain.rollout.nothing", "jaxtrain.nothing"])
def test_other_modules_are_unknown(name):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


def test_other_names_of_a_moved_module_are_unknown():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module("jaxtrain.envs").nothing  # noqa: B018


@pytest.mark.parametrize("old", [*moved.PACKAGES, *moved.MODULES])
def test_every_row_of_the_tables_leads_somewhere(old):
    places = moved.find_places(f"jaxtrain.{old}")
    assert places and all(importlib.util.find_spec(position) for position in places)


@pytest.mark.slow
def test_sections_of_methods_import_in_any_order():
    for first in ("jaxtrain.methods.rl.config", "jaxtrain.config.refresh", "jaxtrain.methods"):
        subprocess.run([sys.executable, "-c", f"import {first}, jaxtrain.config"], check=True)
