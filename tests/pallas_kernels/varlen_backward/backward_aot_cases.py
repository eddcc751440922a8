"""The shipped backward kernels to compile ahead of time: every head_dim, dtype and feature."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import masks
from jattn.implementations import mosaic_gpu
from jattn.implementations.mosaic_gpu.query_rows import num_rows_per_token
from jattn.implementations.mosaic_gpu.tile_lists import PackedLens, backward_sizes, plan_backward_mask
from jattn.implementations.region_inputs import OutputGradients, RegionInputs
from pallas_kernels.architectures import kernel_architecture
from pallas_kernels.shared.score import Score
from pallas_kernels.support import KERNELS, why_not_backward
from pallas_kernels.varlen_backward import default_sizes, make_schedule, varlen_backward
from tests.masks.custom_masks import KeyRanges

FEATURES = {
    "plain": {},
    "window": {"window": (1023, 0)},
    "cap_alibi": {"soft_cap": 30.0, "has_alibi": True},
    "chunk_sqrt_alibi": {"chunk_size": 8192, "sqrt_alibi": True, "has_alibi": True},
    "cross_window": {"causal": False, "window": (100, 4)},
    "cross": {"causal": False},
}


def case(head_dim, dtype, *, tokens=8192, has_alibi=False, sizes=None, **score):
    shape, reqs, q_heads, kv_heads = jax.ShapeDtypeStruct, 24, 32, 8
    query, key = (shape((tokens, heads, head_dim), dtype) for heads in (q_heads, kv_heads))
    arrays = {name: query for name in ("query", "out", "grad_out")}
    arrays |= {name: key for name in ("key", "value")}
    arrays |= {name: shape((q_heads, tokens), jnp.float32) for name in ("lse", "grad_lse")}
    arrays |= {name: shape((reqs,), jnp.int32) for name in ("seq_lens", "kv_start_loc")}
    arrays["query_start_loc"] = shape((reqs + 1,), jnp.int32)
    if has_alibi:
        arrays["alibi_slopes"] = shape((q_heads,), jnp.float32)
    sizes = default_sizes(head_dim, gpu=kernel_architecture()) if sizes is None else sizes
    run = functools.partial(varlen_backward, score=Score(scale=0.1, **score), sizes=sizes)
    return lambda arrays: run(**arrays), (arrays,)


def listed_case(head_dim, mask, *, deterministic=False, sizes=None, is_aligned=False):
    """Return a kernel over tile lists, as attention under a mask of jattn uses them."""
    _, (arrays,) = case(head_dim, jnp.dtype("bfloat16"))
    spec = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=head_dim)
    static = {"kv_tokens": 8192, "kv_heads": 8, "head_dim": head_dim}
    if sizes is None:
        sizes = default_sizes(head_dim, deterministic=deterministic, gpu=kernel_architecture())
    layer_options = {"score": Score(scale=0.1), "sizes": sizes}

    def run(arrays, mask):
        lens = PackedLens(*(arrays[name] for name in PackedLens._fields))
        schedule = make_schedule(*lens, **static, num_tokens=8192, has_lists=True, **layer_options)
        bounds = {"num_rows": 8192, "max_seq_len": 8192, "is_aligned": is_aligned}
        lists, mask_in_kernel = plan_backward_mask(mask, spec, lens, schedule, sizes=sizes, **bounds)
        listed = {"lists": lists, "mask": mask_in_kernel, "schedule": schedule}
        return varlen_backward(**arrays, **layer_options, **listed, has_aligned_keys=is_aligned)

    return run, (arrays, mask)  # as an argument: XLA would fold what it makes of stored numbers


LISTED = {
    "documents": masks.Document(ids=np.arange(8192, dtype=np.int32) // 300),
    "vertical_slash": masks.VerticalSlash(
        columns=np.arange(32 * 8192).reshape(32, 8192) % 7 == 0,
        slashes=np.arange(32 * 8192).reshape(32, 8192) % 11 == 0,
    ),
}


def aot_cases():
    """Return (function, abstract arguments) by the name of the case, for the compute capability `target`."""
    cases, gpu = {}, kernel_architecture()
    is_supported = lambda dim: why_not_backward(dtypes={"query": "bfloat16"}, head_dim=dim, gpu=gpu) is None
    head_dims = list(filter(is_supported, KERNELS["varlen_backward"].head_dims))
    for i, (head_dim, feature) in enumerate(itertools.product(head_dims, FEATURES)):
        dtype = ("bfloat16", "float16")[(i + i // len(FEATURES)) % 2]
        cases[f"d{head_dim}-{feature}-{dtype}"] = case(head_dim, jnp.dtype(dtype), **FEATURES[feature])
    cases |= {f"d64-{name}": listed_case(64, mask) for name, mask in LISTED.items()}
    cases |= {
        f"d{head_dim}-two_kernels-{name}": listed_case(head_dim, mask, deterministic=True)
        for head_dim in filter(is_supported, (64, 128, 256))
        for name, mask in LISTED.items()
    }
    ranges = KeyRanges(begin=np.arange(8192, dtype=np.int32), end=np.arange(8192, dtype=np.int32) + 900)
    two_sizes = functools.partial(default_sizes, deterministic=True, gpu=gpu)
    two = lambda dim: case(dim, jnp.dtype("bfloat16"), sizes=two_sizes(dim))
    cases |= {f"d{dim}-two_kernels": two(dim) for dim in (64, 128)}
    cases |= {f"d{dim}-key_ranges": listed_case(dim, ranges) for dim in (64, 128)}
    blocks = np.arange(32 * 64 * 256).reshape(32, 64, 256) % 7 == 0
    packed = masks.BlockMask(blocks=blocks, block_q=128, block_kv=32)
    cases |= {"d128-two_kernels-blocks_32": listed_case(128, packed, deterministic=True)}
    cases |= {f"d{dim}-small_blocks_{size}": small_blocks(dim, size) for dim, size in SMALL_BLOCKS}
    return cases | {f"d128-{rows}_rows_per_token": heads_as_rows(rows) for rows in (4, 16)}


SMALL_BLOCKS = [(128, 64), (128, 32), (64, 64), (64, 32), (80, 64), (112, 16)]
ALIGNED = [(128, 64), (64, 32), (112, 16)]  # of SMALL_BLOCKS, those over aligned keys


def small_blocks(head_dim, size):
    """Return a kernel over tile lists of a mask with blocks smaller than 128 x 128, with the sizes for it."""
    count = 8192 // size
    blocks = np.arange(32 * count**2).reshape(32, count, count) % 7 == 0
    mask = masks.BlockMask(blocks=blocks, block_q=size, block_kv=size)
    spec = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=head_dim)
    sizes = backward_sizes(mask, spec, mean_len=0, gpu=kernel_architecture())
    return listed_case(head_dim, mask, sizes=sizes, is_aligned=(head_dim, size) in ALIGNED)


def heads_as_rows(rows):
    """Return the gradients under a mask in which each query selects blocks, with `rows` heads as rows."""
    shape, kv_heads = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16), 32 // rows
    query, key = shape((8192, 32, 128)), shape((8192, kv_heads, 128))
    lse = jax.ShapeDtypeStruct((32, 8192), jnp.float32)
    spec = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=kv_heads, head_dim=128)
    mask = masks.BlockMask(
        blocks=np.arange(8192 * 128).reshape(1, 8192, 128) % 7 == 0, block_q=1, block_kv=64
    )
    assert num_rows_per_token(mask, spec, num_tokens=8192, num_reqs=1) == rows
    metadata = jattn.build_batch_metadata([8192], [8192], None)

    def run(query, key, value, mask, outputs):
        kv = jattn.PackedKV(
            k=key, v=value, kv_start_loc=jnp.zeros(1, jnp.int32), is_in_order=True, is_aligned=True
        )
        inputs = RegionInputs(query=query, kv=kv, metadata=metadata, mask=mask, spec=spec)
        return mosaic_gpu.gradients(inputs, outputs)

    return run, (query, key, key, mask, OutputGradients(query, lse, query, None))
