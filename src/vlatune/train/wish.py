"""What a worker or the driver would have all workers do. Light: the lookout, an actor without torch, speaks of it, too."""

from enum import IntEnum


class Wish(IntEnum):
    """The largest of all workers' wishes is carried out."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    """Save, then end."""
