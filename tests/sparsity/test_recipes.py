"""Published sparsity patterns against their papers' definitions, one query at a time in numpy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, sparsity

pytestmark = pytest.mark.kernels
TOKENS, Q_HEADS, KV_HEADS, DIM = 50, 4, 2, 8


def arrays(tokens=TOKENS):
    heads = (Q_HEADS, KV_HEADS, KV_HEADS)
    return tuple(jax.random.normal(jax.random.key(i), (2, tokens, n, DIM)) for i, n in enumerate(heads))


def in_numpy(*inputs):
    """Return arrays as [batch, heads, tokens, head_dim] in float64, with KV heads repeated."""
    converted = [np.moveaxis(np.asarray(x, np.float64), 2, 1) for x in inputs]
    return [np.repeat(x, Q_HEADS // x.shape[1], axis=1) for x in converted]


def softmax(s, visible):
    p = np.zeros(len(s))
    if visible.any():
        p[visible] = np.exp(s[visible] - s[visible].max())
    return p / max(p.sum(), 1e-300)


def drawn(mask, row, tokens=TOKENS):
    """Return the causal part of a mask as an array [q_heads, queries, keys]."""
    seen = masks.dense(
        mask & masks.Causal(), tokens, tokens, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, row=row
    )
    return np.asarray(seen)


SIZES = {"block_size": 8, "num_selected": 3, "window": 6}  # NSA's
RECIPES = {
    "moba": lambda q, k, v: sparsity.moba(q, k, block_size=8, top_k=2),
    "x_attention": lambda q, k, v: sparsity.x_attention(q, k, mass=0.5, block_size=8, stride=4),
    "nsa": lambda q, k, v: sparsity.nsa(q, k, v, jnp.full((*q.shape[:-1], 3), 0.5), **SIZES),
    "vertical_slash": lambda q, k, v: sparsity.vertical_slash(q, k, num_columns=2, num_slashes=2),
}
RECIPES = {name: jax.jit(recipe) for name, recipe in RECIPES.items()}


class TestArrays:
    """Arguments that all recipes share."""

    @pytest.mark.parametrize("name", ["moba", "x_attention", "nsa"])
    def test_batch_axis_is_optional(self, name):
        arguments = tuple(x[1] for x in arrays(20))
        unbatched, batch = (RECIPES[name](*x) for x in (arguments, tuple(x[None] for x in arguments)))
        if name == "nsa":
            np.testing.assert_array_equal(unbatched, batch[0])
        else:
            out = [
                jattn.attention(*x, causal=True, mask=m)
                for x, m in ((arguments, unbatched), (arguments, batch))
            ]
            np.testing.assert_array_equal(*out)

    @pytest.mark.parametrize("name", RECIPES)
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"k": 19},
                r"k must have shape \((2, )?20, 2, 8\) \(q's batch, .*\), got \((2, )?19, 2, 8\)",
            ),
            ({"q_heads": 3}, r"q's number of heads must be a multiple of k's number of heads \(2\), got 3"),
        ],
    )
    def test_inconsistent_shapes_are_rejected(self, name, change, message):
        q, k, v = (x[0] for x in arrays(20)) if name == "vertical_slash" else arrays(20)
        k = k[..., : change.get("k", 20), :, :]
        q = q[..., : change.get("q_heads", 4), :]
        with pytest.raises(ValueError, match=message):
            RECIPES[name](q, k, v)

    @pytest.mark.parametrize("name", ["moba", "x_attention", "nsa"])
    def test_arrays_with_too_few_axes_are_rejected(self, name):
        with pytest.raises(ValueError, match=r"q must have shape \[batch, tokens, .*, got \(20, 8\)"):
            RECIPES[name](*(x[0, :, 0] for x in arrays(20)))

    def test_vertical_slash_selects_a_key_that_scores_nan(self):
        q, k, v = (x[0] for x in arrays(20))
        k = k.at[7, 0].set(np.nan)  # of one kv head
        columns = RECIPES["vertical_slash"](q, k, v).columns[0]
        clean = RECIPES["vertical_slash"](q, arrays(20)[1][0], v).columns[0]
        assert columns[:2, 7].all()
        np.testing.assert_array_equal(columns[2:], clean[2:])

    @pytest.mark.usefixtures("types_unchecked")
    def test_vertical_slash_rejects_a_batch(self):
        with pytest.raises(ValueError, match=r"q must have shape .*, got \(2, 20, 4, 8\). Use jax.vmap"):
            RECIPES["vertical_slash"](*arrays(20))

    @pytest.mark.parametrize(
        ("run", "message"),
        [
            (lambda q, k: sparsity.moba(q, k, block_size=0, top_k=1), "block_size must be positive, got 0"),
            (lambda q, k: sparsity.block_means(q, 0), "block_size must be positive, got 0"),
            (
                lambda q, k: sparsity.x_attention(q, k, mass=0.5, block_size=8, stride=0),
                "stride must be positive, got 0",
            ),
            (
                lambda q, k: sparsity.vertical_slash(q[0], k[0], num_columns=-1, num_slashes=1),
                "num_columns must be at least 0, got -1",
            ),
            (
                lambda q, k: sparsity.vertical_slash(q[0], k[0], num_columns=1, num_slashes=1, last=0),
                "last must be positive, got 0",
            ),
            (
                lambda q, k: sparsity.moba(q, k, block_size=8, top_k=1, block_q=0),
                "block_q must be positive, got 0",
            ),
        ],
    )
    def test_invalid_sizes_are_rejected(self, run, message):
        q, k, _ = arrays(20)
        with pytest.raises(ValueError, match=message):
            run(q, k)

    @pytest.mark.parametrize("name", RECIPES)
    def test_sequence_without_tokens_is_rejected(self, name):
        q, k, v = (x[:, :0] for x in arrays())
        arguments = (x[0] for x in (q, k, v)) if name == "vertical_slash" else (q, k, v)
        with pytest.raises(ValueError, match=r"q must have at least one token, got \((2, )?0, 4, 8\)"):
            RECIPES[name](*arguments)

    @pytest.mark.parametrize("name", ["moba", "x_attention", "nsa"])
    def test_empty_batch_is_supported(self, name):
        q, k, v = (x[:0] for x in arrays(20))
        mask = RECIPES[name](q, k, v)
        out = mask if name == "nsa" else jattn.attention(q, k, v, causal=True, mask=mask)
        assert out.shape == q.shape


class TestPackedDocuments:
    """Recipes select within one document only."""

    BOUNDS = (0, 21, 50)

    @pytest.mark.parametrize(
        ("name", "array"),
        [
            ("moba", "BlockMask.blocks"),
            ("x_attention", "BlockMask.blocks"),
            ("vertical_slash", "VerticalSlash.columns"),
        ],
    )
    def test_selection_over_all_documents_is_rejected(self, name, array):
        q, k, v = (x[0] for x in arrays())
        message = rf"{array} has 1 rows, but cu_seqlens has 2 documents\. .*each document separately"
        run = lambda cu, mask: jattn.attention(q, k, v, causal=True, cu_seqlens=cu, mask=mask)
        for attend in (run, jax.jit(run)):
            with pytest.raises(ValueError, match=message):
                attend(jnp.asarray(self.BOUNDS), RECIPES[name](q, k, v))
        of_one = RECIPES[name](q, k, v)
        np.testing.assert_array_equal(
            run(jnp.asarray([0, TOKENS]), of_one), jattn.attention(q, k, v, causal=True, mask=of_one)
        )

    def test_selection_without_rows_applies_to_all_documents(self):
        q, k, v = (x[0] for x in arrays())
        mask = masks.BlockMask(blocks=RECIPES["moba"](q, k, v).blocks[0], block_q=1, block_kv=8)
        out = jattn.attention(q, k, v, causal=True, cu_seqlens=jnp.asarray(self.BOUNDS), mask=mask)
        for first, end in itertools.pairwise(self.BOUNDS):
            separate = jattn.attention(
                *(x[first:end] for x in (q, k, v)), causal=True, mask=self.cut(mask, end - first)
            )
            np.testing.assert_allclose(out[first:end], separate, atol=1e-6)

    def cut(self, mask, tokens):
        return dataclasses.replace(mask, blocks=mask.blocks[:, :tokens])

    @pytest.mark.parametrize("name", ["moba", "vertical_slash"])
    def test_selected_rows_belong_to_their_document(self, name):
        q, k, v = (x[0] for x in arrays())
        texts = [tuple(x[first:end] for x in (q, k, v)) for first, end in itertools.pairwise(self.BOUNDS)]
        chosen = [RECIPES[name](*text) for text in texts]
        long = lambda x, like: jnp.pad(x, [(0, b - a) for a, b in zip(x.shape, like.shape, strict=True)])
        mask = jax.tree.map(lambda a, b: jnp.concatenate([long(a, b), b]), *chosen)
        out = jattn.attention(q, k, v, causal=True, cu_seqlens=jnp.asarray(self.BOUNDS), mask=mask)
        expected = [
            jattn.attention(*text, causal=True, mask=unbatched)
            for text, unbatched in zip(texts, chosen, strict=True)
        ]
        np.testing.assert_allclose(out, jnp.concatenate(expected), atol=1e-6)


class TestTopKBlocks:
    def test_selects_the_top_k_blocks(self):
        scores = jnp.asarray([[0.1, 3.0, 2.0, -jnp.inf], [1.0, 1.0, 0.0, jnp.inf], [-jnp.inf] * 4])
        expected = [[0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]]
        np.testing.assert_array_equal(sparsity.top_k_blocks(scores, 2), np.array(expected, bool))
        np.testing.assert_array_equal(sparsity.top_k_blocks(scores, 9), ~np.isneginf(scores))

    def test_int_scores_that_are_equal_in_f32_are_distinguished(self):
        seen = sparsity.top_k_blocks(jnp.asarray([[2**24 + 1, 2**24, -(2**31)], [7, 7, 3]], jnp.int32), 1)
        np.testing.assert_array_equal(seen, [[True, False, False], [True, True, False]])

    def test_nan_scores_are_selected_in_addition_to_the_others(self):
        """The NaN then reaches the output instead of being hidden."""
        nan, inf = jnp.nan, jnp.inf
        scores = jnp.asarray([[1, nan, 3, inf, 2], [nan, 1, 2, -inf, 0], [nan, nan, nan, inf, -inf]])
        expected = [[0, 1, 0, 1, 0], [1, 0, 1, 0, 0], [1, 1, 1, 1, 0]]
        np.testing.assert_array_equal(sparsity.top_k_blocks(scores, 2), np.array(expected, bool))

    @pytest.mark.parametrize(
        ("scores", "k", "message"),
        [
            (jnp.zeros(3), 0, "k must be positive, got 0"),
            (jnp.zeros((2, 0)), 1, r"scores must have at least one block, got \(2, 0\)"),
        ],
    )
    def test_invalid_arguments_are_rejected(self, scores, k, message):
        with pytest.raises(ValueError, match=message):
            sparsity.top_k_blocks(scores, k)

    def test_custom_scores_select_the_blocks_of_a_decode_step(self):
        """Over a paged cache, a query attends to the blocks that it selected and to no others."""
        spec = jattn.AttentionSpec(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
        metadata = jattn.build_batch_metadata([1, 1], [30, 64], [range(1, 5), range(5, 9)], block_size=16)
        normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
        cache = jattn.PagedCache(k=normal(0, 9, 16, KV_HEADS, DIM), v=normal(1, 9, 16, KV_HEADS, DIM))
        query, scores = normal(2, 2, Q_HEADS, DIM), normal(3, 2, KV_HEADS, 1, 4)

        @jax.jit
        def step(scores):
            blocks = sparsity.top_k_blocks(scores, 2)
            mask = masks.BlockMask(blocks=blocks, block_q=None, block_kv=16)
            return jattn.attend(query, cache, metadata, spec, mask=mask)

        out = step(scores)
        for row, n in enumerate((30, 64)):
            ids = metadata.block_table[row]
            k, v = (np.asarray(x[ids], np.float64).reshape(64, KV_HEADS, DIM) for x in (cache.k, cache.v))
            for h in range(Q_HEADS):
                best = np.argsort(np.asarray(scores)[row, h // 2, 0])[-2:]
                visible = np.isin(np.arange(64) // 16, best) & (np.arange(64) < n)
                p = softmax(k[:, h // 2] @ np.asarray(query)[row, h] * DIM**-0.5, visible)
                np.testing.assert_allclose(out[row, h], p @ v[:, h // 2], atol=1e-5)


class TestMoBA:
    @pytest.mark.parametrize("block_q", [1, 4])
    def test_queries_attend_to_their_block_and_to_blocks_that_the_first_query_selects(self, block_q):
        q, k, _ = arrays()
        size, top_k = 8, 3
        seen = sparsity.moba(q, k, block_size=size, top_k=top_k, block_q=block_q)
        queries, keys = in_numpy(q, k)
        for b, h, i in np.ndindex(2, Q_HEADS, TOKENS):
            first, own_block = i // block_q * block_q, i // size
            likes = [
                queries[b, h, first] @ keys[b, h, n * size : (n + 1) * size].mean(axis=0)
                for n in range(own_block)
            ]
            chosen = {own_block, *np.argsort(likes)[::-1][: top_k - 1]}
            expected = [j // size in chosen and j <= i for j in range(TOKENS)]
            np.testing.assert_array_equal(drawn(seen, b)[h, i], expected) if h == i % Q_HEADS else None

    def test_block_q_must_divide_block_size(self):
        q, k, _ = arrays()
        with pytest.raises(ValueError, match=r"block_q must divide block_kv \(8\), got 3"):
            sparsity.moba(q, k, block_size=8, top_k=2, block_q=3)


def test_streaming_llm_attends_to_first_and_recent_keys():
    i, j = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None, :]
    seen = drawn(sparsity.streaming_llm(num_first=3, num_recent=5), 0)
    np.testing.assert_array_equal(seen[0], ((j < 3) | (i - j < 5)) & (j <= i))
    with pytest.raises(ValueError, match="num_recent must be positive, got 0"):
        sparsity.streaming_llm(num_first=3, num_recent=0)
    with pytest.raises(ValueError, match=r"^num_first must be positive, got 0"):
        sparsity.streaming_llm(num_first=0, num_recent=5)
    with pytest.raises(ValueError, match=r"^num_first must be an int, got True"):
        sparsity.streaming_llm(num_first=True, num_recent=5)


class TestXAttention:
    def test_blocks_that_score_nan_are_selected(self):
        q, k, _ = arrays(32)
        spoiled = k.at[:, 9].set(jnp.nan)
        seen = sparsity.x_attention(q, spoiled, mass=0.2, block_size=8, stride=4).blocks
        assert seen[:, :, 1:, 1].all()

    def test_mass_1_selects_every_causal_block(self):
        """In peaked attention most probabilities underflow in float32 next to the largest."""
        q, k, _ = arrays(48)
        seen = sparsity.x_attention(9 * q, 9 * k, mass=1.0, block_size=8, stride=4).blocks
        np.testing.assert_array_equal(seen, np.broadcast_to(np.tri(6, dtype=bool), seen.shape))

    @pytest.mark.parametrize("tokens", [48, 41])
    def test_selected_blocks_hold_the_mass_of_antidiagonals(self, tokens):
        """Padding of the last block does not count."""
        q, k, _ = (jnp.pad(x, ((0, 0), (0, 48 - tokens), (0, 0), (0, 0))) for x in arrays(tokens))
        size, stride, mass, blocks = 8, 2, 0.7, 6
        arguments = q[:, :tokens], k[:, :tokens]
        seen = sparsity.x_attention(*arguments, mass=mass, block_size=size, stride=stride)
        queries, keys = in_numpy(q, k)
        squares, stripe = 48 // stride, size // stride
        for b, h in np.ndindex(2, Q_HEADS):
            s = np.zeros((squares, squares))
            for a, c, r in np.ndindex(squares, squares, stride):
                s[a, c] += queries[b, h, a * stride + stride - 1 - r] @ keys[b, h, c * stride + r]
            s *= DIM**-0.5 / stride
            real = np.arange(squares) * stride < tokens
            p = np.array([softmax(s[a], (np.arange(squares) <= a) & real[a]) for a in range(squares)])
            weights = p.reshape(blocks, stripe, blocks, stripe).sum(axis=(1, 3))
            for a in range(blocks):
                order = np.argsort(weights[a])[::-1]
                count = 1 + np.searchsorted(np.cumsum(weights[a][order]), mass * weights[a].sum())
                expected = {0, a, *order[:count]}
                assert set(np.flatnonzero(np.asarray(seen.blocks)[b, h, a])) == {
                    n for n in expected if n <= a
                }

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mass": 0.0}, r"mass must lie in \(0, 1\], got 0.0"),
            ({"mass": 0.5, "block_size": 10, "stride": 4}, r"stride must divide block_size \(10\), got 4"),
        ],
    )
    def test_invalid_arguments_are_rejected(self, options, message):
        with pytest.raises(ValueError, match=message):
            sparsity.x_attention(*arrays()[:2], **options)


def test_vertical_slash_selects_what_the_last_queries_attend_to():
    q, k, _ = arrays()
    seen = sparsity.vertical_slash(q[0], k[0], num_columns=4, num_slashes=6, last=8)
    queries, keys = in_numpy(q[:1], k[:1])
    for h in range(Q_HEADS):
        columns, slashes = np.zeros(TOKENS), np.zeros(TOKENS)
        for i in range(TOKENS - 8, TOKENS):
            p = softmax(keys[0, h] @ queries[0, h, i] * DIM**-0.5, np.arange(TOKENS) <= i)
            columns += p
            slashes[: i + 1] += p[i::-1]
        assert set(np.flatnonzero(np.asarray(seen.columns)[0, h])) == set(np.argsort(columns)[-4:])
        assert set(np.flatnonzero(np.asarray(seen.slashes)[0, h])) == set(np.argsort(slashes)[-6:])


@pytest.mark.parametrize(("columns", "slashes"), [(0, 3), (3, 0), (0, 0)])
def test_vertical_slash_may_have_no_columns_or_no_slashes(columns, slashes):
    q, k, _ = (x[0] for x in arrays())
    seen = sparsity.vertical_slash(q, k, num_columns=columns, num_slashes=slashes)
    for marks, count in ((seen.columns, columns), (seen.slashes, slashes)):
        np.testing.assert_array_equal(marks.sum(axis=-1), np.full((1, Q_HEADS), count))


class TestNSA:
    def gates(self):
        return jax.nn.sigmoid(jax.random.normal(jax.random.key(7), (2, TOKENS, Q_HEADS, 3)))

    @pytest.mark.parametrize("block_q", [1, 4])
    def test_output_is_the_gated_sum_of_compressed_selected_and_window(self, block_q):
        q, k, v = arrays()
        size, window = 8, 6
        out = sparsity.nsa(q, k, v, self.gates(), **SIZES, block_q=block_q)
        queries, keys, values = in_numpy(q, k, v)
        gates, blocks = np.asarray(self.gates(), np.float64), -(-TOKENS // size)
        padded = [np.pad(x, ((0, 0), (0, 0), (0, blocks * size - TOKENS), (0, 0))) for x in (keys, values)]
        short = [x.reshape(2, Q_HEADS, blocks, size, DIM).mean(axis=3) for x in padded]
        j = np.arange(TOKENS)
        for b, i in [(0, 0), (0, 7), (0, 8), (1, 30), (1, 49)]:
            ended = lambda i: (np.arange(blocks) + 1) * size - 1 <= i
            probabilities = lambda h, i=i, b=b, ended=ended: softmax(
                short[0][b, h] @ queries[b, h, i] * DIM**-0.5, ended(i)
            )
            first = i // block_q * block_q
            for h in range(Q_HEADS):
                group = probabilities(h // 2 * 2, first) + probabilities(h // 2 * 2 + 1, first)
                own_block = i // size
                group[0] = group[own_block] = np.inf
                group[own_block + 1 :] = -np.inf
                chosen = np.argsort(group)[::-1][: min(3, own_block + 1)]
                attend = lambda visible, i=i, b=b, h=h: (
                    softmax(keys[b, h] @ queries[b, h, i] * DIM**-0.5, visible) @ values[b, h]
                )
                parts = (
                    probabilities(h) @ short[1][b, h],
                    attend(np.isin(j // size, chosen) & (j <= i)),
                    attend((j <= i) & (i - j < window)),
                )
                expected = sum(gates[b, i, h, n] * x for n, x in enumerate(parts))
                np.testing.assert_allclose(out[b, i, h], expected, atol=2e-5)

    @pytest.mark.parametrize("step", [1.0, 40.0])
    def test_selection_keeps_the_order_of_scores_that_underflow(self, step):
        """Scores that differ by 40 have probabilities of 0 in f32, but keep their order."""
        keys = jnp.broadcast_to(
            step * jnp.asarray([3, 1, 5, 2, 4, 0, 6.0])[None, :, None, None], (1, 7, 1, 1)
        )
        q = jnp.ones((1, 50, 2, 1))
        chosen = sparsity.select_nsa_blocks(q, keys, block_size=8, num_selected=4, block_q=8).blocks[0, 0]
        expected = [[0, 2, 3, 4], [0, 2, 4, 5], [0, 2, 4, 6]]
        assert [np.flatnonzero(row).tolist() for row in chosen[4:]] == expected

    def test_float64_branches_are_combined_in_float64(self):
        with jax.enable_x64(True):
            arguments = [x.astype(jnp.float64) for x in arrays(16)]
            gates = jnp.broadcast_to(jnp.asarray([0, 0, 1 / 3], jnp.float64), (2, 16, Q_HEADS, 3))
            out = sparsity.nsa(*arguments, gates, **SIZES)
            expected = jattn.attention(*arguments, causal=True, window=(SIZES["window"] - 1, 0)) / 3
            np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)

    def test_gates_and_compression_have_gradients(self):
        q, k, v = arrays()

        def loss(gates, weights):
            compress = lambda x: jnp.einsum("bnskd,s->bnkd", x, weights)
            out = sparsity.nsa(q, k, v, gates, **SIZES, compress=compress)
            return (out**2).sum()

        grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(self.gates(), jnp.full(8, 1 / 8))
        assert all(jnp.isfinite(x).all() and (x != 0).any() for x in grads)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"gates": jnp.zeros((2, TOKENS, Q_HEADS, 2))},
                r"gates must have shape \(2, 50, 4, 3\) .*, got \(2,",
            ),
            ({"window": 0}, r"window must be positive, got 0"),
            ({"num_selected": 0}, r"num_selected must be positive, got 0"),
            (
                {"compress": lambda x: x},
                r"The result of compress must have shape \(2, 7, 2, 8\) \(batch, .*, got \(2, 7, 8, 2, 8\)",
            ),
            (
                {"compress": lambda x: x.mean(axis=2)[:, 1:]},
                r"The result of compress must have shape \(2, 7, 2, 8\) .*, got \(2, 6, 2, 8\)",
            ),
        ],
    )
    def test_invalid_arguments_are_rejected(self, change, message):
        q, k, v = arrays()
        with pytest.raises(ValueError, match=message):
            sparsity.nsa(q, k, v, **{"gates": self.gates()} | SIZES | change)


def test_negated_mask_is_the_complement():
    window = masks.Window(left=3)
    i, j = np.arange(9)[:, None], np.arange(9)[None, :]
    np.testing.assert_array_equal(masks.dense(~window, 9, 9)[0], i - j > 3)
    assert ~~window is window
    assert hash(~window) == hash(~masks.Window(left=3))
    with pytest.raises(ValueError, match=r"sparsity lets queries attend .*: \(Prefix & ~Window\)"):
        masks.check_causal_mask("sparsity", masks.Prefix(length=3) & ~window, causal=True)
    run = functools.partial(jattn.attention, *arrays(9), causal=True)
    visible = jnp.asarray((i - j > 3) & (j <= i))
    actual, expected = run(mask=~window), run(mask=visible)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert (actual[:, :4] == 0).all()
