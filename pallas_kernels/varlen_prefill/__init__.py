"""Varlen prefill on Hopper: packed prompts of many requests against their own keys, packed or paged."""

from pallas_kernels.varlen_prefill.entry import varlen_prefill
from pallas_kernels.varlen_prefill.lists import TileLists, make_lists
from pallas_kernels.varlen_prefill.masks import KernelMask, PairTile
from pallas_kernels.varlen_prefill.schedule import Schedule, key_range, make_schedule
from pallas_kernels.varlen_prefill.tiles import Tiles, default_tiles
