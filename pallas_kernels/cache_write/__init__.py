"""Writes of new keys and values into a paged cache, in place."""

from pallas_kernels.cache_write.entry import cache_write as cache_write
from pallas_kernels.cache_write.sizes import CacheWriteSizes as CacheWriteSizes
