"""The config: typed sections, how they are read, and their documentation."""

from jaxtrain.config.adapter import AdapterConfig
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.config.dflash import DFlashTask
from jaxtrain.config.diffusion import DiffusionTask
from jaxtrain.config.distillation import DistillationTask, TeacherConfig
from jaxtrain.config.draft import DraftConfig, DraftTask, TargetConfig
from jaxtrain.config.eagle3 import Eagle3Task
from jaxtrain.config.ebft import EBFTTask, FeatureConfig
from jaxtrain.config.ebft_strided import EBFTStridedTask
from jaxtrain.config.env import EnvConfig
from jaxtrain.config.evals import EvalSetConfig
from jaxtrain.config.load import load_config, validate_config
from jaxtrain.config.model import ModelConfig, OptimConfig
from jaxtrain.config.policies import PolicyConfig
from jaxtrain.config.preference import PreferenceTask
from jaxtrain.config.reward_model import RewardModelTask
from jaxtrain.config.rewards import RewardConfig
from jaxtrain.config.rl import PolicyTask, RLTask
from jaxtrain.config.rollout import RolloutConfig
from jaxtrain.config.root import Config
from jaxtrain.config.run import CheckpointConfig, LogConfig, ParallelConfig, RunConfig
from jaxtrain.config.task import EvalConfig, SamplingConfig, SFTTask, TreeTask
from jaxtrain.config.vllm import VllmConfig

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "Config",
    "DFlashTask",
    "DataConfig",
    "DatasetConfig",
    "DistillationTask",
    "DraftConfig",
    "DraftTask",
    "DiffusionTask",
    "EBFTStridedTask",
    "EBFTTask",
    "Eagle3Task",
    "EnvConfig",
    "EvalConfig",
    "EvalSetConfig",
    "FeatureConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PolicyConfig",
    "PolicyTask",
    "PreferenceTask",
    "RLTask",
    "RewardConfig",
    "RewardModelTask",
    "RolloutConfig",
    "RunConfig",
    "SFTTask",
    "SamplingConfig",
    "TargetConfig",
    "TeacherConfig",
    "TreeTask",
    "VllmConfig",
    "load_config",
    "validate_config",
]
