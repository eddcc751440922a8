"""Configured and default sizes of the engine."""

import math
import types

import jax
import pytest

from jattn.batch.bucket import Bucket
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.serving import Engine
from jattn.serving.engine.config import MIN_TABLE_WIDTH, StepLimits, table_widths
from jattn.serving.engine.engine_setup import SizeOptions
from jattn.serving.engine.step import step_graphs
from jattn.serving.engine.step_sampler import num_sampler_rows
from tests.serving.tiny import one_layer_model


@pytest.mark.parametrize(
    ("most", "widths"),
    [(9, [9]), (1024, [1024]), (1025, [1025, 1024]), (8192, [8192, 1024]), (65536, [65536, 8192, 1024])],
)
def test_tables_are_as_wide_as_the_longest_request_and_narrower(most, widths):
    assert table_widths(most) == widths


class TestDefaultBuckets:
    @pytest.fixture(autouse=True)
    def _on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def graphs(self, **limits):
        limits_with_defaults = {
            "block_size": 16,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
        } | limits
        model = one_layer_model()
        most = MIN_TABLE_WIDTH * 8
        object.__setattr__(model.config, "max_position_embeddings", 16 * most)
        return StepLimits(**limits_with_defaults).graphs(model, lambda *_: None, None, most + 1)

    def test_buckets_contain_vllms_capture_sizes_for_each_width(self):
        graphs = self.graphs()
        assert isinstance(graphs, DecodeGraphs)
        buckets_of_width = lambda width: [
            b.max_decodes for b in graphs.buckets if not b.max_prefill_tokens and b.max_blocks == width
        ]
        sizes = [2, 4, *range(8, 257, 8)]
        assert buckets_of_width(8192) == buckets_of_width(1024) == sizes

    def test_a_prompt_is_padded_by_at_most_half_as_many_tokens_again(self):
        graphs = self.graphs()
        for length in range(256, 8193, 64):
            bucket = graphs.choose([length], num_blocks=512)
            assert length <= bucket.max_tokens <= 1.5 * length
            chosen = graphs.choose([1] * 200 + [length], num_blocks=512)
            assert chosen.max_prefill_tokens <= 1.5 * length

    def test_prompts_with_few_decodes_use_a_partial_decode_bucket(self):
        graphs = self.graphs()
        assert graphs.choose([1] * 60 + [1024], num_blocks=512).max_tokens == 64 + 1024
        assert graphs.choose([1] * 65 + [1024], num_blocks=512).max_tokens == 256 + 1024
        assert graphs.choose([1024], num_blocks=512).max_tokens == 1024

    def test_a_short_step_has_a_narrow_table(self):
        graphs = self.graphs()
        assert graphs.choose([1] * 256, num_blocks=1024).max_blocks == 1024
        assert graphs.choose([1] * 256, num_blocks=1025).max_blocks == 8192

    def test_smallest_bucket_has_two_rows(self):
        assert self.graphs().choose([1], num_blocks=1).max_decodes == 2

    def test_large_steps_use_cublas_only(self):
        buckets = [Bucket(max_decodes=count, max_blocks=1) for count in (2, 31, 32, 256)]
        compiler_options = step_graphs(lambda *_: None, buckets)._executables._options
        alone = {"xla_gpu_enable_triton_gemm": False}
        assert [compiler_options(bucket) for bucket in buckets] == [{}, {}, alone, alone]

    def test_samplers_have_few_sizes_and_at_most_50_percent_padding(self):
        rows = {bucket: num_sampler_rows(bucket, 256) for bucket in self.graphs().buckets}
        assert len({*rows.values()}) <= 2 * math.log2(256)
        for bucket, size in rows.items():
            num_rows = min(bucket.max_reqs, 256)
            assert num_rows <= size <= 256
            assert size < 1.5 * num_rows


CPU = types.SimpleNamespace(platform="cpu")
HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
AMPERE = types.SimpleNamespace(platform="gpu", compute_capability="8.0")


class TestDefaultStepSizes:
    def limits(self, monkeypatch, device, buckets=None, **overrides):
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        requested = (
            dict.fromkeys(SizeOptions._fields) | {"block_size": 16, "batch_invariant": False} | overrides
        )
        limits = SizeOptions(**requested).limits(buckets)
        return limits.max_num_seqs, limits.max_num_batched_tokens

    @pytest.mark.parametrize(
        ("device", "sizes"), [(CPU, (16, 512)), (AMPERE, (256, 2048)), (HOPPER, (256, 8192))]
    )
    def test_step_sizes_depend_on_the_device(self, monkeypatch, device, sizes):
        assert self.limits(monkeypatch, device) == sizes

    @pytest.mark.parametrize(
        ("overrides", "sizes"),
        [
            ({"max_num_seqs": 3}, (3, 8192)),
            ({"max_num_seqs": 300}, (300, 8192)),
            ({"max_num_batched_tokens": 1000}, (256, 1000)),
            ({"max_num_batched_tokens": 100}, (100, 100)),
            ({"max_num_seqs": 200, "max_num_batched_tokens": 100}, (200, 100)),
            ({"max_num_seqs": 0, "max_num_batched_tokens": "x"}, (0, "x")),  # errors come later, by name
            ({"max_num_batched_tokens": "x"}, (256, "x")),
            ({"max_num_batched_tokens": 0}, (256, 0)),
        ],
    )
    def test_step_sizes_are_overridden_by_arguments(self, monkeypatch, overrides, sizes):
        assert self.limits(monkeypatch, HOPPER, **overrides) == sizes

    def test_step_sizes_are_the_cpus_if_every_step_costs_its_full_bucket(self, monkeypatch):
        buckets = [Bucket(max_decodes=16, max_prefills=16, max_prefill_tokens=512, max_blocks=4)]
        assert self.limits(monkeypatch, HOPPER, buckets) == (16, 512)
        assert self.limits(monkeypatch, HOPPER, batch_invariant=True) == (16, 512)

    def test_engine_uses_the_default_step_sizes(self):
        scheduler = Engine(one_layer_model(), num_blocks=9).scheduler
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (16, 512)


class TestFewBuckets:
    def graphs(self, max_num_seqs, **limits):
        limits_with_defaults = {
            "block_size": 16,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 512,
        } | limits
        return StepLimits(**limits_with_defaults).graphs(one_layer_model(), lambda *_: None, None, 33)

    def test_a_cpu_compiles_two_sizes_of_decodes_and_three_of_prompts_by_default(self):
        sizes = [(b.max_decodes, b.max_prefill_tokens) for b in self.graphs(16).buckets]
        assert sizes == [(4, 0), (16, 0), (16, 32), (16, 128), (16, 512)]

    @pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 24, 100, 256])
    def test_decodes_have_at_most_four_times_their_rows(self, max_num_seqs):
        graphs = self.graphs(max_num_seqs)
        for rows in range(1, max_num_seqs + 1):
            bucket = graphs.choose([1] * rows, num_blocks=32)
            assert rows <= bucket.max_decodes <= max(5 * rows, 8)
            assert not bucket.max_prefill_tokens
