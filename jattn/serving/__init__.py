"""Serving: which requests run, where their keys and values are, what the next token is."""

from jattn.serving.block_manager import BlockManager
from jattn.serving.engine import Engine, EngineStats
from jattn.serving.generation import GenerationMetrics, GenerationResult, StreamedToken
from jattn.serving.sampler import SamplingParams
from jattn.serving.scheduler import Scheduler, Step
from jattn.serving.served_model import ServedModel

__all__ = [
    "BlockManager",
    "Engine",
    "EngineStats",
    "GenerationMetrics",
    "GenerationResult",
    "SamplingParams",
    "Scheduler",
    "ServedModel",
    "Step",
    "StreamedToken",
]
