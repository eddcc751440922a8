"""Masks, soft cap, ALiBi and sinks against recorded results of vLLM, through the reference and XLA."""

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.implementations import reference

IMPLEMENTATIONS = ["reference", "xla"]


def probabilities(query, key, implementation, spec=None, query_lens=None, **modifiers):
    """Return the probabilities of one head; query [tokens, dim], key [keys, dim], values are one-hot rows."""
    keys, dim = key.shape
    spec = spec or jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=keys, scale=1.0)
    pad = lambda x: jnp.pad(jnp.asarray(x, jnp.float32), ((0, 0), (0, keys - dim)))[:, None, :]
    metadata = jattn.build_batch_metadata([len(query)], [keys], None)
    kv = jattn.PackedKV(k=pad(key), v=jnp.eye(keys)[:, None, :], kv_start_loc=jnp.zeros(1, jnp.int32))
    out, lse = jattn.attend(
        pad(query), kv, metadata, spec, implementation=implementation, return_lse=True, **modifiers
    )
    return np.asarray(out)[:, 0], np.asarray(lse)[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestScores:
    def test_soft_cap_equals_vllm(self, metadata_cases, implementation):
        for case in metadata_cases["soft_cap"]:
            spec = jattn.AttentionSpec(
                num_q_heads=1, num_kv_heads=1, head_dim=2, scale=1.0, soft_cap=case["cap"] or None
            )
            key = np.asarray([[case["score"]], [0.0]])
            probs, _ = probabilities(np.ones((1, 1)), key, implementation, spec)
            np.testing.assert_allclose(
                np.log(probs[0, 0] / probs[0, 1]), case["expected"], rtol=1e-4, atol=1e-6
            )

    @pytest.mark.kernels
    def test_sliding_windows_equal_vllm(self, metadata_cases, implementation):
        for case in metadata_cases["sliding_window_mask"]:
            w, keys = case["sliding_window"], case["kv_len"]
            is_bidirectional = case["encoder_only"]
            spec = jattn.AttentionSpec(
                num_q_heads=1,
                num_kv_heads=1,
                head_dim=keys,
                causal=not is_bidirectional,
                window=(w - 1, w - 1 if is_bidirectional else 0),
            )
            probs, _ = probabilities(
                np.zeros((case["query_len"], 1)), np.zeros((keys, 1)), implementation, spec
            )
            assert [np.flatnonzero(row).tolist() for row in probs] == case["attended"]

    @pytest.mark.kernels
    def test_alibi_equals_vllm(self, metadata_cases, implementation):
        case = metadata_cases["alibi_bias"][0]
        context, new = case["context_len"], case["query_len"]
        keys = context + new
        for is_sqrt, name in ((False, "standard_relative_bias"), (True, "sqrt_alibi_bias")):
            spec = jattn.AttentionSpec(
                num_q_heads=1, num_kv_heads=1, head_dim=keys, causal=False, sqrt_alibi=is_sqrt
            )
            slopes = jnp.asarray([case["slope"]])
            probs, lse = probabilities(
                np.zeros((new, 1)), np.zeros((keys, 1)), implementation, spec, alibi_slopes=slopes
            )
            np.testing.assert_allclose(np.log(probs) + lse[:, None], case[name], atol=1e-5)
        np.testing.assert_allclose(case["paged_decode_bias_last_token"], case["standard_relative_bias"][-1])

    def test_sinks_equal_vllm(self, metadata_cases, implementation):
        for case in metadata_cases["attention_sinks"]:
            scores = np.asarray(case["scores"])[:, None]
            probs, lse = probabilities(
                np.ones((1, 1)), scores, implementation, sinks=jnp.asarray([case["sink"]])
            )
            np.testing.assert_allclose(probs[0], case["expected_probs"], rtol=1e-5)
            np.testing.assert_allclose(lse[0], case["expected_lse_with_sink"], rtol=1e-6)

    def test_scale_of_fp8_keys_multiplies_the_softmax_scale(self, metadata_cases, implementation):
        """vLLM's bmm1 scale with 16-bit queries is softmax scale x k_scale."""
        case = next(c for c in metadata_cases["fp8_bmm1_scale"] if c["q_dtype"] == "bf16")
        spec = jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, scale=case["scale"])
        shape = (1, 2, 1, 1)
        cache = jattn.PagedCache(
            k=jnp.asarray([2.0, 0.0]).reshape(shape).astype(jnp.float8_e4m3fn),
            v=jnp.asarray([1.0, 0.0]).reshape(shape).astype(jnp.float8_e4m3fn),
            k_scale=jnp.float32(case["k_scale"]),
        )
        metadata = jattn.build_batch_metadata([1], [2], [[0]], block_size=2)
        out = jattn.attend(jnp.ones((1, 1, 1)), cache, metadata, spec, implementation=implementation)
        expected = 1 / (1 + np.exp(-2 * case["expected"]))
        np.testing.assert_allclose(out[0, 0, 0], expected, rtol=1e-6)


@pytest.mark.kernels
@pytest.mark.parametrize("is_prefill", [True, False])
def test_local_strided_blocks_equal_vllm(metadata_cases, is_prefill):
    """The mask of attention contains the block lists that the pattern functions return."""
    name = "blocksparse_prefill_block_pattern" if is_prefill else "blocksparse_decode_block_pattern"
    for case in metadata_cases[name]:
        if is_prefill:
            q_heads = kv_heads = case["num_heads_total"]
            tp = {}
            size = 2
            positions = np.arange(case["num_blocks"]) * size + size - 1
            keys = case["num_blocks"] * size
        else:
            q_heads, kv_heads = case["num_heads_per_rank"], case["num_kv_heads_per_rank"]
            tp = {"tp_size": case["tp_size"], "tp_rank": case["tp_rank"]}
            size = case["sparse_block_size"]
            positions, keys = np.asarray([case["seq_len"] - 1]), case["seq_len"]
        sparsity = jattn.LocalStrided(
            block_size=size,
            local_blocks=case["local_blocks"],
            vert_stride=case["vert_stride"],
            homo_head=case["homo_head"],
            homo_head_group=case.get("homo_head_group", False),
            **tp,
        )
        spec = jattn.AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=8, sparsity=sparsity)
        visible = reference.is_visible(
            spec,
            sparsity,
            jnp.int32(0),
            jnp.asarray(positions),
            jnp.arange(keys),
            jnp.full(len(positions), is_prefill),
        )
        for head in range(q_heads):
            blocks = [
                sorted(set((np.flatnonzero(row) // size).tolist())) for row in np.asarray(visible[head])
            ]
            expected = case["attended_k_blocks"][head]
            assert blocks == (expected if is_prefill else [expected])
