"""The config: typed sections, how they are read, and their documentation."""

from jaxtrain.config.adapter import AdapterConfig
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.config.env import EnvConfig
from jaxtrain.config.evals import EvalSetConfig
from jaxtrain.config.load import load_config, validate_config
from jaxtrain.config.model import ModelConfig, OptimConfig
from jaxtrain.config.policies import PolicyConfig
from jaxtrain.config.rewards import RewardConfig
from jaxtrain.config.rollout import RolloutConfig
from jaxtrain.config.root import Config
from jaxtrain.config.run import CheckpointConfig, LogConfig, ParallelConfig, RunConfig
from jaxtrain.config.task import EvalConfig, SamplingConfig, SFTTask, TreeTask
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.methods.diffusion.config import DiffusionTask
from jaxtrain.methods.distillation.config import DistillationTask, TeacherConfig
from jaxtrain.methods.drafts.config import DraftConfig, DraftTask, TargetConfig
from jaxtrain.methods.drafts.dflash_config import DFlashTask
from jaxtrain.methods.drafts.eagle3_config import Eagle3Task
from jaxtrain.methods.ebft.config import EBFTTask, FeatureConfig
from jaxtrain.methods.ebft.strided_config import EBFTStridedTask
from jaxtrain.methods.preference.config import PreferenceTask
from jaxtrain.methods.reward_model.config import RewardModelTask
from jaxtrain.methods.rl.config import PolicyTask, RLTask

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
