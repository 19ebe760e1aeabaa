"""What one rank of a tensor-parallel group holds: how many heads, which KV heads, which rows of the vocabulary.

Pure arithmetic over a ModelConfig, a stage's own where there are several; shared by the layers, the weights and `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config.model_config import ModelConfig
from .stages import Stage


@dataclass(frozen=True, slots=True)
class RankShard:
    """Rank `rank` of `size`. Assumes shapes that models/config/shapes.py has accepted."""

    config: ModelConfig
    size: int
    rank: int
    stage: Stage | None = None
    """Where this is one of several: then `config` is its own."""

    @staticmethod
    def of(stage: Stage, size: int, rank: int) -> RankShard:
        return RankShard(stage.config, size, rank, stage if stage.count > 1 else None)

    @property
    def embeds(self) -> bool:
        """Whether it has rows of the embedding: the first stage does."""
        return self.stage is None or self.stage.first

    @property
    def samples(self) -> bool:
        """Whether it has the final norm and rows of the head: the last stage does."""
        return self.stage is None or self.stage.last

    def has_head(self, replicate_embedding: bool) -> bool:
        """Whether the head is a parameter of its own here: a tied one is the embedding, where that lies beside it."""
        return self.samples and (not self.config.tied_embeddings or replicate_embedding or not self.embeds)

    @property
    def num_heads(self) -> int:
        return self.config.num_heads // self.size

    @property
    def first_head(self) -> int:
        return self.rank * self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """At least one: with more ranks than KV heads, several ranks hold the same one."""
        return max(1, self.config.num_kv_heads // self.size)

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.config.num_kv_heads // self.size

    @property
    def kv_heads_in_all(self) -> int:
        """KV heads over all ranks, replicas counted: the fused projection's global size is made of these."""
        return self.num_kv_heads * self.size

    @property
    def ffn_size(self) -> int:
        return self.config.ffn_size // self.size

    @property
    def first_ffn(self) -> int:
        return self.rank * self.ffn_size

    @property
    def padded_vocab(self) -> int:
        return -(-self.config.vocab_size // self.size) * self.size

    @property
    def vocab(self) -> range:
        """Global ids of this rank's rows; ids from vocab_size on are padding."""
        rows = self.padded_vocab // self.size
        return range(self.rank * rows, (self.rank + 1) * rows)
