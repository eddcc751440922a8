"""Masks with their definitions for one pair at a time in Python, and hypothesis strategies for both."""

import dataclasses
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from jattn import masks

Q_HEADS, KV_HEADS = 4, 2
MAX_LEN = 41


def tiling(queries: int = 64, keys: int = 128) -> masks.KernelTiling:
    """Return tiles in which kernels evaluate masks."""
    return masks.KernelTiling((Q_HEADS, KV_HEADS), queries, keys, max_seq_len=MAX_LEN, is_aligned=True)


@dataclasses.dataclass
class Ruled:
    """Mask, and its definition as a predicate over (row, head, query position, key position).

    The mask is built when used, not when drawn: the runtime type check of a tuple is random, but strategies
    must be deterministic.
    """

    make: Callable[[], masks.Mask]
    visible: Callable[[int, int, int, int], bool]  # (row, head, i, j)

    @property
    def mask(self) -> masks.Mask:
        return self.make()

    def dense(self, query_len: int, seq_len: int, row: int = 0) -> np.ndarray:
        queries = range(seq_len - query_len, seq_len)
        id_at = lambda h, i: [bool(self.visible(row, h, i, j)) for j in range(seq_len)]
        return np.array([[id_at(h, i) for i in queries] for h in range(Q_HEADS)], bool).reshape(
            Q_HEADS, query_len, seq_len
        )


causal = st.just(Ruled(lambda: masks.Causal(), lambda r, h, i, j: j <= i))


@st.composite
def windows(draw):
    left, right = draw(st.none() | st.integers(0, 20)), draw(st.none() | st.integers(0, 9))
    return Ruled(
        lambda: masks.Window(left, right),
        lambda r, h, i, j: (left is None or i - j <= left) and (right is None or j - i <= right),
    )


@st.composite
def first_keys(draw):
    num = draw(st.integers(1, 20))
    return Ruled(lambda: masks.Sinks(num), lambda r, h, i, j: j < num)


@st.composite
def chunked(draw):
    size = draw(st.integers(1, 20))
    return Ruled(lambda: masks.Chunked(size), lambda r, h, i, j: i // size == j // size)


@st.composite
def dilated(draw):
    num, step = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    return Ruled(
        lambda: masks.Dilated(num, step), lambda r, h, i, j: abs(i - j) in [n * step for n in range(num + 1)]
    )


@st.composite
def functions(draw):
    a, b = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    rule = lambda h, i, j: (i * a + j + h) % 5 > b
    return Ruled(lambda: masks.MaskFunction(rule), lambda r, h, i, j: rule(h, i, j))


@st.composite
def only_heads(draw):
    heads = draw(st.lists(st.integers(0, Q_HEADS - 1), max_size=3))
    return Ruled(lambda: masks.OnlyHeads(tuple(heads)), lambda r, h, i, j: h in heads)


@st.composite
def documents(draw):
    has_rows = draw(st.booleans())
    ids = draw(st.lists(st.lists(st.integers(0, 2), min_size=30, max_size=30), min_size=2, max_size=2))
    ids = np.cumsum(np.array(ids) == 0, axis=1).astype(np.int32)
    id_at = lambda r, p: ids[r if has_rows else 0, min(p, 29)]
    mask = lambda: masks.Document(ids=ids if has_rows else ids[0])
    return Ruled(mask, lambda r, h, i, j: id_at(r, i) == id_at(r, j))


@st.composite
def documents_in_any_order(draw):
    """Draw document ids that rise, fall and repeat."""
    has_rows = draw(st.booleans())
    runs = st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 12)), min_size=8, max_size=8)
    rows = [[id_ for id_, count in draw(runs) for _ in range(count)] for _ in range(2)]
    ids = np.array([(row * 30)[:30] for row in rows], np.int32)
    id_at = lambda r, p: ids[r if has_rows else 0, min(p, 29)]
    mask = lambda: masks.Document(ids=ids if has_rows else ids[0])
    return Ruled(mask, lambda r, h, i, j: id_at(r, i) == id_at(r, j))


@st.composite
def prefixes(draw):
    lengths = draw(st.lists(st.integers(0, 30), min_size=2, max_size=2))
    return Ruled(
        lambda: masks.Prefix(length=np.asarray(lengths, np.int32)), lambda r, h, i, j: max(i, j) < lengths[r]
    )


