"""Build an engine's components from the arguments of `Engine`, and validate the arguments."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from jattn.batch.bucket import Bucket
from jattn.serving.engine.config import StepLimits, default_step_sizes
from jattn.serving.engine.engine_core import EngineCore
from jattn.serving.engine.input_processor import InputProcessor, PromptLimits
from jattn.serving.engine.processes import ProcessGroup, make_process_group
from jattn.serving.engine.runner import Runner
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.served_model import ServedModel, resolve_model
from jattn.serving.engine.speculative import DraftConfig, Speculation, make_draft_config, make_speculation
from jattn.serving.engine.warmup import use_compilation_cache
from pallas_kernels.checks import require_type


class SizeOptions(NamedTuple):
    """Arguments of `Engine` that limit the size of steps and requests."""

    block_size: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    batch_invariant: bool

    def limits(self, buckets: Sequence[Bucket] | None) -> StepLimits:
        """Return the limits of a step, with the device's defaults for arguments that are None.

        The default number of requests does not exceed the number of tokens per step.
        """
        seqs, tokens = default_step_sizes(fills_buckets=self.batch_invariant is True or buckets is not None)
        if self.max_num_batched_tokens is not None:
            tokens = self.max_num_batched_tokens
        if self.max_num_seqs is not None:
            seqs = self.max_num_seqs
        elif isinstance(tokens, int) and tokens > 0:
            seqs = min(seqs, tokens)
        return StepLimits(self.block_size, seqs, tokens, self.max_model_len, self.batch_invariant)


class CacheOptions(NamedTuple):
    """Arguments of `Engine` that describe the KV caches."""

    num_blocks: int | None
    cache_bytes: int | None
    cache_dtype: DTypeLike | None
    quantization: str | None
    skip_layers: Sequence[int]

    @property
    def cache_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `ServedModel.cache_specs` and `create_caches` other than sizes."""
        names = {"quantization": self.quantization, "skip_layers": self.skip_layers}
        return {"dtype": self.cache_dtype, **names}


class DraftOptions(NamedTuple):
    """Arguments of `Engine` that configure speculative decoding."""

    speculative: Any
    num_speculative_tokens: int


class StepOptions(NamedTuple):
    """Arguments of `Engine` that configure how steps run."""

    buckets: Sequence[Bucket] | None
    implementation: str | Sequence[str] | None
    cascade_attention: bool | None
    check_batches: bool


class EngineComponents(NamedTuple):
    """The components of an engine.

    Attributes:
        model: The served model.
        scheduler: Chooses the requests of each step.
        runner: Owns the KV caches and runs steps.
        core: The engine loop over the scheduler and the runner.
        input_processor: Converts prompts to requests.
        processes: The processes that run this engine together; None for a single process.
        speculation: Decides when to draft; None without speculative decoding.
    """

    model: ServedModel
    scheduler: Scheduler
    runner: Runner
    core: EngineCore
    input_processor: InputProcessor
    processes: ProcessGroup | None
    speculation: Speculation | None


