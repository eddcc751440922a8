"""jattn.attention: equality with jax.nn, packed documents, refusals, and gradients."""

import functools
import inspect
import itertools
import pathlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks
from jattn.dense import attention
from jattn.dense.arguments import ARGUMENT_HINTS
from jattn.implementations.xla.attention import num_first_keys
from tests.subprocesses import run_module

ROOT = pathlib.Path(__file__).parents[2]


def arrays(q_tokens=24, kv_tokens=None, batch=2, heads=(4, 2), head_dim=8, dtype=jnp.float32):
    kv_tokens = q_tokens if kv_tokens is None else kv_tokens
    shapes = ((q_tokens, heads[0]), (kv_tokens, heads[1]), (kv_tokens, heads[1]))
    lead = () if batch is None else (batch,)
    return tuple(
        jax.random.normal(jax.random.key(i), (*lead, *shape, head_dim), dtype)
        for i, shape in enumerate(shapes)
    )


def close(actual, expected, atol=3e-6):
    np.testing.assert_allclose(actual, expected, rtol=3e-6, atol=atol)


def is_visible(q_tokens, kv_tokens, causal, window):
    i, j = np.arange(q_tokens)[:, None], np.arange(kv_tokens)[None, :]
    visible = np.ones((q_tokens, kv_tokens), bool) if not causal else j <= i
    left, right = window or (None, None)
    visible = visible if left is None else visible & (i - j <= left)
    return visible if right is None else visible & (j - i <= right)


class TestAgreementWithJaxNN:
    @pytest.mark.parametrize(
        ("lens", "causal", "window"),
        [
            ((20, 9), True, (4, 0)),
            pytest.param((24, 24), True, None, marks=pytest.mark.kernels),
            pytest.param((9, 20), True, None, marks=pytest.mark.kernels),
            pytest.param((9, 20), False, (3, 2), marks=pytest.mark.kernels),
            pytest.param((20, 9), False, (None, 2), marks=pytest.mark.kernels),
            pytest.param((1, 7), True, (2, 0), marks=pytest.mark.kernels),
        ],
    )
    def test_outputs_and_gradients_equal_jax_nn(self, lens, causal, window):
        """Also for unequal numbers of queries and keys. Rows without keys are 0; jax.nn returns means."""
        qkv = arrays(*lens)
        visible = is_visible(*lens, causal, window)

        def jattn_attention(qkv):
            return jattn.attention(*qkv, causal=causal, window=window)

        def jax_nn_attention(qkv):
            out = jax.nn.dot_product_attention(*qkv, mask=jnp.asarray(visible)[None, None])
            return jnp.where(visible.any(axis=1)[:, None, None], out, 0.0)

        close(jattn_attention(qkv), jax_nn_attention(qkv))
        gradient_of = lambda run: jax.jit(jax.grad(lambda qkv: (run(qkv) ** 2).sum()))(qkv)
        for actual, expected in zip(gradient_of(jattn_attention), gradient_of(jax_nn_attention), strict=True):
            close(actual, expected, 1e-5)

    def test_defaults_and_unbatched_arrays_equal_jax_nn(self):
        qkv = arrays(batch=None, heads=(4, 1))
        close(jattn.attention(*qkv), jax.nn.dot_product_attention(*qkv))

    @pytest.mark.kernels
    def test_boolean_mask_equals_jax_nn(self):
        qkv = arrays(7, 10)
        mask = jax.random.bernoulli(jax.random.key(9), 0.6, (2, 1, 7, 10)).at[..., 0].set(True)
        expected = jax.nn.dot_product_attention(*qkv, mask=mask)
        close(jattn.attention(*qkv, mask=mask), expected)
        close(jattn.attention(*qkv, mask=mask[:1]), jax.nn.dot_product_attention(*qkv, mask=mask[:1]))

    @pytest.mark.kernels
    @pytest.mark.parametrize("shape", [(2, 1, 1, 10), (2, 4, 7, 1), (1, 4, 1, 1)])
    def test_broadcast_mask_equals_the_full_mask(self, shape):
        qkv, mask = arrays(7, 10), jax.random.bernoulli(jax.random.key(3), 0.7, shape)
        broadcast_mask = jnp.broadcast_to(mask, (2, 4, 7, 10))
        loss = lambda mask: (
            lambda k: (jattn.attention(*qkv[:1], k, qkv[2], causal=True, mask=mask) ** 2).sum()
        )
        loss_and_gradient = lambda mask: jax.value_and_grad(loss(mask))(qkv[1])
        for actual, expected in zip(loss_and_gradient(mask), loss_and_gradient(broadcast_mask), strict=True):
            close(actual, expected)

    @pytest.mark.parametrize("axis", [2, 3])
    def test_padding_mask_is_not_materialized_per_pair(self, axis):
        tokens = 4096
        x = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
        padding_mask = jax.ShapeDtypeStruct(
            [1 if n == axis else (1, 1, tokens, tokens)[n] for n in range(4)], bool
        )
        for run in (
            lambda x, mask: jattn.attention(x, x, x, mask=mask),
            lambda x, mask: jattn.attention_fn(x, x, x, mask=mask),
        ):
            used = jax.jit(run).lower(x, padding_mask).compile().memory_analysis().temp_size_in_bytes
            assert used < tokens**2 / 4

    @pytest.mark.kernels
    def test_float64_gradients_have_float64_accuracy(self):
        has_float64_s_gradients()

    def test_lse_is_the_log_sum_exp_of_the_scores(self):
        q, k, v = arrays(6)
        scores = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, axis=2)) * 8**-0.5
        out, lse = jattn.attention(q, k, v, return_lse=True)
        close(lse, jax.nn.logsumexp(scores, axis=-1))
        close(out, jattn.attention(q, k, v))
        lse_of_one = jattn.attention(q[0], k[0], v[0], return_lse=True)[1]
        np.testing.assert_array_equal(lse_of_one, lse[0])


