"""Dense attention of arrays outside a cache: `jattn.attention` and `attention_fn`, with gradients."""
