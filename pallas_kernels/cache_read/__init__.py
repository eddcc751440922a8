"""Reads of requests' keys or values from an 8-bit paged cache into a packed 16-bit array."""

from pallas_kernels.cache_read.entry import cache_read as cache_read
from pallas_kernels.cache_read.entry import padded_len as padded_len
from pallas_kernels.cache_read.kernel import TILE as TILE