def has_float64_s_gradients():
    """A log-sum-exp stored in f32 would limit the accuracy of the gradients to f32."""
    with jax.enable_x64(True):
        qkv = [x.astype(jnp.float64) for x in arrays(12)]

        def loss(qkv, implementation):
            out, lse = jattn.attention(*qkv, causal=True, return_lse=True, implementation=implementation)
            assert lse.dtype == jnp.float32
            return (out**2).sum()

        actual, expected = (jax.grad(loss)(qkv, backend) for backend in ("xla", "reference"))
        jax.tree.map(functools.partial(close, atol=1e-13), actual, expected)


class TestDocuments:
    LENS = (5, 0, 12, 3)

    def packed(self, dtype=jnp.float32, spare=4):
        """Four documents, one of them empty, and padding that is NaN."""
        bounds = jnp.asarray(np.cumsum([0, *self.LENS]), jnp.int32)
        qkv = arrays(sum(self.LENS) + spare, batch=None, dtype=dtype)
        is_padding = jnp.arange(sum(self.LENS) + spare) >= sum(self.LENS)
        poisoned = tuple(jnp.where(is_padding[:, None, None], jnp.nan, x).astype(dtype) for x in qkv)
        return bounds, qkv, poisoned

    @pytest.mark.kernels
    @pytest.mark.parametrize("options", [{"causal": True}, {"window": (2, 1), "soft_cap": 3.0}])
    def test_packed_documents_equal_separate_calls_and_padding_has_no_effect(self, options):
        bounds, qkv, poisoned = self.packed()
        sinks, slopes = jnp.linspace(-1.0, 1.0, 4), jnp.linspace(0.1, 0.4, 4)
        options |= {"sinks": sinks, "alibi_slopes": slopes}

        def together(qkv):
            out, lse = jattn.attention(*qkv, cu_seqlens=bounds, return_lse=True, **options)
            return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum(), (out, lse)

        def apart(qkv):
            loss = 0.0
            ends = np.cumsum(self.LENS).tolist()
            for start, end in zip([0, *ends], ends, strict=False):
                if end > start:
                    run = functools.partial(jattn.attention, implementation="reference", return_lse=True)
                    out, lse = run(*(x[start:end] for x in qkv), **options)
                    loss += (out**2).sum() + lse.sum()
            return loss

        actual, (out, lse) = jax.jit(jax.grad(together, has_aux=True))(poisoned)
        assert (out[bounds[-1] :] == 0).all()
        assert jnp.isneginf(lse[:, bounds[-1] :]).all()
        for gradient, expected in zip(actual, jax.jit(jax.grad(apart))(qkv), strict=True):
            close(gradient, expected, 1e-5)
            assert (gradient[bounds[-1] :] == 0).all()

    @pytest.mark.kernels
    def test_segment_ids_equal_packed_documents(self):
        bounds, qkv, _ = self.packed(spare=0)
        ids = jnp.repeat(jnp.asarray([7, 1, 3]), np.asarray([5, 12, 3]), total_repeat_length=20)
        expected = jattn.attention(*qkv, cu_seqlens=bounds, causal=True)
        close(jattn.attention(*qkv, segment_ids=ids, causal=True), expected)
        batch = tuple(x[None] for x in qkv)
        close(jattn.attention(*batch, segment_ids=ids[None], causal=True)[0], expected)

    def test_segment_ids_in_any_order_attend_within_their_segment(self):
        ids = jnp.asarray([[0, 1, 0, 2, 1, 1, 0, 2], [5, 5, 5, 1, 1, 1, 1, 5]])
        qkv = arrays(8)
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        expected = jax.nn.dot_product_attention(*qkv, mask=mask, is_causal=True)
        close(jattn.attention(*qkv, segment_ids=ids, causal=True), expected)

    @pytest.mark.kernels
    @pytest.mark.usefixtures("types_unchecked")
    def test_64_bit_segment_ids_are_distinguished(self):
        """Equal in their last 32 bits, as JAX would cut them."""
        qkv, small = arrays(12), np.arange(24).reshape(2, 12) // 5
        large = (7 - small) * 2**32 + 1
        expected = jattn.attention(*qkv, segment_ids=small)
        close(jattn.attention(*qkv, segment_ids=large), expected)
        close(jattn.attention(*(x[0] for x in qkv), segment_ids=large[0]), expected[0])
        close(jattn.attention(*qkv, mask=masks.Document(ids=large)), expected)
        with jax.enable_x64(True):
            close(jattn.attention(*qkv, segment_ids=jnp.asarray(large), implementation="xla"), expected)

    @pytest.mark.kernels
    @pytest.mark.parametrize("implementation", ["xla", "reference"])
    @pytest.mark.parametrize("is_packed", [False, True])
    def test_nan_in_one_document_does_not_reach_gradients_of_others(self, implementation, is_packed):
        qkv = (*arrays(9, batch=3), arrays(9, batch=3)[0])
        flat = lambda x: x.reshape(27, *x.shape[2:])

        def attend(*qkv):
            options = {"causal": True, "implementation": implementation}
            if not is_packed:
                return jattn.attention(*qkv, **options)
            out = jattn.attention(*map(flat, qkv), cu_seqlens=jnp.arange(4) * 9, **options)
            return out.reshape(qkv[0].shape)

        gradients = jax.jit(lambda qkv, grad: jax.vjp(attend, *qkv)[1](grad))
        expected = gradients(qkv[:3], qkv[3])
        for index, bad in itertools.product(range(4), (0, 2)):
            spoilt = [x.at[bad].set(jnp.nan) if i == index else x for i, x in enumerate(qkv)]
            other_rows = np.delete(np.arange(3), bad)
            for actual, right in zip(gradients(tuple(spoilt[:3]), spoilt[3]), expected, strict=True):
                close(actual[other_rows], right[other_rows])

    def test_kernels_receive_document_bounds_and_xla_receives_segment_ids(self, monkeypatch):
        """On a GPU, contiguous segments run on kernels with tile lists; other segments run on XLA unless a
        kernel is requested.
        """
        monkeypatch.setattr("pallas_kernels.support.why_not_on", lambda *_: None)
        seen = []

        def attend(inputs, kernel, kernel_plan, **_):
            seen.append(inputs.mask)
            return inputs.query, jnp.zeros(inputs.query.shape[1::-1])

        monkeypatch.setattr("jattn.implementations.mosaic_gpu.attend", attend)
        qkv = arrays(8, batch=1, head_dim=64, dtype=jnp.bfloat16)
        in_runs, mixed = jnp.asarray([[4, 4, 1, 1, 1, 9, 9, 9]]), jnp.asarray([[4, 1, 4, 1, 1, 9, 9, 9]])
        jattn.attention(*qkv, segment_ids=in_runs)
        assert len(seen) == 1
        jattn.attention(*qkv, segment_ids=mixed)
        assert len(seen) == 1
        message = r"segment_ids: an id occurs again .*\. Sort the tokens by id, or pass implementation=None"
        with pytest.raises(NotImplementedError, match=message):
            jattn.attention(*qkv, segment_ids=mixed, implementation="mosaic_gpu")
        document = lambda ids: jattn.masks.Window(left=5) & jattn.masks.Document(ids=ids)
        jattn.attention(*qkv, mask=document(in_runs))
        assert len(seen) == 2
        jattn.attention(*qkv, mask=document(mixed))
        assert len(seen) == 2
        with pytest.raises(NotImplementedError, match=r"^mask: an id occurs again after a different id"):
            jattn.attention(*qkv, mask=document(mixed), implementation="mosaic_gpu")

    def test_one_trace_serves_all_bounds(self, traced_once):
        _, qkv, _ = self.packed()
        run = lambda bounds: jattn.attention(*qkv, cu_seqlens=bounds, causal=True)
        traced_once(run, (jnp.asarray([0, 4, 9, 20]),), (jnp.asarray([0, 0, 24, 24]),))


