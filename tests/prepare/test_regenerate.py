"""Regeneration against a real HTTP server that misbehaves, and in process."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dspark_train.data.conversations import DroppedConversation, conversation_from_row
from dspark_train.data.tokenize import ConversationEncoder
from dspark_train.errors import UserError
from dspark_train.prepare.answers import Regenerate, request_key
from dspark_train.prepare.regenerate import AnswerFile, check_collected, regenerate

Fault = Callable[[int, dict[str, Any]], str | None]


class FakeServer:
    """An OpenAI-compatible server whose answers depend on the messages alone.

    ``fault(number, body)`` names what goes wrong with the request of that number: ``500``, ``429``, ``400``,
    ``garbage``, ``empty``, ``stall``, ``drop`` or None.
    """

    def __init__(
        self,
        fault: Fault | None = None,
        *,
        tokens: bool = False,
        reasoning: bool = False,
        inline: str = "",
        calls: bool = False,
    ) -> None:
        self.fault, self.tokens, self.reasoning = fault or (lambda number, body: None), tokens, reasoning
        self.inline, self.calls = inline, calls
        self.prompt: Callable[[list[dict[str, Any]]], list[int]] = lambda said: list(range(len(said) + 1))
        self.active = self.most_active = 0
        self.requests = 0
        self.answered: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.authorized: set[str | None] = set()
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def send(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self.send(200, json.dumps({"data": [{"id": "fake"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests += 1
                    number = outer.requests
                    outer.bodies.append(body)
                    outer.authorized.add(self.headers.get("Authorization"))
                    outer.active += 1
                    outer.most_active = max(outer.most_active, outer.active)
                fault = outer.fault(number, body)
                with lock:
                    outer.active -= 1
                if fault is None:
                    with lock:
                        outer.answered[json.dumps(body["messages"])] += 1
                    self.send(200, json.dumps(outer.reply(body)).encode())
                elif fault == "garbage":
                    self.send(200, b"<html>busy</html>")
                elif fault == "empty":
                    self.send(200, b'{"choices": []}')
                elif fault == "stall":
                    time.sleep(1.0)
                    self.close_connection = True
                elif fault == "drop":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                    self.close_connection = True
                else:
                    self.send(int(fault), b'{"error": "as asked"}')

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.thread.start()

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        said = json.dumps([body["messages"], body["seed"]])
        content = "answer " + hashlib.sha256(said.encode()).hexdigest()[:6]
        message: dict[str, Any] = {"role": "assistant", "content": self.inline + content}
        if self.calls:
            function = {"name": "weather", "arguments": '{"city": "Paris"}'}
            message |= {
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            }
        if self.reasoning:
            message["reasoning_content"] = "let me think"
        long = "long" in body["messages"][-1]["content"]
        reason = "tool_calls" if self.calls else "length" if long else "stop"
        choice = {"message": message, "finish_reason": reason}
        reply = {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
        if self.tokens:
            choice["token_ids"] = [7, 8, 9]
            reply["prompt_token_ids"] = self.prompt(body["messages"])
        return reply

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(*args: Any, **options: Any) -> FakeServer:
        servers.append(FakeServer(*args, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def collected(tmp_path: Path) -> Path:
    path = tmp_path / "collected.jsonl"
    with path.open("w") as file:
        for index in range(30):
            messages = [{"role": "user", "content": f"question {index}"}]
            for turn in range(index % 3):
                messages += [
                    {"role": "assistant", "content": "someone else's answer"},
                    {"role": "user", "content": f"and {turn}?"},
                ]
            file.write(
                json.dumps({"id": f"c{index}", "split": "train", "domain": "d", "messages": messages}) + "\n"
            )
    return path


def options(*servers: FakeServer, **more: Any) -> Regenerate:
    quick: dict[str, Any] = {
        "concurrency": 4,
        "backoff": 0.01,
        "revive_after": 0.1,
        "timeout": 5.0,
        "give_up_after": 1.0,
        "retries": 8,
    }
    return Regenerate(servers=[server.address for server in servers], **quick | more)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def folder(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path


def test_every_turn_is_answered_on_the_regenerated_history(
    serve: Any, collected: Path, tmp_path: Path
) -> None:
    server = serve()
    rows = rows_of(regenerate(collected, tmp_path, options(server)))
    assert [row["id"] for row in rows] == [f"c{index}" for index in range(30)]
    assert server.requests == sum(1 + index % 3 for index in range(30))
    for index, row in enumerate(rows):
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (1 + index % 3)
        assert not any("someone else" in message["content"] for message in row["messages"])
        assert json.dumps(row["messages"][:-1]) in server.answered
        assert row["stop"] == ["stop"] * (1 + index % 3)
        assert row["usage"] == [{"prompt_tokens": 5, "completion_tokens": 3}] * (1 + index % 3)
        conversation_from_row(row, "w")
    assert set(server.answered.values()) == {1}


def test_requests_in_flight_are_bounded(serve: Any, collected: Path, tmp_path: Path) -> None:
    def slow(number: int, body: dict[str, Any]) -> None:
        time.sleep(0.02)

    servers = serve(slow), serve(slow)
    regenerate(collected, tmp_path, options(*servers, concurrency=3))
    assert all(1 < server.most_active <= 3 for server in servers)


def test_answers_of_another_target_are_not_taken(serve: Any, collected: Path, tmp_path: Path) -> None:
    regenerate(collected, tmp_path, options(serve()), target="one")
    same, other = serve(), serve()
    regenerate(collected, tmp_path, options(same), target="one")
    assert same.requests == 0
    regenerate(collected, tmp_path, options(other), target="two")
    assert other.requests == 60


def test_template_arguments_of_a_row_are_part_of_its_hash() -> None:
    row = {"id": "c", "messages": [{"role": "user", "content": "a"}]}
    thinking = row | {"template": {"enable_thinking": True}}
    keys = [request_key(conversation_from_row(each, "w"), Regenerate(), "t") for each in (row, thinking, row)]
    assert keys[0] == keys[2] != keys[1]


FAULTS: dict[str, Fault] = {
    "server errors": lambda number, body: "500" if number % 3 == 0 else None,
    "rate limits": lambda number, body: "429" if number % 4 == 1 else None,
    "garbage": lambda number, body: (None, "garbage", None, "empty")[number % 4],
    "dropped connections": lambda number, body: "drop" if number % 3 == 0 else None,
    "stalls": lambda number, body: "stall" if number % 25 == 3 else None,
    "dead for a while": lambda number, body: "drop" if 10 < number < 30 else None,
    "everything": lambda number, body: (None, "500", "garbage", None, "drop", None)[number % 6],
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_lose_nothing_and_double_nothing(
    serve: Any, collected: Path, tmp_path: Path, name: str
) -> None:
    whole = regenerate(collected, folder(tmp_path, "whole"), options(serve())).read_bytes()
    bad, good = serve(FAULTS[name]), serve(FAULTS[name])
    # the order in which four requests reach two servers is chance: it can send one conversation into the same fault
    # several times on end, but not a hundred
    patient = options(bad, good, timeout=0.5, give_up_after=20.0, retries=100)
    out = regenerate(collected, folder(tmp_path, "faulty"), patient)
    assert out.read_bytes() == whole


def test_one_dead_server_of_two(serve: Any, collected: Path, tmp_path: Path) -> None:
    dead, alive = serve(), serve()
    dead.close()
    rows = rows_of(regenerate(collected, tmp_path, options(dead, alive)))
    assert len(rows) == 30
    assert dead.requests == 0


def test_a_server_that_keeps_failing_is_left_alone(serve: Any, collected: Path, tmp_path: Path) -> None:
    failing, sound = serve(lambda number, body: "500"), serve()
    quick = options(failing, sound, concurrency=2, dead_after=2, revive_after=60.0)
    assert len(rows_of(regenerate(collected, tmp_path, quick))) == 30
    assert 2 <= failing.requests <= 3  # the second one of two in flight may fail after the server is dead


def test_a_dead_server_is_taken_back(serve: Any, collected: Path, tmp_path: Path) -> None:
    # the second server always fails at first; the first one is so slow that the second one is needed again
    def slow(number: int, body: dict[str, Any]) -> None:
        time.sleep(0.02)

    back = serve(lambda number, body: "500" if number <= 6 else None)
    regenerate(
        collected, tmp_path, options(serve(slow), back, concurrency=1, dead_after=2, revive_after=0.05)
    )
    assert sum(back.answered.values()) > 3


def test_no_server_stops_with_one_line_and_keeps_what_was_answered(
    serve: Any, collected: Path, tmp_path: Path
) -> None:
    dies = serve(lambda number, body: "drop" if number > 25 else None)
    with pytest.raises(UserError, match=r"no server has answered for 0\.3 s"):
        regenerate(collected, tmp_path, options(dies, give_up_after=0.3))
    kept = rows_of(tmp_path / "regenerated.partial.jsonl")
    assert 5 <= len(kept) < 25
    again = serve()
    whole = regenerate(collected, folder(tmp_path, "whole"), options(serve())).read_bytes()
    assert regenerate(collected, tmp_path, options(again)).read_bytes() == whole
    assert not {json.dumps(row["messages"][:1]) for row in kept} & set(again.answered)


@pytest.mark.parametrize("cut", [1, 37, 400])
def test_a_crash_in_the_middle_of_a_line(serve: Any, collected: Path, tmp_path: Path, cut: int) -> None:
    whole = regenerate(collected, tmp_path, options(serve())).read_bytes()
    partial = tmp_path / "regenerated.partial.jsonl"
    content = partial.read_bytes()
    partial.write_bytes(content[: len(content) // 2] + b'{"key": "x' if cut == 1 else content[:-cut])
    (tmp_path / "regenerated.jsonl").unlink()
    server = serve()
    assert regenerate(collected, tmp_path, options(server)).read_bytes() == whole
    assert 0 < server.requests < 50
    assert Counter(row["key"] for row in rows_of(partial)).most_common(1)[0][1] == 1


def test_interrupting_keeps_finished_conversations(serve: Any, collected: Path, tmp_path: Path) -> None:
    def interrupt(conversations: int, _tokens: int) -> None:
        seen.append(conversations)
        if len(seen) == 9:
            raise KeyboardInterrupt

    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        regenerate(collected, tmp_path, options(serve()), progress=interrupt)
    assert len(rows_of(tmp_path / "regenerated.partial.jsonl")) >= 9
    whole = regenerate(collected, folder(tmp_path, "whole"), options(serve())).read_bytes()
    assert regenerate(collected, tmp_path, options(serve())).read_bytes() == whole


def test_refused_and_hopeless_conversations_are_named(serve: Any, collected: Path, tmp_path: Path) -> None:
    def fault(number: int, body: dict[str, Any]) -> str | None:
        said = body["messages"][0]["content"]
        return {"question 3": "400", "question 4": "garbage"}.get(said)

    server = serve(fault)
    with pytest.raises(
        UserError, match=r"2 conversations got no answer.*refused by the server .400.: 1, no valid answer: 1"
    ):
        regenerate(collected, tmp_path, options(server, retries=2, dead_after=100))
    assert [row["id"] for row in rows_of(tmp_path / "regenerated.bad.jsonl")] in (["c3", "c4"], ["c4", "c3"])
    out = regenerate(collected, tmp_path, options(server, retries=2, dead_after=100, max_failed_share=0.1))
    assert [row["id"] for row in rows_of(out)] == [f"c{index}" for index in range(30) if index not in (3, 4)]


def test_exact_tokens_are_kept_and_used(serve: Any, collected: Path, tmp_path: Path, chatml: Any) -> None:
    rows = rows_of(regenerate(collected, tmp_path, options(serve(tokens=True))))
    assert rows[1]["turns"] == [
        {"prompt_ids": [0, 1], "answer_ids": [7, 8, 9], "finished": True},
        {"prompt_ids": [0, 1, 2, 3], "answer_ids": [7, 8, 9], "finished": True},
    ]
    conversation = conversation_from_row(rows[1], "w")
    examples = ConversationEncoder(chatml, max_length=100).encode(conversation)
    assert [example.input_ids.tolist() for example in examples] == [[0, 1, 7, 8, 9], [0, 1, 2, 3, 7, 8, 9]]


def test_a_server_of_another_model_is_noticed(
    serve: Any, collected: Path, tmp_path: Path, chatml: Any
) -> None:
    encoder = ConversationEncoder(chatml, max_length=1000)
    foreign = serve(tokens=True)
    with pytest.raises(UserError, match="it serves another model, or another chat template"):
        regenerate(collected, tmp_path, options(foreign, concurrency=1), encoder=encoder)
    assert rows_of(tmp_path / "regenerated.partial.jsonl") == []  # they would pass for the target's own

    def render(messages: list[dict[str, Any]]) -> list[int]:
        return list(chatml.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    own = serve(tokens=True)
    own.prompt = render
    target = folder(tmp_path, "own")
    regenerate(collected, target, options(own), encoder=encoder)
    tally = json.loads((target / "regenerated.json").read_text())
    assert tally["prompt read as the target reads it"] == 30
    assert "prompt read otherwise" not in tally


def test_answers_to_other_conversations_are_refused(serve: Any, collected: Path, tmp_path: Path) -> None:
    out = regenerate(collected, tmp_path, options(serve()))
    check_collected(out, collected)
    collected.write_text(collected.read_text().replace("question 3", "question three"))
    with pytest.raises(UserError, match=r"answers another collected\.jsonl"):
        check_collected(out, collected)
    with pytest.raises(UserError, match="no server has answered"):  # an interrupted run changes nothing
        regenerate(
            collected, tmp_path, options(serve(lambda number, body: "500"), give_up_after=0.2, retries=99)
        )
    with pytest.raises(UserError, match=r"answers another collected\.jsonl"):
        check_collected(out, collected)
    collected.unlink()  # answers alone can be tokenized
    check_collected(out, collected)


def test_waiting_doubles_up_to_a_bound() -> None:
    waits = [Regenerate(backoff=0.5).delay(attempt) for attempt in range(1, 9)]
    assert waits == [0.5, 1, 2, 4, 8, 15, 15, 15]


def test_tokenizing_again_is_checked_where_no_tokens_come(
    serve: Any, collected: Path, tmp_path: Path, chatml: Any
) -> None:
    encoder = ConversationEncoder(chatml, max_length=1000)
    regenerate(collected, tmp_path, options(serve()), encoder=encoder)
    tally = json.loads((tmp_path / "regenerated.json").read_text())
    assert (
        tally["tokenized again: different length"] == 30
    )  # this server counts three tokens whatever it says
    assert "with exact tokens" not in tally


def test_a_cut_answer_ends_the_conversation(serve: Any, tmp_path: Path, chatml: Any) -> None:
    path = tmp_path / "collected.jsonl"
    messages = [{"role": "user", "content": text} for text in ("first", "a long one", "never asked")]
    rows = [
        messages[0],
        {"role": "assistant", "content": "x"},
        messages[1],
        {"role": "assistant", "content": "x"},
        messages[2],
    ]
    path.write_text(json.dumps({"id": "c", "messages": rows}) + "\n")
    [row] = rows_of(regenerate(path, tmp_path, options(serve())))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
    assert row["stop"] == ["stop", "length"]
    assert row["finished"] is False
    [example] = ConversationEncoder(chatml, max_length=1000).encode(conversation_from_row(row, "w"))
    text = chatml.decode(example.input_ids[-3:])
    assert "<|im_end|>" not in text


@pytest.mark.parametrize("keep", [True, False])
def test_thinking(serve: Any, collected: Path, tmp_path: Path, keep: bool) -> None:
    server = serve(reasoning=True, tokens=True)
    [row, *_] = rows_of(regenerate(collected, tmp_path, options(server, thinking=False, keep_thinking=keep)))
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert row["messages"][1].get("reasoning_content") == ("let me think" if keep else None)
    assert ("turns" in row) is keep
    assert row["template"] == {"enable_thinking": False}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("inline", "left"),
    [("<think>\nhm\n</think>\n\n", "answer"), ("hm\n</think>\n\n", "answer"), ("<think>\nhm ", "")],
)
def test_thinking_within_the_content(
    serve: Any, collected: Path, tmp_path: Path, keep: bool, inline: str, left: str
) -> None:
    server = serve(inline=inline, tokens=True)
    [row, *_] = rows_of(regenerate(collected, tmp_path, options(server, keep_thinking=keep)))
    assert ("turns" in row) is keep
    said = row["messages"][1]["content"]
    assert said.startswith(inline) if keep else said[: len("answer")] == left


def test_an_answer_cut_while_thinking_gives_nothing_to_train_on(
    serve: Any, tmp_path: Path, chatml: Any
) -> None:
    path = tmp_path / "collected.jsonl"
    path.write_text(json.dumps({"id": "c", "messages": [{"role": "user", "content": "a long one"}]}) + "\n")
    server = serve(inline="<think>\nhm ")
    [row] = rows_of(regenerate(path, tmp_path, options(server, keep_thinking=False)))
    assert (row["messages"][1]["content"], row["finished"]) == ("", False)
    with pytest.raises(DroppedConversation, match="the answer is empty"):
        ConversationEncoder(chatml, max_length=1000).encode(conversation_from_row(row, "w"))


def test_a_tool_call_ends_the_conversation_and_is_kept(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "collected.jsonl"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": text} for text in ("weather?", "thanks")]
    row = {
        "id": "c",
        "tools": tools,
        "messages": [messages[0], {"role": "assistant", "content": "x"}, messages[1]],
    }
    path.write_text(json.dumps(row) + "\n")
    server = serve(calls=True)
    [row] = rows_of(regenerate(path, tmp_path, options(server)))
    assert server.bodies[0]["tools"] == row["tools"] == tools
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    assert row["messages"] == [messages[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert row["stop"] == ["tool_calls"]
    assert conversation_from_row(row, "w").finished


def test_sampling_is_the_targets_own_unless_set(
    serve: Any, collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setenv("FAKE_KEY", "secret")
    regenerate(collected, folder(tmp_path, "a"), options(server, api_key_variable="FAKE_KEY"))
    assert not {"temperature", "top_p", "top_k", "min_p"} & server.bodies[0].keys()
    assert server.bodies[0]["model"] == "fake"
    assert server.authorized == {"Bearer secret"}
    assert not any(b"secret" in file.read_bytes() for file in (tmp_path / "a").iterdir())
    regenerate(collected, folder(tmp_path, "b"), options(server, temperature=0.7, top_k=20, model="mine"))
    assert {"temperature": 0.7, "top_k": 20, "model": "mine"}.items() <= server.bodies[-1].items()
    with pytest.raises(UserError, match="the environment has no NO_SUCH_KEY"):
        regenerate(collected, folder(tmp_path, "c"), options(server, api_key_variable="NO_SUCH_KEY"))


def test_a_mode_switched_without_its_sampling_is_warned_of(
    serve: Any, collected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The generation config holds the values of one mode; greedy answers need none."""
    server = serve()
    own = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            {"thinking": False},
            {},
            "warning: thinking is switched off, and temperature, top_p, top_k are left",
        ),
        (
            {"temperature": 0.6},
            {"enable_thinking": True},
            "thinking is switched on, and top_p, top_k are left",
        ),
        ({"thinking": False, **own}, {}, ""),
        ({"thinking": False, "temperature": 0.0}, {}, ""),
        ({}, {}, ""),
    ]
    for number, (chosen, template, said) in enumerate(cases):
        place = folder(tmp_path, str(number))
        regenerate(collected, place, options(server, **chosen), template=template)
        assert said in (found := "".join(capsys.readouterr())), found
        assert ("warning" in found) == bool(said)
    kept = [json.loads((tmp_path / name / "regenerated.json").read_text())["sampling"] for name in "02"]
    assert kept == [dict.fromkeys(own, "the target's generation config"), own]


