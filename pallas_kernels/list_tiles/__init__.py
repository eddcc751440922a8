"""Lists of the tiles that masks name: which are seen in part and which whole, out of one number a tile."""

from pallas_kernels.list_tiles.entry import list_tiles as list_tiles
from pallas_kernels.ptx.list_tiles import by_sorting as by_sorting
from pallas_kernels.shared.tile_codes import MAX_QUERY_BLOCKS as MAX_QUERY_BLOCKS
from pallas_kernels.shared.tile_codes import MAX_TILES as MAX_TILES
from pallas_kernels.shared.tile_codes import QUERY_BLOCK_SHIFT as QUERY_BLOCK_SHIFT
from pallas_kernels.shared.tile_codes import Lists as Lists
from pallas_kernels.shared.tile_codes import codes_of as codes_of
