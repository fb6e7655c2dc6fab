"""SHA-256 digests of the vendored package, of token ids and of log-probs."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

from .contract import TrueOnPolicyContract
from .errors import DigestMismatch, Refusal

MANIFEST_NAME = "MANIFEST.json"
_SCHEMA_DIR = Path(__file__).parent
_VENDORED_DIR = _SCHEMA_DIR.parent


def contract_digest(contract: TrueOnPolicyContract) -> str:
    """Return the SHA-256 (hex) of the contract's canonical JSON."""
    return hashlib.sha256(contract.canonical_json()).hexdigest()


def schema_digest(contract: TrueOnPolicyContract, package_dir: Path | None = None) -> str:
    """Return the SHA-256 (hex) over the schema's files and the contract's canonical JSON.

    `package_dir` is the schema folder, by default the one of this copy.
    """
    digest = hashlib.sha256()
    _update(digest, _SCHEMA_DIR if package_dir is None else package_dir)
    digest.update(contract.canonical_json())
    return digest.hexdigest()


def kernels_digest(package_dir: Path | None = None) -> str:
    """Return the SHA-256 (hex) over the kernels' files.

    `package_dir` is the kernels folder, by default the one beside this copy. Raises
    `DigestMismatch` where there is none (the launcher carries no kernels).
    """
    folder = _VENDORED_DIR / "kernels" if package_dir is None else package_dir
    if not folder.is_dir():
        raise DigestMismatch(
            f"kernels folder {folder}: not there; only the engines' copies carry kernels; "
            "take the digest from an engine's receipt"
        )
    digest = hashlib.sha256()
    _update(digest, folder)
    return digest.hexdigest()


def package_files(folder: Path) -> dict[str, Path]:
    """Return the files of a package by relative POSIX path, sorted; no `__pycache__`."""
    found = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return dict(sorted(found.items()))


def check_vendored(contract_dir: Path | None = None) -> None:
    """Hold every file of this vendored copy against the manifest written with it.

    `contract_dir` is the `_contract` folder, by default the one of this copy. Raises
    `DigestMismatch` naming a file that is changed, missing or surplus.
    """
    folder = _VENDORED_DIR if contract_dir is None else contract_dir
    path = folder / MANIFEST_NAME
    repair = "reinstall the package, or run `make vendor` in a checkout"
    if not path.is_file():
        raise DigestMismatch(f"vendored contract {folder}: {MANIFEST_NAME} is missing; {repair}")
    try:
        expected: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["files"]
        if not isinstance(expected, dict):
            raise TypeError("files is no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DigestMismatch(f"vendored contract {path}: no manifest; {repair}") from error
    present = package_files(folder)
    present.pop(MANIFEST_NAME)
    for name in sorted(set(expected) | set(present)):
        if name not in present:
            raise DigestMismatch(f"vendored file {folder / name}: missing; {repair}")
        if name not in expected:
            raise DigestMismatch(f"vendored file {folder / name}: surplus; {repair}")
        found = file_digest(present[name])
        if found != expected[name]:
            raise DigestMismatch(
                f"vendored file {folder / name}: changed (SHA-256 {found}, vendored {expected[name]}); {repair}"
            )


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tokens_digest(samples: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 (hex) of token ids, prompts in file order and samples in index order.

    A sample is its length and its tokens, all int32 little-endian. Raises `Refusal`
    if a token does not fit.
    """
    digest = hashlib.sha256()
    for index, tokens in enumerate(samples):
        try:
            digest.update(struct.pack(f"<i{len(tokens)}i", len(tokens), *tokens))
        except struct.error as error:
            raise Refusal(f"sample {index}: a token id is no int32: {error}") from error
    return digest.hexdigest()


def logprob_digest(samples: Sequence[Sequence[float]]) -> str:
    """Return the SHA-256 (hex) of the trainer's log-probs, in the order of `tokens_digest`.

    A sample is its length (int32 little-endian) and its log-probs (fp32
    little-endian). Raises `Refusal` if a value is no fp32 value.
    """
    digest = hashlib.sha256()
    for index, values in enumerate(samples):
        digest.update(struct.pack("<i", len(values)))
        digest.update(float32_bytes(values, f"sample {index}"))
    return digest.hexdigest()


def float32_bytes(values: Sequence[float], where: str) -> bytes:
    """Return Python floats that hold fp32 values as fp32 little-endian bytes.

    Raises `Refusal` for a value that fp32 cannot hold: it was rounded, or never
    was a log-prob of the engine.
    """
    form = f"<{len(values)}f"
    try:
        data = struct.pack(form, *values)
    except (struct.error, OverflowError) as error:
        raise Refusal(f"{where}: a log-prob is no fp32 value: {error}") from error
    for position, (value, back) in enumerate(zip(values, struct.unpack(form, data), strict=True)):
        if value != back and value == value:
            raise Refusal(
                f"{where}, position {position}: log-prob {value!r} is no fp32 value; carry the "
                "engine's fp32 values unrounded"
            )
    return data


def _update(digest: hashlib._Hash, folder: Path) -> None:
    for name, path in package_files(folder).items():
        data = path.read_bytes()
        digest.update(name.encode() + b"\0" + struct.pack("<q", len(data)) + data)
