"""Paged decode on Hopper: every request's last tokens against its paged past, all SMs busy to the end."""

from pallas_kernels.paged_decode.call import LIST_BLOCK_SIZES
from pallas_kernels.paged_decode.entry import paged_decode
from pallas_kernels.paged_decode.schedule import BlockList, Schedule, schedule_for
from pallas_kernels.paged_decode.sizes import DecodeSizes, default_sizes
