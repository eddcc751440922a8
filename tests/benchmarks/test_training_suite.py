"""The benchmark of a layer's forward and backward pass: its rows, and which kernels count as attention."""

import jax.numpy as jnp
import pytest

from benchmarks.kernels import training

CASE = training.Case(name="tiny", lens=(33,), heads=(2, 1, 16), per_head="sinks")


@pytest.fixture
def rows(monkeypatch):
    """Return a function that runs cases with fixed times."""
    times = {"us": 3.0, "spread_us": [3.0, 3.0], "kernels_us": {"nvjet_sm90_tss": 1.0, "varlen_prefill": 2.0}}
    monkeypatch.setattr(training, "kernel_times", lambda run, *arrays, iterations: (run(*arrays), times))
    return lambda *cases: list(training.measure_all(list(cases)))


@pytest.mark.kernels  # five seconds
def test_row_has_the_16_bit_error(rows):
    (row,) = rows(CASE)
    assert 1e-4 < float(row["error"]) <= training.TOLERANCE * float(row["xla_error"]) < 0.03
    assert (row["us"], row["attention_us"]) == (3.0, 2.0)


@pytest.mark.kernels  # five seconds
def test_wrong_gradient_gets_no_row(rows, monkeypatch, capsys):
    original = training.ours

    def faulty(case, implementation=None):
        attend = original(case, implementation)
        if implementation == "xla":
            return attend
        return lambda q, k, v, mask: attend(q, k, v + jnp.asarray(0.05, v.dtype), mask=mask)

    monkeypatch.setattr(training, "ours", faulty)
    assert rows(CASE) == []
    assert "the largest error of ours must be at most 2.0 times" in capsys.readouterr().out


@pytest.mark.kernels  # five seconds
def test_unsupported_peer_loses_its_own_columns_only(rows, monkeypatch):
    def refuses(q, k, v, mask):
        raise NotImplementedError("Unsupported sequence length")

    monkeypatch.setattr(training, "cudnn", lambda case: refuses)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    (row,) = rows(CASE)
    assert row["cudnn"] == "NotImplementedError: Unsupported sequence length"
    assert row["us"] == 3.0


def test_case_that_cannot_be_lowered_loses_its_own_row_only(rows, monkeypatch, capsys):
    def fails(case):
        raise NotImplementedError("no such case")

    monkeypatch.setattr(training, "lower", fails)
    assert rows(CASE) == []
    assert "tiny: NotImplementedError: no such case" in capsys.readouterr().out


def test_documents_are_padded_for_cudnn(monkeypatch):
    seen = []
    monkeypatch.setattr("jax.nn.dot_product_attention", lambda q, *_, **__: seen.append(q.shape) or q)
    q = jnp.zeros((150, 1, 8))
    out = training.cudnn(training.Case(name="documents", lens=(20, 130)))(q, q, q, None)
    assert (seen, out.shape) == ([(2, 256, 1, 8)], q.shape)


def test_attention_time_excludes_the_projections():
    attention = {
        "varlen_prefill_mosaic_gpu_kernel": 1.0,
        "varlen_backward_mosaic_gpu_kernel": 2.0,
        "varlen_backward_queries_mosaic_gpu_kernel": 4.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_29_64x128x128_kernel0_0": 8.0,
        "void cudnn::fusion::compute_dot_do_o_specialized<cutlass::bfloat16_t>": 16.0,
        "loop_transpose_fusion": 32.0,
    }
    products = {
        "nvjet_sm90_tss_128x256_64x4_2x1_v_bz_coopA_NNN": 64.0,
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": 128.0,
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>": 256.0,
        "gemm_fusion_dot_general_1": 512.0,
    }
    assert training.attention_us(attention | products) == sum(attention.values())
