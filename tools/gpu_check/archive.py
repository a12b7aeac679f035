"""One archive with what a stage wrote, small enough to be brought home."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

LIMIT = 16_000_000  # bytes, of the archive
_LOG_LIMIT = 1_000_000  # bytes of a log, before packing: its beginning and its end
_FIRST = (".txt", ".json", ".jsonl", ".csv", ".xml", ".png", ".log")  # what matters most comes first


def shortened(data: bytes, limit: int = _LOG_LIMIT) -> bytes:
    """The beginning and the end of a long log."""
    if len(data) <= limit:
        return data
    half = limit // 2
    return data[:half] + f"\n... {len(data) - 2 * half} bytes left out ...\n".encode() + data[-half:]


def _order(path: Path) -> tuple[int, int, str]:
    kind = _FIRST.index(path.suffix) if path.suffix in _FIRST else len(_FIRST)
    return kind, path.stat().st_size, path.name


def pack(folder: Path, archive: Path, limit: int = LIMIT) -> list[str]:
    """Pack the files of a folder into a .tar.gz of at most `limit` bytes, which then replaces the one before at once.

    Args:
        folder: What is packed, under its own name.
        archive: Where to.
        limit: Bytes. Files that would exceed it are left out, the least important and the largest first.

    Returns:
        What is left out.
    """
    members: list[tuple[str, bytes]] = []
    left_out: list[str] = []
    packed = 1024  # the archive's own end
    for path in sorted((p for p in folder.rglob("*") if p.is_file()), key=_order):
        data = path.read_bytes()
        if path.suffix == ".log":
            data = shortened(data)
        name = f"{folder.name}/{path.relative_to(folder)}"
        # Compressed by itself it takes no less than in the archive; the rest is for the header.
        size = len(gzip.compress(data, 6)) + 600
        if packed + size > limit:
            left_out.append(name)
            continue
        packed += size
        members.append((name, data))
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(archive.name + ".part")
    with tarfile.open(unfinished, "w:gz", compresslevel=6) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    os.replace(unfinished, archive)
    return left_out
