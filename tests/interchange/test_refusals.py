"""Checkpoints from strangers are data: whatever is wrong with one is said in a line, before anything is allocated."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dspark_train.errors import UserError
from dspark_train.interchange.checkpoint import read_header, read_specs
from dspark_train.interchange.detect import detect, read_draft
from dspark_train.interchange.engines import VERSIONS, Engine, problems
from dspark_train.interchange.export import TargetWeights, export_draft

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def folder(make_draft: Callable[..., Any], target_weights: TargetWeights, tmp_path: Path) -> Path:
    export_draft(make_draft("vanilla"), target_weights, tmp_path / "draft")
    return tmp_path / "draft"


@pytest.fixture
def reduced_folder(make_draft: Callable[..., Any], target_weights: TargetWeights, tmp_path: Path) -> Path:
    export_draft(make_draft("vanilla", 20), target_weights, tmp_path / "reduced", "speculators")
    return tmp_path / "reduced"


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "remove"}))


def header_file(path: Path, header: Any, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


DAMAGED = r"a\.safetensors: truncated, damaged or not a safetensors file"


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, b"\0" * 8, DAMAGED),
        ({"a": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 8]}}, b"\0" * 8, DAMAGED),
        (
            {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}},
            b"\0" * 4,
            "element type F8_E4M3",
        ),
        ({"a": {"dtype": "F32", "shape": [-1, 2], "data_offsets": [0, 8]}}, b"\0" * 8, DAMAGED),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 9, DAMAGED),
        (
            {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"},
            b"\0" * 8,
            DAMAGED,
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"\0" * 8, DAMAGED),
        (b"[" * 100_000, b"", DAMAGED),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4, DAMAGED),
        (b"[1]", b"", DAMAGED),
        (b"\xff\xfe", b"", DAMAGED),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: Any, data: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_header(header_file(tmp_path / "a.safetensors", header, data))


def test_short_files_and_overlong_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for content in (b"", b"\0\0", struct.pack("<Q", 10**15) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=DAMAGED):
            read_header(path)


def test_a_truncated_weight_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated"):
        read_draft(folder)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"a": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin, which can run code"):
        read_specs(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin"]
)
def test_shards_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"expected the name of a \.safetensors file in this folder"):
        read_specs(tmp_path)


def test_missing_shards_and_doubled_tensors_are_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"y\.safetensors: no such file"):
        read_specs(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "y.safetensors")
    with pytest.raises(UserError, match=r"a is in x\.safetensors and in y\.safetensors"):
        read_specs(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 10**9}, "above 1024"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers missing or no positive integer"),
        ({"hidden_size": "remove"}, "hidden_size missing"),
        ({"markov_rank": -1}, "markov_rank -1"),
        ({"markov_rank": 10**12}, "has shape"),
        ({"markov_rank": "remove"}, "markov_rank missing"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm'"),
        ({"target_layer_ids": [2, 0]}, "strictly increasing"),
        ({"target_layer_ids": "all"}, "target_layer_ids 'all'; expected a list of layer numbers"),
        ({"target_layer_ids": [0, True]}, "expected a list of layer numbers"),
        ({"target_layer_ids": []}, "expected a list of layer numbers"),
        ({"target_layer_ids": [-2, 0]}, "must lie in"),
        ({"target_layer_ids": [0, 3]}, "last decoder layer"),
        ({"num_target_layers": "four"}, "num_target_layers 'four'"),
        ({"head_dim": "wide"}, "head_dim 'wide'"),
        ({"head_dim": 33}, "head_dim 33 is no positive even integer"),
        ({"markov_rank": True}, "markov_rank True"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "needs a sequential head"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"vocab_size": 10**12, "markov_rank": 10**12, "draft_vocab_size": 10**12}, "too large"),
        ({"mask_token_id": 53}, r"must lie in 0\.\.52"),
        ({"block_size": 0}, "block_size 0"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window None"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3},
            "sliding_window 3 must be at least",
        ),
        ({"layer_types": ["full_attention"]}, "expected full_attention or sliding_attention for each of 2"),
        ({"layer_types": ["chunked_attention"] * 2}, "expected full_attention or sliding_attention"),
        ({"layer_types": [["full_attention"]]}, "expected full_attention or sliding_attention"),
        ({"dflash_config": {"causal": True}}, "causal blocks in layers without a window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "rotary_factor 0.25"),
        ({"rope_parameters": [1e4]}, "rope_parameters .* expected an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling 'yarn'; expected an object"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta '1e4'"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta -1"),
        ({"intermediate_size": 64}, "has shape"),
        ({"markov_head_type": "gated"}, "gate_proj.weight is missing"),
        ({"enable_confidence_head": False}, "confidence_head.proj.bias is unexpected"),
        ({"draft_vocab_size": 20}, "shape|d2t is missing"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(folder: Path, values: dict[str, Any], said: str) -> None:
    edit_config(folder, **values)
    with pytest.raises(UserError, match=said):
        read_draft(folder)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_configuration_holds_the_answer_is_a_line(
    folder: Path, reduced_folder: Path, data: st.DataObject
) -> None:
    folder = data.draw(st.sampled_from([folder, reduced_folder]))
    path = folder / "config.json"
    written = path.read_text()
    name = data.draw(st.sampled_from(sorted(json.loads(written))))
    edit_config(folder, **{name: data.draw(json_values)})
    try:
        read_draft(folder)  # fields that shape nothing may hold anything
    except UserError:
        pass
    finally:
        path.write_text(written)


@pytest.mark.parametrize(
    ("values", "vllm", "sglang"),
    [
        ({}, "", ""),
        ({"markov_rank": 0, "markov_head_type": "none"}, "markov_rank 0", "markov_rank 0"),
        ({"markov_head_type": "gated"}, "vanilla heads only, not gated", ""),
        ({"markov_head_type": "rnn"}, "vanilla heads only, not rnn", ""),
        ({"head_dim": 48}, "head_dim 48", ""),
        ({"sample_from_anchor": False}, "samples from the anchor", "samples from the anchor"),
        ({"mask_token_id": 53}, "mask_token_id 53", "mask_token_id 53"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'", "rope_type 'longrope'"),
        ({"final_logit_softcapping": 30.0}, "caps at 30.0", "caps at 30.0"),
        ({"embedding_scale": 8.0}, "", "scales its embeddings by 8"),
        ({"draft_vocab_size": 20}, "", "no reduced draft vocabulary"),
        ({"hidden_act": "gelu"}, "", "silu only, not gelu"),
        ({"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor", "attention_factor"),
        ({"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "mscale_all_dim", ""),
        ({"rope_parameters": YARN | {"truncate": False}}, "", ""),
        ({"sliding_window": 8, "sliding_window_non_causal": True}, "", "causal within a block"),
    ],
)
def test_what_an_engine_cannot_serve_is_named(
    folder: Path, values: dict[str, Any], vllm: str, sglang: str
) -> None:
    config = {**read_draft(folder).config, **values}
    expected: dict[Engine, str] = {"vllm": vllm, "sglang": sglang}
    for engine, said in expected.items():
        found = problems(config, engine)
        assert len(found) == (1 if said else 0)
        assert all(said in line and line.startswith(VERSIONS[engine]) for line in found)


def test_a_missing_or_foreign_tensor_is_named(folder: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    renamed = {
        ("layers.0.extra" if name == "norm.weight" else name): value for name, value in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"norm\.weight is missing; layers\.0\.extra is unexpected"):
        read_draft(folder)
    mixed = {name: value.half() if name == "fc.weight" else value for name, value in tensors.items()}
    save_file(mixed, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"weights mix torch\.float16, torch\.float32"):
        read_draft(folder)


@pytest.mark.parametrize("offsets", [[0, 0, -1], [0, 0, 60], [-1, 0, 0]])
def test_vocabulary_maps_must_ascend_within_the_vocabulary(
    make_draft: Callable[..., Any], target_weights: TargetWeights, tmp_path: Path, offsets: list[int]
) -> None:
    from safetensors.torch import load_file

    export_draft(make_draft("vanilla", 3), target_weights, tmp_path, "speculators")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"] = torch.tensor(offsets)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="ascending target ids"):
        read_draft(tmp_path)


def test_what_is_no_draft_is_said_to_be_none(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        detect(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match="expected a DSpark draft"):
        detect(tmp_path)
