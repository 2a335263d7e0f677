"""What a node must hold, and every way in which its files can be wrong."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.helpers.certificates import Authority

from ratchet.errors import ConfigError
from ratchet.transport.mailbox.credentials import (
    key_of,
    load_tls,
    load_token,
    open_credentials,
)

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_token(str(path))
    text = str(caught.value)
    assert f"runtime.token_file = {str(path)!r}" in text
    assert 'secrets.token_hex(32))" > FILE; chmod 600 FILE' in text
    assert TOKEN not in text
    return text


# --- tokens


def test_the_key_follows_from_the_token_alone(token: Path) -> None:
    key = load_token(str(token))
    assert len(key) == 32
    token.write_text(f"  {TOKEN}\r\n\n")
    assert load_token(str(token)) == key
    assert TOKEN.encode() not in key
    token.write_text(f"{TOKEN}x")
    assert load_token(str(token)) != key


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_taken(token: Path, mode: int) -> None:
    token.chmod(mode)
    assert load_token(str(token))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o660, 0o700, 0o610])
def test_a_file_that_others_can_touch_is_refused(token: Path, mode: int) -> None:
    token.chmod(mode)
    assert f"has mode {mode:04o} and must have 0600: chmod 600 it" in refusal(token)


def test_the_mode_is_that_of_the_file_and_not_of_a_link_to_it(token: Path) -> None:
    link = token.with_name("link")
    link.symlink_to(token)
    assert load_token(str(link)) == load_token(str(token))
    token.chmod(0o644)
    assert "has mode 0644" in refusal(link)


def test_a_file_of_another_user_is_refused(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to user {owner} and not to {owner + 1}" in refusal(token)


def test_what_is_no_file_is_refused_and_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    assert "is not a regular file" in refusal(pipe)
    assert "is not a regular file" in refusal(tmp_path)
    assert "is not a regular file" in refusal("/dev/zero")
    assert "cannot be read: No such file" in refusal(tmp_path / "nothing")


@pytest.mark.parametrize(("text", "size"), [("", 0), (" \n" * 20, 0), ("x" * 15 + "\n", 15)])
def test_a_short_token_is_refused(token: Path, text: str, size: int) -> None:
    token.write_text(text)
    assert f"the token has {size} bytes and needs at least 16" in refusal(token)
    token.write_text("x" * 16)
    assert load_token(str(token))


def test_the_recipe_of_the_refusal_works(tmp_path: Path) -> None:
    recipe = refusal(tmp_path / "token").rpartition("make one: ")[2]
    recipe = recipe.replace("FILE", str(tmp_path / "token")).replace("python", sys.executable, 1)
    subprocess.run(recipe, shell=True, check=True)  # noqa: S602
    assert load_token(str(tmp_path / "token"))


# --- certificates


def test_both_contexts_ask_for_a_certificate_of_the_runs_authority_alone(
    authority: Authority,
) -> None:
    files = authority.sign()
    tls = load_tls(files.ca, files.cert, files.key)
    for context in (tls.server, tls.client):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert len(context.get_ca_certs()) == 1


def test_every_node_of_a_run_derives_the_same_key_and_other_runs_another(
    authority: Authority, tmp_path: Path
) -> None:
    first, second = authority.sign(), authority.sign()
    key = open_credentials(None, first).key
    assert len(key) == 32
    assert open_credentials(None, second).key == key
    assert open_credentials(None, Authority(tmp_path).sign()).key != key
    # what stands around the certificate in its file is not part of it
    Path(first.ca).write_text(f"# the authority of the run\n{Path(first.ca).read_text()}\n")
    assert key_of(load_tls(first.ca, first.cert, first.key)) == key


def breaks(directory: Path, authority: Authority) -> dict[str, tuple[Any, str]]:
    """Every way to give wrong files, and what is said about it."""
    good, other = authority.sign(), Authority(directory).sign()
    encrypted = authority.sign()
    noise, opened = directory / "noise", authority.sign()
    noise.write_text("noise")
    noise.chmod(0o600)
    Path(opened.key).chmod(0o640)
    private = load_pem_private_key(Path(good.key).read_bytes(), None)
    secret = BestAvailableEncryption(b"secret")
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, secret)
    Path(encrypted.key).write_bytes(pem)
    return {
        "no ca": (replace(good, ca="/nothing"), r"runtime\.tls\.ca = '/nothing' cannot be read"),
        "noise for ca": (
            replace(good, ca=str(noise)),
            r"runtime\.tls\.ca .* cannot be used as PEM",
        ),
        "leaf for ca": (replace(good, ca=good.cert), r"has no certificate of an authority"),
        "no cert": (replace(good, cert="/nothing"), r"runtime\.tls\.cert = '/nothing' cannot be"),
        "noise for cert": (replace(good, cert=str(noise)), r"runtime\.tls\.cert .* cannot be used"),
        "another ca": (
            replace(good, ca=other.ca),
            r"runtime\.tls\.cert .* would be refused by the other nodes.*certificate",
        ),
        "expired": (authority.sign(expired=True), r"would be refused.* certificate has expired"),
        "no key": (replace(good, key="/nothing"), r"runtime\.tls\.key = '/nothing' cannot be read"),
        "another key": (replace(good, key=other.key), r"runtime\.tls\.cert .* key values mismatch"),
        "noise for key": (replace(good, key=str(noise)), r"runtime\.tls\.cert .* cannot be used"),
        "open key": (opened, r"runtime\.tls\.key .* has mode 0640 and must have 0600"),
        "encrypted key": (encrypted, r"runtime\.tls\.key is encrypted"),
    }


def test_every_wrong_file_is_named(tmp_path: Path, authority: Authority) -> None:
    for files, says in breaks(tmp_path, authority).values():
        with pytest.raises(ConfigError, match=says):
            open_credentials(None, files)


# --- both


def test_with_a_token_and_certificates_both_must_be_right(
    token: Path, authority: Authority
) -> None:
    both = open_credentials(str(token), authority.sign())
    assert both.key == load_token(str(token))
    assert both.tls is not None
    alone = open_credentials(str(token), None)
    assert alone.key == both.key
    assert alone.tls is None


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.token_file and runtime\.tls are both missing"):
        open_credentials(None, None)


def test_the_key_is_in_no_text(token: Path, authority: Authority) -> None:
    credentials = open_credentials(str(token), authority.sign())
    for text in (repr(credentials), str(credentials)):
        assert repr(credentials.key) not in text
        assert credentials.key.hex() not in text
