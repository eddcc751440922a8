"""Serve models with continuous batching: the engine, its parameters and its results."""

from typing import TYPE_CHECKING

from jattn.lazy_imports import lazy_attributes

if TYPE_CHECKING:
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

_MODULES = {
    "AsyncEngine": "jattn.serving.engine.async_engine",
    "BlockManager": "jattn.serving.engine.block_manager",
    "Engine": "jattn.serving.engine.engine",
    "EngineStats": "jattn.serving.engine.stats",
    "GenerationMetrics": "jattn.serving.engine.outputs",
    "GenerationResult": "jattn.serving.engine.outputs",
    "Logprob": "jattn.serving.engine.logprobs",
    "NgramProposer": "jattn.serving.engine.proposer",
    "RequestError": "jattn.serving.engine.outputs",
    "RequestOutput": "jattn.serving.engine.outputs",
    "SamplingParams": "jattn.serving.engine.sampling_params",
    "Scheduler": "jattn.serving.engine.scheduler",
    "ServedModel": "jattn.serving.engine.served_model",
    "Step": "jattn.serving.engine.scheduled_step",
    "StreamedToken": "jattn.serving.engine.outputs",
    "StructuredOutputsParams": "jattn.serving.engine.structured_outputs",
}
__all__ = [*_MODULES]
__getattr__ = lazy_attributes(__name__, _MODULES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
