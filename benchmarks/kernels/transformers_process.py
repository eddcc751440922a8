"""Run a mixture-of-experts model in transformers: random weights, logits and times, in a process without JAX.

Usage: `python -m benchmarks.kernels.transformers_process NAME DIR`. Writes a checkpoint, `expected.npz` and
`times.json` into the folder.
"""

import collections
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

COMMON = {"num_hidden_layers": 2, "vocab_size": 32768, "max_position_embeddings": 32768}
CONFIGS = {
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
    },
}
CHECKED = 256  # tokens of the prompt whose logits are compared
BATCH, CONTEXT, PROMPT = 64, 1024, 8192
WAYS = ("eager", "grouped_mm", "batched_mm")  # transformers' names; the last copies each row's experts


def main(name: str, directory: pathlib.Path, *, device: str = "cuda", **cuts: Any) -> None:
    """Makes the checkpoint, then what is compared with it.

    Args:
        name: Of CONFIGS.
        directory: Where all of it goes.
        device: torch's.
        **cuts: Keys of the config that are smaller than the model's, to try it without a GPU.
    """
    sizes = {**COMMON, **CONFIGS[name], **cuts}
    config = transformers.AutoConfig.for_model(**sizes, dtype="bfloat16", tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                is_norm = parameter.ndim == 1 and key.endswith("norm.weight")
                is_embedding = "embed_tokens" in key
                parameter.normal_(float(is_norm), 1.0 if is_embedding else 0.02)
    model.save_pretrained(directory)
    np.savez(directory / "expected.npz", **logits(model, device))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    rows = [row | versions for row in (*layer_times(model, device), *times(model, device))]
    (directory / "times.json").write_text(json.dumps(rows))


@torch.no_grad()
def logits(model: Any, device: str) -> dict[str, np.ndarray]:
    """A prompt and its logits in bfloat16, and in f32 with the same weights."""
    tokens = torch.randint(0, model.config.vocab_size, (1, CHECKED), device=device)
    found = model(tokens).logits[0].float().cpu().numpy()
    model.float()
    model.set_experts_implementation("eager")
    exact = model(tokens).logits[0].cpu().numpy()
    model.to(torch.bfloat16)
    return {"tokens": tokens[0].cpu().numpy(), "bf16": found, "f32": exact}


def layer_times(model: Any, device: str) -> list[dict[str, Any]]:
    """A layer's router and experts alone, by each way."""
    layer, width = model.model.layers[0].mlp, model.config.hidden_size
    rows = []
    for tokens in (BATCH, PROMPT):
        x = torch.randn((1, tokens, width), device=device, dtype=torch.bfloat16)
        for way in WAYS[: 2 if tokens == PROMPT else 3]:
            case = {"case": "layer", "tokens": tokens, "way": way}
            rows.append(case | timed(model, way, lambda x=x: layer(x)))
    return rows


def times(model: Any, device: str) -> list[dict[str, Any]]:
    """A decode step of 64 requests and a prompt of 8k, by each way."""
    rows = []
    draw = lambda *shape: torch.randint(0, model.config.vocab_size, shape, device=device)
    prompt, next_ids = draw(1, PROMPT), draw(BATCH, 1)
    for way in WAYS:
        cache = filled_cache(model, device)
        decode = lambda cache=cache: model(next_ids, past_key_values=cache, logits_to_keep=1).logits
        rows.append({"case": "decode", "tokens": BATCH, "way": way} | timed(model, way, decode))
    for way in WAYS[:2]:
        prefill = lambda: model(prompt, use_cache=True, logits_to_keep=1).logits
        rows.append({"case": "prefill", "tokens": PROMPT, "way": way} | timed(model, way, prefill))
    return rows


def filled_cache(model: Any, device: str) -> Any:
    """Random keys and values of 64 requests."""
    config = model.config
    cache = transformers.DynamicCache(config=config)
    shape = (BATCH, config.num_key_value_heads, CONTEXT - 1, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


@torch.no_grad()
def timed(model: Any, way: str, call: Callable[[], Any], rounds: int = 10) -> dict[str, Any]:
    """Microseconds of a call: in flight, and the sum of its kernels; or why there are none."""
    is_there = next(model.parameters()).is_cuda
    wait = torch.cuda.synchronize if is_there else lambda: None
    try:
        model.set_experts_implementation(way)
        for _ in range(3):
            call()
        wait()
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        wait()
        in_flight = 1e6 * (time.perf_counter() - start) / rounds
        return {"in_flight_us": in_flight, **(kernels(call) if is_there else {})}
    except Exception as error:  # the other rows still count
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def kernels(call: Callable[[], Any], rounds: int = 3) -> dict[str, Any]:
    """The sum of a call's kernels in microseconds, and those that take most."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = collections.defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:60]] += event.device_time_total / rounds
    most = sorted(found.items(), key=lambda item: -item[1])[:4]
    return {"kernel_sum_us": sum(found.values()), "most_us": {key: round(us, 1) for key, us in most}}


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
