"""Every `why_not` function against its kernel: supported requests lower, and the kernel refuses others.

Lowering needs no GPU and no CUDA: Pallas says there what it cannot compile.
"""

import functools
import inspect
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import architectures, support
from pallas_kernels.cache_read import cache_read
from pallas_kernels.cache_write import cache_write
from pallas_kernels.list_tiles import encode_tiles, list_tiles
from pallas_kernels.paged_decode import DecodeSizes, default_sizes, paged_decode
from pallas_kernels.paged_decode import make_schedule as make_decode_schedule
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import PrefillSizes, make_schedule, make_tile_lists, varlen_prefill

HEAD_DIMS = [128, 64, 16, 32, 48, 72, 80, 96, 112, 120, 160, 192, 256, 320, 512]
HEADS = {"kv_heads": [1, 2, 3, 5, 8], "head_dim": HEAD_DIMS}
CACHE = HEADS | {
    "layout": ["NHD", "HND"],
    "block_size": [16, 4, 8, 24, 32, 64, 128, 256, 512],
    "dtype": ["bfloat16", "float16", "float32"],
    "stored": ["same", "int8", "float8_e4m3fn", "float8_e5m2", "float32"],
    "scale": ["none", "scalar", "head", "channel", "token"],
}
GROUPS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 65]
REQUESTS = {"reqs": [3, 0, 1], "max_blocks": [5, 0, 1]}
DECODE = CACHE | REQUESTS | {"group": GROUPS, "query_len": [1, 2, 3, 5, 8, 9]}
PREFILL = (
    HEADS
    | REQUESTS
    | {
        "layout": ["NHD", "HND", "packed"],
        "block_size": CACHE["block_size"],
        "dtype": CACHE["dtype"],
        "group": GROUPS,
        "tokens": [40, 0, 1],
    }
)
READ = CACHE | REQUESTS
STORED = [
    ("same", "same"), ("int8", "int8"), ("float8_e4m3fn", "same"), ("float8_e5m2", "int8"),
    ("int8", "float32"),
]  # fmt: skip
WRITE = HEADS | {
    "layout": CACHE["layout"],
    "dtype": CACHE["dtype"],
    "stored": STORED,
    "scale": ["none", "scalar", "token", "head"],
    "tokens": [7, 0, 1, 2000],
}


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def cache_of(case, stored):
    """Return an abstract cache and its abstract scale, or None."""
    heads, size, dim = case["kv_heads"], case.get("block_size", 16), case["head_dim"]
    dtype = jnp.dtype(case["dtype"] if stored == "same" else stored)
    rows = (size, heads) if case["layout"] == "NHD" else (heads, size)
    scales = {
        "none": None,
        "scalar": (),
        "head": (heads,),
        "channel": (heads, dim),
        "token": (9, heads, size),
    }
    scale = scales[case["scale"]] if "scale" in case else None
    scale = None if scale is None else jax.ShapeDtypeStruct(scale, jnp.float32)
    return jax.ShapeDtypeStruct((9, *rows, dim), dtype), scale


def decode(case):
    cache, scale = cache_of(case, case["stored"])
    has_token_scale = scale is not None and len(scale.shape) == 3
    reason = support.why_not_decode(
        dtype=case["dtype"],
        k_dtype=cache.dtype,
        v_dtype=cache.dtype,
        head_dim=case["head_dim"],
        block_size=case["block_size"],
        group=case["group"],
        decode_query_len=case["query_len"],
        layout=case["layout"],
        has_token_scales=(has_token_scale, has_token_scale),
    )
    k_scale = None if case["scale"] == "channel" else scale
    tokens, q_heads = case["reqs"] * case["query_len"], case["kv_heads"] * case["group"]
    query = jax.ShapeDtypeStruct((tokens, q_heads, case["head_dim"]), case["dtype"])
    run = functools.partial(
        paged_decode, score=Score(scale=0.1), layout=case["layout"], decode_query_len=case["query_len"]
    )
    call = lambda query, cache, table, lens, k_scale, v_scale: run(
        query, cache, cache, table, lens, k_scale=k_scale, v_scale=v_scale
    )
    table = ints(case["reqs"], case["max_blocks"])
    return reason, call, (query, cache, table, ints(case["reqs"]), k_scale, scale)


