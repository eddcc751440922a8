"""plan: selection of kernels, reasons and warnings, and refusals of layers and batches it was not built
for.
"""

import dataclasses
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks
from jattn.implementations import mosaic_gpu
from jattn.planning import COLUMNS, table_rows
from pallas_kernels import architectures, support
from tests.contract import AttentionContract, Problem

HEADS = {"num_q_heads": 4, "num_kv_heads": 2}
SPEC = jattn.AttentionSpec(**HEADS, head_dim=64)
CACHE = jattn.CacheSpec(num_blocks=8, num_kv_heads=2, head_dim=64)
STRIDED = jattn.LocalStrided(block_size=16, local_blocks=1, vert_stride=2)


def batch(query_lens=(1, 1, 5), seq_lens=(41, 8, 5), **changes):
    return jattn.build_batch_metadata(query_lens, seq_lens, [[3, 4, 5], [1], [2]][: len(seq_lens)], **changes)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(support, "why_not_on", lambda *_: None)
    monkeypatch.setattr(architectures, "is_gpu", lambda *_: True)


def choices_of(plan, layer=0):
    return dict(plan.layers[layer].choices)


class TestChoice:
    @pytest.mark.kernels
    @pytest.mark.parametrize(
        ("spec", "cache", "decode", "prefill"),
        [
            ({}, {}, "paged_decode", "varlen_prefill"),
            ({}, {"layout": "HND", "dtype": jnp.float16}, "paged_decode", "varlen_prefill"),
            ({}, {"quantization": "int8_token_head"}, "paged_decode", "cache_read, varlen_prefill"),
            (
                {"head_dim": 96, "window": (5, None)},
                {"quantization": "fp8_e5m2"},
                "paged_decode",
                "cache_read, varlen_prefill",
            ),
            (
                {"sparsity": STRIDED},
                {},
                "paged_decode over lists of blocks of 16",
                "varlen_prefill over lists of tiles",
            ),
            (
                {"sparsity": masks.Sinks(3)},
                {"quantization": "fp8_e4m3"},
                "cache_read, varlen_prefill over lists of tiles",
                "cache_read, varlen_prefill over lists of tiles",
            ),
        ],
    )
    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_kernel_is_selected_per_region_and_kind_of_layer(self, spec, cache, decode, prefill):
        spec = dataclasses.replace(SPEC, **spec)
        plan = jattn.plan(batch(), spec, dataclasses.replace(CACHE, head_dim=spec.head_dim, **cache))
        assert {name: str(choice.kernel) for name, choice in choices_of(plan).items()} == {
            "decode": decode,
            "prefill": prefill,
        }
        assert all(choice.implementation == "mosaic_gpu" for choice in choices_of(plan).values())

    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_layers_of_a_model_may_use_different_implementations(self):
        unsupported = dataclasses.replace(SPEC, head_dim=20)
        with pytest.warns(jattn.KernelFallbackWarning, match="head_dim=20"):
            plan = jattn.plan(batch(), [SPEC, unsupported], [CACHE, dataclasses.replace(CACHE, head_dim=20)])
        names = [[choice.implementation for _, choice in layer_plan.choices] for layer_plan in plan.layers]
        assert names == [["mosaic_gpu"] * 2, ["xla"] * 2]

    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_layers_with_other_cache_formats_are_another_kind(self):
        in_8_bits = dataclasses.replace(CACHE, quantization="int8_token_head")
        plan = jattn.plan(batch([1], [9]), [SPEC, SPEC, SPEC], [CACHE, in_8_bits, CACHE])
        assert len(plan.layers) == 2
        assert len(plan.regions) == len(
            {layer_plan.decode.kernel.sizes.schedule_sizes for layer_plan in plan.layers}
        )

    def test_reason_is_recorded_if_no_kernel_runs(self):
        (choice,) = choices_of(jattn.plan(batch([1], [9]), SPEC, CACHE)).values()
        assert choice.implementation == "xla"
        assert choice.reason == "mosaic_gpu: the kernels need an NVIDIA GPU, and JAX's platform here is 'cpu'"

    def test_requested_implementation_that_is_unavailable_is_an_error_with_the_reason(self):
        with pytest.raises(
            NotImplementedError, match=r"mosaic_gpu: .*'cpu'.*Pass implementation=None or 'xla'"
        ):
            jattn.plan(batch(), SPEC, CACHE, implementation="mosaic_gpu")
        plan = jattn.plan(batch([1], [9]), SPEC, CACHE, implementation=("mosaic_gpu", "reference"))
        assert choices_of(plan)["decode"].implementation == "reference"

    def test_a_plan_is_traced_once_for_all_batches_of_a_bucket(self, traced_once):
        bucket = jattn.Bucket(max_decodes=3, max_prefills=2, max_prefill_tokens=16, max_blocks=4)
        batches = batch(bucket=bucket), batch([1, 3], [9, 3], bucket=bucket)
        traced_once(lambda metadata: jattn.plan(metadata, SPEC, CACHE).regions, *[(x,) for x in batches])

    def test_devices_of_the_arguments_determine_the_kernel(self, monkeypatch):
        arguments_checked = []
        monkeypatch.setattr(support, "why_not_on", lambda *trees: arguments_checked.append(trees) or "no")
        metadata = batch()
        jattn.plan(metadata, SPEC, CACHE)
        assert arguments_checked == [(metadata,)]
        assert architectures.device_of(metadata) == jax.devices()[0]
        with jax.default_device("cpu"):
            assert architectures.device_of().platform == "cpu"


