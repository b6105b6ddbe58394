"""Download of the public data sets: from a fixed commit, checked by digest, resumed where it broke off."""

import errno
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from cuewalk.env.tasks import DataError, embedded

TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
BLOCK = 1 << 16


class DownloadError(DataError):
    """Raised when a file can't be had; what came of it is kept where that can be gone on with."""


def download(name: str, folder: str | Path) -> list[Path]:
    """Download a data set's files into a folder; return their paths.

    A file that is there and has the digest is left as it is. A DownloadError if the name is unknown, or as `fetch`.
    """
    sources = embedded("sources.json")
    if name not in sources:
        raise DownloadError(f"unknown data set {name!r}; choose from {', '.join(sources)}")
    return [fetch(about, Path(folder) / file) for file, about in sources[name]["files"].items()]


def describe(name: str) -> str:
    """Return a data set's licence, citation, and how far its digests can be trusted."""
    source = embedded("sources.json")[name]
    lines = [f"Licence: {source['licence']}.", f"Please cite: {source['citation']}."]
    if not all(about["checked"] for about in source["files"].values()):
        lines.append(
            "The SHA-256 it was checked against is the one that other projects publish for this commit; no copy was at "
            "hand to this project to compute it from."
        )
    return "\n".join(lines)


def fetch(about: Mapping[str, Any], path: Path) -> Path:
    """Download one file: whole and with its digest under its name, or not at all.

    What has come lies beside it as `NAME.part`; a later call goes on from its end, where the host can. One that broke
    off is asked again at once for as long as each answer brings something.

    Args:
        about: `url`, `sha256`, and `bytes`, its size, or None where it is not known.
        path: Where it goes; missing folders are made.

    A DownloadError if another file is in its place, the host can't be reached or refuses, the disk is full, or what
    came has another digest (it is then removed, for it can't be gone on with).
    """
    if path.exists():
        if digest(path) == about["sha256"]:
            return path
        raise DownloadError(f"{path} is there, with another content (SHA-256 {digest(path)[:12]}…); move it away first")
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        missing, free = (about["bytes"] or 0) - _size(part), shutil.disk_usage(path.parent).free
        if missing > free:
            raise OSError(errno.ENOSPC, f"{missing / 1e6:,.0f} MB are to come, and {free / 1e6:,.0f} MB free")
        with tqdm(total=about["bytes"], desc=path.name, unit="B", unit_scale=True, disable=None) as bar:
            while not _receive(about, part, bar):
                pass
        if (found := digest(part)) != about["sha256"]:
            part.unlink()
            raise DownloadError(
                f"{about['url']} gave a file with SHA-256 {found[:12]}…, expected {about['sha256'][:12]}…; it was "
                f"removed. Try once more: if it is the same again, something between here and there changes the file"
            )
        part.replace(path)
    except requests.RequestException as error:
        reason = getattr(error.args[0] if error.args else None, "reason", error)  # without urllib3's account of it
        had = f" {_size(part):,} bytes are kept in {part}: the same command goes on from there." if _size(part) else ""
        raise DownloadError(
            f"can't get {about['url']}: {reason}.{had} Without a network, bring {path} by hand"
        ) from error
    except OSError as error:
        remedy = "free some, and the same command goes on" if error.errno == errno.ENOSPC else "choose another --to"
        raise DownloadError(f"can't write {part}: {error.strerror}; {remedy}") from error
    return path


def _receive(about: Mapping[str, Any], part: Path, bar: "tqdm[Any]") -> bool:
    """Ask for what is missing and append it; return whether it came to its end, False where the connection broke.

    A requests.RequestException if nothing new came of it.
    """
    before = start = _size(part)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with requests.get(about["url"], headers=headers, stream=True, timeout=TIMEOUT) as response:
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            return True  # nothing is left to come: the digest tells whether it is right
        response.raise_for_status()
        if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            start = 0  # the host sends it from its beginning
        bar.n = start
        try:
            with part.open("ab" if start else "wb") as file:
                for block in response.iter_content(BLOCK):
                    file.write(block)
                    bar.update(len(block))
            if _size(part) < (about["bytes"] or 0):
                raise requests.ConnectionError("it ended early")
        except requests.RequestException:
            if _size(part) <= before:
                raise
            return False
    return True


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
