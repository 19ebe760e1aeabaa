"""Files and batches of no valid key: an admin key manages them, adopting gives them to a key, a start names them."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner
from daemon_tools import deployment, line, served, submit, wait_batch
from laddertron.engine.daemon.keys import add_key, revoke_key
from laddertron.launchers.cli.commands.keys import command
from test_probes import get
from tiny_text import write_folder


def test_keys_hide_nothing_from_an_admin_and_adopting_gives_it_to_a_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch from before keys were set and one of a revoked key."""
    folder, keys = write_folder(tmp_path / "tiny"), tmp_path / "keys.json"
    with served(deployment(tmp_path), folder) as daemon:
        early = submit(daemon.client(), line("a")).id
        wait_batch(daemon.client(), early)
    gone, alice, ops = add_key(keys, "gone")[1], add_key(keys, "alice")[1], add_key(keys, "ops", "admin")[1]
    config = deployment(tmp_path, api_key_file=str(keys))
    with served(config, folder, keys=keys) as daemon:
        late = submit(daemon.client(gone), line("a")).id
        wait_batch(daemon.client(gone), late)
    key = revoke_key(keys, "gone")
    caplog.clear()
    with served(config, folder, keys=keys) as daemon:
        assert "4 files, 2 batches and 0 stored responses belong to no valid key" in caplog.text
        admin, client = daemon.client(ops), daemon.client(alice)
        assert {batch.id for batch in admin.batches.list()} == {early, late}
        assert [json.loads(get(daemon, "/v1/batches", ops)[1])["data"][n]["owner"] for n in (0, 1)] == [key.id, None]
        assert {row["id"] for row in json.loads(get(daemon, "/v1/overview", ops)[1])["batches"]} == {early, late}
        assert admin.files.content(admin.batches.retrieve(early).output_file_id or "").text
        assert list(client.batches.list()) == []
        for wrong in (alice, gone):
            run = CliRunner().invoke(command, _adopt(keys, daemon.url), env={"LADDERTRON_API_KEY": wrong})
            assert run.exit_code == 1
            assert ("kind admin" if wrong == alice else "valid API key") in run.output
        run = CliRunner().invoke(command, _adopt(keys, daemon.url), env={"LADDERTRON_API_KEY": ops})
        assert run.exit_code == 0
        assert "has 4 more files, 2 more batches and 0 more stored responses" in run.output
        assert {batch.id for batch in client.batches.list()} == {early, late}
        assert client.files.content(client.batches.retrieve(late).output_file_id or "").text
        admin.batches.with_raw_response.list(limit=1)
        with pytest.raises(openai.ConflictError):
            admin.batches.cancel(early)


def _adopt(keys: Path, url: str) -> list[str]:
    return ["adopt", str(keys), "alice", "--url", f"{url}/v1"]
