"""Passwords, tokens and signatures in URIs are used, but never shown."""

import io
import json
import logging
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError
from raysgd.storage import locations
from raysgd.storage.locations import place, text_of
from raysgd.storage.remote import Uri
from raysgd.train import Checkpoint, CheckpointConfig, DataParallelTrainer, Result, RunConfig
from raysgd.train.run import payload_of

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

SECRETS = ("hunter2secret", "abc%2Fdef", "abc/def", "s3cr/et+key", "tokentoken")
URIS = [
    "leaky://user:hunter2secret@host/run",
    "leaky://KEY:s3cr/et+key@bucket/run",
    "leaky://host/run?X-Amz-Signature=abc%2Fdef&X-Amz-Date=2020",
    "leaky://host/run?sv=1&sig=hunter2secret",
    "leaky://host/run?token=tokentoken",
    "leaky://host/run#access_token=tokentoken",
    "leaky://user:hunter2secret@host/run?nobody_knows_this_name=tokentoken",
    "simplecache::leaky://user:hunter2secret@host/run",
    "leaky://user:hunter2secret@[::1]:99/run",
    "https://tokentoken@127.0.0.1:1/run",
    "https://127.0.0.1:1/run?tokentoken",
    "nothing://user:hunter2secret@host/run",
    "file://user:hunter2secret@host/run",
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


class Leaky(MemoryFileSystem):  # type: ignore[misc]
    """A store whose errors contain the URI in several forms, as those of real stores do."""

    protocol = "leaky"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return str(path)

    def _fail(self, path: Any, *_: Any, **__: Any) -> Any:
        try:
            raise OSError(f"no connection to {path}")
        except OSError as error:
            raise PermissionError(f"403, message='Forbidden', url=URL('{path}'), {SECRETS}") from error

    info = ls = cat_file = pipe_file = put_file = get_file = rm_file = rm = _fail


fsspec.register_implementation("vault", Vault, clobber=True)
fsspec.register_implementation("leaky", Leaky, clobber=True)


def check(text: Any, uri: str = "") -> None:
    found = [secret for secret in SECRETS if secret in str(text) and (not uri or secret in uri)]
    assert not found, f"{found} in {text}"


TRIES: dict[str, Callable[[str, Path], Any]] = {
    "from_uri": lambda uri, path: Checkpoint.from_uri(uri),
    "to_dict": lambda uri, path: Checkpoint(uri).to_dict(),
    "as_directory": lambda uri, path: Checkpoint(uri).as_directory().__enter__(),
    "to_directory": lambda uri, path: Checkpoint(uri).to_directory(path / "new"),
    "get_metadata": lambda uri, path: Checkpoint(uri).get_metadata(),
    "set_metadata": lambda uri, path: Checkpoint(uri).set_metadata({}),
    "to_uri": lambda uri, path: Checkpoint.from_dict({}).to_uri(uri),
    "write": lambda uri, path: locations.write(uri, b""),
    "draft": lambda uri, path: locations.Draft(uri),
    "names": lambda uri, path: locations.names(place(uri)),
    "delete": lambda uri, path: locations.delete(place(uri)),
    "payload_of": lambda uri, path: payload_of(uri, lambda value: b""),
    "result": lambda uri, path: Result.from_path(uri),
    "restore": lambda uri, path: DataParallelTrainer.restore(uri),
}


@pytest.mark.parametrize("name", TRIES)
def test_errors_do_not_show_secrets(name: str, tmp_path: Path) -> None:
    for uri in URIS:
        try:
            TRIES[name](uri, tmp_path)
        except Exception as error:
            check("".join(traceback.format_exception(error)), uri)
            check(repr(error), uri)
            assert "run" in str(error), "it still says what it is about"
        else:
            assert uri.startswith("https") and name in ("draft", "delete"), "what is not there is nothing to fail for"


def test_shown_uris_hide_secrets_and_used_uris_have_them() -> None:
    for uri in URIS[:-1]:
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


def test_copying_logs_shows_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").write_text("1")
    locations.copy_logs(tmp_path, place(URIS[0]))
    assert len(caplog.messages) == 1
    check(caplog.text, URIS[0])


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
