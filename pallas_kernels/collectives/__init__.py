"""Optional all-reduce and all-gather of few rows over GPUs of a host that write into each other's memory."""

from pallas_kernels.collectives.entry import all_gather as all_gather
from pallas_kernels.collectives.entry import all_reduce as all_reduce
from pallas_kernels.collectives.entry import all_reduce_rms_norm as all_reduce_rms_norm
from pallas_kernels.collectives.entry import default_shots as default_shots
from pallas_kernels.collectives.entry import why_not_all_gather as why_not_all_gather
from pallas_kernels.collectives.entry import why_not_all_reduce as why_not_all_reduce
from pallas_kernels.collectives.peer_memory import PeerMemory as PeerMemory
from pallas_kernels.collectives.peer_memory import make_peer_memory as make_peer_memory
from pallas_kernels.collectives.support import why_not_all_gather_kernel as why_not_all_gather_kernel
from pallas_kernels.collectives.support import why_not_all_reduce_kernel as why_not_all_reduce_kernel
from pallas_kernels.collectives.support import why_not_peer_memory as why_not_peer_memory
