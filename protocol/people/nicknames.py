"""Names that people remember, made from a node's id: `calm-heron-417`.

- Two words and a number follow from the id alone, so a node has the same nickname everywhere and cannot choose it.
- A nickname is only for reading: there are four million of them, so it identifies no node. The id does.
- The words are frozen by golden vectors: another order would rename every node.
"""

from hashlib import sha256

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