@st.composite
def vertical_slash(draw):
    """Draw columns and slashes, shared by all rows or for each of two."""
    positions = st.lists(st.integers(-1, 35), min_size=3, max_size=3)
    count = draw(st.integers(1, 2))
    row_lists = st.lists(
        st.lists(positions, min_size=Q_HEADS, max_size=Q_HEADS), min_size=count, max_size=count
    )
    columns, slashes = draw(row_lists), draw(row_lists)

    def marks(rows):
        array = np.array([[[x in positions for x in range(32)] for positions in lists] for lists in rows])
        return array if len(rows) > 1 else array[0]

    mask = lambda: masks.VerticalSlash(columns=marks(columns), slashes=marks(slashes))
    is_in = lambda x, rows, r, h: 0 <= x < 32 and x in rows[min(r, len(rows) - 1)][h]
    return Ruled(mask, lambda r, h, i, j: is_in(j, columns, r, h) or is_in(i - j, slashes, r, h))


@st.composite
def block_masks(draw, reach=36):
    """Draw a block mask whose arrays cover more than `reach - 16` positions, by default fewer than the
    longest request has.
    """
    heads, block_q = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([None, 1, 4, 16]))
    block_kv, has_rows = draw(st.sampled_from([1, 5, 16])), draw(st.booleans())
    first = draw(st.none() | st.lists(st.integers(0, 3), min_size=2, max_size=2)) if block_q else None
    shape = (2, heads, 1 if block_q is None else (reach + 4) // block_q, reach // block_kv)
    blocks = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < draw(
        st.sampled_from([0.1, 0.5, 0.9])
    )
    mask = lambda: masks.BlockMask(
        blocks=blocks if has_rows else blocks[0],
        first_q_block=None if first is None else np.asarray(first, np.int32),
        block_q=block_q,
        block_kv=block_kv,
    )

    def visible(r, h, i, j):
        a = 0 if block_q is None else i // block_q - (first[r] if first else 0)
        b = j // block_kv
        inside = 0 <= a < shape[2] and b < shape[3]
        return inside and blocks[r if has_rows else 0, h * heads // Q_HEADS, a, b]

    return Ruled(mask, visible)


@st.composite
def local_strided(draw):
    size, local, stride = draw(st.integers(1, 9)), draw(st.integers(0, 3)), draw(st.integers(1, 5))
    rank, homo, group = draw(st.integers(0, 1)), draw(st.booleans()), draw(st.booleans())
    mask = lambda: masks.LocalStrided(
        block_size=size, local_blocks=local, vert_stride=stride, tp_rank=rank, tp_size=2,
        homo_head=homo, homo_head_group=group,
    )  # fmt: skip

    def shift(h):
        if homo:
            return 0
        if group:
            return (rank * KV_HEADS + h // 2) * max(1, stride // (2 * KV_HEADS))
        return (rank * Q_HEADS + h) * max(1, stride // (2 * Q_HEADS))

    def visible(r, h, i, j):
        a, b = i // size, j // size
        return b <= a and (a - b < local or (b + shift(h) + 1) % stride == 0)

    return Ruled(mask, visible)


WHOLE = st.one_of(
    causal, windows(), first_keys(), chunked(), dilated(), functions(), only_heads(), documents(), prefixes(),
    block_masks(MAX_LEN + 15), local_strided(),
)  # fmt: skip
ANALYTIC = WHOLE | block_masks()
SINGLE = ANALYTIC | vertical_slash() | documents_in_any_order()


@st.composite
def compositions(draw, components=SINGLE):
    """Draw two or three masks combined by & and |."""
    result = draw(components)
    for _ in range(draw(st.integers(1, 2))):
        a, b = result, draw(components)
        if draw(st.integers(0, 3)) == 0:
            a = Ruled(lambda a=a: ~a.mask, lambda *p, a=a: not a.visible(*p))
        if draw(st.booleans()):
            result = Ruled(
                lambda a=a, b=b: a.mask & b.mask, lambda *p, a=a, b=b: a.visible(*p) and b.visible(*p)
            )
        else:
            result = Ruled(
                lambda a=a, b=b: a.mask | b.mask, lambda *p, a=a, b=b: a.visible(*p) or b.visible(*p)
            )
    return result
