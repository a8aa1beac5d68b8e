"""Names the processor that figures were measured on."""

from __future__ import annotations

import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def processor_facts() -> dict[str, str]:
    """What the system says of its first processor, by name; empty where it says nothing."""
    if not _CPU_INFO.exists():
        return {}
    facts: dict[str, str] = {}
    for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts


def processor_name() -> str:
    """Its model, as in "Intel(R) Xeon(R) Platinum 8488C"; the architecture where the system tells no model."""
    return processor_facts().get("model name") or platform.processor() or platform.machine()
