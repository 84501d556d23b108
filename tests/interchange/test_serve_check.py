"""The check against a running server, with a small fake one that answers with this project's own decoder."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from dspark_train.decoding.decoder import generate
from dspark_train.draft.model import DSparkDraft
from dspark_train.errors import UserError
from dspark_train.interchange.serve_check import (
    AcceptedRounds,
    Served,
    ServedComparison,
    Server,
    ask,
    compare,
    own_rounds,
    side_by_side,
    target_notes,
    to_json,
)
from dspark_train.structures import DecodingTrace
from dspark_train.target.frozen import FrozenTarget
from dspark_train.target.quantised import Quantisation

PROMPTS = [[1, 2, 3], [7, 5], [11, 13, 17, 19]]


class FakeServer:
    """Speaks as vLLM or SGLang do, counts rounds as they do."""

    def __init__(
        self, engine: str, target: FrozenTarget, draft: DSparkDraft | None, key: str | None = None
    ) -> None:
        self.engine, self.target, self.draft, self.key = engine, target, draft, key
        self.gamma = draft.config.block_size if draft is not None else 0
        self.accepted: list[int] = [2, 1]
        """Accepted draft tokens of every round so far; earlier traffic is already counted."""
        self.wrong = 0

    def complete(self, prompt: list[int], limit: int) -> tuple[list[int], list[int]]:
        if self.draft is None:
            return generate(self.target, None, [prompt], max_new_tokens=limit).tokens[0], []
        tokens, trace = own_rounds(self.target, self.draft, [prompt], limit)
        self.accepted += trace.accepted.tolist()
        return [(token + self.wrong) % 53 for token in tokens[0]], trace.accepted.tolist()

    def metrics(self) -> str:
        if self.engine == "sglang":
            return '# HELP\nsglang:spec_accept_length{model="m"} 1.5\n'
        lines = ["# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0"} 0.0']
        if self.draft is not None:
            name, labels = "vllm:spec_decode_num", 'engine="0",model_name="m"'
            lines += [
                f"{name}_drafts_total{{{labels}}} {float(len(self.accepted))}",
                f"{name}_drafts_created{{{labels}}} 1.7e+09",
                f"{name}_draft_tokens_total{{{labels}}} {float(len(self.accepted) * self.gamma)}",
                f"{name}_accepted_tokens_total{{{labels}}} {float(sum(self.accepted))}",
            ]
            for position in range(self.gamma):
                count = sum(value > position for value in self.accepted)
                lines.append(
                    f'{name}_accepted_tokens_per_pos_total{{{labels},position="{position}"}} {float(count)}'
                )
        return "\n".join(lines) + "\n"

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "m", "root": "owner/tiny-qwen3-fp8"}]}
        if path in ("/version", "/get_server_info"):
            return {"version": "9.9.9"}
        if path == "/v1/completions":
            assert body["temperature"] == 0
            tokens, _ = self.complete(body["prompt"], body["max_tokens"])
            return {"choices": [{"text": "", "token_ids": tokens}]}
        if path == "/generate":
            tokens, accepted = self.complete(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            histogram = torch.tensor(accepted, dtype=torch.int64).bincount(minlength=self.gamma + 1).tolist()
            return {
                "output_ids": tokens,
                "meta_info": {"spec_verify_ct": len(accepted), "spec_accept_histogram": histogram},
            }
        return None

    @contextmanager
    def run(self) -> Iterator[str]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: dict[str, Any]) -> None:
                if fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}":
                    given = str(self.headers.get("Authorization")).removeprefix("Bearer ")
                    return self.send(401, f"who are you? not {given}".encode())
                if self.path == "/metrics":
                    return self.send(200, fake.metrics().encode())
                found = fake.answer(self.path, body)
                self.send(404 if found is None else 200, json.dumps(found).encode())

            def send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@pytest.fixture(scope="module")
def draft(make_draft: Callable[..., DSparkDraft], target: FrozenTarget) -> DSparkDraft:
    """A draft that is right now and then: its logits are pulled to the target's favourite tokens."""
    draft = make_draft("vanilla")
    tokens = generate(target, None, PROMPTS, max_new_tokens=12).tokens
    with torch.no_grad():
        for row in tokens:
            for before, after in itertools.pairwise(row):
                draft.markov_head.markov_w1.weight[before] = torch.randn(
                    8, generator=torch.Generator().manual_seed(before)
                )
                weight = draft.markov_head.markov_w1.weight[before]
                draft.markov_head.markov_w2.weight[after] += 3 * weight / weight.norm()
    return draft


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("suffix", ["", "/v1", "/"])
def test_a_server_that_decodes_alike_agrees_exactly(
    engine: str, suffix: str, target: FrozenTarget, draft: DSparkDraft
) -> None:
    tokens, trace = own_rounds(target, draft, PROMPTS, 10)
    fake, plain = FakeServer(engine, target, draft), FakeServer(engine, target, None)
    with fake.run() as url, plain.run() as plain_url:
        served = ask(Server(url + suffix), PROMPTS, 10)
        unaided = ask(Server(plain_url), PROMPTS, 10)
    found = compare(served, tokens, trace, unaided)
    assert served.acceptance is not None
    assert served.engine == engine
    assert served.version == "9.9.9"
    assert served.acceptance == found.own
    assert found.largest_gap == 0.0
    assert found.identical == found.identical_to_plain == len(PROMPTS)
    assert 0.0 < served.acceptance.acceptance[0] < 1.0
    table = "\n".join(side_by_side(found))
    assert f"| accepted length | {found.own.accepted_length:.4f} | {found.own.accepted_length:.4f} |" in table
    assert "acceptance up to position 4" in table
    assert to_json(found)["largest_gap"] == 0.0
    assert unaided.acceptance is None
    assert served.target == to_json(found)["served_target"] == "owner/tiny-qwen3-fp8"


