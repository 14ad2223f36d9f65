"""Mask passwords, tokens and signatures of URIs in everything that users can see. Both."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import quote, unquote

SHOWN = "***"
CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*(?:://|::))")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
PARAMETER = re.compile(r"([?&#;])([^=&#;?]*)=([^&#;]*)")
# The limit keeps the search linear. A password can contain what otherwise ends a URI.
IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,40}://(?:[^\s/?#@]*@)?[^\s'\"<>]*")
# HTTP libraries quote a path with its parameters, without the rest of the URI.
IN_PATH = re.compile(
    r"([?&][\w.-]{0,40}(?:sig|signature|token|secret|password|credential|key)=)[^\s&;#'\"<>]+", re.IGNORECASE
)
# Any other parameter may be a secret, because stores have many names for secrets.
HARMLESS = {"versionid", "version_id", "generation", "region"}
# With these, the part before "@" can be a token by itself. With others it is a user, or a container (abfs).
TOKENS = ("http", "https", "webdav", "webdavs", "dav", "davs")
SHORTEST = 3  # a shorter secret cannot be distinguished from other words of a message

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
    """Split a URI into the part before its last parameters, and those parameters. Except in web
    addresses, "?" can be part of a name."""
    *above, part = CHAIN.split(uri)
    scheme, rest = _split(part)
    end = _end_of_user(rest)
    found = re.search(r"[?#]" if scheme[:-3].lower() in TOKENS else r"[?#](?=[^/]*=)", rest[end:])
    at = len(rest) if found is None else end + found.start()
    return "::".join([*above, scheme + rest[:at]]), rest[at:]


def mask_message(message: str, uri: str) -> str:
    """Return another library's message about this URI with the secrets of all URIs masked."""
    found: list[str] = []
    _changed(uri, lambda secret: found.append(secret) or "")  # type: ignore[func-returns-value]
    forms = {form for secret in found for form in (secret, unquote(secret), quote(secret), quote(secret, safe=""))}
    message = message.replace(uri, mask(uri))
    for form in sorted(forms, key=len, reverse=True):
        if len(form) >= SHORTEST:
            message = message.replace(form, SHOWN)
    return mask_text(message)


def mask_text(text: str) -> str:
    """Return a text with the secrets of all URIs in it masked, also of paths with parameters."""
    return IN_PATH.sub(rf"\1{SHOWN}", IN_TEXT.sub(_masked, text))


def _masked(match: re.Match[str]) -> str:
    """Mask all URIs of a match: there are several if only commas separate them."""
    done, left = "", match.group()
    while found := IN_TEXT.search(left):
        scheme, rest = _split(mask(left[found.start() :]))
        done, left = done + left[: found.start()] + scheme, rest
    return done + left


def cause_of(error: BaseException, uri: str) -> BaseException | None:
    """Return another library's error as a cause, or None if its text would show a secret."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        text = f"{each} {each!r}"
        if mask_message(text, uri) != text:
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
    found = re.search(r"[?#]", rest[end:])
    at = len(rest) if found is None else end + found.start()
    place, question, query = rest[end:at], rest[at : at + 1], rest[at + 1 :]
    if question and "=" not in query and scheme[:-3].lower() in TOKENS:
        return scheme + shown + place + question + hide(query)

    def parameter(match: re.Match[str]) -> str:
        mark, name, value = match.groups()
        return f"{mark}{name}={value if name.lower() in HARMLESS else hide(value)}"

    return scheme + shown + place + PARAMETER.sub(parameter, question + query)


def _split(part: str) -> tuple[str, str]:
    found = SCHEME.match(part)
    return ("", part) if found is None else (found.group(), part[found.end() :])


def _end_of_user(rest: str) -> int:
    """Return where user and password end. A password may contain characters that should be escaped,
    as S3's keys do."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in host:
        return host.rindex("@")
    unescaped = ":" in host and "@" in rest and not host.rpartition(":")[2].isdigit()
    return rest.rindex("@") if unescaped else 0
