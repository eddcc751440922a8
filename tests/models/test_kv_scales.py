"""Missing static KV-cache scales are reported."""

import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.models import Decoder, DecoderConfig, KVScales
from jattn.models.kv_scales import LayerScales
from tests.models.tiny_checkpoints import CONFIGS


def calibrated(*layers):
    """Return scales of some of 3 layers."""
    layer_scales = LayerScales(k=np.full((), 0.1, np.float32), v=np.full((), 0.1, np.float32))
    return KVScales(tuple(layer_scales if i in layers else LayerScales() for i in range(3)))


class TestMissingStaticScales:
    CONFIG = DecoderConfig.from_hf(CONFIGS["llama3_rope"])

    def model(self, scales=None):
        model = Decoder(self.CONFIG, rngs=nnx.Rngs(0))
        model.kv_scales = scales
        return model

    @pytest.mark.usefixtures("warned_lines")
    @pytest.mark.parametrize("quantization", ["fp8_e4m3", "fp8_e5m2"])
    def test_missing_scales_are_reported_once_with_a_hint(self, quantization):
        message = rf"{quantization} cache: layers 0, 1, 2 have no scales and use 1, .* jattn.calibrate"
        message += r".* save these scales as kv_scales\.safetensors in the model folder"
        with pytest.warns(jattn.CalibrationWarning, match=message) as warned:
            self.model().create_caches(2, quantization=quantization)
        assert [warning.filename for warning in warned] == [__file__]

    @pytest.mark.usefixtures("warned_lines")
    def test_missing_scales_are_reported_at_the_line_that_makes_an_engine(self):
        options = {"num_blocks": 9, "max_num_seqs": 2, "kv_cache_dtype": "fp8"}
        with pytest.warns(jattn.CalibrationWarning) as warned:
            jattn.serving.Engine(self.model(), **options)
        assert [warning.filename for warning in warned] == [__file__]

    def test_missing_scales_are_reported_with_their_layers(self):
        with pytest.warns(jattn.CalibrationWarning, match="layers 1 have no scales"):
            self.model(calibrated(0)).create_caches(2, quantization="fp8_e4m3", skip_layers=[-1])

    @pytest.mark.parametrize(
        ("scales", "options"),
        [
            (calibrated(0, 1, 2), {"quantization": "fp8_e4m3"}),
            (calibrated(0, 1), {"quantization": "fp8_e4m3", "skip_layers": [2]}),
            (None, {"quantization": "int8_token_head"}),
            (None, {}),
        ],
    )
    def test_missing_scales_are_not_reported_if_not_required(self, scales, options):
        self.model(scales).create_caches(2, **options)  # a warning would be an error here

    def test_kv_scales_require_an_entry_per_layer(self):
        with pytest.raises(ValueError, match=r"kv_scales must have one entry per layer \(3\), got 2\."):
            self.model(KVScales(calibrated().layers[:2])).create_caches(2, quantization="fp8_e4m3")
