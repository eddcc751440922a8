"""What the tensor core's code has no instructions for."""

import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

from pallas_kernels.ptx.mma import ADJACENT_BYTES, dequantize_to_f16x2


def test_an_8_bit_type_without_code_is_refused_by_name():
    with ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        four = ir.Operation.create("tests.four_numbers", [ir.IntegerType.get_signless(32)]).result
        with pytest.raises(ValueError, match=r"dtype must be one of 'int8'.*, got 'float8_e4m3fnuz'\."):
            dequantize_to_f16x2(four, jnp.float8_e4m3fnuz, ADJACENT_BYTES)
