"""Settings of messages to the operator about alarms and incidents."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from coordinator.config.round import AddressOrNone
from coordinator.config.section import Section

MAIL = r"^[^@\s<>,;]{1,64}@[^@\s<>,;]{1,190}$"


class NotifySection(Section):
    """Messages to the operator: a webhook and mail about alarms and incidents."""

    webhook: str = Field(
        "",
        pattern=r"^$|^https?://[^\s]+$",
        max_length=2000,
        description="URL to which messages are posted as JSON, signed by the key in notify.key; empty: none",
    )
    mail_to: tuple[Annotated[str, Field(pattern=MAIL)], ...] = Field(
        (), max_length=16, description="addresses that get messages by mail; empty: none"
    )
    mail_from: str = Field("", pattern=f"^$|{MAIL}", description="sender of the mail")
    smtp: AddressOrNone = Field("", description="host:port of the mail server, such as smtp.example.org:587")
    smtp_security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="how the connection to the mail server is protected: starttls, tls or none"
    )
    smtp_user: str = Field(
        "", description="user at the mail server, with the password in SWARM_SMTP_PASSWORD; empty: no login"
    )
    level: Literal["warning", "critical"] = Field("warning", description="least severity of an alarm that is sent")
    hold_s: float = Field(
        120.0, ge=0, description="time for which an alarm must stand, or be over, until a message says so"
    )

    @model_validator(mode="after")
    def _has_what_mail_needs(self) -> "NotifySection":
        if self.mail_to and not (self.mail_from and self.smtp):
            raise ValueError("notify.mail_to needs notify.mail_from and notify.smtp")
        return self

    @property
    def channels(self) -> tuple[str, ...]:
        """The ways in which messages are sent."""
        return tuple(name for name, place in (("webhook", self.webhook), ("mail", self.mail_to)) if place)
