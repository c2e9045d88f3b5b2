"""The config: typed sections, how they are read, and their documentation."""

from jaxtrain.config.adapter import AdapterConfig
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.config.load import load_config, validate_config
from jaxtrain.config.model import ModelConfig, OptimConfig
from jaxtrain.config.root import Config
from jaxtrain.config.run import CheckpointConfig, LogConfig, ParallelConfig, RunConfig
from jaxtrain.config.task import EvalConfig, SamplingConfig, SFTTask, TreeTask

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DatasetConfig",
    "EvalConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
    "SFTTask",
    "SamplingConfig",
    "TreeTask",
    "load_config",
    "validate_config",
]
