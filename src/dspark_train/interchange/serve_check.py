"""Asks a running vLLM or SGLang server what it accepts, and puts it beside this project's own decoder.

Greedy, one request at a time, with prompts given as token ids. With a fixed verify length both sides run the
same rounds, so accepted length and acceptance per position agree up to ties between logits.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from dspark_train.errors import UserError
from dspark_train.interchange.engines import Engine
from dspark_train.report.redaction import LEFT_OUT, redact
from dspark_train.structures import DecodingTrace

if TYPE_CHECKING:
    from dspark_train.draft.kinds import Draft
    from dspark_train.target.frozen import FrozenTarget

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[^\s#]+)")
"""One line of a metrics page in Prometheus's text form."""


@dataclass(frozen=True)
class AcceptedRounds:
    """What was accepted over a number of rounds."""

    rounds: int
    """Draft blocks that were verified."""
    accepted_length: float
    """Tokens per round, the target's own included: 1 + accepted / rounds."""
    acceptance: tuple[float, ...]
    """``[γ]``: share of rounds that accepted the prefix up to each position; empty where it is not told."""

    @classmethod
    def of_trace(cls, trace: DecodingTrace) -> AcceptedRounds:
        """Of this project's decoder."""
        rounds = int(trace.accepted.numel())
        per_position = trace.prefix_accepted.double().mean(0)
        mean = float(trace.accepted.double().mean()) if rounds else 0.0
        return cls(rounds, 1.0 + mean, tuple(per_position.tolist()))

    @classmethod
    def of_counts(cls, rounds: float, accepted: float, per_position: Sequence[float]) -> AcceptedRounds:
        """Of counters."""
        if rounds <= 0:
            raise UserError(
                "the server verified no draft during the check; was it started with a speculative draft?"
            )
        shares = tuple(count / rounds for count in per_position)
        return cls(round(rounds), 1.0 + accepted / rounds, shares)


@dataclass
class Served:
    """Answers of a server, and what it accepted on the way."""

    engine: Engine
    version: str
    completions: list[list[int]] = field(default_factory=list)
    """Token ids of each completion."""
    acceptance: AcceptedRounds | None = None
    """None for a server that runs without a draft."""
    target: str = ""
    """Name or path of the model that it serves; empty where it does not say."""


@dataclass(frozen=True)
class ServedComparison:
    """A server beside this project's decoder, on the same prompts."""

    served: Served
    own: AcceptedRounds
    prompts: int
    identical: int
    """Completions equal, token for token."""
    identical_to_plain: int | None = None
    """The same against a server without a draft; None where none was asked."""

    @property
    def other_positions(self) -> str | None:
        """What is wrong where the server reports another number of positions than the draft has; None if nothing."""
        told = 0 if self.served.acceptance is None else len(self.served.acceptance.acceptance)
        block = len(self.own.acceptance)
        if told in (0, block) or (told < block and self.served.engine == "sglang"):
            return None  # SGLang's histogram ends with the most that a round accepted
        return (
            f"the server drafts {told} tokens a round, and this draft has a block of {block}: "
            "acceptance cannot be compared; start the server with as many speculative tokens"
        )

    @property
    def largest_gap(self) -> float:
        """Largest absolute difference in accepted length or acceptance at a position."""
        theirs = self.served.acceptance
        if theirs is None:
            return float("nan")
        pairs = zip(theirs.acceptance, self.own.acceptance, strict=False)
        gaps = [abs(a - b) for a, b in pairs]
        return max([abs(theirs.accepted_length - self.own.accepted_length), *gaps])


