"""The suite of a layer's two passes: what it compares, and what it calls attention."""

import jax.numpy as jnp
import pytest

from benchmarks.kernels import training
from benchmarks.tables import kernels

CASE = training.Case(name="tiny", lens=(33,), heads=(2, 1, 16), per_head="sinks")


@pytest.fixture
def rows(monkeypatch):
    """Runs cases without a GPU's clock; yields the function that does."""
    times = {"us": 3.0, "spread_us": [3.0, 3.0], "kernels_us": {"nvjet_sm90_tss": 1.0, "varlen_prefill": 2.0}}
    monkeypatch.setattr(training, "kernel_times", lambda run, *arrays, iterations: (run(*arrays), times))
    return lambda *cases: list(training.measure_all(list(cases)))


@pytest.mark.kernels  # five seconds
def test_a_row_says_what_16_bits_lose(rows):
    (row,) = rows(CASE)
    assert 1e-4 < float(row["error"]) <= training.TOLERANCE * float(row["xla_error"]) < 0.03
    assert (row["us"], row["attention_us"]) == (3.0, 2.0)


@pytest.mark.kernels  # five seconds
def test_a_wrong_gradient_has_no_row(rows, monkeypatch, capsys):
    right = training.ours

    def wrong(case, implementation=None):
        attend = right(case, implementation)
        if implementation == "xla":
            return attend
        return lambda q, k, v, mask: attend(q, k, v + jnp.asarray(0.05, v.dtype), mask=mask)

    monkeypatch.setattr(training, "ours", wrong)
    assert rows(CASE) == []
    assert "the largest error of ours must be at most 2.0 times" in capsys.readouterr().out


@pytest.mark.kernels  # five seconds
def test_what_a_peer_refuses_costs_its_own_columns(rows, monkeypatch):
    def refuses(q, k, v, mask):
        raise NotImplementedError("Unsupported sequence length")

    monkeypatch.setattr(training, "cudnn", lambda case: refuses)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    (row,) = rows(CASE)
    assert row["cudnn"] == "NotImplementedError: Unsupported sequence length"
    assert row["us"] == 3.0


def test_a_case_that_cannot_be_lowered_costs_its_own_row(rows, monkeypatch, capsys):
    def fails(case):
        raise NotImplementedError("no such case")

    monkeypatch.setattr(training, "lower", fails)
    assert rows(CASE) == []
    assert "tiny: NotImplementedError: no such case" in capsys.readouterr().out


def test_documents_are_padded_to_what_cudnn_takes(monkeypatch):
    seen = []
    monkeypatch.setattr("jax.nn.dot_product_attention", lambda q, *_, **__: seen.append(q.shape) or q)
    q = jnp.zeros((150, 1, 8))
    out = training.cudnn(training.Case(name="documents", lens=(20, 130)))(q, q, q, None)
    assert (seen, out.shape) == ([(2, 256, 1, 8)], q.shape)


def test_a_row_is_of_the_median_round():
    times = [
        {"us": us, "spread_us": [us - 1, us + 1], "kernels_us": {"varlen_prefill": us - 1, "nvjet": 1.0}}
        for us in (7.0, 3.0, 5.0)
    ]
    assert training.median_round(times) == {
        "us": 5.0,
        "spread_us": [2.0, 8.0],
        "attention_us": 4.0,
        "kernels_us": {"varlen_prefill": 4.0, "nvjet": 1.0},
    }


def test_attention_is_all_but_the_projections():
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


class TestTables:
    """What pages say of rows."""

    def table(self, monkeypatch, maker, *rows):
        monkeypatch.setattr(kernels, "read_rows", lambda file: rows)
        return [line.strip("| ").split(" | ") for line in maker("rows-2026-01-02.jsonl").splitlines()[4:]]

    def test_a_layer_stands_beside_cudnn_and_the_plain_case(self, monkeypatch):
        row = {
            "gpu": "H",
            "jax": "1",
            "us": 400.0,
            "attention_us": 200.0,
            "error": "0.006",
            "xla_error": "0.005",
        }
        plain = row | {"name": "plain", "cudnn_us": 440.0, "cudnn_attention_us": 250.0}
        half = row | {"name": "half", "attention_us": 110.0, "plain_attention_us": 200.0}
        assert self.table(monkeypatch, kernels.training_table, plain, half) == [
            ["plain", "400", "440", "1.10", "200", "250", "1.25", "-", "0.006", "0.005"],
            ["half", "400", "-", "-", "110", "-", "-", "0.55", "0.006", "0.005"],
        ]
