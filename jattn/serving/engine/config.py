"""The engine's configuration: its fields, their validation, and the values that follow from the model."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from jattn.batch.bucket import Bucket
from jattn.cache import CacheSpec
from jattn.cache.spec import resolve_kv_cache_dtype
from jattn.parallel import num_local_mesh_devices, num_mesh_devices, num_ranks
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.serving.engine.kv_cache_manager import LocalAttention
from jattn.serving.engine.processes import ProcessGroup
from jattn.serving.engine.proposer import NgramProposer
from jattn.serving.engine.served_model import MEMBERS, ServedModel, attention_layers, resolve_model
from jattn.serving.engine.step import draft_buckets, invariant_buckets, step_buckets
from pallas_kernels.checks import require, require_positive, unsupported
from pallas_kernels.support import why_not_device

HOST_CACHE_BYTES = 2**30  # default cache size if the device does not report its memory
FREE_MEMORY_FRACTION = 0.8  # default cache size if the device reports its memory
FULL_ATTENTION = (None, None)  # (left window, chunk_size) of a layer without either
NGRAM = "ngram"
# vLLM's other methods, which are not folder names.
_UNSUPPORTED_METHODS = (
    "eagle",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "mtp",
    "deepseek_mtp",
    "suffix",
    "draft_model",
)


class StepSizes(NamedTuple):
    """Maximum numbers of requests and of new tokens per step."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_STEP_SIZES = StepSizes(16, 512)  # Each row takes time, and each bucket is compiled layer by layer.
GPU_STEP_SIZES = StepSizes(256, 2048)  # vLLM's defaults for most GPUs
KERNEL_STEP_SIZES = StepSizes(256, 8192)  # vLLM's defaults for an H100


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The keyword arguments of `Engine`, which describes them, validated.

    `resolve` derives those that are None from the model.
    """

    num_blocks: int | None = None
    cache_bytes: int | None = None
    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: DTypeLike = "auto"
    skip_layers: Sequence[int] = ()
    speculative: Any = None
    num_speculative_tokens: int = 4
    cascade_attention: bool | None = None
    batch_invariant: bool = False
    buckets: Sequence[Bucket] | None = None
    implementation: str | Sequence[str] | None = None
    seed: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    check_batches: bool = False

    def __post_init__(self) -> None:
        resolve_kv_cache_dtype(self.kv_cache_dtype)  # Raises if it is unknown.
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if (value := getattr(self, name)) is not None:
                require_positive(**{name: value})
        if self.num_blocks is not None:
            rule = "be at least 2 (block 0 is the null block)"
            require(self.num_blocks > 1, "num_blocks", rule, self.num_blocks)
            rule = f"be None with num_blocks={self.num_blocks}"
            require(self.cache_bytes is None, "cache_bytes", rule, self.cache_bytes)
        if self.speculative is not None:
            require_positive(num_speculative_tokens=self.num_speculative_tokens)
        if self.batch_invariant:
            self._check_batch_invariant()

    def _check_batch_invariant(self) -> None:
        if self.buckets is not None:
            raise ValueError(
                "buckets cannot be combined with batch_invariant=True, which sets them. Omit buckets."
            )
        name, speculative = "batch_invariant=True with", self.speculative
        if speculative is not None:
            reason = "steps with drafts round differently from steps without"
            method = repr(speculative) if isinstance(speculative, str) else f"a {type(speculative).__name__}"
            raise unsupported(f"{name} speculative={method}", reason, "Pass speculative=None")
        if self.cascade_attention:
            reason = "combining two partial results rounds differently from a single pass"
            raise unsupported(f"{name} cascade_attention=True", reason, "Pass cascade_attention=None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The configuration of an engine for one model: no field is left to a default.

    Attributes:
        num_blocks: Number of blocks in each layer's KV cache.
        block_size: Number of tokens per block, over all context-parallel ranks.
        max_num_seqs: Maximum number of requests per step.
        max_num_batched_tokens: Maximum number of new tokens per step.
        max_model_len: Maximum context length in tokens.
        speculative: Draft method: a lookup, a model, or None.
        cascade_attention: Whether decode steps read a shared prefix once. None: where it is faster.
        buckets: Step sizes to compile.
        max_blocks: Number of block-table columns of the longest request.
        window_layers: For each layer, whether it has its own blocks; empty if all layers share theirs.
        num_window_blocks: Number of blocks of the layers that have their own; 0 if there are none.
        local_attention: Windows and chunks of the layers that have their own blocks, or else of all layers.
            None: they attend to the full context.
        longrope_threshold: Length in tokens above which LongRoPE changes. None: no request can exceed it.
    """

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    speculative: NgramProposer | ServedModel | None
    buckets: Sequence[Bucket]
    max_blocks: int
    window_layers: tuple[bool, ...]
    num_window_blocks: int
    local_attention: LocalAttention | None
    longrope_threshold: int | None

    def __post_init__(self) -> None:
        """Check nothing: the values are derived from a validated EngineConfig."""

    @property
    def blocks_per_layer(self) -> int | tuple[int, ...]:
        """Number of blocks of each layer's cache; one number if all layers share a block table."""
        if not self.window_layers:
            return self.num_blocks
        return tuple(
            [self.num_window_blocks if is_windowed else self.num_blocks for is_windowed in self.window_layers]
        )