def prefill(case):
    is_packed = case["layout"] == "packed"
    reason = support.why_not_prefill(
        dtype=case["dtype"],
        kv_dtype=case["dtype"],
        head_dim=case["head_dim"],
        block_size=None if is_packed else case["block_size"],
        layout="NHD" if is_packed else case["layout"],
    )
    q_heads = case["kv_heads"] * case["group"]
    query = jax.ShapeDtypeStruct((case["tokens"], q_heads, case["head_dim"]), case["dtype"])
    lens = ints(case["reqs"] + 1), ints(case["reqs"])
    if is_packed:
        kv = jax.ShapeDtypeStruct((case["tokens"], case["kv_heads"], case["head_dim"]), case["dtype"])
        call = lambda query, kv, starts, lens, block_table: varlen_prefill(
            query, kv, kv, starts, lens, score=Score(scale=0.1), kv_start_loc=block_table
        )
        return reason, call, (query, kv, *lens, ints(case["reqs"]))
    kv, _ = cache_of(case, "same")
    call = lambda query, kv, starts, lens, block_table: varlen_prefill(
        query, kv, kv, starts, lens, score=Score(scale=0.1), block_table=block_table, layout=case["layout"]
    )
    return reason, call, (query, kv, *lens, ints(case["reqs"], case["max_blocks"]))


def read(case):
    cache, scale = cache_of(case, case["stored"])
    reason = support.why_not_read(
        dtype=case["dtype"],
        cache_dtype=cache.dtype,
        head_dim=case["head_dim"],
        block_size=case["block_size"],
        layout=case["layout"],
    )
    run = functools.partial(cache_read, dtype=jnp.dtype(case["dtype"]), layout=case["layout"])
    call = lambda cache, table, first, lens, scale: run(cache, table, first, lens, scale=scale)
    reqs = ints(case["reqs"])
    return reason, call, (cache, ints(case["reqs"], case["max_blocks"]), reqs, reqs, scale)


def write(case):
    (k, k_scale), (v, v_scale) = (cache_of(case, stored) for stored in case["stored"])
    k_scale, v_scale = (None if x.dtype == case["dtype"] else s for x, s in ((k, k_scale), (v, v_scale)))
    reason = support.why_not_write(
        dtype=case["dtype"],
        k_dtype=k.dtype,
        v_dtype=v.dtype,
        layout=case["layout"],
        kv_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        k_scale_ndim=None if k_scale is None else len(k_scale.shape),
        v_scale_ndim=None if v_scale is None else len(v_scale.shape),
    )
    new = jax.ShapeDtypeStruct((case["tokens"], case["kv_heads"], case["head_dim"]), case["dtype"])
    call = lambda new, k, v, slots, k_scale, v_scale: cache_write(
        new, new, k, v, slots, k_scale=k_scale, v_scale=v_scale, layout=case["layout"]
    )
    return reason, call, (new, k, v, ints(case["tokens"]), k_scale, v_scale)


def lowers(call, arguments):
    jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))


def check_case(query_support, case):
    reason, call, arguments = query_support(case)
    if reason is None:
        lowers(call, arguments)
        return
    with pytest.raises(NotImplementedError) as refusal:
        lowers(call, arguments)
    assert reason in str(refusal.value)


FACTORS = {decode: DECODE, prefill: PREFILL, read: READ, write: WRITE}
DRAWS = 100  # until a case of a value is supported_cases, or none is


def supported_cases(query_support, times):
    """Return random supported cases with each supported value of a factor in at least `times` of them."""
    factors, rng = FACTORS[query_support], random.Random(0)
    cases: list[dict] = []
    for name, values in factors.items():
        for value in values:
            for _ in range(DRAWS):
                if sum(case[name] == value for case in cases) >= times:
                    break
                case = {other_name: rng.choice(choices) for other_name, choices in factors.items()} | {
                    name: value
                }
                if query_support(case)[0] is None:
                    cases.append(case)
    return cases


def case_id(case):
    return "-".join(map(str, case.values())).replace(" ", "")


