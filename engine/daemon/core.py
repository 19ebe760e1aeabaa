"""The services that batches and routes use; made once by the daemon (service.py) or a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config.schema import LimitsConfig
from ..metrics.observer import Observer
from ..text.pool import TextPool
from ..text.tokenizer import TextModel
from .dispatch import Dispatcher
from .retained import RetainedResponses
from .store.store import Store
from .usage import Usage


@dataclass(frozen=True, slots=True)
class Core:
    store: Store
    dispatcher: Dispatcher
    text: TextModel
    encoder: TextPool
    observer: Observer
    usage: Usage
    limits: LimitsConfig
    served_model_name: str
    deduplicate: bool
    """Whether equal lines of a batch are computed once (`batch.deduplicate`)."""
    model_digest: Callable[[], str]
    """Returns the digest of the model in service; "" while replicas have different models or it is unknown."""
    retained: RetainedResponses | None
    """None without `daemon.responses_retention`."""