def test_the_target_answers_with_the_template_that_the_set_is_made_with(
    serve: Any, collected: Path, tmp_path: Path
) -> None:
    server = serve()
    arguments = {"reasoning_effort": "low"}
    rows = rows_of(regenerate(collected, tmp_path, options(server), template=arguments))
    assert all(body["chat_template_kwargs"] == arguments for body in server.bodies)
    assert all(row["template"] == arguments for row in rows)
    # what says no more than `thinking` does leaves earlier answers valid; anything else asks again
    conversation = conversation_from_row({"id": "c", "messages": [{"role": "user", "content": "a"}]}, "w")
    off = Regenerate(thinking=False)
    assert request_key(conversation, off, "t", {"enable_thinking": False}) == request_key(
        conversation, off, "t"
    )
    assert request_key(conversation, off, "t", arguments) != request_key(conversation, off, "t")


def test_only_one_writer(serve: Any, collected: Path, tmp_path: Path) -> None:
    first = AnswerFile(tmp_path / "regenerated.partial.jsonl")
    with pytest.raises(UserError, match="another process is regenerating"):
        regenerate(collected, tmp_path, options(serve()))
    first.close()


def test_options_are_checked(collected: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no address"):
        Regenerate(servers=["localhost:8000"])
    with pytest.raises(UserError, match="concurrency is 0"):
        Regenerate(concurrency=0)
    with pytest.raises(UserError, match=r"name servers in regeneration\.servers"):
        regenerate(collected, tmp_path, Regenerate())


class Echo:
    """Answers with three tokens that depend on prompt and seed; records the batches."""

    def __init__(self, die_after: int | None = None) -> None:
        self.batches: list[list[int]] = []
        self.die_after = die_after

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: dict[str, Any],
        seeds: Sequence[int],
    ) -> list[tuple[list[int], bool]]:
        if self.die_after is not None and len(self.batches) == self.die_after:
            raise KeyboardInterrupt
        self.batches.append([len(prompt) for prompt in prompts])
        end = 421  # <|im_end|>
        return [
            ([65 + seed % 20, 66 + len(prompt) % 20, end], True)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]


