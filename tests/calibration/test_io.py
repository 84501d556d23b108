import dataclasses
import json

import pytest

from dspark_train.calibration.io import Calibration, Sampling, WithBias, read_sts
from dspark_train.calibration.sts import Scalings
from dspark_train.errors import UserError
from dspark_train.run import Run

GOOD = {
    "temperatures": [1.5, 2.0],
    "dataset": "chat",
    "num_samples": 10,
    "ece_before": 0.1,
    "ece_after": 0.01,
}


def write(tmp_path, **changes):
    path = tmp_path / "calibration.json"
    path.write_text(
        json.dumps({key: value for key, value in {**GOOD, **changes}.items() if value is not None})
    )
    return path


def test_round_trip_has_the_keys_that_the_engine_reads(tmp_path):
    with_bias = WithBias(-0.3, (1.2, 1.1), 0.005)
    saved = Calibration((1.5, 2.0), "chat", 10, 0.1, 0.01, Sampling(1.0, 20), with_bias)
    saved.save(tmp_path / "calibration.json")
    content = json.loads((tmp_path / "calibration.json").read_text())
    assert {
        key: content[key] for key in GOOD
    } == GOOD  # what suits weights without a bias, as engines apply it
    assert content["sampling"] == {"temperature": 1.0, "top_k": 20, "top_p": 1.0}
    assert Calibration.load(tmp_path / "calibration.json", 2) == saved
    assert saved.scalings == Scalings((1.2, 1.1), -0.3)


def test_weights_with_a_folded_bias_get_the_temperatures_that_go_with_it():
    alone = Calibration((1.5, 2.0), "chat", 10, 0.1, 0.01, Sampling())
    assert alone.folded == alone
    assert "t1.0 decoding" in alone.sentence()
    both = dataclasses.replace(alone, with_bias=WithBias(-0.3, (1.2, 1.1), 0.005))
    assert (both.folded.temperatures, both.folded.folded_bias, both.folded.ece_after) == (
        (1.2, 1.1),
        -0.3,
        0.005,
    )
    assert both.folded.scalings == Scalings(
        (1.2, 1.1)
    )  # the bias is in the weights: it must not be added again
    assert "--fold_bias" in both.sentence()
    assert "in the weights" in both.folded.sentence()


def test_files_of_earlier_versions_are_read(tmp_path):
    loaded = Calibration.load(write(tmp_path), 2)
    assert loaded.sampling is None
    assert loaded.scalings == Scalings((1.5, 2.0))


def test_a_bias_that_an_earlier_version_wrote_into_the_weights_is_said(tmp_path):
    run, said = Run(tmp_path), []
    (tmp_path / "run.json").write_text('{"confidence_shift": -0.25}')
    Calibration((1.5, 2.0), "chat", 10, 0.1, 0.01).save(run.sts_path("greedy"))
    assert read_sts(run, "greedy", 2, said.append) == Scalings((1.5, 2.0))
    assert "a bias of -0.250" in said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": [1.0, 0.0]}, r"temperatures\[2\] is 0.0"),
        ({"temperatures": [-1.0, 1.0]}, r"temperatures\[1\] is -1.0"),
        ({"temperatures": [1.0, float("nan")]}, r"temperatures\[2\] is nan"),
        ({"temperatures": [1.0, float("inf")]}, r"temperatures\[2\] is inf"),
        ({"temperatures": [1.0, "2"]}, r"temperatures\[2\] is '2'"),
        ({"temperatures": []}, "empty"),
        ({"temperatures": 1.0}, "must be a list"),
        ({"temperatures": None}, r"missing \['temperatures'\]"),
        ({"num_samples": -1}, "num_samples is -1"),
        ({"num_samples": 1.5}, "num_samples is 1.5"),
        ({"ece_before": 1.5}, "ece_before is 1.5"),
        ({"ece_after": "x"}, "ece_after is 'x'"),
        ({"dataset": 3}, "dataset is 3"),
        ({"sampling": {"temperature": 1.0}}, "expected an object with the keys"),
        ({"with_bias": {"bias": 0.1, "temperatures": [1.0], "ece_after": 0.1}}, "equally many"),
        ({"with_bias": {"bias": 0.1, "temperatures": 1.0, "ece_after": 0.1}}, "must be a list"),
        ({"with_bias": {"bias": "x", "temperatures": [1.0, 1.0], "ece_after": 0.1}}, "with_bias.bias is 'x'"),
        ({"folded_bias": float("nan")}, "folded_bias is nan"),
        ({"temperature": [1.0]}, "unknown key 'temperature'; did you mean 'temperatures'"),
    ],
)
def test_bad_files_say_what_is_wrong_and_where(tmp_path, changes, message):
    path = write(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as caught:
        Calibration.load(path)
    assert "calibration.json" in str(caught.value)


def test_wrong_number_of_positions(tmp_path):
    with pytest.raises(UserError, match="2 temperatures, the draft has 7"):
        Calibration.load(write(tmp_path), block_size=7)


def test_missing_file_and_bad_json(tmp_path):
    with pytest.raises(UserError, match="dspark-train calibrate"):
        Calibration.load(tmp_path / "calibration.json")
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        Calibration.load(tmp_path / "calibration.json")


def test_scalings_are_those_of_this_sampling_or_none(tmp_path):
    """The file for engines holds those of the first sampling that was calibrated: it is nobody else's."""
    run, said = Run(tmp_path), []
    Calibration((1.5, 2.0), "chat", 10, 0.1, 0.01).save(run.sts_path())
    Calibration((1.5, 2.0), "chat", 10, 0.1, 0.01).save(run.sts_path("greedy"))
    assert read_sts(run, "greedy", 2, said.append) == Scalings((1.5, 2.0))
    assert said == []
    assert read_sts(run, "t1.0", 2, said.append) is None
    assert len(said) == 1
    assert "not calibrated for t1.0, so its confidences stay raw" in said[0]
    with pytest.raises(UserError, match="2 temperatures, the draft has 7"):
        read_sts(run, "greedy", 7)
