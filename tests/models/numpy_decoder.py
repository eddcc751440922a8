"""A slow reference decoder of five families in numpy and float64, from Hugging Face keys and tensors.

It shares nothing with jattn.models: one loop over layers, heads and queries.
"""

import math

import numpy as np


def logits(hf, tensors, token_ids):
    """Return the logits [tokens, vocab] of a prompt."""
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    kind = hf["model_type"]
    x = weights["model.embed_tokens.weight"][np.asarray(token_ids)]
    if kind == "gemma2":
        x = x * math.sqrt(hf["hidden_size"])
    for layer in range(hf["num_hidden_layers"]):
        layer_tensors = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        norm = lambda x, name, layer_tensors=layer_tensors: rms_norm(
            x, layer_tensors[f"{name}.weight"], hf, kind
        )
        attended = attention(norm(x, "input_layernorm"), layer_tensors, hf, layer)
        if kind == "gemma2":
            x = x + norm(attended, "post_attention_layernorm")
            mlp_out = mlp(norm(x, "pre_feedforward_layernorm"), layer_tensors, hf)
            x = x + norm(mlp_out, "post_feedforward_layernorm")
        else:
            x = x + attended
            x = x + mlp(norm(x, "post_attention_layernorm"), layer_tensors, hf)
    x = rms_norm(x, weights["model.norm.weight"], hf, kind)
    head = weights["model.embed_tokens.weight" if hf["tie_word_embeddings"] else "lm_head.weight"]
    out = x @ head.T
    cap = hf.get("final_logit_softcapping")
    return out if cap is None else cap * np.tanh(out / cap)


def rms_norm(x, weight, hf, kind):
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + hf["rms_norm_eps"])
    return x * (1 + weight if kind == "gemma2" else weight)


def linear(x, layer_tensors, name):
    return x @ layer_tensors[f"{name}.weight"].T + layer_tensors.get(f"{name}.bias", 0.0)


def mlp(x, layer_tensors, hf):
    gate = linear(x, layer_tensors, "mlp.gate_proj")
    if hf["model_type"] == "gemma2":
        gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-gate))
    return linear(gate * linear(x, layer_tensors, "mlp.up_proj"), layer_tensors, "mlp.down_proj")


def attention(x, layer_tensors, hf, layer):
    tokens, heads, kv_heads = len(x), hf["num_attention_heads"], hf["num_key_value_heads"]
    dim = hf.get("head_dim") or hf["hidden_size"] // heads
    split = lambda name, n: linear(x, layer_tensors, f"self_attn.{name}").reshape(tokens, n, dim)
    q, k, v = split("q_proj", heads), split("k_proj", kv_heads), split("v_proj", kv_heads)
    if hf["model_type"] == "qwen3":
        q = rms_norm(q, layer_tensors["self_attn.q_norm.weight"], hf, "qwen3")
        k = rms_norm(k, layer_tensors["self_attn.k_norm.weight"], hf, "qwen3")
    freq = frequencies(hf, dim)
    q, k = rotate(q, freq), rotate(k, freq)
    scale, cap, window = (hf.get("query_pre_attn_scalar") or dim) ** -0.5, None, window_bounds(hf, layer)
    if hf["model_type"] == "gemma2":
        cap = hf["attn_logit_softcapping"]
    out = np.zeros((tokens, heads, dim))
    for h in range(heads):
        g = h // (heads // kv_heads)
        for i in range(tokens):
            first = 0 if window is None else max(0, i - window + 1)
            s = k[first : i + 1, g] @ q[i, h] * scale
            s = s if cap is None else cap * np.tanh(s / cap)
            p = np.exp(s - s.max())
            out[i, h] = p @ v[first : i + 1, g] / p.sum()
    return linear(out.reshape(tokens, heads * dim), layer_tensors, "self_attn.o_proj")


def window_bounds(hf, layer):
    kind, window = hf["model_type"], hf.get("sliding_window")
    if kind == "mistral":
        return window
    if kind == "gemma2":
        types = hf.get("layer_types")
        slides = layer % 2 == 0 if types is None else types[layer] == "sliding_attention"
        return window if slides else None
    if kind.startswith("qwen") and hf.get("use_sliding_window"):
        types = hf.get("layer_types")
        slides = layer >= hf["max_window_layers"] if types is None else types[layer] == "sliding_attention"
        return window if slides else None
    return None


def frequencies(hf, dim):
    """Return the angle of each pair per position, in a loop as in the Llama 3.1 release."""
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    theta = hf.get("rope_theta") or scaling.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    freqs = []
    for i in range(0, dim, 2):
        freq = 1.0 / theta ** (i / dim)
        if kind == "linear":
            freq /= scaling["factor"]
        if kind == "llama3":
            old, low, high = (
                scaling[key]
                for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
            )
            wavelength = 2 * math.pi / freq
            if wavelength > old / low:
                freq /= scaling["factor"]
            elif wavelength >= old / high:
                smooth = (old / wavelength - low) / (high - low)
                freq = (1 - smooth) * freq / scaling["factor"] + smooth * freq
        freqs.append(freq)
    return np.array(freqs)


def rotate(x, freq):
    """Rotate x [tokens, heads, dim], whose pairs are (i, i + dim / 2)."""
    angle = np.arange(len(x))[:, None, None] * freq
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
