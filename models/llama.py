"""One rank's share of the model: embedding, layers run by a wiring, final norm, head. ModelConfig describes how the
families differ.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..topology.comm.collectives import AloneGather, Boundary, Collective, Done, Gather, Pending
from . import residual
from .attention import AttentionBackend, StepLayout
from .config.model_config import ModelConfig
from .config.shapes import LEAVES, WHOLE, Sharing
from .cpu.attention import CpuAttention
from .cuda.fp8 import StoredProducts
from .latent import ODD_FACTOR, LatentAttention
from .latent_layer import LatentProducts, LatentWeights
from .layers import Cut, Layers, Linear, Scale, VocabEmbedding, make_layers, prepare
from .mixture import Mixture, MixtureWeights
from .ops import LaneStream, Norm, Product, RunningSum, TorchOps, Tree
from .packed import replace_parameters
from .rotary import RotaryTable
from .stages import RankShard, Stage
from .weights.load import Progress, load
from .weights.mapping import Source

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LayerWeights(nn.Module):
    """One layer's parameters on this rank, under the names that models/weights/load.py fills."""

    def __init__(self, shard: RankShard, layer: int, layers: Layers, dtype: torch.dtype) -> None:
        super().__init__()
        c, dim = shard.config, shard.config.head_dim
        outputs = (c.num_heads + 2 * shard.num_kv_heads * shard.dense_size) * dim  # replicas of KV heads counted
        self.attention_norm = Scale(c.hidden_size, dtype=dtype)
        if c.latent is not None:
            self.latent = LatentWeights(shard, layer, dtype)
        else:
            self.qkv = layers.column(c.hidden_size, outputs, c.qkv_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = Scale(dim, dtype=dtype), Scale(dim, dtype=dtype)
        if c.sinks:
            self.sinks = Scale(shard.num_heads, dtype=dtype)
        self.o = layers.row(c.num_heads * (dim if c.latent is None else c.latent.value), c.hidden_size, c.o_bias)
        if c.wiring.kinds[layer] != "parallel":
            self.mlp_norm = Scale(c.hidden_size, dtype=dtype)
        if c.has_experts(layer):
            self.experts = MixtureWeights(shard, dtype)
        if c.has_mlp(layer):
            self.gate_up = layers.column(c.hidden_size, 2 * c.ffn_size, c.mlp_bias)
            self.down = layers.row(c.ffn_size, c.hidden_size, c.mlp_bias)


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """A layer as the forward pass uses it. qkv and mlp include their norm. With latent attention qkv is its first
    product. If the parallel wiring adds both sub-blocks in one tree, o is their joint row-parallel product, and gate_up
    what the MLP has before it."""

    q_norm: Norm | None
    k_norm: Norm | None
    qkv: Product
    o: Product
    mlp: Product | None = None
    gate_up: Product | None = None
    mixture: Mixture | None = None
    latent: LatentProducts | None = None


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step's rows: token ids [T], their layout, their own attention backend (see AttentionBackend.twin),
    and the rows [R] whose logits are needed."""

    tokens: Tensor
    layout: StepLayout
    attention: AttentionBackend
    rows: Tensor


class LlamaModel(nn.Module):
    """One rank's share of the model or of a pipeline stage. Construct it, call `load`, then `forward` once per step
    (under torch.inference_mode)."""

    def __init__(
        self,
        config: ModelConfig | Stage,
        group: ProcessGroup,
        all_reduce: Collective,
        ops: TorchOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
        replicate_embedding: bool = False,
        stored: StoredProducts | None = None,
        everywhere: bool = False,
        boundary: Boundary | None = None,
        sharing: Sharing = WHOLE,
        node_reduce: Collective | None = None,
        gathers: Gather | None = None,
        keeps_states: bool = False,
    ) -> None:
        """Shapes must have passed models/config/shapes.py. positions: the longest sequence. stored: computes products
        with quantised weights. everywhere: the same bits at every group size; all_reduce must then add in a tree.
        boundary: the connection to the previous and next pipeline stage. sharing: how a model with experts is split
        over the ranks. node_reduce: sums the dense path if it is split over the ranks of a node.
        keeps_states: keeps `states`, for the layer that predicts further tokens (models/predictor.py)."""
        super().__init__()
        stage = config if isinstance(config, Stage) else Stage(config)
        self.config = config = stage.config
        self.ops, self.all_reduce, self.boundary, self.stage = ops, all_reduce, boundary, stage
        self.gathers = gathers or AloneGather()
        self.dtype = dtype
        self.shard = RankShard.of(stage, group.size(), group.rank(), sharing)
        self.dense_reduce = all_reduce if node_reduce is None else node_reduce
        self._mixed = () if config.experts is None else config.experts.layers
        self.replicate_embedding = replicate_embedding
        self.tree = Tree(LEAVES // group.size(), config.residual_multiplier) if everywhere else None
        self.stored = stored
        with torch.device("meta"):  # allocate only once every parameter has its type
            dense = Cut(self.shard.dense_size, self.shard.dense_rank) if sharing.per_node else group
            self._declare_parameters(make_layers(dense, dtype, device), make_layers(group, dtype, device))
        self.to_empty(device=device)
        self.rotary = RotaryTable(config.rope, config.rope.rotated or config.head_dim, positions, device)
        self.layer_products: dict[int, LayerProducts] = {}
        self._head: Product | None = None
        self.keeps_states = keeps_states
        self._last_norm: Product | None = None
        self.states = torch.empty(0)
        """The last step's rows [T, D] after the final norm."""
        self._attention: AttentionBackend | None = None
        self._at_once = False
        self._chosen: list[tuple[int, Tensor]] = []
        self._positions: list[Tensor] = []
        self._routing, self._earlier = blake2b(digest_size=8), b""
        self.on_rows: Callable[[Tensor], None] | None = None
        """Called once per step on CPUs with the number of rows [E] of each expert in a middle layer, for the
        metrics."""
        self.routing: Tensor | None = None
        if self._mixed and device.type == "cuda":
            self.routing = torch.zeros(1, dtype=torch.int64, device=device)

    def _declare_parameters(self, layers: Layers, head: Layers) -> None:
        config, shard, stored = self.config, self.shard, self.stored

        self.embedding: VocabEmbedding | Scale
        if shard.embeds and self.replicate_embedding:
            self.embedding = Scale(config.vocab_size, config.hidden_size, dtype=self.dtype)
        elif shard.embeds:
            self.embedding = VocabEmbedding(shard, self.dtype)
        self.layers = nn.ModuleList([self._layer_weights(i, layers) for i in range(config.num_layers)])
        if stored is not None:
            for name in stored.products:
                replace_parameters(self.get_submodule(name), stored.quantisation)
        if shard.samples:
            self.norm = self._final_norm()
        self.head: nn.Module | None = None
        if shard.has_head(self.replicate_embedding):
            self.head = head.column(self._head_inputs, shard.padded_vocab, False)

    def _layer_weights(self, layer: int, layers: Layers) -> nn.Module:
        return LayerWeights(self.shard, layer, layers, self.dtype)

    def _final_norm(self) -> Scale:
        return Scale(self.config.hidden_size, dtype=self.dtype)

    @property
    def _head_inputs(self) -> int:
        return self.config.hidden_size

    def load(self, source: Source, progress: Progress | None = None, verify: tuple[int, int] | None = None) -> int:
        """Reads this rank's slices into the parameters; returns the bytes read. Each layer is repacked as soon as it is
        complete, so at most one layer exists twice. Weights that the operators' pages already hold are not read.
        progress, verify: see weights/load.py. Raises CheckpointError."""
        pages = self.ops.pages
        filled = pages is not None and pages.filled
        read = load(
            source,
            self.shard,
            dict(self.named_parameters()),
            replicate_embedding=self.replicate_embedding,
            quantised=frozenset() if self.stored is None else self.stored.products,
            progress=progress,
            on_module=None if filled else self._prepare_layer,
            verify=verify,
            retained=self._repacked() if filled else frozenset(),
        )
        for number in pages.order if filled and pages is not None else ():
            self._prepare_layer(f"layers.{number}")
        self._prepare_head()
        return read

    @property
    def order(self) -> list[int]:
        return list(self.layer_products)

    def _repacked(self) -> set[str]:
        """Names of the parameters of which the operators hold a repacked copy."""
        names = {
            f"{module}.{name}"
            for module, linear in self.named_modules()
            if isinstance(linear, Linear)
            for name, _ in linear.named_parameters()
            if name != "bias"
        }
        return names | ({"embedding.weight"} if self.shard.samples and self.head is None else set())

    def prepare(self) -> None:
        """Passes parameters that were filled without `load` to the operators."""
        for i in range(self.config.num_layers):
            self._prepare_layer(f"layers.{i}")
        self._prepare_head()

    def _prepare_layer(self, module: str) -> None:
        number = module.removeprefix("layers.")
        if number.isdecimal():
            layer = self.layers[int(number)]
            self.layer_products[int(number)] = self._prepared(layer, f"{module}.down")

    def _prepare_head(self) -> None:
        if not self.shard.samples:
            return
        norm: Norm | None = self._norm(self.norm)
        if self.keeps_states and norm is not None:
            self._last_norm, norm = self.ops.exact.normed(norm), None
        if self.head is not None:
            self._head = prepare(self.head, self.ops.exact, norm)
        else:
            # A tied table also serves the embedding: it is held once, repacked or not.
            self._head, lookup = self.ops.exact.tied(self.embedding_table(), norm)
            if lookup is not None:
                assert isinstance(self.embedding, VocabEmbedding)
                self.embedding.repacked(lookup)

    def _prepared(self, layer: Any, down_name: str) -> LayerProducts:
        shared = getattr(layer, "mlp_norm", layer.attention_norm)  # the parallel wiring has one norm per layer
        q_norm = self._norm(layer.q_norm) if self.config.qk_norm else None
        k_norm = self._norm(layer.k_norm) if self.config.qk_norm else None
        attention_norm = self._norm(layer.attention_norm)
        latent: LatentProducts | None = None
        if self.config.latent is not None:
            qkv, latent = layer.latent.prepare(self.ops, attention_norm, self.stored)
        else:
            qkv = prepare(layer.qkv, self.ops, attention_norm, stored=self.stored)
        mixture: Mixture | None = None
        if hasattr(layer, "experts"):
            mixture = layer.experts.prepare(self.ops, self._norm(shared), self.stored)
        if not hasattr(layer, "down"):
            out = prepare(layer.o, self.ops, stored=self.stored)
            return LayerProducts(q_norm, k_norm, qkv, out, mixture=mixture, latent=latent)
        o: nn.Module = layer.o
        down: nn.Module | None = layer.down
        if self.tree is not None and shared is layer.attention_norm:
            o, down = self._joint(o, down), None
        out = prepare(o, self.ops, stored=self.stored, tree=self.tree)
        gate_up = prepare(
            layer.gate_up,
            self.ops,
            self._norm(shared),
            gated=True,
            stored=self.stored,
            quantised_output=self.stored is not None and down_name in self.stored.products,
        )
        if down is None:
            return LayerProducts(q_norm, k_norm, qkv, out, gate_up=gate_up, mixture=mixture, latent=latent)
        mlp = self.ops.joined(gate_up, prepare(down, self.ops, stored=self.stored, tree=self.tree))
        return LayerProducts(q_norm, k_norm, qkv, out, mlp, mixture=mixture, latent=latent)

    def _joint(self, *layers: Any) -> Linear:
        """Joins row-parallel layers into one, with their inputs interleaved leaf by leaf, and frees their weights."""
        assert self.tree is not None
        weights = [layer.weight.detach() for layer in layers]
        leaves = [w.view(len(w), self.tree.leaves, -1) for w in weights]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        for layer in layers:
            layer.weight.data = layer.weight.new_empty(0)
        return Linear(torch.cat(leaves, -1).flatten(1), sum(biases[1:], biases[0]) if biases else None)

    @property
    def sinks(self) -> list[Tensor]:
        """Each layer's attention sinks [H] in fp32, of loaded weights; none if the model has none."""
        layers: list[Any] = [*self.layers] if self.config.sinks else []
        return [layer.sinks.weight.detach().float() for layer in layers]

    def _norm(self, scale: Scale) -> Norm:
        return Norm(scale.weight.detach(), self.config.norm_eps)

    def embedding_table(self) -> Tensor:
        table: Tensor = self.embedding.get_parameter("weight").detach()
        return table

    def forward(self, tokens: Tensor, layout: StepLayout, attention: AttentionBackend, rows: Tensor) -> Tensor:
        """ids [T] -> this rank's logits [R, V / tp] in fp32 of the token rows [R]. A stage before the last one returns
        the residual [T, D], which it also sends to the next stage. Only the first stage reads the ids."""
        return self.forward_streams((StepPart(tokens, layout, attention, rows),))

    def forward_streams(
        self, streams: Sequence[StepPart], during_collective: Callable[[], None] | None = None
    ) -> Tensor:
        """Runs a step in streams that take turns after each sub-block, so that one computes while the other's
        all-reduce is in flight. Returns logits as `forward`, stream by stream. A stream may attend to keys that an
        earlier stream writes in this step, because its turn in each layer comes later. during_collective is called
        once, while the first sub-block's all-reduce is in flight, for host work that overlaps with it."""
        for stream in streams:
            positions = stream.layout.positions
            stream.attention.prepare(stream.layout, self.rotary.cos[positions], self.rotary.sin[positions])
        return self._run([(s.tokens, s.attention, s.rows) for s in streams], during_collective)

    def compute(
        self, tokens: Tensor, attention: AttentionBackend, rows: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """`forward` of `rows` (None: of all), after the attention backend's `prepare`. It reads only tensors of the
        step, so that it can be captured (engine/step/cuda_graphs.py). padding [T]: which rows are not in the digest of
        chosen experts."""
        return self._run([(tokens, attention, rows)], None, padding)

    def _run(
        self,
        parts: Sequence[tuple[Tensor, AttentionBackend, Tensor | None]],
        during_collective: Callable[[], None] | None,
        padding: Tensor | None = None,
    ) -> Tensor:
        # The turn after the first sub-block's: by then every stream has an all-reduce in flight. At once if the
        # wiring has no all-reduces, because the host work is due all the same.
        due = 2 if residual.collectives_per_step(self.config.wiring) else 0

        def turn(index: int, number: int) -> None:
            if self._attention is not (attention := parts[index][1]):
                self._attention = attention  # a module's attributes are slow to set
            if during_collective is not None and (index, number) == (0, due):
                during_collective()

        # A single stream waits for its all-reduces; with two streams, the other one computes meanwhile.
        self._at_once = len(parts) == 1
        ends = residual.interleave([self._flow(tokens) for tokens, _, _ in parts], turn)
        if self._chosen:
            if self.on_rows is not None and self.config.experts is not None and self.routing is None:
                middle = self._chosen[len(self._chosen) // 2][0]
                rows = torch.cat([chosen.flatten() for layer, chosen in self._chosen if layer == middle])
                self.on_rows(torch.bincount(rows, minlength=self.config.experts.count)[: self.config.experts.count])
            every = torch.cat([c for _, c in self._chosen])
            if padding is not None:
                every = every.masked_fill(padding.repeat(len(self._chosen))[:, None], -1)
            self.follow_routing(every.flatten())
            self._chosen.clear()
        if self._positions:
            self._follow_positions(torch.cat(self._positions), padding)
        if self.boundary is not None and self.shard.per_node:
            self._pass_routing(self.boundary)
        if not self.shard.samples:
            return ends[0] if len(ends) == 1 else torch.cat(ends)
        return self._logits(ends, [rows for _, _, rows in parts])

    def _logits(self, ends: Sequence[Tensor], rows: Sequence[Tensor | None]) -> Tensor:
        """Logits of the given rows of each stream's complete residual."""
        if self._last_norm is not None:
            ends = [self._last_norm(x) for x in ends]
            self.states = ends[0] if len(ends) == 1 else torch.cat(ends)
        selected = [x if index is None else x[index] for x, index in zip(ends, rows, strict=True)]
        return self.logits_of(selected[0] if len(selected) == 1 else torch.cat(selected))

    def logits_of(self, x: Tensor) -> Tensor:
        """Logits [R, V / tp] in fp32 of rows [R, D]: of the residual, or of `states` if these are kept."""
        if self._head is None:
            raise RuntimeError("forward before load")
        logits = self._head(x).float()
        return logits if self.config.logits_divisor == 1.0 else logits / self.config.logits_divisor

    def _flow(self, tokens: Tensor) -> Generator[None, None, Tensor]:
        """Computes one stream from the ids, or from what the previous stage sends, to the complete residual. Yields
        after the start of each all-reduce, first the embedding's."""
        wiring, size = self.config.wiring, self.shard.size
        pending = tuple[Pending, ...]()
        if self.boundary is None or self.shard.embeds:
            embedding = self._embed(tokens)
            yield
            x = embedding.wait()
            if self.tree is not None:
                x = x + 0.0  # turns -0 into 0, as a sum over ranks does
            x = x if self.config.embedding_multiplier == 1.0 else x * self.config.embedding_multiplier
        else:
            first, *rest = self._receive(self.boundary, len(tokens), 1 + self.stage.pending)
            borrowed = self._borrow(self.boundary, len(tokens))
            yield
            x, pending = first.wait(), tuple(rest)
            borrowed()
        # desync divides its residual, which a RunningSum does not support.
        late = self.ops.sums_late and not wiring.desync_every
        start: Any = self._running(x) if wiring.lanes is not None or late else x
        dense: residual.Scope = "node" if self.shard.per_node else "group"
        plan = residual.plan_sub_blocks(wiring, self.stage.pending, self.stage.left, self._mixed, dense)
        scopes: dict[residual.Scope, Collective] = {"group": self.all_reduce, "node": self.dense_reduce}
        end, pending = yield from residual.flow(start, plan, self, scopes, size, pending, self._at_once)
        x = end.whole() if isinstance(end, RunningSum | LaneStream) else end
        if self.boundary is not None and not self.shard.samples:
            x = self._send_to_next_stage(self.boundary, x, pending)
            chosen = self._choice()
            if self.stage.lends and chosen is not None:
                self.boundary.send(chosen.chosen.view(torch.float32))
        return x

    def _choice(self) -> LatentAttention | None:
        """The attention whose tokens attend to chosen positions; None if they attend to all."""
        attention = self._attention
        return attention if isinstance(attention, LatentAttention) and attention.sparse else None

    def _borrow(self, boundary: Boundary, tokens: int) -> Callable[[], None]:
        """Asks for the positions that the previous stage chose, if this one begins with them; returns what waits."""
        attention, latent = self._choice(), self.config.latent
        if not self.stage.borrows or attention is None or latent is None or latent.index is None:
            return lambda: None
        (received,) = boundary.receive((tokens, latent.index.topk), torch.float32, 1)

        def wait() -> None:
            attention.chosen = received.wait().view(torch.int32)

        return wait

    def _running(self, x: Tensor) -> RunningSum | LaneStream:
        return RunningSum(x)

    def _receive(self, boundary: Boundary, tokens: int, count: int) -> list[Pending]:
        return boundary.receive((tokens, self.config.hidden_size), self.dtype, count)

    def _send_to_next_stage(self, boundary: Boundary, x: Tensor, pending: Sequence[Pending]) -> Tensor:
        """Sends the residual and the pending outputs to the next stage; returns their sum."""
        boundary.send(x)
        for output in pending:
            y = output.wait()
            boundary.send(y)
            x = x + y
        return x

    def _embed(self, tokens: Tensor) -> Pending:
        if self.replicate_embedding:
            return Done(functional.embedding(tokens, self.embedding_table()))
        x = self.embedding(tokens)
        if self.config.wiring.kinds[0] == "none":
            return Done(x)
        return (self.dense_reduce if self.shard.per_node else self.all_reduce).start(x, "embedding", self._at_once)

    # The sub-blocks, as models/residual.py wires them: residual [T, D] -> partial sum [T, D].

    def attention(self, layer: int, residual: Tensor) -> Tensor:
        part, attention = self.layer_products[layer], self._attention
        if isinstance(attention, CpuAttention) and part.latent is None:
            return self._scaled(attention.sub_block(layer, residual, part.qkv, part.o, part.q_norm, part.k_norm))
        return self._scaled(part.o(self._heads(layer, part, residual)))

    def mlp(self, layer: int, residual: Tensor) -> Tensor:
        part = self.layer_products[layer]
        return self._experts(layer, residual) if part.mlp is None else self._scaled(part.mlp(residual))

    def shortcut(self, layer: int, residual: Tensor) -> Tensor:
        return self._experts(layer, residual)

    def _experts(self, layer: int, residual: Tensor) -> Tensor:
        mixture = self.layer_products[layer].mixture
        assert mixture is not None
        return self._scaled(mixture(residual, partial(self._note, layer)))

    def _note(self, layer: int, chosen: Tensor) -> None:
        # NOTE: with desync each rank routes by its own residual, so the experts may differ between ranks.
        if not self.config.wiring.drifts:
            self._chosen.append((layer, chosen))

    def follow_routing(self, chosen: Tensor) -> None:
        """Adds a step's chosen experts to the digest of `routed`; on a GPU by operators that can be captured."""
        if self.routing is None:
            self._routing.update(chosen.to(torch.int16).numpy().tobytes())
            return
        factors = torch.arange(1, len(chosen) + 1, device=chosen.device).mul_(ODD_FACTOR)
        factors.bitwise_xor_(factors >> 29).mul_(ODD_FACTOR).bitwise_or_(1)
        self.routing.add_(factors.mul_(chosen + 1).sum())

    def _follow_positions(self, digests: Tensor, padding: Tensor | None) -> None:
        """Adds the digests [layers * T] of the positions that a step's layers chose to the digest of `routed`."""
        self._positions.clear()
        if self.routing is None:
            self._routing.update(digests.numpy().tobytes())
            return
        layers = 1 if padding is None else len(digests) // len(padding)
        places = torch.arange(1, len(digests) + 1, device=digests.device).mul_(2).add_(1).mul_(digests)
        self.routing.add_((places if padding is None else places.masked_fill(padding.repeat(layers), 0)).sum())

    def routed(self) -> bytes:
        """A digest of the experts and positions chosen for all rows so far. It must be equal on all ranks: otherwise
        rows of an expert were computed twice or not at all. With a dense path per node, the digests of the previous
        stages come first. On a GPU the digest is `routing`, which is copied to the host."""
        if self.routing is not None:
            return self.routing.cpu().numpy().tobytes()
        return self._earlier + self._routing.digest()

    def _pass_routing(self, boundary: Boundary) -> None:
        """Sends the digests of this and the previous stages to the next one; the last stage's ranks compare them."""
        if not self.shard.embeds:
            (earlier,) = boundary.receive((self.stage.index, 2), torch.float32, 1, own=True)
            self._earlier = earlier.wait().numpy().tobytes()
        if not self.shard.samples:
            boundary.send(torch.frombuffer(bytearray(self.routed()), dtype=torch.float32), own=True)

    def attention_and_mlp(self, layer: int, residual: Tensor) -> Tensor:
        if self.tree is None:
            return self.attention(layer, residual) + self.mlp(layer, residual)
        part = self.layer_products[layer]
        assert part.gate_up is not None
        inputs = self._heads(layer, part, residual), part.gate_up(residual)
        return part.o(torch.cat([x.view(len(x), self.tree.leaves, -1) for x in inputs], -1).flatten(1))

    def sum_of_lanes(self, output: Tensor) -> Tensor:
        raise AssertionError("models/lanes.py has lanes")

    def of_others(self, total: Tensor, output: Tensor) -> Any:
        raise AssertionError("models/lanes.py has lanes")

    def _heads(self, layer: int, part: LayerProducts, residual: Tensor) -> Tensor:
        if self._attention is None:
            raise RuntimeError("attention outside of forward")
        x = part.qkv(residual)
        if part.latent is not None:
            return part.latent(self._attention, layer, x, residual, self._positions.append)
        return self._attention.attend(layer, x, part.q_norm, part.k_norm)

    def _scaled(self, partial: Tensor) -> Tensor:
        """Applies the residual multiplier, unless a tree scales its leaves."""
        m = self.config.residual_multiplier
        return partial if m == 1.0 or self.tree is not None else partial * m
