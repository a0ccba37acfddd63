"""Data that all pages of a round share: its description, its task, and the string to join it."""

from dataclasses import dataclass

from protocol.policy.description import RoundDescription

SOFTWARE = "Echo Swarm"


@dataclass(frozen=True)
class Site:
    """The round as its pages name it; texts that the operator left out have a default."""

    join_string: str
    description: RoundDescription
    task: str
    phrase: str = ""
    """The fingerprint in words."""
    serves_installer: bool = False
    """True if the installer at this address installs a wheel of the operator's."""
    finished: bool = False
    """True once the round has ended: nobody is invited any more."""

    @property
    def title(self) -> str:
        return self.description.title or SOFTWARE

    @property
    def lead(self) -> str:
        """Return what is trained, in a sentence or two."""
        return self.description.description or (
            f"Volunteers' computers train one language model together, on the task {self.task}. "
            "Their work is checked, and each verified sample earns credit in a public ledger."
        )

    @property
    def home(self) -> str:
        """Return the address of the round, without the fingerprint of the join string."""
        return self.join_string.partition("#")[0].rstrip("/")

    def facts(self) -> dict[str, str]:
        """Return who runs the round and under which terms, as far as the operator says."""
        said = self.description
        facts = {"Operator": said.operator, "Licence of the model": said.licence, "Contact": said.contact}
        return {name: text for name, text in facts.items() if text}
