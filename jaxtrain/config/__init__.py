"""The config: typed sections, how they are read, and their documentation.

The section of a method is in its folder: jaxtrain/methods/NAME/config.py.
"""

import importlib
import warnings
from typing import Any

from jaxtrain.config.adapter import AdapterConfig
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.config.env import EnvConfig
from jaxtrain.config.evals import EvalConfig, EvalSetConfig
from jaxtrain.config.load import load_config, validate_config
from jaxtrain.config.model import ModelConfig, OptimConfig
from jaxtrain.config.policies import PolicyConfig
from jaxtrain.config.rewards import RewardConfig
from jaxtrain.config.rollout import RolloutConfig
from jaxtrain.config.root import Config
from jaxtrain.config.run import CheckpointConfig, LogConfig, ParallelConfig, RunConfig
from jaxtrain.config.task import SamplingConfig
from jaxtrain.config.vllm import VllmConfig

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DatasetConfig",
    "EnvConfig",
    "EvalConfig",
    "EvalSetConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PolicyConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "VllmConfig",
    "load_config",
    "validate_config",
]

MOVED = {
    "DFlashTask": "drafts",
    "DiffusionTask": "diffusion",
    "DistillationTask": "distillation",
    "DraftConfig": "drafts",
    "DraftTask": "drafts",
    "EBFTStridedTask": "ebft",
    "EBFTTask": "ebft",
    "Eagle3Task": "drafts",
    "FeatureConfig": "ebft",
    "PolicyTask": "rl",
    "PreferenceTask": "preference",
    "RLTask": "rl",
    "RewardModelTask": "reward_model",
    "SFTTask": "sft",
    "TargetConfig": "drafts",
    "TeacherConfig": "distillation",
    "TreeTask": "trees",
}
"""Sections that were exported here, and the folder of jaxtrain/methods where each is now."""


def __getattr__(name: str) -> Any:
    """Import a method's section by its old place, with a warning."""
    if name not in MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"jaxtrain.methods.{MOVED[name]}.config"
    warnings.warn(f"import {name} from {module}, not from {__name__}", DeprecationWarning, 2)
    return getattr(importlib.import_module(module), name)
