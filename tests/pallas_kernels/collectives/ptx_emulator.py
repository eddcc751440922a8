"""Runs PTX programs of whole thread blocks on a CPU: the instructions that sums over devices are made of.

All threads of a block go on together, an instruction at a time, and wait together: one that has what it waits
for asks once more with the others. A block yields where it goes back to wait, so that other blocks go on.
"""

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

WIDTHS = {
    "b16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "f32": np.uint32,
    "b64": np.uint64,
    "s64": np.uint64,
}
STATEMENT = re.compile(r"(?:@(\w+)\s+)?([\w.]+)\s*(.*)", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
COMPARED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "gt": np.greater}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


class Trap(Exception):
    """A thread has trapped."""


class Memory:
    """Global memory of all devices: arrays, each at an address."""

    def __init__(self, num_bytes: int = 1 << 28) -> None:
        self.bytes, self.used = np.zeros(num_bytes, np.uint8), 256

    def zeros(self, num_bytes: int) -> int:
        """The address of so many bytes."""
        at = self.used
        self.used += -(-num_bytes // 256) * 256
        assert self.used <= len(self.bytes)
        return at

    def put(self, array: np.ndarray) -> int:
        """The address of a copy."""
        at = self.zeros(array.nbytes)
        self.bytes[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        return at

    def get(self, at: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """What has become of it."""
        dtype = np.dtype(dtype)
        return self.bytes[at : at + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape).copy()


class Block:
    """One thread block."""

    def __init__(self, code: str, memory: Memory, operands: list[Any], threads: int) -> None:
        self.memory, self.shared, self.threads = memory, np.zeros(1 << 12, np.uint8), threads
        self.registers: dict[str, np.ndarray] = {}
        for n, value in enumerate(operands):
            self.registers[f"${n}"] = np.broadcast_to(np.asarray(value, np.uint64), (threads,)).copy()
        parts = re.split(r"(\w+:)|;", code.strip()[1:-1])
        self.lines = [part.strip() for part in parts if part and part.strip()]
        self.labels = {line[:-1]: at for at, line in enumerate(self.lines) if line.endswith(":")}

    def run(self) -> Iterator[None]:
        """Runs to the end."""
        at = 0
        while at < len(self.lines):
            line = self.lines[at]
            at += 1
            if line.endswith(":") or line.startswith("."):
                continue
            predicate, name, rest = STATEMENT.fullmatch(line).groups()
            where = (
                np.full(self.threads, True) if predicate is None else self.registers[predicate].astype(bool)
            )
            if name == "bra":
                assert rest.startswith("WAIT") or where.all() or not where.any(), line
                if where.any():
                    at = self.labels[rest]
                    yield
            elif name == "trap":
                if where.any():
                    raise Trap
            else:
                self.step(name.split("."), OPERAND.findall(rest), where)

    def value(self, operand: str, kind: str) -> np.ndarray:
        """An operand's bits."""
        if operand.startswith("{"):
            low, high = (self.value(part, "b32") for part in re.findall(r"[\w$]+", operand))
            return low.astype(np.uint64) | (high.astype(np.uint64) << 32)
        if operand.startswith("0f"):
            return np.full(self.threads, int(operand[2:], 16), np.uint32)
        if re.fullmatch(r"-?\d+|0x[\da-f]+", operand):
            return np.full(self.threads, int(operand, 0) % 2**32, WIDTHS[kind])
        return self.registers[operand].astype(WIDTHS[kind])

    def number(self, operand: str) -> np.ndarray:
        """An f32."""
        return self.value(operand, "f32").view(np.float32)

    def set(self, name: str, bits: np.ndarray, where: np.ndarray) -> None:
        """Bits of a register, in the threads that take part."""
        bits = bits.view(np.uint32) if bits.dtype == np.float32 else bits
        before = self.registers.get(name, np.zeros_like(bits))
        self.registers[name] = np.where(where, bits, before.astype(bits.dtype))

    def places(self, operand: str) -> np.ndarray:
        """Addresses of [register + offset]."""
        register, _, offset = operand[1:-1].partition("+")
        return self.value(register.strip(), "b64").astype(np.int64) + int(offset or 0)

    def step(self, name: list[str], operands: list[str], where: np.ndarray) -> None:
        """One instruction."""
        what, kind, to = name[0], name[-1], operands[0]
        value = lambda n, kind=kind: self.value(operands[n], kind)
        if what in ("ld", "st"):
            self.access(what, kind, operands, where, self.shared if "shared" in name else self.memory.bytes)
        elif what == "bar":
            pass
        elif what == "shfl":
            source = np.arange(self.threads) ^ int(operands[2])
            self.set(to, value(1)[source], where)
        elif what == "mov" and to.startswith("{"):
            whole, half = value(1).astype(np.uint64), 8 * WIDTHS[kind]().itemsize // 2
            for n, part in enumerate(re.findall(r"\w+", to)):
                self.set(part, (whole >> np.uint64(half * n)) & np.uint64(2**half - 1), where)
        elif what == "mov":
            self.set(to, value(1), where)
        elif what == "setp":
            self.set(to, COMPARED[name[1]](value(1), value(2)), where)
        elif kind == "pred":
            first = self.registers[operands[1]]
            self.set(to, ~first if what == "not" else first & self.registers[operands[2]], where)
        elif what == "cvt" or kind == "f32":
            self.set(to, self.floating(name, operands), where)
        elif name[:2] == ["mul", "wide"]:
            self.set(to, value(1, "u32").astype(np.uint64) * value(2, "u32").astype(np.uint64), where)
        elif what in BITWISE:
            self.set(to, BITWISE[what](value(1), value(2)), where)
        else:
            arithmetic = {
                "add": lambda: value(1) + value(2), "sub": lambda: value(1) - value(2),
                "mul": lambda: value(1) * value(2), "mad": lambda: value(1) * value(2) + value(3),
                "shl": lambda: value(1) << value(2), "shr": lambda: value(1) >> value(2),
                "rem": lambda: value(1) % value(2),
            }  # fmt: skip
            self.set(to, arithmetic[what](), where)

    def floating(self, name: list[str], operands: list[str]) -> np.ndarray:
        """Of f32: arithmetic, and two of them as one register of 16-bit numbers."""
        numbers = [self.number(operand) for operand in operands[1:]]
        if name[0] == "cvt" and name[1] == "rn":
            dtype = ml_dtypes.bfloat16 if name[2] == "bf16x2" else np.float16
            high, low = (number.astype(dtype).view(np.uint16).astype(np.uint32) for number in numbers)
            return low | high << 16
        if name[0] == "cvt":
            return self.value(operands[1], "b16").view(np.float16).astype(np.float32)
        if name[0] == "fma":
            wide = numbers[0].astype(np.float64) * numbers[1] + numbers[2]
            return wide.astype(np.float32)
        if name[0] == "rsqrt":
            return (1 / np.sqrt(numbers[0].astype(np.float64))).astype(np.float32)
        return {"add": np.add, "mul": np.multiply}[name[0]](*numbers)

    def access(
        self, what: str, kind: str, operands: list[str], where: np.ndarray, memory: np.ndarray
    ) -> None:
        """Loads or stores one or two registers."""
        place, registers = (operands[1], operands[0]) if what == "ld" else operands[:2]
        size = WIDTHS[kind]().itemsize
        at = np.where(where, self.places(place), 0)
        assert not (at % size).any(), place
        for n, register in enumerate(re.findall(r"\w+", registers)):
            span = at[:, None] + n * size + np.arange(size)
            if what == "ld":
                self.set(register, memory[span].view(WIDTHS[kind]).ravel(), where)
            else:
                memory[span[where]] = self.value(register, kind)[:, None].view(np.uint8)[where]
