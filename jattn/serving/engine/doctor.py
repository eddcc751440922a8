"""Diagnosis of this machine: the implementation of each attention feature, and why it is not a faster one."""

import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import abstract_metadata
from jattn.cache import CacheSpec
from jattn.implementations.layer_config import layer_config
from jattn.implementations.selection import IMPLEMENTATIONS, ImplementationChoice
from jattn.masks import Document, LocalStrided
from jattn.planning import KernelFallbackWarning, format_table, plan_layers
from jattn.runtime.decode_graphs import format_buckets
from jattn.spec import AttentionSpec
from jattn.version import version_of
from pallas_kernels import support

REGIONS = {
    "decode": Bucket(max_decodes=8, max_blocks=64),
    "prefill": Bucket(max_prefills=2, max_prefill_tokens=256, max_blocks=64),
}
DOCUMENTS = jax.eval_shape(lambda: Document(ids=jnp.zeros(1024, jnp.int32)))
# Each feature's changes to AttentionSpec and CacheSpec, and its mask, for the heads of a Llama 3 8B. ALiBi
# and sinks are not listed: they do not affect the choice of the implementation.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "causal, bfloat16": ({}, {}, None),
    "sliding window": ({"window": (1023, 0)}, {}, None),
    "soft cap": ({"soft_cap": 50.0}, {}, None),
    "chunked-local": ({"chunk_size": 512}, {}, None),
    "block-sparse": (
        {"sparsity": LocalStrided(block_size=64, local_blocks=8, vert_stride=4)},
        {},
        None,
    ),
    "a mask with arrays": ({}, {}, DOCUMENTS),
    "fp8 cache": ({}, {"quantization": "fp8_e4m3"}, None),
    "fp8 cache, scales per token and head": ({}, {"quantization": "fp8_e4m3_token_head"}, None),
    "int8 cache, scales per token and head": ({}, {"quantization": "int8_token_head"}, None),
    "int8 keys, 16-bit values": ({}, {"quantization": "int8_k_only"}, None),
    "int8 keys and queries": (
        {"query_quantization": "int8"},
        {"quantization": "int8_token_head"},
        None,
    ),
    "layout HND": ({}, {"layout": "HND"}, None),
    "layout packed": ({}, {"layout": "packed"}, None),
    "float32": ({}, {"dtype": jnp.float32}, None),
}


def diagnose(feature: str, region: str) -> ImplementationChoice:
    """Return the implementation of a feature on jax's default device. Nothing is computed.

    Args:
        feature: Key of FEATURES.
        region: "decode" or "prefill".
    """
    changes, cache_changes, mask = FEATURES[feature]
    spec = AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **changes})
    cache_spec = CacheSpec(**{"num_blocks": 64, "num_kv_heads": 8, "head_dim": 128, **cache_changes})
    metadata = abstract_metadata(REGIONS[region], cache_spec.block_size)
    # A list of all implementations avoids the warning about a missing kernel, which the table reports.
    (layer_choice,) = plan_layers(
        metadata, (layer_config(spec, cache_spec),), mask, implementation=IMPLEMENTATIONS
    )
    ((_, choice),) = layer_choice.choices
    return choice


def explain(model: Any, caches: Any, buckets: Iterable[Bucket], block_size: int) -> str:
    """Return tables of the implementation of each layer type for every bucket, as plans print them.

    Args:
        model: The served model.
        caches: KV caches, or their shapes.
        buckets: Compiled sizes. Buckets with equal tables share one table.
        block_size: Number of tokens per cache block.
    """
    buckets_by_table: dict[str, list[Bucket]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelFallbackWarning)  # The tables contain the reasons.
        for bucket in buckets:
            metadata = abstract_metadata(bucket, block_size)
            plan = jax.eval_shape(lambda metadata, caches: model.plan(metadata, caches), metadata, caches)
            buckets_by_table.setdefault(str(plan), []).append(bucket)
    return "\n\n".join(
        f"buckets {format_buckets(buckets)}:\n\n{text}" for text, buckets in buckets_by_table.items()
    )


def report() -> str:
    """Return versions, devices, a table of all features with the reasons, and what each kernel supports."""
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("jax", "jaxlib", "flax"))
    devices = ", ".join(f"{device.device_kind} ({device.platform}:{device.id})" for device in jax.devices())
    notes: list[str] = []
    rows = [("feature", *REGIONS)]
    for feature in FEATURES:
        rows.append((feature, *(_cell(diagnose(feature, region), notes) for region in REGIONS)))
    lines = [
        versions,
        f"devices: {devices}",
        "",
        format_table(rows),
        "",
        "ALiBi and sinks use the same implementation as their layer.",
    ]
    lines += ["", *(f"[{i}] {note}" for i, note in enumerate(notes, 1))] if notes else []
    lines += ["", format_table(support.format_kernels())]
    return "\n".join(lines)


def _cell(choice: ImplementationChoice, notes: list[str]) -> str:
    """Return the implementation, with the number of the note that gives the reason."""
    if choice.reason is None:
        return choice.implementation
    if choice.reason not in notes:
        notes.append(choice.reason)
    return f"{choice.implementation} [{notes.index(choice.reason) + 1}]"
