"""From what an engine is told to what it runs with: everything that can be wrong with it is found here."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from jattn.batch.bucket import Bucket
from jattn.serving.engine.config import StepLimits, default_step_sizes
from jattn.serving.engine.engine_core import EngineCore
from jattn.serving.engine.input_processor import Intake, PromptLimits
from jattn.serving.engine.processes import Processes, processes_of
from jattn.serving.engine.runner import Runner
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.served_model import ServedModel, as_served
from jattn.serving.engine.speculative import Drafter, Speculation, as_drafter, speculation_of
from jattn.serving.engine.warmup import keep_executables_in
from pallas_kernels.checks import require_type


class SizeOptions(NamedTuple):
    """Of how large steps and requests are; attributes as arguments of `Engine`."""

    block_size: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    batch_invariant: bool

    def limits(self, buckets: Sequence[Bucket] | None) -> StepLimits:
        """With the device's own sizes where none are given; no more requests than tokens are."""
        seqs, tokens = default_step_sizes(fills_buckets=self.batch_invariant is True or buckets is not None)
        if self.max_num_batched_tokens is not None:
            tokens = self.max_num_batched_tokens
        if self.max_num_seqs is not None:
            seqs = self.max_num_seqs
        elif isinstance(tokens, int) and tokens > 0:
            seqs = min(seqs, tokens)
        return StepLimits(self.block_size, seqs, tokens, self.max_model_len, self.batch_invariant)


class CacheOptions(NamedTuple):
    """Of the layers' caches; attributes as arguments of `Engine`."""

    num_blocks: int | None
    cache_bytes: int | None
    cache_dtype: DTypeLike | None
    quantization: str | None
    skip_layers: Sequence[int]

    @property
    def kind(self) -> dict[str, Any]:
        """What `ServedModel.cache_specs` and `create_caches` take besides sizes."""
        names = {"quantization": self.quantization, "skip_layers": self.skip_layers}
        return {"dtype": self.cache_dtype, **names}


class DraftOptions(NamedTuple):
    """Of speculative decoding; attributes as arguments of `Engine`."""

    speculative: Any
    num_speculative_tokens: int


class StepOptions(NamedTuple):
    """Of how steps run; attributes as arguments of `Engine`."""

    buckets: Sequence[Bucket] | None
    implementation: str | Sequence[str] | None
    cascade_attention: bool | None
    check_batches: bool


class EngineParts(NamedTuple):
    """What an engine runs with.

    Attributes:
        model: Served.
        scheduler: Says what runs next.
        runner: Holds the caches, and runs steps.
        core: The loop over these.
        intake: Makes requests of prompts.
        processes: Those that share its steps; None = it is alone.
        speculation: Says when there are drafts; None = never.
    """

    model: ServedModel
    scheduler: Scheduler
    runner: Runner
    core: EngineCore
    intake: Intake
    processes: Processes | None
    speculation: Speculation | None


def make_parts(
    model: Any,
    sizes: SizeOptions,
    cache: CacheOptions,
    drafts: DraftOptions,
    steps: StepOptions,
    enable_prefix_caching: bool,
    cache_dir: str | os.PathLike[str] | None,
) -> EngineParts:
    """Loads what is a folder, and makes the caches; compiles nothing.

    Args:
        model: As `Engine` has it.
        sizes: Of its steps.
        cache: Of its layers.
        drafts: Who drafts.
        steps: How they run.
        enable_prefix_caching: As `Engine` has it.
        cache_dir: As `Engine` has it.

    Raises:
        As `Engine`.
    """
    limits = sizes.limits(steps.buckets)
    limits.check(cache.skip_layers, num_blocks=cache.num_blocks, cache_bytes=cache.cache_bytes)
    limits.check_features(enable_prefix_caching, drafts.speculative, steps.cascade_attention, steps.buckets)
    require_type("check_batches", steps.check_batches, bool, "True or False")
    keep_executables_in(cache_dir)
    model = as_served(model)
    drafter = as_drafter(*drafts, model, limits)
    processes = processes_of(getattr(model, "mesh", None))
    limits = limits.on_ranks(model, drafter.model)
    num_blocks = limits.num_blocks_for(model, cache.num_blocks, cache.cache_bytes, cache.kind, drafter.model)
    if processes is not None:
        told = _told(limits._replace(block_size=sizes.block_size), cache, steps, drafter)
        num_blocks = processes.agree(num_blocks, told | of_model(model))  # each its memory
    scheduler = limits.scheduler(model, num_blocks)
    how: dict[str, Any] = {"num_blocks": num_blocks, "implementation": steps.implementation}
    speculation = speculation_of(drafter, model, limits, **how)
    runner = Runner(
        model,
        limits,
        buckets=steps.buckets,
        checks_batches=steps.check_batches,
        cache=cache.kind,
        speculation=speculation,
        cascade_attention=steps.cascade_attention,
        processes=processes,
        **how,
    )
    core = EngineCore(scheduler, runner, speculation)
    fits = _prompt_limits(model, limits, scheduler, enable_prefix_caching)
    intake = Intake(model, fits, runner.weights, processes)
    return EngineParts(model, scheduler, runner, core, intake, processes, speculation)


def _prompt_limits(
    model: ServedModel, limits: StepLimits, scheduler: Scheduler, shares_prefixes: bool
) -> PromptLimits:
    return PromptLimits(
        vocab_size=model.config.vocab_size,
        max_model_len=limits.longest(model),
        capacity_tokens=scheduler.capacity_tokens,
        block_size=limits.block_size,
        shares_prefixes=shares_prefixes,
    )


def _told(limits: StepLimits, cache: CacheOptions, steps: StepOptions, drafter: Drafter) -> dict[str, str]:
    """What all processes of an engine must have been told alike, by name."""
    of_cache = {f"cache's {name}": value for name, value in cache.kind.items()}
    options = {**limits._asdict(), **of_cache, **steps._asdict(), "speculative": drafter.told}
    of_draft = {} if drafter.model is None else of_model(drafter.model, "draft model's ")
    return {name: str(value) for name, value in options.items()} | of_draft


def of_model(model: Any, whose: str = "") -> dict[str, str]:
    """What all processes must have alike of a model on a mesh, by name; of its weights nothing is read."""
    mesh, config = model.mesh, model.config
    source = str(getattr(config, "source", ""))  # its config.json
    sizes = f"{config.vocab_size} tokens, {config.max_position_embeddings} positions"
    devices = [device.id for device in mesh.devices.flat]
    scales = getattr(model, "kv_scales", None)
    # A process stores its heads by its own: with others they are rounded otherwise, or cut off.
    numbers = [] if scales is None else [f"{name} {of.tolist()}" for name, of in scales.tensors().items()]
    told = {
        "config": f"of {sizes}, sha256 {_digest(source.encode())}",
        "dtype": getattr(model, "dtype", None),
        "mesh": f"{dict(mesh.shape)} of devices {devices}",
        "cp_kv_cache_interleave_size": getattr(model, "cp_kv_cache_interleave_size", 1),
        "peer memory": getattr(model, "peers", None) is not None,
        "kv_scales": None if scales is None else f"sha256 {_digest(repr(numbers).encode())}",
    }
    return {f"{whose}{name}": str(value) for name, value in told.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
