"""Which installed packages carry a recognised permissive licence, judged by their own metadata."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter

PERMISSIVE = re.compile(
    r"\b(mit|bsd|apache|isc|psf|python software foundation|0bsd|zlib|unlicense|cc0|hpnd|blueoak)\b", re.IGNORECASE
)
RESTRICTIVE = re.compile(
    r"\b(a?gpl|lgpl|gnu|mpl|mozilla|epl|eclipse|cddl|proprietary|commercial|non-?commercial|creative commons)",
    re.IGNORECASE,
)
# Packages under other licences that permissive packages carry inside themselves.
VENDORED_RESTRICTIVE = ("_vendor/chardet/", "_vendor/certifi/", "_vendor/autocommand/", "_vendor/tqdm/")
RESTRICTIVE_HEADER = re.compile(
    r"GNU (Affero |Lesser |Library )?General Public|Mozilla Public License|SPDX-License-Identifier: (MPL|A?GPL|LGPL)"
)


def has_restrictive_header(text: str) -> bool:
    """Say whether the head of a source file names a copyleft licence."""
    return RESTRICTIVE_HEADER.search(text[:4000]) is not None


def licence_text(dist: Distribution) -> str:
    """Join the licence expression, the first line of the licence field and the licence classifiers."""
    meta = dist.metadata
    fields = [meta.get("License-Expression") or "", (meta.get("License") or "").strip().split("\n")[0][:200]]
    fields += [c for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    return " | ".join(f for f in fields if f).replace("-", " ")


def permissive_packages(site: Path, stats: Counter[str]) -> dict[str, list[Path]]:
    """List Python files of permissively licensed packages below one site-packages directory.

    Args:
        site: a site-packages directory.
        stats: counts of accepted and skipped packages, updated in place.

    Returns:
        {package name: its `.py` files}; packages with no recognised or with a copyleft licence are left out.
    """
    result: dict[str, list[Path]] = {}
    for dist in distributions(path=[str(site)]):
        name = (dist.metadata["Name"] or "").lower()
        text = licence_text(dist)
        if not name or name == "foretoken":
            continue
        if not PERMISSIVE.search(text) or RESTRICTIVE.search(text):
            stats["packages_skipped_licence"] += 1
            continue
        stats["packages_accepted"] += 1
        files = [
            Path(str(dist.locate_file(f))) for f in dist.files or [] if str(f).endswith(".py") and ".." not in f.parts
        ]
        result[name] = [f for f in files if f.is_file()]
    return result
