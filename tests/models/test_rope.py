"""Every rope type matches its definition, computed in float64 with complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import AttentionSpec, PagedAttention, build_batch_metadata
from jattn.models.rope import Rope

HEAD_DIM, ORIGINAL, LONGEST = 16, 64, 512
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 6.0]}


def plain(theta=10000.0, dim=HEAD_DIM):
    return np.array([1 / theta ** (2 * i / dim) for i in range(dim // 2)])


def llama3(factor=8.0, low=1.0, high=4.0):
    out = []
    for freq in plain():
        wavelength = 2 * np.pi / freq
        smooth = (ORIGINAL / wavelength - low) / (high - low)
        middle = (1 - smooth) * freq / factor + smooth * freq
        out.append(
            freq if wavelength < ORIGINAL / high else freq / factor if wavelength > ORIGINAL / low else middle
        )
    return np.array(out)


def yarn(factor, fast=32, slow=1, truncate=True, theta=10000.0):
    pair = [HEAD_DIM * np.log(ORIGINAL / (turns * 2 * np.pi)) / (2 * np.log(theta)) for turns in (fast, slow)]
    low, high = (np.floor(pair[0]), np.ceil(pair[1])) if truncate else pair
    low, high = max(low, 0), min(high, HEAD_DIM - 1)
    freq, out = plain(theta), []
    for i in range(HEAD_DIM // 2):
        ramp = min(max((i - low) / (high - low), 0), 1)
        out.append(freq[i] / factor * ramp + freq[i] * (1 - ramp))
    return np.array(out)


def dynamic(length, factor=4.0):
    base = 10000.0 * (factor * max(length, LONGEST) / LONGEST - (factor - 1)) ** (HEAD_DIM / (HEAD_DIM - 2))
    return plain(base)


def longrope(length):
    factors = FACTORS["long_factor" if length > ORIGINAL else "short_factor"]
    return plain(dim=12) / factors


def grown(factor):
    return np.sqrt(1 + np.log(factor) / np.log(ORIGINAL))


LONGROPE = {"rope_type": "longrope", "partial_rotary_factor": 0.75, **FACTORS}
YARN = {"rope_type": "yarn", "factor": 8.0}
# name -> a config's dictionary, and the frequencies and the factor of a request of a length
CASES = {
    "default": ({}, lambda n: (plain(), 1)),
    "theta": ({"rope_theta": 500.0}, lambda n: (plain(500.0), 1)),
    "partial": ({"partial_rotary_factor": 0.5}, lambda n: (plain(dim=8), 1)),
    "linear": ({"type": "linear", "factor": 4.0}, lambda n: (plain() / 4, 1)),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        lambda n: (llama3(), 1),
    ),
    "yarn": (YARN, lambda n: (yarn(8.0), 0.1 * np.log(8) + 1)),
    "yarn_implied_factor": ({"rope_type": "yarn"}, lambda n: (yarn(LONGEST / ORIGINAL), 0.1 * np.log(8) + 1)),
    "yarn_gpt_oss": (
        YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5, "rope_theta": 150000.0},
        lambda n: (yarn(8.0, 4, 0.5, False, 150000.0), 0.1 * np.log(8) + 1),
    ),
    "yarn_attention": (YARN | {"attention_factor": 0.7}, lambda n: (yarn(8.0), 0.7)),
    "yarn_mscale": (
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
        lambda n: (yarn(8.0), (0.07 * np.log(8) + 1) / (0.03 * np.log(8) + 1)),
    ),
    "yarn_no_scale": (YARN | {"factor": 1.0}, lambda n: (plain(), 1)),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, lambda n: (dynamic(n), 1)),
    "longrope": (LONGROPE, lambda n: (longrope(n), grown(LONGEST / ORIGINAL))),
    "longrope_factor": (LONGROPE | {"factor": 32.0}, lambda n: (longrope(n), grown(32))),
    "longrope_attention": (LONGROPE | {"attention_factor": 1.25}, lambda n: (longrope(n), 1.25)),
    "longrope_old_name": (
        {"type": "su", "partial_rotary_factor": 0.75, **FACTORS, "short_mscale": 1.1, "long_mscale": 1.3},
        lambda n: (longrope(n), 1.3 if n > ORIGINAL else 1.1),
    ),
}


def make(name, **more):
    return Rope.from_hf(
        CASES[name][0], head_dim=HEAD_DIM, default_context=ORIGINAL, max_context=LONGEST, **more
    )


def rotate_as_complex(x, positions, lengths, name, *, interleaved=False):
    """Return the definition: each pair is a complex number times e^(i angle)."""
    x = np.array(x, np.float64)
    for token, (position, length) in enumerate(zip(positions, lengths, strict=True)):
        freq, amplitude = CASES[name][1](int(length))
        first, second = slice(0, len(freq)), slice(len(freq), 2 * len(freq))
        if interleaved:
            first, second = slice(0, 2 * len(freq), 2), slice(1, 2 * len(freq), 2)
        pairs = x[token][:, first] + 1j * x[token][:, second]
        pairs = pairs * amplitude * np.exp(1j * int(position) * freq)
        x[token][:, first], x[token][:, second] = pairs.real, pairs.imag
    return x


POSITIONS = np.array([0, 1, 5, 40, 63, 64, 200, 511, 700], np.int32)
X = np.random.default_rng(0).normal(size=(len(POSITIONS), 3, HEAD_DIM)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rotation_matches_transformers(name, interleaved):
    rope = make(name, interleaved=interleaved)
    for lengths in (POSITIONS + 1, np.full_like(POSITIONS, 30), np.full_like(POSITIONS, 2000)):
        actual = jax.jit(rope)(jnp.asarray(X), jnp.asarray(POSITIONS), jnp.asarray(lengths))
        expected = rotate_as_complex(X, POSITIONS, lengths, name, interleaved=interleaved)
        np.testing.assert_allclose(actual, expected, atol=3e-4)  # angles of f32 at position 700
        np.testing.assert_allclose(actual[:4], expected[:4], atol=2e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_lengths_default_to_position_plus_one(name):
    rope = make(name)
    without = rope(jnp.asarray(X), jnp.asarray(POSITIONS))
    assert jnp.array_equal(without, rope(jnp.asarray(X), jnp.asarray(POSITIONS), jnp.asarray(POSITIONS + 1)))


@pytest.mark.parametrize("name", CASES)
def test_only_two_types_need_lengths(name):
    rope = make(name)
    first, second = (
        rope(jnp.asarray(X), jnp.asarray(POSITIONS), jnp.full_like(POSITIONS, n)) for n in (9, 4000)
    )
    assert rope.needs_lengths == (not np.array_equal(first, second))


@pytest.mark.parametrize("name", ["default", "longrope"])
def test_rotation_keeps_the_16_bit_dtype(name):
    out = make(name, interleaved=True)(jnp.asarray(X, jnp.bfloat16), jnp.asarray(POSITIONS))
    assert out.dtype == jnp.bfloat16


def test_interleaved_pairs_are_rotated_in_f32():
    """Sines and cosines are not rounded to 16 bits; the result is rounded once."""
    x = jnp.asarray(X, jnp.bfloat16)
    actual = make("default", interleaved=True)(x, jnp.asarray(POSITIONS))
    expected = make("default", interleaved=True)(x.astype(jnp.float32), jnp.asarray(POSITIONS))
    assert jnp.array_equal(actual, expected.astype(jnp.bfloat16))


def layer_config(rope):
    spec = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=HEAD_DIM)
    return PagedAttention(8, spec, rngs=nnx.Rngs(0), rope=rope)


def attend(rope, query_lens, seq_lens):
    """Return a layer's outputs without a cache, and its metadata."""
    metadata = build_batch_metadata(query_lens, seq_lens, [[1] * 9] * len(seq_lens), block_size=16)
    x = jax.random.normal(jax.random.key(1), (metadata.bucket.max_tokens, 8))
    out, _ = layer_config(rope)(x, None, metadata, metadata.positions)
    return out


