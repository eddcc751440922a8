"""Gradients of packed attention: dK and dV a tile of keys at a time, dQ added up on the way."""

from pallas_kernels.varlen_backward.entry import varlen_backward as varlen_backward
from pallas_kernels.varlen_backward.schedule import Schedule as Schedule
from pallas_kernels.varlen_backward.schedule import make_schedule as make_schedule
from pallas_kernels.varlen_backward.sizes import TILE_KV as TILE_KV
from pallas_kernels.varlen_backward.sizes import WARPGROUPS as WARPGROUPS
from pallas_kernels.varlen_backward.sizes import KernelSizes as KernelSizes
from pallas_kernels.varlen_backward.sizes import default_sizes as default_sizes
from pallas_kernels.varlen_backward.sizes import mean_keys_of as mean_keys_of
from pallas_kernels.varlen_backward.sizes import sizes_of_layer as sizes_of_layer
from pallas_kernels.varlen_backward.tile_lists import PairMask as PairMask
from pallas_kernels.varlen_backward.tile_lists import QueryTiles as QueryTiles
from pallas_kernels.varlen_backward.tile_lists import TileLists as TileLists
from pallas_kernels.varlen_backward.tile_lists import keys_of_code as keys_of_code
from pallas_kernels.varlen_backward.tile_lists import make_lists as make_lists