class TestMasks:
    @pytest.mark.kernels
    def test_mask_rows_are_batch_elements_and_positions_are_tokens(self):
        qkv = arrays(16)
        lengths = np.asarray([3, 9], np.int32)
        mask = masks.Prefix(length=lengths) | masks.Causal()
        i, j = np.arange(16)[:, None], np.arange(16)[None, :]
        visible = np.stack([(j <= i) | (np.maximum(i, j) < n) for n in lengths])[:, None]
        expected = jax.nn.dot_product_attention(*qkv, mask=jnp.asarray(visible))
        close(jattn.attention(*qkv, mask=mask), expected)

    def test_masks_apply_to_fewer_queries_than_keys(self):
        qkv = arrays(6, 16)
        mask = masks.Sinks(2) | masks.Window(left=1, right=3)
        i, j = np.arange(6)[:, None], np.arange(16)[None, :]
        visible = (j < 2) | ((i - j <= 1) & (j - i <= 3))
        expected = jax.nn.dot_product_attention(*qkv, mask=jnp.asarray(visible)[None, None])
        close(jattn.attention(*qkv, mask=mask), expected)

    @pytest.mark.kernels
    def test_mask_functions_over_traced_arrays_have_gradients(self):
        check_gradients_equal_a_boolean_mask(arrays(9, head_dim=24))


