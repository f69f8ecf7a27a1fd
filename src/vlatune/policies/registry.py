"""Policies by name. An adapter is imported when it is asked for, so that listing them costs nothing."""

from vlatune.policies.base import PolicyAdapter

NAMES = ("pi05",)


def get_adapter(name: str) -> PolicyAdapter:
    if name == "pi05":
        from vlatune.policies.pi05 import Pi05Adapter

        return Pi05Adapter()
    raise ValueError(f"--policy.type={name}: must be one of {', '.join(NAMES)}")
