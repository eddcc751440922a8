"""A random case of attention: a dict of literals that its seed determines."""

import random

import numpy as np

from tests.fuzz.masks import Sizes
from tests.fuzz.masks import draw as draw_mask

KERNEL_HEAD_DIMS = [32, 64, 80, 96, 112, 120, 128, 192, 256]
MOST_KEYS = 9000  # total over all requests
MANY_HEADS = [
    (32, 8),
    (28, 4),
    (40, 8),
    (64, 1),
    (12, 12),
]  # only with few tokens, since the float64 check is slow
EDGES = [1, 2, 7, 8, 9, 13, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 191, 193, 206, 255, 257]
EIGHT_BIT = [
    "fp8_scalar", "fp8_head", "fp8_token_head", "fp8e5_scalar", "int8_scalar", "int8_token_head",
    "int8_static_v", "int8_k_only", "plain_scalar",
]  # fmt: skip


def weighted_choice(rng: random.Random, **weights: float) -> str:
    """Return a random name, chosen by its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def draw(implementation: str, seed: int, *, is_large: bool = False) -> dict:
    """Return the case of a seed for an implementation of `attend`.

    Args:
        implementation: "mosaic_gpu", "xla" or "reference".
        seed: Seed of all random choices and arrays.
        is_large: Whether to draw long requests and many heads, for a GPU.
    """
    rng, is_kernel = random.Random(f"{implementation}-{seed}"), implementation == "mosaic_gpu"
    case = {"implementation": implementation, "seed": seed}
    case |= _draw_lens(rng, is_large=is_large, is_small=is_kernel and not is_large)
    case |= _draw_cache(rng, is_kernel=is_kernel)
    heads = [(1, 1), (2, 2), (4, 2), (4, 1), (6, 2), (3, 3), (8, 2)]
    heads += MANY_HEADS if is_large and sum(case["query_lens"]) <= 100 else [(12, 1)]
    case["q_heads"], case["kv_heads"] = rng.choice(heads)
    case |= _draw_spec(rng, case)
    case["bucket"] = _draw_bucket(rng, case)
    case["mask"], case["mask_in"] = None, "call"
    if not case["is_cross"] and rng.random() < 0.4:
        case["mask"] = draw_mask(rng, sizes_of(case))
        case["mask_in"] = rng.choice(["call", "plan", "spec"])
    case["planned"] = rng.choice([None, "spec", "cache_spec"])
    case["return_lse"] = rng.random() < 0.85
    case["is_jitted"] = is_large or is_kernel or rng.random() < 0.95
    # Force what long contexts select: packed GQA heads, splits, and dequantization in the kernel.
    case["cuts_keys"] = is_kernel and rng.random() < 0.5
    case["score_mod"] = None
    if not case["is_cross"] and rng.random() < 0.25:
        # `hiding` is NaN for later keys.
        functions = ["relative", "gained", "scaled"] + ["hiding"] * case["causal"]
        case["score_mod"] = rng.choice(functions)
    return case


def _draw_lens(rng: random.Random, *, is_large: bool, is_small: bool) -> dict:
    most_tokens, max_visible_keys = (900, 4000) if is_large else (260, 330) if is_small else (300, 600)
    length = lambda most: min(rng.choice([rng.choice(EDGES), rng.randint(1, most)]), most)
    phase = weighted_choice(rng, decode=3, speculative=2, prefill=2, chunked=3, mixed=4, cross=1)
    num_reqs = rng.randint(1, 40 if is_large and phase == "decode" else 5)
    decode_len = rng.randint(2, 8) if phase == "speculative" or rng.random() < 0.1 else 1
    query_lens, seq_lens = [], []
    for i in range(num_reqs):
        room = most_tokens - sum(query_lens)
        is_decode = phase in ("decode", "speculative") or (phase == "mixed" and i < num_reqs // 2)
        new = decode_len if is_decode else 0 if rng.random() < 0.06 else length(max(room // 2, 1))
        if new > room:
            break
        has_context = phase in ("decode", "speculative", "mixed", "chunked")
        context = length(max_visible_keys) if has_context and rng.random() < 0.9 else 0
        context = min(context, max(MOST_KEYS - sum(seq_lens), 0))
        total = new + context
        if phase == "cross":
            total = 0 if rng.random() < 0.1 else length(max_visible_keys // 2)
        query_lens.append(new)
        seq_lens.append(total)
    lens = {"query_lens": query_lens, "seq_lens": seq_lens, "decode_query_len": decode_len}
    return lens | {"phase": phase, "is_cross": phase == "cross"}


def _draw_cache(rng: random.Random, *, is_kernel: bool) -> dict:
    if is_kernel:
        dtype = weighted_choice(rng, bfloat16=6, float16=4, float32=0.3)
        head_dim = rng.choice(KERNEL_HEAD_DIMS if rng.random() < 0.96 else [8, 48, 72])
        block_size = rng.choice([8, 16, 32, 64, 128, 256] if rng.random() < 0.97 else [4, 24])
        kv = weighted_choice(rng, NHD=4, HND=3, no_cache=2, packed=0.2)
    else:
        dtype = weighted_choice(rng, float32=4, bfloat16=3, float16=3)
        head_dim = rng.choice([8, 16, 32, 48, 64, 80, 112, 128, 256])
        block_size = rng.choice([1, 3, 4, 8, 16, 32, 64, 128])
        kv = weighted_choice(rng, NHD=4, HND=3, no_cache=2, packed=3)
    stored = "plain" if kv == "no_cache" or rng.random() < 0.55 else rng.choice(EIGHT_BIT)
    if kv == "packed" and head_dim % 16 and stored != "plain":  # 16 channels of a key are one piece there
        stored = "plain"
    kind = stored.partition("_")[0]
    quantization = None
    if kind in ("int8", "fp8") and rng.random() < 0.3:
        quantization = {"int8": "int8", "fp8": "fp8_e4m3"}[kind]
    cache_dtype = None
    if kv != "no_cache" and not is_kernel and rng.random() < 0.08:
        cache_dtype = rng.choice(["float32", "bfloat16", "float16"])
    names = {"dtype": dtype, "cache_dtype": cache_dtype, "head_dim": head_dim, "block_size": block_size}
    frees = kv != "no_cache" and rng.random() < 0.5
    return names | {"kv": kv, "stored": stored, "query_quantization": quantization, "frees_blocks": frees}


def _draw_spec(rng: random.Random, case: dict) -> dict:
    size = lambda: rng.choice([0, 1, 3, 9, 16, 63, 64, 65, 70, 100, 128, 150])
    side = lambda: rng.choice([None, size()])
    is_cross = case["is_cross"]
    alibi = None if is_cross or rng.random() < 0.7 else rng.choice(["linear", "sqrt"])
    return {
        "causal": not is_cross and rng.random() < 0.75,
        "window": None if is_cross or rng.random() < 0.5 else [side(), side()],
        "chunk_size": None if is_cross or rng.random() < 0.75 else max(size(), 1),
        "soft_cap": rng.choice([None, None, None, 1.0, 5.0, 30.0]),
        "scale": rng.choice([None] * 6 + [0.05, 0.3]),
        "alibi": alibi,
        "sinks": rng.random() < 0.3,
        "batch_invariant": case["implementation"] != "reference" and rng.random() < 0.1,
    }


def _draw_bucket(rng: random.Random, case: dict) -> dict | None:
    if rng.random() < 0.45:
        return None
    lens, decode_len = case["query_lens"], case["decode_query_len"]
    decodes = decodes_of(lens, decode_len)
    needed = max((-(-n // case["block_size"]) for n in case["seq_lens"]), default=0)
    more_rows = rng.randint(0, 3)
    return {
        "max_decodes": decodes + rng.randint(0, 3),
        "max_prefills": len(lens) - decodes + more_rows,
        "max_prefill_tokens": sum(lens[decodes:])
        + (rng.choice([0, 1, 9, 70]) if len(lens) > decodes or more_rows else 0),
        "decode_query_len": decode_len,
        "max_blocks": max(needed, 1) + rng.randint(0, 3) if rng.random() < 0.8 else None,
    }


def decodes_of(query_lens: list[int], decode_query_len: int) -> int:
    """Return the number of leading requests with exactly `decode_query_len` new tokens."""
    return next((n for n, new in enumerate(query_lens) if new != decode_query_len), len(query_lens))


def rows_of(case: dict) -> np.ndarray:
    """Return the metadata row of each request: `[decode rows | prefill rows]`, each padded."""
    decodes, rows = (
        decodes_of(case["query_lens"], case["decode_query_len"]),
        np.arange(len(case["query_lens"])),
    )
    room = case["bucket"]["max_decodes"] if case["bucket"] else decodes
    return np.where(rows < decodes, rows, room + rows - decodes)


def sizes_of(case: dict) -> Sizes:
    bucket = case["bucket"]
    rows = bucket["max_decodes"] + bucket["max_prefills"] if bucket else len(case["query_lens"])
    # Masks are checked against the length of the block table, which has two spare columns.
    blocks = max(-(-n // case["block_size"]) for n in [*case["seq_lens"], 1]) + 2
    blocks = max(blocks, (bucket and bucket["max_blocks"]) or 0)
    return Sizes(case["q_heads"], case["kv_heads"], rows, blocks * case["block_size"])


def visibility_of(case: dict, rule) -> list[np.ndarray]:
    """Return what each query sees, per request bool [q_heads, query_len, seq_len], following
    AttentionSpec.
    """
    visibility = []
    for r, new, total in zip(rows_of(case), case["query_lens"], case["seq_lens"], strict=True):
        i, j = np.arange(total - new, total)[:, None], np.arange(total)[None, :]
        visible = np.ones((new, total), bool)
        if case["causal"]:
            visible &= j <= i
        left, right = case["window"] or (None, None)
        if left is not None:
            visible &= i - j <= left
        if right is not None:
            visible &= j - i <= right
        if case["chunk_size"] is not None:
            visible &= i // case["chunk_size"] == j // case["chunk_size"]
        heads = range(case["q_heads"])
        visibility.append(
            np.array([visible if rule is None else visible & rule(r, h, i, j) for h in heads], bool)
        )
    return visibility
