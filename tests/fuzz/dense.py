"""jattn.attention with pairs of arguments, against its docstring in float64: outputs, LSEs and gradients.

Tokens of no document are NaN. Rules of masks are those of `tests.fuzz.masks`.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from tests.fuzz import masks
from tests.fuzz.masks import Sizes

TOLERANCE = {"float32": 2e-4, "bfloat16": 6e-2, "float16": 1e-2}  # relative to the array's largest value or 1
LENS = [0, 1, 2, 3, 7, 8, 9, 16, 17, 30, 33, 40]


def draw(seed: int) -> dict:
    """Return a case with few tokens."""
    rng = random.Random(f"dense-{seed}")
    layout = rng.choice(["batch", "batch", "text", "packed"])
    lens = [rng.choice(LENS) for _ in range(rng.randint(1, 4))] if layout == "packed" else []
    batch = rng.choice([1, 2, 3]) if layout == "batch" else 1
    tokens = sum(lens) + rng.choice([0, 3]) if layout == "packed" else rng.choice(LENS)
    is_square = layout == "packed" or rng.random() < 0.5
    case = {"seed": seed, "layout": layout, "lens": lens, "batch": batch, "q_tokens": tokens}
    case["kv_tokens"] = tokens if is_square else rng.choice(LENS)
    case["heads"] = rng.choice([[1, 1], [2, 2], [4, 2], [4, 1], [6, 3]])
    case["head_dim"] = rng.choice([1, 3, 8, 16, 20])
    case["dtype"] = rng.choice(["float32"] * 4 + ["bfloat16", "float16"])
    side = lambda: rng.choice([None, 0, 1, 3, 8, 50])
    case["causal"] = rng.random() < 0.5
    case["window"] = [side(), side()] if rng.random() < 0.5 else None
    case["soft_cap"] = rng.choice([None, None, 1.0, 5.0])
    case["scale"] = rng.choice([None, None, 0.3, -0.5, 0.0])
    has_ids = layout != "packed" and is_square and rng.random() < 0.4
    case["ids"] = rng.choice(["runs", "mixed"]) if has_ids else None
    case["alibi"], case["sinks"] = rng.random() < 0.3, rng.random() < 0.3
    case["mask"] = _draw_mask(rng, case)
    case["implementation"] = rng.choice([None, "xla", "reference"])
    case["transform"] = rng.choice(["eager", "jit", "vmap", "checkpoint"])
    if case["transform"] == "vmap" and (layout != "batch" or case["mask"] is not None):
        case["transform"] = "jit"
    return case


def _draw_mask(rng: random.Random, case: dict) -> list | None:
    kind = rng.choice([None, None, "array", "value", "not"])
    if kind is None or (kind == "array" and case["layout"] == "packed"):
        return None
    if kind != "array":
        return [kind, masks.draw(rng, _sizes(case))]
    full = (case["batch"], case["heads"][0], case["q_tokens"], case["kv_tokens"])
    shape = [n if rng.random() < 0.7 else 1 for n in full]
    return [kind, shape[rng.choice([0, 0, 1, 2]) :], rng.choice([0.1, 0.6])]


def _sizes(case: dict) -> Sizes:
    rows = len(case["lens"]) if case["layout"] == "packed" else case["batch"]
    return Sizes(*case["heads"], rows, max(case["q_tokens"], case["kv_tokens"], 1))


def check(case: dict) -> None:
    """Raise an AssertionError for a wrong value, or whatever the library raises."""
    rng, case = np.random.default_rng(case["seed"]), dict(case)
    arrays, options, seen = _draw_arguments(case, rng)
    with_nan = {name: _poisoned(case, x) if name in "qkv" else x for name, x in arrays.items()}
    out_weights = rng.normal(size=arrays["q"].shape).astype(np.float32)
    lse_weights = rng.normal(size=(case["batch"], case["heads"][0], case["q_tokens"])).astype(np.float32)
    lse_weights = lse_weights if case["layout"] == "batch" else lse_weights[0]

    def loss(arrays):
        out, lse = _run(case, arrays, options)
        finite = jnp.where(jnp.isneginf(lse), 0.0, lse)
        return (out.astype(jnp.float32) * out_weights).sum() + (finite * lse_weights).sum(), (out, lse)

    loss = jax.checkpoint(loss) if case["transform"] == "checkpoint" else loss
    gradient = jax.grad(loss, has_aux=True)
    actual, outputs = (gradient if case["transform"] == "eager" else jax.jit(gradient))(with_nan)
    with jax.enable_x64(True):
        float64_arrays = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        weights = out_weights.astype(np.float64), lse_weights.astype(np.float64)
        reference_loss = lambda float64_arrays: _reference(case, float64_arrays, seen, *weights)
        expected, reference_outputs = jax.grad(reference_loss, has_aux=True)(float64_arrays)
    for name, a, b in zip(("out", "lse"), outputs, reference_outputs, strict=True):
        _close(case, name, a, b)
    for name, a in actual.items():
        _close(case, f"gradient of {name}", a, expected[name])


def _close(case: dict, name: str, actual, expected) -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected)
    largest = np.abs(np.where(np.isinf(expected), 0, expected)).max(initial=1.0)
    bound = TOLERANCE[case["dtype"]] * largest
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound, err_msg=name)


def _draw_arguments(case: dict, rng: np.random.Generator) -> tuple[dict, dict, np.ndarray]:
    """Return the arrays, the other options, and visibility [batch, q_heads, q_tokens, kv_tokens]."""
    (q_heads, kv_heads), lead = case["heads"], (case["batch"],) if case["layout"] == "batch" else ()
    shapes = {"q": (case["q_tokens"], q_heads), "k": (case["kv_tokens"], kv_heads)}
    shapes["v"] = shapes["k"]
    arrays = {n: rng.normal(size=(*lead, *s, case["head_dim"])) for n, s in shapes.items()}
    arrays = {name: jnp.asarray(x, jnp.float32).astype(case["dtype"]) for name, x in arrays.items()}
    if case["sinks"]:
        arrays["sinks"] = jnp.asarray(rng.normal(size=q_heads), jnp.float32)
    if case["alibi"]:
        arrays["alibi_slopes"] = jnp.asarray(rng.uniform(0.01, 0.5, size=q_heads), jnp.float32)
    options = {name: case[name] for name in ("causal", "soft_cap", "scale")}
    options["window"] = case["window"] and tuple(case["window"])
    i, j = np.arange(case["q_tokens"])[:, None], np.arange(case["kv_tokens"])[None, :]
    seen = np.ones((case["batch"], q_heads, case["q_tokens"], case["kv_tokens"]), bool)
    row = np.zeros(case["q_tokens"], int)
    if case["layout"] == "packed":
        bounds = np.cumsum([0, *case["lens"]])
        options["cu_seqlens"] = jnp.asarray(bounds, jnp.int32)
        row = np.searchsorted(bounds, np.arange(case["q_tokens"]), side="right") - 1
        seen &= (row[:, None] == row[None, :]) & (row < len(case["lens"]))[:, None]
        i = i - bounds[np.minimum(row, len(bounds) - 1)][:, None]
        j = j - bounds[np.minimum(row, len(bounds) - 1)][None, :]
    if case["ids"]:
        ids = rng.integers(-2, 3, (case["batch"], case["q_tokens"]))
        ids = np.cumsum(ids > 1, axis=1) if case["ids"] == "runs" else ids
        options["segment_ids"] = jnp.asarray(ids if case["layout"] == "batch" else ids[0], jnp.int32)
        seen &= (ids[:, :, None] == ids[:, None, :])[:, None]
    if case["mask"] is not None:
        options["mask"], shown, ahead = _draw_mask_arrays(case, rng, i, j, row)
        options["causal"] = case["causal"] = case["causal"] and not ahead
        seen &= shown
    if case["causal"]:
        seen &= j <= i
    left, right = case["window"] or (None, None)
    seen &= True if left is None else i - j <= left
    seen &= True if right is None else j - i <= right
    case["_away"] = (i - j).astype(np.float64)
    case["_has_keys"] = np.broadcast_to(
        row < len(case["lens"]) if case["layout"] == "packed" else case["kv_tokens"] > 0, row.shape
    )
    return arrays, options, np.asarray(seen)


def _draw_mask_arrays(case: dict, rng: np.random.Generator, i, j, row) -> tuple:
    """Return a mask, its visibility, and whether it allows future keys."""
    kind, literal, *density = case["mask"]
    if kind == "array":
        array = rng.random(literal) < density[0]
        return jnp.asarray(array), array, False
    mask, rule = masks.make(literal, _sizes(case))
    q_heads = case["heads"][0]
    if case["layout"] == "packed":
        rows = range(len(case["lens"]))
        visible_pairs = lambda r, h: np.broadcast_to(
            rule(r, h, np.maximum(i, 0), np.maximum(j, 0)), i.shape[:1] + j.shape[1:]
        )
        shown = np.zeros((1, q_heads, *np.broadcast_shapes(i.shape, j.shape)), bool)
        for r in rows:
            for h in range(q_heads):
                shown[0, h][row == r] = visible_pairs(r, h)[row == r]
    else:
        full = np.broadcast_shapes(i.shape, j.shape)
        shown = np.array(
            [[np.broadcast_to(rule(b, h, i, j), full) for h in range(q_heads)] for b in range(case["batch"])]
        ).reshape(case["batch"], q_heads, *full)
    if kind == "not":
        mask, shown = ~mask, ~shown
    return mask, shown, bool(mask.allows_future_keys)


def _poisoned(case: dict, x):
    """Return the array with NaN after the last document."""
    if case["layout"] != "packed":
        return x
    is_padding = jnp.arange(x.shape[0]) >= sum(case["lens"])
    return jnp.where(is_padding[:, None, None], jnp.nan, x).astype(x.dtype)


def _run(case: dict, arrays: dict, options: dict):
    per_head = {name: x for name, x in arrays.items() if name not in "qkv"}
    call = options | per_head | {"return_lse": True, "implementation": case["implementation"]}
    if case["transform"] != "vmap":
        return jattn.attention(arrays["q"], arrays["k"], arrays["v"], **call)
    ids = call.pop("segment_ids", None)
    if ids is None:
        return jax.vmap(lambda q, k, v: jattn.attention(q, k, v, **call))(*(arrays[n] for n in "qkv"))
    attend_segments = lambda q, k, v, ids: jattn.attention(q, k, v, segment_ids=ids, **call)
    return jax.vmap(attend_segments)(*(arrays[name] for name in "qkv"), ids)


def _reference(case: dict, arrays: dict, seen: np.ndarray, out_weights, lse_weights):
    """Return the weighted loss of the softmax formula, and its output and LSE."""
    batched = lambda x: x if case["layout"] == "batch" else x[None]
    group = case["heads"][0] // case["heads"][1]
    q, k, v = batched(arrays["q"]), *(jnp.repeat(batched(arrays[n]), group, axis=2) for n in "kv")
    scale = case["head_dim"] ** -0.5 if case["scale"] is None else case["scale"]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if case["soft_cap"] is not None:
        scores = case["soft_cap"] * jnp.tanh(scores / case["soft_cap"])
    if case["alibi"]:
        scores = scores - arrays["alibi_slopes"][None, :, None, None] * case["_away"][None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    sinks = jnp.full(case["heads"][0], -jnp.inf) if not case["sinks"] else arrays["sinks"]
    sinks = jnp.where(case["_has_keys"], sinks[:, None], -jnp.inf)  # [q_heads, q_tokens]
    sinks = jnp.broadcast_to(sinks, scores.shape[:3])[..., None]
    is_any = np.any(seen, axis=-1) | (case["sinks"] & case["_has_keys"])
    scores = jnp.where(is_any[..., None], jnp.concatenate([scores, sinks], axis=-1), 0.0)
    lse = jax.nn.logsumexp(scores, axis=-1)
    probs = jnp.where(seen, jnp.exp(scores - lse[..., None])[..., :-1], 0.0)
    out, lse = jnp.einsum("bhqk,bkhd->bqhd", probs, v), jnp.where(is_any, lse, -jnp.inf)
    out, lse = (out, lse) if case["layout"] == "batch" else (out[0], lse[0])
    return (out * out_weights).sum() + (jnp.where(jnp.isneginf(lse), 0.0, lse) * lse_weights).sum(), (
        out,
        lse,
    )
