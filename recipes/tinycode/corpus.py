"""Gather permissively licensed Python source from installed interpreters into one de-duplicated corpus.

Knows files, licences and duplicates; knows nothing of tokens or models. Writes to the run directory:
`train.jsonl` and `held_out.jsonl` (one `{"path", "text"}` a line) and `corpus_stats.json`.

    python -m recipes.tinycode.corpus --run-dir DIR [--extra-root PREFIX ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.tinycode.licences import has_restrictive_header, permissive_packages
from recipes.tinycode.paths import default_run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

HELD_OUT_PER_MILLE = 10  # share of relative paths that training never sees
TEST_KEEP_PERCENT = 35  # share of test files kept: they are half of all bytes and say little about library code
PACKAGE_CAP_BYTES = 12_000_000  # no single package may dominate
MIN_BYTES, MAX_BYTES = 200, 400_000
SEEN_LINES_LIMIT = 0.8  # a file with more of its lines already seen is a near-duplicate
HELD_OUT_OVERLAP_LIMIT = 0.5  # a training file sharing more of its lines with one held-out file is dropped
EOS_TEXT = "<|endoftext|>"


def path_hash(relative_path: str, salt: str = "") -> int:
    """Return a 64-bit hash of a relative path, independent of content, machine and Python version."""
    return int.from_bytes(hashlib.blake2b(f"{salt}{relative_path}".encode(), digest_size=8).digest(), "big")


def is_held_out(relative_path: str) -> bool:
    """Say whether training must never see this file; the rule reads the path alone, so all versions agree."""
    return path_hash(relative_path, "held-out:") % 1000 < HELD_OUT_PER_MILLE


def is_test(relative_path: str) -> bool:
    """Say whether the path looks like a test file."""
    parts = relative_path.lower().split("/")
    name = parts[-1]
    return (
        any(p in {"test", "tests", "testing"} for p in parts) or name.startswith("test_") or name.endswith("_test.py")
    )


def junk_reason(text: str) -> str | None:
    """Name why a file is not worth training on (generated tables, minified code), or None."""
    lines = text.splitlines()
    size = max(len(text), 1)
    reasons = {
        "size": not MIN_BYTES <= size <= MAX_BYTES,
        "special_text": EOS_TEXT in text or "\0" in text,
        "licence_header": has_restrictive_header(text),
        "long_lines": size / max(len(lines), 1) > 80 or max(map(len, lines), default=0) > 1000,
        "data_table": sum(c.isdigit() for c in text) / size > 0.12 or text.count("\\x") * 4 / size > 0.1,
        "odd_characters": sum(c.isspace() for c in text) / size > 0.6 or sum(ord(c) > 127 for c in text) / size > 0.1,
    }
    return next((name for name, found in reasons.items() if found), None)


def significant_lines(text: str) -> set[int]:
    """Return hashes of the distinct whitespace-stripped lines long enough to identify a file."""
    stripped = ("".join(line.split()) for line in text.splitlines())
    return {path_hash(line) for line in stripped if len(line) >= 12}


def read_source(path: Path) -> str | None:
    """Read a source file by its declared encoding (PEP 263), newlines as line feeds; None if it cannot be decoded."""
    try:
        with tokenize.open(path) as handle:
            return handle.read().replace("\f", "")
    except (SyntaxError, UnicodeDecodeError, LookupError, OSError):
        return None


def stdlib_dirs(prefixes: list[Path]) -> list[Path]:
    """Return the standard library of this interpreter and of each extra installation prefix, newest version first."""
    found = {Path(sysconfig.get_path("stdlib")).resolve()}
    for prefix in prefixes:
        found |= {p.resolve() for p in prefix.glob("lib/python3.*") if (p / "os.py").exists()}
    return sorted(found, key=lambda p: int(p.name.split(".")[-1]), reverse=True)


def candidates(prefixes: list[Path], stats: Counter[str]) -> Iterator[tuple[str, str, Path]]:
    """Yield (group, relative path, file) for all packages, then all standard libraries, newest first."""
    dirs = stdlib_dirs(prefixes)
    sites = {Path(sysconfig.get_path("purelib")).resolve()} | {d / "site-packages" for d in dirs}
    for site in sorted(sites, key=str, reverse=True):
        for package, files in sorted(permissive_packages(site, stats).items()):
            named = sorted(((f.relative_to(site).as_posix(), f) for f in files), key=lambda item: path_hash(item[0]))
            yield from ((package, relative, f) for relative, f in named)
    for library in dirs:
        for file in sorted(library.rglob("*.py")):
            relative = file.relative_to(library).as_posix()
            if not relative.startswith(("site-packages/", "lib2to3/tests/data", "config-", "test/encoded_modules")):
                yield "stdlib", f"stdlib/{relative}", file


def drop_near_held_out(train: dict[str, str], held: dict[str, str]) -> list[str]:
    """Remove training files that share most of their lines with one held-out file, in place; return their paths."""
    owners: dict[int, list[int]] = defaultdict(list)
    held_lines = [significant_lines(text) for text in held.values()]
    for index, lines in enumerate(held_lines):
        for line in lines:
            owners[line].append(index)
    dropped = []
    for path in list(train):
        lines = significant_lines(train[path])
        shared = Counter(index for line in lines for index in owners.get(line, ()))
        for index, count in shared.most_common(3):
            if count > HELD_OUT_OVERLAP_LIMIT * min(len(lines), len(held_lines[index])):
                dropped.append(path)
                del train[path]
                break
    return dropped


def gather(prefixes: list[Path]) -> tuple[dict[str, str], dict[str, str], dict[str, object]]:
    """Collect the corpus.

    Args:
        prefixes: further Python installation prefixes (directories holding `lib/python3.x`).

    Returns:
        Training files and held-out files, each {relative path: text} in hash-shuffled order, and statistics.
    """
    stats: Counter[str] = Counter()
    group_bytes: Counter[str] = Counter()
    train: dict[str, str] = {}
    held: dict[str, str] = {}
    seen_lines: set[int] = set()
    for group, relative, file in candidates(prefixes, stats):
        stats["files_found"] += 1
        held_out = is_held_out(relative)
        if not held_out and is_test(relative) and path_hash(relative, "test:") % 100 >= TEST_KEEP_PERCENT:
            stats["skipped_test_sampling"] += 1
            continue
        text = read_source(file)
        if text is None:
            stats["skipped_undecodable"] += 1
            continue
        if reason := junk_reason(text):
            stats[f"skipped_{reason}"] += 1
            continue
        lines = significant_lines(text)
        if relative in held or not lines or len(lines & seen_lines) > SEEN_LINES_LIMIT * len(lines):
            stats["skipped_duplicate"] += 1
            continue
        if group_bytes[group] + len(text) > PACKAGE_CAP_BYTES and group != "stdlib":
            stats["skipped_package_cap"] += 1
            continue
        seen_lines |= lines
        group_bytes[group] += len(text)
        key = relative if relative not in train else f"{relative}@{stats['files_found']}"
        (held if held_out else train)[key] = text
    stats["skipped_near_held_out"] = len(drop_near_held_out(train, held))
    shuffled = [dict(sorted(part.items(), key=lambda kv: path_hash(kv[0]))) for part in (train, held)]
    summary = {
        "train_files": len(train),
        "train_bytes": sum(len(t.encode()) for t in train.values()),
        "held_out_files": len(held),
        "held_out_bytes": sum(len(t.encode()) for t in held.values()),
        "stdlib_versions": [p.name.removeprefix("python") for p in stdlib_dirs(prefixes)],
        "counts": dict(sorted(stats.items())),
        "characters_by_group": dict(group_bytes.most_common()),
    }
    return shuffled[0], shuffled[1], summary


def main() -> None:
    """Write the corpus and the list of held-out files to the run directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    parser.add_argument("--extra-root", type=Path, action="append", default=[], help="another installation prefix")
    args = parser.parse_args()
    args.run_dir.mkdir(parents=True, exist_ok=True)
    train, held, summary = gather([Path(sys.prefix), *args.extra_root])
    for name, part in (("train", train), ("held_out", held)):
        with (args.run_dir / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            out.writelines(json.dumps({"path": p, "text": t}) + "\n" for p, t in part.items())
    (args.run_dir / "corpus_stats.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    before = (Path(__file__).parent / "held_out.txt").read_text(encoding="utf-8").split()
    listed = {*held, *before}  # a file once listed stays held out
    (args.run_dir / "held_out.txt").write_text("\n".join(sorted(listed)) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
