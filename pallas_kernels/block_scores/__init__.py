"""Bounds of a query's products with the keys of each cache block, and which blocks are worth a look."""

from pallas_kernels.block_scores.entry import block_scores as block_scores
from pallas_kernels.block_scores.entry import why_not_scores as why_not_scores
from pallas_kernels.block_scores.selection import BestBlocks as BestBlocks
from pallas_kernels.block_scores.selection import best_blocks as best_blocks
from pallas_kernels.block_scores.top_p import MAX_SHARES as MAX_SHARES
from pallas_kernels.block_scores.top_p import MAX_SHORT as MAX_SHORT
from pallas_kernels.block_scores.top_p import least_of_mass as least_of_mass
from pallas_kernels.ptx.top_k_blocks import MAX_LEN as MAX_LEN
