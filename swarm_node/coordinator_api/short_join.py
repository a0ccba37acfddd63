"""The short form of a join string, `HOST` or `https://HOST`: the fingerprint comes from the coordinator itself.

- A fetched fingerprint proves nothing: the owner compares it with the operator's phrase or fingerprint, which came
  another way. Nothing is joined before that.
- A name without a scheme is tried with https, then with http. Whoever answers, the phrase decides.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import trio

from protocol import limits
from protocol.errors import ConfigInvalid, SwarmError, Unreachable, UntrustedRoot
from protocol.policy.phrase import COUNT, is_phrase_of, phrase, words_of
from protocol.policy.root_document import fingerprint
from swarm_node.coordinator_api.join_string import JoinString, parse
from swarm_node.coordinator_api.origin import Patience, open_origin

PATIENCE = Patience(silence_s=10.0, grace_s=10.0)

ROOT = "1.root.json"

FINGERPRINT_DIGITS = 64

_FINGERPRINT = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}")
_HOST = re.compile(r"(https?://|(?!.*://))[A-Za-z0-9_.:\[\]-]+(/[A-Za-z0-9._~/-]*)?")


@dataclass(frozen=True)
class Proof:
    """Knowledge of the owner about the round, from its operator."""

    phrase: str = ""
    fingerprint: str = ""
    ask: Callable[[str, str], bool] | None = None
    """Shows the owner a URL and its phrase, and returns True if the owner confirms it; None without a terminal."""


def is_short(text: str) -> bool:
    """Return True for a host instead of a join string."""
    return bool(text) and "#" not in text


def urls_of(text: str) -> list[str]:
    """Return the URLs to try for a host."""
    if not _HOST.fullmatch(text):
        return [parse(text).url]  # raises: neither a host nor a join string
    return [text.rstrip("/")] if "://" in text else [f"https://{text}".rstrip("/"), f"http://{text}".rstrip("/")]


async def find_round(text: str, proof: Proof) -> JoinString:
    """Return the join string of a host's round, once the owner's proof confirms it."""
    if proof.fingerprint and not _FINGERPRINT.fullmatch(proof.fingerprint.strip().lower()):
        raise ConfigInvalid(
            f"--fingerprint: a fingerprint has {FINGERPRINT_DIGITS} digits (0-9, a-f), and this is not one.",
            hint="Copy the whole fingerprint that the operator published.",
        )
    if proof.phrase and len(words := words_of(proof.phrase)) != COUNT:
        raise ConfigInvalid(
            f"--phrase: a phrase has {COUNT} words, and this one has {len(words)}.",
            hint="Give all words, in quotation marks: --phrase 'WORD WORD …'.",
        )
    join = await _fetch(urls_of(text))
    if proof.fingerprint or proof.phrase:
        if proof.fingerprint and proof.fingerprint.strip().lower() != join.round_id:
            raise _another_round(join, "--fingerprint")
        if proof.phrase and not is_phrase_of(proof.phrase, join.round_id):
            raise _another_round(join, "--phrase")
        return join
    if proof.ask is None:
        raise ConfigInvalid(
            f"There is no terminal on which to confirm the round at {join.url}.",
            hint="Give the operator's six words with --phrase 'WORD WORD …', or the whole join string.",
        )
    if not proof.ask(join.url, phrase(join.round_id)):
        raise ConfigInvalid(
            f"The round at {join.url} was not confirmed. Nothing was joined.",
            hint="Ask the operator for the round's phrase, or for the whole join string.",
        )
    return join


def _another_round(join: JoinString, option: str) -> UntrustedRoot:
    part = "word" if option == "--phrase" else "digit"
    return UntrustedRoot(
        f"{join.url} serves another round than the one that {option} names. Nothing was joined.",
        hint=f"Check each {part}. If all are right, another server answers as the coordinator.",
    )


async def _fetch(urls: list[str]) -> JoinString:
    """Fetch the first root document of the first URL that answers."""
    failure: SwarmError | None = None
    silent = 0
    for url in urls:
        # The owner typed this address, so it may be in the own network.
        origin = open_origin(f"{url}/v1", own_network=True, patience=PATIENCE)
        try:
            root = await origin.document(ROOT, limits.METADATA_MAX_BYTES)
        except SwarmError as error:
            failure = failure or error
            silent += isinstance(error, Unreachable)
            continue
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await origin.close()
        if root is not None:
            return JoinString(url, fingerprint(root))
        failure = Unreachable(f"{url} serves no round.", hint="Check the address, or ask the operator for it.")
    assert failure is not None
    if silent == len(urls):  # in the words of the owner, who typed no path and perhaps no scheme
        said = failure.message.replace(f"{urls[0]}/v1 ", f"{urls[0]} ")
        others = (f" {url} does not answer either." for url in urls[1:])
        raise Unreachable(f"{said}{''.join(others)}", hint=failure.hint)
    raise failure
