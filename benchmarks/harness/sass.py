"""What the loops of a kernel move, read from its machine code (SASS, as cuobjdump prints it)."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_BITS = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
_REGISTERS = 65_536  # of a multiprocessor
_THREADS = {"sm_75": 1024, "sm_86": 1536, "sm_89": 1536, "sm_120": 1536}  # of a multiprocessor, 2,048 on all others
BLOCK = 256  # threads of a block that streams elements: kThreads in csrc/cuda/kernel.h, NUM_WARPS in triton_table.py


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of SASS without its predicate."""

    address: int
    name: str  # "LDG.E.128"
    operands: str

    @property
    def kind(self) -> str:
        """The name without its modifiers."""
        return self.name.partition(".")[0]

    @property
    def bits(self) -> int:
        """What a load or store moves per thread."""
        return next((_BITS[part] for part in self.name.split(".") if part in _BITS), 32)


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop that touches global memory."""

    loads: dict[int, int]  # how many global loads of so many bits per thread
    stores: dict[int, int]
    spills: int  # loads and stores of local memory
    in_flight: int  # bytes that a thread has asked for before it first waits for any of them
    instructions: int = 0  # of one turn
    before: int = 0  # instructions in front of the loop, and not in another one: at most what a block runs before it

    def __str__(self) -> str:
        """For messages: "loads 4 x 64 + 4 x 128, stores 4 x 128"."""
        parts = [f"{what} {_spelled(counts)}" for what, counts in (("loads", self.loads), ("stores", self.stores))]
        return ", ".join(parts) + (f", {self.spills} of local memory" if self.spills else "")


def _spelled(counts: dict[int, int]) -> str:
    return " + ".join(f"{count} x {bits}" for bits, count in sorted(counts.items())) or "none"


def instructions(code: str) -> list[Instruction]:
    """Parse the body of one function."""
    return [Instruction(int(address, 16), name, rest.strip()) for address, name, rest in _INSTRUCTION.findall(code)]


def loops(code: str) -> list[Loop]:
    """Innermost loops with global loads or stores, in the order of their addresses."""
    found = instructions(code)
    ranges: dict[int, int] = {}  # first address: last address, which jumps back
    for instruction in found:
        target = _TARGET.search(instruction.operands) if instruction.kind == "BRA" else None
        if target and int(target[1], 16) < instruction.address:
            ranges[int(target[1], 16)] = instruction.address
    innermost = [
        (first, last)
        for first, last in sorted(ranges.items())
        if not any(first <= other and end <= last and (other, end) != (first, last) for other, end in ranges.items())
    ]
    bodies = [[i for i in found if first <= i.address <= last] for first, last in innermost]
    looped = {i.address for body in bodies for i in body}
    straight = [i.address for i in found if i.address not in looped]
    moving = [body for body in bodies if any(i.kind in ("LDG", "STG") for i in body)]
    return [_loop(body, sum(address < body[0].address for address in straight)) for body in moving]


def _loop(body: list[Instruction], before: int) -> Loop:
    moves = {kind: Counter(i.bits for i in body if i.kind == kind) for kind in ("LDG", "STG")}
    spills = sum(i.kind in ("LDL", "STL") for i in body)
    return Loop(dict(moves["LDG"]), dict(moves["STG"]), spills, bytes_in_flight(body), len(body), before)


def bytes_in_flight(body: list[Instruction]) -> int:
    """Bytes that are loaded until the first instruction that reads one of the registers they go to."""
    pending: set[int] = set()
    total = 0
    for instruction in body:
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", instruction.operands)]
        if instruction.kind == "LDG":
            first = registers[0]
            pending.update(range(first, first + max(instruction.bits // 32, 1)))
            total += instruction.bits // 8
            continue
        # The first operand is where most instructions write; a store has only operands that it reads.
        read = registers if instruction.kind in ("STG", "STS", "STL") else registers[1:]
        if pending.intersection(read):
            break
    return total


def blocks_per_multiprocessor(regs: int, arch: str) -> int:
    """How many blocks of 256 threads run at once, by registers and threads."""
    of_warp = -(-regs * 32 // 256) * 256  # registers are handed out 256 at a time
    return min(_REGISTERS // (of_warp * BLOCK // 32), _THREADS.get(arch, 2048) // BLOCK)
