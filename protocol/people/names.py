"""Names of nodes: those that they give themselves, compared by how they look, and nicknames made from a node's id.

- A name is untrusted text. `plain_name` keeps what is visible on one line: no control characters, direction marks or
  invisible characters, and no brackets, which only the coordinator adds.
- Two names look alike if their skeletons are equal: without case, accents, spaces and punctuation, and with letters of
  other scripts replaced by the Latin ones that they resemble. This follows Unicode's technical standard 39, but is
  coarser: a wrong match costs one of the two names nine characters.
- A name that could be mistaken for another's is shown with the end of its node's id in brackets: `with_id`.
- A name is never a reason to reject a node.
- A nickname (`calm-heron-417`) follows from the id alone: a node has the same one everywhere and cannot choose it. It
  is only for reading: there are four million of them, so it identifies no node. The id does.
- The words of nicknames are frozen by golden vectors: another order would rename every node.
"""

import re
import unicodedata
from functools import cache, lru_cache
from hashlib import sha256

from protocol.limits import NAME_MAX_CHARS
from protocol.text.plain import BLANK, UNREADABLE, visible

_QUALITIES = """
able airy amber apt bold brave brisk calm candid clear clever cosy crisp dapper deft eager early fair fast fleet
fond free fresh gentle glad golden grand green happy hardy humble ideal jolly keen kind level light lively loyal
lucid lucky mellow merry mild modest neat nimble noble patient plain polite proud quick quiet rapid ready sage
sharp silent sober steady sunny swift warm
"""
QUALITIES = tuple(_QUALITIES.split())

_CREATURES = """
adder auk badger bat bear beaver bee bison boar bream carp cat cicada cod condor crab crane crow deer dove eagle
egret elk falcon ferret finch fox frog gecko goat goose gull hare hawk heron ibex jay kite koala lark lemur lion
lynx mole moth newt orca oriole otter owl panda perch pika puffin quail raven robin seal sparrow stork swan tern
toad wren
"""
CREATURES = tuple(_CREATURES.split())


def nickname(node_id: str) -> str:
    """Return the name of a node that gave itself none."""
    digest = sha256(node_id.encode(errors="surrogatepass")).digest()
    quality, creature = QUALITIES[digest[0] % len(QUALITIES)], CREATURES[digest[1] % len(CREATURES)]
    return f"{quality}-{creature}-{int.from_bytes(digest[2:6]) % 1000:03}"


SELECTORS = frozenset(map(chr, (0x034F, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10))))
SELECTORS |= frozenset(map(chr, range(0xE0100, 0xE01F0)))
"""Invisible marks: they select a form of the character before them."""

BRACKETS = ("Ps", "Pe")

ID_CHARS = 8
"""Characters from the end of an id: to find a key with the same end takes about 58⁸ keys."""

OFFICES = (
    "admin", "auditor", "coordinator", "echoswarm", "learner", "moderator", "official", "operator", "seeder", "support",
)  # fmt: skip
"""Names of those who speak for a round: no node does."""

