import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_train.decoding.cost import CostTable
from dspark_train.errors import UserError


def table(rows=(1, 2, 8), seconds=(1.0, 1.5, 3.0), **more):
    return CostTable(
        context=128,
        rows=rows,
        seconds_median=seconds,
        seconds_p10=tuple(0.9 * value for value in seconds),
        seconds_p90=tuple(1.1 * value for value in seconds),
        **more,
    )


PARTS = {
    "requests": (1, 2, 8),
    "single_row_seconds_median": (1.0, 1.6, 4.0),
    "draft_seconds_median": (0.2, 0.3, 0.6),
    "round_overhead_seconds_median": (0.1, 0.1, 0.2),
    "step_overhead_seconds_median": (0.05, 0.05, 0.1),
}


def test_interpolates_between_points_and_extends_the_last_segment():
    read = table().seconds(torch.tensor([0, 1, 2, 5, 8, 16]))
    assert read.tolist() == pytest.approx([0, 1, 1.5, 2.25, 3, 5])


def test_one_point_is_proportional():
    assert table((1,), (2.0,)).seconds(torch.tensor([1, 4])).tolist() == [2, 8]


def test_a_falling_last_segment_is_not_extended_below():
    assert table((1, 2, 4), (1.0, 3.0, 2.0)).seconds(torch.tensor([4, 100])).tolist() == [2, 2]


def test_absent_parts_are_free_and_plain_decoding_reads_the_rows_curve():
    bare, count = table(), torch.tensor([1, 5])
    assert bare.draft_seconds(count).tolist() == bare.round_overhead_seconds(count).tolist() == [0, 0]
    assert bare.single_row_seconds(count).tolist() == bare.seconds(count).tolist()


