"""Which requests a kernel serves. Code, tests and `jattn doctor` ask the same question here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.checks import require_one_of, unsupported
from pallas_kernels.shared.head_dims import EIGHT_BIT_HEAD_DIMS, HEAD_DIMS

DTYPES = ("bfloat16", "float16")
EIGHT_BIT_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
LAYOUTS = ("NHD", "HND")
BACKWARD_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
# Wider heads in both widths do not fit shared memory; 80 is cut otherwise in 8 bits.
DEQUANTIZED_HEAD_DIMS = (32, 64, 96, 128)
MAX_GROUP = 64
MAX_DECODE_QUERY_LEN = 8
COMPUTE_CAPABILITY = "9.0"
NUM_SMS = 132  # H100 SXM and H200
GPU_PLATFORMS = ("gpu", "cuda")


def device_of(*trees: object) -> jax.Device:
    """The device of the first array that has one; else jax's default one: a traced array does not say."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.Array) and is_concrete(leaf):
            return min(leaf.devices(), key=lambda device: device.id)
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.devices(default)[0]
    return jax.devices()[0] if default is None else default


def is_concrete(*trees: object) -> bool:
    """Whether all arrays have values: none is traced, none a shape alone."""
    leaves = jax.tree.leaves(trees)
    return not any(isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) for leaf in leaves)


def is_gpu(*trees: object) -> bool:
    """Whether these arrays are on a GPU, of any kind."""
    return device_of(*trees).platform in GPU_PLATFORMS


def why_not_on(*trees: object) -> str | None:
    """Why the Mosaic GPU kernels cannot run at all where these arrays are; None if they can."""
    return why_not_device(device_of(*trees))


def why_not_device(device: Any) -> str | None:
    """The same of a device."""
    if device.platform not in GPU_PLATFORMS:
        return f"the kernels need an NVIDIA GPU, and JAX's platform here is {device.platform!r}"
    found = getattr(device, "compute_capability", None)
    if found != COMPUTE_CAPABILITY:
        return (
            f"the kernels are compiled for compute capability {COMPUTE_CAPABILITY}, and this GPU has {found}"
        )
    return None


def should_use_kernel(what: str, implementation: str | None, reason: str | None) -> bool:
    """Whether a call that XLA can serve, too, takes its kernel.

    Args:
        what: The call, for the error.
        implementation: "mosaic_gpu" or "xla"; None = the kernel if there is one.
        reason: Why there is none for this call; None if there is.

    Raises:
        ValueError: There is no implementation of that name.
        NotImplementedError: The kernel is asked for, and there is none.
    """
    if implementation is not None:
        require_one_of("implementation", implementation, ("mosaic_gpu", "xla"))
        if implementation == "mosaic_gpu" and reason is not None:
            raise unsupported(what, f"mosaic_gpu: {reason}", "Leave implementation=None")
    return reason is None and implementation != "xla"


def why_not_decode(
    *,
    dtype: DTypeLike,
    k_dtype: DTypeLike,
    v_dtype: DTypeLike,
    head_dim: int,
    block_size: int,
    group: int,
    decode_query_len: int,
    layout: str = "NHD",
    has_token_scales: tuple[bool, bool] = (False, False),
) -> str | None:
    """Why paged_decode has no kernel for a request; None if it has.

    Args:
        dtype: Of the queries.
        k_dtype: Of the keys.
        v_dtype: Of the values.
        head_dim: Width of a head.
        block_size: Tokens of a cache block.
        group: Query heads of a kv head.
        decode_query_len: Queries of a request.
        layout: Of the cache.
        has_token_scales: Whether keys, and whether values, have a scale per token and head.
    """
    dtype, stored = jnp.dtype(dtype), {"keys": jnp.dtype(k_dtype), "values": jnp.dtype(v_dtype)}
    stored_ok = (
        rule
        for (what, got), has_scales in zip(stored.items(), has_token_scales, strict=True)
        for rule in (
            (
                got == dtype or got.name in EIGHT_BIT_DTYPES,
                f"{what} of {got.name} with queries of {dtype.name}",
            ),
            (got.itemsize == 1 or not has_scales, f"{what} of {got.name} with a scale per token and head"),
        )
    )
    rules = (
        (layout in LAYOUTS, f"the {layout} layout ({_listed(LAYOUTS)} have one)"),
        (dtype.name in DTYPES, f"queries of {dtype.name} ({_listed(DTYPES)} have one)"),
        *stored_ok,
        *_head_rules(head_dim, tuple(stored.values())),
        (block_size in BLOCK_SIZES, f"block_size {block_size} ({_listed(BLOCK_SIZES)} have one)"),
        (group <= MAX_GROUP, f"{group} query heads a kv head (at most {MAX_GROUP})"),
        (
            decode_query_len <= MAX_DECODE_QUERY_LEN,
            f"decode_query_len {decode_query_len} (at most {MAX_DECODE_QUERY_LEN})",
        ),
    )
    return _first_broken(rules)


