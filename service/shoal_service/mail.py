"""Letters by SMTP, through the server that the operator has named. Owns no retries."""

from __future__ import annotations

import asyncio
import re
import smtplib
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.utils import formatdate
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_PORTS = {"smtp": 587, "smtps": 465}
_TIMEOUT_S = 20.0


class MailFailed(Exception):
    """The server did not take the letter; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MailServer:
    """`encrypted`: TLS from the first byte on (smtps); otherwise as soon as the server offers it. A password goes over
    no line that others can read. Letters go to addresses of `domains` alone."""

    host: str
    port: int
    encrypted: bool
    sender: str
    domains: frozenset[str]
    user: str | None = None
    password: str | None = field(default=None, repr=False)


def mail_server(url: str, sender: str | None, domains: Iterable[str]) -> MailServer:
    """Of `smtp://USER:PASSWORD@HOST:PORT` or `smtps://...`. No `domains`: that of `sender`. Raises ValueError with what
    is wrong."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError("must be smtp://USER:PASSWORD@HOST:PORT or smtps://USER:PASSWORD@HOST:PORT")
    if sender is None or not is_address(sender):
        raise ValueError("needs the address that letters come from (SHOAL_MAIL_FROM), as shoal@example.org")
    user, password = (None if each is None else unquote(each) for each in (parts.username, parts.password))
    return MailServer(
        host=parts.hostname,
        port=parts.port or _PORTS[parts.scheme],
        encrypted=parts.scheme == "smtps",
        sender=sender,
        domains=frozenset(each.lower() for each in domains) or frozenset({domain_of(sender)}),
        user=user,
        password=password,
    )


def is_address(text: str) -> bool:
    """One address and nothing else: no name beside it, no second one, no line end."""
    return _ADDRESS.fullmatch(text) is not None and ".." not in text


def check_mail_url(url: str, server: MailServer | None) -> None:
    """Raises ValueError with what is wrong."""
    if server is None:
        raise ValueError("this server sends no letters: its operator has named no mail server (SHOAL_SMTP_URL)")
    address = address_of(url)
    if address is None:
        raise ValueError("must be mailto: and one address, as mailto:team@example.org")
    if domain_of(address) not in server.domains:
        raise ValueError(f"letters go to addresses of {', '.join(sorted(server.domains))} alone (SHOAL_MAIL_DOMAINS)")


def address_of(url: str) -> str | None:
    """Of `mailto:ADDRESS`, None of anything else."""
    scheme, _, address = url.partition(":")
    return address if scheme == "mailto" and is_address(address) else None


def domain_of(address: str) -> str:
    return address.rpartition("@")[2].lower()


async def send(server: MailServer, to: str, subject: str, text: str, key: str) -> None:
    """`key` is the same for the same letter, so that who gets it twice can tell. Raises MailFailed."""
    letter = EmailMessage()
    letter["From"], letter["To"], letter["Subject"] = server.sender, to, subject
    letter["Date"], letter["Message-ID"] = formatdate(), f"<{key}@{domain_of(server.sender)}>"
    letter["Auto-Submitted"] = "auto-generated"
    letter.set_content(text)
    try:
        await asyncio.to_thread(_send, server, letter)
    except (OSError, smtplib.SMTPException) as error:
        raise MailFailed(f"{server.host}:{server.port} did not take the letter: {_words(error)}") from error


def _send(server: MailServer, letter: EmailMessage) -> None:
    context = ssl.create_default_context()
    if server.encrypted:
        connection: smtplib.SMTP = smtplib.SMTP_SSL(server.host, server.port, timeout=_TIMEOUT_S, context=context)
    else:
        connection = smtplib.SMTP(server.host, server.port, timeout=_TIMEOUT_S)
    with connection:
        connection.ehlo()
        secure = server.encrypted
        if not secure and connection.has_extn("starttls"):
            connection.starttls(context=context)
            connection.ehlo()
            secure = True
        if server.user is not None:
            if not secure and not _is_loopback(server.host):
                raise smtplib.SMTPException("it offers no TLS, so it is not told the password")
            connection.login(server.user, server.password or "")
        connection.send_message(letter)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _words(error: Exception) -> str:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        code, said = next(iter(error.recipients.values()))
        return f"{code} {_text(said)}"
    if isinstance(error, smtplib.SMTPResponseException):
        return f"{error.smtp_code} {_text(error.smtp_error)}"
    return str(error) or type(error).__name__


def _text(said: bytes | str) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said
