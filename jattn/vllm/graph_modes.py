"""How much of a step vLLM puts into a graph: its CUDA graph modes, read as kinds of compiled executables."""

import enum

from pallas_kernels.checks import require, require_type


class AttentionCGSupport(enum.IntEnum):
    """Which batches a back end can run inside a graph; a model can what the least of its back ends can.

    Source: vLLM `AttentionCGSupport`.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class CUDAGraphMode(enum.Enum):
    """What is captured: nothing, all but attention, or all; apart for uniform decodes and mixed batches.

    Source: vLLM `CUDAGraphMode`.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    @property
    def has_separate_routine(self) -> bool:
        """Decodes and mixed batches are captured in different ways."""
        return isinstance(self.value, tuple)

    @property
    def decode_mode(self) -> "CUDAGraphMode":
        """How batches of uniform decodes run."""
        return CUDAGraphMode(self.value[0]) if self.has_separate_routine else self

    @property
    def mixed_mode(self) -> "CUDAGraphMode":
        """How all other batches run."""
        return CUDAGraphMode(self.value[1]) if self.has_separate_routine else self


def resolve_cudagraph_mode(
    mode: CUDAGraphMode,
    min_cg_support: AttentionCGSupport,
    *,
    uniform_decode_query_len: int = 1,
    attention_is_split_op: bool = True,
) -> CUDAGraphMode:
    """The mode that a model's back ends allow, nearest to the one asked for.

    Args:
        mode: Asked for.
        min_cg_support: The least support among the model's back ends.
        uniform_decode_query_len: Tokens of a decode row.
        attention_is_split_op: Graphs without attention are possible.

    Raises:
        ValueError: Mixed batches shall be captured whole, and no batch can be.

    Source: vLLM `resolve_cudagraph_mode_and_sizes`.
    """
    require_type("mode", mode, CUDAGraphMode, "a member, not its name")
    without_full = CUDAGraphMode.PIECEWISE if attention_is_split_op else CUDAGraphMode.NONE
    if mode.mixed_mode is CUDAGraphMode.FULL and min_cg_support is not AttentionCGSupport.ALWAYS:
        supported = min_cg_support is not AttentionCGSupport.NEVER
        require(
            supported,
            "cudagraph mode",
            "not be FULL where a back end supports no graph (use PIECEWISE)",
            mode.name,
        )
        mode = CUDAGraphMode.FULL_AND_PIECEWISE if attention_is_split_op else CUDAGraphMode.FULL_DECODE_ONLY
    needed = (
        AttentionCGSupport.UNIFORM_BATCH
        if uniform_decode_query_len > 1
        else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    return without_full if mode.decode_mode is CUDAGraphMode.FULL and min_cg_support < needed else mode
