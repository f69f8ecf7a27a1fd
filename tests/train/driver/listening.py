"""Addresses on which a process and those that it started listen: what `ss -ltnup` would show of them."""

import contextlib
import socket
from ipaddress import ip_address

import psutil


def listeners() -> list[str]:
    """`127.0.0.1:6379`, ... of this process and its descendants."""
    me = psutil.Process()
    found = set()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # gone meanwhile
            found |= {_address(*one.laddr) for one in process.net_connections("inet") if _listens(one)}
    return sorted(found)


def _listens(connection) -> bool:
    """A socket for datagrams does where it is bound and has no other end."""
    if connection.type == socket.SOCK_DGRAM:
        return bool(connection.laddr) and not connection.raddr
    return connection.status == psutil.CONN_LISTEN


def _address(host: str, port: int) -> str:
    """An IPv4 address as such, also behind a socket of IPv6."""
    return f"{getattr(ip_address(host), 'ipv4_mapped', None) or ip_address(host)}:{port}"