def test_in_process_generation_is_batched_by_length_and_resumes(
    collected: Path, tmp_path: Path, chatml: Any
) -> None:
    encoder = ConversationEncoder(chatml, max_length=1000)
    assert chatml.convert_tokens_to_ids("<|im_end|>") == 421
    echo = Echo()
    small = Regenerate(concurrency=8)
    out = regenerate(collected, folder(tmp_path, "a"), small, encoder=encoder, generate=echo)
    rows = rows_of(out)
    assert len(rows) == 30
    assert all(max(batch) - min(batch) <= 40 and len(batch) <= 8 for batch in echo.batches)
    assert sum(map(len, echo.batches)) == sum(1 + index % 3 for index in range(30))
    for row in rows:
        conversation = conversation_from_row(row, "w")
        for turn in conversation.turns:
            text = chatml.decode(turn.prompt_ids)
            assert text.endswith("<|im_start|>assistant\n")
        supervised = sum(int(example.loss_mask.sum()) for example in encoder.encode(conversation))
        assert supervised == 3 * len(conversation.turns)
    with pytest.raises(KeyboardInterrupt):
        regenerate(collected, folder(tmp_path, "b"), small, encoder=encoder, generate=Echo(die_after=5))
    rest = Echo()
    again = regenerate(collected, tmp_path / "b", small, encoder=encoder, generate=rest)
    assert again.read_bytes() == out.read_bytes()
    assert len(rest.batches) < len(echo.batches)
