"""Copy the contract into the packages byte for byte, and check the copies.

    python contract_schema/vendor.py write
    python contract_schema/vendor.py check

`schema/` goes to all three packages, `kernels/` to the two engines'. Each copy
carries `MANIFEST.json`, the SHA-256 of its files, which `check_vendored()` holds
against the files at run time. `check` lists every differing, missing or surplus
file and exits 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS: Mapping[str, tuple[str, ...]] = {
    "sglang_plugin/src/sglang_top_plugin/_contract": ("schema", "kernels", "recording"),
    "megatron_plugin/src/megatron_top_plugin/_contract": ("schema", "kernels", "recording"),
    "miles_launcher/src/miles_top_launcher/_contract": ("schema",),
}
INIT = b'"""Vendored copy of contract_schema; written by `make vendor`, never edited here."""\n'
MANIFEST = "MANIFEST.json"


def expected_files(root: Path, folders: tuple[str, ...]) -> dict[str, bytes]:
    """Return what a copy must hold: relative POSIX path -> bytes, manifest included."""
    files = {"__init__.py": INIT}
    for folder in folders:
        source = root / "contract_schema" / folder
        if not source.is_dir():
            raise SystemExit(f"vendor: folder {source} is missing; run from a whole checkout")
        for path in present_files(source):
            files[f"{folder}/{path}"] = (source / path).read_bytes()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    manifest = json.dumps({"files": digests}, indent=1) + "\n"
    return {**dict(sorted(files.items())), MANIFEST: manifest.encode("ascii")}


def present_files(folder: Path) -> tuple[str, ...]:
    """Return the files under a folder as sorted relative POSIX paths, without `__pycache__`."""
    return tuple(
        sorted(
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
    )


def write(root: Path) -> None:
    """Make every copy equal to the source: write what differs, remove what is surplus."""
    for target, folders in TARGETS.items():
        copy = root / target
        files = expected_files(root, folders)
        for name in present_files(copy):
            if name not in files:
                (copy / name).unlink()
        for name, data in files.items():
            path = copy / name
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def differences(root: Path) -> list[str]:
    """Return one line a file that is not what it must be."""
    found: list[str] = []
    for target, folders in TARGETS.items():
        copy = root / target
        files = expected_files(root, folders)
        present = present_files(copy)
        for name in sorted({*files, *present}):
            if name not in present:
                found.append(f"{target}/{name}: missing")
            elif name not in files:
                found.append(f"{target}/{name}: surplus")
            elif (copy / name).read_bytes() != files[name]:
                found.append(f"{target}/{name}: differs from contract_schema")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Copy the contract into the packages.")
    parser.add_argument("command", choices=("write", "check"))
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to work on")
    options = parser.parse_args(arguments)
    if options.command == "write":
        write(options.root)
        return 0
    found = differences(options.root)
    for line in found:
        print(line)
    if found:
        print(f"vendor: {len(found)} files are not the contract's; run `make vendor`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
