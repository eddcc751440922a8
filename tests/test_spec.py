"""Specs are hashable values that reject invalid fields by name."""

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.cascade import why_not_cascade


def attention(**changes):
    return jattn.AttentionSpec(**({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8} | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"num_q_heads must be a multiple of num_kv_heads \(3\), got 4"),
        ({"head_dim": 0}, "head_dim must be positive, got 0"),
        ({"window": (-1, 0)}, "window's left side must be None or at least 0, got -1"),
        ({"window": (0, -2)}, "window's right side must be None or at least 0, got -2"),
        ({"soft_cap": 0.0}, r"soft_cap must be positive \(None disables it\), got 0.0"),
        ({"chunk_size": 0}, r"chunk_size must be positive \(None disables it\), got 0"),
        ({"chunk_size": 2**31}, "chunk_size must be at most 134217728 .*, got 2147483648"),
        ({"query_quantization": "int4"}, "query_quantization must be one of None, .*, got 'int4'"),
        ({"scale": float("nan")}, "scale must be finite or None, got nan"),
    ],
)
def test_invalid_attention_spec_is_rejected_by_field(change, message):
    with pytest.raises(ValueError, match=message):
        attention(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_decodes": -1}, "max_decodes must be at least 0, got -1"),
        ({"decode_query_len": 0}, "decode_query_len must be positive, got 0"),
        ({"max_prefill_tokens": 8}, "max_prefills must be positive with 8 prefill tokens, got 0"),
        ({"max_blocks": -1}, "max_blocks must be at least 0, got -1"),
    ],
)
def test_invalid_bucket_is_rejected_by_field(change, message):
    with pytest.raises(ValueError, match=message):
        jattn.Bucket(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size must be positive, got 0"),
        ({"vert_stride": 0}, "vert_stride must be positive, got 0"),
        ({"local_blocks": -1}, "local_blocks must be at least 0, got -1"),
        ({"tp_rank": 2, "tp_size": 2}, r"tp_rank must lie in \[0, 2\), got 2"),
    ],
)
def test_invalid_sparsity_is_rejected_by_field(change, message):
    with pytest.raises(ValueError, match=message):
        jattn.LocalStrided(**change)


def test_window_longer_than_any_request_is_unlimited():
    assert attention(window=(2**31 - 1, 0)) == attention(window=(None, 0))
    assert attention(window=(2**63 - 1, 2**63 - 1)).window is None
    q = jnp.ones((1, 3, 1, 8))
    _, lse = jattn.attention(q, q, q, window=(None, 2**31 - 1), return_lse=True, implementation="xla")
    np.testing.assert_allclose(lse, 8**0.5 + np.log(3), rtol=1e-6)


def test_a_window_without_sides_is_none():
    """So that layers that refuse windows accept it."""
    spec = attention(window=(None, None))
    assert spec == attention()
    assert why_not_cascade(spec) is None


def test_specs_are_values():
    assert attention(window=(3, 0)) == attention(window=(3, 0))
    assert len({attention(), attention(), attention(soft_cap=1.0)}) == 2
    assert attention().softmax_scale == 8**-0.5
    assert attention(scale=2.0).softmax_scale == 2.0
    bucket = jattn.Bucket(max_decodes=2, decode_query_len=3, max_prefills=1, max_prefill_tokens=10)
    assert (bucket.max_reqs, bucket.max_decode_tokens, bucket.max_tokens) == (3, 6, 16)


