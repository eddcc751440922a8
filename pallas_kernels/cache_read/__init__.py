"""Reads of requests' keys and values out of an 8-bit paged cache, into 16 bits."""

from pallas_kernels.cache_read.entry import cache_read as cache_read
from pallas_kernels.cache_read.entry import padded_len as padded_len
from pallas_kernels.cache_read.kernel import TILE as TILE
