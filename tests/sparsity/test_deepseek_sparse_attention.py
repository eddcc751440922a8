"""DeepSeek sparse attention against its definition, written as loops over queries in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import sparsity
from jattn.implementations.xla import attention

TOKENS, SELECTED, HEADS = 40, 6, 3
BLOCK_SIZE, BLOCKS = 8, 6


def arrays(batch=2, tokens=TOKENS, seed=0):
    """Return q, k, v, and the indexer's queries, keys and weights."""
    rng = np.random.default_rng(seed)
    shapes = (4, 16), (2, 16), (2, 16), (HEADS, 8), (8,), (HEADS,)
    return [jnp.asarray(rng.normal(size=(batch, tokens, *shape)), jnp.float32) for shape in shapes]


def dense_scores(index_q, index_k, weights):
    """Return the score of each pair of one sequence."""
    products = np.einsum("thd,sd->ths", np.float64(index_q), np.float64(index_k))
    return np.einsum("th,ths->ts", np.float64(weights), np.maximum(products, 0))


def best_keys(scores, query, count):
    """Return the `count` best keys up to the query; the earlier one of equals."""
    return np.sort(np.argsort(-scores[query, : query + 1], kind="stable")[:count])


def softmax(x):
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attention_probs(q, k, keys):
    """Return the probabilities [q_heads, keys] of one query over some keys of a sequence."""
    group = q.shape[0] // k.shape[1]
    products = np.einsum("hd,khd->hk", np.float64(q), np.repeat(np.float64(k[keys]), group, axis=1))
    return softmax(products / np.sqrt(q.shape[-1]))


def dense_dsa(q, k, v, *indexer, count=SELECTED):
    """Return the output of one sequence."""
    scores, outs = dense_scores(*indexer), []
    for query in range(len(q)):
        keys = best_keys(scores, query, count)
        values = np.repeat(np.float64(v[keys]), q.shape[1] // v.shape[1], axis=1)
        outs.append(np.einsum("hk,khd->hd", attention_probs(q[query], k, keys), values))
    return np.stack(outs)


def dense_loss(q, k, *indexer, count):
    """Return the sum of one sequence's divergences."""
    scores, total = dense_scores(*indexer), 0.0
    for query in range(len(q)):
        keys = best_keys(scores, query, count)
        target, predicted = attention_probs(q[query], k, keys).mean(axis=0), softmax(scores[query, keys])
        total += (target * np.log(target / predicted)).sum()
    return total


def dense_batch(function, inputs, **options):
    return np.stack([function(*map(np.asarray, row), **options) for row in zip(*inputs, strict=True)])


@pytest.mark.parametrize("chunk", [16, pytest.param(64, marks=pytest.mark.kernels)])
def test_output_equals_the_definition(monkeypatch, chunk):
    monkeypatch.setattr(sparsity.deepseek_sparse_attention, "CHUNK", chunk)
    inputs = arrays()
    out = jax.jit(lambda *args: sparsity.dsa(*args, num_selected=SELECTED))(*inputs)
    np.testing.assert_allclose(out, dense_batch(dense_dsa, inputs), atol=2e-5)
    one = sparsity.dsa(*(x[0] for x in inputs), num_selected=SELECTED)
    np.testing.assert_allclose(one, out[0], atol=2e-6)


def test_selects_the_earlier_of_equal_scores_and_never_more_than_asked():
    _, _, _, index_q, index_k, weights = arrays()
    mask = sparsity.select_tokens(index_q, index_k * 0, weights, num_selected=SELECTED)  # All scores are 0.
    selected = np.asarray(mask.blocks)[0, 0]
    expected = np.tri(TOKENS, dtype=bool) & (np.arange(TOKENS) < SELECTED)
    np.testing.assert_array_equal(selected, expected)


def test_output_has_gradients_of_the_selected_keys_alone():
    inputs = arrays(batch=1)
    mask = sparsity.select_tokens(*inputs[3:], num_selected=SELECTED)

    def loss(q, k, v, index_q):
        out = sparsity.dsa(q, k, v, index_q, *inputs[4:], num_selected=SELECTED)
        return (out[0, -1] ** 2).sum()

    by_k, by_v, by_index = jax.grad(loss, argnums=(1, 2, 3))(*inputs[:4])
    selected = np.asarray(mask.blocks)[0, 0, -1]
    for gradient in (by_k, by_v):
        np.testing.assert_array_equal(np.abs(gradient[0]).max(axis=(1, 2)) > 0, selected)
    assert not np.any(by_index)


@pytest.mark.parametrize("count", [SELECTED, pytest.param(None, marks=pytest.mark.kernels)])
def test_loss_and_its_gradient_equal_the_definition(monkeypatch, count):
    monkeypatch.setattr(sparsity.deepseek_sparse_attention, "CHUNK", 16)
    q, k, _, *indexer = arrays()

    def loss(q, k, *indexer):
        return sparsity.indexer_loss(q, k, *indexer, num_selected=count)

    def dense(indexer):
        return dense_batch(dense_loss, (q, k, *indexer), count=count or TOKENS).sum() / (2 * TOKENS)

    np.testing.assert_allclose(loss(q, k, *indexer), dense(indexer), rtol=1e-5)
    gradients = jax.jit(jax.grad(loss, argnums=range(5)))(q, k, *indexer)
    assert not np.any(gradients[0])
    assert not np.any(gradients[1])
    rng = np.random.default_rng(1)
    for i, gradient in enumerate(gradients[2:]):
        direction = rng.normal(size=gradient.shape)
        step, shifted = 1e-6, [np.float64(x) for x in indexer]
        ends = []
        for sign in (1, -1):
            shifted[i] = np.float64(indexer[i]) + sign * step * direction
            ends.append(dense(shifted))
        expected = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=str)
