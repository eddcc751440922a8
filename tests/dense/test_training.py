"""Training on a GPU: which gradients the kernels compute, their accuracy, and fallbacks."""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks
from jattn.dense import per_shard
from jattn.implementations import mosaic_gpu
from jattn.implementations.mosaic_gpu import tile_lists
from pallas_kernels import support, target, varlen_backward, varlen_prefill
from tests import aot
from tests.dense.partition_aot_cases import aot_cases

pytestmark = pytest.mark.kernels

BOUNDS = (0, 70, 70, 200, 233)
SLOPES = jnp.linspace(0.05, 0.2, 4)
MARKS = np.random.default_rng(0).random((2, 3, 4, 70))  # of each document's heads


def arrays(tokens=240, head_dim=64):
    return tuple(
        jax.random.normal(jax.random.key(i), (tokens, heads, head_dim), jnp.bfloat16)
        for i, heads in enumerate((4, 2, 2))
    )


@contextlib.contextmanager
def as_on_a_gpu():
    """Run the kernels in interpret mode with few thread blocks; yields the names of those called."""
    called = []

    def interpreted(name, run):
        def call(*args, **options):
            called.append(name)
            return run(*args, **options, interpret=plgpu.InterpretGPUParams())

        return call

    def few_ctas(default_sizes):
        def sizes_with_few_ctas(*args, **kwargs):
            sizes = dataclasses.replace(default_sizes(*args, **kwargs), ctas=3)
            dq_sizes = getattr(sizes, "dq_sizes", None)
            if dq_sizes is None:
                return sizes
            return dataclasses.replace(sizes, dq_sizes=dataclasses.replace(dq_sizes, ctas=3))

        return sizes_with_few_ctas

    with contextlib.ExitStack() as stack:
        patch = lambda *target: stack.enter_context(mock.patch.object(*target))
        for module, name in ((varlen_prefill, "default_sizes"), (varlen_backward, "default_layer_sizes")):
            patch(module, name, few_ctas(getattr(module, name)))
        patch(support, "why_not_on", lambda *_: None)
        for name in ("attend", "gradients"):
            patch(mosaic_gpu, name, interpreted(name, getattr(mosaic_gpu, name)))
        patch(per_shard, "attend_regions", per_shard.attend_regions.__wrapped__)
        yield called


def loss_of(run):
    def loss(qkv):
        out, lse = run(*qkv)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

    return loss


def assert_near(actual, expected):
    """Assert that 16-bit gradients are close, and that none is all zeros."""
    for actual_array, expected_array in zip(actual, expected, strict=True):
        scale = float(jnp.abs(expected_array).max())
        np.testing.assert_allclose(
            actual_array.astype(jnp.float32), expected_array.astype(jnp.float32), rtol=0, atol=0.02 * scale
        )
        assert scale > 0


CASES = {
    "documents": {"cu_seqlens": jnp.asarray(BOUNDS), "causal": True},
    "sinks and slopes": {
        "cu_seqlens": jnp.asarray(BOUNDS),
        "causal": True,
        "sinks": jnp.linspace(-1.0, 1.0, 4),
        "alibi_slopes": SLOPES,
        "soft_cap": 9.0,
    },
    "segments": {"segment_ids": jnp.arange(240) // 90, "window": (50, 10)},
    "mask": {"mask": masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=2), "causal": True},
    "gathered columns": {  # some heads have more than are gathered
        "cu_seqlens": jnp.asarray((0, 70, 70, 130)),
        "causal": True,
        "sinks": jnp.linspace(-1.0, 1.0, 4),
        "mask": masks.VerticalSlash(columns=MARKS[0] < 0.1, slashes=MARKS[1] < 0.1, num_gathered=12),
    },
}


@pytest.mark.parametrize(
    "name", ["sinks and slopes", pytest.param("segments", marks=pytest.mark.slow), "gathered columns"]
)
def test_kernel_gradients_equal_xla(name):
    qkv, run = arrays(), functools.partial(jattn.attention, return_lse=True, **CASES[name])
    expected = jax.jit(jax.grad(loss_of(functools.partial(run, implementation="xla"))))(qkv)
    with as_on_a_gpu() as called:
        actual = jax.jit(jax.grad(loss_of(functools.partial(run, implementation="mosaic_gpu"))))(qkv)
    assert set(called) == {"attend", "gradients"}
    assert_near(actual, expected)


def test_mask_functions_of_kernels_may_capture_numbers():
    """XLA computes functions that capture a traced number."""
    qkv = tuple(x[:70] for x in arrays())

    def gradients(width):
        function = lambda head, query, key: jnp.abs(query - key) <= width
        run = functools.partial(jattn.attention, mask=masks.MaskFunction(function), return_lse=True)
        return jax.jit(jax.grad(loss_of(run)))(qkv)

    expected = gradients(20)
    with as_on_a_gpu() as called:
        assert_near(gradients(jnp.int32(20)), expected)
        assert set(called) == {"attend", "gradients"}
        called.clear()
        assert_near(jax.jit(gradients)(jnp.int32(20)), expected)
        assert not called


