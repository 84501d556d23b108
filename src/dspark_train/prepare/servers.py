"""Answers from OpenAI-compatible servers: bounded concurrency, retries, and dead servers left alone."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx

from dspark_train.data.conversations import BadConversation, Conversation
from dspark_train.errors import UserError
from dspark_train.prepare.answers import Answer, Done, Failed, Progressing, Regenerate


class _ServerFailure(Exception):  # noqa: N818 - never leaves this file
    """The server did not answer, or wrongly."""


class _Server:
    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")
        self.in_flight = 0
        self.failures = 0
        self.dead_until = 0.0
        self.model: str | None = None


class ServerPool:
    """Chooses a server for each request.

    Args:
        options: addresses and limits.
    """

    def __init__(self, options: Regenerate) -> None:
        self._options = options
        self.servers = [_Server(address) for address in options.servers]
        self._changed = asyncio.Condition()
        self._last_success = time.monotonic()

    async def acquire(self) -> _Server:
        """Wait for a server with room, and take a place on it.

        Raises:
            UserError: none has answered for ``give_up_after`` seconds.
        """
        async with self._changed:
            while True:
                now = time.monotonic()
                open_ones = [server for server in self.servers if server.in_flight < self._room(server, now)]
                if open_ones:
                    server = min(open_ones, key=lambda server: server.in_flight)
                    server.in_flight += 1
                    return server
                if now - self._last_success > self._options.give_up_after and not any(
                    server.in_flight for server in self.servers
                ):
                    addresses = ", ".join(server.address for server in self.servers)
                    raise UserError(
                        f"no server has answered for {self._options.give_up_after:g} s: {addresses}. What was answered "
                        "is kept; start the servers and run the stage again"
                    )
                waits = [server.dead_until - now for server in self.servers if server.dead_until > now]
                try:
                    await asyncio.wait_for(self._changed.wait(), timeout=max(0.01, min([*waits, 1.0])))
                except TimeoutError:
                    continue

    def _room(self, server: _Server, now: float) -> int:
        """Requests that a server may have: none while dead, one to see whether it is back."""
        if server.dead_until > now:
            return 0
        return 1 if server.failures >= self._options.dead_after else self._options.concurrency

    async def release(self, server: _Server, success: bool) -> None:
        """Give the place back; a server that fails too often in a row is dead for a while."""
        async with self._changed:
            server.in_flight -= 1
            if success:
                server.failures, server.dead_until = 0, 0.0
                self._last_success = time.monotonic()
            else:
                server.failures += 1
                if server.failures >= self._options.dead_after:
                    server.dead_until = time.monotonic() + self._options.revive_after
            self._changed.notify_all()


def answer_over_http(
    todo: Iterator[tuple[str, Conversation]], options: Regenerate, done: Done, failed: Failed
) -> None:
    """Answer conversations by the servers of ``options``.

    Args:
        todo: conversations, by key.
        options: of the stage.
        done: told of each complete conversation, from one thread.
        failed: told of each that got no answer, from the same thread.

    Raises:
        UserError: no server answers, or the environment lacks the key.
    """
    asyncio.run(_answer_all(todo, options, done, failed))


async def _answer_all(
    todo: Iterator[tuple[str, Conversation]], options: Regenerate, done: Done, failed: Failed
) -> None:
    pool = ServerPool(options)
    headers = {}
    if options.api_key_variable:
        key = os.environ.get(options.api_key_variable)
        if not key:
            raise UserError(
                f"regeneration.api_key_variable: the environment has no {options.api_key_variable}"
            )
        headers["Authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(timeout=options.timeout, headers=headers, limits=limits) as client:

        async def work() -> None:
            for key, conversation in todo:  # shared by all workers: each item is taken by one
                item = Progressing(conversation, options)
                try:
                    while not item.receive(await _ask(client, pool, item, options)):
                        pass
                except BadConversation as error:
                    failed(conversation, error)
                    continue
                done(item, key)

        workers = [asyncio.create_task(work()) for _ in range(options.concurrency * len(pool.servers))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _ask(client: httpx.AsyncClient, pool: ServerPool, item: Progressing, options: Regenerate) -> Answer:
    """Get one answer, from whichever server gives it.

    Raises:
        BadConversation: a server refuses the request, or all tries gave wrong answers.
    """
    attempt = 0
    while True:
        server = await pool.acquire()
        success = False
        wrong: _ServerFailure | None = None
        try:
            answer = await _request(client, server, item, options)
            success = True
            return answer
        except BadConversation:
            success = True  # the server is sound: it says that the request is not
            raise
        except _ServerFailure as error:
            wrong = error
        except httpx.ReadTimeout:
            wrong = _ServerFailure(f"{server.address} gave no answer within {options.timeout:g} s")
        except httpx.TransportError:
            pass  # tried again elsewhere, as long as there is a server: this is no fault of the conversation
        finally:
            await pool.release(server, success)
        if wrong is not None:
            attempt += 1
            if attempt > options.retries:
                raise BadConversation("no valid answer", f"{attempt} tries; last: {wrong}")
            await asyncio.sleep(options.delay(attempt))


async def _request(
    client: httpx.AsyncClient, server: _Server, item: Progressing, options: Regenerate
) -> Answer:
    if server.model is None:
        server.model = options.model or await _served_model(client, server)
    body: dict[str, Any] = {
        "model": server.model,
        "messages": item.messages,
        "max_tokens": options.max_tokens,
        "seed": item.seed,
        "return_token_ids": True,
        **options.sampling(),
    }
    if item.template:
        body["chat_template_kwargs"] = item.template
    if item.conversation.tools:
        body["tools"] = list(item.conversation.tools)
    reply = await client.post(f"{server.address}/v1/chat/completions", json=body)
    if 400 <= reply.status_code < 500 and reply.status_code not in (404, 408, 409, 425, 429):
        raise BadConversation(f"refused by the server ({reply.status_code})", reply.text[:300])
    if reply.status_code != 200:
        raise _ServerFailure(f"{server.address} answered {reply.status_code}: {reply.text[:200]}")
    try:
        return _read_answer(reply.json())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _ServerFailure(f"{server.address} answered what is no completion ({error!r})") from error


def _read_answer(reply: dict[str, Any]) -> Answer:
    choice = reply["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    if reason not in ("stop", "length", "tool_calls"):
        raise BadConversation("finished for another reason", str(reason))
    content = message["content"]
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    stop: Literal["stop", "length", "tool_calls"] = reason
    usage = reply.get("usage") or {}
    return Answer(
        content=content,
        stop=stop,
        thinking=message.get("reasoning_content") or message.get("reasoning"),
        prompt_ids=reply.get("prompt_token_ids"),
        answer_ids=choice.get("token_ids"),
        usage={name: int(usage[name]) for name in ("prompt_tokens", "completion_tokens") if name in usage},
        tool_calls=[_tool_call(call) for call in message.get("tool_calls") or []],
    )


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call as chat templates take it: servers give its arguments as JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


async def _served_model(client: httpx.AsyncClient, server: _Server) -> str:
    reply = await client.get(f"{server.address}/v1/models")
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _ServerFailure(f"{server.address}/v1/models names no model") from error