# Attention takes seconds each to lower.
@pytest.mark.parametrize(
    ("query_support", "case"),
    [
        pytest.param(
            query_support,
            case,
            id=f"{query_support.__name__}-{case_id(case)}",
            marks=pytest.mark.slow if i % 2 and query_support in (decode, prefill) else (),
        )
        for query_support in FACTORS
        for i, case in enumerate(supported_cases(query_support, 1))
    ],
)
def test_supported_requests_lower_for_a_gpu(query_support, case):
    check_case(query_support, case)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 100, 10))
@pytest.mark.parametrize("query_support", FACTORS)
def test_more_supported_requests_lower_for_a_gpu(query_support, start):
    for case in supported_cases(query_support, 6)[start:][: None if start == 90 else 10]:
        check_case(query_support, case)


@pytest.mark.parametrize("query_support", FACTORS)
def test_kernels_raise_with_the_reason_of_why_not(query_support):
    factors, rng = FACTORS[query_support], random.Random(1)
    drawn = [{name: rng.choice(choices) for name, choices in factors.items()} for _ in range(150)]
    refused = [case for case in drawn if query_support(case)[0] is not None]
    assert len(refused) > 50
    for case in refused:
        check_case(query_support, case)


ONE = {"reqs": 1, "max_blocks": 1, "tokens": 1, "query_len": 1, "group": 1, "kv_heads": 1, "head_dim": 64}
PLAIN = ONE | {"layout": "NHD", "block_size": 16, "dtype": "bfloat16", "stored": "same", "scale": "none"}
EMPTY = [
    (decode, {"reqs": 0}), (decode, {"max_blocks": 0}), (read, {"reqs": 0}), (read, {"max_blocks": 0}),
    (prefill, {"reqs": 0}), (prefill, {"tokens": 0}), (prefill, {"max_blocks": 0}),
    (prefill, {"layout": "packed", "tokens": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("query_support", "change"), EMPTY)
def test_empty_inputs_give_zeros(query_support, change):
    _, call, arguments = query_support(PLAIN | change)
    zeros = [None if x is None else jnp.zeros(x.shape, x.dtype) for x in arguments]
    results = jax.tree.leaves(call(*zeros))
    assert not any(np.asarray(x, np.float32).any() for x in results[:1])
    assert all(np.isneginf(x).all() for x in results[1:])
    if query_support in (decode, prefill):
        assert results[0].shape == arguments[0].shape


def test_empty_writes_leave_a_cache_unchanged():
    for tokens, blocks in ((0, 2), (3, 0)):
        new, cache = jnp.zeros((tokens, 1, 64), jnp.bfloat16), jnp.ones((blocks, 16, 1, 64), jnp.bfloat16)
        k, v, *_ = cache_write(new, new, cache, cache, jnp.zeros(tokens, jnp.int32))
        np.testing.assert_array_equal(k, cache)
        np.testing.assert_array_equal(v, cache)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_codes_give_empty_lists(shape):
    none = jnp.zeros(shape, bool)
    listed = list_tiles(encode_tiles(none, none))
    assert listed.entries.shape == shape
    for count in (listed.num_partial, listed.num_full):
        np.testing.assert_array_equal(count, np.zeros(shape[0], np.int32))


def zeros_of(query_support, **change):
    arguments = query_support(PLAIN | change)[2]
    return [None if x is None else jnp.zeros(x.shape, x.dtype) for x in arguments]


class TestSchedulesBuiltForOtherCalls:
    """Schedules and lists built for other sizes, tokens, masks or requests."""

    def test_paged_decode_refuses_a_schedule_of_another_call(self):
        query, cache, table, lens, *_ = zeros_of(decode)
        score = Score(scale=0.1)
        plain = {"score": score, "sizes": DecodeSizes(), "kv_heads": 1, "group": 1, "decode_query_len": 1}
        make = lambda lens, **change: make_decode_schedule(lens, **(plain | change))
        run = functools.partial(inspect.unwrap(paged_decode), query, cache, cache, table, lens, score=score)
        with pytest.raises(ValueError, match="schedule was built for keys_per_unit=2048, but this call has"):
            run(schedule=make(lens, sizes=DecodeSizes(split_kv=2048)))
        with pytest.raises(
            ValueError, match=r"built for mask=.*\(5, None\).*, but this call has mask=.*None\), None, 1\)"
        ):
            run(schedule=make(lens, score=Score(scale=0.1, window=(5, None))))
        with pytest.raises(
            ValueError, match="built for decode_query_len=2, but this call has decode_query_len=1"
        ):
            run(schedule=make(lens, decode_query_len=2))
        with pytest.raises(ValueError, match=r"schedule.unit_ends must have shape \(1,\) .*got \(2,\)"):
            run(schedule=make(jnp.zeros(2, jnp.int32)))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sizes": PrefillSizes(teams=2)}, r"built for sizes=.*teams=2.*, but this call has .*teams=1"),
            (
                {"sizes": PrefillSizes(pack_gqa=2)},
                r"built for sizes=.*pack_gqa=2.*, but this call has .*pack_gqa=1",
            ),
            (
                {"sizes": PrefillSizes(tile_kv=64)},
                r"built for sizes=.*tile_kv=64.*, but this call has .*tile_kv=128",
            ),
            ({"num_tokens": 999}, "built for num_tokens=999, but this call has num_tokens=150"),
            ({"score": Score(scale=0.1, causal=False)}, r"built for mask=\(False, .* has mask=\(True, "),
            ({"has_lists": True}, "built for has_lists=True, but"),
            ({"kv_start_loc": jnp.zeros(2, jnp.int32)}, "built for is_packed=True, but"),
            ({"reqs": 1}, r"schedule.first_tiles must have shape \(3,\) .*got \(2,\)"),
        ],
    )
    def test_varlen_prefill_refuses_a_schedule_of_another_call(self, change, message):
        query, kv, starts, lens, table = zeros_of(prefill, tokens=150, reqs=2)
        score = Score(scale=0.1)
        options = {"sizes": PrefillSizes(), "num_tokens": 150, "score": score} | change
        reqs = options.pop("reqs", 2)
        schedule = make_schedule(starts[: reqs + 1], lens[:reqs], **options)
        run = functools.partial(varlen_prefill, query, kv, kv, starts, lens, block_table=table, score=score)
        with pytest.raises(ValueError, match=message):
            run(schedule=schedule, sizes=PrefillSizes())

    def test_varlen_prefill_refuses_lists_of_another_call(self):
        query, kv, starts, lens, table = zeros_of(prefill)
        score, sizes = Score(scale=0.1), PrefillSizes()
        schedule = make_schedule(starts, lens, num_tokens=1, score=score, sizes=sizes, has_lists=True)
        run = functools.partial(varlen_prefill, query, kv, kv, starts, lens, block_table=table, score=score)
        message = r"lists.table must have shape \(2, 32\) .2 query tiles, each with 1 lists., got \(4, 32\)"
        with pytest.raises(ValueError, match=message):
            run(schedule=schedule, lists=lists_of(schedule, 2, 1), sizes=sizes)
        schedule_of_short_tiles = make_schedule(
            starts, lens, num_tokens=1, score=score, sizes=PrefillSizes(tile_kv=64), has_lists=True
        )
        with pytest.raises(
            ValueError, match=r"lists was built for sizes=.*kv=64.*, but this call has .*kv=128"
        ):
            run(schedule=schedule, lists=lists_of(schedule_of_short_tiles, 1, 1), sizes=sizes)

    def test_lists_without_key_tiles_have_one_empty_entry(self):
        _, _, starts, lens, _ = zeros_of(prefill)
        schedule = make_schedule(starts, lens, num_tokens=1, score=Score(scale=0.1), sizes=PrefillSizes())
        lists = lists_of(schedule, 1, 0)
        assert lists.entries.shape == (2, 1)


