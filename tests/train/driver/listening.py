"""Addresses on which a process and those that it started listen, out of /proc: what `ss -ltnup` would show of them."""

import os
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}


def listeners() -> list[str]:
    """`127.0.0.1:6379`, ... of this process and its descendants."""
    inodes = {inode for pid in _family(os.getpid()) for inode in _sockets(pid)}
    return sorted(
        {address for table, state in LISTENING.items() for address, inode in _open(table, state) if inode in inodes}
    )


def _family(root: int) -> set[int]:
    parents = {int(stat.parent.name): _parent(stat) for stat in Path("/proc").glob("[0-9]*/stat")}
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # gone meanwhile
        return 0


def _sockets(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _open(table: str, state: str) -> Iterator[tuple[str, str]]:
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        _, local, _, found, *_, inode = line.split()[:10]
        if found == state:
            host, _, port = local.partition(":")
            yield f"{_host(host)}:{int(port, 16)}", inode


def _host(text: str) -> str:
    """Words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    packed = b"".join(words)
    if len(packed) == 4:
        return str(IPv4Address(packed))
    return str(IPv6Address(packed).ipv4_mapped or IPv6Address(packed))