class TestDevice:
    """Plans for a GPU that this machine need not have."""

    def test_plan_for_a_gpu_chooses_its_kernels(self):
        for device in ("h100", "H200", "9.0"):
            text = str(jattn.plan(batch([1], [9]), SPEC, CACHE, device=device))
            assert "mosaic_gpu" in text
            assert "xla" not in text

    @pytest.mark.parametrize("gpu", architectures.ARCHITECTURES)
    def test_decode_is_planned_with_the_sizes_of_the_architecture(self, gpu):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = jattn.plan(batch([1], [9]), SPEC, CACHE, device=gpu)
        sizes = plan.layers[0].decode.kernel.sizes
        assert (sizes.gpu, sizes.uses_tma) == (gpu, architectures.ARCHITECTURES[gpu].has_tma)

    @pytest.mark.parametrize("gpu", architectures.ARCHITECTURES)
    def test_prefill_is_planned_with_the_sizes_of_the_architecture(self, gpu):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = jattn.plan(batch([4], [9]), SPEC, CACHE, device=gpu)
        sizes = plan.layers[0].prefill.kernel.sizes
        has_wgmma = architectures.ARCHITECTURES[gpu].has_wgmma
        assert (sizes.gpu, sizes.per_warp_mma) == ("9.0" if has_wgmma else gpu, not has_wgmma)

    def test_plan_for_a_gpu_without_a_kernel_has_the_reason(self, monkeypatch):
        hopper = dataclasses.replace(support.KERNELS["varlen_prefill"], compute_capabilities=("9.0",))
        monkeypatch.setitem(support.KERNELS, "varlen_prefill", hopper)
        with pytest.warns(jattn.KernelFallbackWarning, match=r"compute capability 9.0, and this GPU has 8.0"):
            text = str(jattn.plan(batch([4, 1], [4, 9]), SPEC, CACHE, device="a100"))
        assert "mosaic_gpu: varlen_prefill is compiled for compute capability 9.0" in text

    def test_unknown_device_is_rejected_and_the_target_ends_with_the_call(self):
        with pytest.raises(ValueError, match=r"device must be one of 'a100', .*, got 'tpu'"):
            jattn.plan(batch([1], [9]), SPEC, CACHE, device="tpu")
        assert support.why_not_on(jnp.ones(1)) == support.why_not_device(jax.devices()[0])