def why_not_head_dim(head_dim: int, kv_dtypes: tuple[DTypeLike, DTypeLike]) -> str | None:
    """Why paged_decode has no kernel for heads of a width, stored as these dtypes; None if it has."""
    return _first_broken(_head_rules(head_dim, kv_dtypes))


def _head_rules(head_dim: int, kv_dtypes: tuple[DTypeLike, ...]) -> tuple[tuple[bool, str], ...]:
    is_wide = all(jnp.dtype(dtype).itemsize == 2 for dtype in kv_dtypes)
    served = HEAD_DIMS if is_wide else EIGHT_BIT_HEAD_DIMS
    kind = "" if is_wide else " in 8 bits"
    return ((head_dim in served, f"head_dim {head_dim}{kind} ({_listed(served)} have one)"),)


def why_not_prefill(
    *,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    head_dim: int,
    block_size: int | None,
    layout: str = "NHD",
) -> str | None:
    """Why varlen_prefill has no kernel for a request; None if it has.

    Args:
        dtype: Of the queries.
        kv_dtype: Of the keys and values.
        head_dim: Width of a head.
        block_size: Tokens of a cache block; None where keys are packed.
        layout: Of the cache.
    """
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    rules = (
        (layout in LAYOUTS, f"the {layout} layout ({_listed(LAYOUTS)} have one)"),
        (dtype.name in DTYPES, f"queries of {dtype.name} ({_listed(DTYPES)} have one)"),
        (kv_dtype == dtype, f"keys of {kv_dtype.name} with queries of {dtype.name}"),
        (head_dim in HEAD_DIMS, f"head_dim {head_dim} ({_listed(HEAD_DIMS)} have one)"),
        (
            block_size is None or block_size in BLOCK_SIZES,
            f"block_size {block_size} ({_listed(BLOCK_SIZES)} have one)",
        ),
    )
    return _first_broken(rules)


def why_not_dequantize(*, kv_dtypes: tuple[DTypeLike, DTypeLike], head_dim: int) -> str | None:
    """Why varlen_prefill does not widen these keys and values of a paged cache itself; None if it does."""
    names, served = [jnp.dtype(x).name for x in kv_dtypes], DEQUANTIZED_HEAD_DIMS
    of_head = head_dim in served, f"head_dim {head_dim} in 8 bits ({_listed(served)} have one)"
    return _first_broken((*((x in EIGHT_BIT_DTYPES, f"{x} to be widened") for x in names), of_head))


def why_not_backward(*, dtypes: Mapping[str, DTypeLike], head_dim: int) -> str | None:
    """Why varlen_backward has no kernel for a request; None if it has.

    Args:
        dtypes: Of each array; the queries' is `dtypes["query"]`.
        head_dim: Width of a head.
    """
    named = {name: jnp.dtype(dtype).name for name, dtype in dtypes.items()}
    query = named["query"]
    rules = (
        (query in DTYPES, f"queries of {query} ({_listed(DTYPES)} have one)"),
        *((got == query, f"{name} of {got} with queries of {query}") for name, got in named.items()),
        (
            head_dim in BACKWARD_HEAD_DIMS,
            f"gradients of head_dim {head_dim} ({_listed(BACKWARD_HEAD_DIMS)} have one)",
        ),
    )
    return _first_broken(rules)


def why_not_read(
    *, dtype: DTypeLike, cache_dtype: DTypeLike, head_dim: int, block_size: int, layout: str = "NHD"
) -> str | None:
    """Why cache_read has no kernel for a cache; None if it has.

    Args:
        dtype: To read into.
        cache_dtype: Of the keys or values in the cache.
        head_dim: Width of a head.
        block_size: Tokens of a cache block.
        layout: Of the cache.
    """
    dtype, cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
    stored = (*EIGHT_BIT_DTYPES, dtype.name)
    rules = (
        (layout in LAYOUTS, f"the {layout} layout ({_listed(LAYOUTS)} have one)"),
        (dtype.name in DTYPES, f"reading into {dtype.name} ({_listed(DTYPES)} have one)"),
        (cache_dtype.name in stored, f"a cache of {cache_dtype.name} ({_listed(stored)} have one)"),
        *_head_rules(head_dim, (cache_dtype,)),
        (block_size in BLOCK_SIZES, f"block_size {block_size} ({_listed(BLOCK_SIZES)} have one)"),
    )
    return _first_broken(rules)