def resolve(config: EngineConfig, model: ServedModel, processes: ProcessGroup | None) -> ResolvedConfig:
    """Return the configuration of an engine for a model, with the values that follow from it.

    Args:
        config: Arguments of the engine.
        model: The served model.
        processes: Processes that run the engine together and must agree; None for a single process.

    Raises:
        ValueError: If an argument conflicts with the model, the device or the other processes.
        NotImplementedError: If the draft method or the model's LongRoPE is not supported with the arguments.
        FileNotFoundError: If the draft model's folder or one of its files does not exist.
    """
    max_num_seqs, max_num_batched_tokens = step_sizes = resolve_step_sizes(config)
    max_model_len = model.config.max_position_embeddings
    if config.max_model_len is not None:
        if config.max_model_len > max_model_len:
            raise ValueError(
                f"max_model_len={config.max_model_len} exceeds the model's maximum of {max_model_len}."
            )
        max_model_len = config.max_model_len
    draft = None
    if config.speculative is not None:
        draft = _resolve_draft(config, model, max_num_batched_tokens, max_model_len)
    draft_model = None if isinstance(draft, NgramProposer) else draft
    block_size = config.block_size * num_ranks(model)
    if block_size > config.block_size:
        for served_model in (model, draft_model):
            interleave = getattr(served_model, "cp_kv_cache_interleave_size", 1)
            rule = f"be a multiple of cp_kv_cache_interleave_size ({interleave})"
            require(config.block_size % interleave == 0, "block_size", rule, config.block_size)

    # Layers with a sliding window or chunks have their own blocks if other layers attend to the full context.
    window_layers = tuple(getattr(model, "sliding_window_layers", ()))
    local_attention = local_attention_of(model)
    blocks_per_request = max_blocks_at_once = -(-max_model_len // block_size)
    max_window_blocks = 0
    if local_attention is not None and window_layers:
        max_window_blocks = 1 + local_attention.max_blocks_per_batch(
            max_num_seqs, max_num_batched_tokens, block_size
        )
    elif local_attention is not None:  # All layers free their old blocks.
        needed = local_attention.max_blocks_per_request(max_num_batched_tokens, block_size)
        max_blocks_at_once = min(blocks_per_request, needed)

    num_blocks = resolve_num_blocks(
        config,
        model,
        draft_model,
        block_size=block_size,
        max_blocks=max_blocks_at_once * max_num_seqs + 1,
        max_window_blocks=max_window_blocks,
    )
    if processes is not None:
        options = shared_options(config, step_sizes, model, draft, draft_model)
        num_blocks = processes.agree_on_num_blocks(num_blocks, options)
    capacity = num_blocks - 1
    is_unlimited = (
        local_attention is not None
        and not window_layers
        and local_attention.fits_any_length(capacity * block_size, block_size)
    )
    max_blocks = blocks_per_request if is_unlimited else min(blocks_per_request, capacity)
    buckets = _resolve_buckets(config, draft is not None, step_sizes, max_blocks)
    cascade_attention = config.cascade_attention
    if config.batch_invariant or (cascade_attention is None and jax.default_backend() != "gpu"):
        cascade_attention = False
    derived = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "speculative": draft,
        "cascade_attention": cascade_attention,
        "buckets": buckets,
    }
    return ResolvedConfig(
        **vars(config) | derived,
        max_blocks=max_blocks,
        window_layers=window_layers,
        num_window_blocks=min(num_blocks, max_window_blocks),
        local_attention=local_attention,
        longrope_threshold=_resolve_longrope(config, model, max_num_batched_tokens, max_model_len),
    )


