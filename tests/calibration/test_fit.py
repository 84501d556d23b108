import dataclasses
import json

import pytest
import torch

from dspark_train.calibration.fit import calibrate_traces, write_report
from dspark_train.calibration.io import Calibration, Sampling
from dspark_train.calibration.reliability import measure_reliability
from dspark_train.calibration.selection import split_by_domain, verified_slots
from dspark_train.errors import UserError
from dspark_train.structures import DecodingTrace

OVERCONFIDENT = [2.0, 1.8, 2.2]


@pytest.fixture
def result(trace):
    heldout = [
        trace(3000, OVERCONFIDENT, 2, domain="code"),
        trace(3000, OVERCONFIDENT, 3, centre=0.2, domain="chat"),
    ]
    return calibrate_traces(trace(6000, OVERCONFIDENT, 1), DecodingTrace.concatenate(heldout))


def test_report_before_and_after(result):
    assert result.fit_rounds == 6000
    assert result.heldout.rounds == 6000
    assert result.heldout.before.mean_ece > 0.05
    assert result.heldout.after.mean_ece < 0.03
    assert result.fitted.ece <= result.fit_ece_before
    # one positive temperature per position keeps the order at the first position, and so its AUC
    assert result.heldout.after.auc[0] == pytest.approx(result.heldout.before.auc[0], abs=1e-4)
    assert all(
        after < before
        for after, before in zip(result.heldout.after.brier, result.heldout.before.brier, strict=True)
    )


def test_report_by_domain(result):
    assert list(result.domains) == ["chat", "code"]
    assert [part.rounds for part in result.domains.values()] == [3000, 3000]


def test_domains_partition_the_rounds(trace):
    joined = DecodingTrace.concatenate([trace(5, [1.0], 1, domain="b"), trace(7, [1.0], 2, domain="a")])
    parts = split_by_domain(joined)
    assert {name: len(part.request) for name, part in parts.items()} == {"a": 7, "b": 5}
    assert parts["a"].request.tolist() == [1] * 7
    assert split_by_domain(trace(5, [1.0], 1)) == {}


def test_only_verified_slots_count(trace):
    """Behind the slots that a policy left out, only rejections are known: they must not be counted."""
    full = trace(30_000, [1.0, 1.0], 7)
    lengths = torch.where(full.confidence_logits[:, 1] > 1, 2, 1)
    cut = dataclasses.replace(full, verify_length=lengths, accepted=full.accepted.minimum(lengths))
    assert verified_slots(cut)[:, 1].sum() < cut.observed[:, 1].sum()
    assert measure_reliability(cut).ece[1] < 0.02
    assert abs(measure_reliability(cut).bias[1]) < 0.01


def test_json_is_plain(result, tmp_path):
    other = dataclasses.replace(result, sampling=Sampling(0.0))
    write_report(tmp_path / "calibration_report.json", [result, other])
    content = json.loads((tmp_path / "calibration_report.json").read_text())
    assert len(content["ece_before"]) == len(content["ece_after"]) == len(content["temperatures"]) == 3
    for way in ("before", "sts", "after"):
        assert content[f"mean_ece_{way}"] == pytest.approx(sum(content[f"ece_{way}"]) / 3)
        assert len(content[f"noise_{way}"]) == 3
    assert sum(b["count"] for b in content["bins_before"][0]) == content["rounds"] == 6000
    assert content["domains"]["code"]["rounds"] == 3000
    assert [other["sampling_temperature"] for other in content["others"]] == [0.0]


def test_json_of_a_perfect_draft_has_null_instead_of_nan(trace, tmp_path):
    perfect = trace(50, [1.0], 1, centre=50.0)
    write_report(tmp_path / "report.json", [calibrate_traces(perfect, perfect)])
    assert json.loads((tmp_path / "report.json").read_text())["auc"] == [None]


def test_calibration_file_of_a_result(result, tmp_path):
    result.calibration("prompts of the run").save(tmp_path / "calibration.json")
    loaded = Calibration.load(tmp_path / "calibration.json", block_size=3)
    assert loaded.temperatures == result.fitted.alone.temperatures
    assert loaded.ece_after == result.heldout.sts.mean_ece
    assert loaded.scalings == result.fitted.best
    assert loaded.sampling == Sampling(1.0)
    assert loaded.num_samples == 6000


def test_noise_is_what_honest_confidences_show(trace):
    """The predicted floor agrees with the mean ECE of many small honest samples."""
    samples = [measure_reliability(trace(400, [1.0, 1.0], seed)) for seed in range(40)]
    for position in range(2):
        shown = sum(sample.ece[position] for sample in samples) / len(samples)
        assert samples[0].noise[position] == pytest.approx(shown, rel=0.12)


def test_traces_that_do_not_belong_together(trace):
    with pytest.raises(UserError, match="one temperature"):
        calibrate_traces(trace(5, [1.0], 1, sampling=0.0), trace(5, [1.0], 2, sampling=1.0))
    with pytest.raises(UserError, match="one draft"):
        calibrate_traces(trace(5, [1.0], 1), trace(5, [1.0, 1.0], 2))
    with pytest.raises(UserError, match="no held-out rounds"):
        calibrate_traces(trace(5, [1.0], 1), trace(0, [1.0], 2))