def check_gradients_equal_a_boolean_mask(qkv):
    """Compare gradients under a mask function over a traced table with those under a boolean mask."""
    table = jax.random.bernoulli(jax.random.key(8), 0.5, (4, 9, 9))

    def loss(qkv, table, by_function):
        traced_mask = masks.MaskFunction(lambda head, query, key: table[head, query, key])
        mask = (
            masks.Causal() & ~traced_mask
            if by_function
            else jnp.tri(9, dtype=bool)[None, None] & ~table[None]
        )
        return (jattn.attention(*qkv, mask=mask) ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    jax.tree.map(functools.partial(close, atol=1e-5), step(qkv, table, True), step(qkv, table, False))


class TestTransformations:
    def test_vmap_equals_a_batch(self):
        qkv = arrays(10, batch=3)
        run = functools.partial(jattn.attention, causal=True)
        close(jax.vmap(run)(*qkv), run(*qkv))

    @pytest.mark.kernels
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_checkpoint_does_not_change_gradients(self, dtype):
        qkv = arrays(10, dtype=dtype)
        loss = lambda qkv: (jattn.attention(*qkv, causal=True).astype(jnp.float32) ** 2).sum()
        gradient, checkpointed = (
            jax.jit(jax.grad(function))(qkv) for function in (loss, jax.checkpoint(loss))
        )
        for actual, expected in zip(gradient, checkpointed, strict=True):
            close(actual.astype(jnp.float32), expected.astype(jnp.float32), 1e-6)

    @pytest.mark.kernels
    @pytest.mark.parametrize(("axes", "lines"), [("explicit", 17), ("automatic", 17)])
    def test_sharded_arrays_stay_sharded_without_collectives(self, axes, lines):
        """Under shard_map over batch and heads, on Explicit axes, and on Auto axes under plain jit."""
        done = run_module(f"tests.dense.{axes}_attention")
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == lines

    @pytest.mark.parametrize(
        "more", [{}, {"segment_ids": jnp.zeros((2, 12), jnp.int32)}], ids=["plain", "ids"]
    )
    def test_implementation_accepts_a_list(self, more):
        qkv, names = arrays(12), ["xla", "reference"]
        expected = jattn.attention(*qkv, causal=True, implementation=tuple(names), **more)
        close(jattn.attention(*qkv, causal=True, implementation=names, **more), expected)

    def test_calls_outside_jit_are_compiled_once(self, caplog):
        qkv = arrays(11, head_dim=24)
        jattn.attention(*qkv, causal=True)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            jattn.attention(*(x + 1 for x in qkv), causal=True)
        assert not [r for r in caplog.records if "Compiling jit(attend_arrays)" in r.getMessage()]

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
    def test_empty_arrays_are_supported(self, shape):
        qkv = arrays(*shape)
        out, lse = jattn.attention(*qkv, causal=True, return_lse=True)
        assert out.shape == qkv[0].shape
        assert lse.shape == (2, 4, shape[0])
        assert (out == 0).all()
        assert jnp.isneginf(lse).all()
        assert jattn.attention(*(x[:0] for x in qkv)).shape == (0, *qkv[0].shape[1:])
        masked = jattn.attention(*qkv, mask=jnp.ones((1, shape[1]), bool))
        assert masked.shape == qkv[0].shape
        assert (masked == 0).all()


@pytest.mark.usefixtures("types_unchecked")
class TestRefusals:
    Q = np.zeros((2, 8, 4, 16), np.float32)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"q": [1.0]}, r"q must be an array, got a list"),
            ({"q": np.zeros((8, 16), np.float32)}, r"q must have shape \[batch, tokens, .*, got \(8, 16\)"),
            ({"k": Q.astype(np.int32)}, r"k must have a floating-point dtype .*, got int32"),
            ({"k": Q[:1]}, r"k must have shape \(2, 8, 4, 16\) .*, got \(1, 8, 4, 16\)"),
            ({"v": Q[:, :5]}, r"v must have shape \(2, 8, 4, 16\) \(the shape of k\), got \(2, 5, 4, 16\)"),
            (
                {"k": Q[:, :, :3], "v": Q[:, :, :3]},
                r"num_q_heads must be a multiple of num_kv_heads \(3\), got 4",
            ),
            ({"window": 3}, r"window must be \(left, right\) .*, got 3"),
            ({"segment_ids": np.zeros((2, 8))}, r"segment_ids must be an integer array, got float64"),
            ({"segment_ids": np.zeros((8,), int)}, r"segment_ids must have shape \(2, 8\) .*, got \(8,\)"),
            (
                {"segment_ids": np.zeros((2, 8), int), "k": Q[:, :5], "v": Q[:, :5]},
                r"segment_ids requires as many keys as queries, got 8 queries and 5 keys",
            ),
            ({"cu_seqlens": np.asarray([0, 8])}, r"q must have shape \[tokens, .*, got \(2, 8, 4, 16\)"),
            (
                {"cu_seqlens": np.asarray([0, 8]), "segment_ids": np.zeros((2, 8), int)},
                r"segment_ids and cu_seqlens cannot be combined",
            ),
            ({"sinks": np.zeros(3, np.float32)}, r"sinks must have shape \(4,\) \(q_heads\), got \(3,\)"),
            ({"mask": np.zeros((2, 1, 8, 8))}, r"mask must have dtype bool, got float64"),
            (
                {"mask": np.zeros((3, 1, 8, 8), bool)},
                r"mask must broadcast to \(2, 4, 8, 8\) .*, got \(3, 1, 8, 8\)",
            ),
            ({"mask": masks.Prefix(length=2), "causal": True}, r"mask lets queries attend .*: Prefix"),
            (
                {"mask": masks.BlockMask(blocks=np.ones((1, 1, 1), bool), block_q=4, block_kv=4)},
                r"BlockMask has 1 kv_blocks of 4 .* Pass at least 2",
            ),
            ({"mask": "causal"}, r"mask must be a mask of jattn.masks, got a str"),
            ({"implementation": "cudnn"}, r"implementation must be one of .*, got 'cudnn'"),
        ],
    )  # fmt: skip
    def test_invalid_argument_is_named_with_its_value(self, change, message):
        with pytest.raises(ValueError, match=message):
            jattn.attention(**{"q": self.Q, "k": self.Q, "v": self.Q} | change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"q_tokens": 8}, r"has 2 kv_blocks of 4 positions, .* 12 positions. Pass at least 3"),
            (
                {"q_tokens": 8, "window": (3, 1)},
                r"has 2 kv_blocks of 4 positions, .* 9 positions. Pass at least 3",
            ),
            ({"kv_tokens": 8}, r"has 2 q_blocks of 4 positions, .* 12 positions. Pass at least 3"),
            (
                {"cu_seqlens": [0, 12]},
                r"has 2 kv_blocks of 4 positions, .* 12 positions. Pass at least 3",
            ),
            (
                {"cu_seqlens": [0, 1, 10, 12]},
                r"has 2 kv_blocks of 4 positions, .* 9 positions. Pass at least 3",
            ),
        ],
    )
    def test_block_mask_that_does_not_cover_the_keys_is_rejected(self, change, message):
        change = {"q_tokens": 12, "kv_tokens": 12} | change
        lens = change.pop("q_tokens"), change.pop("kv_tokens")
        qkv = arrays(*lens, batch=None if "cu_seqlens" in change else 2)
        mask = masks.BlockMask(blocks=np.ones((4, 2, 2), bool), block_q=4, block_kv=4)
        change = {name: np.asarray(x) if name == "cu_seqlens" else x for name, x in change.items()}
        with pytest.raises(ValueError, match=message):
            jattn.attention(*qkv, mask=mask, **change)

    @pytest.mark.kernels
    @pytest.mark.parametrize(
        ("lens", "options"),
        [
            ((8, 12), {"causal": True}),
            ((8, 5), {}),
            ((5, 8), {"window": (None, 4)}),
            ((12, 12), {"cu_seqlens": [0, 4, 12]}),
        ],
    )
    def test_block_mask_that_covers_the_visible_keys_is_accepted(self, lens, options):
        qkv = arrays(*lens, batch=None if "cu_seqlens" in options else 2)
        mask = masks.BlockMask(blocks=np.ones((4, 2, 2), bool), block_q=4, block_kv=4)
        if "cu_seqlens" in options:
            options = {"cu_seqlens": np.asarray(options["cu_seqlens"])}
        close(jattn.attention(*qkv, mask=mask, **options), jattn.attention(*qkv, **options))

    @pytest.mark.parametrize(("num", "options"), [(3, {}), (2, {"cu_seqlens": np.asarray([0, 5, 12])})])
    def test_block_mask_per_document_need_not_cover_all_documents(self, num, options):
        qkv, first = arrays(12, batch=None if options else 2), np.zeros(2, np.int32)
        blocks = np.ones((4, num, num), bool)
        mask = masks.BlockMask(blocks=blocks, first_q_block=first, block_q=4, block_kv=4)
        close(jattn.attention(*qkv, mask=mask, **options), jattn.attention(*qkv, **options))

    @pytest.mark.parametrize("dtype", [np.int32, np.uint32])
    @pytest.mark.parametrize("bounds", [[0, 4, 3], [1, 8], [0, 9]])
    def test_invalid_document_bounds_are_rejected(self, bounds, dtype):
        with pytest.raises(
            ValueError, match=r"cu_seqlens must begin with 0, .* at most the number of tokens .8.*, got \["
        ):
            jattn.attention(*(self.Q[0],) * 3, cu_seqlens=np.asarray(bounds, dtype))

    def test_document_bounds_require_at_least_one_document(self):
        with pytest.raises(ValueError, match=r"cu_seqlens must have shape \[documents \+ 1\].*, got \(1,\)"):
            jattn.attention(*(self.Q[0],) * 3, cu_seqlens=np.asarray([0]))

    def test_array_mask_with_packed_documents_is_rejected(self):
        with pytest.raises(
            ValueError, match=r"mask is an array with shape .* cannot be combined with cu_seqlens"
        ):
            jattn.attention(*(self.Q[0],) * 3, cu_seqlens=np.asarray([0, 8]), mask=np.ones((8, 8), bool))

    def test_unknown_keyword_raises_type_error(self):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'is_casual'$"):
            jattn.attention(self.Q, self.Q, self.Q, is_casual=True)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"is_causal": True}, r"unexpected argument 'is_causal'. Use causal=\."),
            ({"local_window_size": (3, 0)}, r"argument 'local_window_size'. Use window=\(left, right\)\."),
            ({"causal": True, "bias": Q}, r"'bias'. Use jattn.attention_fn\(q, k, v, bias\)\."),
            ({"dropout_rng": None}, "'dropout_rng'. Dropout on attention weights is not supported."),
            ({"sm_scale": 0.1}, r"'sm_scale'. Use scale=\."),
            ({"softcap": 30.0}, r"'softcap'. Use soft_cap=\."),
            ({"window_size": (3, 0)}, r"'window_size'. Use window=\(left, right\)\."),
            ({"q_segment_ids": None}, r"'q_segment_ids'. Use segment_ids=\."),
        ],
    )
    def test_keyword_of_jax_nn_or_flax_is_rejected_with_the_jattn_name(self, options, message):
        with pytest.raises(TypeError, match=message):
            jattn.attention(self.Q, self.Q, self.Q, **options)

    def test_errors_and_docs_name_the_counterpart_of_every_jax_nn_argument(self):
        jax_nn_parameters = set(inspect.signature(jax.nn.dot_product_attention).parameters)
        jattn_parameters = set(inspect.signature(jattn.attention).parameters)
        assert jax_nn_parameters - jattn_parameters <= set(ARGUMENT_HINTS)
        assert not jattn_parameters & set(ARGUMENT_HINTS)
        page = (ROOT / "docs" / "migration.md").read_text()
        table = page.split("## From jax.nn.dot_product_attention")[1].split("|---|---|")[1].split("\n\n")[0]
        documented = set(re.findall(r"(\w+)=", table))
        assert jax_nn_parameters - jattn_parameters <= documented | {"query", "key", "value"}