def resolve_step_sizes(config: EngineConfig) -> StepSizes:
    """Return the maximum step sizes, with the defaults of this process's first device.

    If each step costs its full bucket regardless of the content, the CPU's defaults are used on all devices.
    The default number of requests does not exceed the number of tokens per step.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu" or config.batch_invariant or config.buckets is not None:
        seqs, tokens = CPU_STEP_SIZES
    else:
        seqs, tokens = GPU_STEP_SIZES if why_not_device(device, "varlen_prefill") else KERNEL_STEP_SIZES
    tokens = config.max_num_batched_tokens or tokens
    return StepSizes(config.max_num_seqs or min(seqs, tokens), tokens)


def _resolve_draft(
    config: EngineConfig, model: ServedModel, max_num_batched_tokens: int, max_model_len: int
) -> NgramProposer | ServedModel:
    """Return the draft method, with the draft model loaded if it is a folder.

    Raises:
        ValueError: If the drafts do not fit a step, or the draft model has another vocabulary, a shorter
            context or another mesh than the model.
        NotImplementedError: If the method is one of vLLM's that jattn does not support.
        FileNotFoundError: If the folder or one of its files does not exist.
    """
    speculative, num_tokens = config.speculative, config.num_speculative_tokens
    rule = f"be less than max_num_batched_tokens ({max_num_batched_tokens})"
    require(num_tokens < max_num_batched_tokens, "num_speculative_tokens", rule, num_tokens)
    if isinstance(speculative, NgramProposer):
        return speculative
    if isinstance(speculative, str) and speculative == NGRAM:
        return NgramProposer()
    is_method = isinstance(speculative, str) and speculative in _UNSUPPORTED_METHODS
    if is_method and not os.path.isdir(speculative):
        supported = 'Pass "ngram", an NgramProposer, a model or the folder of one'
        raise unsupported(f"speculative={speculative!r}", "this draft method is not supported", supported)
    is_model = isinstance(speculative, str | os.PathLike) or any(hasattr(speculative, n) for n in MEMBERS)
    rule = 'be None, "ngram", an NgramProposer, a model or the folder of one'
    require(is_model, "speculative", rule, repr(speculative))
    mesh = getattr(model, "mesh", None)
    draft = resolve_model(speculative, mesh)
    draft_mesh = getattr(draft, "mesh", None)
    if draft_mesh != mesh:
        raise ValueError(
            f"The draft model is on the mesh {draft_mesh}, but the model is on {mesh}. "
            "Load the draft model on the model's mesh."
        )
    vocab_size = model.config.vocab_size
    if draft.config.vocab_size != vocab_size:
        raise ValueError(
            f"The draft model has a vocabulary of {draft.config.vocab_size} tokens, but the model has "
            f"{vocab_size}. Pass a draft model with the model's vocabulary."
        )
    draft_max_len = draft.config.max_position_embeddings
    if draft_max_len < max_model_len:
        raise ValueError(
            f"The draft model has {draft_max_len} positions, but the engine has {max_model_len}. "
            "Reduce max_model_len."
        )
    return draft


def _resolve_buckets(
    config: EngineConfig, has_drafts: bool, step_sizes: StepSizes, max_blocks: int
) -> Sequence[Bucket]:
    """Return the step sizes to compile, including those of steps with drafts.

    Raises:
        ValueError: If none of the given buckets fits the largest step.
    """
    max_num_seqs, max_num_batched_tokens = step_sizes
    if config.batch_invariant:
        return invariant_buckets(max_num_seqs, max_num_batched_tokens, max_blocks)
    if config.buckets is None:
        buckets = step_buckets(max_num_seqs, max_num_batched_tokens, max_blocks)
    else:
        DecodeGraphs(lambda *_: ((), ()), config.buckets).choose(  # Raises if a step could be too large.
            num_decodes=max_num_seqs,
            num_prefills=min(max_num_seqs, max_num_batched_tokens),
            num_prefill_tokens=max_num_batched_tokens,
            num_blocks=max_blocks,
        )
        buckets = [*config.buckets]
    if has_drafts:
        buckets += draft_buckets(max_num_seqs, config.num_speculative_tokens, max_blocks)
    return buckets


def local_attention_of(model: Any) -> LocalAttention | None:
    """Return the windows and chunks of the layers that have their own blocks, or else of all layers.

    None: some layer without its own blocks attends to the full context.
    """
    specs = [layer.spec for layer in attention_layers(model)]
    ranges = frozenset([(spec.window[0] if spec.window else None, spec.chunk_size) for spec in specs])
    if getattr(model, "sliding_window_layers", ()):
        ranges -= {FULL_ATTENTION}
    return LocalAttention(ranges) if ranges and FULL_ATTENTION not in ranges else None


def longrope_threshold_of(model: Any) -> int | None:
    """Return the length in tokens above which LongRoPE uses other frequencies; None without LongRoPE."""
    lengths = [getattr(layer.rope, "longrope_threshold", None) for layer in attention_layers(model)]
    return min([length for length in lengths if length is not None], default=None)


def _resolve_longrope(
    config: EngineConfig, model: ServedModel, max_num_batched_tokens: int, max_model_len: int
) -> int | None:
    """Return the length above which LongRoPE changes; None if no request can exceed it."""
    length = longrope_threshold_of(model)
    if length is None or max_model_len <= length:
        return None
    reason = f"requests of more than {length} tokens use other RoPE frequencies for all of their tokens"
    if config.batch_invariant:
        raise unsupported("batch_invariant=True", reason, f"Set max_model_len={length}")
    if max_num_batched_tokens <= length:
        feature = f"max_num_batched_tokens={max_num_batched_tokens}"
        fix = f"Set it to at least {length + 1}, or set max_model_len={length}"
        raise unsupported(feature, reason, fix)
    return length


# --------------------------------------------------------------------------------------------- memory
def resolve_num_blocks(
    config: EngineConfig,
    model: ServedModel,
    draft_model: ServedModel | None,
    *,
    block_size: int,
    max_blocks: int,
    max_window_blocks: int,
) -> int:
    """Return the number of blocks of each layer's cache that the memory holds.

    Args:
        config: Arguments of the engine.
        model: The served model.
        draft_model: Draft model whose caches share the memory.
        block_size: Number of tokens per block.
        max_blocks: Maximum number of blocks that are needed.
        max_window_blocks: Maximum number of blocks that layers with their own blocks need; further blocks
            only take memory in the other layers.

    Raises:
        ValueError: If fewer than two blocks fit, or the device does not have the memory.
    """
    specs = [*cache_specs(config, model, 1, block_size)]
    window_layers = getattr(model, "sliding_window_layers", ())
    window_specs = [spec for spec, is_windowed in zip(specs, window_layers, strict=False) if is_windowed]
    if draft_model is not None:
        specs += cache_specs(EngineConfig(), draft_model, 1, block_size)
    num_devices = num_mesh_devices(model)
    block_bytes = sum([spec.bytes_per_block for spec in specs]) // num_devices
    window_bytes = sum([spec.bytes_per_block for spec in window_specs]) // num_devices
    num_blocks, cache_bytes = config.num_blocks, config.cache_bytes
    if num_blocks is None:
        limit = free_cache_bytes() if cache_bytes is None else cache_bytes
        num_blocks = limit // block_bytes
        if num_blocks > max_window_blocks and window_bytes:
            num_blocks = (limit - max_window_blocks * window_bytes) // (block_bytes - window_bytes)
        if cache_bytes is None:
            num_blocks = min(max_blocks, max(num_blocks, 2))
        rule = f"be at least {2 * block_bytes}, the size of two blocks"
        require(num_blocks > 1, "cache_bytes", rule, cache_bytes)
    needed_bytes = num_blocks * block_bytes - max(num_blocks - max_window_blocks, 0) * window_bytes
    device_bytes = device_memory_bytes(model)
    if device_bytes is not None and needed_bytes > device_bytes:
        name, value = ("num_blocks", num_blocks) if cache_bytes is None else ("cache_bytes", cache_bytes)
        raise ValueError(
            f"{name}={value} needs {needed_bytes} bytes for the KV caches, but a device has {device_bytes} "
            f"bytes. Reduce {name}."
        )
    return num_blocks


def cache_specs(
    config: EngineConfig, model: ServedModel, num_blocks: int | Sequence[int], block_size: int
) -> tuple[CacheSpec, ...]:
    """Return the specs of a model's KV caches, one per layer."""
    dtype, quantization = resolve_kv_cache_dtype(config.kv_cache_dtype)
    return model.cache_specs(
        num_blocks,
        block_size=block_size,
        dtype=dtype,
        quantization=quantization,
        skip_layers=config.skip_layers,
    )