class TestWarning:
    @pytest.mark.usefixtures("as_on_a_gpu", "warned_lines")
    def test_fallback_to_xla_on_a_gpu_warns_with_the_reason_and_a_fix(self):
        packed = dataclasses.replace(CACHE, layout="packed")
        with pytest.warns(jattn.KernelFallbackWarning) as caught:
            jattn.plan(batch([1], [9]), SPEC, packed)
        (warning,) = caught
        message = str(warning.message)
        assert "falls back to xla" in message
        assert "layout=packed is not supported; supported: NHD, HND" in message
        assert "implementation='xla'" in message
        assert warning.filename == __file__

    @pytest.mark.usefixtures("as_on_a_gpu", "warned_lines")
    def test_fallback_without_a_plan_warns(self):
        problem = Problem(AttentionContract().plain_case(region="decode"))
        with pytest.warns(jattn.KernelFallbackWarning, match="query dtype=float32") as caught:
            jattn.attend(jnp.asarray(problem.query), problem.kv, problem.metadata, problem.spec)
        assert [warning.filename for warning in caught] == [__file__]

    @pytest.mark.usefixtures("as_on_a_gpu", "warned_lines")
    def test_warning_in_a_jitted_gradient_names_the_line_of_the_loss(self):
        loss = lambda x: jattn.attention(x, x, x).sum()
        with pytest.warns(jattn.KernelFallbackWarning, match="query dtype=float32") as caught:
            jax.jit(jax.grad(loss)).lower(jnp.ones((1, 9, 2, 16)))
        assert {warning.filename for warning in caught} == {__file__}

    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_warning_is_shown_once_by_default(self):
        packed = dataclasses.replace(CACHE, layout="packed")
        jattn.plan(batch([1], [9]), SPEC, packed, implementation="xla")  # imports may reset the registry
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                jattn.plan(batch([1], [9]), SPEC, packed)
        # Garbage of earlier tests may be collected here, whose ResourceWarning is recorded as well.
        fallbacks = [warning for warning in caught if warning.category is jattn.KernelFallbackWarning]
        assert len(fallbacks) == 1

    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_requested_implementation_does_not_warn(self):
        packed = dataclasses.replace(CACHE, layout="packed")
        jattn.plan(batch([1], [9]), SPEC, packed, implementation="xla")
        with pytest.raises(NotImplementedError, match="layout=packed is not supported"):
            jattn.plan(batch([1], [9]), SPEC, packed, implementation="mosaic_gpu")

    def test_fallback_without_a_gpu_does_not_warn(self):
        jattn.plan(batch(), SPEC, CACHE)


class TestTable:
    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_plan_prints_a_line_per_kind_of_layer_and_region(self):
        invariant = dataclasses.replace(SPEC, window=(1023, 0), batch_invariant=True)
        plan = jattn.plan(batch(), [SPEC, invariant], CACHE)
        head, _, *lines = str(plan).splitlines()
        assert head.split() == list(COLUMNS)
        assert len(lines) == 4
        assert "window=(1023, 0), batch_invariant" in lines[2]
        assert "mosaic_gpu paged_decode" in lines[2]
        assert "every 2048 keys" in lines[2]
        assert "192 x 128 keys, 3 stages" in lines[1]

    def test_table_has_the_reason_for_rejected_implementations(self):
        (row,) = table_rows(jattn.plan(batch([1], [9]), SPEC, CACHE).layers)
        assert row[1:3] == ("decode", "xla")
        assert row[-1].startswith("mosaic_gpu: the kernels need an NVIDIA GPU")