def lists_of(schedule, heads, kv_tiles):
    seen = jnp.ones((schedule.table.shape[0], heads, kv_tiles), bool)
    return make_tile_lists(schedule, encode_tiles(seen, seen))


WRONG_SHAPES = [
    (prefill, {"block_table": (2, 1)}, r"block_table must have shape \(1, 1\) .*got \(2, 1\)"),
    (prefill, {"sinks": (2,)}, r"sinks must have shape \(1,\) .*got \(2,\)"),
    (prefill, {"alibi_slopes": (2,)}, r"alibi_slopes must have shape \(1,\) .*got \(2,\)"),
    (prefill, {"query": (1, 0, 64)}, "q_heads must be positive, got 0"),
    (decode, {"k_cache": (9, 16, 64)}, r"k_cache must have 4 axes, got \(9, 16, 64\)"),
    (decode, {"query": (1, 0, 64)}, "q_heads must be positive, got 0"),
    (decode, {"sinks": (2,)}, r"sinks must have shape \(1,\) .*got \(2,\)"),
    (decode, {"alibi_slopes": (2,)}, r"alibi_slopes must have shape \(1,\) .*got \(2,\)"),
]


@pytest.mark.parametrize(("query_support", "change", "message"), WRONG_SHAPES)
def test_wrong_shapes_are_refused(query_support, change, message):
    query, cache, *rest = zeros_of(query_support)
    named = (
        dict(zip(("query_start_loc", "seq_lens", "block_table"), rest, strict=True))
        if (query_support is prefill)
        else {"block_table": rest[0], "seq_lens": rest[1]}
    )
    names = ("key", "value") if query_support is prefill else ("k_cache", "v_cache")
    arrays = {"query": query, **dict.fromkeys(names, cache), **named}
    arrays |= {name: jnp.zeros(shape, arrays.get(name, jnp.zeros(0)).dtype) for name, shape in change.items()}
    kernel = inspect.unwrap(varlen_prefill if query_support is prefill else paged_decode)
    with pytest.raises(ValueError, match=message):
        kernel(**arrays, score=Score(scale=0.1))