def test_a_server_of_other_weights_is_named(make_target: Callable[..., FrozenTarget]) -> None:
    target = make_target("qwen3")
    assert target_notes("", target) == target_notes("owner/tiny-qwen3", target) == []
    (note,) = target_notes("owner/tiny-qwen3-fp8", target)
    assert "runs owner/tiny-qwen3-fp8, the draft was trained on the states of tiny-qwen3" in note
    target.quantisation = Quantisation("awq", {"bits": 4}, dequantised=True)
    (note,) = target_notes("owner/tiny-qwen3", target)
    assert "awq, 4 bits" in note


def test_a_server_that_decodes_otherwise_is_found_out(target: FrozenTarget, draft: DSparkDraft) -> None:
    tokens, trace = own_rounds(target, draft, PROMPTS, 10)
    fake = FakeServer("vllm", target, draft)
    fake.wrong = 1
    with fake.run() as url:
        found = compare(ask(Server(url), PROMPTS, 10), tokens, trace)
    assert found.identical == 0
    assert f"| completions identical | 0 of {len(PROMPTS)} | |" in side_by_side(found)
    assert found.identical_to_plain is None


def test_rounds_are_counted_as_engines_count_them(target: FrozenTarget, draft: DSparkDraft) -> None:
    tokens, trace = own_rounds(target, draft, PROMPTS, 10)
    plain = generate(target, None, PROMPTS, max_new_tokens=10).tokens
    assert tokens == plain
    assert bool((trace.verify_length == draft.config.block_size).all())
    for request, prompt in enumerate(PROMPTS):
        begun = trace.anchor[trace.request == request] - len(prompt) + 1
        assert int(begun[0]) == 1
        assert int(begun.max()) < 10
        last = trace.accepted[trace.request == request][-1]
        assert int(begun[-1]) + int(last) + 1 >= 10


def test_acceptance_of_a_trace_by_hand() -> None:
    accepted = torch.tensor([0, 2, 1, 2])
    zeros = torch.zeros(4, dtype=torch.int64)
    trace = DecodingTrace(
        request=zeros,
        anchor=zeros,
        proposed=torch.zeros(4, 2, dtype=torch.int64),
        confidence_logits=torch.zeros(4, 2),
        verify_length=torch.full((4,), 2),
        accepted=accepted,
        committed=accepted + 1,
    )
    assert AcceptedRounds.of_trace(trace) == AcceptedRounds(4, 2.25, (0.75, 0.5))
    assert AcceptedRounds.of_counts(4, 5, [3, 2]) == AcceptedRounds(4, 2.25, (0.75, 0.5))


@pytest.mark.parametrize(
    ("engine", "told", "fault"),
    [("vllm", 2, False), ("vllm", 4, True), ("vllm", 1, True), ("vllm", 0, False), ("sglang", 1, False)],
)
def test_a_server_with_another_block_is_a_fault(engine: Any, told: int, fault: bool) -> None:
    theirs = AcceptedRounds(4, 2.0, (0.5,) * told)
    comparison = ServedComparison(
        Served(engine, "1", [], theirs), AcceptedRounds(4, 2.25, (0.75, 0.5)), prompts=1, identical=1
    )
    lines = [line for line in side_by_side(comparison) if "position" in line]
    assert len(lines) == max(told, 2)
    assert (comparison.other_positions is not None) == fault
    if fault:
        assert f"the server drafts {told} tokens a round, and this draft has a block of 2" in str(
            comparison.other_positions
        )


def test_what_the_user_can_fix_is_said(
    target: FrozenTarget, draft: DSparkDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="expected http://host:port"):
        Server("localhost:8000")
    with pytest.raises(UserError, match="holds credentials") as refused:
        Server("http://me:sesame@localhost:8000/v1")
    assert "sesame" not in str(refused.value)
    with pytest.raises(UserError, match="is the server running"):
        Server("http://127.0.0.1:9", timeout_seconds=2).engine()
    with pytest.raises(UserError, match="the environment has no SERVER_KEY"):
        Server("http://127.0.0.1:9", key_variable="SERVER_KEY")
    fake = FakeServer("other", target, draft)
    fake.metrics = lambda: "python_info 1.0\n"  # type: ignore[method-assign]
    with fake.run() as url, pytest.raises(UserError, match="neither vllm: nor sglang: metrics"):
        ask(Server(url), PROMPTS, 4)
    with pytest.raises(UserError, match="verified no draft"):
        AcceptedRounds.of_counts(0, 0, [])


def test_keys_are_sent_and_never_shown(
    target: FrozenTarget,
    draft: DSparkDraft,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sesame-4711")
    with FakeServer("vllm", target, draft, key="sesame-4711").run() as url:
        with pytest.raises(UserError, match="answers 401") as refused:
            Server(url).engine()
        monkeypatch.setenv("WRONG_KEY", "swordfish-4711")
        with pytest.raises(UserError, match=r"who are you\? not \(left out\)") as echoed:
            Server(url, key_variable="WRONG_KEY").engine()
        server = Server(url, key_variable="SERVER_KEY")
        served = ask(server, PROMPTS[:1], 6)
    tokens, trace = own_rounds(target, draft, PROMPTS[:1], 6)
    shown = "\n".join(side_by_side(compare(served, tokens, trace))) + json.dumps(
        to_json(compare(served, tokens, trace))
    )
    assert "4711" not in shown + str(refused.value) + str(echoed.value) + capsys.readouterr().out
