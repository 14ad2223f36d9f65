"""Passwords and parameters of URIs are used, and masked where raysgd prints or stores a URI."""

import io
import json
import logging
import uuid
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, ConfigError
from raysgd.storage.locations import place, text_of
from raysgd.storage.remote import Uri
from raysgd.train import Checkpoint, CheckpointConfig, DataParallelTrainer, Result, RunConfig

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

SECRETS = ("hunter2secret", "abc%2Fdef", "abc/def", "tokentoken")
URIS = [
    "s3://user:hunter2secret@host/run",
    "s3://host/run?X-Amz-Signature=abc%2Fdef&X-Amz-Date=2020",
    "az://host/run?sv=1&sig=hunter2secret",
    "s3://host/run?token=abc/def",
    "s3://host/run#access_token=tokentoken",
    "sftp://user:hunter2secret@host/run?nobody_knows_this_name=tokentoken",
    "simplecache::s3://user:hunter2secret@host/run",
    "sftp://user:hunter2secret@[::1]:99/run",
]


class Vault(MemoryFileSystem):  # type: ignore[misc]
    """A store that requires the password."""

    protocol = "vault"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        path = str(path)
        if path.startswith("vault://"):
            assert path.startswith("vault://user:hunter2secret@"), "it is asked without its password"
            path = path.partition("@")[2]
        return "/" + path.strip("/")


fsspec.register_implementation("vault", Vault, clobber=True)


def check(text: str) -> None:
    found = [secret for secret in SECRETS if secret in text]
    assert not found, f"{found} in {text}"


def test_shown_uris_hide_secrets_and_used_uris_have_them() -> None:
    for uri in URIS:
        where = place(uri)
        assert isinstance(where, Uri) and where.text == text_of(where) == uri
        checkpoint = Checkpoint(uri)
        assert checkpoint.path == uri and checkpoint.get_internal_representation() == ("uri", uri)
        assert (where / "a").parent == where and text_of(where) == uri
        shown = [str(where), repr(where), f"{where}", "%s" % where, repr(checkpoint), where.name, (where / "b").name]  # noqa: UP031
        shown += [repr(RunConfig(storage_path=uri)), repr(Result(path=uri, checkpoint=checkpoint)), repr([where])]
        for text in shown:
            check(text)
            assert "run" in text or text == "b"


def test_a_uri_without_secrets_is_shown_unchanged() -> None:
    for uri in (
        "s3://bucket/a/b",
        "memory://a",
        "sftp://user@host:22/a@b",
        "gs://b/a?generation=5",
        "s3://b/d=1/x",
        "abfs://c@acc/x",
    ):
        assert str(place(uri)) == uri


def test_a_path_on_another_machine_is_an_error_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"file://user:\*\*\*@host/run is on the machine 'host'"):
        place("file://user:hunter2secret@host/run")


def one_report() -> None:
    from raysgd import train

    train.report({"loss": 1.0}, checkpoint=Checkpoint.from_dict({"epoch": 1}))


def test_a_run_in_a_store_with_a_password(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The password is used until the end of the run, and is not in messages, on this machine's disk, or in the store."""
    monkeypatch.setenv("HOME", str(tmp_path))
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("raysgd").addHandler(handler)
    uri = f"vault://user:hunter2secret@host/{uuid.uuid4().hex}"
    try:
        config = RunConfig(storage_path=uri, name="run", checkpoint_config=CheckpointConfig(num_to_keep=1))
        results = [DataParallelTrainer(one_report, run_config=config).fit() for _ in range(2)]
        result = results[0]
        assert result.path == f"{uri}/run" and results[1].path == f"{uri}/run_2"
        again = Result.from_path(result.path)
        assert again.checkpoint is not None and again.checkpoint.to_dict()["epoch"] == 1
        restored = DataParallelTrainer.restore(result.path)
        assert restored.fit().path == result.path
        with pytest.raises(CheckpointError) as caught:
            DataParallelTrainer.restore(f"{uri}/absent")
    finally:
        logging.getLogger("raysgd").removeHandler(handler)
    shown = [repr(result), repr(again), repr(restored), str(caught.value), log.getvalue(), repr(result.checkpoint)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert ".stored-at" in [path.name for path in files]
    shown += [str(path) for path in files] + [path.read_bytes().decode("latin-1") for path in files]
    shown += [bytes(file.getbuffer()).decode("latin-1") for file in Vault.store.values()]
    for text in shown:
        check(text)
    owners = [path.read_text() for path in files if path.name == ".stored-at"]
    assert all(owner.startswith("vault://user:***@host/") for owner in owners)
    assert json.loads(json.dumps(str(place(uri)))) == uri.replace("hunter2secret", "***")
