"""Every command of the runbook, as it is printed, against a daemon of two real ranks."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from daemon_tools import line, submit, wait_batch
from laddertron.engine.daemon.keys import add_key
from laddertron.launchers.cli import __main__ as cli
from openai import OpenAI
from test_app_serve import ROOT, Process
from waiting import HANG_S

RUNBOOK = ROOT / "docs" / "runbook.md"
MONITORING = sorted((ROOT / "configs" / "monitoring").glob("*.yml"))


def commands() -> list[str]:
    """In code spans and indented blocks of the page, and in parentheses in the alerts' files."""
    found = re.findall(r"`((?:laddertron|curl) [^`]+)`|^    (\S.*)$", RUNBOOK.read_text(), re.MULTILINE)
    told = re.findall(r"\((laddertron [^)]+)\)", "".join(path.read_text() for path in MONITORING))
    return [*dict.fromkeys([*(a or b for a, b in found), *told])]


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    """The demo's, in tmp_path/deploy.yaml."""
    values = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    values["model"]["path"] = str(ROOT / "configs" / "demo" / "demo-ladder")
    values["daemon"] = {"data_dir": "data", "port": 0, "limits": {"min_free_disk": 0}, "api_key_file": "keys.json"}
    (tmp_path / "deploy.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def test_every_command_of_the_runbook_works_as_printed(
    deployment: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Placeholders are replaced by ids that there are; each command ends with 0, `serve` when it is terminated."""
    folder, (_, key) = deployment, add_key(deployment / "keys.json", "operator")
    monkeypatch.chdir(folder)
    for name in ("KEY", "LADDERTRON_API_KEY"):
        monkeypatch.setenv(name, key)
    all_of_them = commands()
    [serve] = [words for words in all_of_them if words.startswith("laddertron serve")]
    later = [words for words in all_of_them if words.startswith("laddertron preflight")]
    assert len(all_of_them) >= 12, all_of_them
    process = Process(folder, words=tuple(serve.split()[1:]))

    def run(words: str, **places: str) -> None:
        for place, value in {**places, "DIR": "monitoring", "FILE": "keys.json"}.items():
            words = re.sub(rf"\b{place}", value, words)
        if words.startswith("curl "):
            done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=HANG_S, check=False)
            assert (done.returncode, done.stdout.startswith('{"error"')) == (0, False), words + done.stdout
        else:
            assert cli.main(shlex.split(words)[1:]) == 0, words + capfd.readouterr().err

    try:
        process.ready()
        client = OpenAI(base_url=process.url, api_key=key)
        for words in all_of_them:
            if words in (serve, *later):
                continue
            if len(words.split()) == 2:
                assert words.split()[1] in cli.group.list_commands(None)  # type: ignore[arg-type]
                continue
            ids = {}
            if "_…" in words or "-…" in words:
                lines = 200 if "cancel" in words.split() else 1
                batch = submit(client, b"".join(line(f"r-{n}", "def f(", model="demo") for n in range(lines)))
                if lines == 1:
                    assert wait_batch(client, batch.id).status == "completed"
                ids = {"batch_…": batch.id, "file-…": batch.input_file_id}
            run(words, URL=process.url.removesuffix("/v1"), **ids)
        assert process.stop() == 0
        for words in later:
            run(words)
    finally:
        process.process.kill()
        process.process.wait()
