"""Configured and default sizes of the engine."""

import math
import types

import jax
import pytest

from jattn.batch.bucket import Bucket
from jattn.serving import Engine
from jattn.serving.engine.config import EngineConfig, resolve, resolve_step_sizes
from jattn.serving.engine.sampler import num_sampler_rows
from jattn.serving.engine.step import MIN_TABLE_WIDTH, step_buckets, step_graphs, table_widths
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

    def graphs(self):
        return step_graphs(lambda *_: None, step_buckets(256, 8192, MIN_TABLE_WIDTH * 8))

    def test_each_width_has_30_buckets(self):
        buckets = self.graphs().buckets
        for width in (1024, 8192):
            assert len([bucket for bucket in buckets if bucket.max_blocks == width]) == 30

    @pytest.mark.parametrize("num_decodes", [0, 200])
    def test_a_prompt_is_padded_to_less_than_twice_its_tokens(self, num_decodes):
        graphs = self.graphs()
        for length in range(256, 8193, 64):
            bucket = graphs.choose([1] * num_decodes + [length], num_blocks=512)
            assert length <= bucket.max_prefill_tokens < 2 * length

    def test_decodes_are_padded_by_at_most_32_rows(self):
        graphs = self.graphs()
        for rows in range(1, 257):
            bucket = graphs.choose([1] * rows, num_blocks=512)
            assert rows <= bucket.max_decodes < max(rows + 32, 64)
            assert not bucket.max_prefill_tokens

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
        compiler_options = step_graphs(lambda *_: None, buckets)._executables.options
        options = [compiler_options(bucket) for bucket in buckets]
        assert ["xla_gpu_enable_triton_gemm" in bucket_options for bucket_options in options] == [
            False,
            False,
            True,
            True,
        ]

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
TURING = types.SimpleNamespace(platform="gpu", compute_capability="7.5")


class TestDefaultStepSizes:
    def sizes(self, monkeypatch, device, **options):
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        return resolve_step_sizes(EngineConfig(**options))

    @pytest.mark.parametrize(
        ("device", "sizes"),
        [(CPU, (16, 512)), (TURING, (256, 2048)), (AMPERE, (256, 8192)), (HOPPER, (256, 8192))],
    )
    def test_step_sizes_depend_on_the_device(self, monkeypatch, device, sizes):
        assert self.sizes(monkeypatch, device) == sizes

    @pytest.mark.parametrize(
        ("overrides", "sizes"),
        [
            ({"max_num_seqs": 3}, (3, 8192)),
            ({"max_num_seqs": 300}, (300, 8192)),
            ({"max_num_batched_tokens": 1000}, (256, 1000)),
            ({"max_num_batched_tokens": 100}, (100, 100)),
            ({"max_num_seqs": 200, "max_num_batched_tokens": 100}, (200, 100)),
        ],
    )
    def test_step_sizes_are_overridden_by_arguments(self, monkeypatch, overrides, sizes):
        assert self.sizes(monkeypatch, HOPPER, **overrides) == sizes

    def test_step_sizes_are_the_cpus_if_every_step_costs_its_full_bucket(self, monkeypatch):
        buckets = [Bucket(max_decodes=16, max_prefills=16, max_prefill_tokens=512, max_blocks=4)]
        assert self.sizes(monkeypatch, HOPPER, buckets=buckets) == (16, 512)
        assert self.sizes(monkeypatch, HOPPER, batch_invariant=True) == (16, 512)

    def test_engine_uses_the_default_step_sizes(self):
        scheduler = Engine(one_layer_model(), num_blocks=9).scheduler
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (16, 512)


class TestFewBuckets:
    def graphs(self, max_num_seqs):
        return step_graphs(lambda *_: None, step_buckets(max_num_seqs, 512, 32))

    def test_a_cpu_compiles_one_size_of_decodes_and_two_of_prompts_by_default(self):
        sizes = [(b.max_decodes, b.max_prefill_tokens) for b in self.graphs(16).buckets]
        assert sizes == [(16, 0), (0, 64), (0, 512)]

    @pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 24, 100, 256])
    def test_decodes_have_at_most_16_or_five_times_their_rows(self, max_num_seqs):
        graphs = self.graphs(max_num_seqs)
        for rows in range(1, max_num_seqs + 1):
            bucket = graphs.choose([1] * rows, num_blocks=32)
            assert rows <= bucket.max_decodes <= max(5 * rows, 16)
            assert not bucket.max_prefill_tokens

    def test_decodes_beside_a_prompt_run_in_the_prefill_region(self):
        buckets = [self.graphs(16).choose([1] * 15 + [tokens], num_blocks=1) for tokens in (40, 497)]
        assert [bucket.max_prefill_tokens for bucket in buckets] == [64, 512]

    def test_a_prompt_between_two_sizes_runs_in_two_small_steps(self):
        engine = Engine(one_layer_model(), num_blocks=9)
        (result,) = engine.generate([list(range(1, 101))], max_tokens=2)
        compiled = sorted((b.max_decodes, b.max_prefill_tokens) for b in engine.graphs.executables)
        assert (compiled, engine.stats.num_steps, len(result.token_ids)) == ([(0, 64), (16, 0)], 3, 2)


class TestEngineConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"block_size": 0}, "block_size must be positive, got 0"),
            ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be positive"),
            ({"num_blocks": 1}, "num_blocks must be at least 2"),
            ({"num_blocks": 9, "cache_bytes": 1}, "cache_bytes must be None with num_blocks=9"),
            (
                {"speculative": "ngram", "num_speculative_tokens": 0},
                "num_speculative_tokens must be positive",
            ),
        ],
    )
    def test_invalid_values_are_rejected(self, options, message, types_unchecked):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**options)

    def test_resolve_derives_sizes_from_the_model(self):
        config = resolve(EngineConfig(block_size=8, max_model_len=100), one_layer_model(), None)
        assert (config.max_num_seqs, config.max_num_batched_tokens) == (16, 512)
        assert config.max_blocks == 13
        assert config.num_blocks == 16 * 13 + 1  # enough for the largest step
        assert config.blocks_per_layer == config.num_blocks
        assert (config.local_attention, config.longrope_threshold) == (None, None)
        assert config.cascade_attention is False

    def test_layers_with_sliding_windows_get_their_own_blocks(self):
        model = one_layer_model(sliding_window=32)
        config = resolve(EngineConfig(block_size=8, max_num_seqs=2, max_num_batched_tokens=16), model, None)
        assert config.window_layers == ()  # All layers have one, so they share their blocks.
        assert config.local_attention.max_lookback == 31
        assert config.num_blocks == 2 * config.local_attention.max_blocks_per_request(16, 8) + 1
