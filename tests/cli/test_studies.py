import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_train.calibration.bias import shifted
from dspark_train.calibration.io import Calibration, read_sts
from dspark_train.cli.calibrate import CalibrateOptions, calibrate
from dspark_train.cli.simulate import SimulateOptions, simulate
from dspark_train.cli.studies import StudiesOptions, studies
from dspark_train.decoding.cost import CostTable
from dspark_train.decoding.sampling import SamplingRule
from dspark_train.errors import UserError
from dspark_train.run import Run
from dspark_train.structures import DecodingTrace
from dspark_train.studies.record import Recording, recorded_rounds

GAMMA = 3


def trace(seed, requests=20, rounds=60, sampling=0.0):
    """Over-confident rounds of two domains: logits are twice what is true."""
    generator = torch.Generator().manual_seed(seed)
    honest = 0.8 + 1.5 * torch.randn(requests, rounds, GAMMA, generator=generator)
    accepted = (torch.rand(honest.shape, generator=generator) < honest.sigmoid()).long().cumprod(2).sum(2)
    committed = accepted + 1
    anchor = 10 + committed.cumsum(1) - committed
    return DecodingTrace(
        request=torch.arange(requests).repeat_interleave(rounds),
        anchor=anchor.flatten(),
        proposed=torch.zeros(requests * rounds, GAMMA, dtype=torch.int64),
        confidence_logits=2 * honest.flatten(0, 1),
        verify_length=torch.full((requests * rounds,), GAMMA),
        accepted=accepted.flatten(),
        committed=committed.flatten(),
        temperature=sampling,
        domains=("math", "chat") * (requests // 2),
    )


@pytest.fixture
def run(tmp_path):
    """A run that holds recorded rounds, so that no model is needed."""
    folder = tmp_path / "run"
    (folder / "traces").mkdir(parents=True)
    (folder / "config.yaml").write_text("data:\n  path: somewhere/conversations.jsonl\n")
    for seed, (split, label, sampling) in enumerate(
        (split, label, sampling)
        for split in ("calibration", "test")
        for label, sampling in (("greedy", 0.0), ("t1.0", 1.0))
    ):
        trace(seed, sampling=sampling).save(folder / "traces" / f"{split}_{label}.safetensors")
    return folder


def cost_table(folder):
    seconds = (0.010, 0.011, 0.05)
    (folder / "studies").mkdir(exist_ok=True)
    CostTable(64, (1, 8, 128), seconds, seconds, seconds).save(folder / "studies" / "cost_table.json")


def read(path):
    return json.loads(path.read_text())


def test_calibrate_writes_what_the_contract_names(run, capsys):
    calibrate(CalibrateOptions(run))
    main, greedy, sampled = (
        Calibration.load(run / f"calibration{name}.json", GAMMA) for name in ("", "_greedy", "_t1.0")
    )
    assert main == sampled != greedy
    assert main.dataset == "conversations.jsonl, calibration split, t1.0"
    assert main.num_samples == 1200
    assert main.ece_after < main.ece_before - 0.02
    assert all(1.4 < value < 3 for value in main.temperatures)
    report = read(run / "calibration_report.json")
    assert report["temperatures_alone"] == list(main.temperatures)
    assert report["others"][0]["sampling_temperature"] == 0.0
    assert set(report["domains"]) == {"math", "chat"}
    assert (run / "plots" / "reliability_greedy.png").is_file()
    assert (run / "plots" / "reliability_t1.0.png").is_file()
    assert "ECE" in capsys.readouterr().out


def test_calibrate_for_one_sampling_temperature(run):
    calibrate(CalibrateOptions(run, temperatures=(1.0,)))
    assert Calibration.load(run / "calibration.json") == Calibration.load(run / "calibration_t1.0.json")
    assert not (run / "calibration_greedy.json").exists()


def test_calibrate_leaves_the_weights_as_trained(run):
    """A bias that an earlier version wrote into the draft and its rounds is taken out of both."""
    weights = run / "draft" / "model.safetensors"
    weights.parent.mkdir()
    tensors = {
        "confidence_head.proj.bias": torch.tensor([0.5], dtype=torch.bfloat16),
        "fc.weight": torch.ones(2, 3),
    }
    recorded = run / "traces" / "test_t1.0.safetensors"
    trained = DecodingTrace.load(recorded).confidence_logits
    save_file({**tensors, "confidence_head.proj.bias": tensors["confidence_head.proj.bias"] - 0.25}, weights)
    for path in (run / "traces").glob("*.safetensors"):
        shifted(DecodingTrace.load(path), -0.25).save(path)
    (run / "run.json").write_text('{"confidence_shift": -0.25}')
    (run / "calibration_t0.7.json").write_text("{}")  # fitted for the moved weights
    reports = []
    for _ in range(2):
        calibrate(CalibrateOptions(run))
        after = load_file(weights)
        assert all(torch.equal(after[name], tensors[name]) for name in tensors)
        logits = DecodingTrace.load(recorded).confidence_logits
        torch.testing.assert_close(logits, trained, rtol=0, atol=1e-6)
        assert Run(run).confidence_shift == 0
        assert not (run / "calibration_t0.7.json").exists()
        reports.append(read(run / "calibration_report.json"))
    assert reports[0] == reports[1]


def test_bias_and_temperatures_belong_to_one_way_of_sampling(run):
    """Greedy rounds are over-confident by a shift that those of temperature 1 do not have."""
    for split in ("calibration", "test"):
        path = run / "traces" / f"{split}_greedy.safetensors"
        shifted(DecodingTrace.load(path), 1.5).save(path)
    calibrate(CalibrateOptions(run))
    greedy, sampled = (read_sts(Run(run), label, GAMMA) for label in ("greedy", "t1.0"))
    assert greedy.bias == pytest.approx(-1.5, abs=0.4)
    assert sampled.bias == pytest.approx(0.0, abs=0.4)
    report = read(run / "calibration_report.json")
    assert (report["sampling"], report["others"][0]["sampling"]) == ("t1.0", "greedy")
    greedy_report = report["others"][0]
    assert greedy_report["bias"] == greedy.bias
    # three ways: the bias's gain is not the temperatures'
    assert greedy_report["mean_ece_after"] < 0.7 * greedy_report["mean_ece_sts"]
    assert read(run / "calibration.json")["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def test_studies_write_tables_and_plots(run, capsys):
    studies(StudiesOptions(run))
    assert read_sts(Run(run), "t1.0", GAMMA) is None
    assert "run: not calibrated for t1.0, so its confidences stay raw" in capsys.readouterr().out
    raw = read(run / "studies" / "threshold_sweep.json")
    assert raw["temperatures"] is None
    assert list(raw["groups"]) == ["all", "chat", "math"]
    calibrate(CalibrateOptions(run))
    studies(StudiesOptions(run))
    sweep = read(run / "studies" / "threshold_sweep.json")
    fitted = read_sts(Run(run), "t1.0", GAMMA)
    assert (sweep["temperatures"], sweep["bias"]) == (list(fitted.temperatures), fitted.bias)
    points = sweep["groups"]["all"]
    assert points[0]["threshold"] == 0
    assert points[-1]["draft_acceptance_rate"] > points[0]["draft_acceptance_rate"] + 0.2
    acceptance = read(run / "studies" / "acceptance.json")["groups"]["all"]
    assert len(acceptance["conditional"]) == GAMMA
    reliability = read(run / "studies" / "reliability.json")
    assert reliability["mean_ece_after"] < reliability["mean_ece_before"]
    assert not (run / "studies" / "online_threshold.json").exists()
    studies(StudiesOptions(run, wanted=0.8))
    moving = read(run / "studies" / "online_threshold.json")
    assert (moving["wanted"], moving["points"][-1]["rounds"]) == (0.8, 1200)
    drift = read(run / "studies" / "online.json")
    assert {drift["first"], drift["second"]} == {"chat", "math"}
    assert drift["points"][-1]["rounds"] == 1200
    for name in ("threshold_sweep", "acceptance", "reliability_t1.0", "online", "online_threshold"):
        assert (run / "plots" / f"{name}.png").stat().st_size > 5000
    assert "Threshold sweep" in capsys.readouterr().out


def test_simulate_writes_a_table_and_a_plot(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # eight policies side by side
    cost_table(run)
    for split in ("calibration", "heldout"):  # a few short requests are enough here
        path = run / "traces" / f"{split}_greedy.safetensors"
        trace(0, rounds=6).save(path)
    online = ("online:0.8", "scheduled+online")
    options = SimulateOptions(run, requests=(1, 4, 32), policies=online, arriving=40, speeds=(50.0,))
    simulate(options)
    assert "acceptance after a cut is taken as in the record" in capsys.readouterr().out
    content = read(run / "studies" / "simulate.json")
    assert content["context"] == 64
    assert content["measured_rows"] == 128
    assert (content["arrivals"], content["slots"], content["speeds"]) == ("poisson", 32, [50.0])
    assert content["after_cut"] is None
    assert list(content["policies"]) == [
        "plain", "one draft token", "fixed 3", "threshold 0.5", "scheduled", "asynchronous",
        "online:0.8", "scheduled+online",
    ]  # fmt: skip
    rates = [[point["rate"] for point in points] for points in content["policies"].values()]
    assert len(rates[0]) == 3
    assert all(these == rates[0] for these in rates)
    assert (run / "plots" / "simulate.png").stat().st_size > 5000
    cut = trace(4, rounds=20)
    shortened = cut.verify_length.clone().random_(0, GAMMA, generator=torch.Generator().manual_seed(0))
    accepted = cut.accepted.minimum(shortened)
    dataclasses.replace(cut, verify_length=shortened, accepted=accepted, committed=accepted + 1).save(
        run / "traces" / "calibration_cut_greedy.safetensors"
    )
    arrivals = run / "arrivals.jsonl"
    arrivals.write_text("".join(f'{{"seconds": {index**2}, "answer_tokens": 9}}\n' for index in range(9)))
    simulate(dataclasses.replace(options, rates=(3.0,), arrivals=arrivals, cache_tokens=400))
    content = read(run / "studies" / "simulate.json")
    assert content["after_cut"]["rounds"] > 100
    assert content["answer_tokens"] == 9
    assert (content["arrivals"], content["cache_tokens"]) == ("arrivals.jsonl", 400)
    assert content["policies"]["plain"][0]["rate"] == pytest.approx(3, rel=0.2)
    assert "promised speed" in capsys.readouterr().out


def test_simulate_without_costs(run):
    with pytest.raises(UserError, match="dspark-train profile"):
        simulate(SimulateOptions(run))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: calibrate(CalibrateOptions(run / "none")), "no such folder"),
        (lambda run: calibrate(CalibrateOptions(run, temperatures=())), "at least one"),
        (lambda run: calibrate(CalibrateOptions(run, temperatures=(1.0, 1.0))), "different"),
        (lambda run: calibrate(CalibrateOptions(run, temperatures=(-1.0,))), "≥ 0"),
        (lambda run: calibrate(CalibrateOptions(run, prompts=0)), r"prompts \(0\)"),
        (lambda run: studies(StudiesOptions(run, max_new_tokens=1)), r"max_new_tokens\s+\(1\)"),
        (lambda run: simulate(SimulateOptions(run, requests=(0, 1))), "at least 1"),
        (lambda run: simulate(SimulateOptions(run, rates=(0.0, 1.0))), "above 0"),
        (lambda run: simulate(SimulateOptions(run, slots=0)), "slots 0"),
    ],
)
def test_bad_options(run, call, message):
    with pytest.raises(UserError, match=message):
        call(run)