def test_request_longer_than_its_table_is_truncated():
    """No row of a table is read past its end, whatever the lengths are."""
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    q, k, v = draw(0, 3, 1, 64), draw(1, 9, 16, 1, 64), draw(2, 9, 16, 1, 64)
    run = jax.jit(functools.partial(
        varlen_prefill, q, k, v, jnp.asarray([0, 3]), block_table=jnp.asarray([[4, 2]]),
        score=Score(scale=0.1), sizes=PrefillSizes(ctas=1), interpret=plgpu.InterpretGPUParams(),
    ))  # fmt: skip
    np.testing.assert_array_equal(run(jnp.asarray([1000]))[0], run(jnp.asarray([32]))[0])


@pytest.mark.gpu
def test_decode_never_reads_past_the_end_of_a_table_row():
    """The next request's row of the table does not affect the result."""
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    q, k, v, lens = draw(0, 2, 1, 64), draw(1, 9, 16, 1, 64), draw(2, 9, 16, 1, 64), jnp.asarray([1000, 0])
    run = jax.jit(functools.partial(paged_decode, q, k, v, score=Score(scale=0.1)))
    (first, _), (other_name, _) = (run(jnp.asarray([[4, 2], row]), lens) for row in ([3, 5], [6, 7]))
    np.testing.assert_array_equal(first, other_name)


def test_default_sizes_refuses_an_unsupported_head_dim():
    with pytest.raises(NotImplementedError, match=r"paged_decode: .*head_dim=112 is not supported for 8-bit"):
        default_sizes(112, rows=1, kv_dtypes=("int8", "int8"))


def test_why_not_on_names_the_platform_or_the_compute_capability(monkeypatch):
    assert "JAX's platform here is 'cpu'" in support.why_not_on(jnp.zeros(1))
    device = types.SimpleNamespace(platform="gpu", compute_capability="7.5")
    monkeypatch.setattr(architectures, "device_of", lambda *_: device)
    assert support.why_not_on().endswith("12.0, 12.1, and this GPU has 7.5")
    for capability in architectures.ARCHITECTURES:
        device.compute_capability = capability
        assert support.why_not_on() is None


def test_why_not_kernel_on_names_the_kernel_and_its_architectures():
    with architectures.target("a100"):
        assert support.why_not_kernel_on("add_norm", jnp.zeros(1)) is None
        reason = support.why_not_kernel_on("all_reduce", jnp.zeros(1))
    assert reason == "all_reduce is compiled for compute capability 9.0, 10.0, 10.3, and this GPU has 8.0"
    assert "'cpu'" in support.why_not_kernel_on("add_norm", jnp.zeros(1))


def test_each_kernel_is_built_for_known_architectures():
    for kernel in support.KERNELS.values():
        assert set(kernel.compute_capabilities) <= set(architectures.ARCHITECTURES)
