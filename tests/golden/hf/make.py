"""Create tiny random checkpoints, and their logits and greedy tokens by transformers in float32.

The tests do not run this script: it needs torch 2.13.0 and transformers 5.23.0 (multimodal models: 5.24.0).

python make.py DIR [NAME ...]
"""

import pathlib
import sys

import numpy as np
import safetensors.torch
import torch
import transformers

SIZES = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that the kernels take
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CORRECTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
SMALL = {"vocab_size": 96, "head_dim": 16}
F, S = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 64}
PART = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "attention_multiplier": 0.2}
MULTIPLIERS |= {"residual_multiplier": 0.4}
MPT = {"d_model": 96, "n_heads": 3, "n_layers": 2, "max_seq_len": 512}  # MPT's config keys
CHECKPOINTS = {
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "mpt": (
        "Mpt",
        {**MPT, "tie_word_embeddings": True, "attn_config": {"clip_qkv": 2.0, "softmax_scale": 0.3}},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen2_yarn": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    ),
    "olmo": ("Olmo", {**SMALL, "clip_qkv": 1.0}),
    "olmo2": ("Olmo2", {**SMALL, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {**SMALL, "sliding_window": 20, "layer_types": [S, F], "rope_parameters": {F: YARN, S: {}}},
    ),
    "olmoe": (
        "Olmoe",
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size": 24},
    ),
    "flex_olmo": (
        "FlexOlmo",
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size": 24},
    ),
    "nanochat": ("NanoChat", {**SMALL, "head_dim": 8, "final_logit_softcapping": 2.0}),
    "helium": ("Helium", {**SMALL, "head_dim": 8}),
    "hyperclovax": ("HyperCLOVAX", {**SMALL, **MULTIPLIERS, "head_dim": 8, "attention_bias": True}),
    "internlm3": ("InternLM3", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "granite_swa": (
        "GraniteSWA",
        {**SMALL, **MULTIPLIERS, "head_dim": 8, "sliding_window": 20, "layer_types": [S, F]}
        | {"layer_rope_theta": [300.0, 0]},
    ),
    "solar_open": (
        "SolarOpen",
        {**SMALL, **CORRECTED, "head_dim": 8},
    ),
    "iquestcoder": ("IQuestCoder", {**SMALL, "head_dim": 8}),
    "jais2": ("Jais2", {**SMALL, "head_dim": 8}),
    "smollm3": (
        "SmolLM3",
        {**SMALL, "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 20},
    ),
    "phi": ("Phi", {**SMALL, "head_dim": 8, "qk_layernorm": True}),
    "stablelm": (
        "StableLm",
        {**SMALL, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "cohere": ("Cohere", {**SMALL, "use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**SMALL, "sliding_window": 20, "layer_types": [S, F], "logit_scale": 0.5}),
    "granite": ("Granite", {**SMALL, **MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "granitemoe": (
        "GraniteMoe",
        {**SMALL, "head_dim": 8, **MULTIPLIERS, "num_local_experts": 4, "intermediate_size": 24},
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            **SMALL,
            "head_dim": 8,
            **MULTIPLIERS,
            "num_local_experts": 4,
            "intermediate_size": 16,
            "shared_intermediate_size": 40,
        },
    ),
    "glm": ("Glm", {**SMALL}),
    "glm4": ("Glm4", {**SMALL, "rope_parameters": PART}),
    "starcoder2": ("Starcoder2", {**SMALL, "sliding_window": 24}),
    "falcon": ("Falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon_rw": (
        "Falcon",
        {**SMALL, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "gpt_neox": ("GPTNeoX", {**SMALL}),
    "gpt2": (
        "GPT2",
        {**SMALL, "vocab_size": 64, "scale_attn_by_inverse_layer_idx": True, "max_position_embeddings": 160},
    ),
    "opt": ("OPT", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 160}),
    "exaone4": ("Exaone4", {**SMALL, "sliding_window": 20, "layer_types": [S, F]}),
    "ministral": ("Ministral", {**SMALL, "sliding_window": 20, "layer_types": [S, F]}),
    "ministral3": (
        "Ministral3",
        {**SMALL, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0}},
    ),
    "nemotron": ("Nemotron", {**SMALL}),
    "arcee": ("Arcee", {**SMALL, "mlp_bias": True}),
    "seed_oss": ("SeedOss", {**SMALL}),
    "ernie4_5": ("Ernie4_5", {**SMALL, "use_bias": True}),
    "cwm": ("Cwm", {**SMALL, "sliding_window": 20, "layer_types": [F, S]}),
    "vaultgemma": ("VaultGemma", {**SMALL, "sliding_window": 20, "query_pre_attn_scalar": 20}),
    "gptj": ("GPTJ", {**SMALL, "rotary_dim": 4}),
    "gpt_neo": ("GPTNeo", {**SMALL, "window_size": 20, "attention_types": [[["global", "local"], 1]]}),
    "gpt_bigcode": ("GPTBigCode", {**SMALL, "vocab_size": 64, "max_position_embeddings": 160}),
    "persimmon": ("Persimmon", {**SMALL}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **SMALL,
            **MULTIPLIERS,
            "head_dim": 8,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 2,
            "mamba_n_heads": 4,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**SMALL, **CORRECTED, "use_qk_norm": True, "attention_bias": True, "rope_parameters": PART},
    ),
    "dots1": (
        "Dots1",
        {**SMALL, **CORRECTED, "sliding_window": 20, "max_window_layers": 1, "n_shared_experts": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8, "intermediate_size": 24},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            **SMALL,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "alpha": 4.0, "factor": 1.0},
        },
    ),
    "apertus": ("Apertus", {**SMALL, "head_dim": 8, "rope_parameters": LLAMA3}),
    "dbrx": (
        "Dbrx",
        {
            **SMALL,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 1e3},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {
            **SMALL,
            "num_experts": 4,
            "moe_topk": 2,
            "intermediate_size": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "alpha": 4.0, "factor": 1.0},
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            **SMALL,
            "head_dim": 8,
            "num_local_experts": 4,
            "intermediate_size": 24,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 30,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            **SMALL,
            "head_dim": 8,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
}
MROPE = {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [4, 2, 2]}
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32}
MULTIMODAL = {  # text models of multimodal ones: keys of text_config and of vision_config
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {**SMALL, **EXPERTS, "rope_parameters": MROPE, "mlp_only_layers": [0]},
        VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4},
    ),
    "glm4v": (
        "Glm4v",
        {
            **SMALL,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
        VISION | {"image_size": 28, "patch_size": 14},
    ),
}
GQA = ("num_key_value_heads", "head_dim")
LACKS = {  # keys that a family names differently or lacks
    "Mpt": (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *(*GQA, "max_position_embeddings"),
    ),
    "Dbrx": (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *(*GQA, "max_position_embeddings"),
    ),
    "StableLm": ("head_dim",),
    "Glm4v": ("head_dim",),
    "Cohere2": ("head_dim",),
    "Falcon": (*GQA, "intermediate_size"),
    "GPTNeoX": GQA,
    "GPT2": (*GQA, "intermediate_size"),
    "OPT": (*GQA, "intermediate_size"),
    "GPTJ": (*GQA, "intermediate_size"),
    "GPTNeo": GQA,
    "GPTBigCode": (*GQA, "intermediate_size"),
    "Persimmon": GQA,
    "SolarOpen": ("intermediate_size", "first_k_dense_replace"),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "InternLM3": "LlamaForCausalLM", "IQuestCoder": "LlamaForCausalLM"}
PROMPT_LENS, NUM_TOKENS = (1, 7, 33, 100), 24


def make(name: str, directory: pathlib.Path) -> None:
    """Write one checkpoint and its expected.npz."""
    family, options, *vision = (CHECKPOINTS | MULTIMODAL)[name]
    config_keys = {key: value for key, value in (SIZES | options).items() if key not in LACKS.get(family, ())}
    if vision:
        config_keys = {"text_config": config_keys, "vision_config": vision[0], "tie_word_embeddings": False}
    config = getattr(transformers, f"{family}Config")(**config_keys, dtype="float32")
    torch.manual_seed(0)
    suffix = "ForConditionalGeneration" if vision else "ForCausalLM"
    name_of_class = CLASSES.get(family, f"{family}{suffix}")
    model = getattr(transformers, name_of_class)(config).to(torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # large enough that every part matters
            if parameter.ndim == 1:
                parameter.normal_(0.0 if key.endswith("bias") else 0.8, 0.3)
            else:
                inputs = parameter.shape[1 if parameter.ndim == 2 else 2]  # experts: [experts, out, in]
                parameter.normal_(0.0, 1.0 if "embed" in key or "wte" in key else 1.5 * inputs**-0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.normal_(0.0, 0.3)
    if family != "Mpt":  # MPT has no other activation
        model.set_attn_implementation("eager")
    expected: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)
    for i, length in enumerate(PROMPT_LENS):
        prompt = rng.integers(3, config.get_text_config().vocab_size, length)
        expected |= {f"{key}{i}": value for key, value in outputs_of(model, prompt).items()}
    model.save_pretrained(directory / name)
    if (
        family == "Qwen3VLMoe"
    ):  # published checkpoints have [experts, in, out], which from_pretrained transposes
        file = directory / name / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        experts = {key: value.mT.contiguous() for key, value in tensors.items() if ".experts." in key}
        safetensors.torch.save_file(tensors | experts, file, metadata={"format": "pt"})
        again = getattr(transformers, name_of_class).from_pretrained(directory / name)
        np.testing.assert_allclose(outputs_of(again, prompt)["logits"], expected[f"logits{i}"], atol=1e-4)
    np.savez_compressed(directory / name / "expected.npz", **expected)


@torch.no_grad()
def outputs_of(model: torch.nn.Module, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """Return the logits of a prompt's tokens, and a greedy continuation with each token's margin over the
    next best.
    """
    tokens, greedy, margins = list(prompt), [], []
    whole = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    for _ in range(NUM_TOKENS):
        last = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best = torch.topk(last, 2)
        greedy.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        tokens.append(greedy[-1])
    return {
        "prompt": np.asarray(prompt, np.int64),
        "logits": whole.astype(np.float32),
        "greedy": np.asarray(greedy, np.int64),
        "margin": np.asarray(margins, np.float32),
    }


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for name in names or [*CHECKPOINTS, *MULTIMODAL]:
        make(name, pathlib.Path(folder))