@pytest.mark.kernels
def test_a_layer_rotates_each_request_by_its_own_length():
    """All tokens of a long prompt use the long factors; those of a short prompt in the same step do not."""
    rope = make("longrope")
    rope_of = lambda side: Rope.from_hf(
        LONGROPE | {"short_factor": FACTORS[side], "long_factor": FACTORS[side]},
        head_dim=HEAD_DIM,
        default_context=ORIGINAL,
        max_context=LONGEST,
    )
    long_and_short = attend(rope, [100, 20], [100, 20])
    np.testing.assert_allclose(
        long_and_short[:100], attend(rope_of("long_factor"), [100, 20], [100, 20])[:100], atol=1e-6
    )
    np.testing.assert_allclose(
        long_and_short[100:120], attend(rope_of("short_factor"), [100, 20], [100, 20])[100:120], atol=1e-6
    )
    assert not np.allclose(
        long_and_short[:100], attend(rope_of("short_factor"), [100, 20], [100, 20])[:100], atol=1e-3
    )


REFUSED = {
    "rope_type 'mrope': not implemented. Supported: default, linear": {"rope_type": "mrope"},
    "rope_type 'dual_chunk': not implemented": {"rope_type": "dual_chunk"},
    "rope parameter mrope_section: not a key of rope type 'default'": {"mrope_section": [1, 2]},
    "rope parameter dual_chunk_attention_config: not a key": {"dual_chunk_attention_config": {}},
}
WRONG = {
    "rope parameter factor must be given for 'linear', got": {"rope_type": "linear"},
    "rope parameter factor must be given for 'dynamic', got": {"rope_type": "dynamic"},
    "rope parameter high_freq_factor must be given": {
        "rope_type": "llama3",
        "factor": 2,
        "low_freq_factor": 1,
    },
    "rope parameter long_factor must be given": {"rope_type": "longrope", "short_factor": [1.0] * 8},
    r"partial_rotary_factor=0\.2 rotates 3 elements of a head, .* an even number from 2 to head_dim \(16\)": {
        "partial_rotary_factor": 0.2
    },
    r"partial_rotary_factor=1\.5 rotates 24 elements": {"partial_rotary_factor": 1.5},
    r"partial_rotary_factor=0\.125 rotates 2 elements .* from 4 to": {
        "rope_type": "dynamic",
        "factor": 2.0,
        "partial_rotary_factor": 0.125,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_ropes_are_refused_by_name(message):
    with pytest.raises(NotImplementedError, match=message):
        Rope.from_hf(REFUSED[message], head_dim=HEAD_DIM, default_context=ORIGINAL)


@pytest.mark.parametrize("message", WRONG)
def test_invalid_numbers_are_refused(message):
    with pytest.raises(ValueError, match=message):
        Rope.from_hf(WRONG[message], head_dim=HEAD_DIM, default_context=ORIGINAL)
