"""The phrase of a round: six words that people compare in place of the 64 digits of its fingerprint.

- The words are the first 66 bits of scrypt of the fingerprint's 32 bytes (N = 16384, r = 8, p = 1, 9 bytes, salt
  `echo-swarm round phrase v1`). Each 11 bits, the most significant first, are the index of a word in the English list
  of BIP-39. An attacker who searches for a root document with the same phrase pays one scrypt for each guess.
- The list, its order and the parameters are frozen by golden vectors.
"""

import re
from hashlib import scrypt

from protocol.text.word_list import WORDS

COUNT = 6
BITS = 11
SALT = b"echo-swarm round phrase v1"
COST, BLOCK_SIZE = 2**14, 8
"""The parameters that RFC 7914 gives for interactive use: 16 MiB and about 50 ms."""


def phrase(fingerprint: str) -> str:
    """Return the phrase of a round's fingerprint."""
    size_bytes = (COUNT * BITS + 7) // 8
    digest = scrypt(bytes.fromhex(fingerprint), salt=SALT, n=COST, r=BLOCK_SIZE, p=1, dklen=size_bytes)
    number = int.from_bytes(digest, "big") >> (size_bytes * 8 - COUNT * BITS)
    return " ".join(WORDS[number >> BITS * place & (2**BITS - 1)] for place in reversed(range(COUNT)))


def is_phrase_of(text: str, fingerprint: str) -> bool:
    """Return True if a typed phrase is the one of this fingerprint; case, commas and hyphens do not count."""
    return words_of(text) == phrase(fingerprint).split()


def words_of(text: str) -> list[str]:
    """Return the words of a typed phrase."""
    return re.findall(r"[a-z]+", text.lower())
