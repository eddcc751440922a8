"""Rules that say which requests each kernel supports.

Every `why_not_*` function looks at static facts only. It returns None if the kernel supports a request, or
else a clause that says what is not supported and what is. The clause completes the kernels' errors, the table
of a plan and the report of `jattn doctor`.
"""

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
# The prefill kernel holds a tile both quantized and dequantized: wider heads do not fit shared memory, and 80
# is split into other chunks in 8 bits than in 16.
DEQUANTIZED_HEAD_DIMS = (32, 64, 96, 128)
MAX_GROUP = 64
MAX_DECODE_QUERY_LEN = 8
COMPUTE_CAPABILITY = "9.0"
NUM_SMS = 132  # H100 SXM and H200
GPU_PLATFORMS = ("gpu", "cuda")


def device_of(*trees: object) -> jax.Device:
    """Return the device of the first concrete array, or JAX's default device if all arrays are traced."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.Array) and is_concrete(leaf):
            return min(leaf.devices(), key=lambda device: device.id)
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.devices(default)[0]
    return jax.devices()[0] if default is None else default


def is_concrete(*trees: object) -> bool:
    """Return whether all arrays have values: none is traced or a ShapeDtypeStruct."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            return False
    return True


def is_gpu(*trees: object) -> bool:
    """Return whether these arrays are on a GPU of any vendor and generation."""
    return device_of(*trees).platform in GPU_PLATFORMS


def why_not_on(*trees: object) -> str | None:
    """Return why the kernels cannot run on the device of these arrays, or None if they can."""
    return why_not_device(device_of(*trees))


def why_not_device(device: Any) -> str | None:
    """Return why the kernels cannot run on a device, or None if they can."""
    if device.platform not in GPU_PLATFORMS:
        return f"the kernels need an NVIDIA GPU, and JAX's platform here is {device.platform!r}"
    capability = getattr(device, "compute_capability", None)
    if capability != COMPUTE_CAPABILITY:
        required = f"the kernels are compiled for compute capability {COMPUTE_CAPABILITY}"
        return f"{required}, and this GPU has {capability}"
    return None


def should_use_kernel(call: str, implementation: str | None, reason: str | None) -> bool:
    """Return whether a call that XLA also supports uses its kernel.

    Args:
        call: Name of the call, for the error.
        implementation: "mosaic_gpu" or "xla"; None = the kernel if it supports the call.
        reason: Reason why the kernel does not support this call; None if it does.

    Raises:
        ValueError: If the implementation is unknown.
        NotImplementedError: If "mosaic_gpu" is requested and does not support the call.
    """
    if implementation is not None:
        require_one_of("implementation", implementation, ("mosaic_gpu", "xla"))
        if implementation == "mosaic_gpu" and reason is not None:
            fix = "Pass implementation=None or 'xla'"
            raise unsupported(f"{call} with implementation='mosaic_gpu'", reason, fix)
    return reason is None and implementation != "xla"


type Rule = tuple[bool, str]
"""A condition that a supported request meets, and the clause that says what is wrong if it does not."""


def first_reason(rules: Iterable[Rule]) -> str | None:
    """Return the clause of the first rule that does not hold, or None."""
    return next((reason for holds, reason in rules if not holds), None)


def must_be_one_of(name: str, value: object, supported: Sequence[object], condition: str = "") -> Rule:
    """Return the rule that `value` is one of `supported`.

    Args:
        name: Name of the argument, as in the kernel's signature.
        value: Requested value.
        supported: Supported values.
        condition: Words that say when this holds, such as " for 8-bit keys or values".
    """
    clause = f"{name}={value} is not supported{condition}; supported: {join_values(supported)}"
    return value in supported, clause


def join_values(values: Iterable[object]) -> str:
    """Return the values separated by commas."""
    return ", ".join(map(str, values))


