"""cache_read against NumPy in interpret mode and on a GPU; compilation for an H200, races and refusals."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.architectures import ARCHITECTURES, target
from pallas_kernels.cache_read import cache_read, padded_len
from pallas_kernels.support import why_not_read
from tests import aot, assertions
from tests.covering_array import covering_array

FACTORS = {
    "stored": ["int8", "float8_e4m3fn", "float8_e5m2", "same"],
    "scale": ["token", "none", "tensor", "head", "channel"],
    "dtype": ["bfloat16", "float16"],
    "layout": ["NHD", "HND"],
    "block_size": [8, 16, 64, 256],
    "head_dim": [64, 80, 128, 192],
}
FAST = FACTORS | {"block_size": [16, 128], "head_dim": [64, 80]}
LENS, FIRST_KEYS, HEADS = [70, 0, 130, 9], [0, 0, 90, 0], 2
# Requests out of order; of one the early keys are not there.
STARTS, ROWS = [128, 0, -64, 256], 384


class Problem:
    """A cache with NaN (or 77) in all slots without a key, and the expected keys and values."""

    def __init__(self, case):
        rng = np.random.default_rng(0)
        size, dim, dtype = case["block_size"], case["head_dim"], jnp.dtype(case["dtype"])
        stored = dtype if case["stored"] == "same" else jnp.dtype(case["stored"])
        needed = [-(-n // size) for n in LENS]
        blocks = sum(needed) + 1
        ids = rng.permutation(sum(needed)) + 1
        table = np.full((len(LENS), max(needed)), 10**6, np.int32)
        live = np.zeros(blocks * size, bool)
        slots = []
        split = np.split(ids, np.cumsum(needed)[:-1])
        for row, slots_of_request, n, first in zip(table, split, LENS, FIRST_KEYS, strict=True):
            row[: len(slots_of_request)] = slots_of_request
            row[: first // size] = -(2**30)
            slots.append((slots_of_request[:, None] * size + np.arange(size)).reshape(-1)[:n])
            live[slots[-1][first:]] = True
        values = rng.normal(size=(blocks * size, HEADS, dim)) * (40 if stored == np.int8 else 1)
        values = values.astype(stored)
        garbage = np.asarray(77 if stored == np.int8 else np.nan, stored)
        cache = np.where(live[:, None, None], values, garbage).reshape(blocks, size, HEADS, dim)
        scales = {
            "none": None,
            "tensor": np.float32(0.37),
            "head": rng.uniform(0.1, 2, HEADS).astype(np.float32),
            "channel": rng.uniform(0.1, 2, (HEADS, dim)).astype(np.float32),
            "token": rng.uniform(0.1, 2, (blocks * size, HEADS)).astype(np.float32),
        }
        scale = scales[case["scale"]]
        broadcast_scale = {"token": lambda s: s[..., None], "head": lambda s: s[:, None]}
        factor = 1.0 if scale is None else broadcast_scale.get(case["scale"], lambda s: s)(scale)
        self.expected = [
            (values.astype(np.float32) * factor).astype(dtype)[slots_of_request] for slots_of_request in slots
        ]
        if case["scale"] == "token":
            scale = np.where(live[:, None], scale, np.nan).reshape(blocks, size, HEADS).swapaxes(1, 2)
        self.arguments = (
            jnp.asarray(cache if case["layout"] == "NHD" else cache.swapaxes(1, 2)),
            jnp.asarray(table),
            jnp.asarray(FIRST_KEYS, jnp.int32),
            jnp.asarray(LENS, jnp.int32),
        )
        self.options = {"dtype": dtype, "layout": case["layout"]}
        self.scale = None if scale is None else jnp.asarray(scale)
        self.rows = padded_len(table.shape[1], size)

    def run(self, interpret=None, **options):
        read = jax.jit(functools.partial(cache_read, **self.options, interpret=interpret, **options))
        return read(*self.arguments, scale=self.scale)

    def check(self, out, starts=None):
        starts = [r * self.rows for r in range(len(LENS))] if starts is None else starts
        for start, expected, first in zip(starts, self.expected, FIRST_KEYS, strict=True):
            actual = np.asarray(out[start + first : start + len(expected)])
            np.testing.assert_array_equal(actual, expected[first:])


def cases(factors):
    return covering_array(factors, lambda case: case.get("stored") != "same" or case.get("scale") == "none")


def case_id(case):
    return "-".join(map(str, case.values()))


@pytest.mark.parametrize("case", cases(FAST)[::2], ids=case_id)
def test_cache_read_returns_the_dequantized_keys(case):
    problem = Problem(case)
    problem.check(problem.run(plgpu.InterpretGPUParams()))


@pytest.mark.parametrize("case", cases(FAST)[1::3], ids=case_id)
def test_cache_read_returns_the_dequantized_keys_without_tma(case):
    with target("8.0"):
        problem = Problem(case)
        problem.check(problem.run(plgpu.InterpretGPUParams()))


def test_blocks_of_keys_that_are_not_requested_are_not_looked_up():
    """Their table entries may hold anything: the block of the nearest requested key is read instead."""
    problem = Problem({name: values[0] for name, values in FAST.items()} | {"scale": "none"})
    out = np.asarray(problem.run(plgpu.InterpretGPUParams()))[2 * problem.rows :]
    np.testing.assert_array_equal(
        out[64:80], out[80:96]
    )  # request 2 reads its keys from 90 on, in blocks of 16


def test_requests_start_at_kv_start_loc():
    problem = Problem({name: values[0] for name, values in FAST.items()})
    buffer = {"kv_start_loc": jnp.asarray(STARTS, jnp.int32), "buffer_len": ROWS}
    problem.check(problem.run(plgpu.InterpretGPUParams(), **buffer), STARTS)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["8.0", "8.9", "9.0"])
@pytest.mark.parametrize("case", cases(FACTORS), ids=case_id)
def test_cache_read_supports_every_cache_format(case, gpu):
    with target(gpu):
        problem = Problem(case)
        problem.check(problem.run(plgpu.InterpretGPUParams()))


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", ["8.0", "8.9", None])
@pytest.mark.parametrize("case", cases(FACTORS), ids=case_id)
def test_cache_read_supports_every_cache_format_on_a_gpu(case, gpu):
    with target(gpu):
        problem = Problem(case)
        problem.check(problem.run())


def test_cache_read_has_no_races():
    case = {name: values[0] for name, values in FAST.items()}
    with assertions.assert_no_races(num_kernels=1):
        Problem(case).run(plgpu.InterpretGPUParams(detect_races=True)).block_until_ready()


def aot_cases():
    """Return the kernels to compile for an H200: every pair of the factors, at the sizes of serving."""
    cases_by_name = {}
    for case in cases(FACTORS):
        dtype, size, dim = jnp.dtype(case["dtype"]), case["block_size"], case["head_dim"]
        stored = dtype if case["stored"] == "same" else jnp.dtype(case["stored"])
        heads = (size, 8) if case["layout"] == "NHD" else (8, size)
        shape = {"none": None, "tensor": (), "head": (8,), "channel": (8, dim), "token": (100, 8, size)}
        shape = shape[case["scale"]]
        scale = None if shape is None else jax.ShapeDtypeStruct(shape, jnp.float32)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        run = functools.partial(cache_read, dtype=dtype, layout=case["layout"])
        read = lambda cache, table, first, lens, scale, run=run: run(cache, table, first, lens, scale=scale)
        cache = jax.ShapeDtypeStruct((100, *heads, dim), stored)
        cases_by_name[case_id(case)] = read, (cache, ints(4, 40), ints(4), ints(4), scale)
    return cases_by_name


class TestAheadOfTime:
    def check(self, names, gpu="9.0"):
        aot.require_plugin()
        reports = aot.compile_all("tests.pallas_kernels.cache_read.test_entry", names, gpu)
        assert list(reports) == names
        for name, kernels in reports.items():
            assert [k.name.partition("_mosaic")[0] for k in kernels] == ["cache_read"], name
            assert [k for k in kernels if k.spilled_bytes] == [], name

    def test_a_sample_of_shipped_kernels_compiles_without_spills(self):
        self.check(list(aot_cases())[::6])

    @pytest.mark.parametrize("gpu", ["8.0", "12.0"])
    def test_a_sample_compiles_without_spills_for_other_architectures(self, gpu):
        self.check(list(aot_cases())[1::8], gpu)

    @pytest.mark.slow
    @pytest.mark.parametrize("gpu", ARCHITECTURES)
    def test_all_shipped_kernels_compile_without_spills(self, gpu):
        self.check(list(aot_cases()), gpu)


class TestRefusals:
    supported = {"dtype": jnp.bfloat16, "cache_dtype": jnp.int8, "head_dim": 128, "block_size": 16}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dtype": jnp.float32}, "dtype=float32 is not supported"),
            ({"cache_dtype": jnp.float16}, "cache dtype=float16 is not supported.*int8, bfloat16"),
            ({"head_dim": 72}, "head_dim=72 .*80"),
            ({"head_dim": 112}, "head_dim=112 .* for 8-bit keys or values; supported: 32, 64, 80, 96, 128"),
            ({"head_dim": 120}, "head_dim=120 .* for 8-bit"),
            ({"block_size": 4}, "block_size=4 .*16"),
            ({"layout": "packed"}, "layout=packed is not supported"),
        ],
    )
    def test_why_not_read_names_what_is_not_supported(self, change, message):
        assert why_not_read(**self.supported) is None
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(why_not_read(**self.supported | change))

    def test_cache_read_raises_with_the_reason(self):
        zero = jnp.zeros(1, jnp.int32)
        with pytest.raises(NotImplementedError, match="cache_read: block_size=4 is not supported"):
            cache_read(jnp.zeros((2, 4, 1, 64), jnp.int8), zero[None], zero, zero, dtype=jnp.bfloat16)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"buffer_len": 64}, "buffer_len must be None without kv_start_loc, got 64"),
            ({"kv_start_loc": True}, "buffer_len must be a multiple of 64 with kv_start_loc, got None"),
            ({"kv_start_loc": True, "buffer_len": 96}, "buffer_len must be a multiple of 64 .*got 96"),
            ({"kv_start_loc": False, "buffer_len": 64}, r"kv_start_loc must have shape \(1,\) .*got \(2,\)"),
            ({"first_keys": 2}, r"first_keys must have shape \(1,\) .*got \(2,\)"),
            ({"seq_lens": 2}, r"seq_lens must have shape \(1,\) .*got \(2,\)"),
            ({"cache": (2, 16, 64)}, r"cache must have 4 axes, got \(2, 16, 64\)"),
            ({"cache": (2, 16, 0, 64)}, "kv_heads must be positive, got 0"),
        ],
    )
    def test_wrong_arguments_are_refused(self, change, message):
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        shape = change.pop("cache", (2, 16, 1, 64))
        if "kv_start_loc" in change:
            change["kv_start_loc"] = zeros(1 if change["kv_start_loc"] else 2)
        lens = {name: zeros(change.pop(name, 1)) for name in ("first_keys", "seq_lens")}
        unchecked = inspect.unwrap(cache_read)  # shapes in annotations are not executed but in tests
        with pytest.raises(ValueError, match=message):
            unchecked(jnp.zeros(shape, jnp.int8), zeros((1, 1)), **lens, dtype=jnp.bfloat16, **change)

    def test_wrong_shapes_are_refused(self):
        cache, zero = jnp.zeros((2, 16, 1, 64), jnp.int8), jnp.zeros(1, jnp.int32)
        with pytest.raises(ValueError, match=r"scale's shape must be one of .*got \(3,\)"):
            cache_read(cache, zero[None], zero, zero, dtype=jnp.bfloat16, scale=jnp.ones(3))
