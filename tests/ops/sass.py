"""Finds products of compiled code whose operands are not where the program has put them.

A product on the tensor cores is told by descriptors where in shared memory its operands lie. The
assembler of Triton 3.6 can take one from a register that nothing was written to, or something else
since: part of the address of an argument, say. Such a product reads anywhere. What descriptors come
from is followed through all registers and along all branches: neither arguments nor what a register
happens to hold when a program begins are part of it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@\S+ )?([\w.:]+)\s*([^;]*);")
_REGISTER = re.compile(r"\b(U?R)(\d+)\b")
_ARGUMENT = re.compile(r"c\[0x0\]\[0x(2[1-9a-f]|[3-9a-f].|\w{3,}.)\w\]")  # from 0x210 on
_PREDICATE = re.compile(r"!?U?P[T\d]")
_LOADS = {"LDG", "LDS", "LDSM", "LDL", "S2R", "S2UR", "SHFL"}  # of what is no argument
_WRITES_NOTHING = {"STG", "STS", "STSM", "STL", "LDGSTS", "BAR", "ISETP", "UISETP", "HGMMA"} | {
    "UTMALDG", "UTMASTG", "UTMACMDFLUSH", "SYNCS",
}  # fmt: skip
_JUMPS = {"BRA", "BRX", "EXIT"}

Registers = frozenset[tuple[str, int]]

_UNWRITTEN: Registers = frozenset(
    (kind, number) for kind, count in (("R", 255), ("UR", 63)) for number in range(count)
)


class Instruction(NamedTuple):
    """A line of the code."""

    guarded: bool  # done only where a predicate holds
    name: str
    operands: list[str]

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")

    @property
    def kind(self) -> str:
        return self.parts[0]


def products_astray(text: str) -> int:
    """How many products have a descriptor from elsewhere, in what nvdisasm prints."""
    code, labels = _read(text)
    before: list[Registers | None] = [_UNWRITTEN, *[None] * (len(code) - 1)]
    waiting = [0]
    while waiting:
        here = waiting.pop()
        after = _after(code[here], before[here] or frozenset())
        for there in _next(here, code[here], labels):
            known = before[there]
            if known is None or not after <= known:
                before[there] = after | (known or frozenset())
                waiting.append(there)
    return sum(map(_is_astray, code, before))


def _read(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """The code, and which line of it each label stands before."""
    code: list[Instruction] = []
    labels = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            guard, name, operands = match.groups()
            code.append(Instruction(guard is not None, name, operands.split(", ")))
        elif line.startswith(".L"):
            labels[line.rstrip(":")] = len(code)
    return code, labels


def _next(number: int, line: Instruction, labels: dict[str, int]) -> list[int]:
    """The lines that may come after one."""
    if line.kind not in _JUMPS:
        return [number + 1]
    found = [labels[name] for name in re.findall(r"\.L\w+", ",".join(line.operands))]
    return [*found, number + 1] if line.guarded else found


def _after(line: Instruction, known: Registers) -> Registers:
    """The registers that hold what descriptors must not come from, after a line."""
    operands = [each for each in line.operands if not _PREDICATE.fullmatch(each)]
    if line.kind in _WRITES_NOTHING | _JUMPS or not operands:
        return known
    pairs = 2 if line.kind == "CS2R" or {"64", "WIDE"} & {*line.parts} else 1
    written = _registers(operands[0], 4 if "128" in line.parts or line.kind == "LDSM" else pairs)
    read = known & {each for operand in operands[1:] for each in _registers(operand, pairs)}
    if line.kind not in _LOADS and (read or any(map(_ARGUMENT.search, operands[1:]))):
        return known | written
    return known if line.guarded else known - written


def _registers(operand: str, number: int) -> Registers:
    found = _REGISTER.findall(operand)
    return frozenset((kind, int(first) + n) for kind, first in found for n in range(number))


def _is_astray(line: Instruction, known: Registers | None) -> bool:
    """Four registers hold two descriptors; the first is not used where rows are in registers."""
    match = re.search(r"gdesc\[UR(\d+)\]", ",".join(line.operands))
    if match is None or known is None:
        return False
    skipped = 0 if "gdesc" in line.operands[1] else 2
    return any(("UR", int(match[1]) + number) in known for number in range(skipped, 4))
