"""Bounds of a query's products with the keys of each cache block, and which blocks are worth a look."""

from pallas_kernels.block_scores.entry import block_scores as block_scores
from pallas_kernels.block_scores.entry import why_not_block_scores as why_not_block_scores
from pallas_kernels.block_scores.selection import BestBlocks as BestBlocks
from pallas_kernels.block_scores.selection import best_blocks as best_blocks
from pallas_kernels.block_scores.top_p import MAX_SHORT_ROW_LEN as MAX_SHORT_ROW_LEN
from pallas_kernels.block_scores.top_p import MAX_TOP_P_LEN as MAX_TOP_P_LEN
from pallas_kernels.block_scores.top_p import top_p_threshold as top_p_threshold
from pallas_kernels.ptx.top_k_blocks import MAX_LEN as MAX_LEN
