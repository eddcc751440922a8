"""Serving: which requests run, where their keys and values are, what the next token is."""

from jattn.serving.block_manager import BlockManager
from jattn.serving.engine import Engine, EngineStats
from jattn.serving.generation import GenerationMetrics, GenerationResult, StreamedToken
from jattn.serving.sampler import SamplingParams
from jattn.serving.scheduler import Scheduler, Step

__all__ = [
    "BlockManager",
    "Engine",
    "EngineStats",
    "GenerationMetrics",
    "GenerationResult",
    "SamplingParams",
    "Scheduler",
    "Step",
    "StreamedToken",
]
