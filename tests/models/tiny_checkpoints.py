"""Small random checkpoints of every family, with the keys that their config.json files have."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.conftest import GOLDEN

GOLDEN_TEXT_MODELS = sorted(
    path.parent.name
    for path in (GOLDEN / "hf").glob("*/config.json")
    if "text_config" not in json.loads(path.read_text())
)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# name -> config.json. Old keys (torch_dtype, rope_theta, rope_scaling) and new ones (dtype, rope_parameters).
CONFIGS = {
    "llama_old_keys": {
        "model_type": "llama",
        "rope_theta": 500.0,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    },
    "llama_biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "rope_parameters": {"rope_theta": 900.0, "rope_type": "default"},
    },
    "llama3_rope": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_theta": 5000.0,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32, "rope_type": "llama3"},
    },
    "llama3_rope_new_keys": {
        "model_type": "llama",
        "dtype": "float32",
        "rope_parameters": {
            **LLAMA3,
            "rope_theta": 5000.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
    },
    "llama_linear_rope": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 7, "head_dim": 12, "rope_theta": 1e6},
    "mistral_full": {"model_type": "mistral", "sliding_window": None, "head_dim": None},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": 5,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen2_sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen2_layer_types": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 28,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "gemma2_default_layers": {
        "model_type": "gemma2",
        "head_dim": 12,
        "sliding_window": 5,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}
CONFIGS = {name: {**SIZES, **config} for name, config in CONFIGS.items()}
# Of code that comes with checkpoints, and of transformers where another family's checkpoint tests the family.
REMOTE_CONFIGS = {
    "exaone": {"model_type": "exaone", "architectures": ["ExaoneForCausalLM"], "rope_theta": 300.0},
    "mimo": {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
    },
    "qwen3_vl_moe_text": {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "internlm2": {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "attn_implementation": "eager",
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
        "bias": False,
        "pretraining_tp": 1,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "rope_theta": 300.0,
    },
    "minicpm": {
        "model_type": "minicpm",
        "architectures": ["MiniCPMForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"},
        "rope_scaling": None,
        "rope_theta": 300.0,
        "scale_emb": 12,
        "dim_model_base": 16,
        "scale_depth": 1.4,
    },
}
REMOTE_CONFIGS = {name: {**SIZES, **config} for name, config in REMOTE_CONFIGS.items()}


def random_tensors(hf, dtype=np.float32, seed=0):
    """Return Hugging Face tensors of a config, large enough that every part affects the logits."""
    rng = np.random.default_rng(seed)
    kind, hidden, inner = hf["model_type"], hf["hidden_size"], hf["intermediate_size"]
    dim = hf.get("head_dim") or hidden // hf["num_attention_heads"]
    q, kv = hf["num_attention_heads"] * dim, hf["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (hf["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (hf["vocab_size"], hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * (kind == "gemma2")
    linears = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    linears = {f"self_attn.{name}_proj": shape for name, shape in linears.items()}
    linears |= {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in norms}
        if kind == "qwen3":
            shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        for name, shape in linears.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if has_bias(hf, name):
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    return {name: random_tensor(rng, name, shape).astype(dtype) for name, shape in shapes.items()}


def has_bias(hf, name):
    if name.startswith("mlp"):
        return hf.get("mlp_bias", False)
    if hf["model_type"] == "qwen2":
        return name != "self_attn.o_proj"
    return hf.get("attention_bias", False)


def random_tensor(rng, name, shape):
    if len(shape) == 1:
        return rng.normal(0.0 if name.endswith("bias") else 0.8, 0.3, shape)
    return rng.normal(0.0, 1.0 if "embed" in name else 1.5 * shape[1] ** -0.5, shape)


def write_checkpoint(directory, hf, tensors, file="model.safetensors"):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    save_file(tensors, directory / file, metadata={"format": "pt"})
    return directory


BFLOAT16 = ml_dtypes.bfloat16


# Golden checkpoints that `make test-kernels` runs in chunks, in batches and on meshes. Of the others it runs
# whole prompts; their other tests are slow ones.
OFTEN = (
    *("bloom", "gemma3", "gpt_oss", "llama", "llama4"),
    *("phi3_longrope", "phi3small", "qwen2_moe"),
)
