"""What each kernel supports: the table KERNELS, and the functions that compare a request with it.

Every `why_not_*` function looks at static facts only. It returns None if the kernel supports a request, or
else a clause that says what is not supported and what is. The clause completes the kernels' errors, the table
of a plan and the report of `jattn doctor`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import architectures
from pallas_kernels.architectures import ARCHITECTURES, GPU_PLATFORMS, HOPPER, SINCE_AMPERE
from pallas_kernels.checks import require_one_of, unsupported
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import EIGHT_BIT_HEAD_DIMS, HEAD_DIMS

DTYPES = ("bfloat16", "float16")
EIGHT_BIT_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
LAYOUTS = ("NHD", "HND")


# Shared memory of a kernel with per-warp products for column indices, row statistics and reductions.
WARP_RESERVED_BYTES = 3072


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSupport:
    """Capabilities of a kernel. An empty tuple means that the kernel does not depend on the property.

    Attributes:
        compute_capabilities: GPU architectures.
        dtypes: Dtypes of queries, keys and values, or of the kernel's other inputs.
        eight_bit_dtypes: Further dtypes of the cache.
        head_dims: Elements per head.
        eight_bit_head_dims: Elements per head with an 8-bit cache.
        block_sizes: Tokens per cache block.
        layouts: Cache layouts.
        maxima: Name of a number -> its maximum.
    """

    compute_capabilities: tuple[str, ...] = HOPPER
    dtypes: tuple[str, ...] = DTYPES
    eight_bit_dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    eight_bit_head_dims: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    maxima: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def head_dim_rule(self, head_dim: int, kv_dtypes: Sequence[DTypeLike], condition: str = "") -> "Rule":
        """Return the rule that the kernel supports a head_dim with these dtypes of keys and values."""
        if {jnp.dtype(dtype).itemsize for dtype in kv_dtypes} == {2}:
            return must_be_one_of("head_dim", head_dim, self.head_dims, condition)
        condition = condition or " for 8-bit keys or values"
        return must_be_one_of("head_dim", head_dim, self.eight_bit_head_dims, condition)


KERNELS = {
    "paged_decode": KernelSupport(
        compute_capabilities=SINCE_AMPERE,
        eight_bit_dtypes=EIGHT_BIT_DTYPES,
        head_dims=HEAD_DIMS,
        eight_bit_head_dims=EIGHT_BIT_HEAD_DIMS,
        block_sizes=BLOCK_SIZES,
        layouts=LAYOUTS,
        maxima={"query heads per KV head": 64, "decode_query_len": 8},
    ),
    "varlen_prefill": KernelSupport(
        compute_capabilities=SINCE_AMPERE,
        eight_bit_dtypes=EIGHT_BIT_DTYPES,
        head_dims=HEAD_DIMS,
        # The kernel holds a tile both quantized and dequantized: wider heads do not fit shared memory, and 80
        # is split into other chunks in 8 bits than in 16. cache_read dequantizes other head dims before.
        eight_bit_head_dims=(32, 64, 96, 128),
        block_sizes=BLOCK_SIZES,
        layouts=LAYOUTS,
    ),
    "varlen_backward": KernelSupport(
        compute_capabilities=SINCE_AMPERE, head_dims=(32, 64, 80, 96, 112, 128, 192, 256)
    ),
    "cache_read": KernelSupport(
        compute_capabilities=SINCE_AMPERE,
        eight_bit_dtypes=EIGHT_BIT_DTYPES,
        head_dims=HEAD_DIMS,
        eight_bit_head_dims=EIGHT_BIT_HEAD_DIMS,
        block_sizes=BLOCK_SIZES,
        layouts=LAYOUTS,
    ),
    # Copies into a cache of the inputs' dtype depend on the bytes per token and head alone.
    "cache_write": KernelSupport(
        compute_capabilities=SINCE_AMPERE,
        eight_bit_dtypes=("int8", "float8_e4m3fn"),
        eight_bit_head_dims=HEAD_DIMS,
        layouts=LAYOUTS,
        maxima={"kv_heads with layout HND": 256, "head_dim with layout HND": 256},
    ),
    # Each lane holds a power of 2 of the elements of half a head, which the 60 of head_dim 120 do not allow.
    "qkv_write": KernelSupport(
        compute_capabilities=SINCE_AMPERE,
        head_dims=tuple(dim for dim in HEAD_DIMS if dim % 16 == 0),
        layouts=LAYOUTS,
    ),
    "block_scores": KernelSupport(
        compute_capabilities=SINCE_AMPERE, head_dims=(64, 128, 256), maxima={"query heads": 256}
    ),
    "add_norm": KernelSupport(compute_capabilities=SINCE_AMPERE, maxima={"elements per row": 16384}),
    "grouped_matmul": KernelSupport(compute_capabilities=SINCE_AMPERE),
    # Up to 128 thread blocks wait for each other and must run at the same time, one per SM.
    "all_reduce": KernelSupport(compute_capabilities=("9.0", "10.0", "10.3")),
}


def format_kernels() -> list[tuple[str, ...]]:
    """Return KERNELS as rows of text; the first row is the header, and an empty cell is a free choice."""
    columns = {
        "GPU": "compute_capabilities",
        "dtypes": "dtypes",
        "8-bit caches": "eight_bit_dtypes",
        "head_dim": "head_dims",
        "head_dim, 8-bit caches": "eight_bit_head_dims",
        "block size": "block_sizes",
        "layouts": "layouts",
    }
    rows: list[tuple[str, ...]] = [("kernel", *columns, "at most")]
    for name, kernel in KERNELS.items():
        cells = (join_values(getattr(kernel, field)) for field in columns.values())
        maxima = join_values(f"{maximum} {number}" for number, maximum in kernel.maxima.items())
        rows.append((name, *cells, maxima))
    return rows


def why_not_on(*trees: object) -> str | None:
    """Return why no kernel can run on the device of these arrays or of `target`, or None if some can."""
    capability = architectures.target_capability()
    if capability is not None:
        return _why_not_capability(capability)
    return why_not_device(architectures.device_of(*trees))


def why_not_device(device: Any, kernel: str | None = None) -> str | None:
    """Return why a kernel, or with None every kernel, cannot run on a device; None if it can."""
    if device.platform not in GPU_PLATFORMS:
        return f"the kernels need an NVIDIA GPU, and JAX's platform here is {device.platform!r}"
    return _why_not_capability(getattr(device, "compute_capability", None), kernel)


def why_not_kernel_on(kernel: str, *trees: object) -> str | None:
    """Return why a kernel cannot run on the device of these arrays or of `target`, or None if it can."""
    reason = why_not_on(*trees)
    return reason or _why_not_capability(architectures.kernel_architecture(*trees), kernel)


def why_not_architecture(kernel: str, capability: str) -> str | None:
    """Return why a kernel does not exist for a compute capability, or None if it does."""
    return _why_not_capability(capability, kernel)


def _why_not_capability(capability: str | None, kernel: str | None = None) -> str | None:
    name = "the kernels" if kernel is None else kernel
    supported = ARCHITECTURES if kernel is None else KERNELS[kernel].compute_capabilities
    if capability in supported:
        return None
    verb = "are" if kernel is None else "is"
    return (
        f"{name} {verb} compiled for compute capability {join_values(supported)}, "
        f"and this GPU has {capability}"
    )


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
    for holds, reason in rules:
        if not holds:
            return reason
    return None


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
    list_block_size: int | None = None,
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
        list_block_size: Number of keys per sparse block of a list; None without lists.
    """
    kernel = KERNELS["paged_decode"]
    max_group = kernel.maxima["query heads per KV head"]
    max_query_len = kernel.maxima["decode_query_len"]
    dtype, kv_dtypes = jnp.dtype(dtype), {"keys": jnp.dtype(k_dtype), "values": jnp.dtype(v_dtype)}
    stored_rules: list[Rule] = []
    for (name, stored_dtype), has_scales in zip(kv_dtypes.items(), has_token_scales, strict=True):
        is_known = stored_dtype == dtype or stored_dtype.name in kernel.eight_bit_dtypes
        supported = join_values((dtype.name, *kernel.eight_bit_dtypes))
        clause = f"{name} stored in {stored_dtype.name} are not supported with {dtype.name} queries"
        stored_rules.append((is_known, f"{clause}; supported: {supported}"))
        clause = f"a scale per token and head is not supported for {name} stored in {stored_dtype.name}"
        stored_rules.append((stored_dtype.itemsize == 1 or not has_scales, f"{clause}, only for 8-bit ones"))
    has_listed_scales = list_block_size == 1 and any(has_token_scales)
    clause = "a scale per token and head is not supported with lists of single keys"
    stored_rules.append((not has_listed_scales, clause))
    return first_reason(
        (
            must_be_one_of("layout", layout, kernel.layouts),
            must_be_one_of("query dtype", dtype.name, kernel.dtypes),
            *stored_rules,
            kernel.head_dim_rule(head_dim, tuple(kv_dtypes.values())),
            must_be_one_of("block_size", block_size, kernel.block_sizes),
            (
                group <= max_group,
                f"{group} query heads per KV head are not supported; the maximum is {max_group}",
            ),
            (
                decode_query_len <= max_query_len,
                f"decode_query_len={decode_query_len} is not supported; the maximum is {max_query_len}",
            ),
        )
    )


