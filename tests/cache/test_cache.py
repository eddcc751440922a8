"""The paged cache: layouts, writes that skip padding and never copy, block copies, and sizes."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
import jattn.cache.spec
from pallas_kernels.cache_write import cache_write
from tests.assertions import copies_of

LAYOUTS = ["NHD", "HND", "packed"]
QUANTIZATIONS = list(jattn.cache.spec.QUANTIZATIONS)
# Each layout without quantization, and each quantization with one layout.
LAYOUTS_AND_QUANTIZATIONS = [(layout, None) for layout in LAYOUTS]
LAYOUTS_AND_QUANTIZATIONS += [(LAYOUTS[i % 3], name) for i, name in enumerate(filter(None, QUANTIZATIONS))]
TOLERANCES = {None: 0, "int8_token_head": 0.02, "int8_k_only": 0.02, "int8_static_v": 0.04, "fp8_e5m2": 0.3}


def spec(**changes):
    sizes = {"num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": jnp.float32}
    return jattn.CacheSpec(**(sizes | changes))


def rows(cache):
    """Return keys and values by slot as floats: [slots, kv_heads, head_dim] each."""
    k, v = (np.asarray(x.astype(jnp.float32)) for x in jattn.blocks_of(cache, jnp.arange(cache.num_blocks)))
    k, v = (x.reshape(-1, cache.num_kv_heads, cache.head_dim) for x in (k, v))
    shapes = {0: (1, 1, 1), 1: (1, -1, 1), 2: (1, cache.num_kv_heads, -1), 3: (-1, cache.num_kv_heads, 1)}
    scaled = lambda x, s: x if s is None else x * np.asarray(s).reshape(shapes[s.ndim])
    return scaled(k, cache.k_scale), scaled(v, cache.v_scale)


def create(**changes):
    """Return a cache of zeros; a per-channel value scale fits values up to 6."""
    cache_spec = spec(**changes)
    scale = (
        jnp.full((2, cache_spec.head_dim), 6 / 127)
        if cache_spec.storage_formats[1].scale == "channel"
        else None
    )
    return jattn.PagedCache.create(cache_spec, v_scale=scale)


def random_kv(tokens, seed=0, dtype=jnp.float32, heads=2, dim=16):
    keys = jax.random.split(jax.random.key(seed))
    return tuple(jax.random.normal(key, (tokens, heads, dim), dtype) for key in keys)


@pytest.mark.parametrize(("layout", "quantization"), LAYOUTS_AND_QUANTIZATIONS)
class TestWrite:
    def test_each_token_is_written_to_its_slot_only(self, layout, quantization):
        cache = create(layout=layout, quantization=quantization)
        before_k, before_v = rows(cache)
        key, value = random_kv(6)
        slots = jnp.asarray([7, -1, 0, 19, -5, 12])
        k, v = rows(jattn.write_kv(cache, key, value, slots))
        tolerance = TOLERANCES.get(quantization, 0.1)
        written = np.asarray(slots)[np.asarray(slots) >= 0]
        np.testing.assert_allclose(k[written], key[np.asarray(slots) >= 0], atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(v[written], value[np.asarray(slots) >= 0], atol=tolerance, rtol=tolerance)
        unwritten = np.setdiff1d(np.arange(20), written)
        np.testing.assert_array_equal(k[unwritten], before_k[unwritten])
        np.testing.assert_array_equal(v[unwritten], before_v[unwritten])

    def test_keys_without_a_slot_are_not_written(self, layout, quantization):
        empty = lambda: create(layout=layout, quantization=quantization)
        key, value = random_kv(6)
        short = jattn.write_kv(empty(), key[:3], value[:3], jnp.asarray([4, 5, 6]))
        long = jattn.write_kv(empty(), key.at[3:].set(jnp.nan), value, jnp.asarray([4, 5, 6]))
        jax.tree.map(np.testing.assert_array_equal, short, long)

    def test_the_donated_cache_is_aliased_and_never_copied(self, layout, quantization):
        cache_spec = spec(layout=layout, quantization=quantization, num_blocks=64)
        cache = create(layout=layout, quantization=quantization, num_blocks=64)
        key, value = random_kv(3)
        write = jax.jit(jattn.write_kv, donate_argnums=0)
        compiled = write.lower(cache, key, value, jnp.arange(3)).compile()
        moving = cache_spec.num_bytes
        assert compiled.memory_analysis().alias_size_in_bytes >= moving
        if (
            not jnp.issubdtype(cache.k.dtype, jnp.floating) or cache.k.dtype.itemsize > 1
        ):  # XLA on CPUs widens fp8 to scatter it; on GPUs it does not
            assert compiled.memory_analysis().temp_size_in_bytes < moving / 4
            assert copies_of(compiled, cache.k) == []

    def test_a_jit_that_does_not_donate_copies_the_cache(self, layout, quantization):
        cache = create(layout=layout, quantization=quantization, num_blocks=64)
        compiled = jax.jit(jattn.write_kv).lower(cache, *random_kv(3), jnp.arange(3)).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == 0
        jax.jit(jattn.write_kv)(cache, *random_kv(3), jnp.arange(3))
        assert not cache.k.is_deleted()

    def test_an_eager_write_deletes_the_old_arrays(self, layout, quantization):
        cache = create(layout=layout, quantization=quantization)
        jattn.write_kv(cache, *random_kv(1), jnp.asarray([3]))
        assert cache.k.is_deleted()
        assert cache.v.is_deleted()


@pytest.mark.usefixtures("types_unchecked")  # the annotation has signed ints alone
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(5, 256), (300, 4)])
def test_slots_of_small_int_dtypes_are_accepted(dtype, num_blocks, block_size):
    cache = create(num_blocks=num_blocks, block_size=block_size)
    slots = jnp.asarray([7, 100, 2]).astype(dtype)
    k, _ = rows(jattn.write_kv(cache, *random_kv(3), slots))
    assert np.flatnonzero(k.any(axis=(1, 2))).tolist() == [2, 7, 100]


class TestLayouts:
    @pytest.mark.parametrize("case", range(2))
    def test_layouts_equal_vllm(self, metadata_cases, case):
        case = metadata_cases["kv_cache_layout_offsets"][case]
        dtype = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16}[case["element_size"]]
        dim, heads, size = case["head_size"], case["num_kv_heads"], case["block_size"]
        for layout, k_name, v_name in (
            ("packed", "flat_k_xpacked", "flat_v_xpacked"),
            ("NHD", "flat_nhd", "flat_nhd"),
            ("HND", "flat_hnd", "flat_hnd"),
        ):
            cache_spec = spec(
                num_blocks=4, block_size=size, num_kv_heads=heads, head_dim=dim, dtype=dtype, layout=layout
            )
            if layout == "packed":
                assert cache_spec.pack_width == case["x"]
                assert cache_spec.key_shape[1:] == tuple(case["key_cache_shape"][1:])
                assert cache_spec.value_shape[1:] == tuple(case["value_cache_shape"][1:])
            for probe in case["probes"]:
                mark = jnp.zeros((1, heads, dim), dtype).at[0, probe["head"], probe["dim"]].set(1)
                cache = jattn.write_kv(
                    jattn.PagedCache.create(cache_spec), mark, mark, jnp.asarray([probe["slot"]])
                )
                for array, name in ((cache.k, k_name), (cache.v, v_name)):
                    flat = np.flatnonzero(np.asarray(array.astype(jnp.float32)))
                    assert flat.tolist() == [probe[name]]


class TestQuantizedWrites:
    @pytest.mark.parametrize("case", range(4))
    def test_int8_per_token_and_head_equals_vllm(self, metadata_cases, case):
        case = metadata_cases["int8_per_token_head_quant"][case]
        values = jnp.asarray(case["values"], jnp.float32)
        cache_spec = spec(num_kv_heads=1, head_dim=values.size, quantization="int8_token_head")
        key = values[None, None]
        cache = jattn.write_kv(jattn.PagedCache.create(cache_spec), key, key, jnp.asarray([6]))
        np.testing.assert_allclose(cache.k_scale[1, 2, 0], case["expected_scale"], rtol=1e-6)
        exact = np.asarray(case["values"]) / case["expected_scale"]
        is_tie = np.abs(np.abs(exact % 1) - 0.5) < 1e-4  # a tie in float64 may round either way in float32
        for stored in (cache.k[1, 2, 0], cache.v[1, 2, 0]):
            off = np.asarray(stored, int) - np.asarray(case["q_round_half_even"])
            assert (np.abs(off) <= is_tie).all()

    def test_scales_are_written_per_token_and_stored_per_head(self):
        scale = jnp.arange(40.0).reshape(5, 4, 2)
        zeros = [jnp.zeros((5, 4, 2, 16), jnp.int8) for _ in range(2)]
        cache = jattn.PagedCache(k=zeros[0], v=zeros[1], k_scale=scale, v_scale=jnp.ones((2, 16)))
        assert cache.stored_k_scale.shape == (5, 2, 4)
        np.testing.assert_array_equal(cache.stored_k_scale[3, 1], scale[3, :, 1])
        np.testing.assert_array_equal(cache.k_scale, scale)
        np.testing.assert_array_equal(cache.v_scale, jnp.ones((2, 16)))

    def test_values_have_a_scale_for_each_channel(self):
        channels = jnp.arange(1, 33, dtype=jnp.float32).reshape(2, 16)
        cache = jattn.PagedCache.create(spec(quantization="int8_static_v"), v_scale=channels)
        value = jnp.stack([channels * 5.4, channels * 300])
        cache = jattn.write_kv(cache, value, value, jnp.asarray([2, 3]))
        assert (np.asarray(cache.v[0, 2]) == 5).all()
        assert (np.asarray(cache.v[0, 3]) == 127).all()

    def test_a_static_scale_saturates(self):
        scales = {"k_scale": jnp.float32(0.5), "v_scale": jnp.asarray([1.0, 100.0])}
        cache = jattn.PagedCache.create(spec(quantization="fp8_e4m3"), **scales)
        huge = jnp.full((1, 2, 16), 1e6)
        cache = jattn.write_kv(cache, huge, huge, jnp.asarray([0]))
        assert (np.asarray(cache.k[0, 0], np.float32) == 448).all()
        k, v = rows(cache)
        assert k[0].max() == 224
        assert v[0].max() == 44800

    def test_keys_and_values_may_share_a_static_scale(self):
        scale = jnp.float32(2.0)
        zeros = [jnp.zeros((2, 4, 2, 16), jnp.int8) for _ in range(2)]
        cache = jattn.PagedCache(k=zeros[0], v=zeros[1], k_scale=scale, v_scale=scale)
        cache = jattn.write_kv(cache, *(jnp.full((1, 2, 16), 5.0) for _ in range(2)), jnp.asarray([0]))
        assert cache.k[0, 0, 0, 0] == 2  # 2.5 rounds half to even


@pytest.fixture
def kernel_calls(monkeypatch):
    """Run the write kernels in interpret mode as on a GPU; yields the cache dtypes of each call."""
    calls = []

    def write(key, value, k, v, *args, **options):
        calls.append((k.dtype, v.dtype))
        return cache_write(key, value, k, v, *args, **options, interpret=plgpu.InterpretGPUParams())

    monkeypatch.setattr("pallas_kernels.support.why_not_on", lambda *_: None)
    monkeypatch.setattr("jattn.cache.write.cache_write", write)
    return calls


@pytest.mark.kernels
class TestKernel:
    @pytest.mark.parametrize("quantization", ["fp8_e4m3", "int8_token_head", "int8_k_only"])
    def test_the_kernel_quantizes(self, quantization, kernel_calls):
        write = lambda implementation: jattn.write_kv(
            jattn.PagedCache.create(spec(head_dim=64, dtype=jnp.bfloat16, quantization=quantization)),
            *random_kv(3, dtype=jnp.bfloat16, dim=64),
            jnp.asarray([7, -1, 12]),
            implementation=implementation,
        )
        expected = write("xla")
        assert kernel_calls == []
        actual = write(None)
        assert len(kernel_calls) == 1
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *map(as_floats, (actual, expected))
        )

    def test_the_kernel_rejects_scales_per_channel(self, kernel_calls):
        cache = create(head_dim=64, dtype=jnp.bfloat16, quantization="int8_static_v")
        rows = random_kv(1, dtype=jnp.bfloat16, dim=64)
        with pytest.raises(
            NotImplementedError, match="values of bfloat16 into a cache of int8 with a scale of 2 axes"
        ):
            jattn.write_kv(cache, *rows, jnp.asarray([3]), implementation="mosaic_gpu")


def as_floats(cache):
    return [x.astype(jnp.float32) for x in jax.tree.leaves(cache)]


@pytest.mark.parametrize("quantization", [None, "int8_token_head", "int8_static_v", "int8_k_only"])
class TestMoves:
    def filled(self, quantization, seed=0, layout="HND"):
        cache = create(layout=layout, quantization=quantization)
        return jattn.write_kv(cache, *random_kv(20, seed), jnp.arange(20))

    def test_copies_read_all_sources_before_any_target_is_written(self, quantization):
        k, v = (x.reshape(5, 4, 2, 16) for x in rows(self.filled(quantization)))
        mapping = jnp.asarray([[1, 2], [2, 3], [-1, 0], [4, -1]])
        first, second = jattn.copy_blocks([self.filled(quantization), self.filled(quantization, 1)], mapping)
        moved_k, moved_v = (x.reshape(5, 4, 2, 16) for x in rows(first))
        np.testing.assert_array_equal(moved_k, k[[0, 1, 1, 2, 4]])
        np.testing.assert_array_equal(moved_v, v[[0, 1, 1, 2, 4]])
        other_k = rows(self.filled(quantization, 1))[0].reshape(5, 4, 2, 16)
        np.testing.assert_array_equal(rows(second)[0].reshape(5, 4, 2, 16), other_k[[0, 1, 1, 2, 4]])

    def test_copying_aliases_the_caches(self, quantization):
        cache = create(num_blocks=64, quantization=quantization)
        copy = jax.jit(jattn.copy_blocks, donate_argnums=0)
        compiled = copy.lower(cache, jnp.asarray([[1, 2]])).compile()
        assert (
            compiled.memory_analysis().alias_size_in_bytes
            >= spec(num_blocks=64, quantization=quantization).num_bytes
        )
        assert copies_of(compiled, cache.k) == []

    def test_blocks_can_be_swapped_to_the_host_and_back(self, quantization):
        device = self.filled(quantization)
        k, v = rows(device)
        host = jattn.PagedCache.create_on_host(spec(layout="HND", quantization=quantization))
        host = jattn.swap_blocks(device, host, np.asarray([[1, 0], [3, 4], [-1, 2]]))
        assert isinstance(host.k, np.ndarray)
        assert not device.k.is_deleted()
        fresh = create(layout="HND", quantization=quantization)
        back_k, back_v = rows(jattn.swap_blocks(host, fresh, np.asarray([[0, 2], [4, 1]])))
        np.testing.assert_array_equal(back_k[8:12], k[4:8])
        np.testing.assert_array_equal(back_v[4:8], v[12:16])
        assert (back_k[12:] == 0).all()

    def test_blocks_can_be_swapped_between_devices(self, quantization):
        source = self.filled(quantization)
        target = create(layout="HND", quantization=quantization)
        moved = jattn.swap_blocks(source, target, np.asarray([[2, 4]]))
        np.testing.assert_array_equal(rows(moved)[0][16:], rows(source)[0][8:12])
        assert target.k.is_deleted()


class TestRefusals:
    @pytest.mark.parametrize(
        ("num_keys", "heads", "num_slots", "message"),
        [
            (2, 2, 3, r"key must have a token for each slot \(3\), got shape \(2, 2, 16\)"),
            (2, 3, 2, r"key must have shape \(2, 16\).*got \(3, 16\)"),
        ],
    )
    def test_write_kv_rejects_inconsistent_shapes(self, num_keys, heads, num_slots, message):
        with pytest.raises(ValueError, match=message):
            jattn.write_kv(
                jattn.PagedCache.create(spec()), *random_kv(num_keys, heads=heads), jnp.arange(num_slots)
            )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"v": jnp.zeros((1, 4, 2, 9))}, r"v must have shape \(1, 4, 2, 8\).*got \(1, 4, 2, 9\)"),
            ({"layout": "packed"}, r"k must have 5 axes in the packed layout, got shape \(1, 4, 2, 8\)"),
            (
                {"v_scale": jnp.ones(3)},
                r"v_scale's shape must be one of \(\), \(2,\), \(1, 4, 2\), \(2, 8\), got",
            ),
            (
                {"k_scale": jnp.ones((2, 16))},
                r"k_scale's shape must be one of .*\(1, 4, 2\), got \(2, 16\)",
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_paged_cache_rejects_inconsistent_arrays(self, changes, message):
        arrays = {"k": jnp.zeros((1, 4, 2, 8)), "v": jnp.zeros((1, 4, 2, 8))}
        with pytest.raises(ValueError, match=message):
            jattn.PagedCache(**arrays | changes)

    def test_cache_spec_rejects_unknown_layouts(self):
        with pytest.raises(ValueError, match="layout must be one of 'NHD', 'HND', 'packed', got 'DHN'"):
            spec(layout="DHN")

    @pytest.mark.parametrize(
        ("quantization", "scales", "message"),
        [
            (
                "int8_token_head",
                {"v_scale": jnp.ones((2, 16))},
                "with quantization='int8_token_head' takes no static v_scale",
            ),
            (
                "fp8_e4m3",
                {"v_scale": jnp.ones((2, 16))},
                r"v_scale's shape with .*'fp8_e4m3' must be one of .*got \(2, 16",
            ),
            (
                "int8_static_v",
                {},
                r"'int8_static_v' requires v_scale.*jattn.calibrate\(.*'int8_static_v'\), or use"
                r" 'int8_k_only' or 'int8_token_head', which need no scale",
            ),
            *(
                (
                    "fp8_e4m3",
                    {"k_scale": jnp.float32(scale)},
                    f"k_scale must be positive and finite, got {scale}",
                )
                for scale in (0.0, float("nan"), -1.0, float("inf"))
            ),
        ],
    )
    def test_create_rejects_invalid_scales(self, quantization, scales, message):
        with pytest.raises(ValueError, match=message):
            jattn.PagedCache.create(spec(quantization=quantization), **scales)

    def test_scales_per_token_require_an_8_bit_dtype(self):
        zeros = jnp.zeros((5, 4, 2, 16))
        cache = jattn.PagedCache(k=zeros, v=zeros, v_scale=jnp.ones((5, 4, 2)))
        with pytest.raises(
            ValueError, match=r"cache.v has dtype float32, but v_scale has one scale per token"
        ):
            jattn.write_kv(cache, *random_kv(1), jnp.asarray([3]))

    def test_a_requested_kernel_that_is_unavailable_is_an_error_with_the_reason(self):
        write = lambda name: jattn.write_kv(
            jattn.PagedCache.create(spec()), *random_kv(1), jnp.asarray([3]), implementation=name
        )
        with pytest.raises(NotImplementedError, match=r"write_kv with implementation='mosaic_gpu': .*'cpu'"):
            write("mosaic_gpu")
        with pytest.raises(ValueError, match=r"implementation must be one of .*got 'triton'"):
            write("triton")
        assert write("xla").k[0, 3, 0, 0] != 0

    @pytest.mark.parametrize(
        ("changes", "block_mapping", "message"),
        [
            ({"layout": "HND"}, [[0, 0]], r"target.layout must be the source's \(NHD\), got HND"),
            (
                {"head_dim": 8},
                [[0, 0]],
                r"a block of target.k must have shape \(4, 2, 16\).*got \(4, 2, 8\)",
            ),
            ({"dtype": jnp.bfloat16}, [[0, 0]], r"target.k must be float32, as the source's, got bfloat16"),
            ({"quantization": "int8_token_head"}, [[0, 0]], "target must have the source's arrays"),
            ({"num_blocks": 3}, [[0, 3]], r"block_mapping must stay below 3 in column 1, got \[\[0, 3\]\]"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_swap_blocks_rejects_different_caches(self, changes, block_mapping, message):
        with pytest.raises(ValueError, match=message):
            jattn.swap_blocks(
                jattn.PagedCache.create(spec()),
                jattn.PagedCache.create(spec(**changes)),
                np.asarray(block_mapping),
            )

    @pytest.mark.parametrize("on_host", [False, True])
    def test_swaps_between_caches_with_and_without_scales_are_rejected(self, on_host):
        source, other_spec = create(quantization="int8_k_only"), spec(quantization="int8_static_v")
        target = (
            jattn.PagedCache.create_on_host(other_spec) if on_host else create(quantization="int8_static_v")
        )
        with pytest.raises(ValueError, match=r"target.v must be float32, as the source's, got int8"):
            jattn.swap_blocks(source, target, np.asarray([[0, 1]]))


@pytest.mark.usefixtures("types_unchecked")
class TestTypes:
    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            (
                {"k": np.zeros((2, 4, 2, 8), np.int8)},
                "k has dtype int8, which requires a scale. Pass k_scale",
            ),
            (
                {"v": np.zeros((2, 4, 2, 8), np.int8)},
                "v has dtype int8, which requires a scale. Pass v_scale",
            ),
            ({"k": np.zeros((2, 4, 2, 8), np.uint8)}, "k must hold floats or int8 .*view .*, got uint8"),
            ({"v": np.zeros((2, 4, 2, 8), np.int32)}, "v must hold floats or int8 .*, got int32"),
            ({"k": [[0.0]]}, "k must be an array, got list"),
        ],
    )
    def test_unsupported_cache_dtypes_are_rejected(self, arrays, message):
        zeros = jnp.zeros((2, 4, 2, 8))
        with pytest.raises(ValueError, match=message):
            jattn.PagedCache(**({"k": zeros, "v": zeros} | arrays))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"cache": spec()}, "cache must be a PagedCache, got CacheSpec"),
            ({"slot_mapping": [0, 1]}, r"slot_mapping must be an array .*metadata.slot_mapping.*, got list"),
            (
                {"slot_mapping": jnp.ones(2)},
                r"slot_mapping must be ints \[tokens\], got float32 of shape \(2,\)",
            ),
            ({"slot_mapping": jnp.ones((1, 2), int)}, r"slot_mapping must be ints .* of shape \(1, 2\)"),
            ({"key": jnp.ones((2, 2, 16), int)}, "key must hold floats, got int32"),
            ({"value": jnp.ones((1, 2, 2, 16))}, r"value must have 3 axes, .*got shape \(1, 2, 2, 16\)"),
            ({"key": jnp.ones((2, 32))}, r"key must have 3 axes, .*got shape \(2, 32\)"),
            ({"key": [1.0]}, "key must be an array, got list"),
        ],
    )
    def test_unsupported_dtypes_of_keys_are_rejected(self, change, message):
        rows = dict(zip(("key", "value"), random_kv(2), strict=True))
        cache = create()
        with pytest.raises(ValueError, match=message):
            jattn.write_kv(**({"cache": cache, "slot_mapping": jnp.arange(2)} | rows | change))
        assert not cache.k.is_deleted()


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((3, 16))}, r"k must have 3 axes, got shape \(3, 16\)"),
        ({"v": jnp.zeros((3, 2, 16), int)}, "v must hold floats, got int32"),
        (
            {"v": jnp.zeros((4, 2, 16))},
            r"v must have shape \(3, 2, 16\) \(the shape of k\), got \(4, 2, 16\)",
        ),
        ({"kv_start_loc": jnp.zeros(2)}, "kv_start_loc must hold ints, got float32"),
        ({"kv_start_loc": [0, 1]}, r"kv_start_loc must be an array, got \[0, 1\]"),
        ({"kv_start_loc": jnp.zeros((1, 2), int)}, r"kv_start_loc must have 1 axes, got shape \(1, 2\)"),
    ],
)
def test_invalid_packed_keys_are_rejected_by_name(change, message):
    rows = jnp.zeros((3, 2, 16))
    with pytest.raises(ValueError, match=message):
        jattn.PackedKV(**({"k": rows, "v": rows, "kv_start_loc": jnp.zeros(2, jnp.int32)} | change))


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("scale", "actual"),
    [
        ("2", "str"),
        (1j, "complex"),
        (True, "bool"),
        (jnp.ones(2, bool), "bool"),
        (np.ones(2) * 1j, "complex128"),
    ],
)
def test_scales_must_be_real_numbers(scale, actual):
    message = f"k_scale must be an array of real numbers or one such number, got {actual}"
    stored = jnp.zeros((2, 4, 2, 8), jnp.int8)
    with pytest.raises(ValueError, match=message):
        jattn.PagedCache(k=stored, v=stored, k_scale=scale, v_scale=1.0)
    with pytest.raises(ValueError, match=message):
        jattn.PagedCache.create(spec(quantization="fp8_e4m3"), k_scale=scale)


def test_a_scale_may_be_a_float():
    cache = jattn.PagedCache.create(spec(quantization="fp8_e4m3"), k_scale=0.5, v_scale=2.0)
    assert (float(cache.k_scale), float(cache.v_scale)) == (0.5, 2.0)


def test_a_scale_shared_by_caches_is_not_donated():
    scale = jnp.full((), 0.5, jnp.float32)
    create = lambda: jattn.PagedCache.create(spec(quantization="fp8_e4m3"), k_scale=scale, v_scale=scale)
    write = lambda cache: jattn.write_kv(cache, *random_kv(2), jnp.arange(2))
    write_all = jax.jit(lambda caches: [*map(write, caches)], donate_argnums=0)
    first, _ = write_all([create(), create()])
    assert float(first.k_scale) == float(first.v_scale) == float(scale) == 0.5


@pytest.mark.usefixtures("types_unchecked")
def test_create_requires_a_cache_spec():
    with pytest.raises(ValueError, match="spec must be a CacheSpec, got AttentionSpec"):
        jattn.PagedCache.create(jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16))


@pytest.mark.usefixtures("types_unchecked")
def test_blocks_are_selected_by_ints():
    with pytest.raises(ValueError, match=r"cache must be a PagedCache .*, got CacheSpec: CacheSpec"):
        jattn.blocks_of(spec(), jnp.arange(2))
    with pytest.raises(ValueError, match=r"ids must be ints, got float32\."):
        jattn.blocks_of(create(), jnp.zeros(2))


@pytest.mark.parametrize("large_id", [2**32 + 1, -(2**32) + 1])
def test_block_ids_beyond_int32_are_rejected(large_id):
    with pytest.raises(ValueError, match=f"ids must hold int32s, got {large_id}"):
        jattn.blocks_of(create(), np.array([0, large_id]))
    with pytest.raises(ValueError, match=f"block_mapping must hold int32s, got {large_id}"):
        jattn.copy_blocks(create(), np.array([[large_id, 2]]))
    with pytest.raises(ValueError, match=f"block_mapping must hold int32s, got {large_id}"):
        jattn.swap_blocks(create(), create(), np.array([[large_id, 2]]))


class TestReplace:
    @pytest.mark.parametrize("quantization", QUANTIZATIONS)
    def test_dataclasses_replace_keeps_scales_and_takes_the_constructors_names(self, quantization):
        cache = jattn.write_kv(create(quantization=quantization), *random_kv(20), jnp.arange(20))
        same = dataclasses.replace(cache)
        jax.tree.map(np.testing.assert_array_equal, same, cache)
        assert jax.tree.structure(same) == jax.tree.structure(cache)
        zeros = dataclasses.replace(cache, k=jnp.zeros_like(cache.k))
        assert not np.asarray(zeros.k, np.float32).any()
        np.testing.assert_array_equal(zeros.v, cache.v)

    def test_a_scale_is_replaced_by_its_public_name(self):
        cache = create(quantization="fp8_e4m3")
        assert dataclasses.replace(cache, k_scale=jnp.float32(3.0)).stored_k_scale == 3
        scales = jnp.arange(40.0).reshape(5, 4, 2)
        tokens = dataclasses.replace(create(quantization="int8_token_head"), v_scale=scales)
        np.testing.assert_array_equal(tokens.v_scale, scales)
        np.testing.assert_array_equal(tokens.stored_v_scale[3, 1], scales[3, :, 1])

    def test_replaced_caches_are_validated(self):
        with pytest.raises(ValueError, match=r"v must have shape .*got \(1, 4, 2, 16\)"):
            dataclasses.replace(create(), v=jnp.zeros((1, 4, 2, 16)))

    def test_replace_works_inside_jit(self):
        doubled = jax.jit(lambda cache: dataclasses.replace(cache, k=cache.k * 2))(
            jattn.PagedCache(k=jnp.ones((1, 4, 2, 8)), v=jnp.ones((1, 4, 2, 8)))
        )
        assert (np.asarray(doubled.k) == 2).all()


class TestSpec:
    @hypothesis.given(
        st.sampled_from(LAYOUTS), st.sampled_from(QUANTIZATIONS), st.sampled_from([jnp.float32, jnp.bfloat16])
    )
    def test_bytes_equal_those_of_the_arrays(self, layout, quantization, dtype):
        cache_spec = spec(layout=layout, quantization=quantization, dtype=dtype)
        cache = jax.eval_shape(lambda: create(layout=layout, quantization=quantization, dtype=dtype))
        arrays = jattn.cache.block_arrays(cache).values()
        assert cache_spec.num_bytes == sum(x.size * x.dtype.itemsize for x in arrays)

    def test_num_blocks_in_is_the_largest_number_that_fits(self):
        block_bytes = spec(dtype=jnp.bfloat16).bytes_per_block
        assert block_bytes == 2 * 4 * 2 * 16 * 2
        assert spec(dtype=jnp.bfloat16).num_blocks_in(10 * block_bytes * 3 + 1, num_layers=3) == 10
        with pytest.raises(
            ValueError,
            match=rf"memory_bytes must be at least {block_bytes * 3}, the size of one block, "
            rf"got {block_bytes * 3 - 1}",
        ):
            spec(dtype=jnp.bfloat16).num_blocks_in(block_bytes * 3 - 1, num_layers=3)

    @pytest.mark.usefixtures("types_unchecked")
    @pytest.mark.parametrize(
        ("memory_bytes", "num_layers", "message"),
        [
            (float("nan"), 1, "memory_bytes must be finite, got nan"),
            ("1GB", 1, "memory_bytes must be a number, got '1GB'"),
            (10**6, 1.5, r"num_layers must be an int, got 1\.5"),
        ],
    )
    def test_sizes_must_be_ints(self, memory_bytes, num_layers, message):
        with pytest.raises(ValueError, match=message):
            spec().num_blocks_in(memory_bytes, num_layers)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_blocks": 0}, "num_blocks must be positive, got 0"),
            ({"block_size": -1}, "block_size must be positive, got -1"),
            ({"quantization": "int3"}, "quantization='int3' is unknown.* must be one of .*'int8_k_only'"),
            ({"layout": "packed", "head_dim": 6}, "head_dim must be a multiple of 4 .*packed layout, got 6"),
        ],
    )
    def test_invalid_spec_values_are_rejected_by_name(self, change, message):
        with pytest.raises(ValueError, match=message):
            spec(**change)


def test_a_donated_cache_is_reported_by_name():
    """JAX's own message is "Array has been deleted with shape=float32[4,2,1,8]"."""
    cache = jattn.PagedCache(k=jnp.zeros((4, 2, 1, 8)), v=jnp.zeros((4, 2, 1, 8)))
    rows, metadata = jnp.ones((1, 1, 8)), jattn.build_batch_metadata([1], [1], [[1]], block_size=2)
    jattn.write_kv(cache, rows, rows, metadata.slot_mapping)
    spec = jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=8)
    message = "The cache was donated to an earlier call"
    for use in (
        lambda: jattn.write_kv(cache, rows, rows, metadata.slot_mapping),
        lambda: jattn.attend(rows, cache, metadata, spec),
        lambda: jattn.copy_blocks(cache, np.asarray([[0, 1]])),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_an_array_that_would_be_donated_twice_is_rejected_by_name():
    """JAX's own message is "Attempt to donate the same buffer twice", without the argument's name."""
    zeros = jnp.zeros((4, 2, 1, 8))
    cache, rows = jattn.PagedCache(k=zeros, v=zeros), jnp.ones((1, 1, 8))
    message = "The same array is used twice in the caches"
    with pytest.raises(ValueError, match=message):
        jattn.write_kv(cache, rows, rows, jnp.asarray([3]))
    shared_cache = jattn.PagedCache(k=zeros, v=zeros.copy())
    with pytest.raises(ValueError, match=message):
        jattn.copy_blocks([shared_cache, shared_cache], np.asarray([[0, 1]]))
    numpys = jattn.PagedCache(k=np.asarray(zeros), v=np.asarray(zeros))
    for write, it in ((jax.jit(jattn.write_kv), cache), (jattn.write_kv, numpys)):
        assert write(it, rows, rows, jnp.asarray([3])).k[1, 1, 0, 0] == 1
