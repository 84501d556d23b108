import json

import pytest

from dspark_train.calibration.io import Calibration, read_sts
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


def test_round_trip_has_exactly_the_keys_that_the_engine_reads(tmp_path):
    Calibration((1.5, 2.0), "chat", 10, 0.1, 0.01).save(tmp_path / "calibration.json")
    assert json.loads((tmp_path / "calibration.json").read_text()) == GOOD
    assert Calibration.load(tmp_path / "calibration.json", 2) == Calibration(
        (1.5, 2.0), "chat", 10, 0.1, 0.01
    )


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
    assert read_sts(run, "greedy", 2, said.append) == [1.5, 2.0]
    assert said == []
    assert read_sts(run, "t1.0", 2, said.append) is None
    assert len(said) == 1
    assert "not calibrated for t1.0, so its confidences stay raw" in said[0]
    with pytest.raises(UserError, match="2 temperatures, the draft has 7"):
        read_sts(run, "greedy", 7)