def _head_dim_rule(head_dim: int, kv_dtypes: tuple[DTypeLike, ...]) -> Rule:
    if all(jnp.dtype(dtype).itemsize == 2 for dtype in kv_dtypes):
        return must_be_one_of("head_dim", head_dim, HEAD_DIMS)
    return must_be_one_of("head_dim", head_dim, EIGHT_BIT_HEAD_DIMS, " for 8-bit keys or values")


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
    """Return why paged_decode does not support a request, or None if it does.

    Args:
        dtype: Dtype of the queries.
        k_dtype: Dtype that keys are stored in.
        v_dtype: Dtype that values are stored in.
        head_dim: Elements per head.
        block_size: Tokens per cache block.
        group: Query heads per KV head.
        decode_query_len: Query tokens per request.
        layout: Cache layout, "NHD" or "HND".
        has_token_scales: Whether keys, and whether values, have a scale per token and head.
    """
    dtype, kv_dtypes = jnp.dtype(dtype), {"keys": jnp.dtype(k_dtype), "values": jnp.dtype(v_dtype)}
    stored_rules: list[Rule] = []
    for (name, stored_dtype), has_scales in zip(kv_dtypes.items(), has_token_scales, strict=True):
        is_known = stored_dtype == dtype or stored_dtype.name in EIGHT_BIT_DTYPES
        supported = join_values((dtype.name, *EIGHT_BIT_DTYPES))
        clause = f"{name} stored in {stored_dtype.name} are not supported with {dtype.name} queries"
        stored_rules.append((is_known, f"{clause}; supported: {supported}"))
        clause = f"a scale per token and head is not supported for {name} stored in {stored_dtype.name}"
        stored_rules.append((stored_dtype.itemsize == 1 or not has_scales, f"{clause}, only for 8-bit ones"))
    return first_reason(
        (
            must_be_one_of("layout", layout, LAYOUTS),
            must_be_one_of("query dtype", dtype.name, DTYPES),
            *stored_rules,
            _head_dim_rule(head_dim, tuple(kv_dtypes.values())),
            must_be_one_of("block_size", block_size, BLOCK_SIZES),
            (
                group <= MAX_GROUP,
                f"{group} query heads per KV head are not supported; the maximum is {MAX_GROUP}",
            ),
            (
                decode_query_len <= MAX_DECODE_QUERY_LEN,
                f"decode_query_len={decode_query_len} is not supported; "
                f"the maximum is {MAX_DECODE_QUERY_LEN}",
            ),
        )
    )


def why_not_head_dim(head_dim: int, kv_dtypes: tuple[DTypeLike, DTypeLike]) -> str | None:
    """Return why paged_decode does not support a head_dim with these dtypes of keys and values, or None."""
    return first_reason([_head_dim_rule(head_dim, kv_dtypes)])


def why_not_prefill(
    *,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    head_dim: int,
    block_size: int | None,
    layout: str = "NHD",
) -> str | None:
    """Return why varlen_prefill does not support a request, or None if it does.

    Args:
        dtype: Dtype of the queries.
        kv_dtype: Dtype of the keys and values.
        head_dim: Elements per head.
        block_size: Tokens per cache block; None for packed keys.
        layout: Cache layout, "NHD" or "HND".
    """
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    rules = [
        must_be_one_of("layout", layout, LAYOUTS),
        must_be_one_of("query dtype", dtype.name, DTYPES),
        (kv_dtype == dtype, f"keys of {kv_dtype.name} are not supported with {dtype.name} queries"),
        must_be_one_of("head_dim", head_dim, HEAD_DIMS),
    ]
    if block_size is not None:
        rules.append(must_be_one_of("block_size", block_size, BLOCK_SIZES))
    return first_reason(rules)


def why_not_dequantize(*, kv_dtypes: tuple[DTypeLike, DTypeLike], head_dim: int) -> str | None:
    """Return why varlen_prefill cannot dequantize these keys and values of a paged cache, or None."""
    rules = [
        must_be_one_of("cache dtype", jnp.dtype(x).name, EIGHT_BIT_DTYPES, " by the kernel's dequantization")
        for x in kv_dtypes
    ]
    head_dim_rule = must_be_one_of(
        "head_dim", head_dim, DEQUANTIZED_HEAD_DIMS, " by the kernel's dequantization"
    )
    return first_reason([*rules, head_dim_rule])


