"""Mask the passwords, tokens and signatures of a URI where it is printed or stored. Both."""

from __future__ import annotations

import re

SHOWN = "***"
USER = re.compile(r"://([^/?#:@]*):[^/?#]*@")  # of a URI without a password, the part before "@" is shown
QUERY = re.compile(r"[?#](?=[^/]*=)")  # otherwise, "?" and "#" can be parts of a name
# Any other parameter may be a secret, because stores have many names for secrets.
PARAMETER = re.compile(r"([?&#;])(?!(?:versionid|version_id|generation|region)=)([^=&#;?]*)=[^&#;]*", re.IGNORECASE)


def mask(uri: str) -> str:
    """Put `***` in place of a URI's password and of the values of its parameters."""
    if "://" not in uri:
        return uri
    place, query = split_query(USER.sub(rf"://\1:{SHOWN}@", uri))
    return place + PARAMETER.sub(rf"\1\2={SHOWN}", query)


def split_query(uri: str) -> tuple[str, str]:
    """Split a URI into the part before its parameters, and those parameters."""
    match = QUERY.search(uri)
    return (uri, "") if match is None else (uri[: match.start()], uri[match.start() :])
