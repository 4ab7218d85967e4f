"""MoE layers as data: model x shard x phase gives a gate_up and a down problem and the token counts to look at."""

from chord_lab.scenarios.catalog import PHASES, Scenario, TokenPoint, get_scenario, make_scenario, scenario_names
from chord_lab.scenarios.huggingface import ModelConfig, model_config, read_config
from chord_lab.scenarios.models import MODELS, ModelShape
from chord_lab.scenarios.quantization import Quantization, find_quantization
from chord_lab.scenarios.shards import PROJECTIONS, Projection, Shard, ShardRow, shard_problem, shard_table

__all__ = [
    "MODELS",
    "PHASES",
    "PROJECTIONS",
    "ModelConfig",
    "ModelShape",
    "Projection",
    "Quantization",
    "Scenario",
    "Shard",
    "ShardRow",
    "TokenPoint",
    "find_quantization",
    "get_scenario",
    "make_scenario",
    "model_config",
    "read_config",
    "scenario_names",
    "shard_problem",
    "shard_table",
]
