"""The smallest tokenizer and model that an engine can run: a byte tokenizer and a one-layer model."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jattn.models import Decoder, DecoderConfig
from jattn.models.loading.pretrained import read_config
from tests.conftest import GOLDEN

tokenizers = pytest.importorskip("tokenizers")


def byte_tokenizer():
    """Return a tokenizer whose token i is a byte, in the order of ByteLevel's alphabet."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


BYTES = byte_tokenizer()


def llama_tokenizer():
    """Return a tokenizer like Llama 2's, whose decoder strips the first space: three special tokens,
    bytes, words.
    """
    words = [f"\u2581{word}" for word in ("Hello", "world", "")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1, right=0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def one_layer_model(seed=0, sliding_window=None, num_layers=1, dtype=None, **changes):
    """Return a model with random parameters, 320 tokens (the first 256 are bytes) and 512 positions,
    without EOS.
    """
    config = read_config(GOLDEN / "hf" / "llama")
    family = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]} if sliding_window else {}
    change = {"num_hidden_layers": num_layers, "sliding_window": sliding_window, "eos_token_id": None}
    config = DecoderConfig.from_hf(config.to_hf() | family | change | changes)
    model = Decoder(config, rngs=nnx.Rngs(seed), dtype=dtype)
    model.tokenizer = BYTES
    return model


class SizedNorm(nnx.Module):
    """A norm whose keys depend on the size of the step's bucket, like rounding on a GPU but stronger."""

    def __init__(self, norm):
        self.norm = norm

    def __call__(self, x):
        return self.norm(x) * jnp.asarray(1 + x.shape[0] % 13 / 64, x.dtype)


def sized_model(**options):
    """Return a bfloat16 model whose texts depend on the sizes of its steps."""
    model = one_layer_model(dtype=jnp.bfloat16, **options)
    for layer in model.layers:
        layer.input_layernorm = SizedNorm(layer.input_layernorm)
    return model