class Server:
    """One server by its address; speaks the OpenAI-compatible API, reads the metrics page."""

    def __init__(self, url: str, key_variable: str | None = None, timeout_seconds: float = 600.0) -> None:
        """Remember the address.

        Args:
            url: ``http://host:port``, with or without ``/v1``.
            key_variable: name of the environment variable that holds the key, where the server wants one.
                The key itself is sent to the server and appears nowhere else.
            timeout_seconds: longest wait for one answer.

        Raises:
            UserError: the address is none, or the environment variable is not set.
        """
        if not re.match(r"https?://[^/]+", url):
            raise UserError(f"url {url!r}: expected http://host:port")
        if "@" in url.split("/")[2]:
            raise UserError(
                "url: holds credentials; name the variable with the key by --key_variable instead"
            )
        self.root = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout_seconds
        self.headers: dict[str, str] = {}
        if key_variable is not None:
            key = os.environ.get(key_variable)
            if not key:
                raise UserError(f"key_variable: the environment has no {key_variable}")
            self.headers["Authorization"] = f"Bearer {key}"

    def request(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Return the text of one answer: a GET without ``body``, a POST of JSON with one.

        Raises:
            UserError: the server cannot be reached, or refuses.
        """
        method, url = "GET" if body is None else "POST", self.root + path
        try:
            answer = httpx.request(
                method, url, json=body, headers=self.headers, timeout=self.timeout, follow_redirects=True
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise UserError(f"{url}: no answer ({reason}); is the server running?") from error
        if answer.is_error:
            detail = self._without_key(answer.text).strip()[:500]
            raise UserError(f"{url}: the server answers {answer.status_code}: {detail}")
        return answer.text

    def _without_key(self, text: str) -> str:
        """What a server answers, without the key, which some echo."""
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return str(redact(text.replace(key, LEFT_OUT) if key else text))

    def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return one answer as JSON."""
        text = self.request(path, body)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            shown = self._without_key(text)[:80]
            raise UserError(f"{self.root}{path}: the answer is not JSON: {shown!r}") from error

    def model(self) -> str:
        """Name of the served model."""
        models = self.json("/v1/models").get("data") or []
        if not models:
            raise UserError(f"{self.root}/v1/models: the server names no model")
        return str(models[0]["id"])

    def target(self) -> str:
        """Name or path of the served weights; empty where the server does not say."""
        try:
            models = self.json("/v1/models").get("data") or [{}]
        except UserError:
            return ""
        return str(models[0].get("root") or "")

    def engine(self) -> Engine:
        """Which engine answers, from the names on its metrics page."""
        page = self.request("/metrics")
        for name in ("vllm", "sglang"):
            if f"\n{name}:" in "\n" + page:
                return name
        raise UserError(
            f"{self.root}/metrics: neither vllm: nor sglang: metrics; start SGLang with --enable-metrics"
        )

    def counters(self) -> dict[str, float]:
        """Speculative counters of vLLM: rounds, accepted tokens, and accepted tokens by position."""
        totals: dict[str, float] = {}
        for line in self.request("/metrics").splitlines():
            match = SAMPLE.match(line)
            if match is None or not match["name"].startswith("vllm:spec_decode_"):
                continue
            name = match["name"].removeprefix("vllm:spec_decode_num_").removesuffix("_total")
            if name == "accepted_tokens_per_pos":
                position = re.search(r'position="(\d+)"', match["labels"] or "")
                name = f"position_{position[1]}" if position else name
            if not name.endswith("_created"):
                totals[name] = totals.get(name, 0.0) + float(match["value"])
        return totals


def ask(
    server: Server, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_stop: bool = False
) -> Served:
    """Complete prompts greedily, one after the other.

    Args:
        server: to ask.
        prompts: token ids.
        max_new_tokens: longest completion.
        ignore_stop: generate on past the end token, to the limit.
    """
    engine = server.engine()
    ask_engine = _ask_vllm if engine == "vllm" else _ask_sglang
    served = ask_engine(server, prompts, max_new_tokens, ignore_stop)
    served.target = server.target()
    return served


def _ask_vllm(server: Server, prompts: Sequence[Sequence[int]], limit: int, ignore_stop: bool) -> Served:
    model, version = server.model(), _version(server, "/version", "version")
    served, before = Served("vllm", version), server.counters()
    for prompt in prompts:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": limit,
            "temperature": 0,
            "ignore_eos": ignore_stop,
            "return_token_ids": True,
        }
        (choice,) = server.json("/v1/completions", body)["choices"]
        if choice.get("token_ids") is None:
            raise UserError(f"{server.root}: no token_ids in the answer; vLLM 0.11 or later gives them")
        served.completions.append([int(token) for token in choice["token_ids"]])
    after = server.counters()
    if "drafts" in after:
        gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
        positions = sorted(
            (name for name in gained if name.startswith("position_")), key=lambda n: int(n[9:])
        )
        served.acceptance = AcceptedRounds.of_counts(
            gained["drafts"], gained["accepted_tokens"], [gained[name] for name in positions]
        )
    return served


