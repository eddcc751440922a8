"""Static scales: calibration on a model, files, discovery, and use in caches."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jattn
from jattn.models import Decoder, DecoderConfig, KVScales
from jattn.models.kv_scales import LayerScales, is_kv_scale
from jattn.models.loading.pretrained import read_config
from jattn.serving import Engine
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import CONFIGS, random_tensors, write_checkpoint

CONFIG = read_config(GOLDEN / "hf" / "llama")
PROMPTS = [[1, 2, 3, 4, 5], list(range(10, 31)), [7]]


def make():
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def peaks(model):
    """Return the largest magnitudes of keys and values over the prompts, for each layer [2, kv_heads,
    head_dim].
    """
    layer_peaks = [np.zeros((2, CONFIG.num_key_value_heads, CONFIG.head_dim)) for _ in model.layers]
    for ids in PROMPTS:
        metadata = jattn.build_batch_metadata([len(ids)], [len(ids)], [[1, 2, 3]], block_size=8)
        _, caches = model(jnp.asarray(ids), model.create_caches(4, block_size=8), metadata)
        for peak, cache in zip(layer_peaks, caches, strict=True):
            np.maximum(peak, np.abs([cache.k, cache.v]).max(axis=(1, 2)), out=peak)
    return layer_peaks


@pytest.fixture(scope="module")
def measured():
    """Return a model and its peaks."""
    model = make()
    return model, peaks(model)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("options", "key_factor", "value_factor"),
    [
        ({}, lambda p: p.max() / 448, lambda p: p.max() / 448),
        ({"per_head": True}, lambda p: p.max(1) / 448, lambda p: p.max(1) / 448),
        ({"quantization": "fp8_e5m2"}, lambda p: p.max() / 57344, lambda p: p.max() / 57344),
        ({"quantization": "int8_static_v", "headroom": 1.5}, lambda p: None, lambda p: 1.5 * p / 127),
    ],
)
def test_scales_fit_the_largest_keys_and_values_of_the_prompts(measured, options, key_factor, value_factor):
    model, layer_peaks = measured
    scales = jattn.calibrate(model, PROMPTS, **options)
    for (k, v), peak in zip(scales.layers, layer_peaks, strict=True):
        for actual, expected in ((k, key_factor(peak[0])), (v, value_factor(peak[1]))):
            assert (actual is None) == (expected is None)
            if expected is not None:
                assert actual.dtype == np.float32
                np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("quantization", ["fp8_e4m3", "int8_static_v"])
def test_engine_uses_the_models_scales(quantization):
    model = make()
    model.kv_scales = jattn.calibrate(model, PROMPTS, quantization=quantization)
    caches = model.create_caches(3, quantization=quantization, skip_layers=[0])
    assert caches[0].v_scale is None
    np.testing.assert_array_equal(caches[1].v_scale, model.kv_scales.layers[1].v)
    options = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "num_blocks": 5,
        "kv_cache_dtype": quantization,
    }
    ids = lambda engine: [r.token_ids for r in engine.generate(PROMPTS[:2], max_tokens=4)]
    expected = ids(Engine(model, implementation="reference", **options))
    assert ids(Engine(model, implementation="xla", **options)) == expected


class TestFiles:
    def test_saved_scales_are_loaded(self, tmp_path):
        scales = jattn.calibrate(make(), PROMPTS[:1], quantization="int8_static_v")
        scales.save(tmp_path / "scales.safetensors")
        assert list(load_file(tmp_path / "scales.safetensors")) == [
            f"model.layers.{i}.self_attn.v_scale" for i in range(CONFIG.num_hidden_layers)
        ]
        loaded = KVScales.load(tmp_path / "scales.safetensors", CONFIG.num_hidden_layers)
        for old, new in zip(scales.layers, loaded.layers, strict=True):
            assert old.k is new.k is None
            np.testing.assert_array_equal(old.v, new.v)

    def test_scales_of_any_memory_order_are_saved(self, tmp_path):
        scale = np.arange(1, 9, dtype=np.float32).reshape(4, 2).T
        KVScales((LayerScales(v=scale),)).save(tmp_path / "scales.safetensors")
        (loaded,) = KVScales.load(tmp_path / "scales.safetensors", 1).layers
        np.testing.assert_array_equal(loaded.v, scale)

    @pytest.mark.kernels
    @pytest.mark.parametrize("form", ["self_attn.{}_scale", "self_attn.{}_proj.{}_scale"])
    def test_scales_of_a_checkpoint_are_loaded_and_saved(self, tmp_path, form):
        hf = CONFIGS["llama_biases"]
        tensors = random_tensors(hf, np.float32)
        for side, value in (("k", 0.5), ("v", 0.25)):
            tensors[f"model.layers.1.{form.format(side, side)}"] = np.full(1, value, np.float32)
        model = jattn.models.load(write_checkpoint(tmp_path / "a", hf, tensors), progress=False)
        jattn.models.save(model, tmp_path / "b")
        for loaded in (model, jattn.models.load(tmp_path / "b", progress=False)):
            assert loaded.kv_scales.layers[0] == (None, None)
            assert loaded.kv_scales.layers[1] == (0.5, 0.25)
        with pytest.warns(jattn.CalibrationWarning, match="layers 0, 2 have no scales"):
            first, second = model.create_caches(2, quantization="fp8_e4m3")[:2]
        assert (first.k_scale, second.k_scale, second.v_scale) == (1, 0.5, 0.25)

    @pytest.mark.parametrize(
        ("stored", "expected"),
        [
            ({"attn.k_scale": 0.5, "attn.v_scale": 0.25}, (0.5, 0.25)),
            ({"k_proj.output_scale": 0.5, "v_proj.output_scale": 0.25}, (0.5, 0.25)),
            ({"qkv_proj.k_scale": 0.5, "qkqkv_proj.v_scale": 0.25}, (0.5, 0.25)),
            ({"kv_scale": 0.5}, (0.5, 0.5)),
            ({"attn.kv_scale": 0.5, "v_scale": 0.25}, (0.5, 0.25)),
            ({"v_scale": 0.25, "attn.kv_scale": 0.5, "attn.prob_scale": 1.0}, (0.5, 0.25)),
            (
                {"k_scale": 0.5, "q_scale": 2.0, "q_proj.output_scale": 3.0},
                (0.5, None),
            ),
        ],
    )
    def test_scales_have_the_names_that_vllm_reads(self, tmp_path, stored, expected):
        tensors = {
            f"model.layers.0.self_attn.{name}": np.full(1, scale, np.float32)
            for name, scale in stored.items()
        }
        assert all(map(is_kv_scale, tensors))
        save_file(tensors, tmp_path / "scales.safetensors")
        (layer,) = KVScales.load(tmp_path / "scales.safetensors", 1).layers
        assert layer == expected

    def test_scales_file_takes_precedence_over_the_checkpoint(self, tmp_path):
        hf = CONFIGS["llama_biases"]
        name = "model.layers.0.self_attn.k_scale"
        tensors = random_tensors(hf, np.float32) | {name: np.ones((), np.float32)}
        write_checkpoint(tmp_path, hf, tensors)
        save_file({name: np.full(2, 3, np.float32)}, tmp_path / "kv_scales.safetensors")
        (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
        model = jattn.models.load(tmp_path, progress=False)
        np.testing.assert_array_equal(model.kv_scales.layers[0].k, [3, 3])

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("model.layers.9.self_attn.k_scale", np.ones(1, np.float32), "belong to one of 2 layers, got 9"),
            ("model.layers.0.self_attn.k_scale", np.zeros(1, np.float32), r"be positive and finite, got \[0"),
            ("model.layers.0.self_attn.k_scale", np.full(1, np.nan, np.float32), "be positive and finite"),
            ("model.layers.0.self_attn.k_scale", np.ones(1, np.int32), "dtype must be one of .*got I32"),
        ],
    )
    def test_invalid_scales_are_rejected_by_name(self, tmp_path, name, value, message):
        save_file({name: value}, tmp_path / "scales.safetensors")
        with pytest.raises(ValueError, match=message):
            KVScales.load(tmp_path / "scales.safetensors", 2)

    def test_missing_scales_are_none(self, tmp_path):
        save_file({"x": np.ones(1, np.float32)}, tmp_path / "scales.safetensors")
        assert KVScales.load(tmp_path / "scales.safetensors", 2) is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompts", "options", "message"),
        [
            (
                PROMPTS,
                {"quantization": "int8_token_head"},
                "quantization must be one of 'fp8_e4m3', .*_head'",
            ),
            ([], {}, r"prompts must be a list of prompts, got \[\]"),
            ("text", {}, "prompts must be a list of prompts, got 'text'"),
            (PROMPTS, {"headroom": 0.0}, "headroom must be positive, got 0.0"),
            (PROMPTS, {"headroom": np.inf}, "headroom must be finite, got inf"),
            ([[1] * 10_000], {}, r"prompts\[0\] has 10000 tokens, but the model has .* positions"),
        ],
    )
    def test_unsupported_calibration_is_rejected_by_name(self, prompts, options, message):
        with pytest.raises(ValueError, match=message):
            jattn.calibrate(make(), prompts, **options)

    def test_skipped_layers_need_no_scales(self):
        make().create_caches(3, quantization="fp8_e4m3", skip_layers=(0, 1, 2))  # a warning is an error

    def test_values_per_channel_require_scales(self):
        message = "kv_scales must have a v_scale per channel for int8_static_v .*calibrate.*, got None"
        with pytest.raises(ValueError, match=message):
            make().create_caches(3, quantization="int8_static_v")

    @pytest.mark.parametrize("layer", [CONFIG.num_hidden_layers, -CONFIG.num_hidden_layers - 1])
    def test_skipped_layers_must_exist(self, layer):
        count = CONFIG.num_hidden_layers
        with pytest.raises(ValueError, match=rf"skip_layers must lie in \[-{count}, {count}\), got {layer}"):
            make().cache_specs(3, skip_layers=[layer])


def test_first_and_last_layers_may_stay_unquantized():
    config = DecoderConfig.from_hf(CONFIG.to_hf() | {"num_hidden_layers": 4})
    model = Decoder(config, rngs=nnx.Rngs(0))
    specs = model.cache_specs(3, quantization="int8_token_head", skip_layers=(0, -1))
    assert [spec.quantization for spec in specs] == [None, "int8_token_head", "int8_token_head", None]