def why_not_head_dim(head_dim: int, kv_dtypes: tuple[DTypeLike, DTypeLike]) -> str | None:
    """Return why paged_decode does not support a head_dim with these dtypes of keys and values, or None."""
    return first_reason([KERNELS["paged_decode"].head_dim_rule(head_dim, kv_dtypes)])


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
    kernel = KERNELS["varlen_prefill"]
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    rules = [
        must_be_one_of("layout", layout, kernel.layouts),
        must_be_one_of("query dtype", dtype.name, kernel.dtypes),
        (kv_dtype == dtype, f"keys of {kv_dtype.name} are not supported with {dtype.name} queries"),
        must_be_one_of("head_dim", head_dim, kernel.head_dims),
    ]
    if block_size is not None:
        rules.append(must_be_one_of("block_size", block_size, kernel.block_sizes))
    return first_reason(rules)


def why_not_dequantize(
    *, kv_dtypes: tuple[DTypeLike, DTypeLike], head_dim: int, gpu: str = "9.0"
) -> str | None:
    """Return why varlen_prefill cannot dequantize these keys and values of a paged cache, or None.

    Args:
        kv_dtypes: Dtypes that keys and values are stored in.
        head_dim: Elements per head.
        gpu: Compute capability that the kernel is built for.
    """
    kernel, condition = KERNELS["varlen_prefill"], " by the kernel's dequantization"
    is_hopper = ARCHITECTURES[gpu].has_wgmma
    rules: list[Rule] = [
        (is_hopper, f"an 8-bit KV cache is not supported by varlen_prefill on compute capability {gpu}")
    ]
    rules += [
        must_be_one_of(
            "cache dtype", jnp.dtype(x).name, kernel.eight_bit_dtypes, " by the kernel's dequantization"
        )
        for x in kv_dtypes
    ]
    return first_reason([*rules, kernel.head_dim_rule(head_dim, kv_dtypes, condition)])


