"""Layer specs by name, for Megatron-LM's `--spec laddertron.models.megatron.specs ladder`. A hybrid, or a model with
normalised queries and keys, needs a module of its own that calls `ladder_spec`: docs/adapting.md."""

from .layer import ladder_spec

standard = ladder_spec("standard")
ladder = ladder_spec("ladder")
delay_2 = ladder_spec("delay-2")
delay_3 = ladder_spec("delay-3")
