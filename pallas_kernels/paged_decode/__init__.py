"""Paged decode attention on Hopper: the last tokens of each request attend to its paged KV cache."""

from pallas_kernels.paged_decode.entry import LIST_BLOCK_SIZES, paged_decode
from pallas_kernels.paged_decode.schedule import BlockList, DecodeSchedule, make_schedule
from pallas_kernels.paged_decode.sizes import DecodeSizes, default_sizes
