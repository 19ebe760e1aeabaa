"""Whether a model fits and how fast it will be, by arithmetic; and a simulator of a step."""
