"""decode_loop against a loop over rows and tokens."""

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from tests.fuzz.blocks import by_slot

PARAMS = 3


def step(params, caches, metadata, tokens):
    """Return logits of the next token, which depends on this token and the length; the cache stores the
    inputs.
    """
    rows = jnp.broadcast_to(tokens[:, None, None].astype(jnp.float32), (*tokens.shape, 1, 8))
    cache = jattn.write_kv(caches, rows, rows, metadata.slot_mapping)
    following = (tokens * 5 + metadata.seq_lens + params) % 13
    return jax.nn.one_hot(following, 13), cache


def greedy(logits, index):
    return jnp.argmax(logits, axis=-1)


def check(case: dict, rng: np.random.Generator) -> None:
    """Decode a few rows, some of which stop early."""
    size, rows, columns = case["block_size"], int(rng.integers(1, 6)), int(rng.integers(1, 6))
    live, num_steps = int(rng.integers(1, rows + 1)), int(rng.integers(1, 9))
    seq_lens = rng.integers(1, size * columns + 1, live)
    table = rng.permutation(np.arange(1, rows * columns + 1)).reshape(rows, columns)[:live]
    bucket = jattn.Bucket(max_decodes=rows, max_blocks=columns)
    metadata = jattn.build_batch_metadata([1] * live, seq_lens, table, block_size=size, bucket=bucket)
    tokens, stops = rng.integers(0, 13, rows), rng.integers(0, 13, rng.integers(0, 3))
    max_lens = rng.integers(1, size * columns + 4, rows) if rng.random() < 0.5 else None
    blocks = rows * columns + 1
    spec = jattn.CacheSpec(num_blocks=blocks, block_size=size, num_kv_heads=1, head_dim=8, dtype=jnp.float32)
    ends = {"stop_ids": stops, "max_lens": max_lens}
    options = {"num_steps": num_steps, "sample": greedy, **ends}
    cache = jattn.PagedCache.create(spec)
    actual = jattn.decode_loop(step, jnp.int32(PARAMS), cache, metadata, tokens, **options)
    longest = (
        np.full(rows, columns * size + 1) if max_lens is None else np.minimum(max_lens, columns * size + 1)
    )
    generated, slots = np.full((rows, num_steps), -1), np.zeros(blocks * size)
    last, lens = np.zeros((2, rows), int)
    for r in range(live):
        row_slots = table[r][:, None] * size + np.arange(size)
        last[r], lens[r] = decode_row(
            tokens[r], seq_lens[r], longest[r], stops, row_slots.ravel(), generated[r], slots
        )
    np.testing.assert_array_equal(actual.tokens, generated)
    np.testing.assert_array_equal(actual.num_tokens, (generated >= 0).sum(axis=1))
    assert int(actual.num_steps) == (generated >= 0).any(axis=0).sum()
    np.testing.assert_array_equal(actual.last_tokens, last)
    np.testing.assert_array_equal(actual.metadata.seq_lens, lens)
    np.testing.assert_array_equal(by_slot(actual.caches)["k"][:, 0, 0], slots)


def decode_row(token, length, longest, stops, row_slots, generated, slots) -> tuple[int, int]:
    """Decode one row token by token; fills `generated` and the row's entries of `slots`.

    Returns:
        The row's last token and length; zeros if it stopped.
    """
    is_running = length < longest
    for n in range(len(generated)):
        if not is_running:
            return 0, 0
        slots[row_slots[length - 1]] = token
        token = (token * 5 + length + PARAMS) % 13
        generated[n], length = token, length + 1
        is_running = token not in stops and length < longest
    return (token, length) if is_running else (0, 0)
