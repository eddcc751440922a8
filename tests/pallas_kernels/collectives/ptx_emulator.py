"""Run PTX programs of whole thread blocks on a CPU, with the instructions that the collectives use.

All threads of a block execute each instruction together and wait together: a thread whose wait is over polls
again with the others. A block yields when it branches back to a wait loop, so that other blocks continue.
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
        """Allocate bytes and return their address."""
        address = self.used
        self.used += -(-num_bytes // 256) * 256
        assert self.used <= len(self.bytes)
        return address

    def put(self, array: np.ndarray) -> int:
        """Copy an array to memory and return its address."""
        address = self.zeros(array.nbytes)
        self.bytes[address : address + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Read an array from memory."""
        dtype = np.dtype(dtype)
        return (
            self.bytes[address : address + int(np.prod(shape)) * dtype.itemsize]
            .view(dtype)
            .reshape(shape)
            .copy()
        )


class Block:
    """One thread block."""

    def __init__(self, code: str, memory: Memory, operands: list[Any], threads: int) -> None:
        self.memory, self.shared, self.threads = memory, np.zeros(1 << 12, np.uint8), threads
        self.registers: dict[str, np.ndarray] = {}
        for n, value in enumerate(operands):
            self.registers[f"${n}"] = np.broadcast_to(np.asarray(value, np.uint64), (threads,)).copy()
        parts = re.split(r"(\w+:)|;", code.strip()[1:-1])
        self.lines = [part.strip() for part in parts if part and part.strip()]
        self.labels = {line[:-1]: i for i, line in enumerate(self.lines) if line.endswith(":")}

    def run(self) -> Iterator[None]:
        """Run to the end, yielding at each poll of a wait loop."""
        line_number = 0
        while line_number < len(self.lines):
            line = self.lines[line_number]
            line_number += 1
            if line.endswith(":") or line.startswith("."):
                continue
            predicate, name, rest = STATEMENT.fullmatch(line).groups()
            is_active = (
                np.full(self.threads, True) if predicate is None else self.registers[predicate].astype(bool)
            )
            if name == "bra":
                assert rest.startswith("WAIT") or is_active.all() or not is_active.any(), line
                if is_active.any():
                    line_number = self.labels[rest]
                    yield
            elif name == "trap":
                if is_active.any():
                    raise Trap
            else:
                self.step(name.split("."), OPERAND.findall(rest), is_active)

    def value(self, operand: str, kind: str) -> np.ndarray:
        """Return the bits of an operand."""
        if operand.startswith("{"):
            low, high = (self.value(part, "b32") for part in re.findall(r"[\w$]+", operand))
            return low.astype(np.uint64) | (high.astype(np.uint64) << 32)
        if operand.startswith("0f"):
            return np.full(self.threads, int(operand[2:], 16), np.uint32)
        if re.fullmatch(r"-?\d+|0x[\da-f]+", operand):
            return np.full(self.threads, int(operand, 0) % 2**32, WIDTHS[kind])
        return self.registers[operand].astype(WIDTHS[kind])

    def number(self, operand: str) -> np.ndarray:
        """Return an operand as float32."""
        return self.value(operand, "f32").view(np.float32)

    def set(self, name: str, bits: np.ndarray, is_active: np.ndarray) -> None:
        """Set a register's bits in the active threads."""
        bits = bits.view(np.uint32) if bits.dtype == np.float32 else bits
        before = self.registers.get(name, np.zeros_like(bits))
        self.registers[name] = np.where(is_active, bits, before.astype(bits.dtype))

    def addresses(self, operand: str) -> np.ndarray:
        """Return the addresses of [register + offset]."""
        register, _, offset = operand[1:-1].partition("+")
        return self.value(register.strip(), "b64").astype(np.int64) + int(offset or 0)

    def step(self, name: list[str], operands: list[str], is_active: np.ndarray) -> None:
        """Execute one instruction."""
        opcode, kind, target = name[0], name[-1], operands[0]
        value = lambda n, kind=kind: self.value(operands[n], kind)
        if opcode in ("ld", "st"):
            self.access(
                opcode, kind, operands, is_active, self.shared if "shared" in name else self.memory.bytes
            )
        elif opcode == "bar":
            pass
        elif opcode == "shfl":
            source = np.arange(self.threads) ^ int(operands[2])
            self.set(target, value(1)[source], is_active)
        elif opcode == "mov" and target.startswith("{"):
            whole, half = value(1).astype(np.uint64), 8 * WIDTHS[kind]().itemsize // 2
            for n, part in enumerate(re.findall(r"\w+", target)):
                self.set(part, (whole >> np.uint64(half * n)) & np.uint64(2**half - 1), is_active)
        elif opcode == "mov":
            self.set(target, value(1), is_active)
        elif opcode == "setp":
            self.set(target, COMPARED[name[1]](value(1), value(2)), is_active)
        elif kind == "pred":
            first = self.registers[operands[1]]
            self.set(target, ~first if opcode == "not" else first & self.registers[operands[2]], is_active)
        elif opcode == "cvt" or kind == "f32":
            self.set(target, self.floating(name, operands), is_active)
        elif name[:2] == ["mul", "wide"]:
            self.set(target, value(1, "u32").astype(np.uint64) * value(2, "u32").astype(np.uint64), is_active)
        elif opcode in BITWISE:
            self.set(target, BITWISE[opcode](value(1), value(2)), is_active)
        else:
            arithmetic = {
                "add": lambda: value(1) + value(2), "sub": lambda: value(1) - value(2),
                "mul": lambda: value(1) * value(2), "mad": lambda: value(1) * value(2) + value(3),
                "shl": lambda: value(1) << value(2), "shr": lambda: value(1) >> value(2),
                "rem": lambda: value(1) % value(2),
            }  # fmt: skip
            self.set(target, arithmetic[opcode](), is_active)

    def floating(self, name: list[str], operands: list[str]) -> np.ndarray:
        """Return the result of float32 arithmetic, or two numbers packed into a 16-bit pair."""
        numbers = [self.number(operand) for operand in operands[1:]]
        if name[0] == "cvt" and name[1] == "rn":
            dtype = ml_dtypes.bfloat16 if name[2] == "bf16x2" else np.float16
            high, low = (number.astype(dtype).view(np.uint16).astype(np.uint32) for number in numbers)
            return low | high << 16
        if name[0] == "cvt":
            return self.value(operands[1], "b16").view(np.float16).astype(np.float32)
        if name[0] == "fma":
            exact = numbers[0].astype(np.float64) * numbers[1] + numbers[2]
            return exact.astype(np.float32)
        if name[0] == "rsqrt":
            return (1 / np.sqrt(numbers[0].astype(np.float64))).astype(np.float32)
        return {"add": np.add, "mul": np.multiply}[name[0]](*numbers)

    def access(
        self, opcode: str, kind: str, operands: list[str], is_active: np.ndarray, memory: np.ndarray
    ) -> None:
        """Load or store one or two registers."""
        address, registers = (operands[1], operands[0]) if opcode == "ld" else operands[:2]
        size = WIDTHS[kind]().itemsize
        start = np.where(is_active, self.addresses(address), 0)
        assert not (start % size).any(), address
        for n, register in enumerate(re.findall(r"\w+", registers)):
            span = start[:, None] + n * size + np.arange(size)
            if opcode == "ld":
                self.set(register, memory[span].view(WIDTHS[kind]).ravel(), is_active)
            else:
                memory[span[is_active]] = self.value(register, kind)[:, None].view(np.uint8)[is_active]
