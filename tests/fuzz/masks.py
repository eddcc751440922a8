"""Random masks as literals, the Mask objects, and numpy rules over (row, head, query, key) after the
docstrings.

A literal is a list of a name and its arguments. Rules take int arrays that broadcast and return bools.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jattn import masks


class Sizes(NamedTuple):
    """Sizes of the batch of a mask."""

    q_heads: int
    kv_heads: int
    rows: int  # of the metadata
    max_len: int


class Made(NamedTuple):
    mask: masks.Mask
    rule: Callable


def draw(rng: random.Random, sizes: Sizes, depth: int = 2) -> list:
    """Return a random literal."""
    if depth and rng.random() < 0.4:
        return [rng.choice(["and", "or"]), draw(rng, sizes, depth - 1), draw(rng, sizes, depth - 1)]
    size = lambda: rng.choice([1, 2, 3, 5, 8, 16, 17, 32, 64, 70, 128, 150])
    optional_size = lambda: rng.choice([None, size()])
    name = rng.choice(list(MAKERS))
    if name == "window":
        return [name, rng.choice([0, optional_size()]), rng.choice([0, optional_size()])]
    if name in ("sinks", "chunked", "function"):
        return [name, size()]
    if name == "dilated":
        return [name, rng.randint(0, 40), rng.randint(1, 9)]
    if name == "only_heads":
        return [name, sorted(rng.sample(range(sizes.q_heads), rng.randint(0, min(3, sizes.q_heads))))]
    if name == "local_strided":
        fields = {"block_size": size(), "local_blocks": rng.randint(0, 3), "vert_stride": rng.randint(1, 5)}
        fields |= {"homo_head": rng.random() < 0.3, "homo_head_group": rng.random() < 0.3}
        return [name, fields | {"tp_size": 2, "tp_rank": rng.randint(0, 1)}]
    if name == "big_bird":
        return [
            name,
            {"block_size": size(), "local_blocks": rng.randint(0, 3), "global_blocks": rng.randint(0, 2)},
        ]
    if name == "prefix":
        lengths = [rng.randint(0, sizes.max_len + 9) for _ in range(sizes.rows)]
        return [name, lengths if rng.random() < 0.7 else lengths[0]]
    if name == "block":
        heads = rng.choice([h for h in (1, sizes.kv_heads, sizes.q_heads) if sizes.q_heads % h == 0])
        fields = {
            "block_q": rng.choice([None, 8, 16, 64, 128, size()]),
            "block_kv": rng.choice([16, 64, 128, size()]),
        }
        fields |= {"heads": heads, "has_rows": rng.random() < 0.5, "share": rng.choice([0.2, 0.5, 0.9])}
        return [name, fields | {"seed": rng.randint(0, 10**6), "first": rng.random() < 0.2}]
    if name in ("document", "vertical_slash"):
        return [name, {"seed": rng.randint(0, 10**6), "has_rows": rng.random() < 0.6}]
    return [name]


def make(literal: list, sizes: Sizes) -> Made:
    """Return the mask of a literal and its rule."""
    name, *arguments = literal
    if name in ("and", "or"):
        (a, rule_a), (b, rule_b) = (make(part, sizes) for part in arguments)
        if name == "and":
            return Made(a & b, lambda *p: rule_a(*p) & rule_b(*p))
        return Made(a | b, lambda *p: rule_a(*p) | rule_b(*p))
    return MAKERS[name](sizes, *arguments)


def causal(sizes):
    return Made(masks.Causal(), lambda r, h, i, j: j <= i)


def window(sizes, left, right):
    far = 10**9
    in_left, in_right = (far if width is None else width for width in (left, right))
    return Made(masks.Window(left, right), lambda r, h, i, j: (i - j <= in_left) & (j - i <= in_right))


def sinks(sizes, num):
    return Made(masks.Sinks(num), lambda r, h, i, j: (j < num) & (i == i))


def chunked(sizes, size):
    return Made(masks.Chunked(size), lambda r, h, i, j: i // size == j // size)


def dilated(sizes, num, step):
    rule = lambda r, h, i, j: (np.abs(i - j) % step == 0) & (np.abs(i - j) // step <= num)
    return Made(masks.Dilated(num, step), rule)


def function(sizes, number):
    rule = lambda h, i, j: (i * 3 + j + h) % 5 > number % 4
    return Made(masks.MaskFunction(rule), lambda r, h, i, j: rule(h, i, j))


def only_heads(sizes, heads):
    return Made(masks.OnlyHeads(tuple(heads)), lambda r, h, i, j: (h in heads) & (i == i) & (j == j))


def local_strided(sizes, fields):
    stride, size = fields["vert_stride"], fields["block_size"]
    q_heads, kv_heads = sizes.q_heads * fields["tp_size"], sizes.kv_heads * fields["tp_size"]

    def shift(h):
        if fields["homo_head"]:
            return 0
        if fields["homo_head_group"]:
            kv_head = fields["tp_rank"] * sizes.kv_heads + h // (sizes.q_heads // sizes.kv_heads)
            return kv_head * max(1, stride // kv_heads)
        return (fields["tp_rank"] * sizes.q_heads + h) * max(1, stride // q_heads)

    def rule(r, h, i, j):
        a, b = i // size, j // size
        return (b <= a) & ((a - b < fields["local_blocks"]) | ((b + shift(h) + 1) % stride == 0))

    return Made(masks.LocalStrided(**fields), rule)


def big_bird(sizes, fields):
    def rule(r, h, i, j):
        a, b = i // fields["block_size"], j // fields["block_size"]
        return (np.abs(a - b) < fields["local_blocks"]) | (np.minimum(a, b) < fields["global_blocks"])

    return Made(masks.BigBird(**fields, random_blocks=0), rule)


def document(sizes, fields):
    rng = np.random.default_rng(fields["seed"])
    ids = np.cumsum(rng.random((sizes.rows, sizes.max_len)) < 0.03, axis=1).astype(np.int32)
    ids = ids if fields["has_rows"] else np.broadcast_to(ids[:1], ids.shape)
    id_at = lambda r, x: ids[r, np.minimum(x, ids.shape[1] - 1)]
    array = ids.copy() if fields["has_rows"] else ids[0].copy()
    return Made(masks.Document(ids=array), lambda r, h, i, j: id_at(r, i) == id_at(r, j))


def prefix(sizes, length):
    array = np.asarray(length, np.int32)
    lengths = np.broadcast_to(array, (sizes.rows,))
    return Made(masks.Prefix(length=array), lambda r, h, i, j: np.maximum(i, j) < lengths[r])


def vertical_slash(sizes, fields):
    rng = np.random.default_rng(fields["seed"])
    rows, num_positions = sizes.rows if fields["has_rows"] else 1, rng.integers(1, sizes.max_len + 9)
    columns, slashes = rng.random((2, rows, sizes.q_heads, num_positions)) < 0.15
    num_gathered = int(rng.choice([0, 2, 20, num_positions]))

    def has(marks, r, h, index):
        is_in = (index >= 0) & (index < num_positions)
        return marks[np.minimum(r, rows - 1), h, np.clip(index, 0, num_positions - 1)] & is_in

    array = (columns, slashes) if fields["has_rows"] else (columns[0], slashes[0])
    mask = masks.VerticalSlash(columns=array[0], slashes=array[1], num_gathered=num_gathered)
    return Made(mask, lambda r, h, i, j: has(columns, r, h, j) | has(slashes, r, h, i - j))


def block(sizes, fields):
    has_lists = fields["seed"] % 4 == 1
    if has_lists:
        fields = fields | {"block_q": None, "has_rows": True}
        if fields["seed"] % 8 == 1:  # lists of single keys, for all heads
            fields = fields | {"block_kv": 1, "heads": 1}
    rng, block_q, block_kv = np.random.default_rng(fields["seed"]), fields["block_q"], fields["block_kv"]
    id_at = lambda size: -(-sizes.max_len // size)
    shape = sizes.rows, fields["heads"], 1 if block_q is None else id_at(block_q), id_at(block_kv)
    blocks = rng.random(shape) < fields["share"]
    first = rng.integers(0, 2, sizes.rows).astype(np.int32) if fields["first"] and block_q else None
    has_rows = fields["has_rows"]

    def rule(r, h, i, j):
        a = 0 * i if block_q is None else i // block_q - (0 if first is None else first[r])
        b, list_index = j // block_kv, h * fields["heads"] // sizes.q_heads
        inside = (a >= 0) & (a < shape[2]) & (b < shape[3])
        return (
            inside
            & blocks[
                r if has_rows else 0, list_index, np.clip(a, 0, shape[2] - 1), np.minimum(b, shape[3] - 1)
            ]
        )

    if has_lists:
        listed = blocks[:, :, 0]
        ids = np.argsort(~listed, axis=2, kind="stable").astype(np.int32)  # True blocks first
        lists = {"ids": ids, "counts": listed.sum(axis=2, dtype=np.int32)}
        return Made(masks.ListedBlocks(blocks=blocks, block_q=None, block_kv=block_kv, **lists), rule)
    mask = masks.BlockMask(
        blocks=blocks if has_rows else blocks[0], first_q_block=first, block_q=block_q, block_kv=block_kv
    )
    return Made(mask, rule)


MAKERS = {
    "causal": causal,
    "window": window,
    "sinks": sinks,
    "chunked": chunked,
    "dilated": dilated,
    "function": function,
    "only_heads": only_heads,
    "local_strided": local_strided,
    "big_bird": big_bird,
    "document": document,
    "prefix": prefix,
    "vertical_slash": vertical_slash,
    "block": block,
}