class TestExplicitMesh:
    MESH = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def run(self, *partition_specs, q_heads=4, kv_heads=2):
        """Traced: there is one device here."""
        shapes = [(4, 8, heads, 16) for heads in (q_heads, kv_heads, kv_heads)]
        sharding = lambda spec: jax.NamedSharding(self.MESH, P(*spec))
        abstract_array = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(spec))
        return jax.eval_shape(jattn.attention, *map(abstract_array, shapes, partition_specs)).sharding.spec

    def test_output_has_the_sharding_of_the_query(self):
        whole = (None,) * 4
        cases = {
            ("x", None, "y", None): (("x", None, "y"), ("x", None, "y"), ("x", None, "y")),
            (("x", "y"), None, None, None): ((), (("x", "y"),), ()),
            whole: ((), (), ()),
        }
        assert {expected: tuple(self.run(*shardings)) for expected, shardings in cases.items()} == {
            expected: expected for expected in cases
        }

    def test_sharded_tokens_and_head_dims_are_rejected(self):
        message = r"{} with sharding .*: attention can be sharded by batch and heads only.*reshard"
        with pytest.raises(NotImplementedError, match=message.format("q")):
            self.run((None, "x"), (), ())
        with pytest.raises(NotImplementedError, match=message.format("v")):
            self.run((), (), (None, None, None, "y"))

    def test_arrays_with_different_shardings_are_rejected(self):
        message = (
            r"q, k and v must be sharded over the same mesh axes or replicated, got \{'q': 'x', 'k': 'y'\}"
        )
        with pytest.raises(ValueError, match=message):
            self.run(("x",), ("y",), ())
        message = r"Batch and heads of q, k and v must be sharded over different mesh axes, got \('x', 'x'\)"
        with pytest.raises(ValueError, match=message):
            self.run(("x",), (), (None, None, "x"))

    def test_sharding_that_splits_a_gqa_group_is_rejected(self):
        by_device = (None, None, ("x", "y"))
        with pytest.raises(NotImplementedError, match=r"3 kv heads are neither a multiple"):
            self.run(by_device, (), (), q_heads=12, kv_heads=3)
        for kv_heads in (1, 2, 4):
            assert self.run(by_device, (), (), kv_heads=kv_heads)[2] == ("x", "y")

    def test_kv_heads_may_be_sharded_over_the_first_axes_of_the_query_heads(self):
        by_device, coarser = (None, None, ("x", "y")), (None, None, "x")
        assert self.run(by_device, coarser, coarser)[2] == ("x", "y")
        with pytest.raises(ValueError, match=r"q, k and v must be sharded over the same mesh axes"):
            self.run(by_device, coarser, (None, None, "y"))