class TestPlanInAttend:
    """attend follows the plan, and refuses other layers and batches."""

    def problem(self, **changes):
        return Problem(AttentionContract().plain_case(**changes))

    def attend(self, problem, plan, **changes):
        arguments = {"cache": problem.kv, "metadata": problem.metadata, "spec": problem.spec}
        return jattn.attend(jnp.asarray(problem.query), **(arguments | changes), plan=plan)

    @pytest.mark.kernels
    @pytest.mark.parametrize("implementation", ["xla", "reference"])
    def test_attend_uses_the_plans_implementation(self, monkeypatch, implementation):
        problem, unused_implementation = (
            self.problem(),
            {"xla": "reference", "reference": "xla"}[implementation],
        )
        plan = jattn.plan(problem.metadata, problem.spec, problem.kv, implementation=implementation)
        monkeypatch.setattr(f"jattn.implementations.{unused_implementation}.attend", None)
        self.attend(problem, plan)

    def test_implementation_argument_takes_precedence_over_the_plan(self, monkeypatch):
        problem = self.problem(region="decode")
        plan = jattn.plan(problem.metadata, problem.spec, problem.kv)
        run = lambda implementation: jax.eval_shape(
            lambda plan: self.attend(problem, plan, implementation=implementation), plan
        )
        run(("mosaic_gpu", "xla"))
        monkeypatch.setattr("jattn.implementations.xla.attend", None)
        run("reference")
        with pytest.raises(NotImplementedError, match=r"mosaic_gpu: .*'cpu'"):
            self.attend(problem, plan, implementation="mosaic_gpu")

    def test_plan_of_another_bucket_is_rejected(self):
        problem = self.problem()
        other_plan = jattn.plan(
            jattn.build_batch_metadata([1], [1], [[1]], block_size=4), problem.spec, problem.kv
        )
        message = r"plan was built for Bucket.*max_decodes=1.*metadata has Bucket.*max_decodes=2"
        with pytest.raises(ValueError, match=message):
            self.attend(problem, other_plan)

    def test_plan_of_another_batch_of_the_bucket_is_rejected(self):
        bucket = jattn.Bucket(max_decodes=2, max_blocks=4)
        spec, cache = dataclasses.replace(SPEC, head_dim=16), dataclasses.replace(CACHE, head_dim=16)
        metadata, other_metadata = (
            jattn.build_batch_metadata([1], [n], [[1, 2, 3]], block_size=16, bucket=bucket) for n in (41, 9)
        )
        arguments = jnp.zeros((2, 4, 16), jnp.bfloat16), jattn.PagedCache.create(cache), metadata, spec
        jattn.attend(*arguments, jattn.plan(metadata, spec, cache))
        message = r"built for a batch with seq_lens \[9 0\], but the batch has seq_lens \[41  0\]"
        with pytest.raises(ValueError, match=message):
            jattn.attend(*arguments, jattn.plan(other_metadata, spec, cache))

    @pytest.mark.kernels
    def test_mask_of_the_plan_applies_to_every_layer(self):
        problem, mask = self.problem(), masks.Sinks(2)
        plan = jattn.plan(problem.metadata, problem.spec, problem.kv, mask=mask)
        out, expected = self.attend(problem, plan), self.attend(problem, None, mask=mask)
        np.testing.assert_array_equal(out, expected)
        assert (np.asarray(out) != np.asarray(self.attend(problem, None))).any()
        with pytest.raises(ValueError, match=r"both a mask and a plan\. Pass the mask to plan\(\)"):
            self.attend(problem, plan, mask=mask)

    def test_layer_that_the_plan_does_not_cover_is_rejected_with_both_specs(self):
        problem = self.problem()
        planned = dataclasses.replace(problem.spec, sparsity=jattn.LocalStrided(block_size=8))
        plan = jattn.plan(problem.metadata, [problem.spec, planned], problem.kv)
        other_spec = dataclasses.replace(problem.spec, sparsity=jattn.LocalStrided(block_size=4))
        message = r"The plan was built for .*block_size=8.*but the layer is .*block_size=4"
        with pytest.raises(ValueError, match=message):
            self.attend(problem, plan, spec=other_spec)

    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_queries_of_another_dtype_are_rejected(self):
        spec = dataclasses.replace(CACHE, dtype=jnp.float16, quantization="int8_token_head")
        metadata, cache = batch([1], [9]), jattn.PagedCache.create(spec)
        plan = jattn.plan(metadata, SPEC, cache)  # The cache does not have the dtype of the queries.
        with pytest.raises(ValueError, match=r"\(4/2.*bfloat16 queries.* Pass query_dtype=float16 to plan\."):
            jattn.attend(jnp.zeros((1, 4, 64), jnp.float16), cache, metadata, SPEC, plan)

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
    def test_queries_of_less_than_16_bits_or_ints_are_rejected(self, dtype):
        with pytest.raises(ValueError, match=f"query_dtype must .*float.*, got {jnp.dtype(dtype).name}"):
            jattn.plan(batch([1], [9]), SPEC, CACHE, query_dtype=dtype)

    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_cache_of_another_format_is_rejected(self, monkeypatch):
        monkeypatch.setattr(mosaic_gpu, "attend", lambda inputs, *_, **__: (inputs.query, None))
        metadata, query = batch([1], [9]), jnp.zeros((1, 4, 64), jnp.bfloat16)
        plan = jattn.plan(metadata, SPEC, CACHE)
        run = jax.jit(lambda query, cache: jattn.attend(query, cache, metadata, SPEC, plan))
        run(query, jattn.PagedCache.create(CACHE))
        stored = jattn.PagedCache.create(dataclasses.replace(CACHE, quantization="int8_token_head"))
        with pytest.raises(
            ValueError, match=r"built for .*NHD bfloat16\), but the layer is .*NHD int8 x scale a token"
        ):
            run(query, stored)
        zeros = jnp.zeros((9, 2, 64), jnp.bfloat16)
        packed = jattn.PackedKV(k=zeros, v=zeros, kv_start_loc=jnp.zeros(1, jnp.int32))
        with pytest.raises(ValueError, match=r"the layer is .*keys outside a cache"):
            run(query, packed)

    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_a_plan_for_aligned_keys_serves_no_others(self, monkeypatch):
        monkeypatch.setattr(mosaic_gpu, "attend", lambda inputs, *_, **__: (inputs.query, None))
        metadata, query = batch([8], [8]), jnp.zeros((8, 4, 64), jnp.bfloat16)
        keys = jnp.zeros((8, 2, 64), jnp.bfloat16)
        aligned = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.zeros(1, jnp.int32), is_aligned=True)
        packed = jattn.pytree.replace(aligned, is_aligned=False)
        run = lambda query, kv, plan: jattn.attend(query, kv, metadata, SPEC, plan)
        for planned, kv in ((aligned, aligned), (packed, packed), (packed, aligned), (None, aligned)):
            plan = jattn.plan(metadata, SPEC, planned)
            jax.eval_shape(run, query, kv, plan)
            with pytest.raises(ValueError, match=r"Pass query_dtype=float16 to plan\."):
                jax.eval_shape(run, query.astype(jnp.float16), kv, plan)
        message = r"for .*, aligned keys outside a cache\), but the layer is .*, keys outside a cache\)"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(run, query, packed, jattn.plan(metadata, SPEC, aligned))

    def test_plan_can_be_returned_from_jit(self):
        problem = self.problem()
        make = jax.jit(lambda metadata, cache: jattn.plan(metadata, problem.spec, cache))
        plan = make(problem.metadata, problem.kv)
        np.testing.assert_array_equal(self.attend(problem, plan), self.attend(problem, None))


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"head_dim": 8}, "cache_spec.head_dim must equal spec.head_dim .*64.*got 8"),
            ({"num_kv_heads": 1}, "cache_spec.num_kv_heads must equal spec.num_kv_heads .*2.*got 1"),
            ({"block_size": 8}, "cache_spec.block_size must equal metadata.block_size .*16.*got 8"),
        ],
    )
    def test_cache_that_does_not_match_the_step_is_rejected(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            jattn.plan(batch(), SPEC, dataclasses.replace(CACHE, **wrong))

    def test_numbers_of_specs_and_caches_must_match(self):
        with pytest.raises(ValueError, match="cache_specs has 1 entries for 2 specs"):
            jattn.plan(batch(), [SPEC, SPEC], [CACHE])
        with pytest.raises(ValueError, match="specs must contain at least one AttentionSpec"):
            jattn.plan(batch(), [], CACHE)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"plan": masks.Sinks(1)}, "plan must be a Plan .*mask is given as mask=.*got Sinks"),
            ({"mask": np.ones((3, 3), bool)}, "mask must be a mask of jattn.masks, got a ndarray.*BlockMask"),
            (
                {"mask": jattn.masks.Causal},
                r"mask is the class Causal\. Pass a mask, such as Causal\(\.\.\.\)\.",
            ),
            ({"metadata": "plan"}, "metadata must be a BatchMetadata .*build_batch_metadata.*got str"),
            ({"spec": None}, "spec must be a AttentionSpec"),
            ({"cache": CACHE}, r"cache must be a PagedCache or PackedKV .*PagedCache.create.*got CacheSpec"),
            ({"query": [1.0]}, r"query must be an array \[tokens, q_heads, head_dim\], got list"),
            (
                {"query": jnp.zeros((7, 4, 64), jnp.int32)},
                "query must have a floating-point.*got int32",
            ),
            ({"query": jnp.zeros((1, 7, 4, 64))}, r"query must have shape .*got \(1, 7, 4, 64\)"),
            ({"sinks": [0.0, 1.0]}, r"sinks must have shape \(4,\).*got \(2,\)"),
        ],
    )
    def test_arguments_of_other_types_are_rejected_by_name(self, change, message):
        cache = jattn.PagedCache.create(CACHE)
        arguments = {
            "query": jnp.zeros((7, 4, 64), jnp.bfloat16),
            "cache": cache,
            "metadata": batch(),
            "spec": SPEC,
        }
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(jattn.attend)(**(arguments | change))

    def test_sinks_and_slopes_may_be_lists(self):
        arguments = jnp.ones((7, 4, 64), jnp.bfloat16), jattn.PagedCache.create(CACHE), batch(), SPEC
        numbers = [0.0, 1.0, 2.0, 3.0]
        for name in ("sinks", "alibi_slopes"):
            out = inspect.unwrap(jattn.attend)(*arguments, **{name: numbers})
            np.testing.assert_array_equal(out, jattn.attend(*arguments, **{name: jnp.asarray(numbers)}))


