"""Typed configuration: the run YAML, the DeepSpeed JSON and their composition. Imports no torch."""

from ds_gpt.config.compose import Composed, compose, load
from ds_gpt.config.errors import ConfigError, NeedsAttention, Problem, RunStopped
from ds_gpt.config.files import flatten
from ds_gpt.config.hardware import Hardware
from ds_gpt.config.parallel import ParallelConfig
from ds_gpt.config.run import ModelConfig, RunConfig

__all__ = ["Composed", "ConfigError", "Hardware", "ModelConfig", "NeedsAttention", "ParallelConfig", "Problem", "RunConfig", "RunStopped", "compose", "flatten", "load"]
