"""attend: the contract for each implementation, dispatch and refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks
from jattn.implementations import mosaic_gpu
from jattn.implementations.mosaic_gpu import attention, block_lists, kernel_selection, prefill, tile_lists
from jattn.implementations.selection import first_supported, requested_implementations
from pallas_kernels import support
from tests import oracle
from tests.contract import (
    CASES,
    FACTORS,
    AttentionContract,
    Problem,
    allowed,
    case_id,
    mark_every_second_slow,
)


@pytest.mark.kernels
class TestReference(AttentionContract):
    implementation = "reference"

    @pytest.mark.parametrize("case", mark_every_second_slow(CASES), ids=case_id)
    def test_attend_equals_float64_for_combinations_of_features(self, case):
        super().test_attend_equals_float64_for_combinations_of_features(case)


class TestXla(AttentionContract):
    implementation = "xla"


class TestCases:
    def test_every_pair_of_choices_meets_in_some_case(self):
        names = list(FACTORS)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                covered_pairs = {(str(case[a]), str(case[b])) for case in CASES}
                expected = {(str(x), str(y)) for x in FACTORS[a] for y in FACTORS[b] if allowed({a: x, b: y})}
                assert expected <= covered_pairs


class TestDispatch:
    def problem(self):
        return Problem(AttentionContract().plain_case())

    def attend(self, **changes):
        problem = self.problem()
        arguments = {"cache": problem.kv, "metadata": problem.metadata, "spec": problem.spec}
        return jattn.attend(jnp.asarray(problem.query), **(arguments | changes))

    def test_first_supported_implementation_is_used(self):
        assert first_supported(requested_implementations(None), {"mosaic_gpu": "no GPU"}) == (
            "xla",
            "mosaic_gpu: no GPU",
        )
        assert first_supported(("mosaic_gpu", "reference"), {}) == ("mosaic_gpu", None)

    def test_requested_implementation_that_is_unavailable_is_an_error_with_the_reason(self):
        with pytest.raises(
            NotImplementedError, match=r"mosaic_gpu: .*'cpu'.*Pass implementation=None or 'xla'"
        ):
            self.attend(implementation="mosaic_gpu")

    def test_unknown_implementation_is_rejected(self):
        with pytest.raises(ValueError, match=r"implementation must be one of .*, got 'triton'"):
            self.attend(implementation="triton")
        with pytest.raises(ValueError, match=r"implementation is empty\. Pass None, or at least one of"):
            self.attend(implementation=())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"query": jnp.zeros((3, 4, 16))}, r"query must have shape \(33, 4, 16\) .* got \(3, 4, 16\)"),
            (
                {"spec": {"num_kv_heads": 4}},
                r"cache's kv_heads and head_dim must have shape \(4, 16\).*got \(2, 16\)",
            ),
            ({"sinks": jnp.zeros(3)}, r"sinks must have shape \(4,\).*got \(3,\)"),
            ({"alibi_slopes": jnp.zeros(5)}, r"alibi_slopes must have shape \(4,\).*got \(5,\)"),
            ({"sinks": jnp.ones(4, bool)}, r"sinks must be real numbers \[q_heads\], got bool"),
            ({"alibi_slopes": jnp.ones(4, complex)}, r"alibi_slopes must be real numbers .* got complex64"),
            ({"sinks": [[1.0], [1.0, 2.0]]}, r"sinks must be numbers \[q_heads\], got \[\[1"),
            ({"sinks": "none"}, r"sinks must be numbers \[q_heads\], got 'none'"),
            (
                {"spec": {"query_quantization": "int8"}},
                "spec.query_quantization must be None with float32 keys, got 'int8'",
            ),
            ({"spec": {"sqrt_alibi": True}}, "sqrt_alibi=True requires ALiBi slopes. Pass alibi_slopes"),
        ],
    )
    @pytest.mark.usefixtures("types_unchecked")
    def test_inconsistent_arguments_are_rejected_by_name(self, change, message):
        problem = self.problem()
        spec = dataclasses.replace(problem.spec, **change.pop("spec", {}))
        arguments = {
            "query": jnp.asarray(problem.query),
            "cache": problem.kv,
            "metadata": problem.metadata,
        } | change
        with pytest.raises(ValueError, match=message):
            jattn.attend(**arguments, spec=spec)

    def test_cache_of_another_block_size_is_rejected(self):
        problem = self.problem()
        metadata = jattn.build_batch_metadata([1], [1], [[1]], block_size=8)
        with pytest.raises(
            ValueError, match=r"metadata.block_size must equal the cache's block_size \(4\), got 8"
        ):
            jattn.attend(jnp.zeros((1, 4, 16)), problem.kv, metadata, problem.spec)

    def test_paged_cache_requires_a_block_table(self):
        metadata = jattn.build_batch_metadata([1], [1], None, block_size=4)
        with pytest.raises(ValueError, match=r"metadata.block_table must have at least one column.*\(1, 0\)"):
            jattn.attend(jnp.zeros((1, 4, 16)), self.problem().kv, metadata, self.problem().spec)

    def test_packed_keys_require_one_start_per_row(self):
        metadata = jattn.build_batch_metadata([2], [2], None)
        kv = jattn.PackedKV(
            k=jnp.zeros((2, 2, 16)), v=jnp.zeros((2, 2, 16)), kv_start_loc=jnp.zeros(3, jnp.int32)
        )
        with pytest.raises(ValueError, match=r"cache.kv_start_loc must have shape \(1,\).*got \(3,\)"):
            jattn.attend(jnp.zeros((2, 4, 16)), kv, metadata, self.problem().spec)

    @pytest.mark.parametrize(
        ("num_keys", "starts", "is_in_order", "message"),
        [
            (
                9,
                [0, 5],
                False,
                r"cache.kv_start_loc\[1\]=5 with .*=7 selects keys \[5, 12\), but cache.k has 9",
            ),
            (
                12,
                [-1, 5],
                False,
                r"cache.kv_start_loc\[0\]=-1 with .*=5 selects keys \[-1, 4\), but cache.k has 12",
            ),
            (12, [7, 0], True, r"cache.kv_start_loc\[0\] must be 0 with is_in_order, got 7"),
            (
                12,
                [0, 4],
                True,
                r"cache.kv_start_loc\[1\] must be at least 5, where row 0 ends, with is_in_order, got 4",
            ),
        ],
    )
    def test_packed_rows_must_start_where_their_keys_do(self, num_keys, starts, is_in_order, message):
        metadata = jattn.build_batch_metadata([5, 7], [5, 7], None)
        keys = jnp.ones((num_keys, 2, 16))
        kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.asarray(starts), is_in_order=is_in_order)
        attend = lambda kv: jattn.attend(jnp.ones((12, 4, 16)), kv, metadata, self.problem().spec)
        with pytest.raises(ValueError, match=message):
            attend(kv)
        with pytest.raises(ValueError, match=message):
            jattn.check_batch(metadata, kv)
        keys = jnp.ones((12, 2, 16))
        for right, is_in_order in (([0, 5], True), ([7, 0], False), ([0, 0], False)):
            kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.asarray(right), is_in_order=is_in_order)
            np.testing.assert_allclose(attend(kv), 1.0, rtol=1e-6)

    @pytest.mark.parametrize(
        ("lens", "starts", "message"),
        [
            (([8, 3], [8, 3]), [0, 9], r"cache.kv_start_loc\[1\] must be a multiple of 8 .*, got 9"),
            (
                ([5, 3], [5, 3]),
                [0, 8],
                r"first query of row 1 must be a multiple of 8 with is_aligned, got 5",
            ),
            (([8, 3], [9, 3]), [0, 16], r"number of queries of row 0 must equal .* keys \(9\) .*, got 8"),
        ],
    )
    def test_aligned_rows_start_at_multiples_of_8(self, lens, starts, message):
        metadata = jattn.build_batch_metadata(*lens, None)
        keys = jnp.ones((24, 2, 16))
        kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.asarray(starts), is_aligned=True)
        with pytest.raises(ValueError, match=message):
            jattn.attend(jnp.ones((metadata.bucket.max_tokens, 4, 16)), kv, metadata, self.problem().spec)
        with pytest.raises(ValueError, match=message):
            jattn.check_batch(metadata, kv)

    def test_a_plan_for_any_keys_serves_aligned_ones(self):
        metadata = jattn.build_batch_metadata([8, 3], [8, 3], None)
        query, keys, spec = jnp.ones((11, 4, 16)), jnp.ones((11, 2, 16)), self.problem().spec
        kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.asarray([0, 8]), is_aligned=True)
        plan = jattn.plan(metadata, spec, jattn.pytree.replace(kv, is_aligned=False))
        np.testing.assert_allclose(jattn.attend(query, kv, metadata, spec, plan), 1.0, rtol=1e-6)
        jattn.check_batch(metadata, kv)

    def test_packed_rows_must_not_exceed_their_keys(self, types_unchecked):
        metadata = jattn.build_batch_metadata([2, 3], [2, 3], None)
        starts, keys = jnp.asarray([0, 2], jnp.int32), jnp.zeros((5, 2, 16))
        keys_of = lambda longest: jattn.PackedKV(k=keys, v=keys, kv_start_loc=starts, max_seq_len=longest)
        attend = lambda kv: jattn.attend(jnp.zeros((5, 4, 16)), kv, metadata, self.problem().spec)
        attend(keys_of(3))
        with pytest.raises(ValueError, match=r"must be at least the longest row \(3 keys\), got 2"):
            attend(keys_of(2))
        with pytest.raises(ValueError, match=r"max_seq_len must be >= 0, got -1"):
            keys_of(-1)
        with pytest.raises(ValueError, match=r"max_seq_len must be an int, got 2.5"):
            keys_of(2.5)


STRIDED = jattn.LocalStrided(block_size=16, local_blocks=1, vert_stride=2)
BLOCKS = masks.BlockMask(
    blocks=np.random.default_rng(0).random((8, 2, 1, 6)) < 0.5, block_q=None, block_kv=64
)


class TestExplicitAxes:
    """Arrays of meshes from `jax.make_mesh`, whose axes are Explicit; JAX would fail deep inside."""

    MESH = jax.make_mesh((1,), ("heads",))
    SPEC = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)
    BY_HEADS = P(None, "heads")

    def given(self, is_packed):
        draw = lambda i, heads: jax.random.normal(jax.random.key(i), (6, heads, 8))
        query, key, value = draw(0, 4), draw(1, 2), draw(2, 2)
        table = None if is_packed else np.arange(1, 3)[:, None]
        metadata = jattn.build_batch_metadata([4, 2], [4, 2], table, block_size=4)
        if is_packed:
            return query, jattn.PackedKV(k=key, v=value, kv_start_loc=jnp.array([0, 4])), metadata
        spec = jattn.CacheSpec(
            num_blocks=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32, layout="HND"
        )
        cache = jattn.write_kv(jattn.PagedCache.create(spec), key, value, metadata.slot_mapping)
        return query, cache, metadata

    def cut(self, array):
        return jax.device_put(array, jax.NamedSharding(self.MESH, self.BY_HEADS))

    @pytest.mark.parametrize("is_packed", [True, False])
    def test_sharded_explicit_arrays_are_rejected_by_name(self, is_packed):
        query, cache, metadata = self.given(is_packed)
        reason = r" on a mesh as P\(None, 'heads', .*\): attend does not support Explicit mesh axes"
        with pytest.raises(NotImplementedError, match=f"query{reason}"):
            jattn.attend(self.cut(query), cache, metadata, self.SPEC)
        cut_keys = dataclasses.replace(cache, k=self.cut(cache.k))
        with pytest.raises(NotImplementedError, match=f"cache.k{reason}"):
            jax.eval_shape(lambda cache: jattn.attend(query, cache, metadata, self.SPEC), cut_keys)

    @pytest.mark.kernels
    @pytest.mark.parametrize("is_packed", [True, False])
    def test_explicit_arrays_are_accepted_in_a_shard_map(self, is_packed):
        query, cache, metadata = self.given(is_packed)
        attention = lambda query, cache: jattn.attend(query, cache, metadata, self.SPEC)
        cache_specs = jax.tree.map(lambda x: self.BY_HEADS if x.ndim > 2 else P(), cache)
        specs, out = (self.BY_HEADS, cache_specs), self.BY_HEADS
        mapped = jax.jit(jax.shard_map(attention, mesh=self.MESH, in_specs=specs, out_specs=out))
        cut = jax.tree.map(lambda x: self.cut(x) if x.ndim > 2 else x, (query, cache))
        np.testing.assert_array_equal(mapped(*cut), attention(query, cache))


@pytest.mark.kernels
class TestKernels:
    """`attend` by the kernels in interpret mode with few thread blocks, as on a GPU."""

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, monkeypatch):
        decode_kernel, prefill_kernel = kernel_selection.decode_kernel, kernel_selection.prefill_kernel
        decode = decode_kernel.DecodeSizes(stages=2, ctas=3, tile_kv=64)
        prefill = prefill_kernel.PrefillSizes(stages=2, ctas=3, tile_kv=64)
        monkeypatch.setattr(decode_kernel, "default_sizes", lambda *args, **kwargs: decode)
        monkeypatch.setattr(prefill_kernel, "default_sizes", lambda *args, **kwargs: prefill)
        in_entry = "pallas_kernels.varlen_prefill.entry.default_sizes"
        monkeypatch.setattr(in_entry, lambda *args, **kwargs: prefill)
        monkeypatch.setattr(support, "why_not_on", lambda *_: None)
        interpret = functools.partial(mosaic_gpu.attend, interpret=plgpu.InterpretGPUParams())
        monkeypatch.setattr(mosaic_gpu, "attend", interpret)

    case = AttentionContract().plain_case(
        head_dim=64, dtype="bfloat16", block_size=16, padded=True, sinks=True, alibi="linear"
    )

    def run(self, problem, **changes):
        contract = AttentionContract()
        contract.implementation = "mosaic_gpu"
        return contract.attend(problem, **changes)

    def test_kernels_attend_to_both_regions_with_and_without_a_plan(self):
        problem = Problem(self.case)
        without = self.run(problem)
        problem.check(*without)
        plan = jattn.plan(problem.metadata, problem.spec, problem.kv)
        assert len(plan.regions) == 2
        with_plan = self.run(problem, plan=plan)
        for a, b in zip(without, with_plan, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_kernels_attend_to_packed_keys_in_both_regions(self):
        problem = Problem(self.case | {"kv": "no_cache"})
        problem.check(*self.run(problem))

    def test_too_many_new_tokens_for_the_decode_kernel_use_the_prefill_kernel(self, monkeypatch):
        maxima = {"query heads per KV head": 64, "decode_query_len": 1}
        kernel = dataclasses.replace(support.KERNELS["paged_decode"], maxima=maxima)
        monkeypatch.setitem(support.KERNELS, "paged_decode", kernel)
        problem = Problem(self.case | {"region": "speculative"})
        assert problem.metadata.bucket.decode_query_len > 1
        problem.check(*self.run(problem))

    @pytest.mark.parametrize(("stored", "kv"), [("int8_static_v", "NHD"), ("fp8_head", "HND")])
    def test_prompt_over_an_8_bit_cache_equals_float64(self, stored, kv):
        problem = Problem(self.case | {"region": "chunked", "stored": stored, "kv": kv, "window": (9, None)})
        problem.check(*self.run(problem))

    @pytest.mark.parametrize(("stored", "query"), [("int8_token_head", "int8"), ("fp8_head", "fp8_e4m3")])
    def test_quantized_queries_equal_float64(self, stored, query):
        problem = Problem(self.case | {"stored": stored, "query_quantization": query})
        rounded = self.run(problem)
        problem.check(*rounded)
        if query == "int8":
            problem.spec = dataclasses.replace(problem.spec, query_quantization=None)
            assert (np.asarray(self.run(problem)[0]) != np.asarray(rounded[0])).any()

    @pytest.mark.parametrize("homo_head", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_decode_under_a_mask_of_whole_blocks_uses_block_lists(self, monkeypatch, homo_head):
        sparsity = dataclasses.replace(STRIDED, homo_head=homo_head)
        problem = Problem(self.case | {"region": "decode", "sinks": False, "alibi": None})
        problem.spec = dataclasses.replace(problem.spec, sparsity=sparsity)
        listed, decode = [], attention.paged_decode

        def spy(*args, **kwargs):
            listed.append(kwargs.get("list_block_size"))
            return decode(*args, **kwargs)

        monkeypatch.setattr(attention, "paged_decode", spy)
        problem.check(*self.run(problem))
        assert listed == [16]

    def test_decode_under_big_bird_uses_block_lists(self):
        """Random blocks differ between the query heads of a KV head."""
        sparsity = masks.BigBird(block_size=16, local_blocks=1, random_blocks=1)
        problem = Problem(self.case | {"region": "decode", "sinks": False, "alibi": None})
        problem.spec = dataclasses.replace(problem.spec, sparsity=sparsity)
        plan = jattn.plan(problem.metadata, problem.spec, problem.kv)
        assert "paged_decode over lists of blocks of 16" in str(plan)
        contract = AttentionContract()
        contract.implementation = "xla"
        for actual, expected in zip(self.run(problem, plan=plan), contract.attend(problem), strict=True):
            np.testing.assert_allclose(
                np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=0.02
            )

    @pytest.mark.parametrize(
        ("sparsity", "mask", "is_of_blocks"),
        [(STRIDED, None, True), (None, BLOCKS, True), (masks.Sinks(3), BLOCKS, False)],
    )
    def test_layers_with_one_mask_share_lists_in_the_plan(self, monkeypatch, sparsity, mask, is_of_blocks):
        """Decode uses block lists if the mask has whole blocks, otherwise tile lists."""
        problem = Problem(self.case | {"sinks": False, "alibi": None})
        problem.spec = dataclasses.replace(problem.spec, sparsity=sparsity)
        list_arguments = []

        def kernel(query, *_, schedule, lists=None, block_list=None, **__):
            list_arguments.append((schedule, lists, block_list))
            return query, jnp.zeros(query.shape[1::-1])

        def taken(plan, mask):
            list_arguments.clear()
            arguments = jnp.asarray(problem.query), problem.kv, problem.metadata, problem.spec, plan
            jattn.attend(*arguments, mask=mask)
            return tuple(list_arguments)

        monkeypatch.setattr(attention, "paged_decode", kernel)
        monkeypatch.setattr(prefill, "varlen_prefill", kernel)
        without = jax.jit(taken)(None, mask)
        plan = jattn.plan(problem.metadata, problem.spec, problem.kv, mask=mask)
        for module, makes in ((tile_lists, "plan_mask"), (block_lists, "block_list")):
            monkeypatch.delattr(module, makes)
        (_, *in_decode), (_, *in_prefill) = planned = jax.jit(taken)(plan, None)
        assert [x is None for x in (*in_decode, *in_prefill)] == [is_of_blocks, not is_of_blocks, False, True]
        for a, b in zip(jax.tree.leaves(without), jax.tree.leaves(planned), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_layers_of_a_step_share_their_lists(self):
        problem = Problem(self.case)
        spec = dataclasses.replace(problem.spec, sparsity=dataclasses.replace(STRIDED, homo_head=True))

        def step(query, cache, metadata, num_layers):
            capped = dataclasses.replace(spec, soft_cap=5.0)
            plan = jattn.plan(metadata, [spec, capped], cache)
            for layer in range(num_layers):
                query = jattn.attend(query, cache, metadata, (spec, capped)[layer % 2], plan)
            return query

        arguments = jnp.asarray(problem.query), problem.kv, problem.metadata
        sorts = [
            jax.jit(step, static_argnums=3).lower(*arguments, num_layers).as_text().count("stablehlo.sort")
            for num_layers in (1, 3)
        ]
        assert sorts == [2, 2]  # a region each: lists are made by sorting where there is no GPU

    def test_layers_of_one_mask_share_a_schedule(self):
        problem = Problem(self.case)
        capped = dataclasses.replace(problem.spec, soft_cap=5.0)
        windowed = dataclasses.replace(problem.spec, window=(7, 0))
        specs = [problem.spec, capped, windowed, problem.spec]
        plan = jattn.plan(problem.metadata, specs, problem.kv)
        keys = [layer_plan.region_keys for layer_plan in plan.layers]
        assert keys[0] == keys[1] != keys[2]
        assert [region.key for region in plan.regions] == [*keys[0], *keys[2]]

    def test_unsupported_features_use_xla_unless_a_kernel_is_requested(self):
        problem = Problem(self.case | {"dtype": "float32", "sinks": False, "alibi": None})
        with pytest.raises(
            NotImplementedError,
            match=r"mosaic_gpu: .*query dtype=float32 is not supported.*Pass implementation=None or 'xla'",
        ):
            self.run(problem)
        arguments = jnp.asarray(problem.query), problem.kv, problem.metadata, problem.spec
        np.testing.assert_array_equal(
            jattn.attend(*arguments), jattn.attend(*arguments, implementation=("mosaic_gpu", "xla"))
        )


class TestBatchInvariance:
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, batch_invariant=True)

    def rows(self, query_lens, seq_lens, table, bucket, seed_of):
        """Return each request's output; requests with equal seeds have equal queries."""
        keys = jax.random.split(jax.random.key(0), 2)
        k, v = (jax.random.normal(key, (40, 4, 2, 16)) for key in keys)
        metadata = jattn.build_batch_metadata(query_lens, seq_lens, table, block_size=4, bucket=bucket)
        query = np.full((metadata.bucket.max_tokens, 4, 16), np.nan, np.float32)
        starts = np.asarray(metadata.row_starts)[
            jattn.batch.bucket.row_indices(np.asarray(query_lens), metadata.bucket)
        ]
        for start, n, seed in zip(starts, query_lens, seed_of, strict=True):
            query[start : start + n] = jax.random.normal(jax.random.key(seed), (n, 4, 16))
        attention = functools.partial(jattn.attend, spec=self.spec, implementation="xla")
        out = jax.jit(attention)(jnp.asarray(query), jattn.PagedCache(k=k, v=v), metadata)
        return [np.asarray(out[start : start + n]) for start, n in zip(starts, query_lens, strict=True)]

    @pytest.mark.kernels
    def test_request_has_the_same_bits_in_any_batch_and_bucket(self):
        short, long = [3, 1, 9, 7, 30], [12, 2, 31, 18, 6]
        alone = self.rows([1], [18], [short], None, [1]) + self.rows([5], [19], [long], None, [2])
        larger = jattn.Bucket(max_decodes=9, max_prefills=3, max_prefill_tokens=150, max_blocks=24)
        for bucket in (None, larger):
            table = [[20, 21], short, list(range(12, 36)), long]
            mixed = self.rows([1, 1, 70, 5], [7, 18, 90, 19], table, bucket, [5, 1, 6, 2])
            np.testing.assert_array_equal(mixed[1], alone[0])
            np.testing.assert_array_equal(mixed[3], alone[1])

    def test_batch_invariance_is_refused_by_name_if_unsupported(self):
        metadata = jattn.build_batch_metadata([1], [5], [[1, 0]], block_size=4)
        cache = jattn.PagedCache(k=jnp.zeros((2, 4, 2, 16)), v=jnp.zeros((2, 4, 2, 16)))
        query = jnp.zeros((1, 4, 16))
        with pytest.raises(NotImplementedError, match=r"reference: .*sizes of the bucket"):
            jattn.attend(query, cache, metadata, self.spec, implementation="reference")
        with pytest.raises(NotImplementedError, match=r"batch_invariant=True.*other requests of the batch"):
            jattn.cascade_attend(query, cache, jattn.build_cascade_metadata(metadata, 4), self.spec)


