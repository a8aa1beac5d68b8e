"""Refuses tracked files that only work on the machine they were made on: symbolic links and absolute home paths.

Usage: python .ci/check_repository.py [DIRECTORY]; exits with 1 and one line a finding.
"""

import re
import subprocess
import sys
from pathlib import Path

_SYMBOLIC_LINK = "120000"
_MACHINE_PATH = re.compile(rb"(?:^|[^\w.])/(?:root|home|work|Users)/[\w.]")


def findings(repository: Path) -> list[str]:
    """One line for each tracked symbolic link and for each line of a text file that holds a machine's path."""
    listing = subprocess.run(
        ["git", "ls-files", "--stage", "-z"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout
    found = []
    for entry in filter(None, listing.split("\0")):
        mode, name = entry.split(" ", 1)[0], entry.split("\t", 1)[1]
        path = repository / name
        if mode == _SYMBOLIC_LINK:
            found.append(f"{name}: a symbolic link, which dangles in other clones")
        elif path.is_file() and b"\0" not in (content := path.read_bytes()):
            found += [
                f"{name}:{number}: an absolute path of one machine"
                for number, line in enumerate(content.splitlines(), 1)
                if _MACHINE_PATH.search(line)
            ]
    return found


def main() -> int:
    """Prints the findings; the exit status is 1 where there are any."""
    found = findings(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(found) or "no symbolic links, no machine's paths")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