def why_not_backward(*, dtypes: Mapping[str, DTypeLike], head_dim: int, gpu: str = "9.0") -> str | None:
    """Return why varlen_backward does not support a request, or None if it does.

    Args:
        dtypes: Dtype of each array by its name; `dtypes["query"]` is that of the queries.
        head_dim: Elements per head.
        gpu: Compute capability that the kernels are built for.
    """
    kernel = KERNELS["varlen_backward"]
    head_dims, condition = kernel.head_dims, " for gradients"
    if not ARCHITECTURES[gpu].has_wgmma:
        # Queries, dO, keys and values of a warpgroup must fit shared memory together.
        max_dim = (ARCHITECTURES[gpu].smem_bytes - WARP_RESERVED_BYTES) // (4 * WARPGROUP_ROWS * 2)
        head_dims = tuple(dim for dim in head_dims if dim <= max_dim)
        condition = f" for gradients on compute capability {gpu}"
    named = {name: jnp.dtype(dtype).name for name, dtype in dtypes.items()}
    query = named["query"]
    return first_reason(
        (
            must_be_one_of("query dtype", query, kernel.dtypes),
            *(
                (dtype == query, f"{name} of {dtype} is not supported with {query} queries")
                for name, dtype in named.items()
            ),
            must_be_one_of("head_dim", head_dim, head_dims, condition),
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
    kernel = KERNELS["cache_read"]
    dtype, cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
    return first_reason(
        (
            must_be_one_of("layout", layout, kernel.layouts),
            must_be_one_of("dtype", dtype.name, kernel.dtypes),
            must_be_one_of("cache dtype", cache_dtype.name, (*kernel.eight_bit_dtypes, dtype.name)),
            kernel.head_dim_rule(head_dim, (cache_dtype,)),
            must_be_one_of("block_size", block_size, kernel.block_sizes),
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
    gpu: str = "9.0",
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
        gpu: Compute capability that the kernel is built for.
    """
    kernel = KERNELS["cache_write"]
    dtype = jnp.dtype(dtype)
    kv_dtypes = {name: jnp.dtype(x) for name, x in (("keys", k_dtype), ("values", v_dtype))}
    is_quantized = any(x != dtype for x in kv_dtypes.values())
    min_itemsize = min(x.itemsize for x in kv_dtypes.values())
    token_bytes, head_bytes = kv_heads * head_dim * min_itemsize, head_dim * min_itemsize
    needs_alignment = layout == "HND" or is_quantized
    rules = [must_be_one_of("layout", layout, kernel.layouts)]
    for (name, stored_dtype), ndim in zip(kv_dtypes.items(), (k_scale_ndim, v_scale_ndim), strict=True):
        can_quantize = dtype.name in kernel.dtypes and stored_dtype.name in kernel.eight_bit_dtypes
        is_plain = stored_dtype == dtype and ndim is None
        has_known_scale = stored_dtype != dtype and ndim in (None, 0, 3)
        clause = f"writing {name} of {dtype.name} into a cache of {stored_dtype.name}"
        rules.append((stored_dtype == dtype or can_quantize, f"{clause} is not supported"))
        needs_conversion = stored_dtype != dtype and stored_dtype != jnp.int8
        has_conversion = ARCHITECTURES[gpu].has_fp8_conversion or not needs_conversion
        rules.append((has_conversion, f"{clause} is not supported on compute capability {gpu}"))
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
        rules.append(must_be_one_of("head_dim", head_dim, kernel.eight_bit_head_dims, " for an 8-bit cache"))
    if layout == "HND":
        for name, value in (("kv_heads", kv_heads), ("head_dim", head_dim)):
            maximum = kernel.maxima[f"{name} with layout HND"]
            clause = f"{name}={value} is not supported with layout=HND; the maximum is {maximum}"
            rules.append((value <= maximum, clause))
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
    kernel = KERNELS["qkv_write"]
    name = jnp.dtype(dtype).name
    names = jnp.dtype(k_dtype).name, jnp.dtype(v_dtype).name
    caches = f"caches of {join_values(names)} are not supported with {name} inputs; both must be {name}"
    return first_reason(
        [
            must_be_one_of("dtype", name, kernel.dtypes),
            must_be_one_of("layout", layout, kernel.layouts),
            (names == (name, name), caches),
            must_be_one_of("head_dim", head_dim, kernel.head_dims),
        ]
    )


def why_not_add_norm(*, dtype: DTypeLike, other_dtypes: Sequence[DTypeLike], width: int) -> str | None:
    """Return why add_norm does not support a request, or None if it does.

    Args:
        dtype: Dtype of the residual stream.
        other_dtypes: Dtypes of what is added to it and of the weight.
        width: Elements per row.
    """
    kernel = KERNELS["add_norm"]
    max_width = kernel.maxima["elements per row"]
    name = jnp.dtype(dtype).name
    different = sorted({jnp.dtype(x).name for x in other_dtypes} - {name})
    return first_reason(
        [
            must_be_one_of("dtype", name, kernel.dtypes),
            (
                not different,
                f"inputs of {name} and {join_values(different)} are not supported; use one dtype",
            ),
            (
                width % 128 == 0 and 0 < width <= max_width,
                f"rows of {width} elements are not supported; supported: multiples of 128 up to {max_width}",
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
    kernel = KERNELS["grouped_matmul"]
    rows, weights = jnp.dtype(dtype).name, jnp.dtype(weights_dtype).name
    multiples = "is not supported; supported: multiples of 64"
    return first_reason(
        [
            must_be_one_of("dtype", rows, kernel.dtypes),
            must_be_one_of("weights dtype", weights, kernel.dtypes),
            (rows == weights, f"rows of {rows} are not supported with weights of {weights}; use one dtype"),
            (inputs % 64 == 0 and inputs > 0, f"inputs={inputs} {multiples}"),
            (outputs % 64 == 0 and outputs > 0, f"outputs={outputs} {multiples}"),
        ]
    )
