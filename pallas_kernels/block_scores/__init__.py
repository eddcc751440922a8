"""Scores of cache blocks for sparse attention, and the selection of the blocks with the highest scores."""

from pallas_kernels.block_scores.entry import block_scores as block_scores
from pallas_kernels.block_scores.entry import why_not_block_scores as why_not_block_scores
from pallas_kernels.block_scores.selection import SelectedBlocks as SelectedBlocks
from pallas_kernels.block_scores.selection import select_top_blocks as select_top_blocks
from pallas_kernels.block_scores.top_p import MAX_SHORT_ROW_LEN as MAX_SHORT_ROW_LEN
from pallas_kernels.block_scores.top_p import MAX_TOP_P_LEN as MAX_TOP_P_LEN
from pallas_kernels.block_scores.top_p import top_p_threshold as top_p_threshold
from pallas_kernels.ptx.top_k_blocks import MAX_LEN as MAX_LEN