class TestAutoMesh:
    """Attention on a one-device Auto mesh; tests/dense/automatic_attention.py uses four devices."""

    @pytest.fixture(autouse=True)
    def as_on_several(self):
        with mock.patch.object(attention, "has_auto_sharding", return_value=True):
            yield

    @pytest.mark.kernels
    @pytest.mark.parametrize(
        ("lens", "options"),
        [
            ((24, 24), {"causal": True, "window": (7, 0), "soft_cap": 4.0}),
            ((20, 9), {"causal": True, "segment_ids": None}),
            ((9, 20), {"window": (3, 2)}),
            ((24, 24), {"segment_ids": jnp.arange(48).reshape(2, 24) // 7}),
            ((24, 24), {"cu_seqlens": jnp.array([0, 5, 5, 20])}),
        ],
    )
    def test_outputs_and_gradients_equal_the_reference(self, lens, options):
        q, k, v = arrays(*lens, batch=None if "cu_seqlens" in options else 2, head_dim=24)
        per_head = {"sinks": jnp.linspace(-1, 1, 4), "alibi_slopes": jnp.linspace(0.1, 0.4, 4)}

        def loss(qkv, per_head, implementation):
            how = {"return_lse": True, "implementation": implementation}
            out, lse = jattn.attention(*qkv, **per_head, **options, **how)
            return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum(), (out, lse)

        for argnums in ((0, 1), 0, 1) if "soft_cap" in options else ((0, 1),):
            step = jax.jit(jax.grad(loss, argnums, has_aux=True), static_argnums=2)
            actual, expected = (step((q, k, v), per_head, backend) for backend in ("xla", "reference"))
            jax.tree.map(functools.partial(close, atol=2e-5), actual, expected)

    def test_float64_gradients_have_float64_accuracy(self):
        has_float64_s_gradients()

    @pytest.mark.kernels
    def test_only_requested_gradients_are_computed(self):
        q, k, v = arrays(7, head_dim=24)
        slopes = jnp.linspace(0.1, 0.4, 4)
        output_gradient = jax.grad(lambda k: jattn.attention(q, k, v, alibi_slopes=slopes).sum())(k)
        lse_gradient = jax.grad(lambda q: jattn.attention(q, k, v, return_lse=True)[1].sum())(q)
        reference_options = {"implementation": "reference"}
        close(
            output_gradient,
            jax.grad(lambda k: jattn.attention(q, k, v, alibi_slopes=slopes, **reference_options).sum())(k),
            2e-5,
        )
        close(
            lse_gradient,
            jax.grad(lambda q: jattn.attention(q, k, v, return_lse=True, **reference_options)[1].sum())(q),
            2e-5,
        )

    def test_second_derivative_is_supported_only_by_the_reference(self):
        q, k, v = arrays(7, head_dim=24)
        first = lambda q, backend: jax.grad(
            lambda q: (jattn.attention(q, k, v, implementation=backend) ** 2).sum()
        )(q)
        with pytest.raises(NotImplementedError, match="Second derivatives of attention"):
            jax.grad(lambda q: first(q, None).sum())(q)
        assert bool(jnp.isfinite(jax.grad(lambda q: first(q, "reference").sum())(q)).all())

    @pytest.mark.kernels
    def test_vmap_and_mask_functions_over_arrays(self):
        qkv, ids = arrays(8, batch=3, head_dim=24), jnp.arange(8) // 3

        def run(*qkv):
            by_ids = masks.MaskFunction(lambda head, query, key: ids[query] == ids[key])
            return jattn.attention(*qkv, mask=by_ids)

        expected = jattn.attention(
            *qkv, segment_ids=jnp.broadcast_to(ids, (3, 8)), implementation="reference"
        )
        close(run(*qkv), expected)
        close(jax.vmap(run)(*qkv), expected)
        check_gradients_equal_a_boolean_mask(arrays(9, head_dim=24))


def test_public_signature_is_stable():
    names = list(inspect.signature(jattn.attention).parameters)
    assert names == [
        "q", "k", "v", "causal", "window", "soft_cap", "scale", "segment_ids", "cu_seqlens", "alibi_slopes",
        "sinks", "mask", "score_mod", "return_lse", "implementation", "deterministic",
    ]  # fmt: skip


def test_xla_reads_no_further_than_a_prefix_mask():
    """Compressed keys are fewer than queries, so XLA must not scan as many keys as queries."""
    first, window = masks.Sinks(9), masks.Window(left=3)
    cases = {first: 9, first & window: 9, window & first & masks.Sinks(4): 4, first | masks.Sinks(30): 30}
    assert {mask: num_first_keys(mask) for mask in cases} == cases
    assert [num_first_keys(mask) for mask in (None, window, first | window, ~first)] == [None] * 4