TEXTS, TOKENS = 3, 80


def batched_attention(mask, **options):
    """Return attention of a batch whose elements are consecutive rows of `arrays`."""

    def run(*arrays):
        q, k, v = (x.reshape(TEXTS, TOKENS, *x.shape[1:]) for x in arrays)
        return jattn.attention(q, k, v, causal=True, mask=mask, return_lse=True, **options)

    return run


def block_mask_per_text():
    """Return a mask of 16 x 16 blocks, random per batch element and KV head, plus the diagonal blocks."""
    drawn = jax.random.bernoulli(jax.random.key(7), 0.4, (TEXTS, 2, 5, 5))
    diagonal = jnp.eye(5, dtype=bool)[None, None]
    return masks.BlockMask(blocks=drawn | diagonal, block_q=16, block_kv=16)


@pytest.mark.parametrize("mask", [None, masks.Sinks(3) | masks.Window(left=20)], ids=["one kernel", "two"])
def test_vmapped_kernel_gradients_equal_those_of_a_batch(mask):
    """Two kernels, one of which computes dq, run if there is a mask."""
    qkv = tuple(x.reshape(2, 70, *x.shape[1:]) for x in arrays(140))

    def gradients(implementation):
        run = functools.partial(jattn.attention, causal=True, mask=mask, return_lse=True)
        return jax.grad(loss_of(functools.partial(run, implementation=implementation)))

    expected = jax.jit(gradients("xla"))(qkv)
    with as_on_a_gpu() as called:
        actual = jax.jit(jax.vmap(gradients("mosaic_gpu")))(qkv)
    assert set(called) == {"attend", "gradients"}
    assert_near(actual, expected)


def test_masked_batch_lists_only_tiles_of_its_own_keys():
    qkv, mask = arrays(), block_mask_per_text()
    expected = jax.jit(jax.grad(loss_of(batched_attention(mask, implementation="xla"))))(qkv)
    wraps = mock.patch.object(tile_lists, "tile_coverage", wraps=tile_lists.tile_coverage)
    with as_on_a_gpu() as called, wraps as coverage_calls:
        actual = jax.jit(jax.grad(loss_of(batched_attention(mask, implementation="mosaic_gpu"))))(qkv)
    assert set(called) == {"attend", "gradients"}
    # Keys per block in the forward pass, per tile of dK/dV and per block of dQ; the batch has 240.
    widths = {call.kwargs["size"][1]: call.kwargs["max_kv_tiles"] for call in coverage_calls.call_args_list}
    assert widths == {16: 5, 64: 2, 32: 3}
    assert_near(actual, expected)


