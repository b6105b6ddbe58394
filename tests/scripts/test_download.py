import errno
import hashlib
import random
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cuewalk.scripts import download as module
from cuewalk.scripts.cli import main
from cuewalk.scripts.download import DownloadError, describe, download, fetch

BODY = random.Random(0).randbytes(400_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@contextmanager
def serving(body=BODY, *, breaks_at=(), ranges=True, status=None, says_length=True):
    """Serve one body; the n-th answer ends after `breaks_at[n]` bytes. Yields the address and the ranges asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers.get("Range")
            asked.append(wanted)
            start = int(wanted.split("=")[1].rstrip("-")) if wanted and ranges else 0
            if status or start >= len(body):
                self.send_error(status or 416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            if says_length:
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            broken = len(asked) <= len(breaks_at)
            self.wfile.write(body[start : start + breaks_at[len(asked) - 1]] if broken else body[start:])

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/f.json", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "BLOCK", 1000)


def about(url, **changes):
    return {"url": url, "sha256": SHA256, "bytes": len(BODY)} | changes


def test_a_file_comes_whole_and_is_not_fetched_twice(tmp_path):
    path = tmp_path / "new" / "f.json"
    with serving() as (url, asked):
        assert fetch(about(url), path) == path and path.read_bytes() == BODY
        fetch(about(url), path)
    assert asked == [None] and [p.name for p in path.parent.iterdir()] == ["f.json"]


def test_what_breaks_off_is_gone_on_with_from_its_last_byte(tmp_path):
    with serving(breaks_at=(150_000, 100_000)) as (url, asked):
        fetch(about(url), tmp_path / "f.json")
    assert asked == [None, "bytes=150000-", "bytes=250000-"]
    assert (tmp_path / "f.json").read_bytes() == BODY


def test_a_later_call_goes_on_with_what_an_earlier_one_left(tmp_path):
    part = tmp_path / "f.json.part"
    part.write_bytes(BODY[:1234])
    with serving() as (url, asked):
        fetch(about(url), tmp_path / "f.json")
    assert asked == ["bytes=1234-"] and (tmp_path / "f.json").read_bytes() == BODY and not part.exists()
    (tmp_path / "f.json").rename(part)  # all of it had come, and the end of the program before it was renamed
    with serving() as (url, asked):
        fetch(about(url), tmp_path / "f.json")
    assert asked == ["bytes=400000-"] and (tmp_path / "f.json").read_bytes() == BODY


def test_a_host_without_ranges_is_asked_for_the_whole(tmp_path):
    (tmp_path / "f.json.part").write_bytes(b"other" * 1000)
    with serving(ranges=False) as (url, asked):
        fetch(about(url), tmp_path / "f.json")
    assert asked == ["bytes=5000-"] and (tmp_path / "f.json").read_bytes() == BODY


def test_a_host_that_always_breaks_is_given_up_and_what_came_is_kept(tmp_path):
    with (
        serving(breaks_at=(150_000,) * 9, ranges=False) as (url, asked),
        pytest.raises(DownloadError, match=r"can't get http.* 150,000 bytes are kept in .*f.json.part: the same"),
    ):
        fetch(about(url), tmp_path / "f.json")
    assert len(asked) == 2 and not (tmp_path / "f.json").exists()  # the second brought no more than the first
    assert (tmp_path / "f.json.part").read_bytes() == BODY[:150_000]


def test_an_end_that_comes_early_without_a_length_is_seen_by_the_size(tmp_path):
    with serving(breaks_at=(1000,), says_length=False) as (url, asked):
        fetch(about(url), tmp_path / "f.json")
    assert asked == [None, "bytes=1000-"] and (tmp_path / "f.json").read_bytes() == BODY


def test_wrong_bytes_are_refused_and_removed(tmp_path):
    with (
        serving(BODY[:-1] + b"!") as (url, _),
        pytest.raises(DownloadError, match=rf"gave a file with SHA-256 .*expected {SHA256[:12]}….*was removed"),
    ):
        fetch(about(url), tmp_path / "f.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "f.json.part").write_bytes(BODY + b"more")  # another, longer file was here before
    with serving() as (url, _):
        with pytest.raises(DownloadError, match="Try once more"):
            fetch(about(url), tmp_path / "f.json")
        fetch(about(url), tmp_path / "f.json")
    assert (tmp_path / "f.json").read_bytes() == BODY


def test_another_file_in_its_place_is_never_overwritten(tmp_path):
    (tmp_path / "f.json").write_text("mine")
    with (
        serving() as (url, asked),
        pytest.raises(DownloadError, match="is there, with another content .*move it away first"),
    ):
        fetch(about(url), tmp_path / "f.json")
    assert asked == [] and (tmp_path / "f.json").read_text() == "mine"


def test_no_network_and_a_refusal_are_told_plainly(tmp_path):
    with (
        serving(status=404) as (url, _),
        pytest.raises(DownloadError, match=r"can't get .*404.*Without a network, bring .*f.json by hand"),
    ):
        fetch(about(url), tmp_path / "f.json")
    with pytest.raises(DownloadError, match="can't get http://127.0.0.1.*refused"):  # nobody is there any more
        fetch(about(url), tmp_path / "f.json")


def test_a_full_disk_is_told_before_and_while_it_fills(tmp_path, monkeypatch):
    with serving() as (url, asked):
        with pytest.raises(DownloadError, match=r"can't write .*9,000,000,000 MB are to come, and .* free some"):
            fetch(about(url, bytes=9 * 10**15), tmp_path / "f.json")
        assert asked == []

        def full(self, size):
            yield BODY[:1000]
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("requests.Response.iter_content", full)
            with pytest.raises(DownloadError, match="No space left on device; free some, and the same command goes on"):
                fetch(about(url), tmp_path / "f.json")
        fetch(about(url), tmp_path / "f.json")
    assert asked == [None, "bytes=1000-"] and (tmp_path / "f.json").read_bytes() == BODY
    (tmp_path / "plain").write_text("no folder")
    with pytest.raises(DownloadError, match="can't write .*choose another --to"):
        fetch(about(url), tmp_path / "plain" / "f.json")


def test_the_command_says_licence_citation_and_where_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("CUEWALK_DATA", raising=False)
    with serving() as (url, _):
        source = {"files": {"f.json": about(url, checked=False)}, "licence": "MIT", "citation": "A paper"}
        monkeypatch.setattr(module, "embedded", lambda name: {"toy": source})
        assert main(["download", "toy", "--to", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == [str(tmp_path / "f.json"), "Licence: MIT.", "Please cite: A paper."]
    assert "other projects publish" in out and f"Set CUEWALK_DATA={tmp_path}" in out
    assert main(["download", "toys"]) == 2
    assert "unknown data set 'toys'; choose from toy" in capsys.readouterr().err


def test_real_names_are_known_and_unchecked_digests_named():
    with pytest.raises(DownloadError, match="choose from locomo, longmemeval, longmemeval_s, longmemeval_m, perltqa"):
        download("squad", "nowhere")
    assert "other projects" not in describe("locomo") + describe("longmemeval")
    assert "CC BY-NC 4.0" in describe("perltqa") and "other projects" in describe("perltqa")
