"""The bytes of a stream: each is known from the stream's key and its offset, whoever sends or checks it."""

import random

PERIOD = 1 << 16


def pattern(key, offset, size):
    """`size` bytes from `offset` on."""
    base = _bases.get(key)
    if base is None:
        base = _bases[key] = random.Random(key).randbytes(PERIOD)
    # The number of the period is mixed in, so that bytes a whole number of periods apart differ as well.
    out = bytearray()
    while size > 0:
        at, turn = offset % PERIOD, offset // PERIOD
        piece = base[at:at + min(size, PERIOD - at)]
        out += piece.translate(_shift(turn % 251)) if turn % 251 else piece
        offset, size = offset + len(piece), size - len(piece)
    return bytes(out)


_bases = {}
_shifts = {}


def _shift(by):
    if by not in _shifts:
        _shifts[by] = bytes((value + by) % 256 for value in range(256))
    return _shifts[by]
