"""What this machine gets: which implementation serves which feature, and why not a faster one."""

import dataclasses
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp

from jattn.attend import IMPLEMENTATIONS, attend
from jattn.cache import PagedCache
from jattn.masks import Document, LocalStrided
from jattn.metadata.batch import abstract_metadata
from jattn.spec import AttentionSpec, Bucket, CacheSpec

REGIONS = {
    "decode": Bucket(max_decodes=8, max_blocks=64),
    "prefill": Bucket(max_prefills=2, max_prefill_tokens=256, max_blocks=64),
}
PER_HEAD = jax.ShapeDtypeStruct((32,), jnp.float32)
DOCUMENTS = jax.eval_shape(lambda: Document(ids=jnp.zeros((8, 1024), jnp.int32)))
# What each feature changes in AttentionSpec, in CacheSpec, and in the call, for the heads of a Llama 3 8B.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "causal, bfloat16": ({}, {}, {}),
    "sliding window": ({"window": (1023, 0)}, {}, {}),
    "soft cap": ({"soft_cap": 50.0}, {}, {}),
    "ALiBi": ({}, {}, {"alibi_slopes": PER_HEAD}),
    "sinks": ({}, {}, {"sinks": PER_HEAD}),
    "chunked-local": ({"chunk_size": 512}, {}, {}),
    "block-sparse": (
        {"sparsity": LocalStrided(block_size=64, local_blocks=8, vert_stride=4)},
        {},
        {},
    ),
    "a mask with arrays": ({}, {}, {"mask": DOCUMENTS}),
    "fp8 cache": ({}, {"quantization": "fp8_e4m3"}, {}),
    "fp8 cache, scales per token and head": ({}, {"quantization": "fp8_e4m3_token_head"}, {}),
    "int8 cache, scales per token and head": ({}, {"quantization": "int8_token_head"}, {}),
    "int8 keys, 16-bit values": ({}, {"quantization": "int8_k_only"}, {}),
    "int8 keys and queries": (
        {"query_quantization": "int8"},
        {"quantization": "int8_token_head"},
        {},
    ),
    "layout HND": ({}, {"layout": "HND"}, {}),
    "layout packed": ({}, {"layout": "packed"}, {}),
    "float32": ({}, {"dtype": jnp.float32}, {}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What serves a feature in a region.

    Attributes:
        implementation: The best that this machine has; None if none serves it.
        reasons: Why not the better ones.
    """

    implementation: str | None
    reasons: tuple[str, ...]


def diagnose(feature: str, region: str) -> Diagnosis:
    """Asks `attend` for each implementation in turn, best first. Nothing is computed.

    Args:
        feature: One of FEATURES.
        region: "decode" or "prefill".
    """
    changes, cache_changes, arguments = FEATURES[feature]
    spec = AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **changes})
    cache_spec = CacheSpec(**{"num_blocks": 64, "num_kv_heads": 8, "head_dim": 128, **cache_changes})
    bucket = REGIONS[region]
    cache = jax.eval_shape(lambda: PagedCache.create(cache_spec))
    metadata = abstract_metadata(bucket, cache_spec.block_size)
    query = jax.ShapeDtypeStruct((bucket.max_tokens, spec.num_q_heads, spec.head_dim), cache_spec.dtype)
    reasons: list[str] = []
    for name in IMPLEMENTATIONS:
        call = lambda query, cache, metadata, arguments, name=name: attend(
            query, cache, metadata, spec, implementation=name, **arguments
        )
        try:
            jax.eval_shape(call, query, cache, metadata, arguments)
        except NotImplementedError as error:
            reasons.append(str(error))
        else:
            return Diagnosis(implementation=name, reasons=tuple(reasons))
    return Diagnosis(implementation=None, reasons=tuple(reasons))


def report() -> str:
    """Versions, devices, one table, and the reasons as its notes."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax"))
    devices = ", ".join(f"{device.device_kind} ({device.platform}:{device.id})" for device in jax.devices())
    notes: list[str] = []
    rows = [("feature", *REGIONS)]
    for feature in FEATURES:
        rows.append((feature, *(_cell(diagnose(feature, region), notes) for region in REGIONS)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += ["", *(f"[{i}] {note}" for i, note in enumerate(notes, 1))] if notes else []
    return "\n".join([versions, f"devices: {devices}", "", *(line.rstrip() for line in lines)])


def _cell(diagnosis: Diagnosis, notes: list[str]) -> str:
    """The implementation, and the numbers of the notes that say why it is not a better one."""
    for reason in diagnosis.reasons:
        if reason not in notes:
            notes.append(reason)
    marks = "".join(f" [{notes.index(reason) + 1}]" for reason in diagnosis.reasons)
    return (diagnosis.implementation or "none") + marks
