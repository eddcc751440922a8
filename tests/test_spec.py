"""Specs are hashable values that refuse nonsense by name."""

import pytest

import jattn


def attention(**changes):
    return jattn.AttentionSpec(**({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8} | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"num_q_heads must be a multiple of num_kv_heads \(3\), got 4"),
        ({"head_dim": 0}, "head_dim must be positive, got 0"),
        ({"window": (-1, 0)}, "window's left side must be None or at least 0, got -1"),
        ({"window": (0, -2)}, "window's right side must be None or at least 0, got -2"),
        ({"soft_cap": 0.0}, r"soft_cap must be positive \(None switches it off\), got 0.0"),
        ({"chunk_size": 0}, r"chunk_size must be positive \(None switches it off\), got 0"),
        ({"query_quantization": "int4"}, "query_quantization must be one of None, .*, got 'int4'"),
        ({"scale": float("nan")}, "scale must be finite or None, got nan"),
    ],
)
def test_an_attention_spec_names_what_is_wrong(change, message):
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
def test_a_bucket_names_what_is_wrong(change, message):
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
def test_a_sparsity_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        jattn.LocalStrided(**change)


def test_specs_are_values():
    assert attention(window=(3, 0)) == attention(window=(3, 0))
    assert len({attention(), attention(), attention(soft_cap=1.0)}) == 2
    assert attention().softmax_scale == 8**-0.5
    assert attention(scale=2.0).softmax_scale == 2.0
    bucket = jattn.Bucket(max_decodes=2, decode_query_len=3, max_prefills=1, max_prefill_tokens=10)
    assert (bucket.max_reqs, bucket.max_decode_tokens, bucket.max_tokens) == (3, 6, 16)
