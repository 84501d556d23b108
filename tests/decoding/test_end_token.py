"""A round counts up to the first end token that was proposed, in the decoder and in files of earlier versions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dspark_train.calibration.reliability import measure_reliability
from dspark_train.calibration.selection import reached_slots, select_rounds
from dspark_train.decoding.acceptance import acceptance_by_position
from dspark_train.decoding.decoder import ActiveRun, Decoder
from dspark_train.decoding.draft_pass import Proposal
from dspark_train.decoding.policies import FixedLength
from dspark_train.decoding.requests import Request, RoundLog
from dspark_train.decoding.timing import Timings
from dspark_train.structures import DecodingTrace
from dspark_train.studies.rounds import threshold_sweep

END = 0


class Policy(FixedLength):
    def update(self, verify_length, accepted):
        self.told = (verify_length.tolist(), accepted.tolist())


def commit(rounds, size):
    """Run the decoder's own commit over made-up verdicts, one round of each request; its trace and its requests."""
    run, decoder = object.__new__(ActiveRun), object.__new__(Decoder)
    decoder.policy, decoder.online = Policy(), None
    run.decoder, run.rounds, run.timings = decoder, RoundLog(size), Timings()
    run.active = [Request(i, [7], 100, frozenset([END])) for i in range(len(rounds))]
    proposed = torch.tensor([tokens for tokens, _, _, _ in rounds])
    proposal = Proposal(proposed, proposed, None, torch.zeros(proposed.shape))
    run._commit(
        [1] * len(rounds),
        [verified + 1 for _, verified, _, _ in rounds],
        [accepted for _, _, accepted, _ in rounds],
        [following for _, _, _, following in rounds],
        proposal,
    )
    return run.rounds.trace(1.0, []), run


@st.composite
def verdicts(draw):
    """Rounds: proposed tokens, verified, accepted, the target's own token after them; end tokens are common."""
    size = draw(st.integers(1, 6))
    token = st.integers(0, 4)
    found = []
    for _ in range(draw(st.integers(1, 8))):
        verified = draw(st.integers(0, size))
        tokens = draw(st.lists(token, min_size=size, max_size=size))
        found.append((tokens, verified, draw(st.integers(0, verified)), draw(token)))
    return size, found


@given(verdicts())
@settings(max_examples=60)
def test_what_lies_behind_an_end_token_changes_no_count(drawn):
    """Whatever was proposed, verified and accepted there, everything counted is the same; raw counts keep it."""
    size, rounds = drawn
    trace, run = commit(rounds, size)
    for row, (tokens, verified, accepted, following) in enumerate(rounds):
        end = tokens.index(END) + 1 if END in tokens[:verified] else verified
        output = [*tokens[:accepted], following]
        output = output[: output.index(END) + 1] if END in output else output
        assert run.active[row].tokens == output
        assert trace.committed[row] == len(output)
        assert trace.verify_length[row] == min(end, verified)
        assert trace.accepted[row] == min(accepted, end)
        assert trace.raw_verify_length[row] == verified
        assert trace.raw_accepted[row] == accepted
    assert run.decoder.policy.told == (trace.verify_length.tolist(), trace.accepted.tolist())
    behind = [
        (
            tokens,
            cut := (tokens.index(END) + 1 if END in tokens[:verified] else verified),
            min(accepted, cut),
            t,
        )
        for tokens, verified, accepted, t in rounds
    ]
    short, _ = commit(behind, size)
    assert reached_slots(short).equal(reached_slots(trace))
    assert acceptance_by_position(short) == acceptance_by_position(trace)
    if bool((trace.verify_length > 0).any()):
        assert threshold_sweep(short) == threshold_sweep(trace)
    # one τ, wherever it is read
    tau = trace.accepted_length
    assert acceptance_by_position(trace)[0].tau == tau
    for point in threshold_sweep(trace, thresholds=[0.0])["all"]:
        assert point.tokens_per_round == pytest.approx(tau)


@given(verdicts())
@settings(max_examples=25)
def test_raw_counts_survive_files_joining_and_choosing(tmp_path_factory, drawn):
    size, rounds = drawn
    trace, _ = commit(rounds, size)
    path = tmp_path_factory.mktemp("t") / "trace.safetensors"
    trace.save(path)
    loaded = DecodingTrace.load(path)
    joined = DecodingTrace.concatenate([trace, loaded])
    second = select_rounds(joined, torch.arange(len(rounds), 2 * len(rounds)))
    for other in (loaded, second):
        assert other.uncut.accepted.equal(trace.raw_accepted)
        assert other.uncut.verify_length.equal(trace.raw_verify_length)
        assert other.accepted.equal(trace.accepted)
    # a file of an earlier version holds raw counts alone: the end tokens that ended answers are recognised
    stored = load_file(path)
    whole = trace.uncut
    stored |= {"verify_length": whole.verify_length, "accepted": whole.accepted}
    old = {name: value for name, value in stored.items() if not name.startswith("raw")}
    metadata = {"temperature": "1.0", "domains": "[]"}
    save_file(old, path, metadata=metadata)
    read = DecodingTrace.load(path)
    assert read.accepted_length == trace.accepted_length
    assert read.uncut.accepted.equal(trace.raw_accepted)
    if bool((whole.committed <= whole.accepted).any()):
        assert read.accepted.equal(trace.accepted)
        assert read.verify_length.equal(trace.verify_length)


def honest_answers(answers=1500, length=20, size=7, seed=0):
    """Answers of 20 tokens, honest confidences up to the end token; behind it the same, and never accepted."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for request in range(answers):
        left = length
        while left > 0:
            logits = 1.5 + torch.randn(size, generator=generator)
            kept = torch.rand(size, generator=generator) < logits.sigmoid()
            kept[left:] = False
            accepted = int(kept.long().cumprod(0).sum())
            tokens = [1] * size
            if left <= size:
                tokens[left - 1] = END
            committed = min(accepted + 1, left)
            rows.append((request, tokens, logits, accepted, committed))
            left -= committed
    request, proposed, logits, accepted, committed = zip(*rows, strict=True)
    accepted = torch.tensor(accepted)
    return DecodingTrace(
        request=torch.tensor(request),
        anchor=torch.zeros(len(rows), dtype=torch.int64),
        proposed=torch.tensor(proposed),
        confidence_logits=torch.stack(logits),
        verify_length=torch.full((len(rows),), size),
        accepted=accepted,
        committed=torch.tensor(committed),
        temperature=1.0,
    )


def test_honest_confidences_of_short_answers_read_as_honest():
    whole = honest_answers()
    cut = measure_reliability(whole.cut(torch.tensor([END])))
    assert cut.mean_ece < 1.5 * cut.mean_noise
    assert measure_reliability(whole).mean_ece > 3 * cut.mean_ece


def test_cutting_by_what_was_accepted_would_be_unfair():
    """An end token that is rejected cuts its round too: else slots behind it would be counted when rejected only."""
    whole = honest_answers()
    ends = (whole.proposed == END).any(1)
    unfair = whole.cut(torch.tensor([END]))
    rejected = ends & (whole.committed > whole.accepted)
    unfair = dataclasses.replace(
        unfair, verify_length=torch.where(rejected, whole.verify_length, unfair.verify_length)
    )
    fair = whole.cut(torch.tensor([END]))
    assert measure_reliability(fair).mean_ece < measure_reliability(unfair).mean_ece
