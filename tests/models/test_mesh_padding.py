"""Padding for a mesh replicates kv heads and pads the vocabulary, and can be undone."""

import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.models.loading.pretrained import read_config
from jattn.models.mesh_padding import pad_to_mesh, unpad_from_mesh, unpadded_shape
from tests.conftest import GOLDEN

HF = GOLDEN / "hf"


LLAMA = HF / "llama"  # 6 query heads, 2 kv heads, 192 wide inside, 320 tokens


class TestPadToMesh:
    def test_a_config_for_a_mesh_has_the_same_config_json(self):
        config = read_config(LLAMA)
        spread = config.with_mesh(6)
        assert (spread.num_key_value_heads, spread.num_kv_head_replicas) == (6, 3)
        assert (spread.vocab_size, spread.padded_vocab_size) == (320, 384)
        assert spread.to_hf() == config.to_hf()
        assert config.with_mesh(2).padded_vocab_size == 320

    @pytest.mark.parametrize(("name", "tp"), [("llama", 1), ("llama", 6), ("stablelm", 4), ("phi", 4)])
    def test_unpad_from_mesh_restores_parameters(self, name, tp):
        config, draw = read_config(HF / name).with_mesh(tp), np.random.default_rng(0)
        model = nnx.eval_shape(lambda: jattn.models.Decoder(config, rngs=nnx.Rngs(0)))
        for path, value in nnx.to_flat_state(nnx.state(model)):
            whole = draw.normal(size=unpadded_shape(config, path, value.shape))
            padded = pad_to_mesh(config, path, whole)
            assert padded.shape == value.shape
            np.testing.assert_array_equal(unpad_from_mesh(config, path, padded), whole)

    def test_each_device_has_the_kv_head_of_its_queries(self):
        config = read_config(LLAMA).with_mesh(6)
        whole = np.arange(2 * 5).reshape(2, 5, 1)  # kv heads, their three queries, key and value
        padded = pad_to_mesh(config, ("qkv_proj", "bias"), whole)[..., 0]
        assert padded.tolist() == [[0, 3, 4], [1, 3, 4], [2, 3, 4], [5, 8, 9], [6, 8, 9], [7, 8, 9]]