EAST_ASIAN = frozenset({"CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "HANGUL", "BOPOMOFO"})
"""Scripts that are written together, and with Latin letters among them."""

_LATIN = re.compile(
    r"(?:(?:LATIN|NEGATIVE (?:CIRCLED|SQUARED) LATIN) (?:SMALL |CAPITAL |LETTER SMALL CAPITAL )(?:LETTER )?"
    r"|REGIONAL INDICATOR SYMBOL LETTER )([A-Z])(?: WITH .*)?"
)
"""Unicode names of letters that are Latin letters with something added."""

_ALIKE = {
    "2": "1a8 1bb 3e9 14bf a645 a6ef a75b",
    "3": "21d 25c 292 437 499 4e1 2ccd a76b 118ca 16f3b 1d206",
    "4": "13ce 118cf",
    "5": "1bd 118db",
    "6": "13ee 2cd3",
    "7": "104fa 1d212",
    "8": "223 9ea a6a 1031a 1e8cb",
    "9": "9ed a67 b68 d6d 2ccb a76f 118cc 118d6",
    "a": "251 3b1 430 13aa 15c5 2376 237a a4ee 102a0 16f40",
    "b": "185 3b2 431 432 44c 463 48d 13cf 13f4 1472 1473 15af 15f7 a4d0 a7b5 10282 102a1 10301",
    "c": "a2 441 4ab 13df 20a1 2ca5 a4da 102a2 10302 1043d 1051c 118e9 118f2 1f74c",
    "d": "f0 256 501 13a0 13e7 146f 15de 15ea 20ab a4d2 a4d3",
    "e": "3b5 435 4bd 4bf 13ac 212e 22ff 2d39 a4f0 ab32 10286 118c6 118ce",
    "f": "3dd 584 15b4 1e9d a4dd ab35 10287 102a5 10525 118c2 1d213",
    "g": "18d 261 50d 581 13c0 13f3 a4d6",
    "h": "3b7 43d 45b 4a3 4bb 4c8 4ca 570 13bb 13c2 13f2 157c 2c8f a4e7 a695 102cf",
    "j": "3f3 458 13ab 148d a4d9",
    "k": "3ba 43a 49b 49f 13e6 16d5 20ad 2c95 a4d7 10518",
    "l": "131 1c0 269 3b9 456 4cf 5d5 5df 627 661 673 6f1 7ca 13a5 13de 14aa 16c1 1d7b 1d7c 2223 2373 2378 23fd "
    "2c93 2cd1 2d4f a4e1 a4f2 a647 1028a 10309 10320 10443 10526 118c3 118d2 16f16 16f28 1d22a 1e8c7",
    "m": "3bc 3fb 43c 4ce 13b7 15f0 16d6 20a5 2c99 a4df 102b0 10311 11700 118e3",
    "n": "3bd 578 57c 2c9b a4e0 1018e 10513",
    "o": "275 3b8 3bf 3c3 43e 473 4e9 585 5e1 647 665 6be 6c1 6d5 6f5 6ff 7c0 966 9e6 a66 ae6 b20 b66 be6 c66 ce6 "
    "d20 d66 e50 ed0 101d 1040 10ff 12d0 13a4 13be 13eb 1d11 2296 229d 236c 2c9f 2d31 2d41 2d54 3007 a4f3 "
    "ab3d ab3e 10292 102ab 1042c 104ea 10516 114d0 118c8 118d5 118d7 118e0 1d21a 1f714",
    "p": "3c1 440 13e2 146d 2374 2ca3 a4d1 10295",
    "q": "51b 563 566 2d55",
    "r": "280 433 493 13a1 13b1 13d2 1587 1d26 2c85 a4e3 ab47 ab48 104dc 16f35 1d216",
    "s": "455 57f 13d5 13da a4e2 10296 10448 118c1 16f3a",
    "t": "3c4 442 4ad 13a2 20ae 22a4 2361 27d9 2ca7 a4d4 10297 102b1 10315 118dc 16f0a 1f768",
    "u": "289 57d 1200 13cc 144c 1d7e 222a 22c3 a4f4 a79f 104f6 118d8 16f42",
    "v": "475 5d8 667 6f7 13d9 142f 2228 22c1 2d38 a4e6 a6df 10197 1051d 11706 118c0 16f08 1d20d 1f708",
    "w": "26f 461 47d 51d 561 13b3 13d4 20a9 a4ea a761 114c5 1170a 1170e 1170f 118e6 118ef",
    "x": "d7 3c7 445 4b3 1541 157d 166d 16b7 2573 292b 292c 2a2f 2a30 2cad 2d5d a4eb ab53 10196 10290 102b4 10317 "
    "10322 10527 118ec",
    "y": "a5 263 3b3 3c5 443 4af 4b1 10e7 13a9 13bd 2ca9 a4ec 102b2 118c4 16f43",
    "z": "3b6 13c3 a4dc 102f5 118c9 118e5",
    "aa": "a733",
    "ae": "e6 4d5",
    "ao": "a735",
    "ar": "1f707",
    "au": "a737",
    "av": "a739 a73b",
    "ay": "a73d",
    "bl": "44b",
    "dz": "2a3",
    "ll": "1c1 5f0 2225 10199",
    "lo": "44e 23e8",
    "ls": "2aa",
    "lt": "20b6",
    "lz": "2ab",
    "mb": "1f76b",
    "oe": "153",
    "oo": "221e a699 a74f",
    "qe": "1f700",
    "t3": "a729",
    "tf": "a777",
    "ts": "2a6",
    "ue": "1d6b",
    "uo": "ab63",
    "vb": "1f76c",
    "lls": "10198",
    "sss": "1f75c",
    "\u4e8c": "30cb",
    "\u516b": "30cf",
    "\u529b": "30ab",
    "\u535c": "30c8",
    "\u53e3": "30ed 56d7",
    "\u5915": "30bf",
    "\u5de5": "30a8",
    "\u3078": "30d8",
}
"""Shape → code points of the lower-case letters that look like it: the part of Unicode's confusables.txt 14 that leads
to ASCII, with the shape of the capital where the two cases differ; and Katakana that look like other characters."""

_SHAPES = {chr(int(point, 16)): shape for shape, points in _ALIKE.items() for point in points.split()}
_SHAPES |= {"i": "l", "1": "l", "|": "l", "0": "o"}


def plain_name(text: str) -> str:
    """Return a name in its one normalized, visible form; empty if nothing of it is visible."""
    composed = unicodedata.normalize("NFKC", "".join(filter(_shows, text)))
    bare = "".join(" " if unicodedata.category(character) in BRACKETS else character for character in composed)
    return unicodedata.normalize("NFC", visible(bare, NAME_MAX_CHARS))


def skeleton(name: str) -> str:
    """Return a key for the look of a name: equal for two names that a reader would confuse."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", name).casefold())
    shapes = "".join(_shape(character) for character in folded)
    joined = shapes.replace("rn", "m").replace("vv", "w")
    return "".join(filter(_counts, joined)) or "".join(joined.split())


def is_imitation(name: str, node_id: str) -> bool:
    """Return True if a name imitates another, whichever nodes have joined.

    It mixes scripts within a word, contains the name of an office, or is the nickname of another key.
    """
    seen = skeleton(name)
    is_nickname = seen[:-3] in _nickname_stems() and seen != skeleton(nickname(node_id))
    return is_nickname or is_office(name) or _is_mixed(name)


def is_office(name: str) -> bool:
    """Return True if a name looks like one of `OFFICES`."""
    seen = skeleton(name)
    return any(office in seen for office in _office_skeletons())


def with_id(name: str, node_id: str) -> str:
    """Return a name with the end of its node's id in brackets, which no other node can have."""
    return f"{name[: NAME_MAX_CHARS - ID_CHARS - 3].rstrip()} ({node_id[-ID_CHARS:]})"


def without_id(name: str) -> str:
    """Return a name as its node gave it: only the coordinator adds brackets."""
    return name.partition(" (")[0]


def _shows(character: str) -> bool:
    return character not in BLANK | SELECTORS and unicodedata.category(character) not in UNREADABLE


@lru_cache(maxsize=4096)
def _shape(character: str) -> str:
    """Return the shape of a lower-case character; empty for a combining mark above, below or through a letter."""
    if unicodedata.combining(character) not in (0, 7, 8, 9):  # these four are vowel signs and the like of Indic scripts
        return ""
    if character in _SHAPES:
        return _SHAPES[character]
    if character.isascii():
        return character
    if match := _LATIN.fullmatch(unicodedata.name(character, "")):
        return _shape(match[1].lower())
    digit = unicodedata.digit(character, None)
    return character if digit is None else _shape(str(digit))


def _counts(character: str) -> bool:
    """Return True for letters, digits and symbols; False for spaces, punctuation and modifiers."""
    category = unicodedata.category(character)
    return category[0] in "LNS" and category not in ("Lm", "Sk")


@cache
def _office_skeletons() -> tuple[str, ...]:
    return tuple(map(skeleton, OFFICES))


@cache
def _nickname_stems() -> frozenset[str]:
    """Return the skeletons of all nicknames without their numbers."""
    return frozenset(skeleton(f"{quality}-{creature}") for quality in QUALITIES for creature in CREATURES)


def _is_mixed(name: str) -> bool:
    """Return True if a word mixes scripts that are not written together, or the name mixes two kinds of digits."""
    zeros = {ord(character) - unicodedata.decimal(character) for character in name if character.isdecimal()}
    return len(zeros) > 1 or any(not _are_together(word) for word in re.split(r"[\W_]+", name))


def _are_together(word: str) -> bool:
    scripts = {_script(character) for character in word if character.isalpha()} - {"MODIFIER"}
    return len(scripts) < 2 or scripts <= EAST_ASIAN | {"LATIN"}


def _script(character: str) -> str:
    """Return the first word of a letter's Unicode name, which is the name of its script."""
    return re.split(r"[ -]", unicodedata.name(character, ""), maxsplit=1)[0]
