"""What kernels share: scores and masks, the cut of head_dim that the tensor core wants."""

from pallas_kernels.shared.arithmetic import block_of as block_of
from pallas_kernels.shared.memory import ALIGNED_BYTES as ALIGNED_BYTES
from pallas_kernels.shared.memory import unsliced as unsliced
from pallas_kernels.shared.score import MAX_CHUNK_SIZE as MAX_CHUNK_SIZE
from pallas_kernels.shared.score import Score as Score
from pallas_kernels.shared.score import bounded as bounded
from pallas_kernels.shared.types import Interpret as Interpret
