"""`plan` of mixtures of experts: shapes, memory, experts read, messages between nodes, and the table of layouts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner
from laddertron.engine.config.load import read
from laddertron.engine.step.memory import MemoryKeys
from laddertron.launchers.cli.__main__ import group
from laddertron.launchers.cli.commands.check import model_faults
from laddertron.models.config.json_fields import ConfigFields
from laddertron.models.config.known_models import by_folder, known
from laddertron.models.config.model_config import from_folder
from laddertron.models.config.parts import make_wiring
from laddertron.models.config.quantisation import quantisation_in
from laddertron.models.config.shapes import Sharing
from laddertron.models.residual import flow, plan_sub_blocks
from laddertron.models.stages import RankShard
from laddertron.tools.plan.estimate import CapacityEstimate, group_in, make_plan
from laddertron.tools.plan.layouts import Devices, Work, hop
from laddertron.tools.plan.memory import StoredTypes, memory
from laddertron.tools.plan.mixtures import BATCHES, MixtureLayout, best_of, messages_of
from laddertron.tools.plan.plan_source import Asked, from_deployment, from_names
from laddertron.tools.plan.roofline import Links, cpu_rates, distinct_experts, most_on_a_rank
from laddertron.tools.plan.step_simulator import StepCost, Wire, simulate_step
from laddertron.topology.cost.cost import Shape
from laddertron.topology.hardware.presets import preset

BIG = "qwen3-235b-a22b"
SPREAD = Sharing(True, 8)
TP16 = ("parallel.tensor_parallel_size=16",)


def planned(name: str, fabric: str) -> CapacityEstimate:
    return make_plan(from_names(name, Asked(preset(fabric), Work())))


def by_name(name: str, fabric: str) -> dict[str, MixtureLayout]:
    return {x.name: x for x in planned(name, fabric).mixtures}


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("qwen3-30b-a3b", 30.53, 3.35),
        (BIG, 235.09, 22.19),
        ("qwen3-coder-480b", 480.15, 35.5),
        ("mixtral-8x22b", 140.63, 39.16),
        ("glm-4.6", 352.8, 33.3),  # published: 357 with the layer for multi-token prediction, about 32 active
        ("deepseek-v3", 671.03, 37.55),
        ("kimi-k2", 1026.41, 32.86),
        ("gpt-oss-20b", 20.91, 4.19),  # published: 3.61 and 5.13 active, the embedding's 0.58 not counted
        ("gpt-oss-120b", 116.83, 5.71),
        ("longcat-flash", 560.66, 32.2),  # published: at most 31.3, the embedding not counted
    ],
)
def test_published_sizes(name: str, billions: float, active: float) -> None:
    """All parameters, and those that one token reads."""
    config = known(name)
    e = config.experts
    assert e is not None
    idle = sum(e.layers) * (e.count - e.chosen) * 3 * config.hidden_size * e.ffn_size
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert (config.num_parameters - idle) / 1e9 == pytest.approx(active, rel=0.02)


def test_memory_of_a_rank_by_hand() -> None:
    """Qwen3-235B on 2 x 8: spread deals 8 whole experts to a rank and cuts attention in 8 (4 KV heads are held twice);
    flat cuts all in 16. The head is cut in 16 in both."""
    d, layers, vocabulary = 4096, 94, 151936
    for sharing, cut, kv in ((SPREAD, 8, 1), (Sharing(), 16, 1)):
        parts = memory(known(BIG), 16, StoredTypes(), MemoryKeys(), 85 << 30, 1, sharing).parts
        heads = 64 // cut
        assert parts["weights: experts"] == 2 * layers * 8 * 3 * d * 1536
        assert parts["weights: attention"] == 2 * layers * 128 * d * (heads + 2 * kv + heads)
        assert parts["weights: router"] == 2 * layers * 128 * d
        assert parts["weights: embedding"] == 2 * d * vocabulary // cut
        assert parts["weights: head"] == 2 * d * vocabulary // 16
        assert parts["weights: MLP"] == 0


def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3 in fp8: every rank has the products that heads share whole and its heads' share of the others, and
    of the expanded ones in bf16; a position's cache is 576 values a layer, however many ranks there are."""
    d, layers, heads = 7168, 61, 8
    stored = from_names("deepseek-v3", Asked(preset("2x8xH100"), Work(), True)).stored
    parts = memory(known("deepseek-v3"), 16, stored, MemoryKeys(), 85 << 30).parts
    shared, queries, out = d * (1536 + 576), heads * 192 * 1536, heads * 128 * d
    assert parts["weights: attention"] == layers * (shared + queries + out + 2 * heads * 256 * 512)
    inner, scales = 256 * 3 * d * 128, 256 * 4 * (256 * (d // 128) + d)
    assert parts["weights: experts"] == 58 * (inner + scales + 3 * d * 128 + 4 * 3 * d)
    assert parts["weights: MLP"] == 3 * 3 * d * 18432 // 16
    dense = layers * (shared + queries + out) + parts["weights: MLP"]
    norms = 2 * (d * (2 * layers + 1) + layers * (512 + 1536))
    assert parts["weights: norms, biases, scales"] == norms + 4 * dense // 128
    for ranks in (1, 16):
        assert memory(known("deepseek-v3"), ranks, stored, MemoryKeys(), 85 << 30).kv_bytes_per_token == 70_272


def test_a_cpu_has_room_for_expanded_prompts() -> None:
    """The keys' projection a second time, and one sequence's keys and values in a layer; none under `deterministic`."""
    keys = MemoryKeys(gpu=False, max_model_len=8192)
    expanding, absorbed = (
        memory(known("deepseek-v3"), 16, StoredTypes(), replace(keys, deterministic=on), 1 << 40).parts
        for on in (False, True)
    )
    more = {name: expanding[name] - absorbed[name] for name in expanding if expanding[name] != absorbed[name]}
    assert more == {"weights: attention": 2 * 61 * 8 * 128 * 512, "activations": 8192 * 2 * (8 * 640 + 576)}


def test_deepseek_v3_needs_two_nodes_and_fp8() -> None:
    """On 2 x 8 H100 bf16 is refused with the arithmetic and fp8 fits; H200s have room for both."""
    verdicts = {
        (gpu, form): make_plan(from_names(f"deepseek-v3-{form}", Asked(preset(f"2x8x{gpu}"), Work()), TP16))
        for gpu in ("H100", "H200")
        for form in ("bf16", "fp8")
    }
    assert [room.memory.fits for room in verdicts.values()] == [False, True, True, True]
    assert "a rank needs" in verdicts["H100", "bf16"].memory.verdict
    messages = {x.name: x.messages for x in verdicts["H100", "fp8"].mixtures}
    assert (messages["flat"], messages["spread"]) == (122, 58)


def test_fp8_experts_are_wide_where_no_kernel_reads_them() -> None:
    """On A100 all products are bf16; tp 32 leaves a rank 64 columns of 2048, which is half a block; tp 64 a quarter."""
    bf16, d = StoredTypes(), 7168
    config = known("deepseek-v3")
    shards = {n: RankShard(config, n, 0) for n in (16, 32, 64)}
    on = {gpu: from_names("deepseek-v3", Asked(preset(f"2x8x{gpu}"), Work(), True)).stored for gpu in ("A100", "H100")}
    assert on["A100"].expert_bytes(shards[16]) == bf16.expert_bytes(shards[16]) == 2 * 256 * 3 * d * 128
    assert on["H100"].expert_bytes(shards[32]) == 256 * (3 * d * 64 + 4 * (128 * (d // 128) + d))
    assert on["H100"].expert_bytes(shards[64]) == 256 * (3 * d * 32 + 4 * (64 * (d // 128) + d))
    assert (on["A100"].keeps_dense, on["H100"].keeps_dense) == (False, True)


def test_what_is_published_in_4_bits_is_planned_so() -> None:
    """Kimi-K2.5: experts have half a byte a weight and a scale of two bytes for 32, the rest is bf16; on 2 x 8 H100 it
    fits. A GPU without fp8 multiplies INT4, too."""
    d, config = 7168, known("kimi-k2.5")
    for gpu in ("H100", "A100"):
        question = from_names("kimi-k2.5", Asked(preset(f"2x8x{gpu}"), Work()), TP16)
        assert question.stored.weights == "int4"
        assert question.stored.expert_bytes(RankShard(config, 16, 0)) == 384 * 3 * d * 128 * 9 // 16
        parts = make_plan(question).memory.parts
        assert parts["weights: MLP"] == 2 * 3 * d * 18432 // 16
        assert parts["weights: experts"] == 60 * (384 * 3 * d * 128 * 9 // 16 + 2 * 3 * d * 128)
        assert make_plan(question).memory.fits


def test_gpt_oss_is_planned_as_published(tmp_path: Path) -> None:
    """The architecture is that of the published config.json, its experts take 4.5 bits a weight, and 120b fits on one
    H100. Over 16 ranks 180 columns share no scale of 32 that a kernel reads: whole experts stay packed there."""
    layers = ["sliding_attention", "full_attention"] * 18
    words = {
        "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": layers, "num_attention_heads": 64,
        "max_position_embeddings": 131072, "num_experts_per_tok": 4, "num_hidden_layers": 36, "vocab_size": 201088,
        "num_key_value_heads": 8, "num_local_experts": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(words))
    read, config = from_folder(tmp_path), known("gpt-oss-120b")
    assert replace(read, rope=replace(read.rope, attention_factor=None)) == config
    question = from_names("gpt-oss-120b", Asked(preset("1x8xH100"), Work()), ("parallel.tensor_parallel_size=1",))
    assert question.stored.form == quantisation_in(ConfigFields("", words))
    assert question.stored.expert_bytes(RankShard(config, 1, 0)) == 128 * 3 * 2880 * 2880 * 9 // 16
    assert make_plan(question).memory.fits
    whole, cut = (question.stored.expert_bytes(RankShard(config, 16, 0, None, spread)) for spread in (True, False))
    assert (whole, cut) == (8 * 3 * 2880 * 2880 * 9 // 16, 128 * 2880 * 180 * (2 * 9 / 16 + 2))


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_fp8_fits_on_two_nodes_with_and_without_stages(name: str) -> None:
    asked, folder = Asked(preset("2x8xH100"), Work(), True), {"deepseek-v3.2": "DeepSeek-V3.2"}.get(name, "GLM-5-FP8")
    flat = from_names(name, asked, TP16)
    assert make_plan(flat).memory.fits
    assert memory(flat.config, 8, flat.stored, flat.keys, 85 << 30, 2).fits
    guess = by_folder(folder)
    assert guess is not None
    assert (guess.name, guess.form) == (name, flat.stored.form)


def test_the_form_that_is_published_is_planned() -> None:
    """Unless the name says bf16."""
    asked = Asked(preset("2x8xH100"), Work())
    forms = {name: from_names(name, asked).stored.weights for name in ("deepseek-v3", "deepseek-v3-bf16", "kimi-k2.5")}
    assert forms == {"deepseek-v3": "fp8", "deepseek-v3-bf16": "bfloat16", "kimi-k2.5": "int4"}


def test_the_shortcuts_sums_alone_cross_nodes() -> None:
    """LongCat on 2 x 8: 28 messages between nodes in place of 140, which a step feels; no other wiring is offered."""
    plan = make_plan(from_names("longcat-flash", Asked(preset("2x8xH100"), Work(), True), TP16))
    found = {x.name: x for x in plan.mixtures}
    assert (found["flat"].messages, found["spread"].messages) == (140, 28)
    assert {x.wiring.name for x in plan.layouts} == {"shortcut"}
    by_name = {p.wiring: p.time for p in plan.predictions if p.batch == 1}
    spread, flat = (found[name].step_s[0] for name in ("spread", "flat"))
    assert spread is not None
    assert flat is not None
    assert spread < 0.85 * flat
    assert by_name["no-communication"].compute_s == pytest.approx(by_name["shortcut"].compute_s, rel=0.01)
    assert any("three sub-blocks later" in sentence for sentence in plan.recommendation)


def test_experts_read_are_those_of_all_choices_enumerated() -> None:
    """Four experts of which each of two rows chooses one: 1.75 are read on average; the busier of two ranks with two
    experts each, chosen with probability p independently, reads the mean of the larger of both counts."""
    seen = [len(set(rows)) for rows in product(range(4), repeat=2)]
    assert distinct_experts(4, 1, 2) == pytest.approx(sum(seen) / len(seen))
    p, expected = 0.3, 0.0
    for bits in product((0, 1), repeat=4):
        chance = 1.0
        for bit in bits:
            chance *= p if bit else 1 - p
        expected += chance * max(sum(bits[:2]), sum(bits[2:]))
    assert most_on_a_rank(2, p, 2) == pytest.approx(expected)


class _Sums:
    """Counts sums by scope where the engine would start them."""

    def __init__(self, counts: Counter[str], scope: str) -> None:
        self.counts, self.scope = counts, scope

    def start(self, x: float, account: str = "", at_once: bool = False, /) -> _Sums:
        self.counts[self.scope] += 1
        return self

    def wait(self) -> float:
        return 0.0


class _Blocks:
    def attention(self, layer: int, residual: float) -> float:
        return residual

    mlp = attention_and_mlp = attention

    def sum_of_lanes(self, output: float) -> float:
        return output

    def of_others(self, total: float, output: float) -> float:
        return total


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
@pytest.mark.parametrize(("name", "flat", "spread"), [(BIG, 188, 94), ("glm-4.6", 184, 89)])
def test_messages_are_those_that_a_recorder_counts(name: str, wiring: str, flat: int, spread: int) -> None:
    """The engine's loop run over the plan of each layout: what crosses nodes is what the table says."""
    config = known(name)
    assert config.experts is not None
    wired = make_wiring(wiring, config.num_layers)
    for sharing, crossing in ((Sharing(), flat), (SPREAD, spread)):
        counts: Counter[str] = Counter()
        blocks = plan_sub_blocks(wired, mixed=config.experts.layers, dense="node" if sharing.per_node else "group")
        sums = {"group": _Sums(counts, "group"), "node": _Sums(counts, "node")}
        for _ in flow(1.0, blocks, _Blocks(), sums, 16):  # type: ignore[arg-type]
            pass
        assert counts["group"] == messages_of(config, wired, sharing) == crossing
        assert counts["node"] == flat - crossing
    table = by_name(name, "2x8xH100")
    assert [table[x].messages for x in ("flat", "spread", "pp", "pp x spread")] == [flat, spread, 1, 1]
    assert table["spread"].sent[0] == pytest.approx(table["flat"].sent[0] * spread / flat)


def test_sums_inside_a_node_neither_cross_nor_queue() -> None:
    """Attention's sum takes the node's wire. In ladder it does not wait behind the experts' sum, which has the other
    wire for five times as long as a sub-block computes."""
    layers = 10
    cost = StepCost([1.0] * layers, [1.0] * layers, Wire(2.0), mixed=(True,) * layers, node=Wire(0.25))
    flat = StepCost([1.0] * layers, [1.0] * layers, Wire(2.0), mixed=(True,) * layers)
    standard = make_wiring("standard", layers)
    assert simulate_step(cost, standard, 16).total_s == pytest.approx(layers * (1 + 0.25 + 1 + 2))
    assert simulate_step(flat, standard, 16).total_s == pytest.approx(layers * (1 + 2 + 1 + 2))
    ladder = make_wiring("ladder", layers)
    # A pair of sub-blocks waits for the experts' sum alone: attention hides one second of its two.
    assert simulate_step(cost, ladder, 16).total_s == pytest.approx(layers * (1 + 1 + 1), abs=1.5)
    assert simulate_step(flat, ladder, 16).total_s > 1.3 * simulate_step(cost, ladder, 16).total_s


def test_a_hop_between_cpus_takes_what_its_links_take() -> None:
    """An all-reduce of two is a message each way at once. Between GPUs it is NCCL's price."""
    wires = Links(lambda size: Wire(1e-3 + size * 1e-9), lambda size: "exchange", "")
    devices = Devices(
        2,
        1,
        1 << 30,
        False,
        lambda kind: cpu_rates(preset("2x1xcpu").nodes[0], 1),
        lambda n, each: wires,
        Shape,
        gpu=False,
    )
    config = known("qwen3-30b-a3b")
    assert hop(config, devices, StoredTypes(), 1, 2)(8) == pytest.approx(1e-3 + 8 * 2048 * 2e-9)
    assert hop(config, replace(devices, gpu=True), StoredTypes(), 1, 2)(8) < 1e-3
    assert hop(config, devices, StoredTypes(), 1, 1)(8) == 0.0


def test_one_node_is_the_answer_where_it_has_room() -> None:
    """Qwen3-235B in bf16 fits 8 x 80 GB, GLM-4.6 does not."""
    assert "It fits on one node: tp 8" in planned(BIG, "2x8xH100").recommendation[0]
    plan = planned("glm-4.6", "2x8xH100")
    assert not any("fits on one node" in said for said in plan.recommendation)
    assert {x.step_s for x in plan.mixtures if x.name.startswith("one node")} == {(None,) * len(BATCHES)}


def test_what_cannot_be_is_refused_with_the_arithmetic() -> None:
    """Eight experts over sixteen ranks; `tensor, node` is offered in place of spread."""
    table = by_name("mixtral-8x22b", "2x8xH100")
    assert "8 experts < 16 ranks" in table["spread"].refused
    assert table["tensor, node"].messages == 56


def test_the_quickest_is_one_that_is_built() -> None:
    """Spread is never chosen over GPUs, where its backend is missing; on CPUs it is."""
    gpus, cpus = by_name(BIG, "2x8xH100"), by_name("qwen3-30b-a3b", "2x16xcpu")
    assert not gpus["spread"].built
    assert cpus["spread"].built
    assert best_of(tuple(cpus.values()), 0) is not None
    for found in (tuple(gpus.values()), tuple(cpus.values())):
        for i in range(len(BATCHES)):
            best = best_of(found, i)
            if best is not None:
                offers = [x.step_s[i] for x in found if x.built and x.step_s]
                assert best.built
                assert best.step_s[i] == min(t for t in offers if t is not None)


def deployment(tmp_path: Path, parallel: str) -> Path:
    file = tmp_path / "d.yaml"
    file.write_text(
        f"model:\n  path: /models/Qwen3-235B-A22B\n  max_model_len: 4096\nparallel: {{tensor_parallel_size: 16, "
        f"{parallel}}}\nlaunch: {{ranks_per_node: 8}}\n"
    )
    return file


def test_a_deployment_is_planned_and_checked_as_it_shares_experts(tmp_path: Path) -> None:
    """Spread: the plan's own memory and traffic are the table's. Spread over nodes with dense_path whole: refused."""
    asked = Asked(preset("2x8xH100"), Work())
    plan = make_plan(from_deployment(read(deployment(tmp_path, "expert_layout: spread, dense_path: node")), asked))
    assert plan.question.sharing == SPREAD
    assert {t.inter_bytes for t in plan.traffic if (t.wiring, t.batch) == ("standard", 1)} == {
        next(x.sent[0] for x in plan.mixtures if x.name == "spread")
    }
    loaded = read(deployment(tmp_path, "expert_layout: spread"))
    faults = list(model_faults(loaded, look=False))
    assert len(faults) == 1
    assert "every all-reduce would cross 2 nodes" in faults[0]
    assert not list(model_faults(read(deployment(tmp_path, "expert_layout: tensor")), look=False))


def test_the_table_as_plan_prints_it() -> None:
    """Golden lines: names, weights of a rank, messages and bytes, in 80 columns."""
    done = CliRunner().invoke(group, ["plan", "--model", BIG, "--nodes", "2x8xH100"])
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()[:-4]) for line in done.output.splitlines()]
    for golden in (
        "flat 27.6 188 44.1 MiB",
        "spread 28.4 94 22 MiB",
        "pp 27.5 1 128 KiB",
        "pp x spread 27.5 1 128 KiB",
        "one node 54.9 0 0 B",
    ):
        assert golden in lines
    assert max(map(len, done.output.splitlines())) <= 80


def test_context_parallelism_of_latents_is_priced() -> None:
    """DeepSeek-V3 on eight H200: of 64 sequences of 2,048 positions gathered queries and reduced outputs cost more than
    reading an eighth of the latents saves; what it saves grows with the context, what it costs does not. Keys of a
    dense model are divided by heads: nothing to price."""
    asked = Asked(preset("1x8xH200"), Work(), True)
    question = from_names("deepseek-v3", asked)
    plan, rates = make_plan(question), group_in(question).rates
    price = plan.context_parallel
    assert price is not None
    assert price.saves_s < price.costs_s
    assert price.pays_from == 8192
    unread = 61 * 64 * 2048 * 576 * 2 / rates.kv_bytes_per_s * 7 / 8
    assert 0.9 * unread < price.saves_s <= unread  # an eighth takes longer to compute than to read
    assert any("decode context parallelism, not built" in sentence for sentence in plan.recommendation)
    assert make_plan(from_names("llama-3.1-8b", asked)).context_parallel is None