class TestUnsupportedByTheKernel:
    """XLA computes unsupported gradients with a warning, or they are refused if a kernel was requested."""

    def run(self, loss, qkv, *, gradients_by_kernel=False):
        with as_on_a_gpu() as called:
            jax.eval_shape(jax.grad(loss), qkv)
        assert set(called) == {"attend", *["gradients"] * gradients_by_kernel}

    def test_trained_alibi_slopes(self):
        q, k, v = arrays()
        run = lambda slopes, **extra_options: loss_of(
            functools.partial(jattn.attention, return_lse=True, alibi_slopes=slopes, **extra_options)
        )((q, k, v))
        with pytest.warns(
            jattn.KernelFallbackWarning,
            match=r"to xla .*: .* gradient of ALiBi slopes",
        ):
            self.run(run, SLOPES)
        message = (
            'Gradients of attention with implementation="mosaic_gpu": there is no kernel for the .* ALiBi'
        )
        with pytest.raises(NotImplementedError, match=message):
            self.run(functools.partial(run, implementation="mosaic_gpu"), SLOPES)
        self.run(functools.partial(run, implementation=("mosaic_gpu", "xla")), SLOPES)

    def test_trained_alibi_slopes_with_segment_ids(self):
        """The kernels serve the forward pass, since the caller did not request them by name."""
        ids = jnp.arange(240) // 90
        run = lambda slopes: loss_of(
            functools.partial(jattn.attention, return_lse=True, alibi_slopes=slopes, segment_ids=ids)
        )(arrays())
        with pytest.warns(
            jattn.KernelFallbackWarning,
            match=r"to xla .*: .* gradient of ALiBi slopes",
        ):
            self.run(run, SLOPES)

    def test_unordered_keys(self):
        q, k, v = arrays()
        spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
        metadata = jattn.build_batch_metadata([100, 140], [100, 140], None)

        def loss(qkv, is_in_order):
            q, k, v = qkv
            starts = jnp.asarray([0, 100])
            kv = jattn.PackedKV(k=k, v=v, kv_start_loc=starts, is_in_order=is_in_order)
            return jattn.attend(q, kv, metadata, spec).astype(jnp.float32).sum()

        self.run(functools.partial(loss, is_in_order=True), (q, k, v), gradients_by_kernel=True)
        with pytest.warns(jattn.KernelFallbackWarning, match=r"PackedKV\(is_in_order=True\)"):
            self.run(functools.partial(loss, is_in_order=False), (q, k, v))

    @pytest.mark.parametrize("is_aligned", [False, True])
    def test_rows_without_keys(self, is_aligned):
        spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
        bucket = jattn.Bucket(max_prefills=2, max_prefill_tokens=16)
        metadata = jattn.build_batch_metadata([], [], None, bucket=bucket)
        mask = masks.BlockMask(blocks=np.ones((1, 2, 2), bool), block_q=32, block_kv=32)

        def loss(qkv):
            q, k, v = qkv
            starts = jnp.zeros(2, jnp.int32)
            kv = jattn.PackedKV(k=k, v=v, kv_start_loc=starts, is_in_order=True, is_aligned=is_aligned)
            return jattn.attend(q, kv, metadata, spec, mask=mask).astype(jnp.float32).sum()

        q, k, v = arrays(tokens=16)
        self.run(loss, (q, k[:0], v[:0]), gradients_by_kernel=True)

    def test_shard_map_with_check_vma(self):
        mesh, qkv = (
            jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)),
            tuple(x[None] for x in arrays()),
        )
        run = functools.partial(jattn.attention, causal=True)
        over = functools.partial(jax.shard_map, run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        loss = lambda qkv, **options: over(**options)(*qkv).astype(jnp.float32).sum()
        self.run(functools.partial(loss, check_vma=False), qkv, gradients_by_kernel=True)
        message = r'"mosaic_gpu" under shard_map over data: the kernels do not support .*check_vma=False'
        with as_on_a_gpu(), pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(loss, qkv)

    def test_unsupported_head_dim(self):
        run = functools.partial(jattn.attention, return_lse=True)
        with pytest.warns(jattn.KernelFallbackWarning, match="head_dim=120 is not supported for gradients"):
            self.run(loss_of(run), arrays(head_dim=120))

    @pytest.mark.parametrize("head_dim", [192, 256])
    def test_large_head_dim_with_tile_lists(self, head_dim):
        mask = jattn.masks.BlockMask(blocks=np.ones((1, 2, 2), bool), block_q=128, block_kv=128)
        run = functools.partial(jattn.attention, return_lse=True, mask=mask)
        self.run(loss_of(run), arrays(head_dim=head_dim), gradients_by_kernel=True)

    @pytest.mark.parametrize("mask", [None, masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=2)])
    def test_deterministic_gradients_are_bit_identical(self, mask):
        run = functools.partial(jattn.attention, return_lse=True, deterministic=True, mask=mask)
        self.run(loss_of(run), arrays(), gradients_by_kernel=True)
        self.run(
            loss_of(functools.partial(run, implementation="mosaic_gpu")), arrays(), gradients_by_kernel=True
        )

    @pytest.mark.parametrize("unsupported", ["slopes", "head_dim"])
    def test_deterministic_gradients_without_kernel_support(self, unsupported):
        run = functools.partial(jattn.attention, return_lse=True, deterministic=True)
        q, k, v = arrays(head_dim=120 if unsupported == "head_dim" else 64)
        argument, reason = {
            "slopes": (SLOPES, "there is no kernel for the gradient of ALiBi slopes"),
            "head_dim": (1.0, "head_dim=120 is not supported for gradients"),
        }[unsupported]

        def loss(argument, **extra_options):
            slopes = {"alibi_slopes": argument} if unsupported == "slopes" else {}
            scaled = q if slopes else (q * argument).astype(q.dtype)
            return loss_of(functools.partial(run, **slopes, **extra_options))((scaled, k, v))

        with pytest.warns(
            jattn.KernelFallbackWarning, match=f"fall back to xla on a GPU, which is slow: {reason}"
        ):
            self.run(loss, argument)
        with pytest.raises(NotImplementedError, match=f'implementation="mosaic_gpu": {reason}'):
            self.run(functools.partial(loss, implementation="mosaic_gpu"), argument)
        self.run(functools.partial(loss, implementation=("mosaic_gpu", "xla")), argument)