class TestMemory:
    @pytest.mark.kernels
    def test_temporary_bytes_grow_neither_with_requests_nor_with_length(self):
        spec = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)

        def temporary_bytes(reqs, length):
            bucket = jattn.Bucket(max_decodes=reqs, max_blocks=length // 16)
            metadata = jax.eval_shape(
                lambda: jattn.pad_to_bucket(jattn.build_batch_metadata([1], [1], [[1]]), bucket)
            )
            blocks = jax.ShapeDtypeStruct((reqs * length // 16, 16, 8, 128), jnp.bfloat16)
            cache = jattn.pytree.replace(
                jattn.PagedCache(k=jnp.zeros((1, 1, 1, 1)), v=jnp.zeros((1, 1, 1, 1))), k=blocks, v=blocks
            )
            query = jax.ShapeDtypeStruct((reqs, 32, 128), jnp.bfloat16)
            attention = lambda q, c, m: jattn.attend(q, c, m, spec, implementation="xla")
            return (
                jax.jit(attention)
                .lower(query, cache, metadata)
                .compile()
                .memory_analysis()
                .temp_size_in_bytes
            )

        small, long, larger = (
            temporary_bytes(64, 1024),
            temporary_bytes(64, 32768),
            temporary_bytes(256, 1024),
        )
        gathered = 64 * 32768 * 8 * 128 * 2 * 2  # what a dense gather of 64 x 32k would take
        assert long < gathered / 20
        assert long <= 1.05 * small
        assert larger <= 1.25 * small


@pytest.mark.kernels
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float64_queries_are_computed_in_float64(implementation):
    with jax.enable_x64(True):
        problem = Problem(AttentionContract().plain_case(dtype="float64", soft_cap=5.0, alibi="linear"))
        out, _ = jattn.attend(
            jnp.asarray(problem.query),
            problem.kv,
            problem.metadata,
            problem.spec,
            alibi_slopes=jnp.asarray(problem.slopes, jnp.float64),
            implementation=implementation,
            return_lse=True,
        )
        assert out.dtype == jnp.float64
        expected, _ = oracle.attention(problem.spec, problem.step)
        np.testing.assert_allclose(out, np.concatenate(expected), atol=1e-13)