def why_not_backward(*, dtypes: Mapping[str, DTypeLike], head_dim: int) -> str | None:
    """Return why varlen_backward does not support a request, or None if it does.

    Args:
        dtypes: Dtype of each array by its name; `dtypes["query"]` is that of the queries.
        head_dim: Elements per head.
    """
    named = {name: jnp.dtype(dtype).name for name, dtype in dtypes.items()}
    query = named["query"]
    return first_reason(
        (
            must_be_one_of("query dtype", query, DTYPES),
            *(
                (dtype == query, f"{name} of {dtype} is not supported with {query} queries")
                for name, dtype in named.items()
            ),
            must_be_one_of("head_dim", head_dim, BACKWARD_HEAD_DIMS, " for gradients"),
        )
    )


def why_not_read(
    *, dtype: DTypeLike, cache_dtype: DTypeLike, head_dim: int, block_size: int, layout: str = "NHD"
) -> str | None:
    """Return why cache_read does not support a cache, or None if it does.

    Args:
        dtype: Dtype of the result.
        cache_dtype: Dtype that the keys or values are stored in.
        head_dim: Elements per head.
        block_size: Tokens per cache block.
        layout: Cache layout, "NHD" or "HND".
    """
    dtype, cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
    return first_reason(
        (
            must_be_one_of("layout", layout, LAYOUTS),
            must_be_one_of("dtype", dtype.name, DTYPES),
            must_be_one_of("cache dtype", cache_dtype.name, (*EIGHT_BIT_DTYPES, dtype.name)),
            _head_dim_rule(head_dim, (cache_dtype,)),
            must_be_one_of("block_size", block_size, BLOCK_SIZES),
        )
    )


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
    """Return why cache_write does not support a cache, or None if it does.

    Args:
        dtype: Dtype of the new keys and values.
        k_dtype: Dtype that keys are stored in.
        v_dtype: Dtype that values are stored in.
        layout: Cache layout, "NHD" or "HND".
        kv_heads: KV heads per token.
        head_dim: Elements per head.
        k_scale_ndim: Axes of the scale of the keys: 3 for a scale per token and head, 0 for a scalar; None if
            keys have no scale.
        v_scale_ndim: Axes of the scale of the values; see `k_scale_ndim`.
    """
    dtype = jnp.dtype(dtype)
    kv_dtypes = {name: jnp.dtype(x) for name, x in (("keys", k_dtype), ("values", v_dtype))}
    is_quantized = any(x != dtype for x in kv_dtypes.values())
    min_itemsize = min(x.itemsize for x in kv_dtypes.values())
    token_bytes, head_bytes = kv_heads * head_dim * min_itemsize, head_dim * min_itemsize
    needs_alignment = layout == "HND" or is_quantized
    rules = [must_be_one_of("layout", layout, LAYOUTS)]
    for (name, stored_dtype), ndim in zip(kv_dtypes.items(), (k_scale_ndim, v_scale_ndim), strict=True):
        can_quantize = dtype.name in DTYPES and stored_dtype.name in ("int8", "float8_e4m3fn")
        is_plain = stored_dtype == dtype and ndim is None
        has_known_scale = stored_dtype != dtype and ndim in (None, 0, 3)
        clause = f"writing {name} of {dtype.name} into a cache of {stored_dtype.name}"
        rules.append((stored_dtype == dtype or can_quantize, f"{clause} is not supported"))
        rules.append((is_plain or has_known_scale, f"{clause} with a scale of {ndim} axes is not supported"))
    alignment = f"with layout={layout} and stored dtypes {join_values(x.name for x in kv_dtypes.values())}"
    rules += [
        (
            token_bytes % 16 == 0,
            f"{token_bytes} bytes of keys per token are not supported; they must be a multiple of 16",
        ),
        (
            not needs_alignment or token_bytes % 128 == 0,
            f"{token_bytes} bytes of keys per token are not supported {alignment}; "
            "they must be a multiple of 128",
        ),
        (
            not needs_alignment or head_bytes % 16 == 0,
            f"{head_bytes} bytes per head are not supported {alignment}; they must be a multiple of 16",
        ),
    ]
    if is_quantized:
        rules.append(must_be_one_of("head_dim", head_dim, HEAD_DIMS, " for an 8-bit cache"))
    if layout == "HND":
        clause = "is not supported with layout=HND; the maximum is 256"
        rules += [(kv_heads <= 256, f"kv_heads={kv_heads} {clause}")]
        rules += [(head_dim <= 256, f"head_dim={head_dim} {clause}")]
    return first_reason(rules)


