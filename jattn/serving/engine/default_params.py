"""What a request gets that says nothing of sampling."""

from typing import Any

from jattn.models.generation_config import FILE, GenerationConfig
from jattn.serving.engine.sampling_params import SamplingParams


def default_params(model: Any) -> SamplingParams:
    """The sampling parameters that a model's checkpoint asks for; greedy where it does not ask for sampling.

    As in transformers, temperature and filters count only with do_sample; repetition_penalty always does.
    What the file does not state is as SamplingParams has it, but for a temperature of 1.

    Raises:
        ValueError: A value is out of its range; the message names the file.

    Source: vLLM `ModelConfig.get_diff_sampling_param`; there do_sample is not looked at.
    """
    config = getattr(model, "generation_config", None) or GenerationConfig()
    told = config.told()
    if config.do_sample:
        told = {"temperature": 1.0} | told
    else:
        told = {name: value for name, value in told.items() if name == "repetition_penalty"}
    try:
        return SamplingParams(**told)
    except ValueError as error:
        raise ValueError(f"{FILE}: {error}") from error


def as_told(params: SamplingParams) -> str:
    """The values that differ from SamplingParams' own, in words; empty where none does."""
    own = SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = ((name, getattr(params, name)) for name in names)
    return ", ".join(f"{name} {value:g}" for name, value in values if value != getattr(own, name))