@pytest.mark.usefixtures("types_unchecked")
class TestTypes:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"window": 1024},
                r"window must be \(left, right\) \(vLLM's sliding_window=1024 is \(1023, 0\)\), got",
            ),
            ({"window": (3,)}, r"window must be \(left, right\), got \(3,\)"),
            ({"window": "ab"}, r"window must be \(left, right\), got 'ab'"),
            ({"window": (3.0, 0)}, "window's left side must be None or an int, got 3.0"),
            ({"window": (3, True)}, "window's right side must be None or an int, got True"),
            ({"head_dim": 64.0}, "head_dim must be an int, got 64.0"),
            ({"num_q_heads": True}, "num_q_heads must be an int, got True"),
            ({"num_kv_heads": None}, "num_kv_heads must be an int, got None"),
            ({"chunk_size": 8.0}, "chunk_size must be an int, got 8.0"),
            ({"scale": "0.1"}, "scale must be a number, got '0.1'"),
            ({"soft_cap": True}, "soft_cap must be a number, got True"),
            ({"soft_cap": float("inf")}, "soft_cap must be finite or None, got inf"),
            ({"causal": 1}, "causal must be True or False, got 1"),
            ({"batch_invariant": None}, "batch_invariant must be True or False, got None"),
            ({"sparsity": 3}, "sparsity must be a mask of jattn.masks, got a int"),
        ],
    )
    def test_attention_spec_types_are_checked(self, change, message):
        with pytest.raises(ValueError, match=message):
            attention(**change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_blocks": 2.0}, "num_blocks must be an int, got 2.0"),
            ({"block_size": True}, "block_size must be an int, got True"),
            ({"head_dim": "16"}, "head_dim must be an int, got '16'"),
            ({"dtype": jnp.int8}, "dtype must be a float type .*'int8_token_head'.*, got int8"),
            ({"dtype": "bfloat17"}, "dtype must be a dtype, got 'bfloat17'"),
            ({"quantization": 8}, "quantization=8 is unknown.* must be one of None, "),
        ],
    )
    def test_cache_spec_types_are_checked(self, change, message):
        with pytest.raises(ValueError, match=message):
            jattn.CacheSpec(**({"num_blocks": 2, "num_kv_heads": 2, "head_dim": 16} | change))

    @pytest.mark.parametrize("name", ["max_decodes", "max_prefills", "max_prefill_tokens", "max_blocks"])
    def test_bucket_types_are_checked(self, name):
        for value in (1.0, True):
            with pytest.raises(ValueError, match=f"{name} must be an int, got {value}"):
                jattn.Bucket(**{name: value})
        with pytest.raises(ValueError, match=r"decode_query_len must be an int, got None"):
            jattn.Bucket(decode_query_len=None)

    def test_numpy_numbers_become_python_numbers(self):
        spec = attention(
            head_dim=np.int64(64), window=[np.int32(3), None], scale=np.float32(0.5), causal=np.bool_(True)
        )
        assert spec == attention(head_dim=64, window=(3, None), scale=0.5)
        assert [type(x) for x in (spec.head_dim, *spec.window, spec.scale, spec.causal)] == [
            int,
            int,
            type(None),
            float,
            bool,
        ]
        assert type(jattn.Bucket(max_decodes=np.int32(4)).max_decodes) is int
        assert type(jattn.CacheSpec(num_blocks=np.int64(4), num_kv_heads=2, head_dim=16).num_blocks) is int


class TestQuantizationNames:
    def cache(self, quantization):
        return jattn.CacheSpec(num_blocks=2, num_kv_heads=2, head_dim=16, quantization=quantization)

    @pytest.mark.parametrize(
        ("vllm", "quantization"),
        [
            ("auto", None),
            ("fp8", "fp8_e4m3"),
            ("fp8_e4m3", "fp8_e4m3"),
            ("fp8_e5m2", "fp8_e5m2"),
            ("int8", "int8_token_head"),
            ("fp8_per_token_head", "fp8_e4m3_token_head"),
            ("int8_per_token_head", "int8_token_head"),
        ],
    )
    def test_vllm_names_are_accepted(self, vllm, quantization):
        assert self.cache(vllm) == self.cache(quantization)
        assert self.cache(vllm).quantization == quantization

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("int4_per_token_head", "int8_token_head"),
            ("fp8_inc", "fp8_e5m2"),
            ("int8_k", "int8_k_only"),
            ("fp8-e4m3", "fp8_e4m3"),
        ],
    )
    def test_unknown_names_are_rejected_with_the_closest(self, name, nearest):
        with pytest.raises(
            ValueError, match=f"='{name}' is unknown. Did you mean '{nearest}'.*'auto', 'fp8', "
        ):
            self.cache(name)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("num_heads", "num_q_heads="),
        ("sliding_window", r"window=\(sliding_window - 1, 0\)"),
        ("sm_scale", "scale="),
    ],
)
def test_names_of_other_libraries_are_rejected_with_the_name_here(name, replacement):
    with pytest.raises(TypeError, match=rf"unexpected argument '{name}'. Use {replacement}\."):
        jattn.AttentionSpec(num_kv_heads=1, head_dim=8, **{name: 1})