def test_cached_selection_equals_the_selection_of_a_sequence(dtype):
    tokens, tables = (13, TOKENS), np.array([[5, 2, 0, 0, 0], [1, 3, 4, 6, 7]])
    _, _, _, index_q, index_k, weights = arrays()
    index_q, index_k = index_q.astype(dtype), index_k.astype(dtype)
    cache = jnp.full((8, BLOCK_SIZE, 8), jnp.nan, dtype)  # Nothing may be read where nothing was written.
    for row, (length, table) in enumerate(zip(tokens, tables, strict=True)):
        position = np.arange(TOKENS)
        slots = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        slots = jnp.asarray(np.where(position < length, slots, -1))
        cache = sparsity.write_index_keys(cache, index_k[row], slots)
    last = np.array(tokens) - 1
    rows = np.arange(2)
    mask = sparsity.select_cached_tokens(
        *(index_q[rows, last], cache, weights[rows, last], jnp.asarray(tables), jnp.asarray(tokens)),
        num_selected=SELECTED,
    )
    whole = sparsity.select_tokens(index_q, index_k, weights, num_selected=SELECTED)
    np.testing.assert_array_equal(mask.blocks[:, 0, 0], whole.blocks[rows, 0, last])


@pytest.mark.parametrize(
    ("layout", "quantization", "q_heads"),
    [
        ("NHD", None, 4),
        pytest.param("HND", None, 4, marks=pytest.mark.kernels),
        pytest.param("packed", None, 2, marks=pytest.mark.kernels),
        pytest.param("HND", "int8_per_token_head", 4, marks=pytest.mark.kernels),
    ],
)
def test_decode_reads_only_the_selected_tokens(monkeypatch, layout, quantization, q_heads):
    """A decode step equals the rows of a sequence, and loads no chunk of consecutive keys."""
    q, k, v, *indexer = arrays(batch=1)
    q, lens, table = q[:, :, :q_heads], (TOKENS, 3), range(1, 6)
    spec = jattn.AttentionSpec(num_q_heads=q_heads, num_kv_heads=2, head_dim=16)
    sizes = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_dim": 16}
    cache_spec = jattn.CacheSpec(**sizes, dtype=jnp.float32, layout=layout, quantization=quantization)
    prompt = jattn.build_batch_metadata([TOKENS], [TOKENS], [table], block_size=BLOCK_SIZE)
    cache = jattn.write_kv(jattn.PagedCache.create(cache_spec), k[0], v[0], prompt.slot_mapping)
    index_cache = jnp.zeros((BLOCKS, BLOCK_SIZE, 8))
    index_cache = sparsity.write_index_keys(index_cache, indexer[1][0], prompt.slot_mapping)
    step = jattn.build_batch_metadata([1, 1], lens, [table, table], block_size=BLOCK_SIZE)
    last = np.array(lens) - 1
    query, index_q, weights = (x[0, last] for x in (q, indexer[0], indexer[2]))

    @functools.partial(jax.jit, static_argnames="implementation")
    def decode(query, cache, index_cache, step, implementation):
        mask = sparsity.select_cached_tokens(
            index_q, index_cache, weights, step.block_table, step.seq_lens, num_selected=SELECTED
        )
        return jattn.attend(query, cache, step, spec, mask=mask, implementation=implementation)

    expected = decode(query, cache, index_cache, step, "reference")
    monkeypatch.setattr(attention, "load_chunk", None)
    out = decode(query, cache, index_cache, step, "xla")
    np.testing.assert_allclose(out, expected, atol=2e-5)
    if quantization is None:
        whole = sparsity.dsa(q, k, v, *indexer, num_selected=SELECTED, implementation="reference")
        np.testing.assert_allclose(out, whole[0, last], atol=2e-5)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("index_k", lambda x: x[:, 1:], "index_k must have shape"),
        ("index_q", lambda x: x[:, :, 0], "index_q must have shape"),
        ("index_weights", lambda x: x[..., 1:], "index_weights must have shape"),
    ],
)
def test_wrong_shapes_are_named(name, change, match):
    names = "q", "k", "v", "index_q", "index_k", "index_weights"
    inputs = dict(zip(names, arrays(), strict=True))
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=match):
        sparsity.dsa(**inputs, num_selected=SELECTED)
