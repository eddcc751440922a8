"""A layer's projected queries, keys and values, normalised, turned and put where attention reads them."""

from pallas_kernels.qkv_write.entry import qkv_write as qkv_write
