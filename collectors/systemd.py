"""Telling systemd how the service is: the datagrams of sd_notify(3). Nothing happens where nobody asked for them."""

from __future__ import annotations

import logging
import os
import socket

VARIABLE = "NOTIFY_SOCKET"

logger = logging.getLogger(__name__)


def notify(*states: str) -> None:
    """Send assignments such as READY=1 to the socket systemd named. Never raises: the service works without."""
    address = os.environ.get(VARIABLE)
    if not address:
        return
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto("\n".join(states).encode(), address)
    except OSError as error:
        logger.warning("systemd at %s=%s cannot be told: %s", VARIABLE, os.environ[VARIABLE], error)
