"""Addresses on which a process and its descendants listen, as shown by `ss -ltnup`."""

import contextlib
import socket
from ipaddress import ip_address

import psutil


def listeners() -> list[str]:
    """`127.0.0.1:6379`, ... of this process and its descendants."""
    me = psutil.Process()
    found = set()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # has ended
            found |= {_address(*one.laddr) for one in process.net_connections("inet") if _listens(one)}
    return sorted(found)


def _listens(connection) -> bool:
    """A datagram socket listens if it is bound and not connected."""
    if connection.type == socket.SOCK_DGRAM:
        return bool(connection.laddr) and not connection.raddr
    return connection.status == psutil.CONN_LISTEN


def _address(host: str, port: int) -> str:
    """Return an IPv4 address as such, also of an IPv6 socket."""
    return f"{getattr(ip_address(host), 'ipv4_mapped', None) or ip_address(host)}:{port}"