def test_verify_cost_knows_both_measured_layouts():
    """A pass in the measured layout costs the rows curve, one row per request the single-row curve."""
    costs = table((1, 4, 8, 32), (1.0, 1.6, 2.2, 6.0), rows_per_request=4, **PARTS)
    rows = torch.tensor([8, 32])
    torch.testing.assert_close(costs.verify_seconds(rows, rows // 4), costs.seconds(rows))
    many = torch.tensor([2, 8])
    torch.testing.assert_close(costs.verify_seconds(many, many), costs.single_row_seconds(many))
    between = costs.verify_seconds(torch.tensor([8]), torch.tensor([5]))
    assert costs.seconds(torch.tensor([8])) < between < costs.single_row_seconds(torch.tensor([8]))


@settings(max_examples=200, deadline=None)
@given(
    requests=st.integers(1, 8),
    lengths=st.integers(0, 3).flatmap(lambda most: st.lists(st.integers(0, most), min_size=8, max_size=8)),
    per_row=st.floats(0.01, 1),
    per_request=st.floats(0, 1),
    per_width=st.floats(0, 1),
    second=st.floats(0, 1),
)
def test_any_pass_of_a_regular_machine_is_predicted(
    requests, lengths, per_row, per_request, per_width, second
):
    """Rows cost, requests cost, and attention pads every request to the widest one; a second row costs extra."""

    def cost(rows, count, width):
        attention = per_request + per_width * (width - 1) + (second if width > 1 else 0)
        return 5 + per_row * rows + count * attention

    counts = (1, 2, 4, 8)
    shapes = [(1, 1), (2, 1), (3, 1), (4, 1), *((4 * count, count) for count in counts[1:])]
    seconds = tuple(cost(rows, count, rows // count) for rows, count in shapes)
    costs = CostTable(
        128, tuple(rows for rows, _ in shapes), seconds, seconds, seconds, rows_per_request=4, requests=counts,
        single_row_seconds_median=tuple(cost(count, count, 1) for count in counts),
        two_row_seconds_median=tuple(cost(2 * count, count, 2) for count in counts),
        uneven_seconds_median=tuple(cost(count + 3, count, 4) for count in counts),
    )  # fmt: skip
    lengths = lengths[:requests]
    rows, width = requests + sum(lengths), 1 + max(lengths)
    # between measured numbers of requests a curve is a chord, and a block layout with a part of a request is none
    tolerance = 0 if requests in counts else 3 * (per_request + per_width + second)
    read = float(costs.verify_seconds(torch.tensor(rows), torch.tensor(requests), torch.tensor(width)))
    assert read == pytest.approx(cost(rows, requests, width), abs=tolerance + 1e-9)


def test_no_pass_costs_less_than_one_row_of_each_request():
    """A single-row curve that came out too slow, as on a machine that slowed down while it was measured."""
    parts = PARTS | {"single_row_seconds_median": (1.0, 2.6, 9.0)}
    costs = table((1, 4, 8, 32), (1.0, 1.6, 2.2, 6.0), rows_per_request=4, **parts)
    assert float(costs.verify_seconds(torch.tensor(32), torch.tensor(8))) == 9.0
    assert float(costs.verify_seconds(torch.tensor(4), torch.tensor(1))) == pytest.approx(1.6)


def test_rounds_per_second_pays_draft_and_overhead():
    rate = table(**PARTS).rounds_per_second(2, 8)
    assert rate.shape == (9,)
    assert float(rate[8]) == pytest.approx(1 / (0.3 + 0.1 + 3.0))
    assert table().steps_per_second(8)[8] == pytest.approx(1 / 3)


def test_a_draft_that_draws_less_costs_less():
    """Between one token and the whole block the walk of the head is linear."""
    two = torch.tensor([2])
    costs = table(rows_per_request=5, short_draft_seconds_median=(0.1, 0.15, 0.3), **PARTS)
    read = [float(costs.draft_seconds(two, depth)) for depth in (0, 1, 2, 3, 4, None)]
    assert read == pytest.approx([0, 0.15, 0.2, 0.25, 0.3, 0.3])
    unmeasured = table(rows_per_request=5, **PARTS)
    assert (
        float(unmeasured.draft_seconds(two, 1)) == float(unmeasured.draft_seconds(two)) == pytest.approx(0.3)
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12))
def test_monotone_is_a_projection(values):
    rows = tuple(range(1, len(values) + 1))
    smooth = table(rows, tuple(values)).monotone()
    median = smooth.seconds_median
    assert list(median) == sorted(median)
    assert sum(median) == pytest.approx(sum(values))
    assert table(rows, tuple(sorted(values))).monotone().seconds_median == pytest.approx(
        tuple(sorted(values))
    )
    assert smooth.monotone().seconds_median == pytest.approx(median)


def test_round_trip(tmp_path):
    for costs in (table(), table(machine="cpu, 2 threads", rows_per_request=4, **PARTS)):
        costs.save(tmp_path / "sub" / "cost_table.json")
        assert CostTable.load(tmp_path / "sub" / "cost_table.json") == costs
    content = json.loads((tmp_path / "sub" / "cost_table.json").read_text())
    assert content["rows"] == [1, 2, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": [2, 3, 4]}, "must start at 1"),
        ({"rows": [1, 1, 4]}, "strictly increase"),
        ({"rows": [1, 2]}, "3 values for 2 rows"),
        ({"rows": "many"}, "whole numbers"),
        ({"seconds_median": [1.0, -1.0, 3.0]}, "rows=2 is -1.0"),
        ({"seconds_p10": [2.0, 1.0, 3.0]}, "not in order"),
        ({"draft_seconds_median": [1.0]}, "1 values for 0 requests"),
        ({"batch": [1]}, "unknown keys"),
        ({"context": None}, "needs the keys"),
        ({"seconds_median": ["a", 1.0, 2.0]}, "wrong type"),
        ({"context": -1}, "context must be"),
    ],
)
def test_bad_files(tmp_path, changes, message):
    path = tmp_path / "cost_table.json"
    table().save(path)
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(UserError, match=message):
        CostTable.load(path)


def test_missing_file_and_bad_json(tmp_path):
    with pytest.raises(UserError, match="dspark-train profile"):
        CostTable.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(UserError, match="not valid JSON"):
        CostTable.load(tmp_path / "bad.json")


def test_prompts_and_context_are_read_from_their_own_curves() -> None:
    seconds = (0.010, 0.012)
    bare = CostTable(100, (1, 6), seconds, seconds, seconds, rows_per_request=6)
    assert float(bare.prompt_seconds(torch.tensor(6))) == pytest.approx(0.012)
    assert float(bare.context_seconds(torch.tensor(3), torch.tensor(2), plain=False)) == 0
    full = dataclasses.replace(
        bare,
        requests=(1, 3),
        single_row_seconds_per_context=(1e-5, 3e-5),
        block_seconds_per_context=(2e-5, 8e-5),
        draft_seconds_per_context=(0.0, 1e-5),
        prompt_tokens=(16, 64),
        prompt_seconds_median=(0.02, 0.05),
    )
    assert full.prompt_seconds(torch.tensor([16, 40, 112])).tolist() == pytest.approx([0.02, 0.035, 0.08])
    width = torch.tensor([1, 6])
    assert full.context_seconds(torch.tensor(3), width, plain=True).tolist() == pytest.approx([3e-5, 8e-5])
    assert full.context_seconds(torch.tensor(2), width, plain=False).tolist() == pytest.approx(
        [2.5e-5, 5.5e-5]
    )
    with pytest.raises(UserError, match="prompt_tokens"):
        dataclasses.replace(full, prompt_tokens=(64, 16))
    with pytest.raises(UserError, match="prompt_seconds_median has 1"):
        dataclasses.replace(full, prompt_seconds_median=(0.1,))
