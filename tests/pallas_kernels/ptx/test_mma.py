"""Dequantization: dtypes without code, and fp8 without the instruction that converts it."""

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir

from pallas_kernels.ptx import mma
from pallas_kernels.ptx.mma import ADJACENT_BYTES, ALTERNATING_BYTES, dequantize_to_f16x2


def test_dequantizing_an_unsupported_8_bit_dtype_is_an_error():
    with ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        register = ir.Operation.create("tests.four_numbers", [ir.IntegerType.get_signless(32)]).result
        with pytest.raises(ValueError, match=r"dtype must be one of 'int8'.*, got 'float8_e4m3fnuz'\."):
            dequantize_to_f16x2(register, jnp.float8_e4m3fnuz, ADJACENT_BYTES)


def execute(code, *registers, **_):
    """Execute the PTX instructions that dequantize without a conversion, on arrays of uint32."""
    if found := re.fullmatch(r"prmt\.b32 \$0, \$1, \$2, 0x(\w{4});", code):
        pool = [(register >> 8 * i) & 0xFF for register in registers for i in range(4)]
        selected = [pool[int(nibble, 16)] for nibble in reversed(found[1])]
        return sum(np.asarray(x, np.uint32) << 8 * i for i, x in enumerate(selected))
    assert code == "mul.rn.f16x2 $0, $1, $2;"
    a, b = (np.broadcast_to(x, (256,)).copy().view(np.float16) for x in registers)
    with np.errstate(invalid="ignore"):
        return (a * b).view(np.uint32)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("pairs", [ADJACENT_BYTES, ALTERNATING_BYTES])
def test_fp8_is_converted_exactly_without_the_instruction(monkeypatch, pairs):
    const = np.uint32
    operations = {"andi": np.bitwise_and, "ori": np.bitwise_or, "shrui": np.right_shift, "subi": np.subtract}
    monkeypatch.setattr(mma, "arith", types.SimpleNamespace(**operations))
    lanes = types.SimpleNamespace(const=const, ptx=execute, add=lambda x, y: x + const(y))
    monkeypatch.setattr(mma, "lanes", lanes)
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint8), i * 37) for i in range(4)], axis=1)
    register = codes.copy().view(np.uint32)[:, 0]
    results = dequantize_to_f16x2(register, jnp.float8_e4m3fn, pairs, has_fp8_conversion=False)
    for result, pair in zip(results, pairs, strict=True):
        expected = codes[:, pair].view(jnp.float8_e4m3fn).astype(np.float16)
        np.testing.assert_array_equal(result.view(np.float16).reshape(256, 2), expected)