class TestOnGpusWithoutWgmma:
    @pytest.mark.parametrize("mask", [None, masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=2)])
    def test_gradients_have_kernels(self, mask):
        run = functools.partial(jattn.attention, return_lse=True, mask=mask, implementation="mosaic_gpu")
        with as_on_a_gpu() as called, target("a100"):
            jax.eval_shape(jax.grad(loss_of(run)), arrays())
        assert set(called) == {"attend", "gradients"}

    def test_gradients_of_wide_heads_fall_back_to_xla(self):
        message = "head_dim=256 is not supported for gradients on compute capability 8.9; supported: 32, 64"
        run = functools.partial(jattn.attention, return_lse=True)
        with as_on_a_gpu() as called, target("l4"), pytest.warns(jattn.KernelFallbackWarning, match=message):
            jax.eval_shape(jax.grad(loss_of(run)), arrays(head_dim=256))
        assert set(called) == {"attend"}


def test_layers_without_a_cache_train_with_the_kernel():
    from flax import nnx

    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
    layer = jattn.PagedAttention(64, spec, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    metadata = jattn.build_batch_metadata([100, 60], [100, 60], None)
    x = jnp.ones((160, 64), jnp.bfloat16)
    loss = lambda layer, x: layer(x, None, metadata, metadata.positions)[0].astype(jnp.float32).sum()
    with as_on_a_gpu() as called:
        jax.eval_shape(jax.grad(functools.partial(loss, layer)), x)
    assert set(called) == {"attend", "gradients"}


class TestAheadOfTime:
    """Training steps under plain jit, partitioned over two H200s."""

    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in ("sinks by heads", "mask by texts") else pytest.mark.slow)
            for name in aot_cases()
        ],
    )
    def test_kernels_receive_local_shards_without_collectives(self, name):
        aot.require_plugin()
        (report,) = aot.exchanges_of("tests.dense.partition_aot_cases", [name]).values()
        exchanges, kernels = report
        assert not exchanges
        assert kernels >= 2


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize(("name", "head_dim"), list(zip(CASES, itertools.cycle([64, 128]))))
    def test_kernel_gradients_equal_xla(self, name, head_dim):
        qkv, run = (
            arrays(head_dim=head_dim),
            functools.partial(jattn.attention, return_lse=True, **CASES[name]),
        )
        actual, expected = (
            jax.jit(jax.grad(loss_of(functools.partial(run, implementation=by))))(qkv)
            for by in ("mosaic_gpu", "xla")
        )
        for actual_array, expected_array in zip(actual, expected, strict=True):
            actual_array, expected_array = (
                actual_array.astype(jnp.float32),
                expected_array.astype(jnp.float32),
            )
            np.testing.assert_allclose(
                actual_array, expected_array, rtol=0, atol=0.02 * float(jnp.abs(expected_array).max())
            )

    @pytest.mark.parametrize("mask", [None, masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=2)])
    def test_deterministic_gradients_are_bit_identical(self, mask):
        options = {"return_lse": True, "causal": True, "mask": mask, "deterministic": True}
        run = functools.partial(jattn.attention, **options)
        step = jax.jit(jax.grad(loss_of(run)))
        for actual_array, expected_array in zip(step(arrays()), step(arrays()), strict=True):
            np.testing.assert_array_equal(actual_array, expected_array)

    def test_flax_layer_trains_with_the_kernels(self):
        from flax import nnx

        layer = nnx.MultiHeadAttention(
            4, 256, decode=False, dtype=jnp.bfloat16, attention_fn=jattn.attention_fn, rngs=nnx.Rngs(0)
        )
        x = jax.random.normal(jax.random.key(0), (2, 300, 256), jnp.bfloat16)
        loss = lambda layer, x: (layer(x, is_causal=True).astype(jnp.float32) ** 2).mean()
        text = nnx.jit(nnx.grad(loss)).lower(layer, x).as_text()
        assert text.count("mosaic_gpu") >= 2
        grads = jax.tree.leaves(nnx.jit(nnx.grad(loss))(layer, x))
        assert all(bool(jnp.isfinite(grad).all()) for grad in grads)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("cut", [P("gpus"), P(None, None, "gpus")], ids=["texts", "heads"])
def test_kernels_attend_to_local_shards_under_plain_jit(cut):
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    mesh = jax.make_mesh((2,), ("gpus",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    run = functools.partial(jattn.attention, causal=True, return_lse=True, implementation="mosaic_gpu")
    step = jax.jit(jax.grad(loss_of(run)))
    qkv = tuple(x.reshape(2, 120, *x.shape[1:]) for x in arrays())
    on_two = step.lower(jax.device_put(qkv, jax.NamedSharding(mesh, cut))).compile()
    text = on_two.as_text()
    assert not [
        name for name in ("all-gather", "all-to-all", "all-reduce", "collective-permute") if name in text
    ]
    assert text.count("mosaic_gpu") >= 2
    actual = on_two(jax.device_put(qkv, jax.NamedSharding(mesh, cut)))
    assert_near(jax.device_get(actual), step(qkv))
