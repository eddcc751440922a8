"""Serve models with continuous batching: the engine, its parameters and its results."""

from jattn.serving.engine.async_engine import AsyncEngine
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.engine import Engine
from jattn.serving.engine.logprobs import Logprob
from jattn.serving.engine.outputs import (
    GenerationMetrics,
    GenerationResult,
    RequestError,
    RequestOutput,
    StreamedToken,
)
from jattn.serving.engine.proposer import NgramProposer
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.stats import EngineStats
from jattn.serving.engine.structured_outputs import StructuredOutputsParams

__all__ = [
    "AsyncEngine",
    "BlockManager",
    "Engine",
    "EngineStats",
    "GenerationMetrics",
    "GenerationResult",
    "Logprob",
    "NgramProposer",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "ServedModel",
    "Step",
    "StreamedToken",
    "StructuredOutputsParams",
]
