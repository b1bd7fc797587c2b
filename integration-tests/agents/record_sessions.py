"""Records what command-line agents send: runs those that npm has against a fake server that calls a tool in each of
eleven turns, and writes the shapes of their requests into `sessions.json`.

    npm install @anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code
    python integration-tests/agents/record_sessions.py node_modules/.bin

A shape has no text of a client: `#7:5682` stands for a text of 5,682 characters, always the same one. Only the lines
that agents write anew for every request are as they were sent. Each request tells how many of its messages the request
before had, and has the others."""

import argparse
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SESSIONS = Path(__file__).parent / "sessions.json"
TURNS = 11  # calls of tools, before the answer that ends the session
TASK = "Print numbers step by step."
LIMIT_S = 120.0
# Tools that run a command line, with the field that has it.
SHELLS = {
    "Bash": "command",
    "bash": "command",
    "run_shell_command": "command",
    "exec_command": "cmd",
    "shell": "command",
}
KEPT = re.compile(r"x-anthropic-[a-z-]+:[^\n]*\n?|\s*<total_tokens>[^<]*</total_tokens>")
TOOLS = 3  # tools of a request that a shape has: the demo model's context is short
CONVERSATIONS = {"/v1/messages": "messages", "/v1/chat/completions": "messages", "/v1/responses": "input"}
# What a shape has besides the conversation.
HEADS = ("system", "instructions", "tools")
Event = tuple[str, Mapping[str, Any]]


class Recorder(ThreadingHTTPServer):
    """Answers every request of an agent, and keeps the bodies in the order of their arrival."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: Any) -> None:
        """Writes nothing."""

    def do_HEAD(self) -> None:
        self._send(b"", "text/plain")

    def do_GET(self) -> None:
        self._send(b'{"object": "list", "data": [], "models": []}', "application/json")

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = self.path.partition("?")[0]
        if path not in CONVERSATIONS:
            return self._send(b'{"input_tokens": 100}', "application/json")
        body = json.loads(content)
        self.server.bodies.append((path, body))
        events = ANSWERS[path](body, len(self.server.bodies))
        names = path != "/v1/chat/completions"
        lines = [(f"event: {name}\n" if names else "") + f"data: {json.dumps(value)}\n\n" for name, value in events]
        self._send("".join(lines).encode() + (b"" if names else b"data: [DONE]\n\n"), "text/event-stream")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def call_of(path: str, body: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of the tool that the next answer calls, and its arguments as JSON. None: the answer is a text."""
    results = {"tool_result", "function_call_output"}
    turns = [turn for turn in body[CONVERSATIONS[path]] if isinstance(turn, dict)]
    done = sum(
        turn.get("role") == "tool" or turn.get("type") in results or "tool_result" in str(turn.get("content"))
        for turn in turns
    )
    names = [tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools") or ()]
    name = next((name for name in names if name in SHELLS), None)
    if name is None or done >= TURNS:
        return None
    arguments: dict[str, Any] = {SHELLS[name]: f"echo {done}", "description": "Print a number"}
    return name, json.dumps(arguments | ({"is_background": False} if name == "run_shell_command" else {}))


def anthropic_answer(body: Mapping[str, Any], number: int) -> Iterator[Event]:
    usage = {"input_tokens": 10, "output_tokens": 1}
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body["model"], "content": []}
    yield _event("message_start", message=message | {"stop_reason": None, "stop_sequence": None, "usage": usage})
    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": "Step."})
    yield _event("content_block_stop", index=0)
    if call := call_of("/v1/messages", body):
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": call[0], "input": {}}
        yield _event("content_block_start", index=1, content_block=block)
        yield _event("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": call[1]})
        yield _event("content_block_stop", index=1)
    delta = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}
    yield _event("message_delta", delta=delta, usage=usage)
    yield _event("message_stop")


