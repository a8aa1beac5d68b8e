"""Refuses tracked files that only work on the machine they were made on, and commits with a long subject.

Such files are symbolic links, and files with absolute home paths.

Usage: python .ci/check_repository.py [DIRECTORY]; exits with 1 and one line a finding.
"""

import re
import subprocess
import sys
from pathlib import Path

_MAX_SUBJECT_LEN = 72
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


def long_subjects(repository: Path) -> list[str]:
    """One line for each commit with a long subject that follows the commit which added this check.

    A shallow clone seems to add all files in its oldest commit, so later ones are read. Tools write subjects of merges.
    """
    adding = _git(repository, "log", "--reverse", "--format=%H", "-S_MAX_SUBJECT_LEN", "--", ".ci/check_repository.py")
    if not adding:
        return []
    lines = _git(repository, "log", "--no-merges", "--ancestry-path", "--format=%h %s", f"{adding[0]}..HEAD")
    return [
        f"commit {name}: a subject of {len(subject)} characters. Expected at most {_MAX_SUBJECT_LEN}. "
        "Reword it with git commit --amend, or git rebase --interactive."
        for name, subject in (line.split(" ", 1) for line in lines)
        if len(subject) > _MAX_SUBJECT_LEN
    ]


def _git(repository: Path, *arguments: str) -> list[str]:
    """Returns the lines that git prints; none in a repository without commits, where it fails."""
    run = subprocess.run(["git", *arguments], cwd=repository, check=False, capture_output=True, text=True)
    return run.stdout.splitlines()


def main() -> int:
    """Prints the findings; the exit status is 1 where there are any."""
    repository = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    found = findings(repository) + long_subjects(repository)
    print("\n".join(found) or "no symbolic links, no machine's paths, no long subjects")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
