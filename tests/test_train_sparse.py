"""examples.train_sparse: training over whole texts and token-by-token decoding agree, and the script runs."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jattn
from examples.train_sparse import model as sparse
from examples.train_sparse.patterns import BLOCK, PATTERNS, TOP_K, WINDOW
from examples.train_tiny import HF_CONFIG
from jattn.models import DecoderConfig

pytestmark = pytest.mark.kernels  # together longer than the fast tests have
TOKENS = 90


@pytest.mark.parametrize("name", PATTERNS)
def test_paged_decode_equals_the_training_forward_pass(name):
    assert max(TOP_K * BLOCK, WINDOW) < TOKENS
    pattern = PATTERNS[name]
    config = DecoderConfig.from_hf(HF_CONFIG | {"num_hidden_layers": 1})
    graph, params = sparse.init(config, 0)
    noise = 0.3 * jax.random.normal(jax.random.key(5), params.gates.shape)
    params = params._replace(gates=noise)
    tokens = jax.random.randint(jax.random.key(1), (1, TOKENS), 0, 256)

    @jax.jit
    def whole(params):
        model, hidden, _ = sparse.run_layers(graph, params, tokens, pattern)
        return model.logits(hidden)

    @jax.jit
    def stepped(params, states, metadata):
        def one(carry, token):
            states, metadata = carry
            scores, states = sparse.step(graph, params, states, metadata, token[None], pattern)
            return (states, jattn.advance(metadata)), scores[0]

        return jax.lax.scan(one, (states, metadata), tokens[0])[1]

    with jax.numpy_dtype_promotion("standard"):
        blocks = -(-TOKENS // BLOCK)
        model = nnx.merge(graph, params.model)
        states = sparse.create_layer_states(model, 1, 1 + blocks)
        metadata = jattn.build_batch_metadata([1], [1], [range(1, 1 + blocks)], block_size=BLOCK)
        expected, actual = whole(params), stepped(params, states, metadata)
    np.testing.assert_allclose(actual, expected, atol=2e-4)


def test_patterns_differ():
    config = DecoderConfig.from_hf(HF_CONFIG | {"num_hidden_layers": 1})
    graph, params = sparse.init(config, 0)
    windows = jax.random.randint(jax.random.key(1), (1, TOKENS + 1), 0, 256)
    with jax.numpy_dtype_promotion("standard"):
        run = lambda pattern: jax.jit(functools.partial(sparse.bits, graph, pattern=pattern))(params, windows)
        losses = [float(run(pattern)[0, -1]) for pattern in PATTERNS.values()]
    assert len(set(losses)) == len(losses)


def test_script_writes_losses_and_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from examples.train_sparse.__main__ import main

    (tmp_path / "sources").mkdir()
    for name in "abcdefghijkl":
        (tmp_path / "sources" / f"{name}.py").write_text(f"def {name}():\n    return 0\n" * 200)
    options = [
        "--steps",
        "5",
        "--batch",
        "2",
        "--tokens",
        "32",
        "--layers",
        "1",
        "--patterns",
        "window",
        "DSA",
    ]
    with jax.numpy_dtype_promotion("standard"):
        main(["--out", str(tmp_path), "--data", str(tmp_path / "sources"), *options])
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert [*losses] == ["window", "DSA"]
    for history in losses.values():
        assert history["tokens"] == [64, 128, 192, 256, 320]
        assert history["bits"][-1] < history["bits"][0]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["pattern"] for row in rows] == ["window", "DSA"]
    for row in rows:
        assert row["largest_difference"] < 1e-3
        assert 0 < row["held_out_bits_cached"] < 9
        assert (row["steps"], row["tokens"]) == (5, 320)
    for name in ("loss", "decode", "masks"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("def main(argv=None)") == 2


def curve(implementation, dtype):
    """Return the losses of 30 steps of the dense recipe on the same fixed texts."""
    config = DecoderConfig.from_hf(HF_CONFIG | {"num_hidden_layers": 2})
    graph, params = sparse.init(config, 0)
    texts = jnp.asarray(np.random.default_rng(3).choice(64, (4, 257)), jnp.int32)
    attend = functools.partial(jattn.attention, causal=True, implementation=implementation)
    pattern = dataclasses.replace(PATTERNS["dense"], train=lambda q, k, v, selection: attend(q, k, v))
    optimizer = optax.adam(3e-3)

    def loss_of(params):
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return sparse.bits(graph, cast, texts, pattern).mean()

    @jax.jit
    def update(params, moments):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    moments, losses = optimizer.init(params), []
    for _ in range(30):
        params, moments, loss = update(params, moments)
        losses.append(float(loss))
    return np.asarray(losses)


@pytest.mark.gpu
def test_loss_curve_of_the_kernels_is_as_close_to_float32_as_xlas():
    """A kernel curve is no further from float32's than two XLA curves in 16 bits."""
    with jax.numpy_dtype_promotion("standard"):
        exact, plain = curve("xla", jnp.float32), curve("xla", jnp.bfloat16)
        kernel_curve = curve("mosaic_gpu", jnp.bfloat16)
    assert exact[-1] < exact[0] - 1
    assert np.abs(kernel_curve - exact).max() <= 2 * np.abs(plain - exact).max() + 0.01
