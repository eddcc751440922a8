"""QK norm, RoPE and the write of keys and values into the cache, in one kernel."""

from pallas_kernels.qkv_write.entry import qkv_write as qkv_write
