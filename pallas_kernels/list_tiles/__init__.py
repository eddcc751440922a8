"""Lists of partial and full tiles of a mask, built from one code per tile."""

from pallas_kernels.list_tiles.entry import list_tiles as list_tiles
from pallas_kernels.ptx.list_tiles import build_lists_by_sorting as build_lists_by_sorting
from pallas_kernels.shared.tile_codes import MAX_QUERY_BLOCKS as MAX_QUERY_BLOCKS
from pallas_kernels.shared.tile_codes import MAX_TILES as MAX_TILES
from pallas_kernels.shared.tile_codes import QUERY_BLOCK_SHIFT as QUERY_BLOCK_SHIFT
from pallas_kernels.shared.tile_codes import ListedTiles as ListedTiles
from pallas_kernels.shared.tile_codes import encode_tiles as encode_tiles