def why_not_write(
    *,
    dtype: DTypeLike,
    k_dtype: DTypeLike,
    v_dtype: DTypeLike,
    layout: str,
    kv_heads: int,
    head_dim: int,
    k_scale_ndim: int | None = None,
    v_scale_ndim: int | None = None,
) -> str | None:
    """Why cache_write has no kernel for a cache; None if it has.

    Args:
        dtype: Of what is written.
        k_dtype: What keys are stored as.
        v_dtype: What values are stored as.
        layout: Of the cache.
        kv_heads: Heads of a token.
        head_dim: Width of a head.
        k_scale_ndim: Axes of the keys' scale: 3 per token and head, 0 for one number; None without one.
        v_scale_ndim: The same of values.
    """
    dtype = jnp.dtype(dtype)
    stored = {name: jnp.dtype(x) for name, x in (("keys", k_dtype), ("values", v_dtype))}
    is_rounded = any(x != dtype for x in stored.values())
    narrowest = min(x.itemsize for x in stored.values())
    row, head = kv_heads * head_dim * narrowest, head_dim * narrowest
    aligned = layout == "HND" or is_rounded
    rules = [(layout in LAYOUTS, f"the {layout} layout ({_listed(LAYOUTS)} have one)")]
    for (name, held), ndim in zip(stored.items(), (k_scale_ndim, v_scale_ndim), strict=True):
        can_round = dtype.name in DTYPES and held.name in ("int8", "float8_e4m3fn")
        is_plain = held == dtype and ndim is None
        what = f"{name} of {dtype.name} into a cache of {held.name}"
        rules.append((held == dtype or can_round, what))
        rules.append((is_plain or (held != dtype and ndim in (None, 0, 3)), f"{what} with this scale"))
    rules += [
        (row % 16 == 0, f"keys of {row} bytes a token (a multiple of 16 has one)"),
        (not aligned or row % 128 == 0, f"{layout} keys of {row} bytes a token (a multiple of 128 has one)"),
        (not aligned or head % 16 == 0, f"{layout} heads of {head} bytes (a multiple of 16 has one)"),
        (
            not is_rounded or head_dim in HEAD_DIMS,
            f"8-bit heads of {head_dim} ({_listed(HEAD_DIMS)} have one)",
        ),
        (layout != "HND" or kv_heads <= 256, f"HND keys of {kv_heads} heads (at most 256)"),
        (layout != "HND" or head_dim <= 256, f"HND heads of {head_dim} (at most 256)"),
    ]
    return _first_broken(rules)


def why_not_qkv_write(
    *, dtype: DTypeLike, k_dtype: DTypeLike, v_dtype: DTypeLike, layout: str, head_dim: int
) -> str | None:
    """Why qkv_write has no kernel; None if it has.

    Args:
        dtype: Of queries, keys and values.
        k_dtype: What keys are stored as.
        v_dtype: What values are stored as.
        layout: Of the caches.
        head_dim: Width of a head.
    """
    name = jnp.dtype(dtype).name
    stored = jnp.dtype(k_dtype).name, jnp.dtype(v_dtype).name
    # Lanes hold powers of 2 of a half head: 15 of 60 would lie as far apart as 16.
    halved = tuple(dim for dim in HEAD_DIMS if dim % 16 == 0)
    return _first_broken(
        [
            (name in DTYPES, f"{name} ({_listed(DTYPES)} have one)"),
            (layout in LAYOUTS, f"the {layout} layout ({_listed(LAYOUTS)} have one)"),
            (stored == (name, name), f"caches of {_listed(stored)} (those of {name} have one)"),
            (head_dim in halved, f"heads of {head_dim} ({_listed(halved)} have one)"),
        ]
    )


def why_not_add_norm(*, dtype: DTypeLike, others: Sequence[DTypeLike], width: int) -> str | None:
    """Why add_norm has no kernel; None if it has.

    Args:
        dtype: Of the rows.
        others: Of what is added to them, and of the weight.
        width: Of a row.
    """
    name = jnp.dtype(dtype).name
    different = sorted({jnp.dtype(other).name for other in others} - {name})
    return _first_broken(
        [
            (name in DTYPES, f"{name} ({_listed(DTYPES)} have one)"),
            (not different, f"rows of {name} beside {_listed(tuple(different))} (all of one dtype have one)"),
            (
                width % 128 == 0 and 0 < width <= 16384,
                f"rows of {width} (multiples of 128, at most 16384)",
            ),
        ]
    )


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))


def _first_broken(rules: Iterable[tuple[bool, str]]) -> str | None:
    return next((f"there is no kernel for {what}" for is_served, what in rules if not is_served), None)


def why_not_grouped_matmul(
    *, dtype: DTypeLike, weights_dtype: DTypeLike, inputs: int, outputs: int
) -> str | None:
    """Why grouped_matmul has no kernel for a product; None if it has."""
    for name, of in (("rows", dtype), ("weights", weights_dtype)):
        if jnp.dtype(of).name not in DTYPES:
            return f"{name} are {jnp.dtype(of).name}, and the kernel takes {' and '.join(DTYPES)}"
    if jnp.dtype(dtype) != jnp.dtype(weights_dtype):
        return f"rows are {jnp.dtype(dtype).name} and weights {jnp.dtype(weights_dtype).name}"
    for name, width in (("inputs", inputs), ("outputs", outputs)):
        if width % 64 or not width:
            return f"{name} are {width}, and the kernel takes multiples of 64"
    return None