def build_components(
    model: Any,
    sizes: SizeOptions,
    cache: CacheOptions,
    drafts: DraftOptions,
    steps: StepOptions,
    enable_prefix_caching: bool,
    cache_dir: str | os.PathLike[str] | None,
) -> EngineComponents:
    """Load the model if necessary, and create the components of an engine. Nothing is compiled.

    Args:
        model: The model or its folder; see `Engine`.
        sizes: Limits of steps and requests.
        cache: Options of the KV caches.
        drafts: Options of speculative decoding.
        steps: Options of how steps run.
        enable_prefix_caching: Whether requests reuse cached prefixes.
        cache_dir: Folder for compiled executables; see `Engine`.

    Raises:
        ValueError, NotImplementedError, FileNotFoundError: As for `Engine`.
    """
    limits = sizes.limits(steps.buckets)
    limits.check(cache.skip_layers, num_blocks=cache.num_blocks, cache_bytes=cache.cache_bytes)
    limits.check_features(enable_prefix_caching, drafts.speculative, steps.cascade_attention, steps.buckets)
    require_type("check_batches", steps.check_batches, bool, "True or False")
    use_compilation_cache(cache_dir)
    model = resolve_model(model)
    draft_config = make_draft_config(*drafts, model, limits)
    processes = make_process_group(getattr(model, "mesh", None))
    limits = limits.for_context_parallel(model, draft_config.model)
    num_blocks = limits.resolve_num_blocks(
        model, cache.num_blocks, cache.cache_bytes, cache.cache_arguments, draft_config.model
    )
    if processes is not None:
        options = _shared_options(limits._replace(block_size=sizes.block_size), cache, steps, draft_config)
        num_blocks = processes.agree_on_num_blocks(num_blocks, options | model_options(model))
    scheduler = limits.scheduler(model, num_blocks)
    speculation = make_speculation(
        draft_config, model, limits, num_blocks=num_blocks, implementation=steps.implementation
    )
    runner = Runner(
        model,
        limits,
        num_blocks=num_blocks,
        buckets=steps.buckets,
        implementation=steps.implementation,
        checks_batches=steps.check_batches,
        cache=cache.cache_arguments,
        speculation=speculation,
        cascade_attention=steps.cascade_attention,
        processes=processes,
    )
    core = EngineCore(scheduler, runner, speculation)
    prompt_limits = _prompt_limits(model, limits, scheduler, enable_prefix_caching)
    input_processor = InputProcessor(model, prompt_limits, runner.weights, processes)
    return EngineComponents(model, scheduler, runner, core, input_processor, processes, speculation)


def _prompt_limits(
    model: ServedModel, limits: StepLimits, scheduler: Scheduler, enable_prefix_caching: bool
) -> PromptLimits:
    return PromptLimits(
        vocab_size=model.config.vocab_size,
        max_model_len=limits.max_context_len(model),
        capacity_tokens=scheduler.capacity_tokens,
        block_size=limits.block_size,
        enable_prefix_caching=enable_prefix_caching,
    )


def _shared_options(
    limits: StepLimits, cache: CacheOptions, steps: StepOptions, draft_config: DraftConfig
) -> dict[str, str]:
    """Return the options that must be equal in all processes of an engine, by name."""
    cache_options = {f"cache's {name}": value for name, value in cache.cache_arguments.items()}
    options = {
        **limits._asdict(),
        **cache_options,
        **steps._asdict(),
        "speculative": draft_config.description,
    }
    draft_options = {} if draft_config.model is None else model_options(draft_config.model, "draft model's ")
    return {name: str(value) for name, value in options.items()} | draft_options


def model_options(model: Any, prefix: str = "") -> dict[str, str]:
    """Return the properties of a model on a mesh that must be equal in all processes, by name.

    The weights themselves are not compared.
    """
    mesh, config = model.mesh, model.config
    source = str(getattr(config, "source", ""))  # content of config.json
    sizes = f"{config.vocab_size} tokens, {config.max_position_embeddings} positions"
    devices = [device.id for device in mesh.devices.flat]
    scales = getattr(model, "kv_scales", None)
    # Each process quantizes its own heads, so all of them need the same scales.
    scale_values = (
        [] if scales is None else [f"{name} {tensor.tolist()}" for name, tensor in scales.tensors().items()]
    )
    options = {
        "config": f"of {sizes}, sha256 {_digest(source.encode())}",
        "dtype": getattr(model, "dtype", None),
        "mesh": f"{dict(mesh.shape)} of devices {devices}",
        "cp_kv_cache_interleave_size": getattr(model, "cp_kv_cache_interleave_size", 1),
        "peer memory": getattr(model, "peers", None) is not None,
        "kv_scales": None if scales is None else f"sha256 {_digest(repr(scale_values).encode())}",
    }
    return {f"{prefix}{name}": str(value) for name, value in options.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
