"""Serving: which requests run, where their keys and values are, what the next token is."""

from jattn.serving.async_engine import AsyncEngine
from jattn.serving.block_manager import BlockManager
from jattn.serving.engine import Engine
from jattn.serving.logprobs import Logprob
from jattn.serving.ngram_proposer import NgramProposer
from jattn.serving.outputs import (
    GenerationMetrics,
    GenerationResult,
    RequestError,
    RequestOutput,
    StreamedToken,
)
from jattn.serving.sampling_params import SamplingParams
from jattn.serving.scheduled_step import Step
from jattn.serving.scheduler import Scheduler
from jattn.serving.served_model import ServedModel
from jattn.serving.stats import EngineStats
from jattn.serving.structured_outputs import StructuredOutputsParams

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
