"""Metadata of a step and updates of it, against loops over requests and tokens."""

import jax
import jax.numpy as jnp
import numpy as np

import jattn


def check(case: dict, rng: np.random.Generator) -> None:
    """Check building, padding, updating the block table and advancing of a random step."""
    size, decode_len = case["block_size"], int(rng.choice([1, 1, 2, 4]))
    num_reqs = int(rng.integers(0, 7))
    query_lens = np.where(rng.random(num_reqs) < 0.5, decode_len, rng.integers(0, 12, num_reqs))
    if rng.random() < 0.5:
        query_lens = query_lens[np.argsort(query_lens != decode_len, kind="stable")]
    seq_lens = query_lens + rng.integers(0, 30, num_reqs) * (rng.random(num_reqs) < 0.7)
    widths = -(-seq_lens // size)
    table = [rng.integers(0, 50, w).tolist() + [-7] * int(rng.integers(0, 3)) for w in widths]
    bucket = bucket_of(rng, query_lens, decode_len, max(widths, default=0))
    build = {"block_size": size, "decode_query_len": decode_len}
    actual = jattn.build_batch_metadata(query_lens, seq_lens, table, bucket=bucket, **build)
    expected_metadata = reference_metadata(query_lens, seq_lens, table, actual.bucket, size)
    compare(actual, expected_metadata)
    larger = grown(rng, actual)
    compare(
        jax.jit(jattn.pad_to_bucket, static_argnums=1)(actual, larger),
        reference_metadata(query_lens, seq_lens, table, larger, size),
    )
    check_update_block_table(actual, rng)
    check_advance(actual, expected_metadata, rng)


def bucket_of(rng, query_lens, decode_len, width) -> jattn.Bucket | None:
    if rng.random() < 0.4:
        return None
    leading = next((n for n, new in enumerate(query_lens) if new != decode_len), len(query_lens))
    room = int(rng.integers(0, 3))
    return jattn.Bucket(
        max_decodes=leading + int(rng.integers(0, 3)),
        max_prefills=len(query_lens) - leading + room + 1,
        max_prefill_tokens=int(sum(query_lens[leading:])) + int(rng.integers(0, 9)),
        decode_query_len=decode_len,
        max_blocks=int(width) + int(rng.integers(0, 3)),
    )


def grown(rng, metadata) -> jattn.Bucket:
    old, more = metadata.bucket, lambda: int(rng.integers(0, 4))
    return jattn.Bucket(
        max_decodes=old.max_decodes + more(),
        max_prefills=old.max_prefills + more() + 1,
        max_prefill_tokens=old.max_prefill_tokens + more(),
        decode_query_len=old.decode_query_len,
        max_blocks=metadata.block_table.shape[1] + more(),
    )


def reference_metadata(query_lens, seq_lens, table, bucket, size) -> dict[str, np.ndarray]:
    """Return BatchMetadata by one request and token at a time; starts of padding rows are not compared."""
    lens, starts = np.zeros(bucket.max_reqs, int), np.full(bucket.max_reqs, -1)
    slots = np.full(bucket.max_tokens, -1)
    positions, live = np.zeros(bucket.max_tokens, int), np.zeros(bucket.max_tokens, bool)
    blocks = np.full((bucket.max_reqs, bucket.max_blocks or 0), -1)
    token, in_decode, num_decodes, num_prefills = bucket.max_decode_tokens, True, 0, 0
    for new, total, row_blocks in zip(query_lens, seq_lens, table, strict=True):
        in_decode = in_decode and new == bucket.decode_query_len and num_decodes < bucket.max_decodes
        row = num_decodes if in_decode else bucket.max_decodes + num_prefills
        first = num_decodes * bucket.decode_query_len if in_decode else token
        num_decodes, num_prefills = num_decodes + in_decode, num_prefills + (not in_decode)
        token += 0 if in_decode else new
        lens[row], starts[row] = total, first
        needed = -(-total // size)
        blocks[row, :needed] = row_blocks[:needed]
        for i in range(new):
            position = total - new + i
            positions[first + i], live[first + i] = position, True
            slots[first + i] = row_blocks[position // size] * size + position % size
    return {
        "seq_lens": lens,
        "starts": starts,
        "slot_mapping": slots,
        "positions": positions,
        "is_valid_token": live,
        "block_table": blocks,
        "num_decodes": np.asarray(num_decodes),
        "num_prefills": np.asarray(num_prefills),
    }


def derived_properties(metadata) -> dict:
    """Return the properties of metadata that are computed from its arrays."""
    names = ("positions", "is_valid_token", "row_starts", "token_rows", "query_lens")
    return {name: getattr(metadata, name) for name in names}


def compare(actual, expected) -> None:
    derived = jax.jit(derived_properties)(actual)
    for name in ("seq_lens", "slot_mapping", "num_decodes", "num_prefills"):
        np.testing.assert_array_equal(getattr(actual, name), expected[name], err_msg=name)
    for name in ("positions", "is_valid_token"):
        np.testing.assert_array_equal(derived[name], expected[name], err_msg=name)
    blocks = expected["block_table"]
    width = max(actual.block_table.shape[1], blocks.shape[1])
    pad_columns = lambda x: np.pad(np.asarray(x), ((0, 0), (0, width - x.shape[1])), constant_values=-1)
    np.testing.assert_array_equal(
        np.where(pad_columns(blocks) >= 0, pad_columns(actual.block_table), -1), pad_columns(blocks)
    )
    is_row = expected["starts"] >= 0
    np.testing.assert_array_equal(
        np.asarray(derived["row_starts"])[is_row], expected["starts"][is_row], err_msg="row_starts"
    )
    starts = np.asarray(actual.query_start_loc)
    assert starts.shape == (actual.bucket.max_reqs + 1,)
    assert (np.diff(starts[actual.bucket.max_decodes :]) >= 0).all()


def check_update_block_table(metadata, rng) -> None:
    """Check that update_block_table recomputes the slots."""
    table = rng.integers(0, 99, metadata.block_table.shape).astype(np.int32)
    actual = jax.jit(jattn.update_block_table)(metadata, jnp.asarray(table))
    slots = np.asarray(actual.slot_mapping)
    derived, size = (
        {name: np.asarray(x) for name, x in jax.jit(derived_properties)(metadata).items()},
        metadata.block_size,
    )
    rows = derived["token_rows"]
    for t, (is_live, position) in enumerate(
        zip(derived["is_valid_token"], derived["positions"], strict=True)
    ):
        expected = table[rows[t], position // size] * size + position % size if is_live else -1
        assert slots[t] == expected, f"slot of token {t}"


def check_advance(metadata, expected, rng) -> None:
    """Check two decode steps in which rows accept fewer tokens or end."""
    lens, new = expected["seq_lens"].copy(), np.asarray(jax.jit(derived_properties)(metadata)["query_lens"])
    decode_len, size = metadata.bucket.decode_query_len, metadata.block_size
    table = np.asarray(metadata.block_table)
    for _ in range(2):
        accepted = rng.integers(0, np.maximum(new, 0) + 1).astype(np.int32) if rng.random() < 0.5 else None
        running = rng.random(len(lens)) < 0.8 if rng.random() < 0.5 else None
        as_jax = lambda x: None if x is None else jnp.asarray(x)
        updates = {"num_accepted": as_jax(accepted), "is_running": as_jax(running)}
        metadata = jax.jit(lambda metadata, updates: jattn.advance(metadata, **updates))(metadata, updates)
        live = (lens > 0) & (True if running is None else running)
        num_kept = new if accepted is None else accepted
        lens = np.where(live, lens - new + num_kept + decode_len, 0)
        new = np.where(live, decode_len, 0)
        np.testing.assert_array_equal(metadata.seq_lens, lens)
        np.testing.assert_array_equal(jax.jit(derived_properties)(metadata)["query_lens"], new)
        slots = np.asarray(metadata.slot_mapping).reshape(len(lens), decode_len)
        for r, i in np.ndindex(slots.shape):
            position = lens[r] - decode_len + i
            column = position // size
            is_in = lens[r] > 0 and column < table.shape[1] and table[r, column] >= 0
            expected = table[r, column] * size + position % size if is_in else -1
            assert slots[r, i] == expected, f"slot of row {r}, token {i}"