def _ask_sglang(server: Server, prompts: Sequence[Sequence[int]], limit: int, ignore_stop: bool) -> Served:
    served = Served("sglang", _version(server, "/get_server_info", "version"))
    rounds, histogram = 0, list[int]()
    for prompt in prompts:
        sampling = {"temperature": 0, "max_new_tokens": limit, "ignore_eos": ignore_stop}
        answer = server.json("/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        details = answer["meta_info"]
        served.completions.append([int(token) for token in answer["output_ids"]])
        rounds += int(details.get("spec_verify_ct") or 0)
        counts = details.get("spec_correct_drafts_histogram") or details.get("spec_accept_histogram") or []
        histogram += [0] * (len(counts) - len(histogram))
        for index, count in enumerate(counts):
            histogram[index] += int(count)
    if not rounds:
        return served
    if sum(histogram):
        accepted = sum(index * count for index, count in enumerate(histogram))
        prefix = [sum(histogram[position:]) for position in range(1, len(histogram))]
        served.acceptance = AcceptedRounds.of_counts(sum(histogram), accepted, prefix)
    else:
        produced = sum(len(tokens) - 1 for tokens in served.completions)
        served.acceptance = AcceptedRounds(rounds, produced / rounds, ())
    return served


def _version(server: Server, path: str, key: str) -> str:
    """The server's own word on its version; ``unknown`` where it does not say."""
    try:
        return str(server.json(path).get(key, "unknown"))
    except UserError:
        return "unknown"


def compare(
    served: Served, tokens: Sequence[Sequence[int]], trace: DecodingTrace, plain: Served | None = None
) -> ServedComparison:
    """Put a server's answers beside this project's.

    Args:
        served: by the server with the draft.
        tokens: completions of this project's decoder.
        trace: its rounds.
        plain: by a server without a draft.
    """
    identical = sum(list(a) == list(b) for a, b in zip(served.completions, tokens, strict=True))
    same = None
    if plain is not None:
        same = sum(a == b for a, b in zip(served.completions, plain.completions, strict=True))
    return ServedComparison(served, AcceptedRounds.of_trace(trace), len(tokens), identical, same)


def side_by_side(comparison: ServedComparison) -> list[str]:
    """Return the comparison as lines of a table, for the terminal and for Markdown."""
    served, own, theirs = comparison.served, comparison.own, comparison.served.acceptance
    lines = [f"| | {served.engine} {served.version} | this project |", "|---|---|---|"]
    if theirs is None:
        return [*lines, f"| accepted length | no draft | {own.accepted_length:.4f} |"]
    lines += [
        f"| rounds | {theirs.rounds} | {own.rounds} |",
        f"| accepted length | {theirs.accepted_length:.4f} | {own.accepted_length:.4f} |",
    ]
    for position, pair in enumerate(zip_longest(theirs.acceptance, own.acceptance)):
        told, ours = ("not told" if share is None else f"{share:.4f}" for share in pair)
        lines.append(f"| acceptance up to position {position + 1} | {told} | {ours} |")
    lines.append(f"| completions identical | {comparison.identical} of {comparison.prompts} | |")
    if comparison.identical_to_plain is not None:
        lines.append(
            f"| identical to plain serving | {comparison.identical_to_plain} of {comparison.prompts} | |"
        )
    return lines


def target_notes(served: str, target: FrozenTarget) -> list[str]:
    """What to know about the states of the served target beside those that the draft was trained on.

    Args:
        served: name or path of what the server runs; empty where it does not say.
        target: of the run.
    """
    notes = []
    if target.quantisation is not None:
        notes.append(f"this project's target is quantised ({target.quantisation.describe()})")
    if served and Path(served).name != Path(target.name).name:
        notes.append(
            f"the server runs {served}, the draft was trained on the states of {target.name}: a checkpoint that is "
            "quantised otherwise has other states, and accepts less"
        )
    return notes


def own_rounds(
    target: FrozenTarget, draft: Draft, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[list[list[int]], DecodingTrace]:
    """Decode as an engine does, greedily and with whole blocks, and return completions and rounds.

    Engines verify the whole block in the round that reaches the limit, and count what it accepts before they
    cut the answer. So the decoder runs one block further, and the rounds that began before the limit are
    kept, each with what lies behind an end token.
    """
    from dspark_train.calibration.selection import select_rounds
    from dspark_train.decoding.decoder import generate

    result = generate(target, draft, prompts, max_new_tokens=max_new_tokens + draft.config.block_size)
    trace = result.trace.uncut
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    begun = trace.anchor - lengths[trace.request] + 1
    return [tokens[:max_new_tokens] for tokens in result.tokens], select_rounds(trace, begun < max_new_tokens)


def to_json(comparison: ServedComparison) -> dict[str, Any]:
    """Return the comparison as plain values."""
    served = comparison.served
    theirs = served.acceptance
    return {
        "engine": served.engine,
        "engine_version": served.version,
        "served_target": served.target,
        "prompts": comparison.prompts,
        "identical": comparison.identical,
        "identical_to_plain": comparison.identical_to_plain,
        "served": None if theirs is None else dataclasses.asdict(theirs),
        "own": dataclasses.asdict(comparison.own),
        "largest_gap": None if theirs is None else comparison.largest_gap,
    }