def test_recorded_rounds_are_reused_and_missing_ones_are_decoded(run, capsys):
    """The run holds no draft: decoding it is refused, so what is returned was not decoded."""
    opened, greedy = Run(run), SamplingRule()
    assert len(recorded_rounds(opened, "test", greedy, Recording()).request) == 1200
    assert "test: 1200 rounds of" in capsys.readouterr().out
    opened.trace_path("test", "greedy").unlink()
    (run / "config.yaml").write_text(
        "{data: {path: x}, draft: {block_size: 3}, objective: {decay: 1}, seed_everything: 0}"
    )
    with pytest.raises(UserError, match="no exported draft"):
        recorded_rounds(Run(run), "test", greedy, Recording())
    with pytest.raises(UserError, match="no exported draft"):
        recorded_rounds(Run(run), "calibration", greedy, Recording(refresh=True))


def test_rounds_and_scalings_of_one_sampling_are_never_taken_for_another(run, capsys):
    """Temperature 1 cut to the 20 best tokens is another way of sampling than temperature 1."""
    calibrate(CalibrateOptions(run))
    cut = SamplingRule(1.0, top_k=20)
    recorded = trace(9, sampling=1.0)
    for split in ("calibration", "test"):
        recorded.save(run / "traces" / f"{split}_t1.0_k20.safetensors")
    capsys.readouterr()
    studies(StudiesOptions(run, temperature=1.0, top_k=20))
    assert read(run / "studies" / "threshold_sweep.json")["temperatures"] is None
    assert "run: not calibrated for t1.0_k20" in capsys.readouterr().out
    before = read(run / "calibration_t1.0.json")
    calibrate(CalibrateOptions(run, temperatures=(1.0,), top_k=20))
    assert read(run / "calibration_t1.0.json") == before
    assert (
        read(run / "calibration_t1.0_k20.json")["dataset"]
        == "conversations.jsonl, calibration split, t1.0_k20"
    )
    assert read(run / "calibration_report.json")["sampling"] == "t1.0_k20"
    studies(StudiesOptions(run, temperature=1.0, top_k=20))
    fitted = read(run / "studies" / "threshold_sweep.json")["temperatures"]
    assert fitted == list(read_sts(Run(run), cut.label, GAMMA).temperatures)
