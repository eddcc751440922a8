"""Dtypes that the tensor-core code does not support."""

import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

from pallas_kernels.ptx.mma import ADJACENT_BYTES, dequantize_to_f16x2


def test_dequantizing_an_unsupported_8_bit_dtype_is_an_error():
    with ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        register = ir.Operation.create("tests.four_numbers", [ir.IntegerType.get_signless(32)]).result
        with pytest.raises(ValueError, match=r"dtype must be one of 'int8'.*, got 'float8_e4m3fnuz'\."):
            dequantize_to_f16x2(register, jnp.float8_e4m3fnuz, ADJACENT_BYTES)