def chat_answer(body: Mapping[str, Any], number: int) -> Iterator[Event]:
    def chunk(delta: Mapping[str, Any], reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        head = {"id": f"c{number}", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        return "", head | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": "Step."})
    if call := call_of("/v1/chat/completions", body):
        function = {"name": call[0], "arguments": call[1]}
        yield chunk({"tool_calls": [{"index": 0, "id": f"call_{number}", "type": "function", "function": function}]})
    yield chunk({}, "tool_calls" if call else "stop")


def responses_answer(body: Mapping[str, Any], number: int) -> Iterator[Event]:
    response = {"id": f"resp_{number}", "object": "response", "model": body["model"], "status": "completed"}
    yield _event("response.created", response=response | {"status": "in_progress", "output": []})
    if call := call_of("/v1/responses", body):
        item = {"type": "function_call", "call_id": f"call_{number}", "name": call[0], "arguments": call[1]}
    else:
        item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Step."}]}
    item |= {"id": f"item_{number}", "status": "completed"}
    yield _event("response.output_item.done", output_index=0, item=item)
    usage = {"input_tokens": 10, "output_tokens": 1, "total_tokens": 11}
    yield _event("response.completed", response=response | {"output": [item], "usage": usage})


def _event(name: str, **values: Any) -> Event:
    return name, {"type": name, **values}


ANSWERS = {"/v1/messages": anthropic_answer, "/v1/chat/completions": chat_answer, "/v1/responses": responses_answer}


@dataclass
class Shapes:
    """Turns bodies into shapes. Equal texts get the same number."""

    texts: dict[str, int] = field(default_factory=dict)

    def of(self, bodies: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        shapes: list[dict[str, Any]] = []
        heads: dict[tuple[str, str], Any] = {}
        before: list[Any] = []
        for path, body in bodies:
            turns = [self._shape(turn) for turn in body[CONVERSATIONS[path]]]
            same = next((n for n, (a, b) in enumerate(zip(turns, before, strict=False)) if a != b), len(before))
            shape = {"path": path, "keeps": min(same, len(turns)), "turns": turns[same:]}
            for name in HEADS:
                head = self._shape(body.get(name)) if name != "tools" else self._tools(body.get(name))
                if head and heads.get((path, name)) != head:
                    heads[path, name] = shape[name] = head
                elif not head and (path, name) in heads:
                    shape[name] = heads.pop((path, name)) and None
            shapes.append(shape)
            before = turns
        return shapes

    def _tools(self, tools: Any) -> list[Any]:
        """The tools' names; those that run commands are among them."""
        names = [tool.get("name") or tool.get("function", {}).get("name") or tool["type"] for tool in tools or ()]
        return sorted(names, key=lambda name: name not in SHELLS)[:TOOLS]

    def _shape(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._shape(part) for name, part in value.items() if name != "cache_control"}
        if isinstance(value, list):
            return [self._shape(part) for part in value]
        return self._text(value) if isinstance(value, str) and len(value) > 40 else value

    def _text(self, text: str) -> str:
        parts = KEPT.split(text)
        kept = [*KEPT.findall(text), ""]
        return "".join(self._number(part) + line for part, line in zip(parts, kept, strict=True))

    def _number(self, text: str) -> str:
        return f"#{self.texts.setdefault(text, len(self.texts))}:{len(text)}" if text else ""


def claude(programs: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    environ = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "key", "IS_SANDBOX": "1"}
    environ |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "countdown"}
    return [f"{programs}/claude", "-p", TASK, "--dangerously-skip-permissions"], environ


def opencode(programs: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    options = {"baseURL": f"{url}/v1", "apiKey": "key"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"demo": {"tool_call": True}}}
    config = {"provider": {"local": provider}, "model": "local/demo", "small_model": "local/demo"}
    (home / ".config/opencode").mkdir(parents=True)
    (home / ".config/opencode/opencode.json").write_text(json.dumps(config))
    return [f"{programs}/opencode", "run", TASK], {}


def qwen(programs: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    environ = {"OPENAI_API_KEY": "key", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "demo"}
    return [f"{programs}/qwen", "-y", "--auth-type", "openai", "-p", TASK], environ


def codex(programs: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    provider = f'{{name="local", base_url="{url}/v1", wire_api="responses", env_key="KEY"}}'
    settings = ("-c", f"model_providers.local={provider}", "-c", 'model_provider="local"', "-c", 'model="demo"')
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return [f"{programs}/codex", "exec", *settings, *flags, TASK], {"KEY": "key"}


AGENTS = (claude, codex, opencode, qwen)


def record(agent: Any, programs: Path) -> dict[str, Any]:
    server = Recorder()
    with tempfile.TemporaryDirectory() as home:
        command, environ = agent(programs, Path(home), server.url)
        environ |= {"HOME": home, "PATH": os.environ["PATH"]}
        (Path(home) / "work").mkdir()
        where = {"cwd": f"{home}/work", "env": environ, "timeout": LIMIT_S, "stdin": subprocess.DEVNULL}
        version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True, **where).stdout
        subprocess.run(command, capture_output=True, check=True, **where)
    server.shutdown()
    server.server_close()
    return {"version": version.strip(), "requests": Shapes().of(server.bodies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path, help="folder of the programs: node_modules/.bin")
    programs = parser.parse_args().programs.resolve()
    sessions = {agent.__name__: record(agent, programs) for agent in AGENTS}
    SESSIONS.write_text(json.dumps(sessions, indent=0, ensure_ascii=False).replace("\n", "") + "\n")
    for name, session in sessions.items():
        print(name, session["version"], len(session["requests"]), "requests")


if __name__ == "__main__":
    main()