def free_cache_bytes() -> int:
    """Return the number of bytes for the KV caches on a device by default: 80 % of the free memory."""
    memory = jax.local_devices()[0].memory_stats() or {}
    free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
    return int(free * FREE_MEMORY_FRACTION) if free > 0 else HOST_CACHE_BYTES


def device_memory_bytes(model: Any) -> int | None:
    """Return the total memory of each of a model's devices in bytes; None if it is unknown.

    The devices of a CPU share the host's memory.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu" or device.memory_stats():
        return (device.memory_stats() or {}).get("bytes_limit") or None  # 0: an allocator without a limit
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local_mesh_devices(model)


# ------------------------------------------------------------------------------------------ processes
def shared_options(
    config: EngineConfig,
    sizes: StepSizes,
    model: ServedModel,
    draft: NgramProposer | ServedModel | None,
    draft_model: ServedModel | None,
) -> dict[str, str]:
    """Return the options that must be equal in all processes of an engine, by name."""
    num_drafts = 0 if draft is None else config.num_speculative_tokens
    options = {
        "block_size": config.block_size,
        **sizes._asdict(),
        "max_model_len": config.max_model_len,
        "batch_invariant": config.batch_invariant,
        "kv_cache_dtype": config.kv_cache_dtype,
        "skip_layers": config.skip_layers,
        "buckets": config.buckets,
        "implementation": config.implementation,
        "cascade_attention": config.cascade_attention,
        "check_batches": config.check_batches,
        "speculative": f"{num_drafts} drafts{'' if draft_model is None else ' of a model'}",
    }
    draft_options = {} if draft_model is None else model_options(draft_model, "draft model's ")
    return {name: str(value) for name, value in options.items()} | draft_options | model_options(model)


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