class TestEager:
    def test_calls_outside_jit_are_compiled_once(self, caplog):
        problem = Problem(AttentionContract().plain_case(region="chunked", head_dim=24))
        arguments = jnp.asarray(problem.query), problem.kv, problem.metadata, problem.spec
        queries = [arguments[0] * scale for scale in (1.0, 2.0, 3.0)]
        jattn.attend(*arguments)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            for query in queries:
                jattn.attend(query, *arguments[1:])
            assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
            jattn.attend(*arguments, return_lse=True)
        assert [record for record in caplog.records if "Compiling" in record.getMessage()]

    @pytest.mark.kernels
    @pytest.mark.parametrize("argument", ["query", "keys", "sinks"])
    def test_derivative_of_xla_is_refused_with_the_implementation_that_has_one(self, argument):
        problem = Problem(AttentionContract().plain_case(sinks=True))
        start = {"query": problem.query, "keys": problem.kv.k, "sinks": problem.sinks}
        start = {name: jnp.asarray(array) for name, array in start.items()}

        def loss(x, implementation):
            merged_arguments = start | {argument: x}
            cache = jattn.pytree.replace(problem.kv, k=merged_arguments["keys"])
            out = jattn.attend(
                merged_arguments["query"],
                cache,
                problem.metadata,
                problem.spec,
                sinks=merged_arguments["sinks"],
                implementation=implementation,
            )
            return out.sum()

        with pytest.raises(
            NotImplementedError, match=r"attend: xla does not support.*implementation='reference'"
        ):
            jax.grad(loss)(start[argument], "xla")
        assert np.isfinite(jax.grad(loss)(start[argument], "reference")).all()