def why_not_qkv_write(
    *, dtype: DTypeLike, k_dtype: DTypeLike, v_dtype: DTypeLike, layout: str, head_dim: int
) -> str | None:
    """Return why qkv_write does not support a request, or None if it does.

    Args:
        dtype: Dtype of queries, keys and values.
        k_dtype: Dtype that keys are stored in.
        v_dtype: Dtype that values are stored in.
        layout: Cache layout, "NHD" or "HND".
        head_dim: Elements per head.
    """
    name = jnp.dtype(dtype).name
    names = jnp.dtype(k_dtype).name, jnp.dtype(v_dtype).name
    # Each lane holds a power of 2 of the elements of half a head, which the 60 of head_dim 120 do not allow.
    halved = tuple(dim for dim in HEAD_DIMS if dim % 16 == 0)
    caches = f"caches of {join_values(names)} are not supported with {name} inputs; both must be {name}"
    return first_reason(
        [
            must_be_one_of("dtype", name, DTYPES),
            must_be_one_of("layout", layout, LAYOUTS),
            (names == (name, name), caches),
            must_be_one_of("head_dim", head_dim, halved),
        ]
    )


def why_not_add_norm(*, dtype: DTypeLike, other_dtypes: Sequence[DTypeLike], width: int) -> str | None:
    """Return why add_norm does not support a request, or None if it does.

    Args:
        dtype: Dtype of the residual stream.
        other_dtypes: Dtypes of what is added to it and of the weight.
        width: Elements per row.
    """
    name = jnp.dtype(dtype).name
    different = sorted({jnp.dtype(x).name for x in other_dtypes} - {name})
    return first_reason(
        [
            must_be_one_of("dtype", name, DTYPES),
            (
                not different,
                f"inputs of {name} and {join_values(different)} are not supported; use one dtype",
            ),
            (
                width % 128 == 0 and 0 < width <= 16384,
                f"rows of {width} elements are not supported; supported: multiples of 128 up to 16384",
            ),
        ]
    )


def why_not_grouped_matmul(
    *, dtype: DTypeLike, weights_dtype: DTypeLike, inputs: int, outputs: int
) -> str | None:
    """Return why grouped_matmul does not support a product, or None if it does.

    Args:
        dtype: Dtype of the rows.
        weights_dtype: Dtype of the matrices.
        inputs: Elements per row, which the product sums over.
        outputs: Columns of the result.
    """
    rows, weights = jnp.dtype(dtype).name, jnp.dtype(weights_dtype).name
    multiples = "is not supported; supported: multiples of 64"
    return first_reason(
        [
            must_be_one_of("dtype", rows, DTYPES),
            must_be_one_of("weights dtype", weights, DTYPES),
            (rows == weights, f"rows of {rows} are not supported with weights of {weights}; use one dtype"),
            (inputs % 64 == 0 and inputs > 0, f"inputs={inputs} {multiples}"),
            (outputs % 64 == 0 and outputs > 0, f"outputs={outputs} {multiples}"),
        ]
    )
