"""QR codes as SVG and for terminals, for texts of up to 213 bytes: byte mode, error correction level M (ISO/IEC 18004).

    text → bits → codewords → blocks with Reed-Solomon codewords, interleaved → modules → the best mask

- A larger text gives None: a page does without the picture.
- A terminal shows two rows of modules in a line, black on white whatever its own colours are.
- A matrix is a list of rows; True is a dark module.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from protocol.text.html import Markup, el

Matrix = list[list[bool]]

QUIET = 4
"""Light modules around the code, which readers need."""

HALVES = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
"""A character for an upper and a lower module."""

BLACK_ON_WHITE, PLAIN = "\x1b[38;5;16;48;5;231m", "\x1b[0m"


class _QrSize(NamedTuple):
    """The codewords of a version of QR codes at level M, and its alignment patterns."""

    correction: int
    """Reed-Solomon codewords of each block."""
    blocks: tuple[int, ...]
    """Data codewords of each block."""
    centres: tuple[int, ...]


_SIZES = (
    _QrSize(10, (16,), ()),
    _QrSize(16, (28,), (6, 18)),
    _QrSize(26, (44,), (6, 22)),
    _QrSize(18, (32,) * 2, (6, 26)),
    _QrSize(24, (43,) * 2, (6, 30)),
    _QrSize(16, (27,) * 4, (6, 34)),
    _QrSize(18, (31,) * 4, (6, 22, 38)),
    _QrSize(22, (38, 38, 39, 39), (6, 24, 42)),
    _QrSize(22, (36, 36, 36, 37, 37), (6, 26, 46)),
    _QrSize(26, (43, 43, 43, 43, 44), (6, 28, 50)),
)
"""Versions 1 to 10."""

_MASKS: tuple[Callable[[int, int], bool], ...] = (
    lambda row, column: (row + column) % 2 == 0,
    lambda row, column: row % 2 == 0,
    lambda row, column: column % 3 == 0,
    lambda row, column: (row + column) % 3 == 0,
    lambda row, column: (row // 2 + column // 3) % 2 == 0,
    lambda row, column: row * column % 2 + row * column % 3 == 0,
    lambda row, column: (row * column % 2 + row * column % 3) % 2 == 0,
    lambda row, column: ((row + column) % 2 + row * column % 3) % 2 == 0,
)

_FINDER = [True, False, True, True, True, False, True]
_FALSE_FINDERS = (_FINDER + [False] * 4, [False] * 4 + _FINDER)


@lru_cache(maxsize=4)
def qr_svg(text: str, about: str) -> Markup | None:
    """Build the picture of a text, with `about` as its description; None if the text is too long."""
    matrix = qr_matrix(text.encode())
    if matrix is None:
        return None
    side = len(matrix) + 2 * QUIET
    return el(
        "svg",
        el("rect", width=side, height=side, fill="#fff"),
        el("path", d="".join(_runs(matrix)), fill="#000"),
        viewBox=f"0 0 {side} {side}", width=220, height=220, role="img", aria_label=about, class_="qr",
        shape_rendering="crispEdges",
    )  # fmt: skip


def qr_terminal(text: str) -> str | None:
    """Build the picture of a text as lines for a terminal with colours; None if the text is too long."""
    matrix = qr_matrix(text.encode())
    if matrix is None:
        return None
    side = len(matrix) + 2 * QUIET
    blank = [[False] * side]
    rows = blank * QUIET + [[False] * QUIET + row + [False] * QUIET for row in matrix] + blank * (QUIET + 1)
    return "\n".join(
        BLACK_ON_WHITE + "".join(HALVES[both] for both in zip(upper, lower, strict=True)) + PLAIN
        for upper, lower in zip(rows[::2], rows[1::2], strict=True)
    )


def _runs(matrix: Matrix) -> Iterator[str]:
    """Yield the dark modules of each row as the parts of a path."""
    for y, row in enumerate(matrix, QUIET):
        x = 0
        while x < len(row):
            length = next((n for n, dark in enumerate(row[x:]) if dark != row[x]), len(row) - x)
            if row[x]:
                yield f"M{x + QUIET} {y}h{length}v1h-{length}z"
            x += length


def qr_matrix(data: bytes) -> Matrix | None:
    """Return the modules of the smallest code that holds the data; None if no code here does."""
    for version, size in enumerate(_SIZES, 1):
        count_bits = 8 if version < 10 else 16
        if 4 + count_bits + 8 * len(data) <= 8 * sum(size.blocks):
            break
    else:
        return None
    codewords = _interleaved(_padded(data, count_bits, sum(size.blocks)), size)
    fixed = _fixed_modules(version, size)
    _place(fixed, codewords)
    drawn = [_masked(fixed, version, mask) for mask in range(len(_MASKS))]
    return min(drawn, key=_penalty)


def _padded(data: bytes, count_bits: int, capacity: int) -> list[int]:
    """Return the data codewords: mode, length, data, terminator and padding."""
    bits = f"0100{len(data):0{count_bits}b}" + "".join(f"{byte:08b}" for byte in data)
    bits += "0" * min(4, 8 * capacity - len(bits))
    bits += "0" * (-len(bits) % 8)
    words = [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
    return words + [(0xEC, 0x11)[n % 2] for n in range(capacity - len(words))]


def _times(left: int, right: int) -> int:
    """Multiply in GF(256) by the polynomial of QR codes."""
    product_ = 0
    while right:
        if right & 1:
            product_ ^= left
        left = left << 1 ^ (0x11D if left & 0x80 else 0)
        right >>= 1
    return product_


def _correction(data: Sequence[int], count: int) -> list[int]:
    """Return the Reed-Solomon codewords of a block."""
    generator, root = [1], 1
    for _ in range(count):
        shifted = [*generator, 0]
        for at, factor in enumerate(generator, 1):
            shifted[at] ^= _times(factor, root)
        generator, root = shifted, _times(root, 2)
    rest = [*data, *[0] * count]
    for at in range(len(data)):
        factor = rest[at]
        for step, value in enumerate(generator):
            rest[at + step] ^= _times(value, factor)
    return rest[len(data) :]


def _interleaved(data: Sequence[int], size: _QrSize) -> list[int]:
    blocks, at = [], 0
    for length in size.blocks:
        blocks.append(list(data[at : at + length]))
        at += length
    corrections = [_correction(block, size.correction) for block in blocks]
    words = [block[n] for n in range(max(size.blocks)) for block in blocks if n < len(block)]
    return words + [block[n] for n in range(size.correction) for block in corrections]


class _Modules(NamedTuple):
    """The modules of a code before its mask: `free` ones hold data."""

    dark: Matrix
    free: Matrix


def _fixed_modules(version: int, size: _QrSize) -> _Modules:
    """Draw finders, timing and alignment patterns and the version, and reserve the places of the format."""
    side = 17 + 4 * version
    modules = _Modules([[False] * side for _ in range(side)], [[True] * side for _ in range(side)])
    for n in range(side):
        _set(modules, 6, n, dark=n % 2 == 0)
        _set(modules, n, 6, dark=n % 2 == 0)
    for top, left in ((0, 0), (0, side - 7), (side - 7, 0)):
        for row, column in product(range(-1, 8), repeat=2):
            if 0 <= top + row < side and 0 <= left + column < side:
                ring = max(abs(row - 3), abs(column - 3))
                _set(modules, top + row, left + column, dark=ring not in (2, 4))
    last = side - 7
    for row, column in product(size.centres, repeat=2):
        if (row, column) not in ((6, 6), (6, last), (last, 6)):
            for down, right in product(range(-2, 3), repeat=2):
                _set(modules, row + down, column + right, dark=max(abs(down), abs(right)) != 1)
    for n in range(9):
        for row, column in ((8, n), (n, 8), (8, side - 1 - n), (side - 1 - n, 8)):
            if n < 8 or max(row, column) == 8:
                modules.free[row][column] = False
    _set(modules, side - 8, 8, dark=True)
    if version >= 7:
        bits = version << 12 | _remainder(version << 12, 0x1F25)
        for n in range(18):
            _set(modules, n // 3, side - 11 + n % 3, dark=bool(bits >> n & 1))
            _set(modules, side - 11 + n % 3, n // 3, dark=bool(bits >> n & 1))
    return modules


def _set(modules: _Modules, row: int, column: int, *, dark: bool) -> None:
    modules.dark[row][column], modules.free[row][column] = dark, False


def _remainder(value: int, divisor: int) -> int:
    while value.bit_length() >= divisor.bit_length():
        value ^= divisor << value.bit_length() - divisor.bit_length()
    return value


def _place(modules: _Modules, codewords: Sequence[int]) -> None:
    """Write the codewords in columns of two, from the right, upwards and downwards by turns."""
    bits = (bool(word >> shift & 1) for word in codewords for shift in range(7, -1, -1))
    side = len(modules.dark)
    upwards = True
    for right in [*range(side - 1, 6, -2), 5, 3, 1]:
        for step in range(side):
            row = side - 1 - step if upwards else step
            for column in (right, right - 1):
                if modules.free[row][column]:
                    modules.dark[row][column] = next(bits, False)
        upwards = not upwards


def _masked(modules: _Modules, version: int, mask: int) -> Matrix:
    """Return the modules under a mask, with the format that names it."""
    rule, side = _MASKS[mask], 17 + 4 * version
    drawn = [
        [dark ^ (modules.free[y][x] and rule(y, x)) for x, dark in enumerate(row)] for y, row in enumerate(modules.dark)
    ]
    level_m = 0
    value = (level_m << 3 | mask) << 10
    bits = (value | _remainder(value, 0x537)) ^ 0x5412
    for n in range(15):
        dark = bool(bits >> n & 1)
        drawn[n if n < 6 else n + 1 if n < 8 else side - 15 + n][8] = dark
        drawn[8][side - 1 - n if n < 8 else 15 - n if n < 9 else 14 - n] = dark
    return drawn


def _penalty(matrix: Matrix) -> int:
    """Return how hard a code is to read: long runs, blocks, false finders, and an uneven share of dark modules."""
    side, total = len(matrix), 0
    for line in [*matrix, *(list(column) for column in zip(*matrix, strict=True))]:
        run = 0
        for at, dark in enumerate(line):
            run = run + 1 if at and dark == line[at - 1] else 1
            total += 3 if run == 5 else 1 if run > 5 else 0
        total += 40 * sum(line[at : at + 11] in _FALSE_FINDERS for at in range(side - 10))
    for y, x in product(range(side - 1), repeat=2):
        total += 3 * (matrix[y][x] == matrix[y][x + 1] == matrix[y + 1][x] == matrix[y + 1][x + 1])
    share = sum(map(sum, matrix)) * 20 // side**2
    return total + 10 * min(abs(share - 10), abs(share + 1 - 10)) if share < 10 else total + 10 * (share - 10)
