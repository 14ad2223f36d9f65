"""Make sure that this process may open a connection for every worker. Both."""

from __future__ import annotations

import resource

from raysgd.errors import ResourceError

OWN = 256  # what a process opens without any worker: Python, Ray, torch, files of the user


def allow_connections(workers: int, *, each: int) -> None:
    """Raise this process's limit of open files if it is too low for `each` connections to so many
    workers. Raise ResourceError if the system does not allow that.

    The soft limit is raised only as far as needed, because old programs that inherit a high one can
    become slow.
    """
    needed = OWN + each * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ResourceError(
            f"this process may have {hard} open files, and with {workers} workers it needs about {needed} ({each} connections "
            f"for each of them, and {OWN} others). Raise the limit before the script and Ray start: with `ulimit -Hn {needed}` as "
            "root, in /etc/security/limits.conf, with LimitNOFILE= of the systemd unit, or with --ulimit nofile= of the "
            "container; or use fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
