"""Passwords, tokens and signatures in URIs: hidden wherever a URI is shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import quote, unquote

__all__ = ["cause_of", "mask", "mask_message", "split_query", "without_secrets"]

SHOWN = "***"
CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*(?:://|::))")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
PARAMETER = re.compile(r"([?&#;])([^=&#;?]*)=([^&#;]*)")
IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
# Whatever is not known to be harmless may be a secret: stores have many names for theirs.
HARMLESS = {"versionid", "version_id", "generation", "region"}
# Here the part before "@" can be a token by itself. Elsewhere it is a user, or a container (abfs).
TOKENS = ("http", "https", "webdav", "webdavs", "dav", "davs")
SHORTEST = 3  # a secret that is shorter cannot be told from other words of a message

Hide = Callable[[str], str]


def mask(uri: str) -> str:
    """Return a URI with `***` for each password, token and signature in it."""
    return _changed(uri, lambda secret: SHOWN if secret else "")


def without_secrets(uri: str) -> str:
    """Return a URI without user, password and parameters."""
    parts = []
    for part in CHAIN.split(uri):
        scheme, rest = _split(split_query(part)[0])
        parts.append(scheme + rest[_end_of_user(rest) :].removeprefix("@"))
    return "::".join(parts)


def split_query(uri: str) -> tuple[str, str]:
    """Return a URI without its last parameters, and these. Elsewhere than on the web "?" can be part of a name."""
    *above, part = CHAIN.split(uri)
    scheme, rest = _split(part)
    end = _end_of_user(rest)
    found = re.search(r"[?#]" if scheme[:-3].lower() in TOKENS else r"[?#](?=[^/]*=)", rest[end:])
    at = len(rest) if found is None else end + found.start()
    return "::".join([*above, scheme + rest[:at]]), rest[at:]


def mask_message(message: str, uri: str) -> str:
    """Return what another library said about this URI, without the secrets of it and of other URIs in the message."""
    found: list[str] = []
    _changed(uri, lambda secret: found.append(secret) or "")  # type: ignore[func-returns-value]
    forms = {form for secret in found for form in (secret, unquote(secret), quote(secret), quote(secret, safe=""))}
    message = message.replace(uri, mask(uri))
    for form in sorted(forms, key=len, reverse=True):
        if len(form) >= SHORTEST:
            message = message.replace(form, SHOWN)
    return IN_TEXT.sub(lambda match: mask(match.group()), message)


def cause_of(error: BaseException, uri: str) -> BaseException | None:
    """Return what another library raised as the cause of our error; None if a traceback would show a secret with it."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        said = f"{each} {each!r}"
        if mask_message(said, uri) != said:
            return None
        pending += [each.__cause__, each.__context__]
    return error


def _changed(uri: str, hide: Hide) -> str:
    return "::".join(_part(part, hide) for part in CHAIN.split(uri))


def _part(part: str, hide: Hide) -> str:
    scheme, rest = _split(part)
    if not scheme:
        return part
    end = _end_of_user(rest)
    user, colon, password = rest[:end].partition(":")
    if scheme[:-3].lower() in TOKENS:
        user, colon, password = hide(user), colon and "", hide(password) and ""
    shown = user + (f":{hide(password)}" if colon else "")
    place, question, query = _cut(rest[end:])
    if question and "=" not in query and scheme[:-3].lower() in TOKENS:
        return scheme + shown + place + question + hide(query)
    return scheme + shown + place + PARAMETER.sub(lambda match: _parameter(match, hide), question + query)


def _parameter(match: re.Match[str], hide: Hide) -> str:
    mark, name, value = match.groups()
    return f"{mark}{name}={value if name.lower() in HARMLESS else hide(value)}"


def _split(part: str) -> tuple[str, str]:
    found = SCHEME.match(part)
    return ("", part) if found is None else (found.group(), part[found.end() :])


def _cut(text: str) -> tuple[str, str, str]:
    found = re.search(r"[?#]", text)
    return (text, "", "") if found is None else (text[: found.start()], found.group(), text[found.end() :])


def _end_of_user(rest: str) -> int:
    """Where user and password end. A password may hold what should have been escaped in it, as S3's keys do."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in host:
        return host.rindex("@")
    unescaped = ":" in host and "@" in rest and not host.rpartition(":")[2].isdigit()
    return rest.rindex("@") if unescaped else 0
