"""Reading a config.json of lanes: both dialects, every refusal with its arithmetic, and the published shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lane_checkpoints
import pytest
import torch
from laddertron.models.config.dialects import DIALECTS, DialectError, to_dialect
from laddertron.models.config.known_models import by_folder, known
from laddertron.models.config.lanes import Lanes
from laddertron.models.config.model_config import ModelConfig, from_folder
from laddertron.models.config.shapes import ShapeError, check_everywhere, check_shapes, valid_sizes
from laddertron.models.config.wiring import WiringError, choose_wiring
from laddertron.models.weights.slices import expected_shapes
from laddertron.tools.train.build import adapted
from lane_reference import LaneReference


def read(folder: Path, data: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(data))
    return from_folder(folder)


def both(**how: Any) -> list[dict[str, Any]]:
    return [lane_checkpoints.config_json(second, **how) for second in (False, True)]


def test_both_dialects_say_the_same_model(tmp_path: Path) -> None:
    first, second = (
        read(tmp_path, data)
        for data in both(
            lanes=8, delay=3, early=False, head="lane", norm_each=True, windows=(1, 2), comm=(False, False)
        )
    )
    assert (first.family, second.family) == ("laneformer_tp", "laneformer")
    assert replace(first, family="") == replace(second, family="")
    assert first.lanes == Lanes(8, 3, 7, early=False, attention=False, mlp=False, head="lane", norm_each=True)
    assert first.sliding_window == (None, 6, 6, None, None, None, None)
    assert first.wiring.name == "lanes"


def test_what_is_not_said_has_the_published_default(tmp_path: Path) -> None:
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    data = {key: lane_checkpoints.SMALL[key] for key in (*needed, "max_position_embeddings")}
    config = read(tmp_path, data | {"model_type": "laneformer_tp"})
    assert config.lanes == Lanes(1, 1, 7)
    assert (config.num_kv_heads, config.rope.theta, config.norm_eps) == (16, 10000.0, 1e-5)
    assert (config.tied_embeddings, config.sliding_window) == (False, ())


@pytest.mark.parametrize(
    ("words", "windows"),
    [
        ({"sliding_window_n_layers": -2}, (5, 6)),
        ({"sliding_window_n_layers": 3, "unclamped_layers": [1]}, (0, 2)),
        ({"sliding_window_n_layers": 0}, ()),
    ],
)
def test_windows_of_the_first_or_the_last_layers(
    tmp_path: Path, words: dict[str, Any], windows: tuple[int, ...]
) -> None:
    config = read(tmp_path, lane_checkpoints.config_json() | {"sliding_window": 6} | words)
    assert [i for i, window in enumerate(config.sliding_window) if window] == list(windows)


@pytest.mark.parametrize(
    ("second", "words", "message"),
    [
        (False, {"gate_type": "x"}, "gate_type of a laneformer is not computed here; known are attention_bias"),
        (False, {"swa_layers": [1]}, "swa_layers of a laneformer is not computed here (it belongs to the other"),
        (True, {"use_comm": True}, "use_comm of a laneformer is not computed here (it belongs to the other dialect)"),
        (True, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config of a laneformer is not"),
        (False, {"broadcast_delay": 4}, "2 x 4 + 1 = 9 sums would be in flight, the transport carries 8: at most 3"),
        (False, {"broadcast_delay": 0}, "broadcast_delay=0 must be an integer from 1"),
        (False, {"num_lanes": 3}, "num_lanes=3: 16 heads % 3 = 1, must be 0"),
        (False, {"num_lanes": 16}, "num_lanes=16: 8 key/value heads % 16 = 8, must be 0"),
        (False, {"intermediate_size": 98}, "num_lanes=4: 98 FFN % 4 = 2, must be 0"),
        (False, {"head_dim": 16}, "hidden_size=128 must be num_attention_heads=16 times head_dim"),
        (False, {"mlp_bias": True}, "mlp_bias=true is not computed here"),
        (False, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not computed here"),
        (False, {"lm_head_type": "other"}, "lm_head_type 'other' must be replicate, lane or vocab_parallel"),
        (False, {"lm_head_type": "lane", "tie_word_embeddings": True}, "tie_word_embeddings with lm_head_type 'lane'"),
        (False, {"lm_head_type": "lane", "pre_norm_lane_agg": True}, "pre_norm_lane_agg with lm_head_type 'lane'"),
        (False, {"lm_head_type": "vocab_parallel", "vocab_size": 330}, "vocab_size 330 % 4 lanes = 2, must be 0"),
        (False, {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 and norm_eps=1e-05 must be equal"),
        (False, {"sliding_window_n_layers": 9}, "sliding_window_n_layers=9 must be an integer from -7 to 7"),
        (False, {"sliding_window_n_layers": 2}, "sliding_window is missing"),
        (True, {"swa_layers": [7], "sliding_window": 6}, "swa_layers=[7] must be an integer or a list of integers"),
        (
            False,
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_type 'linear' is not what a laneformer",
        ),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, second: bool, words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        read(tmp_path, lane_checkpoints.config_json(second) | words)
    assert message in str(refused.value)


def test_keys_that_change_no_result_are_read_over(tmp_path: Path) -> None:
    neutral = {"multiple_of": 256, "depth_init": True, "use_flex_attn": True, "attn_mask_type": "block_causal"}
    neutral |= {"auto_map": {"AutoConfig": "configuration_laneformer.LaneformerTPConfig"}, "use_cache": False}
    assert read(tmp_path, lane_checkpoints.config_json() | neutral) == read(tmp_path, lane_checkpoints.config_json())


def test_the_published_model_has_as_many_parameters_as_was_published(tmp_path: Path) -> None:
    """By arithmetic, by the tensors that a folder must hold, and by the reference's on the meta device."""
    words = lane_checkpoints.PUBLISHED | {"model_type": "laneformer_tp", "sliding_window_n_layers": 10}
    config = read(tmp_path, words)
    count = 2_320_069_632
    assert config.num_parameters == count
    assert sum(torch.Size(shape).numel() for shape in expected_shapes(config).values()) == count
    with torch.device("meta"):
        model = LaneReference(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == expected_shapes(config)
    guess = by_folder("kogai--laneformer-2b-it")
    assert guess is not None
    assert guess.config == known("laneformer-2b")
    assert replace(known("laneformer-2b"), eos_token_ids=(2,), bos_token_id=1) == config


@pytest.mark.parametrize(
    "how",
    [{"head": "lane", "norm_each": True}, {"head": "vocab_parallel"}, {"sum_first": True, "norm_each": True}],
    ids=str,
)
def test_parameters_are_counted_of_every_head_and_norm(tmp_path: Path, how: dict[str, Any]) -> None:
    config = read(tmp_path, lane_checkpoints.config_json(**how))
    shapes = expected_shapes(config)
    assert config.num_parameters == sum(torch.Size(shape).numel() for shape in shapes.values())
    assert shapes == {name: tuple(p.shape) for name, p in LaneReference(config).state_dict().items()}


def test_ranks_divide_the_lanes(tmp_path: Path) -> None:
    config = read(tmp_path, lane_checkpoints.config_json(lanes=8))
    assert valid_sizes(config) == (1, 2, 4, 8)
    for tp, why in ((3, "8 lanes % 3 = 2"), (16, "8 lanes % 16 = 8")):
        with pytest.raises(ShapeError, match=f"{why}, and a lane is not divided: use 1, 2, 4 or 8"):
            check_shapes(config, tp)
    with pytest.raises(ShapeError, match="a rank adds its lanes' outputs before it sends them"):
        check_everywhere(config, 2)


def test_lanes_have_no_other_wiring(tmp_path: Path) -> None:
    config = read(tmp_path, lane_checkpoints.config_json())
    for wanted in ("standard", "ladder", "delay-2"):
        with pytest.raises(WiringError, match="these weights are lanes, whose norms and sub-blocks do not fit it"):
            choose_wiring(config, wanted, allow_untrained=True)
    silent, warnings = choose_wiring(config, "no-communication")
    assert silent.wiring.name == "no-communication"
    assert silent.lanes == config.lanes
    assert warnings
    with pytest.raises(ValueError, match="belongs to its own wiring"):
        adapted(config, silent.wiring)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_lanes_have_no_words_elsewhere(tmp_path: Path, dialect: str) -> None:
    data = lane_checkpoints.config_json()
    with pytest.raises(DialectError, match="no words in any other format"):
        to_dialect(read(tmp_path, data), data, dialect)
